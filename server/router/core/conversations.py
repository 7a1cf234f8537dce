"""Which turns are known, and on which decode engine each one lies.

The turns of a conversation form a tree: a turn is named by the digest of its whole prompt, and hangs under the deepest
turn whose prompt its own prompt extends. So nothing is told apart that need not be: the next turn extends the last
one, a retry meets itself, a fork and an edited history meet the turn where they branched off. The answer's text is not
part of a turn's name, since clients re-serialise answers; the engines compare its tokens.

Looking up reads and never consumes: a retry, a hedge and a fork may all read from one turn.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from bidikv_server.router.core.ids import chain_key, session_key

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bidikv_server.router.core.digests import Chain, Digest
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


@dataclass(slots=True)
class _Conversation:
    used_s: float
    latest: Turn
    turns: OrderedDict[Digest, Turn] = field(default_factory=OrderedDict)


class ConversationTable:
    """Bounded memory of conversations: least recently used first out, idle ones expire.

    Times are seconds on one monotonic clock of the caller.
    """

    def __init__(self, *, max_conversations: int, max_turns: int, idle_s: float) -> None:
        self._max_conversations = max_conversations
        self._max_turns = max_turns
        self._idle_s = idle_s
        self._conversations: OrderedDict[ConversationKey, _Conversation] = OrderedDict()
        self._listed: dict[Digest, dict[ConversationKey, None]] = {}

    def __len__(self) -> int:
        return len(self._conversations)

    def __repr__(self) -> str:
        turns = sum(len(conversation.turns) for conversation in self._conversations.values())
        return f"<ConversationTable {len(self)} conversations, {turns} turns>"

    def find(self, scope: Scope, session: str | None, chain: Chain, now_s: float) -> Match:
        """Place a request. Forgets what has expired, changes nothing else."""
        self.expire(now_s)
        key = session_key(scope, session) if session is not None else None
        origin, ancestor = self._deepest(chain, key)
        if key is None:
            key = origin or chain_key(scope, chain.whole.hex())
        conversation = self._conversations.get(key)
        return Match(
            key=key,
            digest=chain.prefixes[-1] if chain.prefixes else None,
            depth=len(chain.prefixes),
            ancestor=ancestor,
            own=ancestor if origin == key else _deepest_of(conversation, chain),
            latest=conversation.latest if conversation is not None else None,
        )

    def commit(self, match: Match, holder: Holder, now_s: float) -> None:
        """Remember a turn that ended cleanly. Until then, and if it never does, earlier turns stay as they are."""
        self.expire(now_s)
        conversation = self._conversations.get(match.key)
        parent = _parent(match, conversation)
        turn = Turn(match.digest or _NAMELESS, parent, match.depth, holder)
        if conversation is None:
            conversation = self._conversations[match.key] = _Conversation(now_s, turn)
        conversation.used_s, conversation.latest = now_s, turn
        self._conversations.move_to_end(match.key)
        self._insert(match.key, conversation, turn)
        while len(self._conversations) > self._max_conversations:
            self._forget(next(iter(self._conversations)))

    def expire(self, now_s: float) -> int:
        """Forget idle conversations; returns how many."""
        forgotten = 0
        while self._conversations:
            key, conversation = next(iter(self._conversations.items()))
            if now_s - conversation.used_s < self._idle_s:
                break
            self._forget(key)
            forgotten += 1
        return forgotten

    def forget(self, key: ConversationKey) -> bool:
        """Forget one conversation; whether it was known. Turns of it that are under way may bring it back."""
        if key not in self._conversations:
            return False
        self._forget(key)
        return True

    def turns(self, key: ConversationKey) -> tuple[Turn, ...]:
        """The turns of one conversation, oldest first."""
        conversation = self._conversations.get(key)
        return tuple(conversation.turns.values()) if conversation is not None else ()

    def check_integrity(self) -> None:
        """Recompute every bound and link.

        Raises:
            AssertionError: Two views of the table disagree.
        """
        listed = {(digest, key) for digest, keys in self._listed.items() for key in keys}
        held = {(turn.digest, key) for key, turn in self._named_turns()}
        assert listed == held, "prefix index and conversations disagree"  # noqa: S101
        assert all(self._listed.values()), "empty entry in the prefix index"  # noqa: S101
        assert len(self) <= self._max_conversations, "too many conversations"  # noqa: S101
        used = [conversation.used_s for conversation in self._conversations.values()]
        assert used == sorted(used), "conversations are not in order of use"  # noqa: S101
        for conversation in self._conversations.values():
            _check_tree(conversation, self._max_turns)

    def _deepest(
        self, chain: Chain, own: ConversationKey | None
    ) -> tuple[ConversationKey | None, Turn | None]:
        """Deepest known prefix; at equal depth the request's own conversation, else the one used last."""
        for digest in reversed(chain.prefixes):
            if keys := self._listed.get(digest):
                key = own if own is not None and own in keys else next(reversed(keys))
                return key, self._conversations[key].turns[digest]
        return None, None

    def _insert(self, key: ConversationKey, conversation: _Conversation, turn: Turn) -> None:
        if turn.digest == _NAMELESS:
            return
        conversation.turns[turn.digest] = turn
        conversation.turns.move_to_end(turn.digest)
        keys = self._listed.setdefault(turn.digest, {})
        keys.pop(key, None)
        keys[key] = None
        while len(conversation.turns) > self._max_turns:
            self._trim(key, conversation)

    def _trim(self, key: ConversationKey, conversation: _Conversation) -> None:
        """Forget the oldest turn; its children hang under its parent from now on."""
        _, oldest = conversation.turns.popitem(last=False)
        self._unlist(oldest.digest, key)
        for digest, turn in conversation.turns.items():
            if turn.parent == oldest.digest:
                conversation.turns[digest] = replace(turn, parent=oldest.parent)
        conversation.latest = conversation.turns.get(conversation.latest.digest, conversation.latest)

    def _forget(self, key: ConversationKey) -> None:
        for digest in self._conversations.pop(key).turns:
            self._unlist(digest, key)

    def _unlist(self, digest: Digest, key: ConversationKey) -> None:
        keys = self._listed[digest]
        del keys[key]
        if not keys:
            del self._listed[digest]

    def _named_turns(self) -> Iterator[tuple[ConversationKey, Turn]]:
        for key, conversation in self._conversations.items():
            for turn in conversation.turns.values():
                yield key, turn


