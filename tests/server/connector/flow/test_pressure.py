"""Decode under load: what is retained costs no running request a block, a step or a preemption; stock pins (F18)."""

import copy

import pytest
from engine_core import BLOCK, Engine, cold, text, vllm_config
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm.v1.request import RequestStatus

from bidikv_server import wire

SMALL = 24
"""Blocks of a pool in which a handful of requests fight."""

turns = st.fixed_dictionaries(
    {
        "after": st.integers(0, 6),
        "length": st.integers(1, 150),
        "count": st.integers(1, 50),
        "conversation": st.sampled_from("abc"),
        "retain_s": st.sampled_from([0.0, 1e-6, 60.0]),
        "protect": st.booleans(),
        "release": st.integers(0, 9).map(lambda n: n == 0),
        "gone_after": st.one_of(st.none(), st.integers(0, 20)),
    }
)


class Side:
    """One engine under a load, and what its scheduler did in every step."""

    def __init__(self, model, port, *, retains, **settings):
        extra = {
            "bidikv": {"role": "decode", "readback": retains, "index_port": port, "protected_share": 0.5}
        }
        self.engine = Engine(vllm_config(model, extra=extra, kv_role="kv_consumer", **settings), {})
        self.preempted, self.trace = 0, []

    def add(self, number, turn, prompt):
        leg = wire.decode_leg(
            {}, salt="s", **{key: turn[key] for key in ("conversation", "retain_s", "protect", "release")}
        )
        self.engine.add(prompt, turn["count"], copy.deepcopy(leg), name=f"t{number}")

    def step(self):
        scheduler = self.engine.scheduler
        before = {name: len(answer.tokens) for name, answer in self.engine.answers.items()}
        self.engine.step()
        progress = {name: len(answer.tokens) - before[name] for name, answer in self.engine.answers.items()}
        running = [request.request_id for request in scheduler.running]
        preemptions = {name: request.num_preemptions for name, request in scheduler.requests.items()}
        self.trace.append((progress, running, preemptions, self.engine.free_blocks))

    def abort(self, number):
        self.engine.abort(f"t{number}")


def play(sides, load, prompts):
    """Give all sides the same load; every answer of an unaborted turn must be the cold one."""
    clock, added, started = 0, 0, {}
    while added < len(load) or any(side.engine.scheduler.requests for side in sides):
        while added < len(load) and sum(turn["after"] for turn in load[: added + 1]) <= clock:
            for side in sides:
                side.add(added, load[added], prompts[added])
            started[added] = clock
            added += 1
        for number, since in started.items():
            gone = load[number]["gone_after"]
            if gone is not None and clock == since + gone:
                for side in sides:
                    side.abort(number)
        for side in sides:
            side.step()
        clock += 1
        assert clock < 1500, "a request waits for ever"
    for side in sides:
        for number, turn in enumerate(load):
            answer = side.engine.answers[f"t{number}"]
            expected = cold(prompts[number], turn["count"])
            assert answer.tokens == (
                expected if answer.finish == "length" else expected[: len(answer.tokens)]
            )
            assert answer.finish == "length" or turn["gone_after"] is not None


QUICK = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def sides(checkpoint, free_port):
    """Build engines for one example after another, and stop them."""
    running = []

    def build(**kwargs):
        while running:
            running.pop().engine.close()
        running.extend(Side(checkpoint, free_port, retains=retains, **kwargs) for retains in (True, False))
        return list(running)

    yield build
    for side in running:
        side.engine.close()


@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
@given(load=st.lists(turns, min_size=1, max_size=8))
@QUICK
def test_no_step_differs_because_of_what_is_retained(sides, asynchronous, load):
    """Step by step the same tokens, the same requests running, preempted and waiting, and the same free blocks as without."""
    ours, without = sides(blocks=SMALL, batch=64, seqs=6, caching=False, asynchronous=asynchronous)
    play([ours, without], load, [text(n, turn["length"]) for n, turn in enumerate(load)])
    assert ours.trace == without.trace
    ours.engine.idle(2)
    assert ours.engine.free_blocks == SMALL - 1


@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
@given(load=st.lists(turns, min_size=1, max_size=8))
@QUICK
def test_under_a_prefix_cache_nothing_is_answered_wrong_or_kept(sides, asynchronous, load):
    """Turns that extend each other, with a prefix cache: cold answers, no endless wait, all free and resettable at the end."""
    both = sides(blocks=SMALL, batch=64, seqs=6, caching=True, asynchronous=asynchronous)
    lengths = {"a": 0, "b": 0, "c": 0}
    prompts = []
    for turn in load:
        lengths[turn["conversation"]] = min(200, lengths[turn["conversation"]] + turn["length"])
        prompts.append(text(ord(turn["conversation"]), lengths[turn["conversation"]]))
    play(both, load, prompts)
    for side in both:
        side.engine.idle(2)
        assert side.engine.free_blocks == SMALL - 1
        assert side.engine.scheduler.reset_prefix_cache()
    decode = both[0].engine.side._decode
    assert len(decode._index._index) == 0
    decode._index._index.check_integrity()
    decode._protected.check_integrity()


