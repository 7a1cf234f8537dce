"""All turns of all conversations, in flat arrays: about sixty bytes a turn, and no object that lives on.

A million conversations as objects would take gigabytes, and the collector seconds to look through them.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Final, NamedTuple

from bidikv_server.router.core.digest_index import NAME_BYTES, DigestIndex
from bidikv_server.router.core.digests import Digest
from bidikv_server.router.core.rings import Rings

if TYPE_CHECKING:
    from collections.abc import Iterator

_MAX_DEPTH: Final = 2**32 - 1


class StoredTurn(NamedTuple):
    """Fields of one turn, all of them numbers but the digest.

    Attributes:
        digest: Name of the turn.
        owner: Its conversation.
        parent: The turn it hangs under; 0 for none.
        depth: Messages (or chunks) of its prompt.
        holder: Where it was decoded.
    """

    digest: Digest
    owner: int
    parent: int
    depth: int
    holder: int


class TurnMemory:
    """Turns by number, and by digest: those of one digest, its twins, belong to different conversations.

    Numbers begin at 1 and are given again once a turn was dropped. A conversation's turns are in the order in which
    they were added; the owner keeps the newest one's number.
    """

    def __init__(self) -> None:
        self._digests = bytearray(NAME_BYTES)
        self._owners = array("I", [0])
        self._parents = array("I", [0])
        self._depths = array("I", [0])
        self._holders = array("I", [0])
        self._order = Rings()
        self._twins = Rings()
        self._newest_twin = DigestIndex(self._digests)
        self._free = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> StoredTurn:
        """Fields of a turn."""
        return StoredTurn(
            self.digest(number),
            self._owners[number],
            self._parents[number],
            self._depths[number],
            self._holders[number],
        )

    def digest(self, number: int) -> Digest:
        """Digest of a turn."""
        return Digest(bytes(self._digests[16 * number : 16 * number + 16]))

    def owner(self, number: int) -> int:
        """Conversation of a turn."""
        return self._owners[number]

    def holder(self, number: int) -> int:
        """Holder of a turn."""
        return self._holders[number]

    def latest(self, digest: bytes) -> int:
        """The turn of this digest that was added last, in any conversation; 0 if there is none."""
        return self._newest_twin.get(digest)

    def of(self, newest: int, digest: bytes) -> int:
        """The turn of this digest in the conversation with this newest turn; 0 if there is none."""
        if not newest or not self._newest_twin.get(digest):
            return 0
        digests = self._digests
        for number in self._order.backward(newest):
            if digests[16 * number : 16 * number + 16] == digest:
                return number
        return 0

    def forward(self, newest: int) -> Iterator[int]:
        """A conversation's turns, oldest first. They may not change meanwhile."""
        return self._order.forward(newest)

    def add(self, newest: int, turn: StoredTurn) -> int:
        """Add a turn to a conversation that has none of its digest; it is its newest one, and its number returned."""
        number = self._next()
        self._digests[16 * number : 16 * number + 16] = turn.digest
        self._owners[number] = turn.owner
        self._parents[number] = turn.parent
        self._depths[number] = min(turn.depth, _MAX_DEPTH)
        self._holders[number] = turn.holder
        twin = self._newest_twin.get(turn.digest)
        self._newest_twin.put(turn.digest, self._twins.append(twin, number))
        self._count += 1
        return self._order.append(newest, number)

    def renew(self, newest: int, number: int, holder: int) -> int:
        """Make a turn its conversation's and its twins' newest one, decoded elsewhere this time."""
        self._holders[number] = holder
        self._unlink_twin(number)
        digest = self.digest(number)
        self._newest_twin.put(digest, self._twins.append(self._newest_twin.get(digest), number))
        return self._order.append(self._order.remove(newest, number), number)

    def drop(self, newest: int, number: int) -> int:
        """Forget a turn; its children hang under its parent from now on. Returns its conversation's newest one then."""
        newest = self._order.remove(newest, number)
        for other in self._order.forward(newest):
            if self._parents[other] == number:
                self._parents[other] = self._parents[number]
        self._release(number)
        return newest

    def drop_all(self, newest: int) -> None:
        """Forget a whole conversation's turns."""
        for number in tuple(self._order.forward(newest)):
            self._release(number)

    def oldest(self, newest: int) -> int:
        """A conversation's first turn."""
        return self._order.oldest(newest)

    def check_integrity(self, listed: set[int]) -> None:
        """Recompute counts and links; `listed` are the numbers that conversations name.

        Raises:
            AssertionError: Two views disagree.
        """
        assert len(listed) == self._count, "turns and their count disagree"  # noqa: S101
        twins = [n for newest in self._newest_twin for n in self._twins.forward(newest)]
        assert len(twins) == self._count, "turns in no ring of twins, or in two"  # noqa: S101
        assert set(twins) == listed, "prefix index and conversations disagree"  # noqa: S101
        for newest in self._newest_twin:
            digests = {self.digest(number) for number in self._twins.forward(newest)}
            owners = [self._owners[number] for number in self._twins.forward(newest)]
            assert len(digests) == 1, "twins of different digests"  # noqa: S101
            assert len(owners) == len(set(owners)), "twins in one conversation"  # noqa: S101
            assert self._newest_twin.get(digests.pop()) == newest, "a turn is not found by its digest"  # noqa: S101

    def _next(self) -> int:
        """A number to use: one that was dropped (they are chained through their owners), or a new one."""
        if self._free:
            number, self._free = self._free, self._owners[self._free]
            return number
        self._digests += bytes(NAME_BYTES)
        for field in (self._owners, self._parents, self._depths, self._holders):
            field.append(0)
        self._order.grow()
        self._twins.grow()
        return len(self._owners) - 1

    def _release(self, number: int) -> None:
        self._unlink_twin(number)
        self._owners[number], self._free = self._free, number
        self._count -= 1

    def _unlink_twin(self, number: int) -> None:
        digest = self.digest(number)
        newest = self._newest_twin.get(digest)
        if rest := self._twins.remove(newest, number):
            self._newest_twin.put(digest, rest)
        else:
            self._newest_twin.remove(digest)
