"""What is known about a finished or running call: its reuse and its time to first token."""

from __future__ import annotations

import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from bidikv.fidelity import Answer, StreamedAnswer, answer_in
from bidikv.headers import KEY_HEADER, REUSE_HEADER, ReuseHeader
from bidikv.items import ItemsAnswer, ended_response

if TYPE_CHECKING:
    from bidikv.drift import Drift

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class TurnReport:
    """One model call as its client saw it.

    Attributes:
        session: The conversation's wire id; None if the call named none.
        told: The router's account as its header has it; None if it gave none (a plain engine, or a failed call).
        ttft_s: Seconds of this process's `perf_counter` from sending the call, retries included, to the first
            streamed text, reasoning or tool call; None before that, and for calls that do not stream.
        index: Turns of the conversation before this one, as its header said; None without a conversation.
        key: The router's own key of the conversation; None if it gave none.
        drift: How the history sent relates to the conversation's turns before; None if there was nothing to compare.
        restored: Where the history was put back into the model's own spelling, as paths of the request.
    """

    session: str | None = None
    told: str | None = None
    ttft_s: float | None = None
    index: int | None = None
    key: str | None = None
    drift: Drift | None = None
    restored: tuple[str, ...] = ()
    _reuse: ReuseHeader | None = field(default=None, init=False, repr=False)

    @property
    def reuse(self) -> ReuseHeader | None:
        """The router's account, read when it is asked for; None if it gave none that can be read."""
        if self._reuse is None and self.told is not None:
            self._reuse = ReuseHeader.parse(self.told)
        return self._reuse

    @property
    def reason(self) -> str | None:
        """Why this much was reused: a code of the router's."""
        return None if self.reuse is None else self.reuse.reason

    @property
    def prompt_tokens(self) -> int | None:
        """The whole prompt."""
        return None if self.reuse is None else self.reuse.prompt_tokens

    @property
    def remote_tokens(self) -> int | None:
        """Prompt tokens pulled from decode."""
        return None if self.reuse is None else self.reuse.remote_tokens

    @property
    def local_tokens(self) -> int | None:
        """Prompt tokens found in prefill's own prefix cache."""
        return None if self.reuse is None else self.reuse.local_tokens

    @property
    def computed_tokens(self) -> int | None:
        """Prompt tokens that prefill computed."""
        return None if self.reuse is None else self.reuse.computed_tokens


class _ByResponse(Generic[T]):
    """What is known of live response objects.

    Keyed by identity, because parsed models are compared by value and are not hashable; an entry leaves with its
    response.
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[object], T]] = {}

    def put(self, response: object, value: T) -> None:
        key = id(response)
        entries = self._entries
        try:
            reference = weakref.ref(response, lambda _: entries.pop(key, None))
        except TypeError:  # None, str and other built-ins: nothing to attach a report to
            return
        entries[key] = (reference, value)

    def get(self, response: object) -> T | None:
        reference, value = self._entries.get(id(response), (None, None))
        return value if reference is not None and reference() is response else None


_reports: _ByResponse[TurnReport] = _ByResponse()
_answers: _ByResponse[Answer] = _ByResponse()


# Who waits for the report of a call that is made, but gets nothing of its response in hand.
_awaiting: ContextVar[Callable[[TurnReport], None] | None] = ContextVar("bidikv_awaited_report", default=None)


@contextmanager
def reported(receive: Callable[[TurnReport], None]) -> Iterator[None]:
    """Hand on the report of each call that is answered inside, in this task or thread. Not to be held across a `yield`."""
    token = _awaiting.set(receive)
    try:
        yield
    finally:
        _awaiting.reset(token)


def announce(report: TurnReport) -> None:
    """A call was answered: hand its report on to who waits for it."""
    receive = _awaiting.get()
    if receive is not None:
        receive(report)


def remember(response: object, report: TurnReport) -> None:
    """Make `turn_of(response)` return this very report, for as long as the response lives."""
    _reports.put(response, report)


def turn_of(response: object) -> TurnReport | None:
    """The report of a parsed, streamed or raw response, or of an `openai.APIStatusError`.

    None for responses that did not come through this package's clients and carry no `x-bidikv-reuse`.
    """
    report = _reports.get(response)
    if report is not None:
        return report
    # The helpers behind `.stream()` wrap the stream that the request returned.
    inner = getattr(response, "_raw_stream", None)
    if inner is not None and (report := _reports.get(inner)) is not None:
        return report
    http_response = getattr(response, "response", None) or getattr(response, "_response", None) or response
    told, key = account_in(getattr(http_response, "headers", None))
    report = TurnReport(told=told, key=key)
    return None if report.reuse is None else report


def reuse_of(response: object) -> ReuseHeader | None:
    """What the router reused for this response's prompt; None if it did not say. See `turn_of`."""
    report = turn_of(response)
    return None if report is None else report.reuse


