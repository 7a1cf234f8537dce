"""A scanner that watches a server-sent event stream pass by. It keeps a few bytes per line and changes none."""

from __future__ import annotations

import re
from typing import Final

_KEEP_BYTES: Final = 64
"""Enough of a line to know what it is; the rest only has to end."""
_LINE_END: Final = re.compile(rb"\r\n|\r|\n")
_ERROR: Final = re.compile(rb'data: ?\s*\{\s*"error"\s*:(?!\s*null)|event: ?(?:error|response\.failed)\s*$')
_DONE: Final = re.compile(rb"data: ?\[DONE\]\s*$")
_LAST_EVENT: Final = re.compile(rb"event: ?(?:message_stop|response\.(?:completed|incomplete))\s*$")
"""The last event of a Messages or Responses stream. Its data belongs to the answer, so the event has to be closed, too."""
_HEAD_EVENT: Final = re.compile(rb"event: ?response\.(?:created|in_progress|queued)\s*$")
_EVENT: Final = re.compile(rb"^event:[^\r\n]*$", re.MULTILINE)


def answer_began(raw: bytes) -> bool:
    """Whether the start of a Responses stream holds more than the events that only say that the request arrived."""
    return any(not _HEAD_EVENT.match(line) for line in _EVENT.findall(raw))


class SseScanner:
    """What a stream has shown so far. Feed it every chunk, cut anywhere.

    Attributes:
        data_lines: Data lines seen in part or whole, the final marker not counted.
        saw_done: The stream carried its end marker, or its last event whole.
        saw_error: The stream carried an error event.
    """

    __slots__ = ("_after_cr", "_blank", "_ending", "_line", "data_lines", "saw_done", "saw_error")

    def __init__(self) -> None:
        self.data_lines = 0
        self.saw_done = False
        self.saw_error = False
        self._line = b""
        self._after_cr = False
        self._blank = True
        self._ending = False

    @property
    def ended_well(self) -> bool:
        """The engine has said all it wanted to say."""
        return self.saw_done and not self.saw_error

    @property
    def at_event_boundary(self) -> bool:
        """Nothing was sent yet, or the last event is closed: a new event may start here."""
        return self._blank and not self._line

    def feed(self, chunk: bytes) -> None:
        """Take the next bytes of the stream."""
        if self._is_one_plain_event(chunk):
            self.data_lines += 1
            self.saw_done |= self._ending
            self._blank, self._after_cr = True, False
            return
        if self._after_cr and chunk.startswith(b"\n"):
            chunk = chunk[1:]
            self._after_cr = False
        if not chunk:
            return
        self._after_cr = chunk.endswith(b"\r")
        position = 0
        for end in _LINE_END.finditer(chunk):
            self._extend(chunk[position : min(end.start(), position + _KEEP_BYTES)])
            self._end_line()
            position = end.end()
        self._extend(chunk[position : position + _KEEP_BYTES])

    def end(self) -> None:
        """The stream is over: its last line counts even without a line end."""
        if self._line:
            self._end_line()

    def _is_one_plain_event(self, chunk: bytes) -> bool:
        """Nearly every chunk is one event of one data line that is neither an error nor the end: known at a glance."""
        return (
            not self._line
            and chunk.startswith(b'data: {"')
            and chunk.find(b"\n") == len(chunk) - 2
            and chunk.endswith(b"\n")
            and b"\r" not in chunk
            and not chunk.startswith(b'"error"', 7)
        )

    def _extend(self, piece: bytes) -> None:
        if not piece:
            return
        self._line = (self._line + piece)[:_KEEP_BYTES]
        self._blank = False

    def _end_line(self) -> None:
        line, self._line = self._line, b""
        if not line:
            self._blank = True
            self.saw_done |= self._ending
        elif _LAST_EVENT.match(line):
            self._ending = True
        elif _DONE.match(line):
            self.saw_done = True
        elif _ERROR.match(line):
            self.saw_error = True
        elif line.startswith(b"data:"):
            self.data_lines += 1
