"""Which turns are known, and on which decode engine each one lies.

The turns of a conversation form a tree: a turn is named by the digest of its whole prompt, and hangs under the deepest
turn whose prompt its own prompt extends. So nothing is told apart that need not be: the next turn extends the last
one, a retry meets itself, a fork and an edited history meet the turn where they branched off. The answer's text is not
part of a turn's name, since clients re-serialise answers; the engines compare its tokens.

Looking up reads and never consumes: a retry, a hedge and a fork may all read from one turn.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bidikv_server.router.core.digests import Digest
from bidikv_server.router.core.ids import chain_key, session_key
from bidikv_server.router.core.keyed_order import KeyedOrder
from bidikv_server.router.core.numbers import Numbers
from bidikv_server.router.core.turn_memory import StoredTurn, TurnMemory

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bidikv_server.router.core.digests import Chain
    from bidikv_server.router.core.engines import IndexInfo
    from bidikv_server.router.core.ids import ConversationKey, EngineUrl, Scope


@dataclass(frozen=True, slots=True)
class Holder:
    """The decode engine that served a turn, and which incarnation of it.

    Attributes:
        engine: The engine.
        indexes: Its retention indexes when the turn ended; empty when they were not known then.
    """

    engine: EngineUrl
    indexes: tuple[IndexInfo, ...] = ()


@dataclass(frozen=True, slots=True)
class Turn:
    """One committed turn.

    Attributes:
        digest: Digest of its whole prompt.
        parent: The turn it extends in the same conversation, while that one is remembered.
        depth: Messages (or chunks) of its prompt.
        holder: Where it was decoded.
    """

    digest: Digest
    parent: Digest | None
    depth: int
    holder: Holder


@dataclass(frozen=True, slots=True)
class Match:
    """Where a request stands among the known turns.

    Attributes:
        key: Its conversation.
        digest: Name of the turn it would become; None when its prompt has no prefix to name it by.
        depth: Messages (or chunks) of its prompt.
        ancestor: Deepest known turn that its prompt extends or repeats, in any conversation of its scope.
        own: The same within its own conversation.
        latest: The turn its conversation committed last, whether or not the prompt extends it.
    """

    key: ConversationKey
    digest: Digest | None
    depth: int
    ancestor: Turn | None = None
    own: Turn | None = None
    latest: Turn | None = None

    @property
    def source(self) -> Turn | None:
        """The turn to read from: the ancestor, else what the conversation holds (its history was edited)."""
        return self.ancestor or self.latest

    @property
    def home(self) -> Turn | None:
        """The turn that says where this conversation lives."""
        return self.own or self.latest


NAMELESS = Digest(b"")
"""Digest of a turn whose prompt has no chain: it keeps its conversation's engine and is nobody's ancestor."""


class ConversationTable:
    """Bounded memory of conversations: least recently used first out, idle ones expire.

    Times are seconds on one clock of the caller that never goes back. Everything is in flat arrays, about a hundred bytes
    a conversation and sixty a turn (`benchmarks/router/table.py`); `Turn` objects are made when asked for.
    """

    def __init__(self, *, max_conversations: int, max_turns: int, idle_s: float) -> None:
        self._max_conversations = max_conversations
        self._max_turns = max_turns
        self._idle_s = idle_s
        self._turns = TurnMemory()
        self._holders: Numbers[Holder] = Numbers()
        self._order = KeyedOrder()
        self._used_s = array("d", [0.0])
        self._newest = array("I", [0])
        self._counts = array("I", [0])
        self._nameless = array("I", [0])

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, key: ConversationKey) -> bool:
        return key in self._order

    def __iter__(self) -> Iterator[ConversationKey]:
        """Keys, the one used last at the end. The table may not change meanwhile."""
        yield from map(self._order.key, self._order.forward())

    def __repr__(self) -> str:
        return f"<ConversationTable {len(self)} conversations, {len(self._turns)} turns>"

    def find(self, scope: Scope, session: str | None, chain: Chain, now_s: float) -> Match:
        """Place a request. Forgets what has expired, changes nothing else."""
        self.expire(now_s)
        key = session_key(scope, session) if session is not None else None
        place = self._order.get(key) if key is not None else 0
        ancestor = self._deepest(chain, place)
        if key is None:
            place = self._turns.owner(ancestor) if ancestor else 0
            key = self._order.key(place) if place else chain_key(scope, chain.whole.hex())
            place = place or self._order.get(key)
        own = (
            ancestor if ancestor and self._turns.owner(ancestor) == place else self._deepest_of(place, chain)
        )
        # Mostly one and the same turn.
        newest = 0 if self._nameless[place] else self._newest[place]
        turn = self._turn(ancestor)
        return Match(
            key=key,
            digest=chain.prefixes[-1] if chain.prefixes else None,
            depth=len(chain.prefixes),
            ancestor=turn,
            own=turn if own == ancestor else self._turn(own),
            latest=turn if newest and newest == ancestor else self._latest(place),
        )

    def commit(self, match: Match, holder: Holder, now_s: float) -> None:
        """Remember a turn that ended cleanly. Until then, and if it never does, earlier turns stay as they are."""
        self.expire(now_s)
        place = self._order.get(match.key) or self._add(match.key)
        self._used_s[place] = now_s
        self._order.use(place)
        self._forget_nameless(place)
        if match.digest is None:
            self._nameless[place] = self._holders.take(holder)
        else:
            self._insert(place, match.digest, match, self._holders.take(holder))
        while len(self) > self._max_conversations:
            self._forget(self._order.oldest)

    def expire(self, now_s: float) -> int:
        """Forget idle conversations; returns how many."""
        forgotten = 0
        while place := self._order.oldest:
            if now_s - self._used_s[place] < self._idle_s:
                break
            self._forget(place)
            forgotten += 1
        return forgotten

    def forget(self, key: ConversationKey) -> bool:
        """Forget one conversation; whether it was known. Turns of it that are under way may bring it back."""
        place = self._order.get(key)
        if place:
            self._forget(place)
        return place != 0

    def turns(self, key: ConversationKey) -> tuple[Turn, ...]:
        """The turns of one conversation, oldest first."""
        found = map(self._turn, self._numbers(self._order.get(key)))
        return tuple(turn for turn in found if turn is not None)

    def check_integrity(self) -> None:
        """Recompute every bound and link.

        Raises:
            AssertionError: Two views of the table disagree.
        """
        self._order.check_integrity()
        places = list(self._order.forward())
        assert len(self) <= self._max_conversations, "too many conversations"  # noqa: S101
        used = [self._used_s[place] for place in places]
        assert used == sorted(used), "conversations are not in order of use"  # noqa: S101
        numbers = {place: list(self._numbers(place)) for place in places}
        self._turns.check_integrity({number for turns in numbers.values() for number in turns})
        held = [self._turns.holder(number) for turns in numbers.values() for number in turns]
        held += [self._nameless[place] for place in places if self._nameless[place]]
        assert sum(self._holders.uses().values()) == len(held), "holders are miscounted"  # noqa: S101
        for place in places:
            assert all(self._turns.owner(number) == place for number in numbers[place]), "a foreign turn"  # noqa: S101
            assert self._counts[place] == len(numbers[place]) <= self._max_turns, "too many turns"  # noqa: S101
            _check_tree(self.turns(self._order.key(place)))

    def _numbers(self, place: int) -> Iterator[int]:
        return self._turns.forward(self._newest[place])

    def _turn(self, number: int) -> Turn | None:
        if not number:
            return None
        stored = self._turns[number]
        parent = self._turns.digest(stored.parent) if stored.parent else None
        return Turn(stored.digest, parent, stored.depth, self._holders[stored.holder])

    def _latest(self, place: int) -> Turn | None:
        if nameless := self._nameless[place]:
            return Turn(NAMELESS, None, 0, self._holders[nameless])
        return self._turn(self._newest[place])

    def _deepest(self, chain: Chain, place: int) -> int:
        """Deepest known prefix; at equal depth the request's own conversation, else the one used last."""
        for digest in reversed(chain.prefixes):
            if found := self._turns.latest(digest):
                return self._turns.of(self._newest[place], digest) or found
        return 0

    def _deepest_of(self, place: int, chain: Chain) -> int:
        if not self._newest[place]:
            return 0
        known = {self._turns.digest(number): number for number in self._numbers(place)}
        return next((known[digest] for digest in reversed(chain.prefixes) if digest in known), 0)

    def _add(self, key: ConversationKey) -> int:
        place, grown = self._order.add(key)
        if grown:
            self._used_s.append(0.0)
            for numbers in (self._newest, self._counts, self._nameless):
                numbers.append(0)
        return place

    def _insert(self, place: int, digest: Digest, match: Match, holder: int) -> None:
        newest = self._newest[place]
        if known := self._turns.of(newest, digest):
            self._holders.give_back(self._turns.holder(known))
            self._newest[place] = self._turns.renew(newest, known, holder)
            return
        # The turn to hang under, as far as it is still remembered now that this one commits.
        parent = self._turns.of(newest, match.own.digest) if match.own is not None else 0
        turn = StoredTurn(digest, place, parent, match.depth, holder)
        self._newest[place] = self._turns.add(newest, turn)
        self._counts[place] += 1
        while self._counts[place] > self._max_turns:
            oldest = self._turns.oldest(self._newest[place])
            self._holders.give_back(self._turns.holder(oldest))
            self._newest[place] = self._turns.drop(self._newest[place], oldest)
            self._counts[place] -= 1

    def _forget_nameless(self, place: int) -> None:
        if self._nameless[place]:
            self._holders.give_back(self._nameless[place])
            self._nameless[place] = 0

    def _forget(self, place: int) -> None:
        self._forget_nameless(place)
        for number in self._numbers(place):
            self._holders.give_back(self._turns.holder(number))
        self._turns.drop_all(self._newest[place])
        self._newest[place] = self._counts[place] = 0
        self._order.remove(place)


def _check_tree(turns: tuple[Turn, ...]) -> None:
    named = {turn.digest: turn for turn in turns}
    assert len(named) == len(turns), "two turns of one digest"  # noqa: S101
    for turn in turns:
        if turn.parent is not None:
            parent = named.get(turn.parent)
            assert parent is not None, "turn under a forgotten parent"  # noqa: S101
            assert parent.depth < turn.depth, "turn under a deeper parent"  # noqa: S101
