"""Everything that one run measured, as it is written to JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from comparison.idle import Idle
    from comparison.lookup_inside import Inside
    from comparison.pressure import Pressure
    from comparison.streamed import Reuse
    from comparison.throughput import Throughput
    from comparison.wrong_answers import Judged


@dataclass(slots=True)
class Side:
    """One connector; a part that was not asked for is empty."""

    answers: list[Judged] = field(default_factory=list)
    streaming: list[Reuse] = field(default_factory=list)
    idle: Idle | None = None
    pressure: Pressure | None = None


@dataclass(slots=True)
class Result:
    """The whole run."""

    bidikv: str
    vllm: str
    model: str
    cores: int
    engine_args: tuple[str, ...]
    seconds: float = 0.0
    stock: Side = field(default_factory=Side)
    ours: Side = field(default_factory=Side)
    throughput: Throughput | None = None
    overhead: Throughput | None = None
    lookup: list[Inside] = field(default_factory=list)

    def right(self) -> bool:
        """Whether none of our answers was wrong."""
        return not any(judged.wrong or judged.plain_wrong for judged in self.ours.answers)

    def write(self, path: Path) -> None:
        """Write everything."""
        fields: dict[str, Any] = asdict(self)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(fields, indent=2) + "\n")
