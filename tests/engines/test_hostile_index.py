"""What a wrong, slow or dead index can do to an answer: nothing. Engines are asked directly, as the router would."""

import contextlib
import json
import socket
import urllib.request
import uuid
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from bidikv_server import wire
from bidikv_server.connector import messages
from bidikv_server.connector.side_channel import Client, Server
from bidikv_server.launch import readiness

from .conftest import STORY


class Direct:
    """Both legs of a turn, sent straight to the engines, with any index as the source."""

    def __init__(self, cluster):
        self.cluster = cluster
        self.conversation = uuid.uuid4().hex
        self.salt = uuid.uuid4().hex
        self.index = readiness.index_address(cluster.decode_urls[0])

    def turn(self, prompt, *, sources=(), cache_salt=None, retain_s=480.0, extra=None):
        """Token ids and prefill's account."""
        ours = {"conversation": self.conversation, "salt": self.salt}
        body = {
            "model": self.cluster.model_name,
            "prompt": prompt,
            "temperature": 0,
            "cache_salt": cache_salt or self.salt,
        }
        params = {**wire.prefill_leg(**ours, sources=list(sources)), **(extra or {})}
        prefill = post(self.cluster.prefill_urls[0], {**body, "max_tokens": 1, "kv_transfer_params": params})
        handle = prefill["kv_transfer_params"]
        account = handle.pop(wire.KEY)
        params = wire.decode_leg(handle, **ours, retain_s=retain_s)
        answer = post(
            self.cluster.decode_urls[0],
            {**body, "max_tokens": 16, "kv_transfer_params": params, "return_token_ids": True},
        )["choices"][0]
        return answer["token_ids"], answer["text"], account

    def cold(self, prompt):
        ids, _, account = self.turn(prompt, cache_salt=uuid.uuid4().hex, retain_s=0.0)
        assert (account["remote_tokens"], account["local_tokens"]) == (0, 0)
        return ids


