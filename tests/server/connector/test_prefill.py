"""Prefill's lookups and plans against a real side channel, without an engine."""

import logging
import socket
import threading
import time
from collections import Counter
from concurrent.futures import wait
from types import SimpleNamespace

import pytest

from bidikv_server.connector import messages
from bidikv_server.connector import prefill as prefill_module
from bidikv_server.connector.config import ConnectorConfig
from bidikv_server.connector.core import digests
from bidikv_server.connector.metadata import ReadbackOutcomes
from bidikv_server.connector.prefill import PrefillReadback
from bidikv_server.connector.side_channel import Server
from bidikv_server.reasons import Reason

pytest.importorskip("vllm", reason="a request's status is vLLM's", exc_type=ImportError)
from vllm.v1.request import RequestStatus

BLOCK = 16
PROMPT = list(range(200))
CONNECTION = {"engine_id": "e", "host": "h", "port": 1, "tp_size": 2, "dcp_size": 1, "pp_size": 1}


def free_address():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


class Recorder:
    """Keeps what was counted."""

    def __init__(self):
        self.events = []

    def record(self, metric, value=1, label=""):
        self.events.append((metric, label, value))


def media(content, first=0, length=4):
    """A media item as vLLM's requests carry it."""
    place = SimpleNamespace(offset=first, length=length)
    return SimpleNamespace(identifier=content, mm_position=place)


class Request:
    """The attributes of a vLLM request that readback reads."""

    def __init__(self, sources, *, prompt=PROMPT, **changes):
        self.request_id = "r"
        self.prompt_token_ids = prompt
        self.num_prompt_tokens = len(prompt)
        self.kv_transfer_params = {
            "do_remote_decode": True,
            "bidikv": {"v": 1, "conversation": "c", "salt": "s", "sources": sources},
        }
        self.prompt_embeds = self.pooling_params = self.lora_request = self.cache_salt = None
        self.mm_features = []
        self.resumable = False
        self.num_preemptions = 0
        self.status = RequestStatus.FINISHED_LENGTH_CAPPED
        self.__dict__.update(changes)


@pytest.fixture
def prefill():
    prefill = PrefillReadback(
        ConnectorConfig(role="prefill", lookup_timeout_s=5.0), "identity", BLOCK, Recorder(), supported=True
    )
    yield prefill
    prefill.close()


@pytest.fixture
def index(free_port):
    """Start a scripted index; returns a function that does."""
    servers = []

    def start(handle):
        servers.append(Server(f"127.0.0.1:{free_port}", handle))
        return servers[-1].address

    yield start
    for server in servers:
        server.close()


def holding(count, reason=Reason.HIT):
    def handle(_):
        return messages.encode(
            messages.Found(
                messages.VERSION, "epoch", list(range(50, 50 + count)), [3] * count, reason, b"", **CONNECTION
            )
        )

    return handle


def await_answers(prefill):
    lookup = prefill._turns["r"].lookup
    if lookup is not None:
        wait([future for _, future in lookup._asked], timeout=10)


def settled(prefill, request, local_tokens=0):
    """Ask as vLLM does, once the lookup has ended."""
    prefill.start(request)
    await_answers(prefill)
    return prefill.matched_tokens("r", local_tokens)


def end(prefill, outcome):
    """The last rank reports, and vLLM hears of it."""
    prefill.ended(ReadbackOutcomes({"r": outcome}))
    prefill.over(["r"])


def account(prefill, request):
    return prefill.account(request)["bidikv"]


def test_a_lookup_under_way_makes_vllm_ask_again(prefill, index):
    """(None, False) until decode has answered, then the tokens to pull."""
    release = threading.Event()
    answer = holding(4)
    address = index(lambda data: release.wait(10) and answer(data))
    prefill.start(Request([address]))
    assert prefill.matched_tokens("r", 0) == (None, False)
    release.set()
    await_answers(prefill)
    assert prefill.matched_tokens("r", 0) == (64, True)