def account_in(headers: Any) -> tuple[str | None, str | None]:
    """The router's account and its key of the conversation in a mapping of response headers, whichever HTTP library it is from."""
    if not hasattr(headers, "get"):
        return None, None
    told, key = headers.get(REUSE_HEADER), headers.get(KEY_HEADER)
    return told if isinstance(told, str) else None, key if isinstance(key, str) else None


def answer_of(response: Any) -> Answer | ItemsAnswer | None:
    """What the model said in a parsed or raw response, or so far in a stream; None for anything else."""
    for candidate in (response, getattr(response, "_raw_stream", None)):
        if candidate is not None and (answer := _answers.get(candidate)) is not None:
            return answer
    return answer_in(response.parse() if is_raw(response) else response)


def is_raw(response: Any) -> bool:
    """Whether it is what `with_raw_response` returns, whose body has been read. The class has no public name."""
    return type(response).__name__ == "LegacyAPIResponse"


def watch_stream(
    stream: Any,
    report: TurnReport,
    started_s: float,
    on_end: Callable[[Answer | ItemsAnswer], None] | None = None,
) -> bool:
    """Set `report.ttft_s` when the stream's first output arrives, and put its answer together.

    `Stream` and `AsyncStream` read from `_iterator`; where a later client does without it, the time stays unknown.

    Args:
        stream: What the request returned; anything that is not such a stream is left alone.
        report: Receives the time.
        started_s: `time.perf_counter()` when the call was sent.
        on_end: Called once with the answer, when it is complete.

    Returns:
        Whether it is such a stream.
    """
    # Not by `getattr`, for which models that have no such field go a long way.
    iterator = getattr(stream, "__dict__", {}).get("_iterator")
    if iterator is None:
        return False
    if isinstance(iterator, Iterator):
        watched: _Watched | _AsyncWatched = _Watched(iterator, report, started_s, on_end)
    elif isinstance(iterator, AsyncIterator):
        watched = _AsyncWatched(iterator, report, started_s, on_end)
    else:
        return False
    stream._iterator = watched  # noqa: SLF001 - the only seam that keeps the class
    _answers.put(stream, watched.answer)
    return True


class _Seen:
    """What has been read of one stream."""

    def __init__(
        self, report: TurnReport, started_s: float, on_end: Callable[[Answer | ItemsAnswer], None] | None
    ) -> None:
        self._report = report
        self._started_s = started_s
        self._on_end = on_end
        self.answer = StreamedAnswer()

    def see(self, chunk: Any) -> None:
        if self._report.ttft_s is None and _carries_output(chunk):
            self._report.ttft_s = time.perf_counter() - self._started_s
        response = ended_response(chunk)
        answer: Answer | ItemsAnswer = self.answer if response is None else ItemsAnswer(response)
        if response is None:
            self.answer.add(chunk)
        # Many callers stop here, before the stream's own end.
        if self._on_end is not None and answer.finished:
            self._on_end(answer)
            self._on_end = None


class _Watched(_Seen):
    def __init__(
        self,
        chunks: Iterator[Any],
        report: TurnReport,
        started_s: float,
        on_end: Callable[[Answer | ItemsAnswer], None] | None,
    ) -> None:
        super().__init__(report, started_s, on_end)
        self._chunks = chunks

    def __iter__(self) -> _Watched:
        return self

    def __next__(self) -> Any:
        chunk = next(self._chunks)
        self.see(chunk)
        return chunk


class _AsyncWatched(_Seen):
    def __init__(
        self,
        chunks: AsyncIterator[Any],
        report: TurnReport,
        started_s: float,
        on_end: Callable[[Answer | ItemsAnswer], None] | None,
    ) -> None:
        super().__init__(report, started_s, on_end)
        self._chunks = chunks

    def __aiter__(self) -> _AsyncWatched:
        return self

    async def __anext__(self) -> Any:
        chunk = await anext(self._chunks)
        self.see(chunk)
        return chunk


def _carries_output(chunk: Any) -> bool:
    kind = getattr(chunk, "type", None)
    if isinstance(kind, str):  # an event of the Responses API
        return kind.endswith(".delta")
    for choice in getattr(chunk, "choices", None) or ():
        delta = getattr(choice, "delta", None) or choice
        if any(
            getattr(delta, name, None)
            for name in ("content", "tool_calls", "reasoning", "reasoning_content", "text")
        ):
            return True
    return False
