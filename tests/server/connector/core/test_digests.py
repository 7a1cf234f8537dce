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
    whole = digests.chain(b"s", ids, block_size=block_size, blocks=blocks).digests
    for count in range(blocks + 1):
        assert digests.chain(b"s", ids, block_size=block_size, blocks=count).digests == whole[:count]


@given(tokens.filter(bool), st.data())
def test_one_changed_token_changes_every_digest_from_there_on(ids, data):
    """The digest of a block depends on every token before it."""
    position = data.draw(st.integers(0, len(ids) - 1))
    changed = [*ids]
    changed[position] ^= 1
    before = digests.chain(b"s", ids, block_size=1, blocks=len(ids)).digests
    after = digests.chain(b"s", changed, block_size=1, blocks=len(ids)).digests
    assert before[:position] == after[:position]
    assert all(a != b for a, b in zip(before[position:], after[position:], strict=True))


def test_block_boundaries_are_part_of_the_name():
    """The same tokens in blocks of another size have other digests."""
    assert (
        digests.chain(b"s", [1, 2], block_size=1, blocks=2).digests[-1]
        != digests.chain(b"s", [1, 2], block_size=2, blocks=1).digests[0]
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


small = st.lists(st.integers(0, 2), min_size=0, max_size=24)
items = st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 23), st.integers(1, 4)), max_size=2)


@given(st.tuples(small, items), st.tuples(small, items), st.integers(1, 4), st.sampled_from([b"s", b"t"]))
def test_a_known_chain_changes_no_digest(earlier, later, block_size, start):
    """Continuing an earlier chain gives what hashing everything gives, whatever the two have in common."""
    (before, before_items), (ids, media) = earlier, later
    known = digests.chain(
        start,
        before,
        block_size=block_size,
        blocks=len(before) // block_size,
        media=digests.media_marks(before_items, block_size),
    )
    blocks, marks = len(ids) // block_size, digests.media_marks(media, block_size)
    continued = digests.chain(b"s", ids, block_size=block_size, blocks=blocks, media=marks, known=known)
    assert continued == digests.chain(b"s", ids, block_size=block_size, blocks=blocks, media=marks)


def test_only_what_is_new_is_hashed(monkeypatch):
    """A next turn costs its own blocks, not its history's."""
    ids = list(range(320))
    known = digests.chain(b"s", ids[:304], block_size=16, blocks=19)
    hashed = []
    real = digests.hashlib.sha256
    monkeypatch.setattr(digests.hashlib, "sha256", lambda data: hashed.append(data) or real(data))
    digests.chain(b"s", ids, block_size=16, blocks=20, known=known)
    assert hashed == [known.digests[-1] + digests.pack(range(304, 320))]


@pytest.mark.parametrize(
    "other",
    [[("b", 5, 2)], [("a", 6, 2)], [("a", 5, 3)], [], [("a", 5, 2), ("a", 9, 1)], [("a", 5, 2), ("b", 5, 2)]],
)
def test_another_medium_is_another_prefix(other):
    """The same placeholder tokens with other content, place or extent share nothing from the item's block on."""
    ids = [7] * 12

    def made(items):
        marks = digests.media_marks(items, 4)
        return digests.chain(b"s", ids, block_size=4, blocks=3, media=marks).digests

    assert made([("a", 5, 2)])[0] == made(other)[0]
    assert made([("a", 5, 2)])[2] != made(other)[2]


def test_the_memory_of_chains_is_bounded():
    """The longest unused conversations are forgotten first, and each keeps only its last chain."""
    memory = digests.ChainMemory(max_tokens=8)
    chains = {n: digests.chain(b"s", range(n), block_size=1, blocks=n) for n in (3, 4, 5, 9)}
    memory.put("a", chains[3])
    memory.put("b", chains[5])
    assert (len(memory), memory.get("a")) == (2, chains[3])
    memory.put("b", chains[4])
    memory.put("c", chains[4])
    assert (memory.get("a"), memory.get("b"), memory.get("c")) == (None, chains[4], chains[4])
    memory.put("d", chains[9])
    assert len(memory) == 0
    memory.forget("d")
    memory.put("e", chains[5])
    assert memory.get("e") == chains[5]


@given(small, small)
def test_common_tokens_counts_what_both_begin_with(ours, theirs):
    """As a loop over the tokens would."""
    same = 0
    while same < min(len(ours), len(theirs)) and ours[same] == theirs[same]:
        same += 1
    assert digests.common_tokens(digests.pack(ours), digests.pack(theirs)) == same
