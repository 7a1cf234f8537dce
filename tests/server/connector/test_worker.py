"""The worker believes a read only after decode has confirmed it; without an engine, on a scripted NIXL agent."""

import threading
import time
from collections import Counter, defaultdict
from concurrent.futures import Future, wait

import pytest

from bidikv_server.connector import messages
from bidikv_server.connector.side_channel import Client, Server
from bidikv_server.reasons import Reason

pytest.importorskip("vllm", reason="the worker is a subclass of vLLM's", exc_type=ImportError)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats
from vllm.platforms import current_platform

from bidikv_server.connector.metadata import (
    BidiConnectorMetadata,
    ReadbackCheck,
    ReadbackOutcomes,
)
from bidikv_server.connector.worker import BidiConnectorWorker, _Reading

FAR_S = 1e12


class ScriptedAgent:
    """A NIXL agent whose transfers end when and how the test says."""

    def __init__(self):
        self.states = {}
        self.released = []
        self.stuck = set()

    def check_xfer_state(self, handle):
        return self.states.get(handle, "PROC")

    def has_ended(self, handle):
        return self.check_xfer_state(handle) != "PROC"

    def get_xfer_telemetry(self, handle):
        class Telemetry:
            xferDuration = postDuration = 1  # noqa: N815  (NIXL's spelling)
            totalBytes = descCount = 1  # noqa: N815

        return Telemetry()

    def release_xfer_handle(self, handle):
        if handle in self.stuck:
            raise RuntimeError("still in flight")
        self.released.append(handle)


@pytest.fixture
def worker():
    """The worker's readback bookkeeping, without the vLLM engine around it."""
    worker = object.__new__(BidiConnectorWorker)
    worker.nixl_wrapper = ScriptedAgent()
    worker.xfer_stats = NixlKVConnectorStats()
    worker._recving_transfers = defaultdict(list)
    worker._recving_metadata = {}
    worker._recv_failures = set()
    worker._failed_remote_engines = set()
    worker._log_failure = lambda **_: None
    worker._client = Client()
    worker._readings, worker._stuck, worker._outcomes = {}, {}, ReadbackOutcomes()
    worker._finish_shutdown = lambda: None
    yield worker
    worker._client.close()


@pytest.fixture
def index(free_port):
    """An index that confirms what the test says."""

    class Index:
        verdict = True
        asked = ()

        def __init__(self):
            self.may_answer = threading.Event()
            self.may_answer.set()

        def handle(self, data):
            self.may_answer.wait(10)
            self.asked = (*self.asked, messages.decode(data))
            return (
                None
                if self.verdict is None
                else messages.encode(messages.Verdict(messages.VERSION, self.verdict))
            )

    scripted = Index()
    server = Server(f"127.0.0.1:{free_port}", scripted.handle)
    scripted.address = server.address
    yield scripted
    server.close()


def read(worker, index, *, handle=1, deadline_s=FAR_S, timeout_s=5.0):
    check = ReadbackCheck(index.address, "epoch", (7, 8), (1, 2), timeout_s)
    worker._readings["r"] = _Reading(check, deadline_s)
    worker._recving_transfers["r"] = [handle]


def poll(worker):
    return worker._pop_done_transfers(worker._recving_transfers)


def settle(worker):
    verdict = worker._readings["r"].verdict
    wait([verdict], timeout=10)
    return poll(worker)


def test_a_finished_read_waits_for_its_verdict(worker, index):
    """DONE is not reported before decode has confirmed every block."""
    read(worker, index)
    assert poll(worker) == (set(), set())
    worker.nixl_wrapper.states[1] = "DONE"
    index.may_answer.clear()
    assert poll(worker) == (set(), set())
    index.may_answer.set()
    assert settle(worker) == ({"r"}, set())
    assert index.asked == (messages.Validate(messages.VERSION, "epoch", [7, 8], [1, 2]),)


@pytest.mark.parametrize("verdict", [False, None])
def test_an_unconfirmed_read_is_a_failure(worker, index, verdict):
    """Refused or unanswered: the pulled blocks are dropped."""
    index.verdict = verdict
    read(worker, index, deadline_s=time.monotonic() + 0.5)
    worker.nixl_wrapper.states[1] = "DONE"
    poll(worker)
    assert settle(worker) == (set(), {"r"})
    assert worker.take_outcomes() == ReadbackOutcomes({"r": Reason.VALIDATION_FAILED})
    assert worker.take_outcomes() is None