_NAMELESS: Digest = b""  # type: ignore[assignment]
"""Digest of a turn whose prompt has no chain: it keeps its conversation's engine and is nobody's ancestor."""


def _deepest_of(conversation: _Conversation | None, chain: Chain) -> Turn | None:
    if conversation is None:
        return None
    known = (conversation.turns.get(digest) for digest in reversed(chain.prefixes))
    return next((turn for turn in known if turn is not None), None)


def _parent(match: Match, conversation: _Conversation | None) -> Digest | None:
    """The turn to hang under, as far as it is still remembered when this one commits."""
    if conversation is None or match.own is None:
        return None
    known = conversation.turns.get(match.own.digest)
    if known is None:
        return None
    return known.parent if known.digest == match.digest else known.digest


def _check_tree(conversation: _Conversation, max_turns: int) -> None:
    assert len(conversation.turns) <= max_turns, "too many turns"  # noqa: S101
    for digest, turn in conversation.turns.items():
        assert digest == turn.digest, "turn under a foreign digest"  # noqa: S101
        if turn.parent is not None:
            parent = conversation.turns.get(turn.parent)
            assert parent is not None, "turn under a forgotten parent"  # noqa: S101
            assert parent.depth < turn.depth, "turn under a deeper parent"  # noqa: S101
