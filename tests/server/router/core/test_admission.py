"""Who runs and who waits, against a model of it."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from bidikv_server.router.core.admission import Admission, QueueFull


def enter(admission, tenant=""):
    """A turn for which nobody has to give way."""
    ticket, displaced = admission.enter(tenant)
    assert displaced is None
    return ticket


def test_first_come_first_served():
    """The longest waiting turn runs next; one that has left the queue is passed over."""
    admission = Admission(max_in_flight=1, max_queue=2)
    first, second, third = (enter(admission) for _ in range(3))
    assert (admission.running, admission.waiting, admission.full()) == ({first}, 2, True)
    with pytest.raises(QueueFull):
        admission.enter()
    assert admission.leave(second) is None
    assert admission.leave(first) == third
    assert admission.leave(third) is None
    assert not admission.full()


def test_without_a_limit():
    """Every turn runs at once."""
    admission = Admission(max_in_flight=None, max_queue=0)
    tickets = {enter(admission) for _ in range(1000)}
    assert admission.running == tickets
    assert (admission.waiting, admission.full()) == (0, False)


def test_without_a_queue():
    """What cannot run is refused."""
    admission = Admission(max_in_flight=1, max_queue=0)
    ticket = enter(admission)
    assert admission.full()
    admission.leave(ticket)
    assert not admission.full()


def test_a_flood_does_not_delay_another_tenant():
    """Whoever has least running is next, however many of another tenant's have waited for longer."""
    admission = Admission(max_in_flight=2, max_queue=100)
    flood = [enter(admission, "flood") for _ in range(50)]
    quiet = [enter(admission, "quiet") for _ in range(2)]
    assert [admission.leave(flood[0]), admission.leave(flood[1])] == [quiet[0], flood[2]]
    assert admission.leave(quiet[0]) == quiet[1]
    assert admission.leave(quiet[1]) == flood[3]


def test_tenants_take_turns():
    """With one turn at a time everybody waiting has one before anybody has a second, also who comes and goes."""
    admission = Admission(max_in_flight=1, max_queue=100)
    flood = [enter(admission, "flood") for _ in range(9)]
    other = [enter(admission, "other") for _ in range(2)]
    assert admission.leave(flood[0]) == other[0]
    one = enter(admission, "one at a time")
    assert admission.leave(other[0]) == one
    assert admission.leave(one) == flood[1]
    again = enter(admission, "one at a time")
    assert [admission.leave(flood[1]), admission.leave(other[1])] == [other[1], again]


def test_a_full_queue_is_shared():
    """A tenant that holds less takes the place of the greediest one's newest turn, until both hold as much."""
    admission = Admission(max_in_flight=1, max_queue=4)
    flood = [enter(admission, "flood") for _ in range(5)]
    assert admission.full("flood")
    assert not admission.full("quiet")
    displaced = [admission.enter("quiet")[1] for _ in range(2)]
    assert displaced == [flood[4], flood[3]]
    assert admission.waiting == 4
    assert admission.full("quiet")
    with pytest.raises(QueueFull):
        admission.enter("quiet")


def test_a_tenants_own_limit():
    """A tenant's turns beyond its limit wait, although there is room for anybody else's."""
    admission = Admission(max_in_flight=None, max_queue=2, max_in_flight_per_tenant=1)
    first, second = (enter(admission, "a") for _ in range(2))
    other = enter(admission, "b")
    assert (admission.running, admission.waiting) == ({first, other}, 1)
    assert admission.leave(other) is None
    assert admission.leave(first) == second


@settings(max_examples=60, stateful_step_count=40, deadline=None)
class AdmissionAgainstModel(RuleBasedStateMachine):
    """Turns that come, end and give up waiting, in any order: the model is one line of people for each tenant."""

    @initialize(
        limit=st.none() | st.integers(1, 3), queue=st.integers(0, 3), own=st.none() | st.integers(1, 2)
    )
    def begin(self, limit, queue, own):
        self.limit, self.queue, self.own = limit or 1000, queue, own or 1000
        self.admission = Admission(max_in_flight=limit, max_queue=queue, max_in_flight_per_tenant=own)
        self.running = {tenant: [] for tenant in "abc"}
        self.waiting = {tenant: [] for tenant in "abc"}

    def held(self, tenant):
        return len(self.running[tenant]) + len(self.waiting[tenant])

    def may_run(self, tenant):
        return sum(map(len, self.running.values())) < self.limit and len(self.running[tenant]) < self.own

    def greedier(self, tenant):
        return [other for other in "abc" if self.waiting[other] and self.held(other) > self.held(tenant) + 1]

    @rule(tenant=st.sampled_from("abc"))
    def enter(self, tenant):
        full = sum(map(len, self.waiting.values())) >= self.queue
        if not self.may_run(tenant) and full and not self.greedier(tenant):
            with pytest.raises(QueueFull):
                self.admission.enter(tenant)
            return
        may_run, greedier = self.may_run(tenant), self.greedier(tenant)
        ticket, displaced = self.admission.enter(tenant)
        assert (displaced is not None) == (not may_run and full)
        if displaced is not None:
            (other,) = [other for other in greedier if self.waiting[other][-1] == displaced]
            assert self.held(other) == max(map(self.held, greedier))
            self.waiting[other].pop()
        (self.running if may_run else self.waiting)[tenant].append(ticket)

    @rule(data=st.data(), tenant=st.sampled_from("abc"))
    def leave(self, data, tenant):
        if not self.held(tenant):
            return
        ticket = data.draw(st.sampled_from(self.running[tenant] + self.waiting[tenant]))
        promoted = self.admission.leave(ticket)
        if ticket in self.waiting[tenant]:
            self.waiting[tenant].remove(ticket)
            assert promoted is None
            return
        self.running[tenant].remove(ticket)
        able = [other for other in "abc" if self.waiting[other] and self.may_run(other)]
        assert (promoted is None) == (not able)
        if promoted is not None:
            (other,) = [other for other in able if self.waiting[other][0] == promoted]
            assert len(self.running[other]) == min(len(self.running[one]) for one in able)
            self.running[other].append(self.waiting[other].pop(0))

    @invariant()
    def agree(self):
        if hasattr(self, "admission"):
            assert self.admission.running == {ticket for held in self.running.values() for ticket in held}
            assert self.admission.waiting == sum(map(len, self.waiting.values()))
            assert not any(self.waiting[tenant] and self.may_run(tenant) for tenant in "abc")


TestAdmissionAgainstModel = AdmissionAgainstModel.TestCase
