"""Real clusters, one at a time: vLLM engines, real NIXL, a real model, the real router and SDK."""

import contextlib
import fcntl
import sys
import tempfile
import uuid
from dataclasses import dataclass
from pathlib import Path

import pytest

import bidikv

pytest.importorskip("vllm", reason="real engines need vLLM", exc_type=ImportError)
pytest.importorskip("nixl", reason="real engines need NIXL")

from bidikv_server.launch.cluster import Cluster, ClusterSpec
from bidikv_server.launch.errors import ChildDiedError
from bidikv_server.launch.model import prepare_smollm2

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "suites"))
pytest.register_assert_rewrite("target", "client_suite", "langgraph_suite")

BLOCK = 32
THRESHOLD = 64
ENGINE_ENV = {"VLLM_ENABLE_RESPONSES_API_STORE": "1"}
# Few enough blocks that two long prompts take them all, so that retained blocks are handed out in a test.
ENGINE_ARGS = ("--max-model-len", "4096", "--num-gpu-blocks-override", "176")


def pytest_collection_modifyitems(items):
    """Everything here needs real engines, and the first test waits for them to start.

    Tests that share a cluster stand together, the session's first, so that each starts once.
    """
    for item in items:
        if HERE in Path(item.path).parents:
            item.add_marker(pytest.mark.engines)
            # For the test itself: waiting for the machine is nobody's fault, and starting engines has bounds of its own.
            item.add_marker(pytest.mark.timeout(600, func_only=True))
    items.sort(key=_rank)


def _rank(item):
    if HERE not in Path(item.path).parents:
        return 0
    return 1 if {"cluster", "caching_cluster"} & set(item.fixturenames) else 2


@pytest.fixture(scope="session")
def machine():
    """Take turns: two clusters on a small machine starve each other."""
    with (Path(tempfile.gettempdir()) / "bidikv-engines.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class Stage:
    """The one cluster that runs now. Asking for another ends it first: there is room for one."""

    def __init__(self):
        self._stack = contextlib.ExitStack()
        self._spec = None
        self._cluster = None

    def cluster(self, spec):
        """The cluster of this spec, started unless it is the one that runs and lives."""
        if self._cluster is None or spec != self._spec or not self._lives():
            self.close()
            self._cluster = self._stack.enter_context(Cluster(spec, progress=print))
            self._spec = spec
        return self._cluster

    def with_caching(self, wanted):
        """The session's cluster, its prefill engine with or without a prefix cache of its own."""
        spec, other = spec_of_session(wanted), spec_of_session(not wanted)
        if self._spec == other and self._lives():
            # Nothing, should the restart fail: whoever asks next then gets a new cluster.
            self._spec = None
            self._cluster.restart_prefill(prefix_caching=wanted)
            self._spec = spec
        return self.cluster(spec)

    def close(self):
        """End what runs."""
        self._cluster = self._spec = None
        self._stack.close()

    def _lives(self):
        try:
            self._cluster.raise_if_dead()
        except ChildDiedError:
            return False
        return True


def spec_of_session(caching):
    """Two engines and SmolLM2: what most tests use."""
    return ClusterSpec(
        prepare_smollm2(), prefill_prefix_caching=caching, engine_args=ENGINE_ARGS, engine_env=ENGINE_ENV
    )


@pytest.fixture(scope="session")
def stage(machine):
    """Whatever runs in the end is ended."""
    stage = Stage()
    yield stage
    stage.close()


@pytest.fixture
def cluster(stage):
    """Prefill without a prefix cache of its own: what is reused comes from decode."""
    return stage.with_caching(False)


@pytest.fixture
def caching_cluster(stage):
    """Prefill with its own prefix cache."""
    return stage.with_caching(True)


@dataclass(frozen=True)
class Answer:
    """What a turn came to."""

    token_ids: list[int]
    text: str
    reuse: bidikv.ReuseHeader


class Player:
    """Plays streamed chat turns through the router, warm in one conversation or cold on the same engines."""

    def __init__(self, cluster):
        self.cluster = cluster
        self.client = bidikv.OpenAI(base_url=cluster.base_url, api_key="none", max_retries=0, timeout=300)
        self.model = cluster.model_name
        self.session = f"test-{uuid.uuid4().hex}"
        self.salt = uuid.uuid4().hex

    def turn(self, messages, *, max_tokens=24, headers=None, session=None, salt=None, **body):
        """One turn of this player's conversation."""
        stream = self._start(
            messages,
            model=self.model,
            temperature=0,
            max_tokens=max_tokens,
            stream=True,
            extra_headers={"X-Session-ID": session or self.session, **(headers or {})},
            extra_body={"return_token_ids": True, "cache_salt": salt or self.salt, **body},
        )
        ids, text = [], ""
        for chunk in stream:
            for choice in chunk.choices:
                ids += (choice.model_extra or {}).get("token_ids") or []
                text += self._text(choice)
        return Answer(ids, text, bidikv.reuse_of(stream))

    def _start(self, messages, **options):
        return self.client.chat.completions.create(messages=messages, **options)

    @staticmethod
    def _text(choice):
        return choice.delta.content or ""

    def cold(self, messages, *, max_tokens=24):
        """The same request as nobody's turn: no readback, and nothing of it in any prefix cache."""
        answer = self.turn(
            messages,
            max_tokens=max_tokens,
            headers={"x-bidikv-readback": "off"},
            session=f"cold-{uuid.uuid4().hex}",
            salt=uuid.uuid4().hex,
        )
        assert (answer.reuse.reason, answer.reuse.remote_tokens, answer.reuse.local_tokens) == (
            "readback_off",
            0,
            0,
        )
        return answer

    def close(self):
        self.client.close()


@pytest.fixture
def player(cluster):
    """A conversation on the cluster without prefill prefix caching."""
    player = Player(cluster)
    yield player
    player.close()


@pytest.fixture
def caching_player(caching_cluster):
    """A conversation on the cluster with prefill prefix caching."""
    player = Player(caching_cluster)
    yield player
    player.close()


STORY = (
    "The old lighthouse stood on a rock in the sea. Every evening the keeper climbed the stairs and lit the lamp. "
    "Ships from many countries passed, and the keeper wrote their names into a book. "
)


def opening(words=STORY, times=5):
    """A first request of some hundred tokens."""
    return [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": words * times + "What did the keeper do?"},
    ]


def after(messages, answer, question):
    """The next request of a faithful client."""
    return [*messages, {"role": "assistant", "content": answer.text}, {"role": "user", "content": question}]


def sample(exposition, name, label=""):
    """Value of one sample of a metrics page; 0 if it is not there."""
    for line in exposition.splitlines():
        if line.startswith(name + "{") and label in line:
            return float(line.split()[-1])
    return 0.0
