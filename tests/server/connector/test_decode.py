"""Decode's retention on vLLM's real block pool, without an engine."""

from types import SimpleNamespace

import pytest

from bidikv_server.connector import messages
from bidikv_server.connector.config import ConnectorConfig
from bidikv_server.connector.core import digests
from bidikv_server.connector.decode import DecodeRetention
from bidikv_server.reasons import Reason

pytest.importorskip("vllm", reason="the block pool is vLLM's", exc_type=ImportError)
from vllm.v1.core.block_pool import BlockPool

BLOCK = 4
IDENTITY = "same engines"
CONNECTION = {"engine_id": "e", "host": "h", "port": 1, "tp_size": 1, "dcp_size": 1, "pp_size": 1}


class FinishedRequest:
    """The attributes of a vLLM request that retention reads."""

    def __init__(self, tokens, *, params, **changes):
        self.all_token_ids = self.prompt_token_ids = tokens
        self.num_tokens = len(tokens)
        self.num_computed_tokens = len(tokens) - 1
        self.num_in_flight_tokens = 0
        self.kv_transfer_params = params
        self.prompt_embeds = self.pooling_params = self.lora_request = self.cache_salt = None
        self.mm_features = []
        self.resumable = False
        self.__dict__.update(changes)


def media(content, first=0, length=4):
    """A media item as vLLM's requests carry it."""
    place = SimpleNamespace(offset=first, length=length)
    return SimpleNamespace(identifier=content, mm_position=place)


def params(**changes):
    return {"bidikv": {"v": 1, "conversation": "c", "salt": "tenant", "retain_s": 60.0} | changes}


@pytest.fixture
def pool():
    return BlockPool(num_gpu_blocks=10, enable_caching=False, hash_block_size=BLOCK)


class Recorder:
    """Keeps what was counted."""

    def __init__(self):
        self.events = []

    def record(self, metric, value=1, label=""):
        self.events.append((metric, label, value))


def start(pool, port, **settings):
    config = ConnectorConfig(role="decode", index_port=port, **settings)
    return DecodeRetention(
        config, pool, Recorder(), identity=IDENTITY, block_size=BLOCK, rank=0, connection=CONNECTION
    )


@pytest.fixture
def decode(pool, free_port):
    decode = start(pool, free_port, protected_share=0.5)
    yield decode
    decode.close()


