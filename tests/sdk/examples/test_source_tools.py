"""The example tools: what they show, and what they keep to themselves."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bidikv.examples.source_tools import SourceTools


@pytest.fixture
def root(tmp_path):
    """A small tree, with secrets beside it and links that lead to them."""
    (tmp_path / "secret.py").write_text("password = 1\n")
    tree = tmp_path / "tree"
    (tree / "pkg").mkdir(parents=True)
    (tree / ".git").mkdir()
    (tree / ".git" / "x.py").write_text("hidden = 1\n")
    (tree / "a.py").write_text("".join(f"def f{number}(): return {number}\n" for number in range(100)))
    (tree / "pkg" / "b.py").write_text("import os\n")
    (tree / "pkg" / "data.bin").write_bytes(b"\xff")
    (tree / "link.py").symlink_to(tmp_path / "secret.py")
    (tree / "out").symlink_to(tmp_path)
    return tree


def test_answers(root):
    """Files are listed, searched and read."""
    tools = SourceTools(root)
    assert tools.list_files() == "a.py 2080\npkg/b.py 10"
    assert tools.list_files("pkg") == "pkg/b.py 10"
    assert tools.search("import") == "pkg/b.py:1: import os"
    assert tools.read_lines("a.py", 99) == "99: def f98(): return 98\n100: def f99(): return 99"
    assert tools.read_lines("a.py", 0).startswith("1: ")
    assert tools.read_lines("a.py", 500) == "a.py has 100 lines"
    assert tools.search("nowhere") == "no line contains 'nowhere'"


@pytest.mark.parametrize(
    "path", ["..", "../secret.py", "link.py", "out/secret.py", "/etc/passwd", "\0", "pkg/data.bin"]
)
def test_nothing_outside(root, path):
    """Neither dots, links nor absolute paths lead out, and other kinds of files are not read."""
    tools = SourceTools(root)
    assert tools.read_lines(path).startswith("error: no file")
    assert tools.list_files(path).startswith("error: no directory")


def test_nothing_hidden(root):
    """Searches stay out of hidden directories and of links that lead away."""
    assert "hidden" not in SourceTools(root).search("= 1")
    assert "password" not in SourceTools(root).search("= 1")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(
    max_chars=st.integers(1, 600),
    pattern=st.sampled_from(["def ", "import", "z"]),
    start=st.integers(-5, 200),
)
def test_bounded(root, max_chars, pattern, start):
    """Answers that quote sources are never longer than allowed."""
    tools = SourceTools(root, max_chars=max_chars)
    assert len(tools.list_files()) <= max_chars
    assert len(tools.search(pattern)) <= max(max_chars, len(f"no line contains {pattern!r}"))
    assert len(tools.read_lines("a.py", start)) <= max(max_chars, len("a.py has 100 lines"))


def test_schemas_offer_what_exists(root):
    """Every offered argument gives a proper answer, and the offer is the same each time."""
    tools = SourceTools(root)
    schemas = tools.schemas()
    assert json.dumps(schemas) == json.dumps(SourceTools(root).schemas())
    for schema in schemas:
        function = schema["function"]
        for position in range(2):
            arguments = {
                name: member["enum"][min(position, len(member["enum"]) - 1)]
                for name, member in function["parameters"]["properties"].items()
            }
            assert not tools.call(function["name"], arguments).startswith("error")


def test_mistaken_calls(root):
    """Calls that cannot be made are answered, not raised."""
    tools = SourceTools(root)
    assert tools.call("fly", {}) == "error: no tool 'fly'"
    assert tools.call("search", {"what": 1}) == "error: search does not take ['what']"
    assert tools.search("") == "error: nothing to search for"
