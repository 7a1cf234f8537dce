"""One generation on its way: what is added to it before it goes out, and what is learnt from its answer."""

from __future__ import annotations

import logging
import sys
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import openai

from bidikv.errors import DriftError, DriftWarning
from bidikv.fidelity import Answer, answer_in
from bidikv.headers import TURN_HEADER, TurnHeader
from bidikv.hints import Hint
from bidikv.identity import Identity, find_header, headers_for, resolve, turn_header
from bidikv.marks import MAPPING
from bidikv.reuse import TurnReport, account_in, announce, is_raw, remember, watch_stream

if TYPE_CHECKING:
    from collections.abc import Callable

    from bidikv.items import ItemsAnswer
    from bidikv.memory import Reviewed
    from bidikv.options import Settings

log = logging.getLogger(__name__)

_NO_HINT: Final = Hint()
_NOT_COMPARED: Final = frozenset({"aux", "compaction"})
"""Kinds of calls that stand beside a conversation, or begin its history anew."""


@dataclass(slots=True)
class Call:
    """One logical call; its retries are the same call.

    Attributes:
        options: What to send. The caller's own are left as they were.
        settings: Of the client.
        identity: Whose turn it is.
        report: What is known of it.
        body: The caller's body, as far as it is compared.
        compared: Whether its history is to be compared with those before.
        freezes: Whether the conversation's first system message is repeated.
        started_s: On this process's `perf_counter`.
        hint: What its turn's header is made from; None if it is the caller's own, or there is no turn.
        headers: What each of its requests says beside the caller's own headers.
        fitted: Its history has been looked at.
        reviewed: How its history relates to those before; None if it has none, or nobody to compare with.
        changes: Fields of the options to send in place of the caller's.
    """

    options: Any
    settings: Settings
    identity: Identity
    report: TurnReport
    body: Mapping[str, Any]
    compared: bool
    freezes: bool
    started_s: float
    hint: Hint | None
    headers: dict[str, str]
    fitted: bool = False
    reviewed: Reviewed | None = None
    changes: dict[str, Any] | None = None

    def fit(self, request: Any) -> dict[str, Any] | None:
        """Look at the history as it is about to be sent, and describe the turn; once, whatever the number of tries.

        Returns:
            Fields of the options with which the request is to be built anew; None if it is as it should be.

        Raises:
            DriftError: The history has changed, and the client was told to raise.
        """
        if not self.fitted:
            self.fitted = True
            try:
                if self.compared and self.reviewed is None:
                    self.review(request.content)
                if self.hint is not None:
                    self._describe()
            except Exception:
                log.exception("the history of a call cannot be compared; the call goes out as it came")
                return None
            self._judge()
        return self.changes

    def tell(self, request: Any) -> Any:
        """The request, with what the call says of itself."""
        for name, value in self.headers.items():
            request.headers[name] = value
        return request

    def received(self, response: Any) -> None:
        """Keep what an HTTP response says of the turn."""
        self.report.told, self.report.key = account_in(response.headers)

    def review(self, content: bytes | None = None) -> None:
        """Compare the history with those before it, and find what has to be spelt otherwise.

        Args:
            content: The body as it is sent, if it has been spelt out.
        """
        self.reviewed = reviewed = self.settings.memory.review(
            str(self.identity.session),
            self.body,
            restore=self.settings.restore,
            freeze_system=self.freezes,
            content=content,
        )
        if reviewed is None:
            return
        self.report.drift, self.report.restored = reviewed.drift, reviewed.restored
        if reviewed.changes:
            options, extra = self.options, self.options.extra_json or {}
            body = options.json_data if isinstance(options.json_data, Mapping) else {}
            # Where a field stands in both, the caller's extra one is what is sent.
            in_extra = {name: value for name, value in reviewed.changes.items() if name in extra}
            in_body = {name: value for name, value in reviewed.changes.items() if name not in extra}
            self.changes = {"json_data": {**body, **in_body}}
            if in_extra:
                self.changes["extra_json"] = {**extra, **in_extra}

    def _describe(self) -> None:
        answers = None if self.reviewed is None else self.reviewed.history.answers
        turn = turn_header(self.identity.conversation, self.body, self.hint, answers)
        self.report.index, self.headers[TURN_HEADER] = turn.index, turn.format()

    def _judge(self) -> None:
        """Do what the client was told to do about changed history."""
        drift = self.report.drift
        if drift is None or not drift.breaks_prefix:
            return
        if self.settings.on_drift == "raise":
            raise DriftError(drift)
        if self.settings.on_drift == "warn":
            warnings.warn(str(drift), DriftWarning, stacklevel=_callers_level())
        elif callable(self.settings.on_drift):
            self.settings.on_drift(drift)

    def answered(self, response: Any, client: Any) -> Any:
        """Learn from an answer, and return it."""
        try:
            self._learn(response, client)
        except Exception:
            log.exception("what was learnt from an answer is lost; the answer is not")
        return response

    def _learn(self, response: Any, client: Any) -> None:
        report = self.report
        remember(response, report)
        announce(report)
        parsed = response
        if is_raw(response):
            parsed = _parsed(response)
            remember(parsed, report)
        session, memory, reviewed = self.identity.session, self.settings.memory, self.reviewed
        streams = watch_stream(parsed, report, self.started_s, self._generated)
        if session is not None and reviewed is not None:
            answer = None if streams else answer_in(parsed)
            memory.answered(session, reviewed, self.body, answer, key=report.key, freeze_system=self.freezes)
        elif session is not None and report.key is not None:
            memory.held(session, report.key)
        if (conversation := self.identity.conversation) is not None:
            conversation.turns.append(report)
            if report.key is not None:
                conversation.links().add(report.key, client)

    def _generated(self, answer: Answer | ItemsAnswer) -> None:
        if self.identity.session is not None and self.reviewed is not None:
            self.settings.memory.generated(self.identity.session, self.reviewed, answer)


