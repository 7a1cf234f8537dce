"""Data-parallel engines, tensor-parallel ranks and addresses: who listens where, and whose word counts."""

import inspect
import socket
from functools import partial

import pytest
from engine_core import PATIENCE_S, Engine, cold, text, unused_port, vllm_config
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from bidikv_server import wire
from bidikv_server.connector.connector import BidiNixlConnector
from bidikv_server.connector.metadata import ReadbackOutcomes
from bidikv_server.reasons import Reason

OPENING = text(1, 100)


@pytest.fixture
def engine(checkpoint):
    """Start engines one by one; they know each other."""
    engines, peers = [], {}

    def start(role, port, *, index=0, **bidikv):
        ours = {"role": role, "index_port": port, "lookup_timeout_s": PATIENCE_S} | bidikv
        extra = {"bidikv": ours, "kv_recompute_threshold": 16}
        kv_role = "kv_both" if role == "prefill" else "kv_consumer"
        config = vllm_config(checkpoint, extra=extra, kv_role=kv_role, data_parallel_index=index)
        engines.append(Engine(config, peers))
        return engines[-1]

    yield start
    for running in engines:
        running.close()


def advertised(engine, ranks):
    """Addresses that the engine's API server publishes, by rank."""
    registry = CollectorRegistry()
    kinds = {kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
    labels = {rank: ["model", str(rank)] for rank in range(ranks)}
    BidiNixlConnector.build_prom_metrics(engine.config, kinds, ["model_name", "engine"], labels)
    samples = [s for family in registry.collect() for s in family.samples if s.name == wire.INDEX_INFO_METRIC]
    assert all(sample.value == 1 for sample in samples)
    return {sample.labels["engine"]: sample.labels["address"] for sample in samples}


def test_every_data_parallel_rank_listens_where_the_metric_says(engine):
    """Four ranks behind one HTTP port: each has an index of its own, under the next port, and all are published (F26)."""
    first = unused_port(row=4)
    ranks = [engine("decode", first, index=rank) for rank in range(4)]
    addresses = {str(rank): f"127.0.0.1:{first + rank}" for rank in range(4)}
    assert {str(n): rank.side._decode._server.address for n, rank in enumerate(ranks)} == addresses
    assert advertised(ranks[0], 4) == addresses


def test_the_rank_that_holds_the_blocks_is_the_one_that_is_read(engine):
    """Prefill asks all ranks, wherever the load balancer put the turn (F26), and pulls from the one that served it."""
    first = unused_port(row=4)
    ranks = [engine("decode", first, index=rank) for rank in range(4)]
    prefill = engine("prefill", 1)
    sources = [f"127.0.0.1:{first + rank}" for rank in range(4)]
    params = wire.decode_leg({}, conversation="c", salt="s", retain_s=60.0)
    for rank in (2, 0):
        prompt = text(10 + rank, 100)
        ranks[rank].finish(ranks[rank].add(prompt, 40, {wire.KEY: params[wire.KEY]}))
        ranks[rank].idle(2)
        longer = prompt + cold(prompt, 40) + text(2, 20)
        request = prefill.add(longer, 1, wire.prefill_leg(conversation="c", salt="s", sources=sources))
        answer = prefill.finish(request)
        assert answer.reuse == ("hit", 128, 0, 32)
        assert answer.tokens == cold(longer, 1)


def test_an_address_for_others_is_advertised_but_not_bound(engine):
    """`index_advertise` is what prefill engines on other hosts should use; IPv6 addresses are written in brackets."""
    port = unused_port()
    decode = engine("decode", port, index_advertise="fd00::7")
    assert advertised(decode, 2) == {"0": f"[fd00::7]:{port}", "1": f"[fd00::7]:{port + 1}"}
    assert decode.side._decode._server.address == f"127.0.0.1:{port}"


@pytest.mark.parametrize(("role", "readback"), [("prefill", True), ("decode", False), ("prefill", False)])
def test_engines_without_an_index_advertise_none(engine, role, readback):
    """Nor do they listen."""
    port = unused_port()
    assert advertised(engine(role, port, readback=readback), 2) == {}
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0


def test_the_index_belongs_to_the_scheduler_side_alone(engine):
    """However many workers a rank has, none of them binds the port: only the scheduler's connector has an index."""
    decode = engine("decode", unused_port())
    connector = decode.scheduler.connector
    assert connector.connector_worker is None
    assert connector.connector_scheduler._decode is not None


def test_a_second_engine_on_the_same_port_does_not_start(engine):
    """Two indexes on one port would answer for each other."""
    port = unused_port()
    engine("decode", port)
    with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port}"):
        engine("decode", port)


