"""One prefill request's reuse while it is under way: what was asked, offered, planned and read."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bidikv_server.reasons import Reason

if TYPE_CHECKING:
    from bidikv_server.connector.core import readback
    from bidikv_server.connector.lookup import Lookup, Offer
    from bidikv_server.connector.metadata import ReadbackCheck


@dataclass(slots=True)
class PrefillTurn:
    """One prefill request's reuse.

    Attributes:
        reason: What to report, unless something happens that changes it.
        lookup: Under way.
        offer: The best answer.
        pull: What was planned last; committed once `reading`.
        reading: A read was handed to the workers, at any time.
        verdict: What the ranks said of it so far.
        remote_tokens: Tokens of that read; 0 after it failed.
        local_tokens: Prefill's own hit when it was asked last before a read.
        packed: The prompt's packed tokens, as far as they were looked up.
        since_s: When the lookup, and later the read, began.
        runs_since_s: When vLLM last began to compute it; 0 before.
    """

    reason: Reason = Reason.UNKNOWN
    lookup: Lookup | None = None
    offer: Offer | None = None
    pull: readback.Pull | None = None
    reading: bool = False
    verdict: Reason | None = None
    remote_tokens: int = 0
    local_tokens: int = 0
    packed: bytes = b""
    since_s: float = field(default_factory=time.monotonic)
    runs_since_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Read:
    """A pull that starts in this step, in the words of vLLM's NIXL metadata."""

    request_id: str
    first_block: int
    local_block_ids: tuple[int, ...]
    kv_transfer_params: dict[str, Any]
    check: ReadbackCheck
