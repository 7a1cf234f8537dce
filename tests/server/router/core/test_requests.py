"""Who asks, and for which conversation."""

import json
import sys

import pytest

from bidikv.headers import TurnHeader
from bidikv_server.router.core.ids import Scope, accept_request_id, fingerprint, salt_of, tenant_of
from bidikv_server.router.core.requests import CHAT_PATH, read_request

GOOD, OTHER = "session-1", "session-2"


def read(headers=None, **body):
    raw = json.dumps({"model": "m", "messages": [], **body}).encode()
    return read_request(CHAT_PATH, raw, headers or {})


@pytest.mark.parametrize(
    ("body", "header", "session"),
    [
        ({}, None, None),
        ({}, GOOD, GOOD),
        ({"session_id": OTHER}, GOOD, OTHER),
        ({"session_id": None}, GOOD, GOOD),
        ({"session_id": "two words"}, GOOD, None),
        ({"session_id": 12345678}, GOOD, None),
        ({}, "with space", None),
        ({}, "x" * 257, None),
    ],
)
def test_session(body, header, session):
    """The body wins over the header; what is ill-formed is no session, not the next best one."""
    headers = {} if header is None else {"x-session-id": header}
    assert read(headers, **body).session == session


def test_turn_header():
    """The turn's metadata is read leniently."""
    turn = TurnHeader(index=3, kind="aux", retain_s=2.5)
    assert read({"x-bidikv-turn": turn.format()}).turn == turn
    assert not read({"x-bidikv-turn": turn.format()}).recorded
    assert read({"x-bidikv-turn": "!!"}).turn == TurnHeader()
    assert read().recorded


@pytest.mark.parametrize(("value", "readback"), [("off", False), (" OFF ", False), ("on", True), ("", True)])
def test_readback(value, readback):
    """Only `off` switches readback off."""
    assert read({"x-bidikv-readback": value}).readback is readback


def test_scope():
    """Credential, model and cache salt make the scope; the credential itself is not in it."""
    scope = read({"authorization": "Bearer secret"}, cache_salt="s").scope
    assert scope == Scope(tenant_of("Bearer secret"), "m", cache_salt="s")
    assert "secret" not in repr(scope)
    assert read(cache_salt=3).scope == Scope("", "m")


def test_salt_is_the_tenants():
    """The salt depends on tenant and cache salt and on nothing else."""
    salts = {salt_of(Scope(t, m, cache_salt=c)) for t in "ab" for m in "xy" for c in "12"}
    assert len(salts) == 4
    assert all(len(salt) == 32 for salt in salts)


@pytest.mark.parametrize("field", ["model", "cache_salt"])
def test_nothing_huge_is_remembered(field):
    """Names and salts that a client makes up may be as long as a body: none outlives its request."""
    huge = "x" * 2**20
    before = sys.getrefcount(huge)
    assert len(salt_of(Scope(**{"tenant": "t", "model": "m", field: huge}))) == 32
    assert sys.getrefcount(huge) == before


def test_parts_do_not_run_together():
    """Moving a boundary between parts changes the fingerprint."""
    assert fingerprint("ab", "c") != fingerprint("a", "bc") != fingerprint("abc")


@pytest.mark.parametrize(
    ("value", "accepted"),
    [(None, False), ("", False), ("a b", False), ("a\n", False), ("a-1", True), ("x" * 129, False)],
)
def test_request_id(value, accepted):
    """Ids that logs and headers can carry are kept."""
    assert accept_request_id(value) == (value if accepted else None)
