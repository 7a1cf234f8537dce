"""Routing, case by case."""

import pytest

from bidikv.headers import TurnHeader
from bidikv_server.reasons import Reason
from bidikv_server.router.core.choices import Mode, ModeReason, Placement, PrefillChoice
from bidikv_server.router.core.circuit import CircuitState
from bidikv_server.router.core.conversations import Holder, Match, Turn
from bidikv_server.router.core.digests import Digest
from bidikv_server.router.core.engines import EngineSnapshot, IndexInfo, Role
from bidikv_server.router.core.forecast import Known
from bidikv_server.router.core.ids import ConversationKey, EngineUrl
from bidikv_server.router.core.leg_costs import LegCosts
from bidikv_server.router.core.mode_policies import Cheapest
from bidikv_server.router.core.policy import Excluded, NoHealthyEngine, Policies, Retention, plan_route
from bidikv_server.router.core.prefixes import Prompt

INDEX = (IndexInfo("i", "h:1"), IndexInfo("j", "h:2"))
ONE = INDEX[:1]
NEW = Match(ConversationKey("k"), Digest(b"x"), 1)


def engine(url, role, *, healthy=True, indexes=INDEX, **fields):
    indexes = indexes if role is Role.DECODE else ()
    return EngineSnapshot(EngineUrl(url), role, healthy, indexes=indexes, **fields)


def prefill(url="p", **fields):
    return engine(url, Role.PREFILL, **fields)


def decode(url="d", **fields):
    return engine(url, Role.DECODE, **fields)


def turn(url="d", indexes=INDEX):
    return Turn(Digest(b"t"), None, 1, Holder(EngineUrl(url), indexes))


def known(held=None):
    held = held or turn()
    return Match(ConversationKey("k"), Digest(b"x"), 2, ancestor=held, own=held, latest=held)


@pytest.mark.parametrize(
    ("match", "engines", "sources", "reason"),
    [
        (NEW, [decode()], (), Reason.NEW_CONVERSATION),
        (known(), [decode()], ("h:1", "h:2"), None),
        (known(turn(indexes=())), [decode()], ("h:1", "h:2"), None),
        (known(), [decode(healthy=False), decode("e")], (), Reason.DECODE_CHANGED),
        (known(), [decode(indexes=INDEX[:1])], (), Reason.DECODE_CHANGED),
        (known(), [decode(indexes=())], (), Reason.DECODE_CHANGED),
        (known(turn("gone")), [decode()], (), Reason.DECODE_CHANGED),
        (known(turn(indexes=())), [decode(indexes=())], (), Reason.NO_INDEX),
    ],
)
def test_sources(match, engines, sources, reason):
    """Prefill is told where to ask, or the reason says why not."""
    plan = plan_route(match, [prefill(), *engines])
    assert (plan.sources, plan.reason) == (sources, reason)
    off = plan_route(match, [prefill(), *engines], barred=Reason.READBACK_OFF)
    assert (off.sources, off.reason) == ((), Reason.READBACK_OFF)


@pytest.mark.parametrize(
    ("match", "engines", "chosen"),
    [
        (NEW, [decode("d", in_flight=1), decode("e")], "e"),
        (NEW, [decode("d"), decode("e")], "d"),
        (NEW, [decode("d", healthy=False), decode("e", in_flight=9)], "e"),
        (known(), [decode("e"), decode("d", in_flight=9)], "d"),
        (known(), [decode("e"), decode("d", healthy=False)], "e"),
    ],
)
def test_decode(match, engines, chosen):
    """A conversation stays where it is; anything else goes to the least loaded engine."""
    assert plan_route(match, [prefill(), *engines]).decode.url == chosen


@pytest.mark.parametrize(("in_flight", "chosen"), [(0, "d"), (1, "e")])
def test_fork_prefers_its_origin_among_equals(in_flight, chosen):
    """A fork does not crowd its origin's engine, and reads back from there wherever it runs."""
    fork = Match(ConversationKey("k"), Digest(b"x"), 2, ancestor=turn("d"))
    plan = plan_route(fork, [prefill(), decode("e"), decode("d", in_flight=in_flight)])
    assert plan.decode.url == chosen
    assert plan.sources == ("h:1", "h:2")


