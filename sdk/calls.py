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
from bidikv.identity import Identity, headers_for, resolve
from bidikv.reuse import TurnReport, is_raw, key_in, remember, reuse_in, turn_of, watch_stream

if TYPE_CHECKING:
    from bidikv.memory import Reviewed
    from bidikv.options import Settings

log = logging.getLogger(__name__)

_NOT_COMPARED: Final = frozenset({"aux", "compaction"})
"""Kinds of calls that stand beside a conversation, or begin its history anew."""


@dataclass(frozen=True, slots=True)
class Call:
    """One logical call; its retries are the same call.

    Attributes:
        options: What to send. The caller's own are left as they were.
        settings: Of the client.
        identity: Whose turn it is.
        report: What is known of it.
        body: The caller's body, as far as it is compared.
        reviewed: How its history relates to those before; None if it has none, or nobody to compare with.
        started_s: On this process's `perf_counter`.
    """

    options: Any
    settings: Settings
    identity: Identity
    report: TurnReport
    body: Mapping[str, Any]
    reviewed: Reviewed | None
    started_s: float

    def judge(self) -> None:
        """Do what the client was told to do about changed history.

        Raises:
            DriftError: It was told to raise.
        """
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
        told = turn_of(response)
        report = self.report
        report.reuse, report.key = (told.reuse, told.key) if told is not None else (None, None)
        remember(response, report)
        session, memory = self.identity.session, self.settings.memory
        if session is not None and self.reviewed is not None:
            memory.answered(session, self.reviewed, self.body, freeze_system=self._freezes())
        if session is not None and report.key is not None:
            memory.held(session, report.key)
        parsed = _parsed(response)
        if parsed is not response:
            remember(parsed, report)
        if not watch_stream(parsed, report, self.started_s, self._generated):
            answer = answer_in(parsed)
            if answer is not None:
                self._generated(answer)
        if (conversation := self.identity.conversation) is not None:
            conversation.turns.append(report)
            if report.key is not None:
                conversation.links().add(report.key, client)

    def _generated(self, answer: Answer) -> None:
        if self.identity.session is not None and self.reviewed is not None:
            self.settings.memory.generated(self.identity.session, self.reviewed, answer)

    def _freezes(self) -> bool:
        return self.identity.conversation is not None and self.identity.conversation.freeze_system


def begin(options: Any, settings: Settings, client_headers: Mapping[str, object]) -> Call | None:
    """Decide what a call carries. None, and a traceback in the log, if that fails: the call then goes out as it came."""
    started_s = time.perf_counter()
    try:
        return _begin(options, settings, client_headers, started_s)
    except Exception:
        log.exception("the conversation of a call cannot be told; the call goes out without one")
        return None


def _begin(options: Any, settings: Settings, client_headers: Mapping[str, object], started_s: float) -> Call:
    headers = options.headers if isinstance(options.headers, Mapping) else {}
    body = options.json_data if isinstance(options.json_data, Mapping) else {}
    whole = {**body, **options.extra_json} if isinstance(options.extra_json, Mapping) else body
    identity = resolve(headers, whole, settings.conversation, client_headers, secret=settings.secret)
    turn, added = headers_for(identity, headers, whole, client_headers, readback=settings.readback)
    report = TurnReport(session=identity.session, index=turn.index if turn is not None else None)
    reviewed: Reviewed | None = None
    changes: dict[str, Any] = {}
    if identity.session is not None and (turn is None or turn.kind not in _NOT_COMPARED):
        conversation = identity.conversation
        reviewed = settings.memory.review(
            identity.session,
            whole,
            restore=settings.restore,
            freeze_system=conversation is not None and conversation.freeze_system,
        )
    if reviewed is not None:
        report.drift, report.restored = reviewed.drift, reviewed.restored
        if reviewed.changes:
            # Where a field stands in both, the caller's extra one is what is sent.
            extra = options.extra_json or {}
            in_extra = {name: value for name, value in reviewed.changes.items() if name in extra}
            changes["json_data"] = {**body, **{n: v for n, v in reviewed.changes.items() if n not in extra}}
            if in_extra:
                changes["extra_json"] = {**extra, **in_extra}
    if added:
        changes["headers"] = {**headers, **added}
    if changes:
        options = options.model_copy(update=changes)
    return Call(options, settings, identity, report, whole, reviewed, started_s)


def _parsed(response: Any) -> Any:
    """What the caller of a raw response will get from its `parse()`, which keeps it; other responses are that themselves."""
    if not is_raw(response):
        return response
    try:
        return response.parse()
    except (openai.OpenAIError, ValueError, TypeError, RuntimeError) as error:
        # The caller's own `parse()` fails alike, if it is ever called.
        log.debug("a raw response cannot be parsed: %s", error)
        return response


def _callers_level() -> int:
    """How far up the stack the code stands that made the call."""
    inside = tuple(str(Path(sys.modules[name].__file__ or "").parent) for name in ("openai", "bidikv"))
    frame, level = sys._getframe(1), 1  # noqa: SLF001 - `warnings` has no way to skip packages before Python 3.12
    while frame.f_back is not None and frame.f_code.co_filename.startswith(inside):
        frame, level = frame.f_back, level + 1
    return level


def told_of(response: Any) -> TurnReport:
    """The report of an HTTP response, for what is made of it."""
    return TurnReport(reuse=reuse_in(response.headers), key=key_in(response.headers))