def test_an_answer_that_comes_at_once_is_taken_in_the_same_step(prefill, index, monkeypatch):
    """Planning lets the answer's thread have its turn instead of asking again and again."""
    monkeypatch.setattr(prefill, "_patience_s", 10.0)
    prefill.start(Request([index(holding(4))]))
    assert prefill.matched_tokens("r", 0) == (64, True)


def test_a_step_waits_once_however_many_lookups_are_under_way(prefill, index, monkeypatch):
    """What one lookup has waited, the next ones of the same step do not; the next step may wait again."""
    release = threading.Event()
    address = index(lambda _: release.wait(10) and None)
    waits = []
    monkeypatch.setattr(prefill_module.Lookup, "wait", lambda _, timeout_s: waits.append(timeout_s))
    monkeypatch.setattr(prefill_module, "time", SimpleNamespace(monotonic=iter(range(1000)).__next__))
    for request_id in ("a", "b"):
        prefill.start(Request([address], request_id=request_id))
        assert prefill.matched_tokens(request_id, 0) == (None, False)
    assert waits == [prefill_module._PATIENCE_S]
    assert prefill.take_reads() == []
    assert prefill.matched_tokens("b", 0) == (None, False)
    assert waits == [prefill_module._PATIENCE_S] * 2
    release.set()


def test_a_pull_reads_the_proven_blocks_into_the_allocated_ones(prefill, index):
    """Only the blocks beyond the local hit, in the words of vLLM's NIXL metadata, with what it takes to believe them."""
    request = Request([index(holding(8))])
    assert settled(prefill, request, local_tokens=32) == (96, True)
    prefill.commit("r", list(range(13)), 96)
    (read,) = prefill.take_reads()
    assert prefill.take_reads() == []
    assert (read.first_block, read.local_block_ids) == (2, tuple(range(2, 8)))
    assert read.kv_transfer_params["remote_block_ids"] == (list(range(52, 58)),)
    assert read.kv_transfer_params["tp_size"] == 2
    assert (read.check.block_ids, read.check.generations) == (tuple(range(52, 58)), (3,) * 6)
    end(prefill, Reason.HIT)
    assert account(prefill, request) == {
        "v": 1, "reason": "hit", "prompt_tokens": 200, "remote_tokens": 96, "local_tokens": 32,
        "computed_tokens": 72, "diverged_at_token": None,
    }  # fmt: skip


@pytest.mark.parametrize("outcome", [Reason.VALIDATION_FAILED, Reason.TRANSFER_FAILED])
def test_a_failed_read_is_not_tried_again(prefill, index, outcome):
    """VLLM asks anew after a failure; a second answer would wait for a read that nobody queued."""
    request = Request([index(holding(8))])
    settled(prefill, request)
    prefill.commit("r", list(range(13)), 128)
    end(prefill, outcome)
    assert prefill.matched_tokens("r", 16) == (0, False)
    result = account(prefill, request)
    assert (result["reason"], result["remote_tokens"], result["computed_tokens"]) == (outcome, 0, 200)


def test_a_preempted_request_is_not_parked_again(prefill, index):
    """After a good read and a preemption vLLM asks anew, now with what was pulled as a local hit: compute the rest."""
    request = Request([index(holding(8))])
    settled(prefill, request, local_tokens=16)
    prefill.commit("r", list(range(13)), 112)
    end(prefill, Reason.HIT)
    assert prefill.matched_tokens("r", 192) == (0, False)
    result = account(prefill, request)
    assert (result["remote_tokens"], result["local_tokens"], result["computed_tokens"]) == (112, 16, 72)
    assert all(value >= 0 for _, _, value in prefill._stats.events)


def test_one_ranks_failure_is_final(prefill, index):
    """A slower rank's success does not undo it."""
    request = Request([index(holding(8))])
    settled(prefill, request)
    prefill.commit("r", list(range(13)), 128)
    prefill.ended(ReadbackOutcomes({"r": Reason.TRANSFER_FAILED}))
    end(prefill, Reason.HIT)
    result = account(prefill, request)
    assert (result["reason"], result["remote_tokens"]) == (Reason.TRANSFER_FAILED, 0)


