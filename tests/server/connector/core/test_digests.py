"""Digest chains name whole token prefixes, and nothing else shares their names."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bidikv_server.connector.core import digests

tokens = st.lists(st.integers(0, 2**31 - 1), min_size=0, max_size=64)


@given(tokens, st.integers(1, 8))
def test_equal_prefixes_have_equal_digests(ids, block_size):
    """A longer prompt's first digests are the shorter prompt's digests."""
    blocks = len(ids) // block_size
    whole = digests.chain(b"s", ids, block_size=block_size, blocks=blocks)
    for count in range(blocks + 1):
        assert digests.chain(b"s", ids, block_size=block_size, blocks=count) == whole[:count]


@given(tokens.filter(bool), st.data())
def test_one_changed_token_changes_every_digest_from_there_on(ids, data):
    """The digest of a block depends on every token before it."""
    position = data.draw(st.integers(0, len(ids) - 1))
    changed = [*ids]
    changed[position] ^= 1
    before = digests.chain(b"s", ids, block_size=1, blocks=len(ids))
    after = digests.chain(b"s", changed, block_size=1, blocks=len(ids))
    assert before[:position] == after[:position]
    assert all(a != b for a, b in zip(before[position:], after[position:], strict=True))


def test_block_boundaries_are_part_of_the_name():
    """The same tokens in blocks of another size have other digests."""
    assert (
        digests.chain(b"s", [1, 2], block_size=1, blocks=2)[-1]
        != digests.chain(b"s", [1, 2], block_size=2, blocks=1)[0]
    )


@pytest.mark.parametrize("parts", [("a", "b"), ("ab", ""), ("", "ab"), ("ab",), ("a", "b", "")])
def test_seeds_of_different_parts_differ(parts):
    """Neither order nor empty parts nor concatenation can make two seeds equal."""
    others = {("a", "b"), ("ab", ""), ("", "ab"), ("ab",), ("a", "b", "")} - {parts}
    assert all(digests.seed(*parts) != digests.seed(*other) for other in others)


def test_too_few_tokens_is_an_error():
    """A caller that asks for blocks that are not there has a bug."""
    with pytest.raises(ValueError, match="2 blocks of 16 tokens"):
        digests.chain(b"s", [0] * 31, block_size=16, blocks=2)
