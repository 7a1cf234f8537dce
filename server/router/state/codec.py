"""What the shared state holds, as bytes: written by routers, and believed only as far as it has the right shape.

Nothing read from there proves anything: it names an engine to ask, and that engine compares tokens. A value that cannot be
read is left out and counted.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import struct
from typing import TYPE_CHECKING, Any, Final, TypeVar

from bidikv_server.reasons import Reason
from bidikv_server.router.core.choices import Mode, ModeReason, Placement, PrefillChoice
from bidikv_server.router.core.conversations import NAMELESS, Holder, Match, Turn
from bidikv_server.router.core.digests import Digest
from bidikv_server.router.core.engines import IndexInfo
from bidikv_server.router.core.history import Known, TurnRecord
from bidikv_server.router.core.ids import ConversationKey, EngineUrl, fingerprint
from bidikv_server.router.core.kept import Kept

if TYPE_CHECKING:
    from bidikv_server.router.core.digests import Chain
    from bidikv_server.router.core.ids import Scope

_RECORD: Final = struct.Struct(">16sI16sI")
_NAME: Final = re.compile(r"[0-9a-f]{32}")
_NONE: Final = bytes(16)
_MAX_TEXT: Final = 4096
V = TypeVar("V")


class BadValue(ValueError):  # noqa: N818
    """A value in the shared state that no router has written."""


class Reader:
    """Reads one answer of the server, and counts what in it cannot be read.

    Attributes:
        bad: How many values were left out so far.
    """

    def __init__(self) -> None:
        self.bad = 0
        self._holders: dict[bytes, Holder] = {}

    def holders(self, found: Any) -> None:
        """Learn holders from a list of names and their JSON, alternating. A name is the digest of its JSON."""
        pairs = expect(found, list)
        for name, data in zip(pairs[::2], pairs[1::2], strict=False):
            try:
                self._holders[name] = _holder(name, expect(data, bytes))
            except BadValue:
                self.bad += 1

    def turn(self, digest: Any, record: Any, depth: int | None = None) -> Turn | None:
        """One turn; None if there is none, or none that can be read. Given a depth, it must have that one."""
        if record == b"":
            return None
        try:
            name, at, parent, _ = _RECORD.unpack(expect(record, bytes))
            holder = self._holders[name]
        except (BadValue, KeyError, struct.error):
            self.bad += 1
            return None
        if type(digest) is not bytes or len(digest) != len(_NONE) or depth not in {None, at}:
            self.bad += 1
            return None
        return Turn(Digest(digest), Digest(parent) if parent != _NONE else None, at, holder)

    def nameless(self, name: Any) -> Turn | None:
        """The latest turn of a conversation, if it has no digest."""
        if name == b"":
            return None
        holder = self._holders.get(name)
        self.bad += holder is None
        return Turn(NAMELESS, None, 0, holder) if holder is not None else None

    def turns(self, found: Any) -> tuple[Turn, ...]:
        """Turns from a list of digests and records, alternating."""
        pairs = expect(found, list)
        read = (self.turn(*pair) for pair in zip(pairs[::2], pairs[1::2], strict=False))
        return tuple(turn for turn in read if turn is not None)

    def known(self, key: ConversationKey, told: list[Any], stamp: Any) -> Known | None:
        """What became of a conversation's turns, oldest first; None if nothing of it can be read."""
        read = [found for data in told if (found := self._told(data)) is not None]
        if not read:
            return None
        at = self._stamp(stamp)
        tenant, model, _ = read[0]
        return (
            Known(key, tenant, model, tuple(record for _, _, record in read), at) if at is not None else None
        )

    def listed(self, name: Any, stamp: Any, data: Any) -> Known | None:
        """One conversation of a list, by its last record."""
        if type(name) is not bytes or len(name) != len(_NONE):
            self.bad += 1
            return None
        # One that had to make room for others has no record any more.
        return self.known(ConversationKey(name.hex()), [data], stamp) if data != b"" else None

    def _told(self, data: Any) -> tuple[str, str, TurnRecord] | None:
        try:
            return _told(_json(data))
        except BadValue:
            self.bad += 1
            return None

    def _stamp(self, score: Any) -> int | None:
        """Place in the order of use, in microseconds since 1970; None if it is none."""
        try:
            return int(float(expect(score, bytes)))
        except (ValueError, OverflowError):
            self.bad += 1
            return None


def read_match(answer: Any, chain: Chain, skipped: int) -> tuple[Match, bool, int]:
    """What the server says of a request's place, whether its conversation was released, and how much of it was bad.

    Args:
        answer: Of the script `find`.
        chain: Of the prompt.
        skipped: How many of its shortest prefixes were not sent.

    Raises:
        BadValue: It is no such answer.
    """
    fields = expect(answer, list)
    if len(fields) != 10:
        raise BadValue("answer of another length")
    odd, gone, name, at, record, own_at, own_record, latest, latest_record, holders = fields
    reader = Reader()
    reader.holders(holders)
    ancestor = _at(reader, chain, skipped, at, record)
    own = _at(reader, chain, skipped, own_at, own_record)
    last = reader.turn(latest, latest_record) if latest != b"" else reader.nameless(latest_record)
    if len(expect(name, bytes)) != len(_NONE):
        raise BadValue("conversation without a name")
    match = Match(
        key=ConversationKey(name.hex()),
        digest=chain.prefixes[-1] if chain.prefixes else None,
        depth=len(chain.prefixes),
        ancestor=ancestor,
        own=own,
        latest=last,
    )
    return match, bool(expect(gone, int)), expect(odd, int) + reader.bad


