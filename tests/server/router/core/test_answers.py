"""Hiding transfer parameters in whole answers."""

import pytest

from bidikv_server.router.core.answers import conceal_transfer

KEY = b'"kv_transfer_params"'


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b'{"a": 1}',
        b'{"a": 1, ' + KEY + b": null}",
        b'{"a": "' + KEY.replace(b'"', b'\\"') + b': {1}"}',
        b"{" + KEY + b": {broken",
        b"{" + KEY + b":",
        b"\xff" + KEY + b': {"a": "\xff"',
    ],
)
def test_untouched(raw):
    """Nothing to hide, or nothing that can be read: the same object."""
    assert conceal_transfer(raw) is raw


@pytest.mark.parametrize("value", [b'{"a": {"b": [1, "}"]}}', b"[1]", b'"x"', b"{}"])
def test_concealed(value):
    """Only the value changes, wherever it stands."""
    before, after = b'{"\xc3\xa9": "x",  ' + KEY + b" :\n ", b' , "z": 1.50}'
    assert conceal_transfer(before + value + after) == before + b"null" + after
    twice = before + value + after
    assert conceal_transfer(b"[" + twice + b"," + twice + b"]").count(b"null") == 2
