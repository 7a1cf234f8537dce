"""Rules of the house that no linter knows, checked on the source itself."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("sdk", "server", "examples")
MODULES = sorted(path for folder in PACKAGES for path in (ROOT / folder).rglob("*.py"))
CORES = ("server/router/core", "server/connector/core")
FORBIDDEN_IN_CORES = frozenset(
    {
        "aiohttp",
        "anyio",
        "asyncio",
        "logging",
        "nixl",
        "os",
        "socket",
        "threading",
        "time",
        "torch",
        "uvicorn",
    }
    | {"vllm", "zmq"}
)
MAX_LINES = 400
TEXT = frozenset(
    {".cfg", ".ci", ".css", ".html", ".ini", ".jinja", ".js", ".json", ".md", ".py", ".sh", ".svg", ".toml"}
    | {".txt", ".yaml", ".yml", ""}
)
# Written apart, so that this file does not break the rule that it checks.
REGISTRY_HOSTS = (
    "pypi" + ".org",
    "python" + "hosted",
    "download." + "pytorch",
    "npm" + "js",
    "crates" + ".io",
)
MACHINE_PATHS = ("/opt/" + "wheels", "/work/" + "main", "/work/" + "shared", "/root" + "/")


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imported(path: Path) -> set[str]:
    """Top-level names of everything that a module imports, inside functions too."""
    names = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.partition(".")[0])
    return names


def text_files() -> list[Path]:
    folders = (".ci", "benchmarks", "deploy", "docs", "examples", "scripts", "sdk", "server", "tests")
    nested = [path for folder in folders for path in (ROOT / folder).rglob("*")]
    top = [path for path in ROOT.glob("*") if path.name != ".git"]  # a file in a git worktree
    return sorted(
        path
        for path in top + nested
        if path.is_file() and path.suffix in TEXT and "__pycache__" not in path.parts
    )


@pytest.mark.parametrize("folder", CORES)
def test_cores_are_pure(folder):
    """No I/O, no clock, no engine: what a core needs is passed to it."""
    broken = {
        name(path): used
        for path in (ROOT / folder).rglob("*.py")
        if (used := imported(path) & FORBIDDEN_IN_CORES)
    }
    assert broken == {}


def test_cores_never_await():
    """A core is called, and returns."""
    waits = (ast.Await, ast.AsyncFor, ast.AsyncWith, ast.AsyncFunctionDef)
    broken = [
        name(path)
        for folder in CORES
        for path in (ROOT / folder).rglob("*.py")
        if any(isinstance(node, waits) for node in ast.walk(tree(path)))
    ]
    assert broken == []


def test_modules_stay_small():
    """Above 400 lines a module has two purposes."""
    assert {
        name(p): n for p in MODULES if (n := len(p.read_text(encoding="utf-8").splitlines())) > MAX_LINES
    } == {}


def test_no_except_hides_everything():
    """An error is caught by name; only a top loop may catch all, and then it logs the traceback."""
    broken = [
        f"{name(path)}:{node.lineno}"
        for path in MODULES
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ExceptHandler) and catches_everything(node) and not logs_traceback(node)
    ]
    assert broken == []


def catches_everything(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(isinstance(kind, ast.Name) and kind.id in {"Exception", "BaseException"} for kind in kinds)


def logs_traceback(handler: ast.ExceptHandler) -> bool:
    calls = [node.func for node in ast.walk(handler) if isinstance(node, ast.Call)]
    return any(isinstance(call, ast.Attribute) and call.attr == "exception" for call in calls)


def test_no_file_names_a_registry_or_this_machine():
    """Where packages come from, and where this was written, is the machine's own business."""
    signs = re.compile("|".join(re.escape(sign) for sign in REGISTRY_HOSTS + MACHINE_PATHS))
    broken = {
        name(path): found[0] for path in text_files() if (found := signs.findall(path.read_text("utf-8")))
    }
    assert broken == {}


def test_every_module_states_its_purpose():
    """One line at the top; package markers may be empty."""
    broken = [
        name(path)
        for path in MODULES
        if path.read_text(encoding="utf-8").strip() and not ast.get_docstring(tree(path))
    ]
    assert broken == []


def test_every_test_states_a_behaviour():
    """A docstring in one line."""
    broken = [
        f"{name(path)}:{node.lineno}"
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        for node in ast.walk(tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
        and "\n" in (ast.get_docstring(node) or "\n")
    ]
    assert broken == []


def test_packages_are_imported_under_their_own_names():
    """`sdk` and `server` are folders; as imports they would be second copies of every module."""
    everything = [*MODULES, *(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]
    assert {name(path) for path in everything if imported(path) & {"sdk", "server"}} == set()