def test_a_failed_transfer_is_not_validated(worker, index):
    """There is nothing to believe."""
    read(worker, index)
    worker.nixl_wrapper.states[1] = "ERR"
    done, failed = poll(worker)
    assert "r" in failed
    assert "r" in done  # no handle is outstanding; vLLM reports it as failed
    assert index.asked == ()


def test_an_overdue_read_fails_and_its_handle_is_kept(worker, index):
    """A request never waits without a bound; the transport may still write, so its blocks are reported as stuck."""
    read(worker, index, deadline_s=0.0)
    assert poll(worker) == (set(), {"r"})
    assert worker.nixl_wrapper.released == []
    assert worker.take_outcomes() == ReadbackOutcomes(stuck=Counter(r=1))
    poll(worker)
    assert worker.take_outcomes() is None
    worker.nixl_wrapper.states[1] = "DONE"
    poll(worker)
    assert worker.take_outcomes() == ReadbackOutcomes(unstuck=Counter(r=1))
    assert worker.nixl_wrapper.released == [1]


def test_an_overdue_read_is_never_believed(worker, index):
    """Half of its handles ended well before the deadline: it is a failure all the same, and nobody is asked."""
    read(worker, index, deadline_s=0.0)
    worker._recving_transfers["r"] = [1, 2]
    worker.nixl_wrapper.states[1] = "DONE"
    assert poll(worker) == (set(), {"r"})
    worker.nixl_wrapper.states[2] = "DONE"
    assert poll(worker) == (set(), set())
    assert index.asked == ()


def test_a_handle_that_cannot_be_released_stays_stuck(worker, index):
    """Until the release succeeds its blocks are not given back."""
    worker.nixl_wrapper.stuck.add(1)
    worker.nixl_wrapper.states[1] = "ERR"
    read(worker, index, deadline_s=0.0)
    poll(worker)
    poll(worker)
    assert worker.take_outcomes() == ReadbackOutcomes(stuck=Counter(r=1))
    worker.nixl_wrapper.stuck.clear()
    poll(worker)
    assert worker.take_outcomes() == ReadbackOutcomes(unstuck=Counter(r=1))


def test_a_verdict_that_never_comes_is_bounded_here_too(worker, index):
    """Should the side channel's thread be gone, the deadline still ends the wait."""
    read(worker, index)
    worker._readings["r"].verdict = Future()
    worker._readings["r"].deadline_s = 0.0
    assert poll(worker) == (set(), {"r"})


def test_other_transfers_are_not_held_back(worker, index):
    """Prefill-to-decode reads end as in stock vLLM."""
    worker._recving_transfers["p2d"] = [5]
    worker.nixl_wrapper.states[5] = "DONE"
    assert poll(worker) == ({"p2d"}, set())


def test_one_ranks_failure_is_the_requests_failure():
    """Tensor-parallel ranks read their own shards; all must be good."""
    good, bad = (
        ReadbackOutcomes({"a": Reason.HIT, "b": Reason.HIT}),
        ReadbackOutcomes({"a": Reason.TRANSFER_FAILED}),
    )
    assert (
        good.aggregate(bad)
        == bad.aggregate(good)
        == ReadbackOutcomes({"a": Reason.TRANSFER_FAILED, "b": Reason.HIT})
    )


def test_metadata_takes_over_everything_stock():
    """A field that vLLM adds to its metadata is not lost."""
    stock = NixlConnectorMetadata()
    stock.reqs_in_batch.add("x")
    stock.from_a_later_version = 1
    extended = BidiConnectorMetadata.extend(stock, {})
    assert (extended.reqs_in_batch, extended.from_a_later_version) == ({"x"}, 1)


def test_blocks_of_another_size_are_refused_on_cpu(worker, monkeypatch):
    """VLLM would read them and answer from scrambled KV."""

    class Meta:
        block_size = 64

    monkeypatch.setattr(current_platform, "is_cpu", lambda: True)
    worker.block_size = 32
    with pytest.raises(RuntimeError, match=r"--block-size; here it is 32, there 64"):
        worker.add_remote_agent(Meta(), remote_tp_size=1)
