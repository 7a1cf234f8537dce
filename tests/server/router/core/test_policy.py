"""Routing, case by case."""

import pytest

from bidikv.headers import TurnHeader
from bidikv_server.reasons import Reason
from bidikv_server.router.core.conversations import Holder, Match, Turn
from bidikv_server.router.core.digests import Digest
from bidikv_server.router.core.engines import EngineSnapshot, IndexInfo, Role
from bidikv_server.router.core.ids import ConversationKey, EngineUrl
from bidikv_server.router.core.policy import Excluded, NoHealthyEngine, Placement, Retention, plan_route

INDEX = (IndexInfo("i", "h:1"), IndexInfo("j", "h:2"))
NEW = Match(ConversationKey("k"), Digest(b"x"), 1)


def engine(url, role, *, healthy=True, in_flight=0, indexes=INDEX, draining=False):
    indexes = indexes if role is Role.DECODE else ()
    return EngineSnapshot(EngineUrl(url), role, healthy, in_flight, indexes, draining)


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
    """An engine that failed this turn is lost to it, draining or not."""
    excluded = Excluded(decode=frozenset({EngineUrl("d")}))
    plan = plan_route(known(), [prefill(), decode("d"), decode("e")], excluded=excluded)
    assert (plan.decode.url, plan.placement) == ("e", Placement.ENGINE_LOST)


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
