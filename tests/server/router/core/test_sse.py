"""The scanner sees the same whatever way the stream is cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bidikv_server.router.core.sse import SseScanner, answer_began

CLEAN = b'data: {"choices":[{"delta":{"content":"[DONE] \\"error\\""}}]}\n\n: note\n\ndata: {"usage":1}\n\ndata: [DONE]\n\n'
ERROR = b'data: {"choices":[]}\n\ndata: { "error" : {"message":"x"}}\n\n'


def scan(*pieces):
    scanner = SseScanner()
    for piece in pieces:
        scanner.feed(piece)
    boundary = scanner.at_event_boundary
    scanner.end()
    return scanner.data_lines, scanner.saw_done, scanner.saw_error, boundary


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize(
    ("stream", "expected"),
    [
        (CLEAN, (2, True, False, True)),
        (ERROR, (1, False, True, True)),
        (CLEAN[:-2], (2, True, False, False)),
        (CLEAN[:-1], (2, True, False, False)),
        (b"event: error\ndata: {}\n\n", (1, False, True, True)),
        (b'data: {"error": null, "choices": []}\n\n', (1, False, False, True)),
        (b"", (0, False, False, True)),
        (b'event: message_stop\ndata: {"type":"message_stop"}\n\n', (1, True, False, True)),
        (b"event: message_stop\ndata: {}\n", (1, False, False, False)),
        (b"event: response.completed\ndata: {}\n\n", (1, True, False, True)),
        (b"event: response.incomplete\ndata: {}\n\n", (1, True, False, True)),
        (b"event: response.failed\ndata: {}\n\n", (1, False, True, True)),
        (b"event: response.completed.not\ndata: {}\n\n", (1, False, False, True)),
        (b'data: "event: message_stop"\n\n', (1, False, False, True)),
        (b'data: "' + b"x" * 1000 + b'[DONE]"\n\n', (1, False, False, True)),
    ],
)
def test_every_cut(stream, expected, end):
    """Cut in two at every byte, and into single bytes."""
    stream = stream.replace(b"\n", end)
    assert scan(stream) == expected
    for cut in range(len(stream) + 1):
        assert scan(stream[:cut], stream[cut:]) == expected
    assert scan(*(stream[i : i + 1] for i in range(len(stream)))) == expected


def test_memory_is_bounded():
    """A line without an end does not pile up."""
    scanner = SseScanner()
    for _ in range(1000):
        scanner.feed(b"data: " + b"x" * 10_000)
    assert len(scanner._line) <= 64


CREATED = b'event: response.created\ndata: {"a":"event: response.output_item.added"}\n\n'
PROGRESS = b"event: response.in_progress\ndata: {}\n\n"


@pytest.mark.parametrize(
    ("raw", "began"),
    [
        (b"", False),
        (CREATED, False),
        (CREATED + PROGRESS, False),
        (b"event: response.queued\ndata: {}\n\n" + CREATED, False),
        (CREATED + PROGRESS + b"event: response.output_item.added\n", True),
        (CREATED + b"event: error\n", True),
        (b": keep-alive\n\n", False),
    ],
)
def test_events_that_say_nothing_yet(raw, began):
    """An answer has begun with the first event beyond those that say that the request arrived."""
    assert answer_began(raw) is began


PIECES = (
    b'data: {"id":1}\n\n',
    b'data: {"error":{}}\n\n',
    b'data: {"error":null}\n\n',
    b'data: {"a":"\\"error\\""}\n\n',
    b'data: {"a":1}\ndata: {"b":2}\n\n',
    b'data: {"a":1}\r\n\r\n',
    b'data: {"a',
    b'":1}\n\n',
    b"data: [DONE]\n\n",
    b"event: message_stop\n",
    b"event: error\n",
    b"\r",
    b"\n",
    b": x\n\n",
)


@given(st.lists(st.sampled_from(PIECES), max_size=8))
def test_a_glance_sees_what_reading_sees(pieces):
    """Whole events and single bytes of the same stream say the same."""
    assert scan(*pieces) == scan(*(bytes([byte]) for byte in b"".join(pieces)))
