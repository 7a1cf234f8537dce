"""Where turns run and how they get their prompts' KV, on real engines: every choice has its reason, and changes no answer."""

import contextlib
import json
import os
import signal
import threading
import urllib.request

import openai
import pytest

from bidikv_server.launch.cluster import ClusterSpec

from .conftest import BLOCK, Player, opening
from .routers import router
from .tiny_models import checkpoint
from .tokens import TokenPlayer, words

BLOCKS = ("--num-gpu-blocks-override", "400")
TWO_PREFILLS = {"prefill": 2, "prefill_prefix_caching": True}
# The shape that `test_shapes` begins with, so that its engines start once for both.
TWO_DECODES = {
    "decode": 2, "prefill_prefix_caching": False, "decode_args": ("--no-enable-prefix-caching",)
}  # fmt: skip


@pytest.fixture
def through(stage):
    """Start engines of a shape, unless they run, and a router with these settings in front of them."""
    with contextlib.ExitStack() as stack:

        def start(shape, **settings):
            spec = ClusterSpec(checkpoint("llama"), engine_args=BLOCKS, **shape)
            return stack.enter_context(router(stage.cluster(spec), **settings))

        yield start


@contextlib.contextmanager
def load(url, model, prompts, max_tokens):
    """Somebody else's requests that run on an engine meanwhile."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=300) as client:
        streams = [
            client.completions.create(
                model=model,
                prompt=prompt,
                max_tokens=max_tokens,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            for prompt in prompts
        ]
        try:
            yield
        finally:
            for stream in streams:
                stream.close()


@contextlib.contextmanager
def standing_still(group):
    """An engine whose processes do nothing meanwhile."""
    os.killpg(group, signal.SIGSTOP)
    try:
        yield
    finally:
        os.killpg(group, signal.SIGCONT)


class Conversation:
    """One of token ids, played faithfully: every answer is compared with a cold run's, and its reason is at hand."""

    def __init__(self, cluster, seed, length=300):
        self.player = TokenPlayer(cluster)
        self.cluster = cluster
        self.prompt = words(length, seed)
        self._seed = seed

    def turn(self, *, max_tokens=16):
        """The next turn: what the router says of it, and what became of its reuse."""
        answer = self.player.turn(self.prompt, max_tokens=max_tokens)
        told = self.cluster.last_turn()
        assert answer.token_ids == self.player.cold(self.prompt, max_tokens=max_tokens).token_ids, told
        self.prompt = [*self.prompt, *answer.token_ids]
        return told, answer.reuse

    def add(self, length):
        """What the client says next."""
        self._seed += 1000
        self.prompt = [*self.prompt, *words(length, self._seed)]

    def close(self):
        self.player.close()


@pytest.fixture
def converse():
    """Begin conversations that end with the test."""
    with contextlib.ExitStack() as stack:
        yield lambda *args, **options: stack.enter_context(contextlib.closing(Conversation(*args, **options)))


def test_prefill_by_cached_prefix_and_load(through, converse):
    """A conversation goes back to the prefill engine that has its beginning cached, unless that has much more to do."""
    cluster = through(TWO_PREFILLS, probe_timeout_s=120)
    first, second = cluster.prefill_urls
    cluster.ask("engines/drain", {"url": first})
    conversation = converse(cluster, 1)
    told, _ = conversation.turn()
    assert (told["prefill"], told["prefill_choice"]) == (second, "only")
    cluster.ask("engines/undrain", {"url": first})
    # The first of equals, which a stranger gets.
    stranger = converse(cluster, 2)
    told, _ = stranger.turn()
    assert (told["prefill"], told["prefill_choice"]) == (first, "least_loaded")
    for _ in range(2):
        conversation.add(40)
        told, reuse = conversation.turn()
        assert (told["prefill"], told["prefill_choice"]) == (second, "cached_prefix")
        assert reuse.local_tokens >= 300 // BLOCK * BLOCK
    # Prompts of strangers pile up there, since it stands still; the conversation is computed elsewhere.
    cluster.ask("engines/drain", {"url": first})
    strangers = [TokenPlayer(cluster) for _ in range(2)]
    threads = [
        threading.Thread(target=player.turn, args=(words(2000, 100 + n),), kwargs={"max_tokens": 1})
        for n, player in enumerate(strangers)
    ]
    with standing_still(cluster.engines.group_of("prefill-1")):
        for thread in threads:
            thread.start()
        cluster.wait(second, lambda engine: engine["in_flight"] == len(threads))
        cluster.ask("engines/undrain", {"url": first})
        conversation.add(40)
        told, reuse = conversation.turn()
    assert (told["prefill"], told["prefill_choice"]) == (first, "least_loaded")
    assert (reuse.reason, reuse.local_tokens) == ("hit", 0)
    for thread, player in zip(threads, strangers, strict=True):
        thread.join()
        player.close()