@pytest.mark.parametrize(
    ("match", "engines", "chosen", "placement"),
    [
        (NEW, [decode("d", draining=True), decode("e", in_flight=9)], "e", Placement.LEAST_LOADED),
        (known(), [decode("d"), decode("e", draining=True)], "d", Placement.HOME),
        (known(), [decode("d", draining=True), decode("e")], "e", Placement.DRAINING),
        (known(), [decode("d", draining=True, healthy=False), decode("e")], "e", Placement.ENGINE_LOST),
        (known(), [decode("d", healthy=False), decode("e")], "e", Placement.ENGINE_LOST),
        (known(), [decode("e")], "e", Placement.ENGINE_LOST),
    ],
)
def test_placement(match, engines, chosen, placement):
    """A draining engine takes no turn of anybody, and the plan says why a conversation moved."""
    plan = plan_route(match, [prefill("p", draining=True), prefill("q", in_flight=9), *engines])
    assert (plan.decode.url, plan.placement, plan.prefill.url) == (chosen, placement, "q")


def test_failed_home():
    """An engine that failed this turn is lost to it, draining or not, and nothing is read back from it."""
    excluded = Excluded(decode=frozenset({EngineUrl("d")}))
    plan = plan_route(known(), [prefill(), decode("d"), decode("e")], excluded=excluded)
    assert (plan.decode.url, plan.placement) == ("e", Placement.ENGINE_LOST)
    assert (plan.sources, plan.reason) == ((), Reason.DECODE_CHANGED)


def test_draining_engine_is_read_from():
    """What a draining engine holds is read back by the turn that moves away."""
    plan = plan_route(known(), [prefill(), decode("d", draining=True), decode("e")])
    assert (plan.sources, plan.reason) == (("h:1", "h:2"), None)


def test_everything_drains():
    """Decode alone does without prefill; without decode nothing runs."""
    plan = plan_route(NEW, [prefill(draining=True), decode()])
    assert (plan.prefill, plan.reason) == (None, Reason.NO_PREFILL)
    with pytest.raises(NoHealthyEngine, match="decode"):
        plan_route(NEW, [prefill(), decode(draining=True)])


def test_prefill():
    """The least loaded healthy prefill engine; one that failed this turn is left out."""
    engines = [prefill("p", in_flight=1), prefill("q"), prefill("r", healthy=False), decode()]
    assert plan_route(NEW, engines).prefill.url == "q"
    excluded = Excluded(prefill=frozenset({EngineUrl("q")}))
    assert plan_route(NEW, engines, excluded=excluded).prefill.url == "p"


def test_without_prefill():
    """Decode does it alone, unless that is not wanted."""
    assert plan_route(NEW, [decode()]).prefill is None
    with pytest.raises(NoHealthyEngine, match="prefill"):
        plan_route(NEW, [decode()], prefill_required=True)


def test_without_decode():
    """Nothing runs without decode."""
    with pytest.raises(NoHealthyEngine, match="decode"):
        plan_route(NEW, [prefill(), decode(healthy=False)])


def test_alone():
    """A request that cannot be handed over needs no prefill engine."""
    plan = plan_route(known(), [decode()], alone=Reason.UNSUPPORTED, prefill_required=True)
    assert (plan.prefill, plan.sources, plan.reason) == (None, (), Reason.UNSUPPORTED)


