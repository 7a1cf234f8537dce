"""The Responses and Messages APIs through the router: the same two legs, their own bytes, their own errors."""

import json

import pytest
from fake_engine import Failure

from bidikv.headers import ReuseHeader

pytestmark = pytest.mark.anyio

RESPONSE = (
    b'{"id":"resp_x","created_at":1,"object":"response","output":[{"type":"reasoning","content":[{"text":"\\u00e9"}]},'
    b'{"type":"function_call","name":"f","arguments":"{\\"a\\": 1}"}],"kv_transfer_params":null,"usage":{"input_tokens":9}}'
)
MESSAGE = (
    b'{"id":"chatcmpl-1","type":"message","role":"assistant","content":[{"type":"thinking","thinking":"hm",'
    b'"signature":"s"},{"type":"tool_use","id":"t","name":"f","input":{"a":1.50}}],"stop_reason":"tool_use"}'
)
RESPONSE_EVENTS = (
    b'event: response.created\ndata: {"response":{"id":"resp_x"},"sequence_number":0}\n\n',
    b'event: response.in_progress\ndata: {"sequence_number":1}\n\n',
    b'event: response.output_text.delta\ndata: {"delta":"Hello","sequence_number":2}\n\n',
    b'event: response.completed\ndata: {"response":{"kv_transfer_params":null},"sequence_number":3}\n\n',
)
MESSAGE_EVENTS = (
    b'event: message_start\ndata: {"type":"message_start","message":{"id":"chatcmpl-1"}}\n\n',
    b'event: content_block_delta\ndata: {"type":"content_block_delta","delta":{"text":"Hello"}}\n\n',
    b'event: message_stop\ndata: {"type":"message_stop"}\n\ndata: [DONE]\n\n',
)
SESSION = {"X-Session-ID": "session-1"}


class Api:
    """One of the two APIs, as a client that sends its whole history."""

    def __init__(self, cluster, name):
        self.cluster = cluster
        self.path, self.answer, self.events = {
            "responses": ("/v1/responses", RESPONSE, RESPONSE_EVENTS),
            "messages": ("/v1/messages", MESSAGE, MESSAGE_EVENTS),
        }[name]
        for engine in cluster.decode:
            engine.answer, engine.events = self.answer, self.events

    async def turn(self, *contents, headers=None, **fields):
        """Post a conversation that alternates between user and assistant."""
        history = [
            {"role": "assistant" if number % 2 else "user", "content": content}
            for number, content in enumerate(contents)
        ]
        prompt = (
            {"input": history} if self.path == "/v1/responses" else {"messages": history, "max_tokens": 9}
        )
        body = {"model": "m", **prompt, **fields}
        return await self.cluster.client.post(self.path, json=body, headers=headers)


@pytest.fixture(params=["responses", "messages"])
def api(request, start):
    """A function that starts a cluster and gives one of the APIs in front of it."""

    async def _api(**settings):
        return Api(await start(**settings), request.param)

    return _api


def reason(answer):
    return ReuseHeader.parse(answer.headers["x-bidikv-reuse"]).reason


@pytest.mark.parametrize("headers", [SESSION, None])
async def test_next_turn_reads_back(api, headers):
    """Both legs run at the API's own endpoint, and the next turn asks the engine that holds the last one."""
    api = await api(decode=2)
    first = await api.turn("hi", headers=headers)
    second = await api.turn("hi", "Hello", "more", headers=headers)
    assert (first.content, second.content) == (api.answer, api.answer)
    assert [reason(first), reason(second)] == ["new_conversation", "hit"]
    (prefill, *_), decode = api.cluster.prefill, api.cluster.decode
    assert {leg.path for leg in (*prefill.seen, *decode[0].seen)} == {api.path}
    assert decode[1].seen == []
    assert prefill.prefilled[1].ours["sources"] == ["10.0.0.0:7000"]
    assert decode[0].answered[1].params["remote_request_id"] == "prefill-0-1"
    assert decode[0].answered[1].headers["x-session-id"] == second.headers["x-bidikv-session"]


async def test_stream_is_untouched(api):
    """Every event of the API passes as it came, and its end ends the turn."""
    api = await api()
    answer = await api.turn("hi", stream=True)
    assert answer.content == b"".join(api.events)
    assert len(api.cluster.app.table) == 1


async def test_a_stream_without_its_last_event(api):
    """It ends with an error in the API's shape, and the turn is not recorded."""
    api = await api()
    api.cluster.decode[0].failures.append(Failure(end_after=len(api.events) - 1))
    answer = await api.turn("hi", stream=True)
    passed = b"".join(api.events[:-1])
    assert answer.content.startswith(passed + b"event: error\ndata: ")
    told = json.loads(answer.content.removeprefix(passed + b"event: error\ndata: "))
    assert told["type"] == "error"
    if api.path == "/v1/responses":
        assert (told["code"], told["sequence_number"]) == ("engine_failed", 3)
    else:
        assert told["error"]["type"] == "api_error"
    assert len(api.cluster.app.table) == 0


async def test_a_cut_within_the_last_event(api):
    """Half of the last event is no end."""
    api = await api()
    whole = b"".join(api.events).removesuffix(b"data: [DONE]\n\n")
    api.cluster.decode[0].events = (whole[:-4], b"never")
    api.cluster.decode[0].failures.append(Failure(cut_after=1))
    answer = await api.turn("hi", stream=True)
    assert answer.content.startswith(whole[:-4] + b"\n\nevent: error\n")
    assert len(api.cluster.app.table) == 0


