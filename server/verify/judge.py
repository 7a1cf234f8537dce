"""Whether a warm answer is the cold one, and if not, whether a near tie explains it. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bidikv_server.verify.answers import Answer, Position


class Verdict(StrEnum):
    """What became of one turn."""

    SAME = "same"
    NEAR_TIE = "near_tie"
    """The first different token was a toss-up: both alternatives were almost equally likely, in both runs."""
    MISMATCH = "mismatch"
    HUNG = "hung"
    FAILED = "failed"
    """The request failed where it should not have, or without a clear error."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two answers part.

    Attributes:
        position: Generated tokens before it; None if ids are the same or unknown.
        warm_id: Token of the warm answer; None if it ended there.
        cold_id: Token of the cold answer; None if it ended there.
    """

    position: int | None
    warm_id: int | None = None
    cold_id: int | None = None

    def describe(self) -> str:
        """One clause."""
        if self.position is None:
            return "other text"
        warm, cold = ("the end" if token is None else f"{token}" for token in (self.warm_id, self.cold_id))
        return f"generated token {self.position} is {warm}, cold it is {cold}"


def compare(warm: Answer, cold: Answer) -> Difference | None:
    """How they differ: by token ids where both tell them, else by text. None if they do not."""
    if warm.token_ids and cold.token_ids and warm.token_ids != cold.token_ids:
        shared = common_prefix(warm.token_ids, cold.token_ids)
        return Difference(shared, _at(warm.token_ids, shared), _at(cold.token_ids, shared))
    same = (warm.text, warm.arguments, warm.finish_reason, bool(warm.token_ids)) == (
        cold.text,
        cold.arguments,
        cold.finish_reason,
        bool(cold.token_ids),
    )
    return None if same else Difference(None)


def is_near_tie(
    difference: Difference, warm: Answer, cold: Answer, runs: Sequence[Answer], margin: float
) -> bool:
    """Whether all of these runs, which tell log probabilities, show a toss-up where the answers part.

    Args:
        difference: Between the two answers.
        warm: The answer in question.
        cold: What it should have been.
        runs: The cold and the warm request again, with log probabilities.
        margin: Largest difference of log probabilities that counts as a toss-up.
    """
    if difference.position is None:
        if warm.token_ids or cold.token_ids or warm.arguments != cold.arguments:
            return False
        return bool(runs) and all(_text_tie(run.positions, warm.text, cold.text, margin) for run in runs)
    if difference.warm_id is None or difference.cold_id is None:
        return False
    tokens = f"token_id:{difference.warm_id}", f"token_id:{difference.cold_id}"
    prefix = [f"token_id:{token}" for token in cold.token_ids[: difference.position]]
    return bool(runs) and all(_id_tie(run.positions, prefix, tokens, margin) for run in runs)


def is_cold(answer: Answer) -> bool:
    """Whether nothing was reused for it, as far as the router tells."""
    reuse = answer.reuse
    return reuse is None or not (reuse.remote_tokens or reuse.local_tokens)


def common_prefix(one: Sequence[object], other: Sequence[object]) -> int:
    """How many items both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(one), len(other)))


def _id_tie(positions: Sequence[Position], prefix: list[str], tokens: tuple[str, str], margin: float) -> bool:
    place = len(prefix)
    if len(positions) <= place or [position.token for position in positions[:place]] != prefix:
        return False
    found = [positions[place].alternatives.get(token) for token in tokens]
    first, second = found
    return first is not None and second is not None and abs(first - second) <= margin


def _text_tie(positions: Sequence[Position], warm: str, cold: str, margin: float) -> bool:
    """The same by texts: at the first token that only one of them can have generated."""
    said = ""
    for position in positions:
        after = said + position.token
        if warm.startswith(after) and cold.startswith(after):
            said = after
            continue
        likely = [_best(position, said, text) for text in (warm, cold)]
        first, second = likely
        return first is not None and second is not None and abs(first - second) <= margin
    return False


def _best(position: Position, said: str, text: str) -> float | None:
    """Log probability of the likeliest token that goes on towards this text."""
    fitting = [
        value for token, value in position.alternatives.items() if token and text.startswith(said + token)
    ]
    return max(fitting, default=None)


def _at(ids: tuple[int, ...], place: int) -> int | None:
    return ids[place] if place < len(ids) else None
