"""`bidikv verify`: random conversations on a running cluster, every greedy answer compared with a cold run."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bidikv_server.verify.options import VerifyOptions


def run_verify(options: VerifyOptions) -> int:
    """Play, compare and report; 0 if every answer was right, else 1.

    Raises:
        bidikv_server.launch.errors.LaunchError: The cluster cannot start, or the router cannot be used.
    """
    from bidikv_server.verify.run import run  # noqa: PLC0415  (aiohttp is an extra)

    return run(options)
