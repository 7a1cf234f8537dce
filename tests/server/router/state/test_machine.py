"""Two routers that share a server, against one conversation table: any mix of turns finds the same."""

import asyncio
from dataclasses import replace

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from bidikv_server.router.core.conversations import ConversationTable
from bidikv_server.router.core.ids import Scope

from .conftest import SCOPE, make_router, prompt
from .test_shared import RECORD, A, B

BOUNDS = {"max_conversations": 3, "max_turns": 4}
IDLE_S = 50.0
OTHER = Scope("u", "m")


def pass_time(client, seconds):
    """What the server would look like so much later: all that passes there is times to live."""
    for key in client.scan_iter():
        left = client.pttl(key) - round(1000 * seconds)
        if left > 0:
            client.pexpire(key, left)
        else:
            client.delete(key)


class SharedAgainstTable(RuleBasedStateMachine):
    """Turns begin at either router and end in any order; both forget, and time passes."""

    server = None
    shared_only = True
    contents = st.lists(st.sampled_from("ab"), min_size=1, max_size=4)
    sessions = st.sampled_from(["s", "t", "u", "v", None])
    scopes = st.sampled_from([SCOPE, SCOPE, OTHER])

    def __init__(self):
        super().__init__()
        self.client = self.server.client()
        self.client.flushall()
        self.runner = asyncio.Runner()
        self.now_s = 1e9
        given = {**BOUNDS, "conversation_idle_s": IDLE_S, "clock": self.clock}
        self.routers = [make_router(self.server.url, **given) for _ in range(2)]
        for router in self.routers:
            self.call(router.store.open())
        self.table = ConversationTable(**BOUNDS, idle_s=IDLE_S)
        self.pending = []

    def clock(self):
        return self.now_s

    def call(self, work):
        return self.runner.run(work)

    def teardown(self):
        for router in self.routers:
            assert router.metric("bad_values_total") == 0
            assert router.up
            self.call(router.store.close())
        self.runner.close()

    @rule(which=st.integers(0, 1), scope=scopes, session=sessions, contents=contents)
    def begin(self, which, scope, session, contents):
        chain = prompt(*contents, scope=scope)
        found = self.call(self.routers[which].store.find(scope, session, chain))
        expected = self.table.find(scope, session, chain, self.now_s)
        if self.shared_only:
            assert found == expected
        else:
            # A router also remembers what the others' turns have pushed out on the server, so it may know a deeper one.
            assert depth(found.ancestor) >= depth(expected.ancestor)
            assert (found.source is None) <= (expected.source is None)
            if depth(found.ancestor) == depth(expected.ancestor):
                assert found.ancestor == expected.ancestor
        self.pending.append((scope, expected))

    @rule(data=st.data(), which=st.integers(0, 1), holder=st.sampled_from([A, B]), ok=st.booleans())
    def end(self, data, which, holder, ok):
        if not self.pending:
            return
        scope, match = self.pending.pop(data.draw(st.integers(0, len(self.pending) - 1)))
        if not ok:
            return
        self.now_s += 0.001
        record = replace(RECORD, turn=match.digest or b"")
        self.call(self.routers[which].store.commit(match, scope, record, holder))
        self.table.commit(match, holder, self.now_s)
        assert self.call(self.routers[1 - which].store.turns(match.key)) == self.table.turns(match.key)

    @rule(data=st.data(), which=st.integers(0, 1))
    def forget(self, data, which):
        if known := list(self.table):
            key = data.draw(st.sampled_from(known))
            turns = self.call(self.routers[which].store.forget(key))
            more, exactly = {t.digest for t in turns}, {t.digest for t in self.table.turns(key)}
            assert more == exactly if self.shared_only else more >= exactly
            self.table.forget(key)

    @rule(seconds=st.sampled_from([0.5, 10.0, 30.0, 60.0]))
    def wait(self, seconds):
        self.now_s += seconds
        pass_time(self.client, seconds)

    @invariant()
    def lists_are_right(self):
        self.table.expire(self.now_s)
        page = self.call(self.routers[0].store.page(limit=9)).found
        assert [known.key for known, _ in page] == list(reversed(list(self.table)))
        assert [turns for _, turns in page] == [len(self.table.turns(known.key)) for known, _ in page]


def depth(turn):
    return turn.depth if turn is not None else 0


@pytest.mark.parametrize("shared_only", [True, False])
def test_shared_against_table(server, shared_only, monkeypatch):
    """Routers that were just started find exactly what the table does; ones that remember something no less."""
    if shared_only:
        monkeypatch.setattr("bidikv_server.router.state.shared.merged", lambda _own, shared: shared)
    machine = type("Machine", (SharedAgainstTable,), {"server": server, "shared_only": shared_only})
    run_state_machine_as_test(
        machine,
        # Without a database and shrinking: what fails once is told as it is, and in time.
        settings=settings(
            max_examples=15, stateful_step_count=25, deadline=None, database=None, phases=(Phase.generate,)
        ),
    )
