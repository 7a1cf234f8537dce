"""What engines logged through `timed_connector`, by what took the time."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from comparison.clusters import TimedCluster

MARK: Final = "benchmark-timing "


class Marks:
    """What engines logged through `timed_connector` since the last look."""

    def __init__(self, cluster: TimedCluster) -> None:
        self._logs = {name: cluster.log_dir / f"{name}.log" for name in ("prefill-0", "decode-0")}
        self._read = {name: path.stat().st_size for name, path in self._logs.items()}

    def new(self, name: str) -> dict[str, list[float]]:
        """Milliseconds by what took them."""
        with self._logs[name].open("rb") as log:
            log.seek(self._read[name])
            lines = log.read().decode(errors="replace").splitlines()
            self._read[name] = log.tell()
        times: dict[str, list[float]] = {}
        for line in lines:
            _, found, mark = line.partition(MARK)
            if found:
                fields = json.loads(mark)
                times.setdefault(fields["what"], []).append(fields["ms"])
        return times
