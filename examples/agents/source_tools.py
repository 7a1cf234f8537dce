"""Three read-only tools over a directory of sources: list files, search text, read lines.

Paths cannot leave the root, also not through links, and every answer is bounded. The tools' JSON schemas offer only
arguments that exist (`enum`), so that constrained decoding yields a sensible call even from a very small model.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

DEFAULT_PATTERNS = ("def ", "class ", "import ", "return ", "raise ")
MAX_FILE_BYTES = 1_000_000


class SourceTools:
    """The tools, bound to one directory. Mistaken arguments are answered with text, as a model expects.

    Args:
        root: The directory.
        suffixes: Endings of the files to show.
        patterns: What the schema of `search` offers.
        max_chars: Longest answer, in characters (about four to a token).
        max_files: Most files that the schema of `read_lines` offers.
    """

    def __init__(
        self,
        root: Path | str,
        *,
        suffixes: tuple[str, ...] = (".py", ".md", ".toml"),
        patterns: Sequence[str] = DEFAULT_PATTERNS,
        max_chars: int = 450,
        max_files: int = 8,
    ) -> None:
        self.root = Path(root).resolve(strict=True)
        self._suffixes = suffixes
        self._patterns = tuple(patterns)
        self._max_chars = max_chars
        self._max_files = max_files

    def list_files(self, subdir: str = ".") -> str:
        """Names and sizes of the files below a directory."""
        start = self._inside(subdir)
        if start is None or not start.is_dir():
            return f"error: no directory {subdir!r}"
        lines = [f"{self._name(path)} {path.stat().st_size}" for path in self._files(start)]
        return self._bounded(lines) or "no files"

    def search(self, pattern: str) -> str:
        """Lines that contain a text, as `path:line: text`."""
        if not pattern:
            return "error: nothing to search for"
        return self._bounded(self._matches(pattern)) or f"no line contains {pattern!r}"

    def read_lines(self, path: str, start: int = 1) -> str:
        """Numbered lines of a file, from `start` (1 is the first) for as many as fit."""
        file = self._inside(path)
        if file is None or not file.is_file() or file.suffix not in self._suffixes:
            return f"error: no file {path!r}"
        lines = _read(file).splitlines()
        first = max(start, 1)
        numbered = (f"{number}: {line}" for number, line in enumerate(lines[first - 1 :], first))
        return self._bounded(numbered) or f"{path} has {len(lines)} lines"

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Run a tool by name."""
        tools: dict[str, Callable[..., str]] = {
            "list_files": self.list_files,
            "search": self.search,
            "read_lines": self.read_lines,
        }
        tool = tools.get(name)
        if tool is None:
            return f"error: no tool {name!r}"
        try:
            return tool(**arguments)
        except TypeError:
            return f"error: {name} does not take {sorted(arguments)}"

    def schemas(self) -> list[dict[str, Any]]:
        """The tools in the OpenAI API's form, in a fixed order."""
        files = [self._name(path) for path in self._files(self.root)][: self._max_files]
        subdirs = sorted({".", *(str(Path(file).parent) for file in files)})
        return [
            _schema("list_files", "List source files.", {"subdir": {"type": "string", "enum": subdirs}}),
            _schema("search", "Find lines.", {"pattern": {"type": "string", "enum": list(self._patterns)}}),
            _schema(
                "read_lines",
                "Read lines of a file.",
                {
                    "path": {"type": "string", "enum": files},
                    "start": {"type": "integer", "enum": [1, 11, 21, 31]},
                },
            ),
        ]

    def _inside(self, path: str) -> Path | None:
        """The real path, or None if it is outside the root."""
        try:
            real = (self.root / path).resolve()
        except (OSError, ValueError):  # a loop of links, a NUL
            return None
        return real if real.is_relative_to(self.root) else None

    def _name(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()

    def _files(self, start: Path) -> Iterator[Path]:
        for path in sorted(start.rglob("*")):
            hidden = any(part.startswith((".", "__pycache__")) for part in path.relative_to(self.root).parts)
            if (
                path.suffix in self._suffixes
                and not hidden
                and path.is_file()
                and self._inside(self._name(path))
            ):
                yield path

    def _matches(self, pattern: str) -> Iterator[str]:
        for path in self._files(self.root):
            for number, line in enumerate(_read(path).splitlines(), 1):
                if pattern in line:
                    yield f"{self._name(path)}:{number}: {line.strip()}"

    def _bounded(self, lines: Iterator[str] | list[str]) -> str:
        """As many lines as fit; a first line that is too long is cut."""
        kept: list[str] = []
        room = self._max_chars
        for line in lines:
            if len(line) > room and kept:
                break
            kept.append(line[:room])
            room -= len(line) + 1
            if room <= 0:
                break
        return "\n".join(kept)


def _read(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(MAX_FILE_BYTES).decode("utf-8", "replace")


def _schema(name: str, description: str, properties: dict[str, Any]) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    # Without `strict`, some of an engine's tool parsers constrain no more than a call's frame.
    function = {"name": name, "description": description, "strict": True, "parameters": parameters}
    return {"type": "function", "function": function}