def test_an_offer_that_vllm_refuses_is_no_hit(prefill, index):
    """A request that must compute its whole prompt is not allocated a pull."""
    request = Request([index(holding(8))])
    assert settled(prefill, request) == (128, True)
    assert account(prefill, request)["reason"] == Reason.UNSUPPORTED


def test_an_offer_taken_in_part_is_read_in_part(prefill, index):
    """Fewer whole blocks than planned are fine; more, or part of one, is vLLM's mistake."""
    settled(prefill, Request([index(holding(8))]))
    with pytest.raises(RuntimeError, match="not planned"):
        prefill.commit("r", list(range(13)), 144)
    with pytest.raises(RuntimeError, match="not planned"):
        prefill.commit("r", list(range(13)), 17)
    prefill.commit("r", list(range(13)), 64)
    (read,) = prefill.take_reads()
    assert read.kv_transfer_params["remote_block_ids"] == ([50, 51, 52, 53],)
    assert read.check.generations == (3, 3, 3, 3)


def test_all_sources_are_asked_and_the_longest_offer_is_taken(prefill):
    """Each data-parallel rank of a decode engine has an index of its own; one that is gone costs nothing but its bound."""
    servers = [Server(free_address(), holding(count)) for count in (5, 8)]
    try:
        request = Request([servers[0].address, servers[1].address])
        assert settled(prefill, request) == (128, True)
        prefill.commit("r", list(range(13)), 128)
        assert prefill.take_reads()[0].check.index_address == servers[1].address
    finally:
        for server in servers:
            server.close()


class Pool:
    """Counts references as vLLM's block pool does."""

    def __init__(self):
        self.blocks = [Block(number) for number in range(20)]

    def touch(self, blocks):
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, blocks):
        for block in blocks:
            block.ref_cnt -= 1


class Block:
    """A block of that pool."""

    def __init__(self, number):
        self.block_id, self.ref_cnt = number, 0


def test_blocks_of_a_stuck_read_are_quarantined(prefill, index):
    """Also when the request was aborted and forgotten: no block is free while a rank may still write to it."""
    pool = Pool()
    prefill.bind(pool)
    request = Request([index(holding(8))])
    settled(prefill, request)
    prefill.commit("r", list(range(13)), 128)
    prefill.account(request)
    prefill.ended(ReadbackOutcomes({"r": Reason.TRANSFER_FAILED}, stuck=Counter(r=2)))
    prefill.over(["r"])
    assert [block.block_id for block in pool.blocks if block.ref_cnt] == list(range(8))
    prefill.ended(ReadbackOutcomes(unstuck=Counter(r=1)))
    assert sum(block.ref_cnt for block in pool.blocks) == 8
    prefill.ended(ReadbackOutcomes(unstuck=Counter(r=1)))
    assert sum(block.ref_cnt for block in pool.blocks) == 0
    assert not prefill._reading_into


def test_an_unallocated_plan_is_made_anew(prefill, index):
    """When vLLM had no room it asks again later, perhaps with another local hit."""
    settled(prefill, Request([index(holding(8))]))
    assert prefill.matched_tokens("r", 64) == (64, True)
    assert prefill.matched_tokens("r", 0) == (128, True)
    assert prefill.take_reads() == []


