"""Write docs/api.md: every public name of the SDK, from its signature and docstring.

python scripts/api_reference.py [--check]     (--check writes nothing and fails if the file is not what it would write)
"""

from __future__ import annotations

import argparse
import difflib
import logging
import sys
from pathlib import Path
from typing import Any

import griffe

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "api.md"
GROUPS = {
    "Clients": ("OpenAI", "AsyncOpenAI", "AzureOpenAI", "AsyncAzureOpenAI", "wrap"),
    "Conversations": ("conversation", "Conversation", "current_conversation", "run_in", "session_id"),
    "What was reused": ("turn_of", "reuse_of", "TurnReport", "ReuseReport", "ReuseHeader", "TurnHeader"),
    "History": ("message_of", "Drift", "Explanation"),
    "Retries": ("RetryPolicy", "is_transient"),
    "Errors": (
        "BidiKVError",
        "ConfigurationError",
        "DriftError",
        "DriftWarning",
        "MissingIntegrationError",
        "RetriesExhausted",
    ),
}
INTEGRATIONS = {
    "BidiKVChat": "langgraph",
    "adapt": "_adapt",
    "BidiKVMiddleware": "middleware",
    "thread_report": "_threads",
    "close_thread": "_threads",
    "aclose_thread": "_threads",
}
"""By the module that defines each."""
TESTING = ("FakeRouter", "ToolCall", "Received")
SHOWN_WITH_A_CLASS = {
    "OpenAI": ("_Shared", "_SyncCalls"),
    "AsyncOpenAI": ("_AsyncCalls",),
}
"""Where the methods of ours stand that a class inherits: they are shown with it."""
HIDDEN = {"copy", "request", "links", "hints", "next_index", "tool_wait_s", "format", "with_options"}
"""Public for other modules, or as in the openai package."""


class Warnings(logging.Handler):
    """Collects what griffe finds wrong with docstrings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.told: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a message."""
        self.told.append(record.getMessage())


def load() -> Any:
    """The package, read and not run. Its folder has another name than it."""
    return griffe.load(
        "bidikv",
        search_paths=[ROOT / "build" / "types"],
        docstring_parser="google",
        docstring_options={"warn_unknown_params": True},
        allow_inspection=False,
    )


def page(package: Any) -> str:
    """The whole page.

    Raises:
        SystemExit: A public name is in no group, or has no docstring.
    """
    exported = {str(name).strip("'\"") for name in package.exports or ()} - {"__version__"}
    listed = {name for names in GROUPS.values() for name in names}
    if exported != listed:
        sys.exit(f"not in a group of the reference, or not exported: {sorted(exported ^ listed)}")
    parts = [
        "# API reference of the SDK",
        "Written by `scripts/api_reference.py` from the docstrings; change those.",
    ]
    for title, names in GROUPS.items():
        parts.append(f"## {title}")
        for name in names:
            parts += entry(f"bidikv.{name}", find(package, name), package)
    parts.append("## bidikv.integrations")
    parts += text(package["integrations"])
    for name, home in INTEGRATIONS.items():
        parts += entry(f"bidikv.integrations.{name}", package["integrations"][home][name], package)
    parts.append("## bidikv.testing")
    parts += text(package["testing"])
    for name in TESTING:
        parts += entry(f"bidikv.testing.{name}", package["testing"][name], package)
    return "\n\n".join(parts) + "\n"


def find(package: Any, name: str) -> Any:
    """Where an exported name is defined."""
    found = next(
        (m[name] for m in package.modules.values() if name in m.members and not m[name].is_alias), None
    )
    return found if found is not None else sys.exit(f"nothing defines {name}")


def entry(title: str, item: Any, package: Any) -> list[str]:
    """One name: its signature, what it says, and its methods."""
    parts = [f"### {title}"]
    if item.is_function:
        parts.append(f"```python\n{signature(item)}\n```")
    parts += text(item)
    if item.is_class:
        bases = [package["client"][base] for base in SHOWN_WITH_A_CLASS.get(item.name, ())]
        for owner in [item, *bases]:
            for member in owner.members.values():
                if member.name.startswith("_") or member.name in HIDDEN or member.is_alias:
                    continue
                if member.is_attribute and "property" not in member.labels and member.docstring is not None:
                    parts.append(f"- `{member.name}`: {' '.join(member.docstring.value.split())}")
                if member.is_function and member.docstring is not None:
                    label = f"#### {item.name}.{member.name}"
                    parts += [label, f"```python\n{signature(member)}\n```", *text(member)]
                elif "property" in member.labels and member.docstring is not None:
                    parts.append(f"- `{member.name}`: {member.docstring.value.strip()}")
    return parts


def signature(function: Any) -> str:
    """A definition's first line, without `self`."""
    parameters = [p for p in function.parameters if p.name not in {"self", "cls"}]
    kinds = [p.kind.value for p in parameters]
    shown = []
    for place, (parameter, kind) in enumerate(zip(parameters, kinds, strict=True)):
        if kind == "keyword-only" and not {"keyword-only", "variadic positional"} & set(kinds[:place]):
            shown.append("*")
        prefix = {"variadic positional": "*", "variadic keyword": "**"}.get(kind, "")
        spelt = f"{prefix}{parameter.name}"
        if parameter.annotation is not None:
            spelt += f": {parameter.annotation}"
        if parameter.default is not None and not prefix:
            spelt += f" = {parameter.default}"
        shown.append(spelt)
        if kind == "positional-only" and "positional-only" not in kinds[place + 1 :]:
            shown.append("/")
    start = "async def" if "async" in function.labels else "def"
    returns = f" -> {function.returns}" if function.returns is not None else ""
    return f"{start} {function.name}({', '.join(shown)}){returns}"


def text(item: Any) -> list[str]:
    """A docstring's sections.

    Raises:
        SystemExit: There is none.
    """
    if item.docstring is None:
        sys.exit(f"{item.path} has no docstring")
    parts = []
    for section in item.docstring.parse("google"):
        kind = section.kind.value
        if kind == "text":
            parts.append(section.value.strip())
        elif kind in {"parameters", "attributes"}:
            parts.append("\n".join(f"- `{one.name}`: {flat(one.description)}" for one in section.value))
        elif kind == "raises":
            parts.append(
                "\n".join(f"- raises `{one.annotation}`: {flat(one.description)}" for one in section.value)
            )
        elif kind == "returns":
            parts.append("\n".join(f"- returns: {flat(one.description)}" for one in section.value))
        else:
            sys.exit(f"{item.path}: a section {kind!r} that the reference does not know")
    return parts


def flat(description: str) -> str:
    """On one line."""
    return " ".join(description.split())


def main() -> int:
    """Write the page, or check it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail if the page is not up to date"
    )
    check = parser.parse_args().check
    warnings = Warnings()
    logging.getLogger("griffe").addHandler(warnings)
    written = page(load())
    for message in warnings.told:
        print(message, file=sys.stderr)
    if check:
        before = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
        sys.stderr.writelines(
            difflib.unified_diff(before.splitlines(True), written.splitlines(True), "docs/api.md", "now")
        )
        return int(before != written or bool(warnings.told))
    PAGE.write_text(written, encoding="utf-8")
    return int(bool(warnings.told))


if __name__ == "__main__":
    sys.exit(main())
