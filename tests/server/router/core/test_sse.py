"""The scanner sees the same whatever way the stream is cut."""

import pytest

from bidikv_server.router.core.sse import SseScanner

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