def test_decode_escapes_pressure(through, converse):
    """A conversation leaves an engine that is full, or busy, is read back from there, and stays where it went."""
    cluster = through(TWO_DECODES, pressure_margin=4)
    conversation = converse(cluster, 10)
    told, _ = conversation.turn()
    home = told["decode"]
    (other,) = {*cluster.decode_urls} - {home}

    def next_turn():
        conversation.add(30)
        told, reuse = conversation.turn()
        assert reuse.reason == "hit"
        return told["decode"], told["placement"]

    assert next_turn() == (home, "home")
    # Blocks: four requests hold nine tenths of them. Once they need more, one of them waits.
    with load(home, cluster.model_name, [words(2900, n) for n in range(4)], 900):
        cluster.wait(home, lambda engine: engine["kv_usage"] > 0.9)
        assert next_turn() == (other, "pressure")
    cluster.wait(home, lambda engine: engine["running"] == 0)
    assert next_turn() == (other, "home")
    # Requests: more of them than `pressure_margin` above twice the other engine's.
    with load(other, cluster.model_name, [words(40, n) for n in range(6)], 3000):
        cluster.wait(other, lambda engine: engine["running"] >= 6)
        assert next_turn() == (home, "pressure")
        assert next_turn() == (home, "home")


def test_prefill_computes_or_reads_back_as_it_says(through, converse):
    """Once what both take is known the cheaper one is taken, whichever that is on this machine, and does what it says."""
    cluster = through(TWO_DECODES, mode_policy="cheapest")
    conversation = converse(cluster, 20, length=200)
    modes = []
    for _ in range(14):
        told, reuse = conversation.turn()
        modes.append((told["mode"], told["mode_reason"], told["reason"], reuse.remote_tokens > 0))
        conversation.add(20)
    assert modes[0] == ("recompute", "only_way", "new_conversation", False)
    assert modes[1:5] == [("readback", "unknown_costs", "hit", True)] * 4
    # Not on decode alone: these engines have no prefix cache, and would compute the whole of it.
    assert set(modes[5:]) <= {
        ("recompute", "cheaper", "recompute_cheaper", False),
        ("readback", "cheaper", "hit", True),
        ("readback", "unknown_costs", "hit", True),
    }


