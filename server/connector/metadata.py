"""What the connector's scheduler side and worker side tell each other every engine step."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata

from bidikv_server.reasons import Reason


@dataclass(frozen=True, slots=True)
class ReadbackCheck:
    """What the worker needs to believe one read.

    Attributes:
        index_address: `host:port` of the retention index that promised the blocks.
        epoch: Which start of that index promised them.
        block_ids: The blocks read, in decode's numbering.
        generations: Their generations when they were promised.
        timeout_s: Bound on handshake, read and validation together, from when the worker hears of it.
    """

    index_address: str
    epoch: str
    block_ids: tuple[int, ...]
    generations: tuple[int, ...]
    timeout_s: float


class BidiConnectorMetadata(NixlConnectorMetadata):
    """NIXL's per-step metadata plus the readbacks that start in this step (scheduler to worker)."""

    def __init__(self) -> None:
        """Start empty."""
        super().__init__()
        self.readbacks: dict[str, ReadbackCheck] = {}

    @classmethod
    def extend(
        cls, stock: NixlConnectorMetadata, readbacks: dict[str, ReadbackCheck]
    ) -> BidiConnectorMetadata:
        """Take over everything `stock` holds."""
        extended = cls()
        extended.__dict__.update(stock.__dict__)
        extended.readbacks = readbacks
        return extended


@dataclass
class ReadbackOutcomes(KVConnectorWorkerMetadata):
    """What became of readbacks in this step (worker to scheduler).

    Attributes:
        outcomes: How the ones that ended ended; HIT stands for success.
        stuck: Ranks on which an overdue read of a request may still write to the blocks it was given.
        unstuck: Ranks on which such a read has stopped.
    """

    outcomes: dict[str, Reason] = field(default_factory=dict)
    stuck: Counter[str] = field(default_factory=Counter)
    unstuck: Counter[str] = field(default_factory=Counter)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Merge the ranks' accounts; one rank's failure is the request's failure."""
        if not isinstance(other, ReadbackOutcomes):
            raise TypeError(f"cannot aggregate {type(other).__name__} into readback outcomes")
        merged = dict(self.outcomes)
        for request_id, reason in other.outcomes.items():
            if merged.get(request_id, Reason.HIT) is Reason.HIT:
                merged[request_id] = reason
        return ReadbackOutcomes(merged, self.stuck + other.stuck, self.unstuck + other.unstuck)