@pytest.mark.parametrize(
    ("header", "readback", "seconds"),
    [
        (TurnHeader(), True, 100.0),
        (TurnHeader(), False, 0.0),
        (TurnHeader(retain_s=20), True, 20),
        (TurnHeader(retain_s=2000), True, 300.0),
        (TurnHeader(retain_s=20, final=True), True, 0.0),
        (TurnHeader(kind="aux"), True, 0.0),
        (TurnHeader(kind="aux", wait_s=5), True, 0.0),
        (TurnHeader(wait_s=5), True, 100.0),
        (TurnHeader(wait_s=200), True, 200.0),
        (TurnHeader(wait_s=2000), True, 300.0),
        (TurnHeader(wait_s=0), True, 100.0),
        (TurnHeader(wait_s=200, retain_s=20), True, 20),
    ],
)
def test_retention(header, readback, seconds):
    """The client's hint within the limit; nothing for a last or auxiliary turn."""
    keep = Retention(100.0, 300.0).keep(header, readback=readback)
    assert keep.retain_s == seconds
    assert keep.protect == (seconds > 0 and (header.retain_s is not None or bool(header.wait_s)))
    assert keep.release == (readback and header.final)


@pytest.mark.parametrize("required", [False, True])
def test_open_circuits(required):
    """An engine whose circuit is open is left out while there is another way, and taken while there is none."""
    broken = {"circuit": CircuitState.OPEN}
    plan = plan_route(known(), [prefill(), prefill("q", **broken), decode("d", **broken), decode("e")])
    assert (plan.decode.url, plan.placement, plan.prefill.url) == ("e", Placement.CIRCUIT_OPEN, "p")
    assert plan.sources == ("h:1", "h:2")
    plan = plan_route(known(), [prefill(**broken), decode("d", **broken)], prefill_required=required)
    assert (plan.decode.url, plan.placement) == ("d", Placement.HOME)
    assert plan.prefill is None if not required else plan.prefill.url == "p"


def test_one_leg_tries():
    """An engine that is half open gets a leg only while it has none."""
    trying = {"circuit": CircuitState.HALF_OPEN}
    assert plan_route(known(), [prefill(), decode("d", **trying), decode("e")]).decode.url == "d"
    plan = plan_route(known(), [prefill(), decode("d", in_flight=1, **trying), decode("e")])
    assert (plan.decode.url, plan.placement) == ("e", Placement.CIRCUIT_OPEN)


def test_refused():
    """A turn that its engine refused for now goes elsewhere, reads back from there, and says so."""
    excluded = Excluded().refusing(Role.DECODE, EngineUrl("d"))
    plan = plan_route(known(), [prefill(), decode("d"), decode("e")], excluded=excluded)
    assert (plan.decode.url, plan.placement, plan.sources) == ("e", Placement.REFUSED, ("h:1", "h:2"))
    excluded = Excluded().refusing(Role.PREFILL, EngineUrl("p"))
    plan = plan_route(known(), [prefill(), prefill("q"), decode()], excluded=excluded)
    assert (plan.prefill.url, plan.prefill_choice) == ("q", PrefillChoice.ONLY)


def alone(_view):
    return Mode.ALONE, ModeReason.CHEAPER


def recompute(_view):
    return Mode.RECOMPUTE, ModeReason.CHEAPER


def test_modes():
    """The policy decides where there is a choice, and only there."""
    engines = [prefill(), decode()]
    plan = plan_route(known(), engines)
    assert (plan.mode, plan.mode_reason) == (Mode.READBACK, ModeReason.FIXED)
    plan = plan_route(known(), engines, policies=Policies(mode=alone))
    assert (plan.prefill, plan.sources, plan.reason) == (None, (), Reason.DECODE_CHEAPER)
    assert (plan.mode, plan.prefill_choice) == (Mode.ALONE, PrefillChoice.NONE)
    plan = plan_route(known(), engines, policies=Policies(mode=alone), prefill_required=True)
    assert (plan.prefill.url, plan.reason, plan.mode) == ("p", None, Mode.READBACK)
    plan = plan_route(known(), engines, policies=Policies(mode=alone), together=True)
    assert (plan.prefill.url, plan.mode, plan.mode_reason) == ("p", Mode.READBACK, ModeReason.ONLY_WAY)
    plan = plan_route(known(), engines, policies=Policies(mode=recompute))
    assert (plan.prefill.url, plan.sources, plan.reason) == ("p", (), Reason.RECOMPUTE_CHEAPER)
    for match, barred in ((NEW, None), (known(), Reason.READBACK_OFF)):
        plan = plan_route(match, engines, policies=Policies(mode=alone), barred=barred)
        assert (plan.mode, plan.mode_reason) == (Mode.RECOMPUTE, ModeReason.ONLY_WAY)
        assert plan.prefill.url == "p"