class Chat:
    """A chat through a router: every answer is compared with a cold run's."""

    def __init__(self, cluster):
        self.player = Player(cluster)
        self.cluster = cluster
        self.messages = []

    def turn(self, messages, **options):
        """A turn of these messages: how it got its KV, why, and its reuse."""
        answer = self.player.turn(messages, max_tokens=ANSWER, **options)
        told = self.cluster.last_turn()
        assert answer.token_ids == self.player.cold(messages, max_tokens=ANSWER).token_ids, told
        self.messages = [*messages, {"role": "assistant", "content": answer.text}]
        return told["mode"], told["mode_reason"], answer.reuse

    def length(self):
        """Tokens of what was said so far."""
        body = {"model": self.player.model, "messages": self.messages, "add_generation_prompt": False}
        request = urllib.request.Request(  # noqa: S310
            f"{self.cluster.router_url}/tokenize",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310
            return json.load(answer)["count"]

    def ask(self, question, **options):
        """The next turn of a faithful client."""
        return self.turn([*self.messages, {"role": "user", "content": question}], **options)


ANSWER = 8
ALONE = ("alone", "fixed")
READBACK = ("readback", "fixed")
CHEAPEST = {
    ("recompute", "only_way", "new_conversation"),
    ("readback", "unknown_costs", "hit"),
    ("readback", "cheaper", "hit"),
    ("recompute", "cheaper", "recompute_cheaper"),
    ("alone", "cheaper", "decode_cheaper"),
}
"""Every mode with its reason, and what becomes of a faithful client's turn."""
LONG = "It was a night in winter, and a ship with a green lamp came round the rock from the north. " * 20


@pytest.fixture
def chat(cluster):
    """A long chat of some turns, of which short ones are decode's and long ones are read back: no matter what they take."""
    with router(cluster, mode_policy="tests.engines.modes:by_length") as through:
        chat = Chat(through)
        mode, why, reuse = chat.turn(opening(times=6))
        assert (mode, why, reuse.reason) == ("recompute", "only_way", "new_conversation")
        for number in range(2):
            mode, why, reuse = chat.ask(LONG + f"What was ship number {number} called?")
            assert (mode, why, reuse.reason) == (*READBACK, "hit")
        yield chat
        chat.player.close()


def test_the_cheapest_way(cluster):
    """Which it is is the machine's affair: it is taken, tells why, and changes no answer."""
    with router(cluster, mode_policy="cheapest") as through:
        chat = Chat(through)
        ways = []
        for brings in (LONG, "", "", "", "", "", "", LONG, "", LONG, ""):
            *way, reuse = chat.ask(f"{brings}What was ship number {len(ways)} called?")
            ways.append((*way, reuse.reason))
        chat.player.close()
    assert ways[0] == ("recompute", "only_way", "new_conversation")
    assert ways[1:5] == [("readback", "unknown_costs", "hit")] * 4
    assert set(ways[5:]) <= CHEAPEST - {ways[0]}


def test_each_mode_does_what_it_says(chat):
    """A short tail is left to decode, a long one to prefill, which reads back what decode computed alone."""
    for number in range(3):
        *mode, reuse = chat.ask(f"Who was the captain of ship number {number}?")
        assert (*mode, reuse.reason) == (*ALONE, "decode_cheaper")
    known = chat.length()
    *mode, reuse = chat.ask(LONG + "What colour was the lamp?")
    assert (*mode, reuse.reason) == (*READBACK, "hit")
    # All but the question: the turns that decode did alone are retained like any other, their answers included.
    assert reuse.remote_tokens >= known // BLOCK * BLOCK
    *mode, _ = chat.ask("And which ship was it?")
    assert tuple(mode) == ALONE


def test_changed_histories_alone(chat):
    """Edited, cut, regenerated and forked histories that decode computes alone are answered like anybody's."""
    history = list(chat.messages)
    edited = [*history[:-3], {"role": "user", "content": "What was the keeper called?"}]
    *mode, _ = chat.turn(edited)
    assert tuple(mode) == ALONE
    cut = [*history[:4], {"role": "user", "content": "How many ships passed?"}]
    *mode, _ = chat.turn(cut)
    assert tuple(mode) == ALONE
    *mode, _ = chat.turn(cut)
    assert tuple(mode) == ALONE
    fork = [*history, {"role": "user", "content": "And in the morning?"}]
    *mode, _ = chat.turn(fork, session=f"{chat.player.session}-fork")
    assert tuple(mode) == ALONE
    rewritten = [{**history[0], "content": "You are a sailor."}, *fork[1:]]
    mode, _, reuse = chat.turn(rewritten)
    assert mode != "alone"
    assert reuse.reason in {"diverged", "hit_diverged"}
    # What is retained of an edited turn is read back by the turn after it.
    *mode, _ = chat.turn([*edited[:-1], {"role": "user", "content": "What was the ship called?"}])
    assert tuple(mode) == ALONE
    *mode, reuse = chat.ask(LONG + "What colour was the lamp?")
    assert (*mode, reuse.reason) == (*READBACK, "hit")


def test_a_turn_alone_is_as_good_as_any(chat):
    """Its salt, its usage, its hints and its end are what they are for a turn that prefill has part in."""
    *mode, _ = chat.ask("Who was the captain?")
    assert tuple(mode) == ALONE
    # The same words under another salt meet no prefix cache, and are computed by prefill.
    messages = [*chat.messages, {"role": "user", "content": "And the cook?"}]
    mode, why, reuse = chat.turn(messages, salt="another-salt", session=f"{chat.player.session}-other")
    assert (mode, why, reuse.reason) == ("recompute", "only_way", "new_conversation")
    assert (reuse.remote_tokens, reuse.local_tokens) == (0, 0)
    # Usage is the engine's own, and the router counts the same.
    answer = chat.player.client.chat.completions.create(
        model=chat.player.model,
        messages=messages,
        temperature=0,
        max_tokens=ANSWER,
        extra_headers={"X-Session-ID": chat.player.session},
        extra_body={"cache_salt": chat.player.salt},
    )
    told = chat.cluster.last_turn()
    cached = answer.usage.prompt_tokens_details.cached_tokens
    assert (told["mode"], told["prompt_tokens"]) == ("alone", answer.usage.prompt_tokens)
    assert (told["local_tokens"], told["computed_tokens"]) == (cached, told["prompt_tokens"] - cached)
    assert cached >= told["prompt_tokens"] - 100
    assert answer.choices[0].message.content == chat.player.cold(messages, max_tokens=ANSWER).text
    (decode,) = chat.cluster.decode_urls
    *mode, _ = chat.ask("Who was the mate?", headers={"x-bidikv-turn": "v=1, w=60"})
    assert tuple(mode) == ALONE
    chat.cluster.wait(decode, lambda engine: (engine["protected_tokens"] or 0) > 0)
    *mode, _ = chat.ask("And the cook?", headers={"x-bidikv-turn": "v=1, final"})
    assert tuple(mode) == ALONE
    *_, reuse = chat.ask(LONG + "What colour was the lamp?")
    assert (reuse.reason, reuse.remote_tokens) == ("released", 0)