def begin(options: Any, settings: Settings, client_headers: Callable[[], Mapping[str, object]]) -> Call:
    """Decide what a call carries."""
    started_s = time.perf_counter()
    headers = options.headers if isinstance(options.headers, MAPPING) else {}
    body = options.json_data if isinstance(options.json_data, MAPPING) else {}
    extra = options.extra_json
    whole = _merged(body, extra) if extra and isinstance(extra, MAPPING) else body
    identity = resolve(headers, whole, settings.conversation, client_headers, secret=settings.secret)
    session, report = identity.session, TurnReport(session=identity.session)
    hint: Hint | None = None
    kind: str | None = None
    if session is not None:
        given, value = find_header(headers, TURN_HEADER)
        if given is None:
            hint = _NO_HINT if identity.conversation is None else identity.conversation.hints()
            kind = hint.kind
        elif isinstance(value, str):
            turn = TurnHeader.parse(value)
            kind, report.index = turn.kind, turn.index
    compared = session is not None and kind not in _NOT_COMPARED
    added = headers_for(identity, headers, readback=settings.readback)
    freezes = identity.conversation is not None and identity.conversation.freeze_system
    call = Call(options, settings, identity, report, whole, compared, freezes, started_s, hint, added)
    if compared and (call.freezes or settings.memory.respells(str(session))):
        # It is going to be sent otherwise than it came: to find that out only then would be to spell it out twice.
        call.review()
        if call.changes is not None:
            call.options, call.changes = options.model_copy(update=call.changes), None
    return call


def _merged(body: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """The body that the OpenAI client sends where its caller adds fields, or takes one away."""
    return {name: value for name, value in {**body, **extra}.items() if not isinstance(value, openai.Omit)}


def _parsed(response: Any) -> Any:
    """What the caller of a raw response will get from its `parse()`, which keeps it."""
    try:
        return response.parse()
    except (openai.OpenAIError, ValueError, TypeError, RuntimeError) as error:
        # The caller's own `parse()` fails alike, if it is ever called.
        log.debug("a raw response cannot be parsed: %s", error)
        return response


def _callers_level() -> int:
    """How far up the stack the code stands that made the call."""
    loaded = (sys.modules.get(name) for name in ("openai", "bidikv", "tenacity"))
    inside = tuple(str(Path(module.__file__ or "").parent) for module in loaded if module is not None)
    frame, level = sys._getframe(1), 1  # noqa: SLF001 - `warnings` has no way to skip packages before Python 3.12
    while frame.f_back is not None and frame.f_code.co_filename.startswith(inside):
        frame, level = frame.f_back, level + 1
    return level
