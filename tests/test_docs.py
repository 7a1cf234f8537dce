"""What the documentation names exists."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
FAILURES = (TESTS.parent / "docs" / "failures.md").read_text(encoding="utf-8")
ROWS = {row.split(" ", 2)[1]: row.split(" | ") for row in FAILURES.splitlines() if re.match(r"\| F\d+ ", row)}
NAMED = re.compile(r"`([\w/]+\.py)::(\w+)`")


def located(path: str) -> Path:
    """A test file, as docs/failures.md abbreviates it."""
    return TESTS / re.sub(r"^flow/", "server/connector/flow/", path)


def test_every_field_failure_has_one_row():
    """F1 to F30, in order, each with what stock does, what we do, and how it is shown."""
    assert list(ROWS) == [f"F{number}" for number in range(1, 31)]
    assert {
        name for name, cells in ROWS.items() if len(cells) != 4 or not all(map(str.strip, cells))
    } == set()
    assert FAILURES.count("\n| F") == 30


def test_every_row_names_tests_that_exist():
    """A renamed test is renamed in the document too."""
    missing = []
    for name, cells in ROWS.items():
        named = NAMED.findall(cells[3])
        assert len(named) == cells[3].count("`") // 2, f"{name}: not a test's path and name"
        assert named, name
        for path, test in named:
            tree = ast.parse(located(path).read_text(encoding="utf-8"))
            functions = {
                node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            }
            if test not in functions or not test.startswith("test_"):
                missing.append(f"{name}: {path}::{test}")
    assert missing == []


def test_links_between_documents_lead_somewhere():
    """Relative links of README, CONTRIBUTING, CHANGELOG and docs."""
    root = TESTS.parent
    broken = [
        f"{page.name}: {target}"
        for page in [*root.glob("*.md"), *root.glob("docs/**/*.md"), *root.glob("deploy/*.md")]
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
        if not (page.parent / target).exists()
    ]
    assert broken == []


@pytest.mark.parametrize(("name", "count"), [("tutorial", 8), ("langgraph", 6)])
def test_a_page_runs_as_it_stands(monkeypatch, name, count):
    """Its Python, block after block, in one session."""
    if name == "langgraph":
        pytest.importorskip("langchain_openai", reason="the page adapts its model")
    for variable in ("BASE_URL", "API_KEY", "SESSION_SECRET", "READBACK", "DISABLED", "ON_DRIFT", "RESTORE"):
        monkeypatch.delenv(f"BIDIKV_{variable}", raising=False)
    page = TESTS.parent / "docs" / f"{name}.md"
    text = page.read_text(encoding="utf-8")
    blocks = list(re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    assert len(blocks) == count
    session = {"__name__": name}
    for block in blocks:
        # On the page's own lines, so that a traceback names them.
        code = "\n" * text[: block.start(1)].count("\n") + block[1]
        exec(compile(code, str(page), "exec"), session)  # noqa: S102 - what the page shows


def test_the_api_reference_is_up_to_date():
    """It is what the docstrings say now, and those have nothing wrong; else `scripts/api_reference.py` writes it anew."""
    script = TESTS.parent / "scripts" / "api_reference.py"
    done = subprocess.run(
        [sys.executable, str(script), "--check"], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr[-3000:]
