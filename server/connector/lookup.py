"""One prompt's questions to the retention indexes that may hold it, and the best of their answers."""

from __future__ import annotations

import logging
from concurrent.futures import wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from bidikv_server.connector import messages
from bidikv_server.connector.core.retention import Match
from bidikv_server.reasons import Reason

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future

    from bidikv_server.connector.side_channel import Client

logger = logging.getLogger("vllm.bidikv")

MAX_SOURCES: Final = 16
"""Data-parallel ranks of one decode engine; more than this no router names."""
_GRACE_S: Final = 0.25
"""The side channel ends a question in time by itself; this bounds the wait should its thread be gone."""
_MAX_BLOCK_ID: Final = 2**31 - 1
"""NIXL's descriptor indices are 32 bits wide."""


@dataclass(frozen=True, slots=True)
class Offer:
    """What one index holds of the prompt.

    Attributes:
        source: Its address.
        found: Its answer.
        match: The same, checked.
    """

    source: str
    found: messages.Found
    match: Match


class Lookup:
    """Asks all sources at once. The answers arrive on the side channel's thread; the caller polls."""

    def __init__(
        self,
        client: Client,
        sources: Sequence[str],
        message: messages.Lookup,
        *,
        blocks: int,
        now_s: float,
        timeout_s: float,
    ) -> None:
        """Send the questions.

        Args:
            client: The side channel.
            sources: `host:port` of each index.
            message: The question.
            blocks: How many digests it holds.
            now_s: The caller's monotonic clock.
            timeout_s: When an index that has not answered is given up.
        """
        data = messages.encode(message)
        self._blocks = blocks
        self._deadline_s = now_s + timeout_s + _GRACE_S
        self._asked: list[tuple[str, Future[bytes]]] = [
            (source, client.submit(source, data, timeout_s=timeout_s))
            for source in dict.fromkeys(sources[:MAX_SOURCES])
        ]

    def ended(self, now_s: float) -> bool:
        """Whether every index has answered or been given up."""
        return now_s >= self._deadline_s or all(future.done() for _, future in self._asked)

    def wait(self, timeout_s: float) -> None:
        """Let go of the interpreter until every index has answered, `timeout_s` at most."""
        wait([future for _, future in self._asked], timeout_s)

    def result(self) -> Offer | Reason:
        """The offer of the longest prefix, or why there is none. Call once `ended`."""
        results = [self._read(source, future) for source, future in self._asked]
        offers = [result for result in results if isinstance(result, Offer)]
        if offers:
            return max(offers, key=lambda offer: len(offer.match.block_ids))
        return next((reason for reason in results if isinstance(reason, Reason)), Reason.LOOKUP_FAILED)

    def _read(self, source: str, future: Future[bytes]) -> Offer | Reason:
        error = future.exception() if future.done() else TimeoutError(f"{source} did not answer in time")
        if error is not None:
            reason = Reason.LOOKUP_TIMEOUT if isinstance(error, TimeoutError) else Reason.LOOKUP_FAILED
            logger.warning("bidikv: no readback, %s: %s", reason, error)
            return reason
        reply = messages.decode(future.result())
        if isinstance(reply, messages.Refused):
            logger.warning("bidikv: %s refuses readback: %.200s", source, reply.message)
            return Reason.INCOMPATIBLE
        if isinstance(reply, messages.Found) and reply.v != messages.VERSION:
            logger.warning("bidikv: no readback: %s speaks version %d", source, reply.v)
            return Reason.INCOMPATIBLE
        match = _match(reply, self._blocks) if isinstance(reply, messages.Found) else None
        if match is None or not isinstance(reply, messages.Found):
            logger.warning("bidikv: no readback: %s sent an answer that cannot be used", source)
            return Reason.LOOKUP_FAILED
        return Offer(source, reply, match)


def _match(found: messages.Found, asked_blocks: int) -> Match | None:
    """The match that an index answered; None when it cannot be an answer to `asked_blocks` digests."""
    if not len(found.block_ids) == len(found.generations) <= asked_blocks:
        return None
    if any(not 0 <= block_id <= _MAX_BLOCK_ID for block_id in found.block_ids):
        return None
    if (
        found.reason not in set(Reason)
        or min(found.tp_size, found.pp_size) < 1
        or found.dcp_size != 1
        or found.registration < 0
    ):
        return None
    return Match(tuple(found.block_ids), tuple(found.generations), Reason(found.reason), found.retained)
