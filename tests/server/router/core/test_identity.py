"""The conversation's name, from every convention that a client may use."""

import json
import re
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bidikv_server.router.core.identity import ILL_FORMED, NO_SOURCE, SOURCES, Identity, identify

UUID = "0b9e6a4e-7d2f-4a51-9c3e-5f0f7c1d2e3a"
PARENT = "11111111-2222-3333-4444-555555555555"

CONVENTIONS = {
    "body_session_id": ({"session_id": UUID}, {}),
    "conversation_header": ({}, {"x-conversation-id": UUID, "x-session-id": "group"}),
    "x_session_id": ({}, {"x-session-id": UUID, "x-parent-session-id": PARENT}),
    "dynamo": ({}, {"x-dynamo-session-id": UUID, "x-dynamo-parent-session-id": PARENT}),
    "claude_code_agent": ({}, {"x-claude-code-agent-id": UUID, "x-claude-code-session-id": PARENT}),
    "claude_code": ({}, {"x-claude-code-session-id": UUID}),
    "codex_thread": ({}, {"thread-id": UUID, "session-id": PARENT, "x-codex-parent-thread-id": PARENT}),
    "codex_session": ({}, {"session_id": UUID}),
    "session_affinity": ({}, {"x-session-affinity": UUID, "x-correlation-id": PARENT}),
    "opencode": ({}, {"x-opencode-session": UUID}),
    "deepseek": ({}, {"x-deepseek-harness-session-id": UUID}),
    "smg": ({}, {"x-smg-routing-key": UUID}),
    "litellm": ({}, {"x-litellm-session-id": UUID}),
    "litellm_body": ({"litellm_session_id": UUID}, {}),
    "litellm_metadata": ({"metadata": {"session_id": UUID}}, {}),
    "conversation_id": ({"conversation_id": UUID}, {}),
    "vllm_xargs": ({"vllm_xargs": {"session_id": UUID}}, {}),
    "responses": ({"conversation": {"id": UUID}}, {}),
    "baggage": ({}, {"baggage": f"a=b, gen_ai.conversation.id={UUID};p=1,session.id=other"}),
    "claude_user_id": ({"metadata": {"user_id": f"user_1_account_2_session_{UUID}"}}, {}),
}


@pytest.mark.parametrize("source", CONVENTIONS)
def test_every_convention_is_read(source):
    """Its name, and where the convention says so, its parent."""
    body, headers = CONVENTIONS[source]
    identity = identify(body, headers)
    assert (identity.session, identity.source) == (UUID, source)
    assert identity.parent == (
        PARENT if any("parent" in name or "agent" in name for name in headers) else None
    )


def test_the_table_is_complete():
    """Every source has a convention above, and a row in the documentation."""
    names = [source.name for source in SOURCES]
    document = (Path(__file__).parents[4] / "docs" / "identity.md").read_text()
    document = document[: document.index("\n## ")]
    assert list(CONVENTIONS) == names
    assert re.findall(r"^\| `(\w+)` \|", document, flags=re.MULTILINE) == names


@given(st.permutations(sorted(CONVENTIONS)), st.integers(1, 6))
def test_the_first_convention_decides(names, count):
    """Whatever else a request carries."""
    chosen = [source.name for source in SOURCES if source.name in names[:count]]
    body, headers = {}, {}
    for name in chosen:
        marked = json.loads(json.dumps(CONVENTIONS[name]).replace(UUID, f"{name}-1"))
        body = {**marked[0], **body}
        headers = {**marked[1], **headers}
    identity = identify(body, headers)
    first = next(source for source in SOURCES if source.find(body, headers) is not None)
    assert (identity.source, identity.session) == (first.name, first.find(body, headers))


@pytest.mark.parametrize(
    "name", ["", "two words", "x" * 257, "naïve", "null", "None", "undefined", 7, ["a"], {"id": 1}]
)
def test_an_ill_formed_name_is_no_name(name):
    """And the next convention is not asked instead: it may mean something else."""
    identity = identify({"session_id": name}, {"x-session-id": UUID})
    assert identity == Identity(source=ILL_FORMED)


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        ({}, {}),
        ({"prompt_cache_key": UUID, "user": UUID, "safety_identifier": UUID, "rid": UUID}, {}),
        ({}, {"x-user-id": UUID, "x-tenant-id": UUID, "x-litellm-trace-id": UUID}),
        (
            {"previous_response_id": UUID},
            {"x-request-id": UUID, "x-correlation-id": UUID, "traceparent": UUID},
        ),
        ({"metadata": {"user_id": "user_1"}}, {"x-session-token": "pod", "baggage": "a=b,broken,=,;"}),
        (
            {"metadata": "text", "conversation": None, "vllm_xargs": []},
            {"x-codex-turn-metadata": "{not json"},
        ),
        ({}, {"x-codex-turn-metadata": "[1]"}),
    ],
)
def test_groups_and_requests_are_no_conversations(body, headers):
    """What names a user, a cache group, a request or a pod would join conversations that have nothing in common."""
    assert identify(body, headers) == Identity(source=NO_SOURCE)


def test_codex_threads_are_told_apart():
    """One session, several threads; also when the thread is only in the turn's metadata."""
    headers = {
        "session-id": PARENT,
        "x-codex-turn-metadata": json.dumps({"session_id": PARENT, "thread_id": UUID}),
    }
    assert identify({}, headers).session == UUID


def test_encoded_baggage_is_decoded():
    """W3C baggage percent-encodes."""
    assert identify({}, {"baggage": "session.id=" + quote("a b", safe="")}) == Identity(source=ILL_FORMED)
    assert identify({}, {"baggage": "session.id=a%2Fb"}).session == "a/b"


@pytest.mark.parametrize(("value", "final"), [("true", True), ("1", True), ("false", False), ("", False)])
def test_a_dynamo_client_can_end_its_conversation(value, final):
    """With its own header."""
    headers = {"x-dynamo-session-id": UUID, "x-dynamo-session-final": value}
    assert identify({}, headers).final is final


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
FIELDS = ["session_id", "conversation", "metadata", "vllm_xargs", "conversation_id", "litellm_session_id"]
HEADERS = ["x-session-id", "baggage", "x-codex-turn-metadata", "thread-id", "x-dynamo-session-id"]


@given(
    st.dictionaries(st.sampled_from(FIELDS), json_values, max_size=6),
    st.dictionaries(st.sampled_from(HEADERS), st.text(max_size=40), max_size=5),
)
def test_nothing_a_client_sends_is_an_error(body, headers):
    """Identity never fails a request."""
    identity = identify(body, headers)
    assert identity.session is None or len(identity.session) <= 256
