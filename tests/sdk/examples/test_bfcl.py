"""The agent with BFCL's tools: the package's own code runs, in our scenario."""

from __future__ import annotations

import importlib
import itertools
import json
import sys

import pytest
from other_versions import install

from bidikv.errors import ConfigurationError
from bidikv.examples import bfcl_agent
from bidikv.examples.bfcl_tools import BfclTools

VERSION = "2026.3.23"


@pytest.fixture(scope="module")
def bfcl(tmp_path_factory):
    """The package without what it asks for beside its tools; it is not installed, because its pins fit no engine."""
    folder = tmp_path_factory.mktemp("bfcl")
    install(folder, f"bfcl-eval=={VERSION}", what="bfcl-eval")
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    yield
    sys.path.remove(str(folder))
    for name in [name for name in sys.modules if name.partition(".")[0] == "bfcl_eval"]:
        del sys.modules[name]


def office(**options):
    return BfclTools(bfcl_agent.STATE, **options)


@pytest.mark.usefixtures("bfcl")
class TestTools:
    """The package's classes, as tools."""

    def test_they_run_and_keep_their_state(self):
        """A ticket that was opened can be read; our scenario's own stays as it is for the next agent."""
        tools = office()
        assert json.loads(tools.call("ls", {})) == {
            "current_directory_content": ["minutes.txt", "budget.txt", "archive"]
        }
        assert json.loads(tools.call("create_ticket", {"title": "A"}))["id"] == 2
        assert json.loads(tools.call("get_ticket", {"ticket_id": 2}))["title"] == "A"
        assert "error" in json.loads(office().call("get_ticket", {"ticket_id": 2}))

    def test_schemas_are_json_schemas(self):
        """The package's own names of types are gone, all through, and its classes' preamble with them."""
        schemas = office().schemas()
        assert len(schemas) == 27
        spelt = json.dumps(schemas)
        assert '"dict"' not in spelt
        assert '"float"' not in spelt
        assert "Tool description" not in spelt
        assert schemas[0]["function"]["parameters"]["properties"]["file_name"]["type"] == "string"

    def test_every_choice_gives_a_proper_answer(self):
        """What the small model is offered exists."""
        tools = office(only=tuple(bfcl_agent.CHOICES), choices=bfcl_agent.CHOICES)
        for schema in tools.schemas():
            function = schema["function"]
            properties = function["parameters"]["properties"]
            assert function["parameters"]["required"] == list(properties)
            for values in itertools.product(*(member["enum"] for member in properties.values())):
                if function["name"] == "get_ticket" and values == (2,):
                    continue  # the ticket that the agent is to open
                answer = tools.call(function["name"], dict(zip(properties, values, strict=True)))
                assert "error" not in answer, (function["name"], values)

    def test_mistaken_calls(self):
        """Calls that cannot be made are answered, not raised."""
        tools = office(only=("ls",))
        assert tools.call("cat", {"file_name": "minutes.txt"}) == "error: no tool 'cat'"
        assert tools.call("ls", {"what": 1}).startswith("error: ls: ")

    def test_what_the_package_does_not_have(self):
        """Unknown classes and tools are named."""
        with pytest.raises(ConfigurationError, match="no tools named 'Fly'"):
            BfclTools({"Fly": {}})
        with pytest.raises(ConfigurationError, match="no tool 'fly'"):
            office(only=("fly",))


@pytest.mark.usefixtures("bfcl")
class TestAgent:
    """The loop over the user's questions."""

    def test_prescribed(self, router):
        """Each question takes its tools and then an answer, in one conversation whose prompts only grow."""
        with router.client() as client:
            tools = office(only=tuple(bfcl_agent.CHOICES), choices=bfcl_agent.CHOICES)
            agent = bfcl_agent.Office(client, tools, {"model": "m"})
            turns = list(agent.turns("t", bfcl_agent.Run("t")))
        assert [turn.tool_name for turn in turns] == [
            "ls", "cat", "grep", None, "get_ticket", "create_ticket", None, "tail", "wc", None,
        ]  # fmt: skip
        assert len(set(router.sessions)) == 1
        assert all(
            after["messages"][: len(before["messages"])] == before["messages"]
            for before, after in itertools.pairwise(router.bodies)
        )
        results = [m["content"] for m in router.bodies[-1]["messages"] if m["role"] == "tool"]
        assert len(results) == 7
        assert not [result for result in results if result.startswith("error")]

    def test_free(self, router):
        """A model that answers at once has answered the question."""
        with router.client() as client:
            agent = bfcl_agent.Office(client, office(), {"model": "m"}, free=True)
            turns = list(agent.turns("t", bfcl_agent.Run("t")))
        assert [turn.text for turn in turns] == [router.text] * 3
        assert {body["tool_choice"] for body in router.bodies} == {"auto"}


def test_without_the_package(capsys, monkeypatch):
    """The program says how to get it."""
    monkeypatch.setitem(sys.modules, "bfcl_eval.constants.executable_backend_config", None)
    assert bfcl_agent.main(["--model", "m"]) == 2
    assert "pip install --no-deps bfcl-eval" in capsys.readouterr().err
