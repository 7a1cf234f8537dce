"""The main job: an agent's time to first token with and without readback, on real engines, from one command."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bidikv_server.demo.options import DemoOptions


def run_demo(options: DemoOptions) -> int:
    """Run the demo and report it; 0 if every answer was identical with and without readback, else 1.

    Raises:
        bidikv_server.launch.errors.LaunchError: The cluster cannot start.
    """
    from bidikv_server.demo.main import run  # noqa: PLC0415  (LangGraph and matplotlib are an extra)

    return run(options)