def post(url, body):
    request = urllib.request.Request(  # noqa: S310
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:  # noqa: S310
        return json.load(response)


@contextlib.contextmanager
def index_between(direct, secret, change):
    """An index that asks the real one and changes what `change` wants changed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    client = Client(secret=secret)

    def handle(data):
        question = messages.decode(data)
        answer = messages.decode(client.submit(direct.index, data, timeout_s=5).result(10))
        return change(question, answer)

    server = Server(address, handle, secret=secret)
    try:
        yield address
    finally:
        server.close()
        client.close()


def honest(_question, answer):
    return messages.encode(answer)


def unconfirmed(_question, answer):
    if isinstance(answer, messages.Verdict):
        answer = messages.Verdict(messages.VERSION, valid=False)
    return messages.encode(answer)


def silent_after_the_read(question, answer):
    return None if isinstance(question, messages.Validate) else messages.encode(answer)


def too_many_blocks(_question, answer):
    if isinstance(answer, messages.Found):
        answer = msgspec.structs.replace(
            answer, block_ids=answer.block_ids * 40, generations=answer.generations * 40
        )
    return messages.encode(answer)


def unknown_engine(_question, answer):
    if isinstance(answer, messages.Found):
        answer = msgspec.structs.replace(answer, engine_id="nobody")
    return messages.encode(answer)


CHANGES = [
    (honest, "hit"),
    (unconfirmed, "validation_failed"),
    (silent_after_the_read, "validation_failed"),
    (lambda *_: b"\xc1 garbage", "lookup_failed"),
    (lambda *_: None, "lookup_timeout"),
    (too_many_blocks, "lookup_failed"),
    (unknown_engine, "transfer_failed"),
]


@pytest.mark.parametrize(
    ("change", "reason"), CHANGES, ids=[reason + f"-{n}" for n, (_, reason) in enumerate(CHANGES)]
)
def test_lost_reuse_is_a_reason_and_the_cold_answer(cluster, change, reason):
    """Whatever the index says, the answer is the cold run's and the turn after it reuses again."""
    direct = Direct(cluster)
    prompt = STORY * 4
    _, text, _ = direct.turn(prompt)
    prompt += text + " In the morning the keeper"
    with index_between(direct, cluster.secret, change) as address:
        ids, text, account = direct.turn(prompt, sources=[address])
    assert account["reason"] == reason
    assert (account["remote_tokens"] > 0) == (reason == "hit")
    assert ids == direct.cold(prompt)
    prompt += text + " And then, at noon,"
    ids, _, account = direct.turn(prompt, sources=[direct.index])
    assert account["reason"] in {"hit", "hit_diverged"}
    assert ids == direct.cold(prompt)


def test_a_dropped_read_does_not_poison_prefills_cache(caching_cluster):
    """The same prompt again, as a stranger's plain request, gets the cold answer: no bad block was cached."""
    direct = Direct(caching_cluster)
    prompt = STORY * 4
    _, text, _ = direct.turn(prompt, cache_salt="shared")
    prompt += text + " In the morning the keeper" + STORY
    other = Direct(caching_cluster)
    other.conversation, other.salt = direct.conversation, direct.salt
    with index_between(direct, caching_cluster.secret, unconfirmed) as address:
        # Another cache salt would be another chain; evict prefill's own copy by asking with the same one.
        ids, _, _ = direct.turn(prompt, sources=[address], cache_salt="shared")
    again, _, account = other.turn(prompt, cache_salt="shared")
    assert ids == again == direct.cold(prompt)
    assert account["remote_tokens"] == 0


def test_a_stock_handle_is_ignored(cluster):
    """Block ids in `kv_transfer_params`, as stock bidirectional pulls take them, pull nothing and hang nothing."""
    direct = Direct(cluster)
    prompt = STORY * 4
    handle = {
        "remote_block_ids": [[1, 2, 3, 4, 5]],
        "remote_engine_id": "e",
        "remote_request_id": "r",
        "remote_host": "127.0.0.1",
        "remote_port": 1,
        "remote_num_tokens": 160,
    }
    ids, _, account = direct.turn(prompt, extra=handle)
    assert account["remote_tokens"] == 0
    assert ids == direct.cold(prompt)


def test_a_dead_index_costs_one_bounded_lookup(cluster):
    """Nothing listens there: the turn is computed."""
    direct = Direct(cluster)
    ids, _, account = direct.turn(STORY * 4, sources=["127.0.0.1:9"])
    assert account["reason"] == "lookup_timeout"
    assert ids == direct.cold(STORY * 4)


def test_another_tenants_salt_finds_nothing(cluster):
    """Equal text under another salt is never offered."""
    direct, stranger = Direct(cluster), Direct(cluster)
    prompt = STORY * 4
    direct.turn(prompt)
    ids, _, account = stranger.turn(prompt, sources=[direct.index], cache_salt=direct.salt)
    assert (account["reason"], account["remote_tokens"]) == ("not_retained", 0)
    assert ids == direct.cold(prompt)


def test_the_index_answers_while_its_engine_computes(cluster):
    """A long step holds the engine's own thread, not the index's."""
    direct = Direct(cluster)
    client = Client(secret=direct.cluster.secret)
    question = messages.encode(messages.Lookup(messages.VERSION, "nobody's identity", "c", b""))
    body = {"model": direct.cluster.model_name, "prompt": STORY * 70, "max_tokens": 1}
    answered = 0
    try:
        with ThreadPoolExecutor(1) as pool:
            long_step = pool.submit(post, direct.cluster.decode_urls[0], body)
            while not long_step.done():
                reply = client.submit(direct.index, question, timeout_s=10).result()
                assert isinstance(messages.decode(reply), messages.Refused)
                answered += not long_step.done()
            assert long_step.result()["usage"]["prompt_tokens"] > 2500
    finally:
        client.close()
    assert answered > 10
