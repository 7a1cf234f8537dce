"""The account of one prompt's reuse: what prefill tells the router, and the log line of a lost one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from bidikv_server import wire
from bidikv_server.connector.core import readback
from bidikv_server.reasons import Reason

if TYPE_CHECKING:
    from bidikv_server.connector.core.retention import Match

_NOTHING_LOST: Final = frozenset(
    {Reason.HIT, Reason.LOCAL, Reason.NEW_CONVERSATION, Reason.READBACK_OFF, Reason.BELOW_THRESHOLD}
)


@dataclass(frozen=True, slots=True)
class Account:
    """Where a prompt's KV came from.

    Attributes:
        reason: Why no more of it was reused.
        prompt_tokens: Its length.
        remote_tokens: Pulled from decode and confirmed.
        local_tokens: Prefill's own prefix-cache hit.
        diverged_at: First token that is not what the conversation retained, where that is known.
        lost_at: First token that decode should have had and prefill could not take from it; None when nothing was lost.
    """

    reason: Reason
    prompt_tokens: int
    remote_tokens: int
    local_tokens: int
    diverged_at: int | None
    lost_at: int | None

    @classmethod
    def make(
        cls,
        reason: Reason,
        match: Match | None,
        pull: readback.Pull | None,
        *,
        prompt_tokens: int,
        remote_tokens: int,
        local_tokens: int,
        packed: bytes,
        block_size: int,
    ) -> Account:
        """Account for a prompt.

        Args:
            reason: What became of its reuse.
            match: What decode offered.
            pull: What was read, if anything.
            prompt_tokens: Length of the prompt.
            remote_tokens: Confirmed tokens of the read.
            local_tokens: Prefill's own hit.
            packed: The prompt's packed tokens, to find where it diverged.
            block_size: Tokens per block.
        """
        diverged_at = readback.diverged_at_token(match, packed, block_size=block_size)
        if reason in _NOTHING_LOST:
            lost_at = None
        elif diverged_at is not None and reason in {Reason.DIVERGED, Reason.HIT_DIVERGED}:
            lost_at = diverged_at
        elif pull is not None and not remote_tokens:
            lost_at = pull.first * block_size
        else:
            lost_at = len(match.block_ids) * block_size if match is not None else 0
        return cls(reason, prompt_tokens, remote_tokens, local_tokens, diverged_at, lost_at)

    @property
    def computed_tokens(self) -> int:
        """What prefill computed itself."""
        return max(0, self.prompt_tokens - self.local_tokens - self.remote_tokens)

    def answer(self) -> dict[str, Any]:
        """The `bidikv` part of prefill's answer (`wire`)."""
        return {
            "v": wire.VERSION,
            "reason": str(self.reason),
            "prompt_tokens": self.prompt_tokens,
            "remote_tokens": self.remote_tokens,
            "local_tokens": self.local_tokens,
            "computed_tokens": self.computed_tokens,
            "diverged_at_token": self.diverged_at,
        }

    def describe(self) -> str:
        """One line of text."""
        lost = f" lost_at_token={self.lost_at}" if self.lost_at is not None else ""
        return (
            f"reason={self.reason}{lost} prompt={self.prompt_tokens} remote={self.remote_tokens} "
            f"local={self.local_tokens} computed={self.computed_tokens}"
        )
