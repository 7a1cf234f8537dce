"""What `bidikv demo` is asked to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """One run of the demo.

    Attributes:
        json: Where to write the measurements.
        plot: Where to draw the times to first token (PNG).
        quick: Fewer turns and one prefix-cache setting.
        model: Checkpoint folder; None takes the packaged SmolLM2-135M.
    """

    json: Path | None = None
    plot: Path | None = None
    quick: bool = False
    model: Path | None = None
