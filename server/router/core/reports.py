"""What was seen of one turn, from its request to its end: the one account behind the log line, the span and the live page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bidikv.headers import ReuseHeader
    from bidikv_server.router.core.choices import Mode, ModeReason, Placement, PrefillChoice
    from bidikv_server.router.core.engines import Role
    from bidikv_server.router.core.ids import ConversationKey, EngineUrl

OK: Final = "ok"
"""Outcome of a turn that ended cleanly, and of such a leg."""
_MODEL_CHARACTERS: Final = 128


@dataclass(frozen=True, slots=True)
class LegReport:
    """One leg.

    Attributes:
        role: Which half of the turn.
        engine: Where it ran.
        outcome: `ok`, `refused`, `cancelled` or the cause of its failure.
        seconds: How long it took.
    """

    role: Role
    engine: EngineUrl
    outcome: str
    seconds: float


@dataclass(frozen=True, slots=True)
class TurnReport:
    """One turn. What a turn did not live to see is None.

    It holds nothing that a client wrote but the model's name: no text, no session name, no credential.

    Attributes:
        request_id: As in the answer's header.
        path: Endpoint.
        outcome: `ok`, or the cause of the failure, as `bidikv_router_failed_turns_total` and error bodies have it.
        status: Status of the answer, if one was sent.
        seconds: From the first look at the request to the end of the answer.
        queued_s: Of that, waiting for other turns.
        conversation: Its conversation's key.
        tenant: Name of its tenant; None while no API keys are configured.
        model: As the client named it.
        identity: Convention that named the conversation.
        reuse: What became of the prompt.
        placement: Why it was decoded where it was.
        prefill_choice: Why the prompt was computed where it was.
        mode: How it got its prompt's KV.
        mode_reason: Why in that way.
        prefill: Engine that computed the prompt; None when decode did it alone.
        decode: Engine that answered.
        ttft_s: From the whole request to the first byte of the answer's body.
        legs: Every leg, in the order in which they ended.
        response_id: The engine's id of the answer; known only while turns are traced, like the next one.
        output_tokens: Generated tokens, if the engine said.
        trace_id: Of its span; None while turns are not traced.
    """

    request_id: str
    path: str
    outcome: str
    status: int | None
    seconds: float
    queued_s: float
    conversation: ConversationKey | None = None
    tenant: str | None = None
    model: str | None = None
    identity: str | None = None
    reuse: ReuseHeader | None = None
    placement: Placement | None = None
    prefill_choice: PrefillChoice | None = None
    mode: Mode | None = None
    mode_reason: ModeReason | None = None
    prefill: EngineUrl | None = None
    decode: EngineUrl | None = None
    ttft_s: float | None = None
    legs: tuple[LegReport, ...] = ()
    response_id: str | None = None
    output_tokens: int | None = None
    trace_id: str | None = None


def fields(report: TurnReport) -> dict[str, Any]:
    """The report as plain values by name, for a log line or JSON; what is not known is left out."""
    return {name: value for name, value in _named(report) if value is not None}


def readable_model(model: str) -> str:
    """A client's name of a model, fit for one line: printable, and no longer than names are."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in model[:_MODEL_CHARACTERS])


def _named(report: TurnReport) -> Iterator[tuple[str, Any]]:
    yield "request_id", report.request_id
    yield "path", report.path
    yield "outcome", report.outcome
    yield "status", report.status
    yield "conversation", report.conversation
    yield "tenant", report.tenant
    yield "model", report.model
    yield "identity", report.identity
    if (reuse := report.reuse) is not None:
        yield "reason", str(reuse.reason)
        yield "prompt_tokens", reuse.prompt_tokens
        yield "remote_tokens", reuse.remote_tokens
        yield "local_tokens", reuse.local_tokens
        yield "computed_tokens", reuse.computed_tokens
        yield "diverged_at_token", reuse.diverged_at_token
    for name in ("placement", "prefill_choice", "mode", "mode_reason"):
        choice = getattr(report, name)
        yield name, str(choice) if choice is not None else None
    yield "prefill", report.prefill
    yield "decode", report.decode
    yield "ttft_s", _rounded(report.ttft_s)
    yield "queued_s", _rounded(report.queued_s)
    yield "seconds", _rounded(report.seconds)
    yield (
        "legs",
        [
            {
                "leg": str(leg.role),
                "engine": leg.engine,
                "outcome": leg.outcome,
                "seconds": _rounded(leg.seconds),
            }
            for leg in report.legs
        ],
    )
    yield "output_tokens", report.output_tokens
    yield "trace_id", report.trace_id


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
