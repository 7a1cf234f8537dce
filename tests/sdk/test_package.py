"""What `import bidikv` costs and offers."""

from __future__ import annotations

import subprocess
import sys

import pytest

import bidikv
import bidikv.integrations

HEAVY = (
    "torch",
    "vllm",
    "nixl",
    "langgraph",
    "langchain_core",
    "openai",
    "pydantic",
    "tenacity",
    "asyncio",
    "http.server",
    "httpx2",
    "bidikv_server",
)


def loaded_after(code):
    """The heavy modules that a fresh interpreter has loaded after running `code`."""
    program = f"{code}\nimport sys\nprint(*[name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_import_loads_nothing_heavy():
    """Importing the package, naming a conversation and asking about a response load no library."""
    assert (
        loaded_after(
            "import bidikv; c = bidikv.conversation('a'); c.report(); c.close(); bidikv.reuse_of(None)"
        )
        == set()
    )


def test_client_loads_no_framework():
    """The client loads the OpenAI client and what that needs, and no engine or framework."""
    loaded = loaded_after("import bidikv; bidikv.OpenAI(api_key='k')")
    assert "openai" in loaded
    heavy = {
        "torch",
        "vllm",
        "nixl",
        "langgraph",
        "langchain_core",
        "bidikv_server",
        "tenacity",
        "http.server",
    }
    assert not loaded & heavy


def test_exports():
    """Every exported name exists, and no other."""
    assert all(hasattr(bidikv, name) for name in bidikv.__all__)
    assert set(bidikv.__all__) <= set(dir(bidikv))
    with pytest.raises(AttributeError, match="nothing"):
        _ = bidikv.nothing
    with pytest.raises(AttributeError, match="nothing"):
        _ = bidikv.integrations.nothing


def test_missing_integration_names_the_extra():
    """Without LangChain, asking for the chat model says what to install."""
    code = (
        "import sys; sys.modules['langchain_core'] = None\n"
        "import bidikv, bidikv.integrations\n"
        "try: bidikv.integrations.BidiKVChat\n"
        "except bidikv.MissingIntegrationError as error:\n"
        "    assert isinstance(error, ImportError) and error.extra == 'langgraph'\n"
        "    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 'pip install "bidikv[langgraph]"' in done.stdout
