"""Health by events."""

from bidikv_server.router.core.engines import EngineTable, IndexInfo, Role
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