def outputs(*ranks):
    """One step's outputs of several workers, each with its account of request `r`."""
    return [
        ModelRunnerOutput(
            req_ids=[],
            req_id_to_index={},
            kv_connector_output=KVConnectorOutput(
                finished_recving={"r"} if outcome else None,
                failed_recving={"r"} if outcome and outcome is not Reason.HIT else set(),
                kv_connector_worker_meta=ReadbackOutcomes({"r": outcome}) if outcome else None,
            ),
        )
        for outcome in ranks
    ]


HIT, FAILED, CHANGED = Reason.HIT, Reason.TRANSFER_FAILED, Reason.VALIDATION_FAILED


@pytest.mark.parametrize(
    ("steps", "failed"),
    [
        ([(HIT, HIT, HIT)], False),
        ([(HIT, FAILED, HIT)], True),
        ([(CHANGED, HIT, HIT)], True),
        ([(HIT, None, None), (None, HIT, HIT)], False),
        ([(FAILED, None, None), (None, HIT, HIT)], True),
        ([(HIT, None, None), (None, HIT, None), (None, None, CHANGED)], True),
    ],
)
def test_vllm_merges_the_ranks_accounts_into_one(steps, failed):
    """One failed rank makes the read failed, whoever is first; the request ends once, after the last rank."""
    aggregator = KVOutputAggregator(3)
    merged = [aggregator.aggregate(outputs(*step)).kv_connector_output for step in steps]
    assert [bool(output.finished_recving) for output in merged] == [False] * (len(steps) - 1) + [True]
    assert bool(merged[-1].failed_recving) == failed
    outcomes = [output.kv_connector_worker_meta.outcomes["r"] for output in merged]
    assert any(outcome is not HIT for outcome in outcomes) == failed


def test_ranks_that_still_write_are_counted_one_by_one():
    """Blocks stay out of circulation until every rank that was overdue has let go."""
    aggregator = KVOutputAggregator(2)
    stuck = outputs(None, None)
    for output in stuck:
        output.kv_connector_output.kv_connector_worker_meta = ReadbackOutcomes()
        output.kv_connector_output.kv_connector_worker_meta.stuck["r"] += 1
    assert aggregator.aggregate(stuck).kv_connector_output.kv_connector_worker_meta.stuck == {"r": 2}


def has_ipv6():
    """Whether this machine has an IPv6 loopback."""
    try:
        unused_port("::1")
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback")
def test_the_index_serves_ipv6(start):
    """Bound to ::1 and asked as [::1]:port, lookup and validation alike (F27)."""
    pair = start(host="::1")
    _, answer = pair.turn(OPENING)
    pair.forget()
    prompt = OPENING + answer.tokens + text(2, 20)
    again = pair.prefill.finish(pair.ask(prompt))
    assert again.reuse == ("hit", 128, 0, 32)
    assert again.tokens == cold(prompt, 1)
    assert pair.source == f"[::1]:{pair.source.rpartition(':')[2]}"


def test_the_made_up_transport_follows_vllms_worker():
    """What it copies by hand: only requests of a batch get a timer, and a notification frees what is known."""
    start = inspect.getsource(NixlPullConnectorWorker.start_load_kv)
    assert "if req_id in self._reqs_to_process:" in start
    assert "self._reqs_to_process.discard(req_id)" in start
    notified = inspect.getsource(NixlPullConnectorWorker._get_new_notifs)
    assert "self._reqs_to_process.remove(req_id)" in notified
