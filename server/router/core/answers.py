"""Keeps transfer parameters out of whole (not streamed) answers.

An answer's bytes pass as they are. Stock vLLM writes `"kv_transfer_params": null` there, which tells a client nothing
and stays. Only a filled-in value, with engines' addresses and block ids, is cut out and replaced by null; every other
byte stays where it is. vLLM's stream chunks have no such field.
"""

from __future__ import annotations

import json
import re
from typing import Final

_FIELD: Final = re.compile(rb'"kv_transfer_params"\s*:\s*(?=[^\sn])')
"""The key itself: within a JSON string its quotation marks would be escaped."""


def conceal_transfer(raw: bytes) -> bytes:
    """The answer with every `kv_transfer_params` null; the same object when it has nothing to hide."""
    match = _FIELD.search(raw)
    if match is None:
        return raw
    try:
        text = raw[match.end() :].decode()
        _, length = json.JSONDecoder().raw_decode(text)
    except ValueError:
        return raw
    rest = text[length:].encode()
    return raw[: match.end()] + b"null" + conceal_transfer(rest)
