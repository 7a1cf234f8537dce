"""API keys and whose they are."""

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bidikv_server.router.core.tenants import KeyRing, digest_of, is_key, key_digest, presented_key, read_keys

DIGEST = "sha256:" + hashlib.sha256(b"sk-2").hexdigest()


def test_keys_and_digests():
    """A key is known whether it was given as it is or by its digest, in either case of its letters."""
    ring = read_keys({"sk-1": "a", DIGEST: "b", DIGEST.upper().replace("SHA", "sha"): "b"})
    assert [ring.tenant_of(key) for key in ("sk-1", "sk-2", "sk-3", "", DIGEST)] == [
        "a",
        "b",
        None,
        None,
        None,
    ]
    assert ring.counts() == {"a": 1, "b": 1}


def test_merged():
    """The later ring's word counts."""
    ring = read_keys({"k": "a", "l": "b"}).merged(read_keys({"k": "c"}))
    assert (ring.tenant_of("k"), ring.tenant_of("l")) == ("c", "b")


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([], "at least one"),
        ({}, "at least one"),
        ({"sk-secret": 1}, "entry 1: a tenant's name"),
        ({"ok": "a", "sk-secret": "two words"}, "entry 2: a tenant's name"),
        ({"sk-secret": "x" * 65}, "entry 1"),
        ({"sk-secret ": "a"}, "entry 1: a key neither begins nor ends"),
        ({"sk-sécret": "a"}, "entry 1: a key has"),
        ({"": "a"}, "entry 1: a key has"),
        ({"sha256:sk-secret": "a"}, "entry 1: after sha256:"),
        ({"sk-2": "a", DIGEST: "b"}, "entry 2: its key belongs to another tenant"),
    ],
)
def test_wrong_entries(table, message):
    """An entry is named by its place, never by its key."""
    with pytest.raises(ValueError, match=message) as caught:
        read_keys(table)
    assert "cret" not in str(caught.value)


@given(st.text(), st.text())
def test_comparison(one, other):
    """A key is itself, or its digest's, and nothing else."""
    assert is_key(one, key_digest(other)) == (one == other)
    assert not is_key(None, key_digest(one)) or not one


def test_nothing_shows_a_key():
    """Neither the ring's text nor what it is made of holds a key."""
    ring = KeyRing({digest_of("sk-secret"): "a"})
    assert "secret" not in repr(ring) + repr(ring.tenants)


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        ({}, None),
        ({"authorization": "Bearer k"}, "k"),
        ({"authorization": "bearer  k "}, "k"),
        ({"authorization": "Basic k"}, None),
        ({"authorization": "Bearer "}, None),
        ({"authorization": "Bearer"}, None),
        ({"x-api-key": "k"}, "k"),
        ({"x-api-key": ""}, None),
        ({"authorization": "Bearer k", "x-api-key": "l"}, "k"),
        ({"authorization": "Basic k", "x-api-key": "l"}, None),
    ],
)
def test_presented(headers, key):
    """The credential of OpenAI's clients, else that of Anthropic's."""
    assert presented_key(headers) == key
