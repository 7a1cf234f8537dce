"""The cheapest way over whole conversations, with engines whose costs are known: it finds what is best on each of them."""

import random
from dataclasses import dataclass

import pytest

from bidikv.headers import ReuseHeader
from bidikv_server.router.core.choices import Mode, ModeReason
from bidikv_server.router.core.conversations import ConversationTable, Holder
from bidikv_server.router.core.digests import chain
from bidikv_server.router.core.engines import EngineTable, IndexInfo, Role
from bidikv_server.router.core.ids import EngineUrl, Scope
from bidikv_server.router.core.mode_policies import Cheapest, readback
from bidikv_server.router.core.placer import Placer
from bidikv_server.router.core.policy import Policies

P, D = EngineUrl("p"), EngineUrl("d")
INDEXES = (IndexInfo("i", "d:1"),)
SCOPE = Scope("t", "m")
TOOLS_TOKENS = 3000
THRESHOLD = 64
LEARNING_ROUNDS = 3


@dataclass(frozen=True)
class Engines:
    """What legs take: seconds, and seconds a token."""

    compute_s: float
    token_s: float
    pull_s: float
    pulled_s: float
    hand_s: float
    alone_token_s: float
    caches: bool = False

    def prefill_s(self, computed, pulled, *, asked):
        waits_s = self.pull_s if asked and pulled else self.pull_s / 10 if asked else 0.0
        return self.compute_s + self.token_s * computed + waits_s + self.pulled_s * pulled


ALIKE = Engines(0.02, 1e-4, 0.01, 5e-6, 0.01, 1e-4)
MACHINES = {
    "a fast link": ALIKE,
    "a slow link": Engines(0.02, 1e-4, 0.6, 1e-4, 0.01, 1e-4),
    "a busy decode": Engines(0.02, 1e-4, 0.01, 5e-6, 0.01, 2e-3),
    "prefill caches": Engines(0.02, 1e-4, 0.05, 5e-6, 0.01, 2e-3, caches=True),
    "a slow machine": Engines(0.05, 1e-3, 0.05, 2e-5, 0.05, 1e-3),
}


def only(mode):
    return lambda _view: (mode, ModeReason.FIXED)


def play(engines, policy, *, seed=0, rounds=25, conversations=8, every_s=20.0, then=None):
    """Seconds to the first token of turns that had a choice, conversations in turn, and the modes. Without the first rounds."""
    chance = random.Random(seed)
    table = EngineTable([(P, Role.PREFILL), (D, Role.DECODE)], probe_failures=1)
    table.probe_passed(P, Role.PREFILL, ())
    table.probe_passed(D, Role.DECODE, INDEXES)
    placer = Placer(table, Policies(mode=policy), max_prefixes=1000, prefill_required=False)
    known = ConversationTable(max_conversations=100, max_turns=64, idle_s=3600)
    histories = [
        [{"role": "user", "content": f"{number} " + "x" * chance.choice([800, 20_000])}]
        for number in range(conversations)
    ]
    prefill_has = [0] * conversations
    decode_has = [0] * conversations
    now_s, seconds, modes = 0.0, [], []
    for round_ in range(rounds):
        if then is not None and round_ == then[0]:
            engines = then[1]
        for number, history in enumerate(histories):
            now_s += every_s / conversations
            prompt = sum(len(message["content"]) for message in history) // 4 + TOOLS_TOKENS
            asked = chain({"messages": history}, SCOPE)
            match = known.find(SCOPE, f"s{number}", asked, now_s)
            plan = placer.plan(match, asked, now_s)
            new = prompt - decode_has[number]
            noise = chance.uniform(0.9, 1.1)
            if plan.prefill is None:
                decode_s = (engines.hand_s + engines.alone_token_s * new) * noise
                took_s, reuse = decode_s, ReuseHeader("decode_cheaper")
            else:
                local = prefill_has[number] if engines.caches else 0
                pulled = max(0, decode_has[number] - local) if plan.sources else 0
                pulled = pulled if pulled >= THRESHOLD else 0
                computed = prompt - local - pulled
                prefill_s = engines.prefill_s(computed, pulled, asked=bool(plan.sources)) * noise
                decode_s = engines.hand_s * noise
                took_s = prefill_s + decode_s
                reuse = ReuseHeader("hit", prompt, pulled, local, computed)
                prefill_has[number] = prompt
                placer.prefilled(plan, asked, reuse, ahead=0, seconds=prefill_s, now_s=now_s)
            placer.streamed(plan, seconds=decode_s, now_s=now_s)
            placer.ended(plan, asked, reuse, now_s)
            known.commit(match, Holder(D, INDEXES), now_s)
            if round_ > LEARNING_ROUNDS:
                seconds.append(took_s)
                modes.append(plan.mode)
            decode_has[number] = prompt + 60
            history += [
                {"role": "assistant", "content": "a" * 240},
                {"role": "user", "content": "b" * chance.choice([60, 200, 600, 4000])},
            ]
    return sum(seconds) / len(seconds), modes


@pytest.mark.parametrize("machine", MACHINES)
def test_about_as_good_as_the_best_way(machine):
    """On every machine it comes close to the best single way, or beats it."""
    ways_s = [play(MACHINES[machine], only(mode))[0] for mode in Mode]
    found_s, _ = play(MACHINES[machine], Cheapest(alone_tokens=2000))
    assert found_s <= 1.05 * min(ways_s)


@pytest.mark.parametrize(
    ("machine", "mode"),
    [
        ("a fast link", Mode.ALONE),
        ("a slow link", Mode.ALONE),
        ("a busy decode", Mode.READBACK),
        ("prefill caches", Mode.RECOMPUTE),
        ("a slow machine", Mode.ALONE),
    ],
)
def test_it_mostly_takes(machine, mode):
    """What a person would have chosen who knows the machine."""
    _, modes = play(MACHINES[machine], Cheapest())
    assert max(Mode, key=modes.count) is mode


def test_what_decode_may_not_do_alone():
    """Long results go to prefill even where decode would be faster, and there the better of the other two is taken."""
    _, modes = play(MACHINES["a slow link"], Cheapest(alone_tokens=256))
    assert modes.count(Mode.ALONE) > modes.count(Mode.RECOMPUTE) > 10 * modes.count(Mode.READBACK)


def test_never_much_worse_than_readback():
    """Where nothing beats it, looking whether that is still so costs little."""
    engines = Engines(0.02, 1e-4, 0.001, 1e-7, 0.001, 1e-2)
    found_s, modes = play(engines, Cheapest())
    assert found_s <= 1.1 * play(engines, readback)[0]
    assert modes.count(Mode.READBACK) > 0.95 * len(modes)


def test_it_finds_out_when_things_change():
    """A link that was slow when it was last used is tried again, and taken once it is fast."""
    slow, fast = MACHINES["a slow link"], Engines(0.02, 1e-4, 0.01, 5e-6, 0.01, 2e-3)
    _, modes = play(slow, Cheapest(alone_tokens=0), rounds=90, then=(30, fast))
    assert modes[:200].count(Mode.READBACK) < 20
    assert modes[-50:].count(Mode.READBACK) == 50
