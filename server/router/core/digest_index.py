"""A hash index from names of 16 bytes to numbers, in flat arrays: a dozen bytes an entry, and nothing for the collector.

A `dict` takes ten times that, holds every name once more, and stops everything for a second when millions of entries
outgrow it. Here each of many small parts grows by itself.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

NAME_BYTES: Final = 16

_PART_BITS: Final = 10
_PARTS: Final = 1 << _PART_BITS
_FIRST_CELLS: Final = 8


class DigestIndex:
    """Open addressing with linear probing, in parts of their own.

    Cells hold numbers; the names stay in the caller's array, where number n has its name at n * 16. Number 0 is nobody's.
    Places come from Python's own keyed hash of bytes: names that a client makes up do not gather in one place.
    """

    def __init__(self, names: bytearray) -> None:
        self._names = names
        self._parts = [array("I", bytes(4 * _FIRST_CELLS)) for _ in range(_PARTS)]
        self._counts = array("I", bytes(4 * _PARTS))

    def __len__(self) -> int:
        return sum(self._counts)

    def __iter__(self) -> Iterator[int]:
        """All numbers, in no order."""
        for part in self._parts:
            yield from filter(None, part)

    def get(self, name: bytes) -> int:
        """Number of a name; 0 if it has none."""
        place, names = hash(name), self._names
        part = self._parts[place & (_PARTS - 1)]
        mask = len(part) - 1
        cell = (place >> _PART_BITS) & mask
        while number := part[cell]:
            if names[16 * number : 16 * number + 16] == name:
                return number
            cell = (cell + 1) & mask
        return 0

    def put(self, name: bytes, number: int) -> None:
        """Give a name a number, its only one from now on. The number's name is in the array already."""
        place = hash(name)
        which = place & (_PARTS - 1)
        part = self._parts[which]
        cell = self._cell(part, place >> _PART_BITS, name)
        self._counts[which] += not part[cell]
        part[cell] = number
        if 3 * self._counts[which] > 2 * len(part):
            self._grow(which)

    def remove(self, name: bytes) -> None:
        """Forget a name that has a number."""
        place = hash(name)
        which = place & (_PARTS - 1)
        part = self._parts[which]
        hole = cell = self._cell(part, place >> _PART_BITS, name)
        if not part[hole]:
            raise KeyError(name)
        mask = len(part) - 1
        # What stands behind and began at the hole or before it moves up: a search must not end at a gap.
        while number := part[cell := (cell + 1) & mask]:
            home = (hash(self._name(number)) >> _PART_BITS) & mask
            if (cell - home) & mask >= (cell - hole) & mask:
                part[hole], hole = number, cell
        part[hole] = 0
        self._counts[which] -= 1

    def _cell(self, part: array[int], place: int, name: bytes) -> int:
        """Cell of a name, or the empty one where it belongs."""
        mask = len(part) - 1
        cell = place & mask
        while part[cell] and self._name(part[cell]) != name:
            cell = (cell + 1) & mask
        return cell

    def _grow(self, which: int) -> None:
        old = self._parts[which]
        new = self._parts[which] = array("I", bytes(8 * len(old)))
        mask = len(new) - 1
        for number in filter(None, old):
            cell = (hash(self._name(number)) >> _PART_BITS) & mask
            while new[cell]:
                cell = (cell + 1) & mask
            new[cell] = number

    def _name(self, number: int) -> bytes:
        return bytes(self._names[16 * number : 16 * number + 16])
