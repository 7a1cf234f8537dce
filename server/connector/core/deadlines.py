"""When to look whether retained digests have expired: one deadline per turn, so that retaining costs one push."""

from __future__ import annotations

import heapq
import itertools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Deadlines:
    """Lists of digests, soonest first. A list has a number; its owner ignores lists that a newer one replaced."""

    def __init__(self) -> None:
        """Watch nothing yet."""
        self._heap: list[tuple[float, int, tuple[bytes, ...]]] = []
        self._numbers = itertools.count()
        self._listed = 0

    def __len__(self) -> int:
        """Digests listed; one that several lists name counts as often."""
        return self._listed

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        """Every listed digest with its list's number, in no order."""
        return ((number, digest) for _, number, digests in self._heap for digest in digests)

    def add(self, at_s: float, digests: tuple[bytes, ...], *, number: int | None = None) -> int:
        """Look at `digests` at `at_s`; returns the list's number, a new one unless it continues an older list."""
        number = next(self._numbers) if number is None else number
        if digests:
            heapq.heappush(self._heap, (at_s, number, digests))
            self._listed += len(digests)
        return number

    def due(self, now_s: float, limit: int) -> tuple[int, tuple[bytes, ...]] | None:
        """Take at most `limit` digests of the list whose time came first; None if none has come."""
        if not self._heap or self._heap[0][0] > now_s:
            return None
        at_s, number, digests = heapq.heappop(self._heap)
        self._listed -= len(digests)
        self.add(at_s, digests[limit:], number=number)
        return number, digests[:limit]

    def compact(self, keep: Callable[[int, bytes], bool]) -> None:
        """Forget every listed digest that `keep` does not want, given its list's number."""
        kept = [
            (at_s, number, tuple(digest for digest in digests if keep(number, digest)))
            for at_s, number, digests in self._heap
        ]
        self._heap = [item for item in kept if item[2]]
        heapq.heapify(self._heap)
        self._listed = sum(len(digests) for _, _, digests in self._heap)
