"""Orders of numbered things, in two flat arrays: eight bytes a thing, every step in constant time."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class Rings:
    """Any number of orders over the numbers from 1 on; a number is in at most one of them.

    An order is a ring, and is known by its newest number, which its owner keeps; 0 is the empty one.
    """

    def __init__(self) -> None:
        self._older = array("I", [0])
        self._newer = array("I", [0])

    def grow(self) -> None:
        """Make room for the next number."""
        self._older.append(0)
        self._newer.append(0)

    def append(self, newest: int, number: int) -> int:
        """Add a number that is in no order; it is the newest from now on, and returned."""
        older, newer = self._older, self._newer
        if not newest:
            older[number] = newer[number] = number
        else:
            oldest = newer[newest]
            older[number], newer[number] = newest, oldest
            newer[newest] = older[oldest] = number
        return number

    def remove(self, newest: int, number: int) -> int:
        """Take a number out of its order; returns what is the newest then."""
        older, newer = self._older[number], self._newer[number]
        if older == number:
            return 0
        self._newer[older], self._older[newer] = newer, older
        return older if number == newest else newest

    def oldest(self, newest: int) -> int:
        """The other end of an order; 0 of the empty one."""
        return self._newer[newest]

    def older(self, newest: int, number: int) -> int:
        """The next older number; 0 after the oldest."""
        return 0 if number == self._newer[newest] else self._older[number]

    def backward(self, newest: int) -> Iterator[int]:
        """From the newest to the oldest. The order may not change meanwhile."""
        number, oldest = newest, self._newer[newest]
        while number:
            yield number
            number = 0 if number == oldest else self._older[number]

    def forward(self, newest: int) -> Iterator[int]:
        """From the oldest to the newest. The order may not change meanwhile."""
        number = self._newer[newest]
        while number:
            yield number
            number = 0 if number == newest else self._newer[number]
