"""Images: a vision model with random weights, whose answers depend on every patch."""

import base64
import io

import pytest
from PIL import Image

from .conftest import Player, after
from .test_shapes import shape

TEXT = "Look at the picture. " * 24 + "What do you see?"


def picture(seed):
    """A message part with an image of its own for every seed."""
    image = Image.new("RGB", (60, 40))
    for x in range(60):
        for y in range(40):
            image.putpixel((x, y), (x * 4 % 256, y * 6 % 256, (seed * 80 + x * y) % 256))
    data = io.BytesIO()
    image.save(data, "PNG")
    return {"url": f"data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}"}


def opening(seed):
    """A first request with an image before some hundred tokens of text."""
    parts = [{"type": "image_url", "image_url": picture(seed)}, {"type": "text", "text": TEXT}]
    return [{"role": "user", "content": parts}]


@pytest.fixture
def player(stage):
    """A conversation with the vision model."""
    player = Player(stage.cluster(shape("idefics3")))
    yield player
    player.close()


def test_the_same_image_is_refused_and_right(player):
    """What an image contributes cannot be proven by token ids: the turn is computed."""
    first = opening(1)
    answer = player.turn(first)
    messages = after(first, answer, "And what else?")
    warm = player.turn(messages)
    assert warm.token_ids == player.cold(messages).token_ids
    assert (warm.reuse.reason, warm.reuse.remote_tokens) == ("unsupported", 0)


def test_another_image_under_the_same_text_gets_its_own_answer(player):
    """The token ids are the same; the KV is not."""
    one, other = opening(1), opening(2)
    answer = player.turn(one)
    changed = player.turn(other)
    assert changed.reuse.remote_tokens == 0
    assert changed.token_ids == player.cold(other).token_ids
    assert changed.token_ids != answer.token_ids
