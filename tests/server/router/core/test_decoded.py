"""Reading what a bidirectional decode engine's answer tells of its blocks."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bidikv_server.router.core.decoded import read_decoded

PARAMS = {
    "do_remote_prefill": False,
    "do_remote_decode": True,
    "remote_block_ids": [[1, 2]],
    "remote_engine_id": "e",
    "remote_request_id": "r",
    "remote_host": "h",
    "remote_port": 1,
    "remote_num_tokens": 5,
    "remote_blocks_expiry_time": 9.5,
}
MESSAGE = {"role": "assistant", "content": "x", "refusal": None, "tool_calls": []}


def answer(params=PARAMS, prompt=(1, 2, 3), generated=(4, 5, 6), **fields):
    choice = {"message": MESSAGE, "token_ids": list(generated)}
    whole = {"choices": [choice], "prompt_token_ids": list(prompt), "kv_transfer_params": params, **fields}
    return json.dumps(whole).encode()


def test_chat():
    """Prompt and answer in one sequence, and the message as a client sends it back."""
    found = read_decoded(answer())
    assert found is not None
    assert (found.token_ids, found.computed_tokens) == ([1, 2, 3, 4, 5, 6], 5)
    assert found.message == {"role": "assistant", "content": "x"}


def test_completion():
    """The prompt's tokens stand in the choice, and there is no message."""
    choice = {"text": "x", "token_ids": [3], "prompt_token_ids": [1, 2]}
    params = {**PARAMS, "remote_num_tokens": 2}
    found = read_decoded(json.dumps({"choices": [choice], "kv_transfer_params": params}).encode())
    assert found is not None
    assert (found.token_ids, found.message) == ([1, 2, 3], None)


@pytest.mark.parametrize(
    "change",
    [
        {"do_remote_decode": False},
        {"remote_host": None},
        {"remote_blocks_expiry_time": None},
        {"remote_block_ids": [[1], [2]]},
        {"remote_block_ids": [[]]},
        {"remote_block_ids": [1]},
        {"remote_num_tokens": 0},
        {"remote_num_tokens": 7},
        {"remote_num_tokens": True},
    ],
)
def test_handles_that_prove_nothing(change):
    """No address, no expiry, several groups, or more tokens than were told."""
    assert read_decoded(answer({**PARAMS, **change})) is None


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[]",
        b"{",
        answer(None),
        answer(prompt=()),
        answer(generated=()),
        answer(choices=[]),
        answer(choices=[{}, {}]),
        answer(choices=["x"]),
        answer(prompt=["1"]),
    ],
)
def test_no_answer(raw):
    """Without all of it there is nothing to keep."""
    assert read_decoded(raw) is None


@given(st.recursive(st.none() | st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from([*PARAMS, "choices", "kv_transfer_params", "token_ids", "prompt_token_ids"]), inner), max_leaves=20))  # fmt: skip
def test_anything(value):
    """No JSON makes it fail."""
    read_decoded(json.dumps(value).encode())
