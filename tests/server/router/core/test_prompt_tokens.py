"""Token ids pass from prefill to decode as they are, and only where no answer shows it."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bidikv_server.router.core.accounts import read_prefill_answer
from bidikv_server.router.core.content import media_of
from bidikv_server.router.core.json_bytes import encode
from bidikv_server.router.core.paths import CHAT_PATH, COMPLETIONS_PATH, MESSAGES_PATH, RESPONSES_PATH
from bidikv_server.router.core.prompt_tokens import Tokenised, obstacle, with_token_ids

IMAGE = [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": "data:"}}]
ids = st.lists(st.integers(0, 2**32), min_size=1, max_size=50)
texts = st.text(max_size=20)


def answer_with(place, token_ids, text=""):
    """A prefill answer that says the ids where this endpoint's does."""
    handle = {"h": 1, "bidikv": {"v": 1, "t": text}}
    answer = {"t": text, "choices": [{"index": 0, "text": text}], "kv_transfer_params": handle}
    inside = {"answer": answer, "choice": answer["choices"][0], "account": handle["bidikv"]}[place]
    inside["prompt_token_ids"] = token_ids
    return answer


@given(
    st.sampled_from(["answer", "choice", "account"]),
    ids,
    texts,
    st.sampled_from([(",", ":"), (", ", ": ")]),
)
def test_read_from_an_answer(place, token_ids, text, separators):
    """The list comes out as it stands there, and is no part of the handle."""
    raw = json.dumps(answer_with(place, token_ids, text), separators=separators).encode()
    read = read_prefill_answer(raw)
    assert read.token_ids == json.dumps(token_ids, separators=separators).encode()
    assert read.handle == {"h": 1}


@given(texts)
def test_text_that_speaks_of_token_ids(text):
    """Nothing inside a JSON string is taken for a list of them."""
    raw = json.dumps({"t": f'{text}"prompt_token_ids": [1, 2]'}).encode()
    assert read_prefill_answer(raw).token_ids is None


@pytest.mark.parametrize(
    "echoed",
    [
        {"tools": [{"type": "function", "name": "f", "parameters": {"prompt_token_ids": [1, 2, 3]}}]},
        {"text": {"format": {"type": "json_schema", "schema": {"prompt_token_ids": [1, 2, 3]}}}},
        {"metadata": {"prompt_token_ids": [1, 2, 3]}, "output": [{"prompt_token_ids": [1, 2, 3]}]},
        {"choices": [{"message": {"prompt_token_ids": [1, 2, 3]}}, {"prompt_token_ids": [1, 2, 3]}]},
    ],
)
def test_what_an_answer_repeats_of_the_client(echoed):
    """Decode never gets a client's numbers for the prompt's tokens, wherever the API writes them into its answer."""
    raw = json.dumps({**echoed, **answer_with("account", [7, 8, 9]), **echoed}).encode()
    assert read_prefill_answer(raw).token_ids == b"[7, 8, 9]"
    raw = json.dumps({**echoed, "kv_transfer_params": {"h": 1}}).encode()
    assert read_prefill_answer(raw).token_ids is None


@pytest.mark.parametrize(
    "value", ["null", "[]", "[ ]", '["a"]', "[[1]]", "[-1]", "[1.5]", "[true]", '"[1]"', "{}", "1"]
)
@pytest.mark.parametrize("place", ["answer", "choice", "account"])
def test_what_is_no_list_of_token_ids(place, value):
    """Is none, and the handle stays what it is."""
    raw = json.dumps(answer_with(place, "ids")).replace('"ids"', value).encode()
    assert (read_prefill_answer(raw).token_ids, read_prefill_answer(raw).handle) == (None, {"h": 1})


@given(
    st.dictionaries(texts, st.integers() | texts, max_size=5),
    ids,
    st.sampled_from([CHAT_PATH, RESPONSES_PATH, MESSAGES_PATH]),
)
def test_decode_leg_with_messages(fields, token_ids, path):
    """The body says what it said, and the ids stand among the transfer parameters."""
    body = {**fields, "model": "m", "kv_transfer_params": {"h": 1}}
    written = json.loads(encode(with_token_ids(path, body, json.dumps(token_ids).encode())))
    assert written == {**body, "kv_transfer_params": {"h": 1, "prompt_token_ids": token_ids}}


@given(st.dictionaries(texts, st.integers() | texts, max_size=5), ids)
def test_decode_leg_of_a_completion(fields, token_ids):
    """The ids are the prompt."""
    body = {**fields, "prompt": "text", "kv_transfer_params": {"h": 1}}
    written = json.loads(encode(with_token_ids(COMPLETIONS_PATH, body, json.dumps(token_ids).encode())))
    assert written == {**body, "prompt": token_ids}


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        (CHAT_PATH, {"messages": [{"role": "user", "content": "x"}]}, None),
        (CHAT_PATH, {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}, None),
        (CHAT_PATH, {"messages": [{"role": "user", "content": IMAGE}]}, Tokenised.MEDIA),
        (CHAT_PATH, {"messages": [{"role": "user", "content": [{"image_url": {}}]}]}, Tokenised.MEDIA),
        (CHAT_PATH, {"messages": [{"role": "user", "content": [{"type": 7}]}]}, Tokenised.MEDIA),
        (CHAT_PATH, {"messages": [], "echo": True}, Tokenised.NEEDS_TEXT),
        (CHAT_PATH, {"messages": [], "return_prompt_text": True}, Tokenised.NEEDS_TEXT),
        (CHAT_PATH, {"messages": [], "return_token_ids": True, "echo": False}, None),
        (COMPLETIONS_PATH, {"prompt": "x"}, None),
        (COMPLETIONS_PATH, {"prompt": ["x"]}, None),
        (COMPLETIONS_PATH, {"prompt": [1, 2]}, Tokenised.GIVEN),
        (COMPLETIONS_PATH, {"prompt": [[1, 2]]}, Tokenised.GIVEN),
        (COMPLETIONS_PATH, {"prompt": "x", "echo": True}, Tokenised.NEEDS_TEXT),
        (COMPLETIONS_PATH, {"prompt": "x", "suffix": "y"}, Tokenised.NEEDS_TEXT),
        (RESPONSES_PATH, {"input": "x"}, None),
        (RESPONSES_PATH, {"input": "x", "enable_response_messages": True}, Tokenised.NEEDS_TEXT),
        (
            RESPONSES_PATH,
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}]},
            Tokenised.MEDIA,
        ),
        (
            RESPONSES_PATH,
            {
                "input": [
                    {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image"}]}
                ]
            },
            Tokenised.MEDIA,
        ),
        (RESPONSES_PATH, {"input": [{"type": "reasoning", "summary": []}, {"type": "function_call"}]}, None),
        (
            MESSAGES_PATH,
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]},
            None,
        ),
        (
            MESSAGES_PATH,
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "tool_result", "content": [{"type": "image", "source": {}}]}],
                    }
                ]
            },
            Tokenised.MEDIA,
        ),
    ],
)
def test_who_finds_the_tokens(path, body, expected):
    """Decode does where media are rendered, where the answer shows the text, and where the client has."""
    assert obstacle(path, body, has_media=media_of(body).present) is expected
