"""The `bidikv` command. Exit codes: 0 done, 1 failed, 2 wrong use or a missing extra, 130 interrupted."""

from __future__ import annotations

import sys
from importlib.util import find_spec


def main() -> None:
    """Run the command line, or say what to install for it."""
    missing = [module for module in ("typer", "rich") if find_spec(module) is None]
    if missing:
        sys.stderr.write(
            f'bidikv: the command line needs {" and ".join(missing)}: pip install "bidikv[router]"\n'
        )
        raise SystemExit(2)
    from bidikv_server.cli.app import app  # noqa: PLC0415  (an optional extra)

    app()
