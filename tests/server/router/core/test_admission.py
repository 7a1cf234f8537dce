"""Who runs and who waits, against a model of it."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from bidikv_server.router.core.admission import Admission, QueueFull


def test_first_come_first_served():
    """The longest waiting turn runs next; one that has left the queue is passed over."""
    admission = Admission(max_in_flight=1, max_queue=2)
    first, second, third = (admission.enter() for _ in range(3))
    assert (admission.running, admission.waiting, admission.full) == ({first}, 2, True)
    with pytest.raises(QueueFull):
        admission.enter()
    assert admission.leave(second) is None
    assert admission.leave(first) == third
    assert admission.leave(third) is None
    assert not admission.full


def test_without_a_limit():
    """Every turn runs at once."""
    admission = Admission(max_in_flight=None, max_queue=0)
    tickets = {admission.enter() for _ in range(1000)}
    assert admission.running == tickets
    assert (admission.waiting, admission.full) == (0, False)


def test_without_a_queue():
    """What cannot run is refused."""
    admission = Admission(max_in_flight=1, max_queue=0)
    ticket = admission.enter()
    assert admission.full
    admission.leave(ticket)
    assert not admission.full


@settings(max_examples=60, stateful_step_count=40, deadline=None)
class AdmissionAgainstModel(RuleBasedStateMachine):
    """Turns that come, end and give up waiting, in any order: the model is one line of people."""

    @initialize(limit=st.integers(1, 3), queue=st.integers(0, 3))
    def begin(self, limit, queue):
        self.limit, self.queue = limit, queue
        self.admission = Admission(max_in_flight=limit, max_queue=queue)
        self.running, self.waiting = [], []

    @rule()
    def enter(self):
        if len(self.running) + len(self.waiting) == self.limit + self.queue:
            with pytest.raises(QueueFull):
                self.admission.enter()
            return
        ticket = self.admission.enter()
        (self.running if len(self.running) < self.limit else self.waiting).append(ticket)

    @rule(data=st.data())
    def leave(self, data):
        if not self.running:
            return
        ticket = data.draw(st.sampled_from(self.running + self.waiting))
        promoted = self.admission.leave(ticket)
        if ticket in self.waiting:
            self.waiting.remove(ticket)
            assert promoted is None
            return
        self.running.remove(ticket)
        assert promoted == (self.waiting[0] if self.waiting else None)
        if promoted is not None:
            self.running.append(self.waiting.pop(0))

    @invariant()
    def agree(self):
        if hasattr(self, "admission"):
            assert self.admission.running == set(self.running)
            assert self.admission.waiting == len(self.waiting)
            assert not self.waiting or len(self.running) == self.limit


TestAdmissionAgainstModel = AdmissionAgainstModel.TestCase