def test_retained_turns_do_not_keep_a_request_waiting(start):
    """Eight finished turns fill the pool with readable blocks; a request that needs nearly all of them starts at once."""
    pair = start()
    for number in range(8):
        pair.decode.finish(
            pair.decode_alone(text(number, 100), 8, conversation=str(number), protect=number % 2 == 0)
        )
    pair.decode.idle(2)
    assert pair.decode.free_blocks == 63
    long = pair.decode.add(text(99, 900), 8, None)
    assert pair.decode.finish(long, steps=10).tokens == cold(text(99, 900), 8)


def test_stock_keeps_requests_waiting_for_what_nobody_may_come_back_for(start):
    """F18: every finished turn takes its blocks out of the pool until the TTL, so a request waits beside an idle device."""
    pair = start(stock=True)
    free = [63]
    for number in range(8):
        prompt = text(number, 100)
        first = pair.prefill.finish(pair.ask(prompt))
        pair.decode.finish(pair.reply(prompt, 8, first))
        pair.quiet()
        free.append(pair.decode.free_blocks)
    assert free == [63 - 7 * number for number in range(9)]
    waiting = pair.decode.add(text(99, 200), 8, None)
    pair.decode.idle(100)
    assert pair.decode.status(waiting) is RequestStatus.WAITING
    assert pair.decode.answers[waiting].tokens == []
    pair.pass_time(481)
    assert pair.decode.finish(waiting).tokens == cold(text(99, 200), 8)


def test_protected_turns_outlive_soft_ones(start):
    """Load that takes three quarters of the pool leaves the turn whose client said when it comes back."""
    pair = start()
    soon, later = text(1, 100), text(2, 100)
    pair.decode.finish(pair.decode_alone(soon, 40, conversation="soon", protect=True))
    pair.decode.finish(pair.decode_alone(later, 40, conversation="later"))
    for number in range(8):
        pair.decode.finish(pair.decode.add(text(10 + number, 95), 1, None))
        pair.decode.finish(pair.decode.add(text(20 + number, 300), 1, None))
    answers = {}
    for name, prompt in (("soon", soon), ("later", later)):
        longer = prompt + cold(prompt, 40) + text(3, 20)
        answers[name] = pair.prefill.finish(pair.ask(longer, conversation=name))
        assert answers[name].tokens == cold(longer, 1)
    assert answers["soon"].reuse[:2] == ("hit", 128)
    assert answers["later"].reuse[:2] == ("evicted", 0)


def test_one_long_request_takes_every_unprotected_block_first(start):
    """Also those that were freed after the protected ones and stand behind them in the pool's queue."""
    pair = start()
    soon = text(1, 100)
    pair.decode.finish(pair.decode_alone(soon, 40, conversation="soon", protect=True))
    pair.decode.finish(pair.decode.add(text(2, 20 * BLOCK - 4), 1, None))
    pair.decode.finish(pair.decode.add(text(3, 50 * BLOCK - 4), 1, None))
    longer = soon + cold(soon, 40) + text(3, 20)
    answer = pair.prefill.finish(pair.ask(longer, conversation="soon"))
    assert answer.reuse[:2] == ("hit", 128)


def test_a_final_turn_releases_its_conversation(start):
    """Nothing follows: what it left is no longer offered, and a late reader is told why."""
    pair = start()
    _, answer = pair.turn(text(1, 100))
    prompt = text(1, 100) + answer.tokens + text(2, 20)
    first, last = pair.turn(prompt, 10, retain_s=0.0, release=True)
    pair.forget()
    assert first.reuse[0] == "hit"
    longer = prompt + last.tokens + text(3, 40)
    late = pair.prefill.finish(pair.ask(longer))
    assert late.reuse == ("released", 0, 0, len(longer))
    assert late.tokens == cold(longer, 1)


@pytest.mark.parametrize("count", [1, 2, 16, 17, 33])
def test_only_settled_blocks_are_offered(start, count):
    """Whatever the length of the answer: the block of the last sampled token, which has no KV yet, is not among them."""
    pair = start()
    prompt = text(1, 95)
    pair.decode.finish(pair.decode_alone(prompt, count))
    pair.decode.idle(2)
    longer = prompt + cold(prompt, count) + text(2, 64)
    answer = pair.prefill.finish(pair.ask(longer))
    assert answer.reuse[1] == (95 + count - 1) // BLOCK * BLOCK
    assert answer.tokens == cold(longer, 1)


def test_a_long_promise_does_not_hold_up_the_end_of_short_ones(start):
    """Every entry ends by its own time, whatever was retained before it; nothing has to tick (F19)."""
    pair = start()
    prompts = {name: text(number, 100) for number, name in enumerate(["long", "short", "shorter"])}
    for name, retain_s in zip(prompts, (60.0, 1e-4, 1e-6), strict=True):
        pair.decode.finish(pair.decode_alone(prompts[name], 10, conversation=name, retain_s=retain_s))
    pair.decode.idle(2)
    reasons = {}
    for name, prompt in prompts.items():
        longer = prompt + cold(prompt, 10) + text(9, 30)
        reasons[name] = pair.prefill.finish(pair.ask(longer, conversation=name)).reuse[0]
    assert reasons == {"long": "hit", "short": "expired", "shorter": "expired"}
