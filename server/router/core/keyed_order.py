"""Conversations by key, in order of use: each has a number, under which others keep what they know of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bidikv_server.router.core.digest_index import NAME_BYTES, DigestIndex
from bidikv_server.router.core.ids import ConversationKey
from bidikv_server.router.core.rings import Rings

if TYPE_CHECKING:
    from collections.abc import Iterator


class KeyedOrder:
    """Numbers begin at 1, and are given again once their conversation was forgotten. About forty bytes each."""

    def __init__(self) -> None:
        self._names = bytearray(NAME_BYTES)
        self._numbers = DigestIndex(self._names)
        self._ring = Rings()
        self._newest = 0
        self._free: list[int] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, key: ConversationKey) -> bool:
        return self.get(key) != 0

    def get(self, key: ConversationKey) -> int:
        """Number of a conversation; 0 if it is not known."""
        return self._numbers.get(bytes.fromhex(key))

    def key(self, number: int) -> ConversationKey:
        """Key of a known conversation."""
        return ConversationKey(self._names[16 * number : 16 * number + 16].hex())

    @property
    def oldest(self) -> int:
        """The one used longest ago; 0 if none is known."""
        return self._ring.oldest(self._newest)

    def add(self, key: ConversationKey) -> tuple[int, bool]:
        """Number for a conversation that is not known; it is the newest. And whether the number is a new one too."""
        name, grown = bytes.fromhex(key), not self._free
        if grown:
            number = len(self._names) // NAME_BYTES
            self._names += name
            self._ring.grow()
        else:
            number = self._free.pop()
            self._names[16 * number : 16 * number + 16] = name
        self._numbers.put(name, number)
        self._newest = self._ring.append(self._newest, number)
        self._count += 1
        return number, grown

    def use(self, number: int) -> None:
        """Make a conversation the newest."""
        if number != self._newest:
            self._newest = self._ring.append(self._ring.remove(self._newest, number), number)

    def remove(self, number: int) -> None:
        """Forget a conversation."""
        self._numbers.remove(bytes(self._names[16 * number : 16 * number + 16]))
        self._newest = self._ring.remove(self._newest, number)
        self._free.append(number)
        self._count -= 1

    def forward(self) -> Iterator[int]:
        """From the oldest to the newest. Nothing may change meanwhile."""
        return self._ring.forward(self._newest)

    def backward(self) -> Iterator[int]:
        """From the newest to the oldest. Nothing may change meanwhile."""
        return self._ring.backward(self._newest)

    def check_integrity(self) -> None:
        """Recompute counts and links.

        Raises:
            AssertionError: Two views disagree.
        """
        numbers = list(self.forward())
        assert len(numbers) == len(set(numbers)) == len(self) == len(self._numbers), "conversations disagree"  # noqa: S101
        assert all(self.get(self.key(number)) == number for number in numbers), "keys disagree"  # noqa: S101