def _at(reader: Reader, chain: Chain, skipped: int, place: Any, record: Any) -> Turn | None:
    """The turn whose prompt is that many steps of what was sent of the chain."""
    if expect(place, int) == 0:
        return None
    depth = skipped + place
    if not skipped < depth <= len(chain.prefixes):
        raise BadValue("place outside the prompt")
    return reader.turn(chain.prefixes[depth - 1], record, depth)


def write_holder(holder: Holder) -> bytes:
    """A holder as JSON."""
    indexes = [[index.engine_id, index.address] for index in holder.indexes]
    return json.dumps([holder.engine, indexes], separators=(",", ":")).encode()


def holder_name(data: bytes) -> bytes:
    """Name of a holder, by its JSON."""
    return hashlib.blake2b(data, digest_size=16).digest()


def write_told(scope: Scope, record: TurnRecord) -> bytes:
    """What became of a turn, as JSON."""
    fields = [
        scope.tenant,
        scope.model,
        record.turn.hex(),
        record.reason,
        record.placement,
        record.prompt_tokens,
        record.remote_tokens,
        record.local_tokens,
        record.computed_tokens,
        record.diverged_at_token,
        record.prefill,
        record.decode,
        round(record.ttft_s, 6),
        record.at_s,
        record.prefill_choice,
        record.mode,
        record.mode_reason,
    ]
    return json.dumps(fields, separators=(",", ":")).encode()


def response_name(tenant: str, response_id: str) -> bytes:
    """Name of a response: each tenant has its own."""
    return bytes.fromhex(fingerprint("response", tenant, response_id))


def write_kept(kept: Kept) -> bytes:
    """Where a response is, as JSON."""
    return json.dumps([kept.engine, kept.conversation, kept.digest.hex()], separators=(",", ":")).encode()


def read_kept(data: Any) -> Kept:
    """Where a response is.

    Raises:
        BadValue: It does not say.
    """
    fields = _json(data)
    if len(fields) != 3 or not all(type(field) is str for field in fields):
        raise BadValue("response of another shape")
    engine, conversation, digest = fields
    if not (_NAME.fullmatch(conversation) and _NAME.fullmatch(digest)):
        raise BadValue("response of no conversation")
    return Kept(EngineUrl(engine), ConversationKey(conversation), Digest(bytes.fromhex(digest)))


def expect(value: Any, kind: type[V]) -> V:
    """The value, if it is of this very type.

    Raises:
        BadValue: It is of another.
    """
    if type(value) is not kind:
        raise BadValue(f"{type(value).__name__} instead of {kind.__name__}")
    return value


def _json(data: Any) -> list[Any]:
    if len(expect(data, bytes)) > _MAX_TEXT:
        raise BadValue("too long")
    try:
        return expect(json.loads(data), list)
    except (ValueError, RecursionError) as error:
        raise BadValue("no JSON") from error


def _holder(name: Any, data: bytes) -> Holder:
    fields = _json(data)
    if holder_name(data) != name or len(fields) != 2:
        raise BadValue("holder of another shape")
    indexes = []
    for pair in expect(fields[1], list):
        if len(expect(pair, list)) != 2:
            raise BadValue("index of another shape")
        indexes.append(IndexInfo(expect(pair[0], str), expect(pair[1], str)))
    return Holder(EngineUrl(expect(fields[0], str)), tuple(indexes))


def _told(fields: list[Any]) -> tuple[str, str, TurnRecord]:
    if len(fields) != 17:
        raise BadValue("record of another shape")
    tenant, model, turn, reason, placement, prompt, remote, local, computed, diverged = fields[:10]
    prefill, decode, ttft_s, at_s, choice, mode, why = fields[10:]
    try:
        record = TurnRecord(
            turn=bytes.fromhex(expect(turn, str)),
            reason=Reason(reason),
            placement=Placement(placement),
            prompt_tokens=_optional(prompt, int),
            remote_tokens=_optional(remote, int),
            local_tokens=_optional(local, int),
            computed_tokens=_optional(computed, int),
            diverged_at_token=_optional(diverged, int),
            prefill=EngineUrl(prefill) if _optional(prefill, str) is not None else None,
            decode=EngineUrl(decode) if _optional(decode, str) is not None else None,
            ttft_s=_finite(ttft_s),
            at_s=_finite(at_s),
            prefill_choice=PrefillChoice(choice),
            mode=Mode(mode),
            mode_reason=ModeReason(why),
        )
    except ValueError as error:
        raise BadValue("record with an unknown word") from error
    return expect(tenant, str), expect(model, str), record


def _optional(value: Any, kind: type[V]) -> V | None:
    return None if value is None else expect(value, kind)


def _finite(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise BadValue("no number")
    return float(value)
