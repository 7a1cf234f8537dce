"""Health by events, and engines that come and go."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from bidikv_server.router.core.circuit import CircuitRule
from bidikv_server.router.core.engines import EngineLoad, EngineTable, IndexInfo, Role
from bidikv_server.router.core.ids import EngineUrl

URL = EngineUrl("http://d")
INDEX = (IndexInfo("i", "h:1"),)


def state(engines):
    (snapshot,) = engines.snapshots(Role.DECODE)
    return snapshot.healthy, snapshot.indexes, snapshot.in_flight


def test_health():
    """Up with the first passed probe, down with enough failed ones in a row or one refused connection."""
    engines = EngineTable([(URL, Role.DECODE)], probe_failures=2)
    assert state(engines) == (False, (), 0)
    assert engines.probe_passed(URL, Role.DECODE, INDEX)
    assert not engines.probe_failed(URL, Role.DECODE)
    assert not engines.probe_passed(URL, Role.DECODE, None)
    assert not engines.probe_failed(URL, Role.DECODE)
    assert state(engines) == (True, INDEX, 0)
    assert engines.probe_failed(URL, Role.DECODE)
    assert state(engines) == (False, (), 0)
    assert not engines.probe_failed(URL, Role.DECODE)
    assert engines.probe_passed(URL, Role.DECODE, INDEX)
    assert engines.connect_failed(URL, Role.DECODE)
    assert state(engines) == (False, (), 0)


def test_an_engine_that_never_was_up_is_told_of_once():
    """With the probe that makes it count as down; not again when a leg has said so already."""
    engines = EngineTable([(URL, Role.DECODE)], probe_failures=2)
    assert [engines.probe_failed(URL, Role.DECODE) for _ in range(4)] == [False, True, False, False]
    engines.probe_passed(URL, Role.DECODE, INDEX)
    assert engines.connect_failed(URL, Role.DECODE)
    assert [engines.probe_failed(URL, Role.DECODE) for _ in range(3)] == [False, False, False]


def test_drain():
    """In every role at once, over failures and restarts, until it is taken back; an unknown engine is none."""
    engines = EngineTable([(URL, Role.DECODE), (URL, Role.PREFILL)], probe_failures=1)
    engines.probe_passed(URL, Role.DECODE, INDEX)
    drained = engines.drain(URL, draining=True)
    assert [(e.role, e.draining, e.takes_legs) for e in drained] == [
        (Role.PREFILL, True, False),
        (Role.DECODE, True, False),
    ]
    engines.connect_failed(URL, Role.DECODE)
    engines.probe_passed(URL, Role.DECODE, INDEX)
    assert not engines.snapshots(Role.DECODE)[0].takes_legs
    assert [e.takes_legs for e in engines.drain(URL, draining=False)] == [False, True]
    assert engines.drain(EngineUrl("http://other"), draining=True) == ()


def test_load():
    """Legs are counted per role, also where one engine serves both."""
    engines = EngineTable([(URL, Role.DECODE), (URL, Role.PREFILL)], probe_failures=1)
    engines.leg_started(URL, Role.DECODE)
    engines.leg_started(URL, Role.DECODE)
    engines.leg_ended(URL, Role.DECODE)
    assert state(engines) == (False, (), 1)
    assert engines.snapshots(Role.PREFILL)[0].in_flight == 0


def test_a_leaving_engine_is_read_from_until_it_has_rested():
    """Off the list it takes no leg, finishes those it has, and is forgotten a while after the last one."""
    engines = EngineTable([(URL, Role.DECODE)], probe_failures=2, linger_s=100.0)
    engines.probe_passed(URL, Role.DECODE, INDEX)
    engines.leg_started(URL, Role.DECODE)
    assert engines.remove(URL, Role.DECODE)
    assert not engines.remove(URL, Role.DECODE)
    (left,) = engines.snapshots(Role.DECODE)
    assert (left.healthy, left.draining, left.leaving, left.takes_legs) == (True, True, True, False)
    assert left.indexes == INDEX
    assert engines.sweep(1_000.0) == ()
    engines.leg_ended(URL, Role.DECODE)
    assert engines.sweep(2_000.0) == engines.sweep(2_099.0) == ()
    assert engines.sweep(2_100.0) == ((URL, Role.DECODE),)
    assert engines.snapshots(Role.DECODE) == ()


def test_a_leaving_engine_that_is_down_is_forgotten_at_once():
    """Nothing can be read from it; nor is there anything on a prefill or a stock engine."""
    for role, indexes in ((Role.DECODE, ()), (Role.PREFILL, None)):
        engines = EngineTable([(URL, role)], probe_failures=1, linger_s=100.0)
        engines.probe_passed(URL, role, indexes)
        engines.remove(URL, role)
        assert engines.sweep(0.0) == ((URL, role),)
    engines = EngineTable([(URL, Role.DECODE)], probe_failures=1, linger_s=100.0)
    engines.probe_passed(URL, Role.DECODE, INDEX)
    engines.remove(URL, Role.DECODE)
    engines.connect_failed(URL, Role.DECODE)
    assert engines.sweep(0.0) == ((URL, Role.DECODE),)


def test_an_engine_that_comes_back_is_as_it_was():
    """A gap in the list, as DNS may have one, costs neither its health nor its index nor an operator's draining."""
    engines = EngineTable([(URL, Role.DECODE)], probe_failures=1, linger_s=100.0)
    engines.probe_passed(URL, Role.DECODE, INDEX)
    engines.remove(URL, Role.DECODE)
    engines.sweep(0.0)
    assert engines.add(URL, Role.DECODE)
    assert not engines.add(URL, Role.DECODE)
    assert engines.sweep(1_000.0) == ()
    (back,) = engines.snapshots(Role.DECODE)
    assert (back.takes_legs, back.indexes) == (True, INDEX)
    engines.drain(URL, draining=True)
    engines.remove(URL, Role.DECODE)
    engines.add(URL, Role.DECODE)
    assert engines.snapshots(Role.DECODE)[0].draining


