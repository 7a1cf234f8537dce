"""Images: a vision model with random weights, whose answers depend on every patch."""

import base64
import io

import pytest
from PIL import Image

from .conftest import BLOCK, Player, after
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


def opening(seed, before=""):
    """A first request: some text, an image, some hundred tokens of text."""
    parts = [
        {"type": "text", "text": before},
        {"type": "image_url", "image_url": picture(seed)},
        {"type": "text", "text": TEXT},
    ]
    return [{"role": "user", "content": parts if before else parts[1:]}]


@pytest.fixture
def player(stage):
    """A conversation with the vision model."""
    player = Player(stage.cluster(shape("idefics3")))
    yield player
    player.close()


def test_the_same_image_is_reused(player):
    """Its content hash is part of what is proven."""
    first = opening(1)
    answer = player.turn(first)
    messages = after(first, answer, "And what else?")
    warm = player.turn(messages)
    assert warm.token_ids == player.cold(messages).token_ids
    assert warm.reuse.reason in {"hit", "hit_diverged"}  # Random words are not always tokenized as they were.
    assert warm.reuse.remote_tokens >= answer.reuse.prompt_tokens // BLOCK * BLOCK


def test_another_image_under_the_same_text_gets_its_own_answer(player):
    """The token ids are the same; the KV from the image on is not."""
    before = "Here is a picture that I took in the harbour this morning. " * 4
    one, other = opening(1, before), opening(2, before)
    answer = player.turn(one)
    changed = player.turn(other)
    assert changed.token_ids == player.cold(other).token_ids
    assert changed.token_ids != answer.token_ids
    assert changed.reuse.prompt_tokens == answer.reuse.prompt_tokens
    assert changed.reuse.reason in {"hit_diverged", "diverged", "below_threshold"}
    assert changed.reuse.remote_tokens < 100


def test_a_second_image_later_on(player):
    """What precedes a new image is reused, whatever it is."""
    first = opening(3)
    answer = player.turn(first)
    for seed in (4, 5):
        messages = [*first, {"role": "assistant", "content": answer.text}, *opening(seed)]
        warm = player.turn(messages)
        assert warm.token_ids == player.cold(messages).token_ids
        assert warm.reuse.reason in {"hit", "hit_diverged"}
        assert warm.reuse.remote_tokens >= answer.reuse.prompt_tokens // BLOCK * BLOCK
