"""Content parts are found wherever an API puts them."""

import pytest

from bidikv_server.router.core.content import media_of, parts

TEXT = {"type": "text", "text": "x"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}


@pytest.mark.parametrize(
    ("body", "count"),
    [
        ({}, 0),
        ({"messages": "text", "input": "text"}, 0),
        ({"messages": [7, None, []]}, 0),
        ({"messages": [{"content": [TEXT, "odd", TEXT]}]}, 3),
        ({"messages": [{"content": [{"type": "tool_result", "content": [TEXT, IMAGE]}]}]}, 4),
        ({"input": [{"type": "function_call_output", "output": [IMAGE]}]}, 2),
    ],
)
def test_every_part_is_seen(body, count):
    """In messages, in input items, inside tool results."""
    assert len(list(parts(body))) == count


def test_a_named_item_inside_a_tool_result():
    """A name counts wherever it stands."""
    inner = {"type": "tool_result", "content": [{**IMAGE, "uuid": "mine"}]}
    assert media_of({"messages": [{"role": "user", "content": [inner]}]}).named


@pytest.mark.parametrize(
    "part", [IMAGE, {"type": "hologram"}, {"type": None}, {"input_audio": {}}, {"type": "file"}]
)
def test_what_is_not_known_is_media(part):
    """Rendering once too often does no harm."""
    assert media_of({"messages": [{"role": "user", "content": [TEXT, part]}]}).present
