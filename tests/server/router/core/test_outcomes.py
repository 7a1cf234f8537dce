"""Accounts where no engine writes one."""

import json

import pytest

from bidikv.headers import ReuseHeader
from bidikv_server.reasons import Reason
from bidikv_server.router.core.accounts import NOTHING_KNOWN, PrefillAnswer, read_prefill_answer
from bidikv_server.router.core.outcomes import cached_only, unaccounted

TOLD = PrefillAnswer({"h": 1}, ReuseHeader(Reason.UNKNOWN, 100), cached_tokens=64)


def test_only_prefills_own_cache():
    """What was not computed was prefill's own."""
    assert cached_only(TOLD, None) == ReuseHeader(Reason.NO_ACCOUNT, 100, 0, 64, 36)


def test_nobody_knows_whose():
    """Only what was computed is known."""
    assert unaccounted(TOLD, None, Reason.HIT) == ReuseHeader(Reason.HIT, 100, None, None, 36)


def test_no_usage():
    """Without counts there are none."""
    assert cached_only(NOTHING_KNOWN, Reason.NO_PREFILL) == ReuseHeader(Reason.NO_PREFILL)


@pytest.mark.parametrize("decided", [Reason.NEW_CONVERSATION, Reason.NO_INDEX, Reason.DECODE_CHANGED])
def test_no_index_to_ask(decided):
    """Why an index is not asked says nothing where there is none."""
    assert cached_only(TOLD, decided).reason == Reason.NO_ACCOUNT


@pytest.mark.parametrize("decided", [Reason.NO_PREFILL, Reason.READBACK_OFF, Reason.UNSUPPORTED])
def test_what_placement_decided(decided):
    """Stays."""
    assert unaccounted(TOLD, decided, Reason.HIT).reason == decided


@pytest.mark.parametrize(
    ("usage", "cached"),
    [
        ({"prompt_tokens_details": {"cached_tokens": 3}}, 3),
        ({"prompt_tokens_details": {"cached_tokens": -1}}, None),
        ({"prompt_tokens_details": None}, None),
        ({}, None),
        (None, None),
    ],
)
def test_cached_tokens(usage, cached):
    """As vLLM's usage tells them, if it does."""
    raw = json.dumps({"usage": usage}).encode()
    assert read_prefill_answer(raw).cached_tokens == cached
