"""JSON that passes through keeps its bytes; what is no JSON is named."""

import json

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bidikv_server.router.core.json_bytes import (
    InvalidJson,
    NotAnObject,
    canonical,
    encode_from,
    read_object,
    read_value,
)

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner), max_leaves=20)
OBJECTS = st.dictionaries(TEXT, VALUES, max_size=6)


@settings(max_examples=50)
@given(OBJECTS, st.sampled_from([None, 2]), st.booleans())
def test_reading_and_writing(value, indent, ascii_only):
    """What was read is what was written, whatever its spelling, and what is written from it is the same JSON."""
    raw = json.dumps(value, indent=indent, ensure_ascii=ascii_only).encode()
    read = read_object(raw)
    assert read == value
    assert json.loads(encode_from(read, {**read, "added": 1})) == {**value, "added": 1}


@pytest.mark.parametrize(
    "spelling",
    [
        "1e5",
        "1.50",
        "123456789012345678901234567890",
        "18446744073709551616",
        "-0.0",
        '"\\u00e9\\/\\ud83d\\ude00"',
        '"é"',
        "[ 1 ,\n 2 ]",
        '{"b": 1, "a": 2}',
    ],
)
def test_a_clients_spelling_stays(spelling):
    """A value goes on as the bytes that the client wrote; fields that are left out or new do not touch it."""
    read = read_object(f'{{"gone": 1, "kept" : {spelling} , "last":true}}'.encode())
    body = {name: value for name, value in read.items() if name != "gone"} | {"new": {"a": [1]}}
    assert encode_from(read, body) == f'{{"kept":{spelling},"last":true,"new":{{"a":[1]}}}}'.encode()


def test_another_value_of_the_same_name_is_written_anew():
    """Only the very value that was read stands for its bytes."""
    read = read_object(b'{"a": {"x" : 1}, "b": 1.0}')
    assert encode_from(read, {"a": {"x": 2}, "b": 1}) == b'{"a":{"x":2},"b":1}'
    assert encode_from({"a": 1}, {"a": 1}) == b'{"a":1}'


def test_names_are_written_anew():
    """An engine sees the names that were checked: an escape or a repetition cannot hide one."""
    read = read_object(b'{"kv\\u005ftransfer_params": 1, "model": "x", "model": "y"}')
    assert read == {"kv_transfer_params": 1, "model": "y"}
    assert encode_from(read, read) == b'{"kv_transfer_params":1,"model":"y"}'


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "truncated"),
        (b'{"a":1', "truncated"),
        (b'{"a":1} x', "byte 9"),
        (b'{"a":NaN}', "byte 5"),
        (b'{"a":[1,]}', "byte 8"),
        (b'{"a":"\x01"}', "byte 6"),
        (b'{"a":"\xff"}', "field 'a'"),
        (b'\xff\xfe{"a":1}', "UTF-8"),
        (b'{"a":"\\ud800"}', "other half"),
        (b'{"a":1e999}', "field 'a'"),
    ],
)
def test_no_json(raw, words):
    """What is no JSON, or would become none on its way, is refused with the place."""
    with pytest.raises(InvalidJson, match=words):
        read_object(raw)


def test_another_kind_of_json():
    """A body is an object."""
    with pytest.raises(NotAnObject):
        read_object(b"[]")


@pytest.mark.parametrize("raw", [b'{"a":' + b"[" * 100_000, b'{"a":' * 100_000])
def test_depth_has_a_limit(raw):
    """Nesting ends in an error that Python knows, not in a crash."""
    with pytest.raises(RecursionError):
        read_object(raw)


@pytest.mark.parametrize("text", ["{", '"\ud800"', "nul", "\ud800"])
def test_no_value(text):
    """A text that is no JSON is no value, whatever is wrong with it."""
    with pytest.raises(InvalidJson):
        read_value(text)


@settings(max_examples=50)
@given(VALUES)
def test_equal_values_have_equal_bytes(value):
    """Order and spelling of what was read do not show."""
    shuffled = json.loads(json.dumps(value), object_pairs_hook=lambda pairs: dict(reversed(pairs)))
    assert canonical(shuffled) == canonical(value)
    assert msgspec.json.decode(canonical(value)) == value
