"""One real cluster for the whole session: two vLLM engines, real NIXL, a real model, the real router and SDK."""

import fcntl
import tempfile
import uuid
from dataclasses import dataclass
from pathlib import Path

import pytest

import bidikv

pytest.importorskip("vllm", reason="real engines need vLLM", exc_type=ImportError)
pytest.importorskip("nixl", reason="real engines need NIXL")

from bidikv_server.launch.cluster import Cluster, ClusterSpec
from bidikv_server.launch.model import prepare_smollm2

HERE = Path(__file__).parent
BLOCK = 32
THRESHOLD = 64
# Few enough blocks that two long prompts take them all, so that retained blocks are handed out in a test.
ENGINE_ARGS = ("--max-model-len", "4096", "--num-gpu-blocks-override", "176")


def pytest_collection_modifyitems(items):
    """Everything here needs real engines, and the first test waits for them to start."""
    for item in items:
        if HERE in Path(item.path).parents:
            item.add_marker(pytest.mark.engines)
            item.add_marker(pytest.mark.timeout(600))


@pytest.fixture(scope="session")
def machine():
    """Take turns: two clusters on a small machine starve each other."""
    with (Path(tempfile.gettempdir()) / "bidikv-engines.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session")
def running(machine):
    """The cluster, and which prefix-cache setting its prefill engine has now."""
    spec = ClusterSpec(prepare_smollm2(), prefill_prefix_caching=False, engine_args=ENGINE_ARGS)
    with Cluster(spec, progress=print) as cluster:
        yield {"cluster": cluster, "caching": False}


def _with_caching(running, wanted):
    if running["caching"] is not wanted:
        running["cluster"].restart_prefill(prefix_caching=wanted)
        running["caching"] = wanted
    return running["cluster"]


@pytest.fixture
def cluster(running):
    """Prefill without a prefix cache of its own: what is reused comes from decode."""
    return _with_caching(running, wanted=False)


@pytest.fixture
def caching_cluster(running):
    """Prefill with its own prefix cache."""
    return _with_caching(running, wanted=True)


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
        stream = self.client.chat.completions.create(
            model=self.model,
            messages=messages,
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
                text += choice.delta.content or ""
        return Answer(ids, text, bidikv.reuse_of(stream))

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
