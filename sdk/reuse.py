"""What is known about a finished or running call: its reuse and its time to first token."""

from __future__ import annotations

import time
import weakref
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

from bidikv.headers import REUSE_HEADER, ReuseHeader


@dataclass(slots=True, eq=False)
class TurnReport:
    """One model call as its client saw it.

    Attributes:
        session: The conversation's wire id; None if the call named none.
        reuse: The router's account; None if it gave none (a plain engine, or a failed call).
        ttft_s: Seconds of this process's `perf_counter` from sending the call, retries included, to the first
            streamed text, reasoning or tool call; None before that, and for calls that do not stream.
    """

    session: str | None = None
    reuse: ReuseHeader | None = None
    ttft_s: float | None = None

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


class _ReportsByResponse:
    """Reports of live response objects.

    Keyed by identity, because parsed models are compared by value and are not hashable; an entry leaves with its
    response.
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[object], TurnReport]] = {}

    def put(self, response: object, report: TurnReport) -> None:
        key = id(response)
        entries = self._entries
        try:
            reference = weakref.ref(response, lambda _: entries.pop(key, None))
        except TypeError:  # None, str and other built-ins: nothing to attach a report to
            return
        entries[key] = (reference, report)

    def get(self, response: object) -> TurnReport | None:
        reference, report = self._entries.get(id(response), (None, None))
        return report if reference is not None and reference() is response else None


_reports = _ReportsByResponse()


def remember(response: object, report: TurnReport) -> None:
    """Make `turn_of(response)` return this very report, for as long as the response lives."""
    _reports.put(response, report)


def turn_of(response: object) -> TurnReport | None:
    """The report of a parsed, streamed or raw response, or of an `openai.APIStatusError`.

    None for responses that did not come through this package's clients and carry no `x-bidikv-reuse`. What
    `.parse()` makes of a raw response is a new object: ask about the raw response instead.
    """
    report = _reports.get(response)
    if report is not None:
        return report
    # The helpers behind `.stream()` wrap the stream that the request returned.
    inner = getattr(response, "_raw_stream", None)
    if inner is not None and (report := _reports.get(inner)) is not None:
        return report
    http_response = getattr(response, "response", None) or getattr(response, "_response", None) or response
    reuse = reuse_in(getattr(http_response, "headers", None))
    return None if reuse is None else TurnReport(reuse=reuse)


def reuse_of(response: object) -> ReuseHeader | None:
    """What the router reused for this response's prompt; None if it did not say. See `turn_of`."""
    report = turn_of(response)
    return None if report is None else report.reuse


def reuse_in(headers: Any) -> ReuseHeader | None:
    """The account in a mapping of response headers, whichever HTTP library it is from."""
    value = headers.get(REUSE_HEADER) if hasattr(headers, "get") else None
    return ReuseHeader.parse(value) if isinstance(value, str) else None


def watch_stream(stream: Any, report: TurnReport, started_s: float) -> None:
    """Set `report.ttft_s` when the stream's first output arrives.

    `Stream` and `AsyncStream` read from `_iterator`; where a later client does without it, the time stays unknown.

    Args:
        stream: What the request returned; anything that is not such a stream is left alone.
        report: Receives the time.
        started_s: `time.perf_counter()` when the call was sent.
    """
    iterator = getattr(stream, "_iterator", None)
    if isinstance(iterator, Iterator):
        stream._iterator = _Watched(iterator, report, started_s)  # noqa: SLF001 - the only seam that keeps the class
    elif isinstance(iterator, AsyncIterator):
        stream._iterator = _AsyncWatched(iterator, report, started_s)  # noqa: SLF001


class _FirstOutput:
    def __init__(self, report: TurnReport, started_s: float) -> None:
        self._report = report
        self._started_s = started_s

    def see(self, chunk: Any) -> None:
        if self._report.ttft_s is None and _carries_output(chunk):
            self._report.ttft_s = time.perf_counter() - self._started_s


class _Watched(_FirstOutput):
    def __init__(self, chunks: Iterator[Any], report: TurnReport, started_s: float) -> None:
        super().__init__(report, started_s)
        self._chunks = chunks

    def __iter__(self) -> _Watched:
        return self

    def __next__(self) -> Any:
        chunk = next(self._chunks)
        self.see(chunk)
        return chunk


class _AsyncWatched(_FirstOutput):
    def __init__(self, chunks: AsyncIterator[Any], report: TurnReport, started_s: float) -> None:
        super().__init__(report, started_s)
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
