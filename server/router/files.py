"""Files that are read again when they change."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_Stamp = tuple[int, int, int] | None


class Watch:
    """Tells whether any of some files changed. Looks when asked, and costs one `stat` each."""

    def __init__(self, *paths: Path) -> None:
        self._paths = paths
        self._stamps = self._look()

    def changed(self) -> bool:
        """Whether any of them is another file, or none, since the last call. Ask before reading, not after."""
        before, self._stamps = self._stamps, self._look()
        return self._stamps != before

    def _look(self) -> tuple[_Stamp, ...]:
        return tuple(_stamp(path) for path in self._paths)


def _stamp(path: Path) -> _Stamp:
    """What changes when the file does; a mounted secret or config map is swapped for another file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