@pytest.mark.parametrize(
    ("handle", "reason"),
    [
        (lambda _: b"\xc1garbage", Reason.LOOKUP_FAILED),
        (lambda _: messages.encode(messages.Refused(1, "no")), Reason.INCOMPATIBLE),
        (lambda _: messages.encode(messages.Verdict(messages.VERSION, True)), Reason.LOOKUP_FAILED),
        (lambda _: messages.encode(messages.Found(messages.VERSION, "e", [1, 2], [1], "hit", b"", **CONNECTION)), Reason.LOOKUP_FAILED),
        (lambda _: messages.encode(messages.Found(messages.VERSION, "e", [1] * 9, [1] * 9, "no such", b"", **CONNECTION)), Reason.LOOKUP_FAILED),
        (lambda _: messages.encode(messages.Found(messages.VERSION, "e", [2**31], [1], "hit", b"", **CONNECTION)), Reason.LOOKUP_FAILED),
        (lambda _: messages.encode(messages.Found(messages.VERSION, "e", [-1], [1], "hit", b"", **CONNECTION)), Reason.LOOKUP_FAILED),
        (lambda _: messages.encode(messages.Found(messages.VERSION, "e", [1], [1], "hit", b"", **{**CONNECTION, "tp_size": 0})), Reason.LOOKUP_FAILED),
        (lambda _: messages.encode(messages.Found(messages.VERSION, "e", [1], [1], "hit", b"", **{**CONNECTION, "dcp_size": 2})), Reason.LOOKUP_FAILED),
        (lambda _: messages.encode(messages.Found(messages.VERSION, "e", [1] * 99, [1] * 99, "hit", b"", **CONNECTION)), Reason.LOOKUP_FAILED),
        (holding(0, Reason.EXPIRED), Reason.EXPIRED),
        (holding(3), Reason.BELOW_THRESHOLD),
    ],
)  # fmt: skip
def test_every_miss_is_a_reason_and_a_recompute(prefill, index, handle, reason):
    """No answer of a peer, however wrong, is an error of the request."""
    request = Request([index(handle)])
    assert settled(prefill, request) == (0, False)
    result = account(prefill, request)
    assert (result["reason"], result["computed_tokens"]) == (reason, 200)


def test_a_peer_that_does_not_answer_is_given_up(free_port):
    """The lookup is bounded."""
    prefill = PrefillReadback(
        ConnectorConfig(role="prefill", lookup_timeout_s=0.1), "identity", BLOCK, Recorder(), supported=True
    )
    try:
        request = Request([f"127.0.0.1:{free_port}"])
        assert settled(prefill, request) == (0, False)
        assert account(prefill, request)["reason"] == Reason.LOOKUP_TIMEOUT
    finally:
        prefill.close()


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (Request([]), Reason.NEW_CONVERSATION),
        (Request("not a list"), Reason.NEW_CONVERSATION),
        (Request(["127.0.0.1:1"], prompt=PROMPT[:40]), Reason.BELOW_THRESHOLD),
        (Request(["127.0.0.1:1"], mm_features=[media("renderer0-mm-3-image-0")]), Reason.UNSUPPORTED),
        (Request(["127.0.0.1:1"], kv_transfer_params={"do_remote_decode": True, "remote_block_ids": [[1]]}), Reason.NEW_CONVERSATION),
    ],
)  # fmt: skip
def test_no_lookup_without_need(prefill, request_, reason):
    """Nothing to ask, too little to gain, or nothing that could be proven; stock handles are ignored."""
    assert settled(prefill, request_) == (0, False)
    assert account(prefill, request_)["reason"] == reason


def test_models_that_cannot_be_proven_are_refused(index):
    """Sliding-window and state-space layouts never read back."""
    prefill = PrefillReadback(ConnectorConfig(role="prefill"), "identity", BLOCK, Recorder(), supported=False)
    try:
        request = Request([index(holding(8))])
        assert settled(prefill, request) == (0, False)
        assert account(prefill, request)["reason"] == Reason.UNSUPPORTED
    finally:
        prefill.close()


def test_what_became_of_reuse_is_counted(prefill, index):
    """Readbacks by reason, tokens by source, blocks by result, and how long it took."""
    request = Request([index(holding(8))])
    settled(prefill, request)
    prefill.commit("r", list(range(13)), 128)
    end(prefill, Reason.HIT)
    prefill.account(request)
    events = {(metric, label): value for metric, label, value in prefill._stats.events}
    assert events["readbacks", "hit"] == 1
    assert events["readback_blocks", "verified"] == 8
    assert events["prompt_tokens", "remote"] == 128
    assert events["prompt_tokens", "computed"] == 72
    assert events["lookup_seconds", ""] >= 0
    assert events["readback_seconds", ""] >= 0