def learnt():
    """Costs of `p` and `d`: computing takes 1 ms a token, pulling a tenth of that, handing over next to nothing."""
    costs = LegCosts()
    for tokens in (1000, 2000, 3000, 4000, 5000):
        for asked, seconds in ((False, tokens / 1e3), (True, 0.1 + tokens / 1e4)):
            computed, pulled = (0, tokens) if asked else (tokens, 0)
            costs.prefilled(
                EngineUrl("p"),
                ahead=0,
                computed=computed,
                pulled=pulled,
                asked=asked,
                seconds=seconds,
                now_s=0.0,
            )
        costs.handed_over(EngineUrl("d"), tokens=tokens, seconds=0.02 + tokens / 1e6, now_s=0.0)
    return costs


@pytest.mark.parametrize(
    ("prompt", "match", "mode"),
    [
        (Prompt(4000, 100, {}, 5.0), known(turn(indexes=ONE)), Mode.ALONE),
        (Prompt(4000, 100, {}, 500.0), known(turn(indexes=ONE)), Mode.READBACK),
        (Prompt(4000, 1000, {}, 5.0), known(turn(indexes=ONE)), Mode.READBACK),
        (Prompt(4000, 50, {EngineUrl("p"): 3940}, 500.0), known(turn(indexes=ONE)), Mode.RECOMPUTE),
        (Prompt(4000, 100, {}, 5.0), known(turn("e", ONE)), Mode.READBACK),
        (None, known(turn(indexes=ONE)), Mode.READBACK),
    ],
)
def test_the_cheapest(prompt, match, mode):
    """By measured costs; alone only where decode itself holds the beginning, and not for long."""
    engines = [prefill(), decode(indexes=ONE), decode("e", indexes=ONE, draining=True)]
    policies = Policies(mode=Cheapest())
    plan = plan_route(match, engines, policies=policies, known=Known(learnt(), 0.0, prompt))
    assert plan.mode is mode


@pytest.mark.parametrize(("caches", "mode"), [(None, Mode.ALONE), (True, Mode.ALONE), (False, Mode.READBACK)])
def test_decode_without_a_prefix_cache(caches, mode):
    """It would have to compute the whole history, so it does nothing alone by choice."""
    engines = [prefill(), decode(indexes=ONE, prefix_caching=caches)]
    prompt = Prompt(4000, 100, {}, 5.0)
    plan = plan_route(
        known(turn(indexes=ONE)),
        engines,
        policies=Policies(mode=Cheapest()),
        known=Known(learnt(), 0.0, prompt),
    )
    assert plan.mode is mode
    assert plan.decode_tokens == (4000 if caches is False else 100)


def test_once_together_stays_together():
    """After decode failed at a turn alone, prefill takes part, however cheap it would be without."""
    plan = plan_route(
        known(turn(indexes=ONE)),
        [prefill(), decode(indexes=ONE)],
        together=True,
        policies=Policies(mode=Cheapest()),
        known=Known(learnt(), 0.0, Prompt(4000, 100, {}, 5.0)),
    )
    assert (plan.mode, plan.prefill.url) == (Mode.READBACK, "p")


def test_several_ranks_do_nothing_alone():
    """Each has a prefix cache of its own, and who gets the turn is the engine's choice."""
    plan = plan_route(
        known(),
        [prefill(), decode()],
        policies=Policies(mode=Cheapest()),
        known=Known(learnt(), 0.0, Prompt(4000, 100, {}, 5.0)),
    )
    assert (plan.mode, plan.decode_tokens) == (Mode.READBACK, 4000)