URLS = [EngineUrl(f"http://e{number}") for number in range(3)]
KNOWN = [(url, role) for url in URLS for role in Role]


class Model:
    """What one engine should be, told separately."""

    def __init__(self):
        self.listed = self.known = self.up = self.drained = False
        self.legs = self.failed = 0
        self.idle_since_s = None


class EnginesAgainstModel(RuleBasedStateMachine):
    """Any order of listing, probing, serving, draining and sweeping, late events included."""

    engines_ = st.sampled_from(KNOWN)

    def __init__(self):
        super().__init__()
        self.engines = EngineTable([], probe_failures=2, linger_s=10.0)
        self.model = {known: Model() for known in KNOWN}
        self.now_s = 0.0

    @rule(engine=engines_)
    def add(self, engine):
        model = self.model[engine]
        assert self.engines.add(*engine) == (not model.listed)
        if not model.known:
            model.up, model.drained, model.failed = False, False, 0
        model.listed = model.known = True
        model.idle_since_s = None

    @rule(engine=engines_)
    def remove(self, engine):
        assert self.engines.remove(*engine) == self.model[engine].listed
        self.model[engine].listed = False

    @rule(engine=engines_, passed=st.booleans())
    def probe(self, engine, passed):
        model, (url, role) = self.model[engine], engine
        if passed:
            came_up = self.engines.probe_passed(url, role, INDEX if role is Role.DECODE else None)
            assert came_up == (model.known and not model.up)
            model.up, model.failed = model.known, 0
            return
        model.failed += 1
        assert self.engines.probe_failed(url, role) == (model.known and model.failed == 2)
        model.up = model.up and model.failed < 2

    @rule(engine=engines_)
    def refused(self, engine):
        model = self.model[engine]
        assert self.engines.connect_failed(*engine) == model.up
        model.up, model.failed = False, max(model.failed, 2)

    @rule(engine=engines_)
    def begin(self, engine):
        model = self.model[engine]
        self.engines.leg_started(*engine)
        if not model.known:
            model.known, model.up, model.drained, model.failed, model.idle_since_s = (
                True,
                False,
                False,
                0,
                None,
            )
        model.legs += 1

    @rule(engine=engines_)
    def end(self, engine):
        if self.model[engine].legs:
            self.engines.leg_ended(*engine)
            self.model[engine].legs -= 1

    @rule(url=st.sampled_from(URLS), draining=st.booleans())
    def drain(self, url, draining):
        told = self.engines.drain(url, draining=draining)
        assert {engine.role for engine in told} == {role for role in Role if self.model[url, role].known}
        for role in Role:
            self.model[url, role].drained = draining and self.model[url, role].known

    @rule(passes_s=st.floats(0, 20))
    def sweep(self, passes_s):
        self.now_s += passes_s
        gone = []
        for known, model in self.model.items():
            if not model.known or model.listed:
                continue
            if model.legs:
                model.idle_since_s = None
                continue
            model.idle_since_s = self.now_s if model.idle_since_s is None else model.idle_since_s
            rests = known[1] is Role.DECODE and model.up
            if not rests or self.now_s - model.idle_since_s >= 10.0:
                model.known = model.up = False
                gone.append(known)
        assert sorted(self.engines.sweep(self.now_s)) == sorted(gone)

    @invariant()
    def the_table_is_what_the_model_says(self):
        told = {(e.url, e.role): e for role in Role for e in self.engines.snapshots(role)}
        assert set(told) == {known for known, model in self.model.items() if model.known}
        for known, engine in told.items():
            model = self.model[known]
            assert (engine.healthy, engine.in_flight) == (model.up, model.legs)
            assert engine.leaving == (not model.listed)
            assert engine.takes_legs == (model.up and model.listed and not model.drained)
            assert engine.indexes == (INDEX if model.up and known[1] is Role.DECODE else ())


