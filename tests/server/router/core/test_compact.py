"""The flat structures under the conversation table, against plain dicts and lists."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bidikv_server.router.core import digest_index
from bidikv_server.router.core.digest_index import DigestIndex
from bidikv_server.router.core.numbers import Numbers
from bidikv_server.router.core.rings import Rings


class Names:
    """An index over names that are where it looks for them, and a dict that promises the same."""

    def __init__(self):
        self.names = bytearray(16)
        self.index = DigestIndex(self.names)
        self.model = {}

    def put(self, name):
        self.names += name
        number = len(self.names) // 16 - 1
        self.index.put(name, number)
        self.model[name] = number

    def remove(self, name):
        self.index.remove(name)
        del self.model[name]

    def check(self, names):
        assert {name: self.index.get(name) for name in names} == {
            name: self.model.get(name, 0) for name in names
        }
        assert len(self.index) == len(self.model)
        assert sorted(self.index) == sorted(self.model.values())


@pytest.fixture(scope="module")
def crowded():
    """One part for all names, so that few of them already collide."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digest_index, "_PART_BITS", 0)
        patch.setattr(digest_index, "_PARTS", 1)
        yield


@settings(deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 40)), max_size=120))
def test_index(crowded, steps):
    """Names come, get other numbers and go, in any order; collisions, growth and holes change nothing."""
    everything = [number.to_bytes(16, "big") for number in range(41)]
    known = Names()
    for put, number in steps:
        name = everything[number]
        if put:
            known.put(name)
        elif name in known.model:
            known.remove(name)
        else:
            with pytest.raises(KeyError):
                known.index.remove(name)
    known.check(everything)


def test_many_names():
    """All parts grow, and shrink to nothing again."""
    chance = random.Random(0)
    everything = [chance.randbytes(16) for _ in range(30_000)]
    known = Names()
    for name in everything:
        known.put(name)
    known.check(everything)
    for name in everything[1::2]:
        known.remove(name)
    known.check(everything)
    for name in everything[::2]:
        known.remove(name)
    known.check(everything)


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 2)), max_size=60))
def test_rings(steps):
    """Every order is what a list would be, from both ends."""
    rings, orders, newest = Rings(), [[], [], []], [0, 0, 0]
    for _ in range(6):
        rings.grow()
    for number, to in steps:
        for which, order in enumerate(orders):
            if number in order:
                order.remove(number)
                newest[which] = rings.remove(newest[which], number)
        orders[to].append(number)
        newest[to] = rings.append(newest[to], number)
        for which, order in enumerate(orders):
            assert newest[which] == (order[-1] if order else 0)
            if order:
                assert list(rings.forward(newest[which])) == order
                assert list(rings.backward(newest[which])) == order[::-1]
                assert rings.oldest(newest[which]) == order[0]
                older = [rings.older(newest[which], number) for number in order]
                assert older == [0, *order[:-1]]


@given(st.lists(st.sampled_from("abcdeABCDE"), max_size=60))
def test_numbers(steps):
    """A value keeps its number while it is in use, and no two values have one; what is not used is forgotten."""
    numbers, held = Numbers(), []
    for step in steps:
        if step.islower():
            held.append((step, numbers.take(step)))
        elif step.lower() in [value for value, _ in held]:
            which = [value for value, _ in held].index(step.lower())
            numbers.give_back(held.pop(which)[1])
        assert all(numbers[number] == value for value, number in held)
        assert len(set(held)) == len({number for _, number in held}) == len(numbers)
        assert numbers.uses() == {value: [v for v, _ in held].count(value) for value, _ in held}
    for _, number in held:
        numbers.give_back(number)
    assert len(numbers) == 0
    with pytest.raises(LookupError):
        numbers[1]
