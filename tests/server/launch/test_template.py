"""The tool-calling chat template, through the tokenizer that an engine would load."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase

if TYPE_CHECKING:
    from pathlib import Path

SEEDED = settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Looks a word up.",
            "parameters": {
                "type": "object",
                "properties": {"word": {"type": "string"}},
                "required": ["word"],
            },
        },
    }
]

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
values = st.one_of(
    texts, st.integers(-99, 99), st.booleans(), st.none(), st.lists(st.integers(0, 9), max_size=3)
)
arguments = st.dictionaries(texts, values, max_size=3)


def call(given_arguments):
    return {"id": "c", "type": "function", "function": {"name": "look_up", "arguments": given_arguments}}


messages = st.lists(
    st.one_of(
        st.builds(
            lambda role, text: {"role": role, "content": text}, st.sampled_from(["user", "assistant"]), texts
        ),
        st.builds(lambda text: {"role": "tool", "content": text, "tool_call_id": "c"}, texts),
        st.builds(
            lambda text, calls: {
                "role": "assistant",
                "content": text,
                "tool_calls": [call(c) for c in calls],
            },
            st.one_of(st.none(), texts),
            st.lists(arguments, min_size=1, max_size=2),
        ),
        st.builds(lambda text: {"role": "system", "content": text}, texts),
    ),
    min_size=1,
    max_size=6,
)
tool_sets = st.sampled_from([None, TOOLS])


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(smollm2)


def render(tokenizer, history, tools=None, *, prompt=False) -> str:
    return str(
        tokenizer.apply_chat_template(history, tools=tools, tokenize=False, add_generation_prompt=prompt)
    )


@SEEDED
@given(history=messages, tools=tool_sets, data=st.data())
def test_a_longer_history_only_appends(tokenizer, history, tools, data):
    """What was rendered of a history stays, byte for byte, whatever follows."""
    count = data.draw(st.integers(1, len(history)))
    assert render(tokenizer, history, tools).startswith(render(tokenizer, history[:count], tools))


@SEEDED
@given(history=messages, tools=tool_sets, answer=texts)
def test_an_answer_is_rendered_as_it_was_generated(tokenizer, history, tools, answer):
    """Prompt, generated text and end token are the start of the next turn's prompt."""
    generated = render(tokenizer, history, tools, prompt=True) + answer + "<|im_end|>"
    following = [*history, {"role": "assistant", "content": answer}, {"role": "user", "content": "next"}]
    assert render(tokenizer, following, tools, prompt=True).startswith(generated)


@SEEDED
@given(history=messages, given_arguments=arguments)
def test_a_tool_call_is_rendered_as_its_bare_arguments(tokenizer, history, given_arguments):
    """A named tool_choice makes the engine write the arguments alone, and the template writes the same."""
    generated = json.dumps(given_arguments, ensure_ascii=False, indent=2)
    prompt = render(tokenizer, history, TOOLS, prompt=True)
    message = {"role": "assistant", "content": "", "tool_calls": [call(given_arguments)]}
    after = render(tokenizer, [*history, message, {"role": "tool", "content": "42"}], TOOLS)
    assert after == f"{prompt}{generated}<|im_end|>\n<|im_start|>tool\n42<|im_end|>\n"


def test_arguments_given_as_text_stay_as_they_are(tokenizer):
    """A client that passes the arguments unparsed gets them back unchanged."""
    message = {"role": "assistant", "content": None, "tool_calls": [call('{"word":  "odd"}')]}
    assert render(tokenizer, [{"role": "user", "content": "?"}, message]).endswith(
        '<|im_start|>assistant\n{"word":  "odd"}<|im_end|>\n'
    )


def test_the_default_system_prompt_gives_way(tokenizer):
    """A conversation that brings its own system message gets no other."""
    own = render(
        tokenizer, [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}], TOOLS
    )
    default = render(tokenizer, [{"role": "user", "content": "Hi"}])
    assert own.startswith("<|im_start|>system\nBe brief.\n\n")
    assert own.count("<|im_start|>system") == default.count("<|im_start|>system") == 1


def test_tools_are_listed_in_the_system_message(tokenizer):
    """Each with its name, description and parameters, in the layout of a call."""
    system = render(tokenizer, [{"role": "user", "content": "Hi"}], TOOLS).partition("<|im_end|>")[0]
    listing = json.dumps(TOOLS[0]["function"]["parameters"], indent=2)
    assert system.endswith(f"\n\nTools:\n- look_up: Looks a word up. {listing}")


def test_special_tokens_are_single_tokens(tokenizer):
    """ChatML's marks are never split, so that a turn's end is one token."""
    assert tokenizer.encode("<|im_start|>user\nHi<|im_end|>\n")[0] == tokenizer.bos_token_id
    assert tokenizer.encode("<|im_end|>") == [tokenizer.eos_token_id]
