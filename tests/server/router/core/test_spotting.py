"""What an answer says of itself."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bidikv_server.router.core.spotting import AnswerSpotter

CHAT = (
    b'data: {"id":"c1","choices":[{"delta":{"content":"a \\"id\\":\\"x\\" b"}}]}\n\n'
    b'data: {"id":"c1","choices":[],"usage":{"prompt_tokens":9,"completion_tokens":7}}\n\n'
    b"data: [DONE]\n\n"
)
RESPONSES = (
    b'event: response.created\r\ndata: {"type":"response.created","response":{"id":"resp_1","usage":null}}\r\n\r\n'
    b'event: x\r\ndata: {"response":{"id":"resp_1","usage":{"input_tokens":9,"output_tokens":7}}}\r\n\r\n'
)
MESSAGES = (
    b'event: message_start\ndata: {"type":"message_start","message":{"id":"msg_1","usage":{"output_tokens":1}}}\n\n'
    b'event: message_delta\ndata: {"type":"message_delta","usage":{"output_tokens":7}}\n\n'
)


def spot(raw: bytes, cuts: list[int], *, is_stream: bool) -> tuple[str | None, int | None]:
    spotter = AnswerSpotter(is_stream=is_stream)
    edges = [0, *sorted(cut % (len(raw) + 1) for cut in cuts), len(raw)]
    for start, end in itertools.pairwise(edges):
        spotter.feed(raw[start:end])
    return spotter.response_id(), spotter.output_tokens()


@pytest.mark.parametrize(("raw", "found"), [(CHAT, "c1"), (RESPONSES, "resp_1"), (MESSAGES, "msg_1")])
@given(cuts=st.lists(st.integers(0, 400), max_size=6))
def test_streams(raw, found, cuts):
    """Id and count of each kind of stream, wherever it is cut."""
    assert spot(raw, cuts, is_stream=True) == (found, 7)


@given(cuts=st.lists(st.integers(0, 400), max_size=6))
def test_whole_answer(cuts):
    """A JSON document."""
    raw = json.dumps({"id": "c1", "choices": [], "usage": {"completion_tokens": 7}}).encode()
    assert spot(raw, cuts, is_stream=False) == ("c1", 7)


@pytest.mark.parametrize("raw", [b"", b"\xff", b"data: [1]\n\n", b'data: {"id":1,"usage":{"completion_tokens":true}}\n\n',
                                 b"data: " + b"[" * 100_000, b'data: {"id":"c1'])  # fmt: skip
@pytest.mark.parametrize("is_stream", [True, False])
def test_nothing_to_spot(raw, is_stream):
    """What cannot be read says nothing."""
    assert spot(raw, [3, 5], is_stream=is_stream) == (None, None)


def test_memory_is_bounded():
    """A long stream is not kept."""
    spotter = AnswerSpotter(is_stream=True)
    for _ in range(10_000):
        spotter.feed(CHAT)
    assert sum(len(chunk) for chunk in spotter._tail) < 70_000
    assert (spotter.response_id(), spotter.output_tokens()) == ("c1", 7)


@pytest.mark.parametrize(
    ("raw", "newest"), [(CHAT, "prompt_tokens"), (RESPONSES, "input_tokens"), (MESSAGES, "output_tokens")]
)
@given(cuts=st.lists(st.integers(0, 400), max_size=6))
def test_counts(raw, newest, cuts):
    """Every count of a stream, the newest first."""
    spotter = AnswerSpotter(is_stream=True)
    for start, end in itertools.pairwise([0, *sorted(cut % (len(raw) + 1) for cut in cuts), len(raw)]):
        spotter.feed(raw[start:end])
    assert newest in spotter.usages()[0]
    assert len(spotter.usages()) >= (2 if raw is MESSAGES else 1)


@pytest.mark.parametrize("raw", [b"", b'{"usage": null}', b'{"usage": 3}', b'{"usage"', b'{"choices": []}'])
def test_no_counts(raw):
    """An answer without any, or none that can be read."""
    spotter = AnswerSpotter(is_stream=False)
    spotter.feed(raw)
    assert spotter.usages() == []