async def test_a_stream_that_begins_with_an_error(api):
    """Nothing was shown yet: another engine answers."""
    api = await api(decode=2)
    head = api.events[:2] if api.path == "/v1/responses" else ()
    api.cluster.decode[0].events = (
        *head,
        b'event: error\ndata: {"type":"error","error":{"message":"x"}}\n\n',
    )
    answer = await api.turn("hi", stream=True)
    assert answer.content == b"".join(api.events)
    assert len(api.cluster.decode[1].answered) == 1


async def test_filled_in_transfer_params_are_concealed(api):
    """Neither a whole answer nor the last event of a stream shows a handle."""
    api = await api()
    handle = b'"kv_transfer_params":{"remote_host":"10.0.0.1"}'
    engine = api.cluster.decode[0]
    if api.path == "/v1/responses":
        engine.answer = RESPONSE.replace(b'"kv_transfer_params":null', handle)
        engine.events = (
            *RESPONSE_EVENTS[:-1],
            RESPONSE_EVENTS[-1].replace(b'"kv_transfer_params":null', handle),
        )
        assert (await api.turn("hi", stream=True)).content == b"".join(RESPONSE_EVENTS)
    else:
        engine.answer = MESSAGE.replace(b'"stop_reason"', handle + b',"stop_reason"')
    assert (await api.turn("hi")).content == api.answer


async def test_token_ids_come_from_prefill(api):
    """These APIs return no ids themselves, so prefill's connector is asked, and decode gets them."""
    api = await api()
    await api.turn("hi")
    leg, final = api.cluster.prefill[0].prefilled[0], api.cluster.decode[0].answered[0]
    assert leg.ours["return_token_ids"] is True
    assert "return_token_ids" not in leg.body
    assert final.params["prompt_token_ids"] == [11, 22, 33]


async def test_stock_prefill_returns_no_token_ids(api):
    """Then decode renders itself, and that is counted."""
    api = await api()
    api.cluster.prefill[0].account = None
    await api.turn("hi")
    assert "prompt_token_ids" not in api.cluster.decode[0].answered[0].params
    page = (await api.cluster.client.get("/metrics")).text
    assert 'bidikv_router_prompt_tokenisations_total{outcome="not_returned"} 1.0' in page


@pytest.mark.parametrize("status", [400, 404, 500])
async def test_engines_errors_pass(api, status):
    """An engine's error comes out as it went in."""
    api = await api(prefill_fallback=False)
    api.cluster.decode[0].failures.append(Failure(status, b'{"odd":  "bytes"}'))
    answer = await api.turn("hi")
    assert (answer.status_code, answer.content) == (status, b'{"odd":  "bytes"}')


async def test_prefill_that_fails_at_half_an_answer(start):
    """The Messages API reads prefill's one token as an answer: whether the request is wrong is for decode to say."""
    api = Api(await start(), "messages")
    api.cluster.prefill[0].failures.append(Failure(400, b'{"type":"error"}'))
    answer = await api.turn("hi")
    assert answer.content == MESSAGE
    assert reason(answer) == "unsupported"


async def test_errors_of_ours(api):
    """What the router itself refuses has the API's shape and names the field."""
    api = await api()
    answer = await api.cluster.client.post(api.path, json={"model": "m"})
    assert answer.status_code == 400
    if api.path == "/v1/responses":
        assert answer.json()["error"]["param"] == "input"
    else:
        assert answer.json()["type"] == "error"
        assert answer.json()["error"]["type"] == "invalid_request_error"
        assert "'messages'" in answer.json()["error"]["message"]


async def test_keys_are_checked(api):
    """Without a key there is no turn, and engines get a salt of the tenant's and never the key."""
    api = await api(api_keys={"key-a": "a"})
    assert (await api.turn("hi")).status_code == 401
    assert (await api.turn("hi", headers={"x-api-key": "key-a"})).status_code == 200
    (leg,) = api.cluster.decode[0].answered
    assert len(leg.body["cache_salt"]) == 32
    assert "key-a" not in json.dumps([leg.headers, leg.body])


async def test_credentials_separate_without_keys(api):
    """Anthropic's `x-api-key` is a credential like any other: two of them share nothing."""
    api = await api()
    for key in ("a", "b"):
        answer = await api.turn("hi", headers={**SESSION, "x-api-key": key})
        assert reason(answer) == "new_conversation"
    first, second = api.cluster.prefill[0].prefilled
    assert first.ours["salt"] != second.ours["salt"]


async def test_a_head_that_changes_by_itself(start):
    """Claude Code's attribution line hides no conversation; engines get it as it came, and compare for themselves."""
    api = Api(await start(), "messages")
    line = "x-anthropic-billing-header: cc_version=2; cch={};"
    for cch, contents in (("a", ["hi"]), ("b", ["hi", "Hello", "more"])):
        system = [{"type": "text", "text": line.format(cch)}, {"type": "text", "text": "You are."}]
        answer = await api.turn(*contents, system=system)
    assert reason(answer) == "hit"
    for leg in (api.cluster.prefill[0].prefilled[1], api.cluster.decode[0].answered[1]):
        assert leg.body["system"] == system


async def test_a_changing_head_counts_when_told_so(start):
    """With the setting off it is another conversation."""
    api = Api(await start(normalise_history=False), "messages")
    for number in range(2):
        answer = await api.turn("hi", system=f"x-anthropic-billing-header: cch={number};\nYou are.")
    assert reason(answer) == "new_conversation"
