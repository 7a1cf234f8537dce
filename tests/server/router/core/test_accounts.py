"""Reading what prefill answers."""

import json

import pytest

from bidikv.headers import ReuseHeader
from bidikv_server.reasons import Reason
from bidikv_server.router.core.accounts import of_decode_alone, read_prefill_answer, with_reason

ACCOUNT = {"v": 1, "reason": "hit_diverged", "prompt_tokens": 9, "remote_tokens": 4, "diverged_at_token": 5}


def read(params, **answer):
    return read_prefill_answer(json.dumps({"kv_transfer_params": params, **answer}).encode())


def test_account():
    """The account is split from the handle, which decode gets without it."""
    answer = read({"a": 1, "bidikv": ACCOUNT}, usage={"prompt_tokens": 7})
    assert answer.handle == {"a": 1}
    assert answer.reuse == ReuseHeader(Reason.HIT_DIVERGED, 9, 4, diverged_at_token=5)


@pytest.mark.parametrize("account", [None, "x", {}, {**ACCOUNT, "v": 2}])
def test_no_account(account):
    """Without one that can be read the outcome is unknown, and the engine's usage gives the size."""
    answer = read({"a": 1, "bidikv": account}, usage={"prompt_tokens": 7})
    assert answer.reuse == ReuseHeader(Reason.UNKNOWN, 7)


@pytest.mark.parametrize("params", [None, {}, [], {"bidikv": ACCOUNT}])
def test_no_handle(params):
    """Nothing to pull is None."""
    assert read(params).handle is None


@pytest.mark.parametrize(("field", "value"), [("reason", "new_word"), ("reason", 3), ("reason", [])])
def test_foreign_reason(field, value):
    """A reason of a later version is unknown."""
    assert read({"bidikv": {**ACCOUNT, field: value}}).reuse.reason is Reason.UNKNOWN


@pytest.mark.parametrize("value", [-1, 1.5, True, "3", None])
def test_foreign_count(value):
    """A count that is none is left out."""
    assert read({"bidikv": {**ACCOUNT, "remote_tokens": value}}).reuse.remote_tokens is None


@pytest.mark.parametrize("raw", [b"", b"[]", b"{", b"\xff"])
def test_unreadable(raw):
    """Anything else is an error of the engine's."""
    with pytest.raises(ValueError):
        read_prefill_answer(raw)


def test_reason():
    """The router's own reason replaces prefill's; the counts stay."""
    told = ReuseHeader(Reason.LOCAL, 9, local_tokens=8)
    assert with_reason(told, None) is told
    assert with_reason(told, Reason.NEW_CONVERSATION) == ReuseHeader(
        Reason.NEW_CONVERSATION, 9, local_tokens=8
    )


@pytest.mark.parametrize(
    ("usage", "tokens"),
    [
        ({"prompt_tokens": 9, "input_tokens": 1}, 9),
        ({"input_tokens": 9}, 9),
        ({"input_tokens": 5, "cache_read_input_tokens": 3, "cache_creation_input_tokens": None}, 8),
        ({"cache_read_input_tokens": 3}, None),
        ({}, None),
    ],
)
def test_prompt_tokens_of_each_api(usage, tokens):
    """Of a stock engine's answer, whatever its API calls them."""
    assert read_prefill_answer(json.dumps({"usage": usage}).encode()).reuse.prompt_tokens == tokens


@pytest.mark.parametrize(
    ("usages", "counts"),
    [
        ([{"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}], (9, 0, 4, 5)),
        ([{"prompt_tokens": 9, "prompt_tokens_details": None}], (9, None, None, None)),
        ([{"input_tokens": 9, "input_tokens_details": {"cached_tokens": 4}}], (9, 0, 4, 5)),
        ([{"output_tokens": 3}, {"input_tokens": 5, "cache_read_input_tokens": 4}], (9, 0, 4, 5)),
        ([{"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": -1}}], (9, None, None, None)),
        ([{"prompt_tokens": "9"}, {}], (None, None, None, None)),
        ([], (None, None, None, None)),
    ],
)
def test_decode_alone(usages, counts):
    """Its answer tells how long the prompt was and what decode had in its own cache, whichever API it is of."""
    told = of_decode_alone(ReuseHeader(Reason.DECODE_CHEAPER), usages)
    assert told == ReuseHeader(Reason.DECODE_CHEAPER, *counts)
