"""Where turns are decoded, policy by policy."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bidikv_server.router.core.choices import DecodeView, Placement
from bidikv_server.router.core.decode_policies import Sticky, pinned, spread
from bidikv_server.router.core.engines import EngineSnapshot, Role
from bidikv_server.router.core.ids import EngineUrl

HOME = EngineUrl("home")
LOADS = st.integers(0, 60)
USAGES = st.none() | st.floats(0, 1)


def engine(url="home", *, load=0, **fields):
    return EngineSnapshot(EngineUrl(url), Role.DECODE, healthy=True, in_flight=load, **fields)


@pytest.mark.parametrize(
    ("home", "other", "chosen"),
    [
        (engine(load=16), engine("other"), "home"),
        (engine(load=17), engine("other"), "other"),
        (engine(load=36), engine("other", load=10), "home"),
        (engine(load=37), engine("other", load=10), "other"),
        (engine(load=10, expected=5, others=22), engine("other", load=10), "other"),
        (engine(load=5, waiting=1), engine("other", load=4), "home"),
        (engine(load=6, waiting=1), engine("other", load=4), "other"),
        (engine(load=6, waiting=1), engine("other", load=4, waiting=1), "home"),
        (engine(load=6, waiting=1), engine("other", load=4, kv_usage=0.95), "home"),
        (engine(load=6, waiting=1), engine("other", load=4, kv_usage=0.5), "other"),
        (engine(load=2, kv_usage=0.95), engine("other", load=3, kv_usage=0.5), "other"),
        (engine(load=2, kv_usage=0.85), engine("other", load=3, kv_usage=0.5), "home"),
        (engine(load=2, kv_usage=0.95), engine("other", load=3, kv_usage=0.8), "home"),
        (engine(load=2, kv_usage=0.95), engine("other", load=3), "home"),
        (engine(load=2, kv_usage=0.95), engine("other", load=3, kv_usage=0.5, waiting=1), "home"),
        (engine(load=2, kv_usage=0.95), engine("other", load=21, kv_usage=0.5), "home"),
    ],
)
def test_sticky(home, other, chosen):
    """A turn leaves its engine only when that is much busier, or queues while another one has room."""
    found, placement = Sticky()(DecodeView((other, home), HOME))
    assert (found.url, placement) == (chosen, Placement.HOME if chosen == "home" else Placement.PRESSURE)


@pytest.mark.parametrize("policy", [Sticky(), pinned])
def test_without_a_home(policy):
    """The least loaded engine, for the reason that there is; a fork prefers its origin among equals."""
    engines = (engine("a", load=1), engine("b"), engine("c"))
    assert policy(DecodeView(engines)) == (engines[1], Placement.LEAST_LOADED)
    assert policy(DecodeView(engines, origin=EngineUrl("c")))[0].url == "c"
    lost = DecodeView(engines, home=HOME, absent=Placement.CIRCUIT_OPEN)
    assert policy(lost) == (engines[1], Placement.CIRCUIT_OPEN)


def test_pinned_and_spread():
    """The one never moves a turn, the other always to the least loaded engine."""
    view = DecodeView((engine("other", load=1), engine(load=100, waiting=9)), HOME)
    assert pinned(view)[1] is Placement.HOME
    assert spread(view) == (view.candidates[0], Placement.LEAST_LOADED)
    assert spread(DecodeView((engine("other"), engine()), HOME))[1] is Placement.HOME


@given(
    st.builds(engine, load=LOADS, waiting=st.integers(0, 2), kv_usage=USAGES),
    st.builds(engine, st.just("other"), load=LOADS, waiting=st.integers(0, 2), kv_usage=USAGES),
)
def test_no_two_engines_give_turns_to_each_other(home, other):
    """Whatever their loads: a turn that moved stays, as long as they do."""
    found, _ = Sticky()(DecodeView((home, other), home.url))
    if found is other:
        assert Sticky()(DecodeView((home, other), other.url))[0] is other


@pytest.mark.parametrize("blocks", [None, 40])
@pytest.mark.parametrize("queues_from", [20, 10_000])
@pytest.mark.parametrize("seed", range(3))
def test_conversations_do_not_flap(seed, queues_from, blocks):
    """Under load that starts all on one engine loads even out, and conversations move once on average."""
    # Loads are current and what engines say of their queues is old, as in the router.
    chance = random.Random(seed)
    policy, names = Sticky(), ["a", "b", "c"]
    homes = dict.fromkeys(range(90), "a")
    moves = dict.fromkeys(homes, 0)
    running: list[int] = []
    said, usage = dict.fromkeys(names, 0), dict.fromkeys(names, None)
    for step in range(1500):
        load = {name: sum(homes[turn] == name for turn in running) for name in names}
        if step % 25 == 0:
            said = {name: max(0, load[name] - queues_from) for name in names}
            usage = {name: blocks and min(1.0, load[name] / blocks) for name in names}
        idle = [conversation for conversation in homes if conversation not in running]
        if len(running) < 60 and idle:
            turn = chance.choice(idle)
            engines = tuple(
                engine(name, load=load[name], waiting=said[name], kv_usage=usage[name]) for name in names
            )
            found, _ = policy(DecodeView(engines, EngineUrl(homes[turn])))
            moves[turn] += found.url != homes[turn]
            homes[turn] = found.url
            running.append(turn)
        else:
            running.pop(chance.randrange(len(running)))
    final = [sum(home == name for home in homes.values()) for name in names]
    assert max(final) <= 2.0 * min(final) + 16
    assert sum(moves.values()) <= 1.2 * len(homes)
    assert max(moves.values()) <= 6