TestEnginesAgainstModel = EnginesAgainstModel.TestCase
TestEnginesAgainstModel.settings = settings(max_examples=60, deadline=None)


def test_backlog():
    """A leg learns what is ahead of it, and takes its own tokens away again."""
    engines = EngineTable([(URL, Role.PREFILL)], probe_failures=1)
    assert [engines.leg_started(URL, Role.PREFILL, tokens) for tokens in (100, 50)] == [0, 100]
    engines.leg_ended(URL, Role.PREFILL, 100)
    assert engines.leg_started(URL, Role.PREFILL, 1) == 50


def test_what_an_engine_says_of_its_load():
    """What is above this router's own legs is somebody else's; turns on their way here count, and a down engine has nothing."""
    engines = EngineTable([(URL, Role.DECODE)], probe_failures=1)
    engines.leg_started(URL, Role.DECODE)
    engines.turn_expected(URL, 1)
    engines.load_said(URL, Role.DECODE, EngineLoad(running=4, waiting=2, kv_usage=0.5))
    (said,) = engines.snapshots(Role.DECODE)
    assert (said.others, said.load, said.waiting, said.kv_usage) == (5, 7, 2, 0.5)
    engines.connect_failed(URL, Role.DECODE)
    (said,) = engines.snapshots(Role.DECODE)
    assert (said.load, said.waiting, said.kv_usage) == (2, 0, None)


def test_circuit():
    """It belongs to an engine in one role, opens and half-opens with time, and starts anew when the engine does."""
    engines = EngineTable(
        [(URL, Role.DECODE), (URL, Role.PREFILL)], probe_failures=1, circuit=CircuitRule(2, 5.0)
    )
    assert [engines.leg_failed(URL, Role.DECODE, 0.0) for _ in range(2)] == [False, True]
    assert [engines.snapshots(role)[0].trusted for role in (Role.PREFILL, Role.DECODE)] == [True, False]
    engines.advance(5.0)
    assert engines.snapshots(Role.DECODE)[0].trusted
    assert engines.leg_succeeded(URL, Role.DECODE)
    for _ in range(2):
        engines.leg_failed(URL, Role.DECODE, 6.0)
    engines.connect_failed(URL, Role.DECODE)
    engines.probe_passed(URL, Role.DECODE, INDEX)
    assert engines.snapshots(Role.DECODE)[0].trusted
