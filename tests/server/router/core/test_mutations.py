"""What clients change in a history by themselves does not hide the conversation; everything else does."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bidikv_server.router.core.digests import chain
from bidikv_server.router.core.ids import Scope
from bidikv_server.router.core.mutations import system_text, unmarked
from bidikv_server.router.core.paths import CHAT_PATH, MESSAGES_PATH, RESPONSES_PATH

SCOPE = Scope("t", "m")
BILLING = "x-anthropic-billing-header: cc_version=2.1.37.0d9; cc_entrypoint=cli; cch={};"
YOU = "You are Claude Code, Anthropic's official CLI for Claude."
A, B = ({"type": "text", "text": text} for text in "ab")
HI = {"role": "user", "content": "hi"}
F = {"type": "function", "function": {"name": "f"}}
G = {"type": "function", "function": {"name": "g"}}


def claude(cch, system=YOU, **fields):
    """The head of a request as Claude Code sends it."""
    blocks = [{"type": "text", "text": BILLING.format(cch)}, {"type": "text", "text": system}]
    return {"system": blocks, "messages": [HI], **fields}


def chat(system, *messages, **fields):
    return {"messages": [{"role": "system", "content": system}, *(messages or [HI])], **fields}


def digests(path, body, **options):
    return chain(body, SCOPE, path, **options).prefixes


SAME = [
    (MESSAGES_PATH, claude("fa690"), claude("eb6c6")),
    (MESSAGES_PATH, claude("fa690"), {"system": YOU, "messages": [HI]}),
    (
        MESSAGES_PATH,
        claude("1", YOU + "\n<total_tokens>14999436 tokens left</total_tokens>"),
        claude(
            "2", YOU + "\n<total_tokens>99 tokens left</total_tokens>\n<total_tokens>9 left</total_tokens>"
        ),
    ),
    (
        MESSAGES_PATH,
        {"messages": [{"role": "system", "content": "<total_tokens>9 left</total_tokens>"}, HI]},
        {"messages": [HI]},
    ),
    (
        MESSAGES_PATH,
        {"messages": [{"role": "user", "content": [A, {**B, "cache_control": {"type": "ephemeral"}}]}]},
        {"messages": [{"role": "user", "content": [A, B]}]},
    ),
    (CHAT_PATH, chat(f"{BILLING.format(1)}\n{YOU}"), chat(f"{BILLING.format(2)}\n{YOU}")),
    (CHAT_PATH, chat(f"Today is 2026-11-30.\n{YOU}"), chat(f"Today is 2026-12-01T08:15:30Z.\n{YOU}")),
    (CHAT_PATH, chat(YOU, tools=[F, G]), chat(YOU, tools=[G, {**F, "cache_control": {}}])),
    (
        CHAT_PATH,
        chat([{"type": "text", "text": BILLING.format(1)}, {"type": "text", "text": YOU}]),
        chat(YOU),
    ),
    (
        RESPONSES_PATH,
        {"instructions": f"{BILLING.format(1)}\n{YOU}", "input": "hi"},
        {"instructions": f"{BILLING.format(2)}\n{YOU}", "input": [HI]},
    ),
]


@pytest.mark.parametrize(("path", "one", "other"), SAME)
def test_known_mutations_do_not_count(path, one, other):
    """Both requests are the same turn."""
    assert digests(path, one) == digests(path, other) != ()


@pytest.mark.parametrize(("path", "one", "other"), SAME)
def test_switched_off(path, one, other):
    """Without normalising, a changed head is another conversation."""
    assert digests(path, one, normalise=False) != digests(path, other, normalise=False)


@pytest.mark.parametrize(
    ("path", "one", "other"),
    [
        (MESSAGES_PATH, claude("1"), claude("1", "You are another.")),
        (CHAT_PATH, chat(YOU), chat(YOU, {"role": "user", "content": "hi 2026-11-30"})),
        (CHAT_PATH, chat(YOU, tools=[F]), chat(YOU, tools=[F, G])),
        (
            CHAT_PATH,
            {"messages": [{"role": "user", "content": BILLING.format(1)}]},
            {"messages": [{"role": "user", "content": BILLING.format(2)}]},
        ),
        (RESPONSES_PATH, {"input": "hi"}, {"input": "ho"}),
    ],
)
def test_everything_else_counts(path, one, other):
    """Other texts, other tools, and whatever a user says."""
    assert digests(path, one) != digests(path, other)


@given(st.text(alphabet=st.sampled_from(" \n<>xt-:Z0123456789T") | st.characters(), max_size=200))
def test_normalising_twice_changes_nothing_more(text):
    """What is left has nothing to leave out."""
    once = system_text(text)
    assert system_text(once) == once


@given(st.text(max_size=50), st.text(alphabet="abcdef0123456789", max_size=8), st.text(max_size=50))
def test_the_hash_never_shows(before, cch, after):
    """Wherever the line stands in the system text."""
    line = BILLING.format(cch)
    assert system_text(f"{before}\n{line}\n{after}") == system_text(
        f"{before}\n{BILLING.format('other')}\n{after}"
    )


@pytest.mark.parametrize("part", ["text", None, 7, {"type": "text"}, {"cache_control": 1, "a": [1]}])
def test_marks_are_taken_off_a_copy(part):
    """The client's part stays as it came."""
    before = json.dumps(part)
    assert "cache_control" not in json.dumps(unmarked(part))
    assert json.dumps(part) == before


def test_long_white_space_costs_nothing():
    """A hostile system text takes no longer than it is long."""
    assert system_text(" " * 2_000_000 + "<total_tokens>1</total_tokens>").strip() == ""
