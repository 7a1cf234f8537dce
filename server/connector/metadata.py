"""What the connector's scheduler side and worker side tell each other every engine step."""

from __future__ import annotations

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
        timeout_s: Bound on the read and on the validation after it, each, from when the worker hears of it.
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
    """How the readbacks that ended in this step ended (worker to scheduler). HIT stands for success."""

    outcomes: dict[str, Reason] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Merge the ranks' accounts; one rank's failure is the request's failure."""
        if not isinstance(other, ReadbackOutcomes):
            raise TypeError(f"cannot aggregate {type(other).__name__} into readback outcomes")
        merged = dict(self.outcomes)
        for request_id, reason in other.outcomes.items():
            if merged.get(request_id, Reason.HIT) is Reason.HIT:
                merged[request_id] = reason
        return ReadbackOutcomes(merged)
