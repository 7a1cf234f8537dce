"""The account of a turn's reuse names the token from which it was lost, and why."""

import pytest

from bidikv_server.connector.core import digests
from bidikv_server.connector.core.accounts import Account
from bidikv_server.connector.core.readback import Pull
from bidikv_server.connector.core.retention import Match
from bidikv_server.reasons import Reason

PROMPT = digests.pack(range(64))


def made(reason, match=None, pull=None, *, remote=0, local=0):
    return Account.make(
        reason,
        match,
        pull,
        prompt_tokens=70,
        remote_tokens=remote,
        local_tokens=local,
        packed=PROMPT,
        block_size=16,
    )


def held(count, reason, retained=b""):
    return Match(tuple(range(count)), (0,) * count, reason, retained)


@pytest.mark.parametrize(
    ("account", "lost_at"),
    [
        (made(Reason.HIT, held(4, Reason.HIT), remote=64), None),
        (made(Reason.NEW_CONVERSATION), None),
        (made(Reason.LOCAL, held(1, Reason.HIT), local=16), None),
        (made(Reason.LOOKUP_TIMEOUT), 0),
        (made(Reason.EXPIRED, held(0, Reason.EXPIRED)), 0),
        (made(Reason.HIT_EVICTED, held(2, Reason.EVICTED), remote=32), 32),
        (made(Reason.HIT_DIVERGED, held(2, Reason.DIVERGED, digests.pack([32, 33, 9])), remote=32), 34),
        (made(Reason.DIVERGED, held(0, Reason.DIVERGED, digests.pack([9]))), 0),
        (made(Reason.VALIDATION_FAILED, held(4, Reason.HIT), Pull(1, (1, 2, 3), (0,) * 3, Reason.HIT)), 16),
    ],
)
def test_a_lost_reuse_says_from_which_token(account, lost_at):
    """Nothing for a turn that lost nothing."""
    assert account.lost_at == lost_at
    assert (f"lost_at_token={lost_at}" in account.describe()) == (lost_at is not None)
    assert f"reason={account.reason}" in account.describe()


def test_what_was_not_reused_was_computed():
    """The parts add up to the prompt, also when a preempted request found what it had pulled in its own cache."""
    account = made(Reason.HIT, held(4, Reason.HIT), remote=32, local=16)
    assert account.computed_tokens == 70 - 32 - 16
    assert account.answer()["computed_tokens"] == 22
    assert made(Reason.HIT, held(4, Reason.HIT), remote=64, local=64).computed_tokens == 0