def finish(decode, pool, tokens, params, *, complete=True, **changes):
    """Run a request's end of life the way vLLM does: allocate, finish, free, next step."""
    blocks = pool.get_new_blocks(-(-len(tokens) // BLOCK))
    ids = [block.block_id for block in blocks]
    decode.retain(FinishedRequest(tokens, params=params, **changes), (ids,), complete=complete)
    pool.free_blocks(reversed(blocks))
    decode.settle()
    return ids


def ask(decode, data):
    return decode._index.answer(data)


def look_up(
    decode,
    tokens,
    *,
    salt="tenant",
    identity=IDENTITY,
    version=messages.VERSION,
    adapter="",
    path="",
    cache_salt="",
    marks=None,
):
    start = digests.seed(IDENTITY, salt, cache_salt, adapter, path)
    chain = digests.chain(start, tokens, block_size=BLOCK, blocks=len(tokens) // BLOCK, media=marks).digests
    reply = ask(decode, messages.encode(messages.Lookup(version, identity, "c", b"".join(chain))))
    return messages.decode(reply)


def test_retained_blocks_cost_no_free_block_and_are_found(decode, pool):
    """The pool has as many free blocks as before, and the turn's whole blocks are offered."""
    free = pool.get_num_free_blocks()
    ids = finish(decode, pool, list(range(11)), params())
    assert pool.get_num_free_blocks() == free
    assert look_up(decode, list(range(12))).block_ids == ids[:2]


def test_blocks_handed_out_invalidate_the_read(decode, pool):
    """A reader that asks again after the hand-out is told."""
    finish(decode, pool, list(range(11)), params())
    found = look_up(decode, list(range(12)))
    check = messages.Validate(messages.VERSION, found.epoch, found.block_ids, found.generations)
    assert messages.decode(ask(decode, messages.encode(check))).valid
    pool.get_new_blocks(pool.get_num_free_blocks())
    assert not messages.decode(ask(decode, messages.encode(check))).valid
    assert look_up(decode, list(range(12))).reason == Reason.EVICTED


def test_another_start_of_the_engine_confirms_nothing(decode, pool):
    """Generations of a restarted engine begin anew; its epoch does not match."""
    finish(decode, pool, list(range(11)), params())
    found = look_up(decode, list(range(12)))
    check = messages.Validate(messages.VERSION, "another epoch", found.block_ids, found.generations)
    assert not messages.decode(ask(decode, messages.encode(check))).valid


@pytest.mark.parametrize(
    "junk",
    [
        None,
        {},
        {"x": 1},
        {"bidikv": 1},
        {"bidikv": {"v": 1}},
        params(v=2),
        params(conversation=""),
        params(conversation=7),
        params(conversation="c" * 257),
        params(salt=None),
        params(retain_s="ever"),
        params(retain_s=0),
        params(retain_s=-1.0),
        params(retain_s=float("nan")),
    ],
)
def test_nothing_is_retained_without_a_well_formed_wish(decode, pool, junk):
    """Junk in kv_transfer_params pins and retains nothing."""
    free = pool.get_num_free_blocks()
    finish(decode, pool, list(range(11)), junk)
    assert look_up(decode, list(range(12))).block_ids == []
    assert pool.get_num_free_blocks() == free


@pytest.mark.parametrize(
    "changes",
    [
        {"mm_features": [media("renderer0-mm-3-image-0")]},
        {"mm_features": [media("a" * 64), media("my-own-uuid")]},
        {"prompt_embeds": object()},
        {"resumable": True},
        {"pooling_params": object()},
    ],
)
def test_what_cannot_be_proven_is_not_retained(decode, pool, changes):
    """Token ids alone do not name the KV of such requests."""
    finish(decode, pool, list(range(11)), params(), **changes)
    assert look_up(decode, list(range(12))).block_ids == []


@pytest.mark.parametrize(
    "other", [{"salt": "another tenant"}, {"adapter": "lora"}, {"path": "v2"}, {"cache_salt": "salted"}]
)
def test_equal_text_of_other_owners_never_matches(decode, pool, other):
    """Tenant, adapter and cache salt are part of every digest."""
    finish(decode, pool, list(range(11)), params())
    assert look_up(decode, list(range(12)), **other).block_ids == []


def test_unlike_engines_and_versions_are_refused_with_the_reason(decode):
    """A peer that cannot be served hears why."""
    assert f"version {messages.VERSION}" in look_up(decode, [0] * 8, version=9).message
    assert "differ" in look_up(decode, [0] * 8, identity="another model").message


def test_malformed_messages_get_no_answer(decode):
    """Neither bytes, nor a digest list with a remainder, nor an answer in place of a question."""
    assert ask(decode, b"\xff\x00garbage") is None
    assert ask(decode, messages.encode(messages.Lookup(messages.VERSION, IDENTITY, "c", b"x" * 33))) is None
    assert ask(decode, messages.encode(messages.Verdict(messages.VERSION, True))) is None


def test_the_wish_is_capped_by_the_engines_ttl(pool, free_port):
    """A client cannot retain for longer than the operator allows."""
    decode = start(pool, free_port, decoder_kv_blocks_ttl=1e-9)
    try:
        finish(decode, pool, list(range(11)), params(retain_s=1e9))
        assert look_up(decode, list(range(12))).reason == Reason.EXPIRED
    finally:
        decode.close()


def test_protected_blocks_are_free_and_taken_last(decode, pool):
    """Churn that goes through every other block many times leaves those of a promised return alone."""
    free = pool.get_num_free_blocks()
    ids = finish(decode, pool, list(range(11)), params(protect=True))
    assert pool.get_num_free_blocks() == free
    for number in range(30):
        decode.expect(2)
        finish(
            decode,
            pool,
            list(range(100 + 9 * number, 109 + 9 * number)),
            params(conversation=f"other-{number}"),
        )
        decode.handed_out(3)
    assert look_up(decode, list(range(12))).block_ids == ids[:2]


def test_a_long_request_takes_what_was_freed_behind_the_protected_first(decode, pool):
    """Blocks that were freed after the last refresh stand behind the protected ones in the pool's queue."""
    ids = finish(decode, pool, list(range(11)), params(protect=True))
    decode.handed_out(3)
    blocks = pool.get_new_blocks(5)
    decode.handed_out(5)
    pool.free_blocks(blocks)
    pool.free_block_queue.append_n(
        [pool.free_block_queue.popleft() for _ in range(5)]
    )  # as hashed blocks are freed
    decode.expect(6)
    pool.get_new_blocks(6)
    assert look_up(decode, list(range(12))).block_ids == ids[:2]


def test_without_protection_the_same_churn_takes_them(decode, pool):
    """The test above shows protection, not luck."""
    finish(decode, pool, list(range(11)), params())
    for number in range(30):
        finish(
            decode,
            pool,
            list(range(100 + 9 * number, 109 + 9 * number)),
            params(conversation=f"other-{number}"),
        )
        decode.handed_out(3)
    assert look_up(decode, list(range(12))).block_ids == []


def test_a_request_takes_protected_blocks_when_it_needs_them(decode, pool):
    """Protection holds no reference: everything free can be allocated, and the promise is the loss."""
    finish(decode, pool, list(range(17)), params(protect=True))
    pool.get_new_blocks(pool.get_num_free_blocks())
    assert look_up(decode, list(range(17))).block_ids == []
    assert len(decode._protected) == 0


def test_protection_stays_within_its_share(decode, pool):
    """Five of ten blocks at most, also for one long conversation."""
    finish(decode, pool, list(range(29)), params(protect=True))
    assert len(decode._protected) == 5


def test_deferred_frees_do_not_put_retained_blocks_first(decode, pool):
    """While vLLM still holds a finished request's blocks ours stay referenced, and join the tail after it let go."""
    blocks = pool.get_new_blocks(3)
    ids = [block.block_id for block in blocks]
    decode.retain(FinishedRequest(list(range(11)), params=params()), (ids,))
    decode.settle()
    pool.free_blocks(reversed(blocks))
    decode.settle()
    others = pool.get_new_blocks(pool.get_num_free_blocks() - 2)
    assert not {block.block_id for block in others} & set(ids[:2])
    assert look_up(decode, list(range(12))).block_ids == ids[:2]


def test_an_empty_turn_hides_no_earlier_one(decode, pool):
    """A request that ends without a settled block leaves what its conversation had."""
    ids = finish(decode, pool, list(range(11)), params())
    decode.retain(FinishedRequest([], params=params()), ([],))
    assert look_up(decode, list(range(12))).block_ids == ids[:2]


def test_the_next_turn_takes_its_conversations_place(decode, pool):
    """A turn without protection ends the protection of the one before."""
    finish(decode, pool, list(range(11)), params(protect=True))
    finish(decode, pool, list(range(11)), params())
    assert len(decode._protected) == 0


def test_a_final_turn_releases_the_conversation(decode, pool):
    """Nothing is protected, and nothing found, after the conversation ended."""
    finish(decode, pool, list(range(11)), params(protect=True))
    finish(decode, pool, list(range(11)), params(release=True, retain_s=0.0))
    assert len(decode._protected) == 0
    assert look_up(decode, list(range(12))).reason == Reason.RELEASED


def test_a_cache_reset_forgets_everything(decode, pool):
    """VLLM can reset its caches whatever is protected, and after new weights no old block is confirmed or offered."""
    finish(decode, pool, list(range(11)), params(protect=True))
    found = look_up(decode, list(range(12)))
    assert pool.reset_prefix_cache()
    check = messages.Validate(messages.VERSION, found.epoch, found.block_ids, found.generations)
    assert not messages.decode(ask(decode, messages.encode(check))).valid
    assert look_up(decode, list(range(12))).block_ids == []
    assert len(decode._protected) == 0


def test_what_happened_is_counted(decode, pool):
    """Turns, blocks by class, losses by cause, questions by kind, and what is held now."""
    finish(decode, pool, list(range(11)), params(protect=True))
    finish(decode, pool, list(range(50, 61)), params(conversation="d"))
    look_up(decode, list(range(12)))
    ask(decode, b"garbage")
    pool.get_new_blocks(pool.get_num_free_blocks())
    decode.report()
    events = decode._stats.events
    assert ("retained_turns", "retained", 1) in events
    assert ("retained_blocks", "protected", 2) in events
    assert ("retained_blocks", "soft", 2) in events
    assert ("lost_blocks", "evicted", 4) in events
    assert ("index_requests", "lookup", 1) in events
    assert ("index_requests", "malformed", 1) in events
    assert ("retained_tokens", "protected", 0) in events
    assert ("retained_tokens", "soft", 0) in events


def test_a_peer_renews_and_releases_protection(decode, pool):
    """What a peer asks the index for reaches the protected blocks at the engine's next step."""
    finish(decode, pool, list(range(11)), params(protect=True))
    ask(decode, messages.encode(messages.Renew(messages.VERSION, "c", 60.0)))
    decode.report()
    assert len(decode._protected) == 2
    ask(decode, messages.encode(messages.Release(messages.VERSION, "c")))
    decode.report()
    assert len(decode._protected) == 0


def test_a_turn_that_may_have_been_given_up_keeps_the_one_before(decode, pool):
    """Its blocks are found, but its conversation's protection and explanation stay those of the turn that ended well."""
    first = finish(decode, pool, list(range(11)), params(protect=True))
    finish(decode, pool, [*range(8), *range(50, 58)], params(release=True), complete=False)
    assert look_up(decode, list(range(12))).block_ids[:2] == first[:2]
    assert len(look_up(decode, [*range(8), *range(50, 58)]).block_ids) == 3
    assert len(decode._protected) == 2
    assert ("retained_turns", "stop_string", 1) in decode._stats.events


def test_media_are_part_of_the_name(decode, pool):
    """The same tokens with another image are another prefix from the image's block on."""
    tokens = list(range(13))
    finish(decode, pool, tokens, params(), mm_features=[media("a" * 64, first=5, length=2)])
    marks = digests.media_marks([("a" * 64, 5, 2)], BLOCK)
    assert len(look_up(decode, tokens, marks=marks).block_ids) == 3
    assert len(look_up(decode, tokens).block_ids) == 1
    other = digests.media_marks([("b" * 64, 5, 2)], BLOCK)
    assert len(look_up(decode, tokens, marks=other).block_ids) == 1


def test_a_diverged_prompt_learns_what_was_retained(decode, pool):
    """The packed tokens of the block in which it parts, also on turns that continue a remembered chain."""
    finish(decode, pool, list(range(11)), params())
    finish(decode, pool, list(range(23)), params())
    assert look_up(decode, [*range(13), 99, *range(14, 20)]).retained == digests.pack(range(12, 16))


@pytest.mark.parametrize("retain_s", [float("inf"), 10**400, 1e300], ids=["infinite", "huge", "large"])
def test_no_wish_is_too_large(decode, pool, retain_s):
    """Whatever number a client sends, the engine's own maximum holds."""
    ids = finish(decode, pool, list(range(11)), params(retain_s=retain_s, protect=True))
    assert look_up(decode, list(range(12))).block_ids == ids[:2]
