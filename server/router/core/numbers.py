"""Small numbers for values that many records share, so that a record holds two or four bytes instead of the value."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Hashable

V = TypeVar("V", bound="Hashable")


class Numbers(Generic[V]):
    """Values with numbers from 1 on. A value that nobody uses any more is forgotten, and its number given again."""

    def __init__(self) -> None:
        self._numbers: dict[V, int] = {}
        self._values: list[V | None] = [None]
        self._uses = array("Q", [0])
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, number: int) -> V:
        """The value of a number that is in use."""
        value = self._values[number]
        if value is None:
            raise KeyError(number)
        return value

    def take(self, value: V) -> int:
        """Number of a value, for one more use."""
        number = self._numbers.get(value)
        if number is None:
            number = self._numbers[value] = self._next()
            self._values[number] = value
        self._uses[number] += 1
        return number

    def give_back(self, number: int) -> None:
        """End one use."""
        self._uses[number] -= 1
        if not self._uses[number]:
            del self._numbers[self[number]]
            self._values[number] = None
            self._free.append(number)

    def uses(self) -> dict[V, int]:
        """How often each value is in use."""
        return {value: self._uses[number] for value, number in self._numbers.items()}

    def _next(self) -> int:
        if self._free:
            return self._free.pop()
        self._values.append(None)
        self._uses.append(0)
        return len(self._values) - 1