def test_a_diverged_prompt_is_reported_to_the_token(prefill, index):
    """Decode says what it retained where the prompt parts from it; prefill compares."""
    retained = digests.pack([*range(32, 40), 7, *range(41, 48)])
    answer = messages.Found(messages.VERSION, "e", [50, 51], [3, 3], "diverged", retained, **CONNECTION)
    request = Request([index(lambda _: messages.encode(answer))], prompt=PROMPT)
    assert settled(prefill, request) == (0, False)
    assert account(prefill, request)["diverged_at_token"] == 40


def test_a_lost_reuse_is_one_log_line(prefill, index, caplog):
    """At which token and why; a turn that lost nothing is only told on request."""
    lost = Request([index(holding(0, Reason.EXPIRED))])
    settled(prefill, lost)
    caplog.set_level(logging.INFO, logger="vllm.bidikv")
    prefill.account(lost)
    settled(prefill, Request([]))
    prefill.account(Request([]))
    (line,) = [record.getMessage() for record in caplog.records]
    assert "reason=expired lost_at_token=0 prompt=200" in line


def test_a_next_turn_hashes_only_what_is_new(prefill, index, monkeypatch):
    """The digests of a conversation's last prompt are remembered."""
    address = index(holding(4))
    settled(prefill, Request([address], prompt=list(range(16_000))))
    hashed = []
    real = digests.hashlib.sha256
    monkeypatch.setattr(digests.hashlib, "sha256", lambda *data: hashed.append(data) or real(*data))
    settled(prefill, Request([address], prompt=list(range(16_100))))
    assert len(hashed) < 10


def play(prefill, address, monkeypatch, *, tokens, pull_s, compute_s):
    """One turn whose pull and computation take as long as told."""
    request = Request([address], prompt=list(range(tokens)))
    now_s = time.monotonic()
    clock = SimpleNamespace(now_s=now_s)
    offered, _ = settled(prefill, request)
    with monkeypatch.context() as patched:
        patched.setattr(prefill_module.time, "monotonic", lambda: clock.now_s)
        prefill.runs("r")
        if offered:
            prefill.commit("r", list(range(1000)), offered)
            clock.now_s += pull_s
            end(prefill, Reason.HIT)
            prefill.runs("r")
        clock.now_s += compute_s * (tokens - offered)
        prefill.account(request)
    return offered


def test_auto_learns_when_a_pull_is_slower(index, monkeypatch):
    """After enough turns a pull that takes longer than computing is not made any more, and a cheap one still is."""
    address = index(holding(8))
    for pull_s, expected in ((1.0, 0), (0.001, 128)):
        config = ConnectorConfig(role="prefill", learn_threshold=True)
        prefill = PrefillReadback(config, "identity", BLOCK, Recorder(), supported=True)
        try:
            sizes = (200, 400, 800, 1600, 300, 600, 500, 700)
            offers = [
                play(prefill, address, monkeypatch, tokens=n, pull_s=pull_s, compute_s=0.001) for n in sizes
            ]
        finally:
            prefill.close()
        assert any(metric == "pull_threshold_tokens" for metric, _, _ in prefill._stats.events)
        assert offers[0] == 128
        assert offers[-1] == expected


@pytest.mark.parametrize(
    ("wanted", "features", "said"),
    [(True, [], PROMPT), ("yes", [], None), (None, [], None), (True, [media("a" * 64)], None)],
)
def test_token_ids_for_the_router(prefill, wanted, features, said):
    """Told where the router asks and the ids are the whole prompt; beside media they are placeholders."""
    request = Request([], mm_features=features)
    request.kv_transfer_params["bidikv"]["return_token_ids"] = wanted
    prefill.start(request)
    account = prefill.account(request)["bidikv"]
    assert account.get("prompt_token_ids") == said
    assert account["prompt_tokens"] == len(PROMPT)
