"""One suite for the clients, whatever answers: every form of call, in conversations that grow, end, fork and drift."""

from __future__ import annotations

import asyncio
import copy
import json
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import openai
import pydantic
import pytest
from target import Fake, said

import bidikv
from bidikv.headers import SESSION_HEADER
from bidikv.testing import ToolCall

SYSTEM = {"role": "system", "content": "You keep a lighthouse, and answer in one short sentence."}
STORY = (
    "The old lighthouse stood on a rock in the sea. Every evening the keeper climbed the stairs and lit the lamp. "
    "Ships from many countries passed, and the keeper wrote their names into a book. "
)
QUESTIONS = (
    "What did the keeper do?",
    "Which ships passed?",
    "Where did the lighthouse stand?",
    "When was the lamp lit?",
    "What was written into the book?",
    "Who climbed the stairs?",
    "Why is there a lamp?",
    "How old is the lighthouse?",
    "Is the sea calm?",
)
LOOK, ASK = (
    {
        "type": "function",
        "function": {
            "name": name,
            "description": text,
            "parameters": {
                "type": "object",
                "properties": {"what": {"type": "string", "enum": ["sea", "lamp", "rock"]}},
                "required": ["what"],
                "additionalProperties": False,
            },
        },
    }
    for name, text in (("look", "Look at something."), ("ask", "Ask somebody about it."))
)


class What(pydantic.BaseModel):
    """What a parsed call returns."""

    what: Literal["sea", "lamp", "rock"]


def user(text):
    return {"role": "user", "content": text}


class Talk:
    """A chat that grows: its history, and the requests with what they were answered."""

    def __init__(self, target, *questions, story=2, **fields):
        self._target = target
        self._questions = iter(questions or QUESTIONS)
        self._fields = {"model": target.model, "temperature": 0, "max_tokens": 12, **fields}
        self.messages = [SYSTEM, user(STORY * story + next(self._questions))]
        self.answered = []

    def request(self, **fields):
        """Arguments of the next call."""
        return {**self._fields, "messages": list(self.messages), **fields}

    def hear(self, message, **fields):
        """The model's answer to `request(**fields)`; the next question follows it."""
        self.answered.append((self.request(**fields), message))
        self.messages += [message, user(next(self._questions, "Go on."))]

    def ask(self, client, **fields):
        """One turn in the usual form; its response."""
        answer = client.chat.completions.create(**self.request(**fields))
        self.hear(bidikv.message_of(answer), **fields)
        return answer

    async def ask_async(self, client, **fields):
        """One turn in the usual form, of an asynchronous client."""
        answer = await client.chat.completions.create(**self.request(**fields))
        self.hear(bidikv.message_of(answer), **fields)
        return answer

    def check_answers(self):
        """Each turn's is the plain client's."""
        for request, message in self._target.compared(self.answered):
            self._target.same_as_plain(request, message)


def whole(chat, request):
    return chat.create(**request).choices[0].message


def streamed(chat, request):
    with chat.create(**request, stream=True) as chunks:
        for _ in chunks:
            pass
    return bidikv.message_of(chunks)


def helped(chat, request):
    with chat.stream(**request) as events:
        events.until_done()
    return bidikv.message_of(events)


def parsed(chat, request):
    answer = chat.parse(**request)
    assert isinstance(answer.choices[0].message.parsed, What)
    return bidikv.message_of(answer)


def raw(chat, request):
    return bidikv.message_of(chat.with_raw_response.create(**request))


def raw_stream(chat, request):
    with chat.with_raw_response.create(**request, stream=True).parse() as chunks:
        for _ in chunks:
            pass
    return bidikv.message_of(chunks)


def streaming_response(chat, request):
    with chat.with_streaming_response.create(**request) as response:
        return response.parse().choices[0].message


def lines(chat, request):
    with chat.with_streaming_response.create(**request, stream=True) as response:
        return joined(list(response.iter_lines()))


def joined(found):
    """The message that a stream's bytes say."""
    events = [json.loads(line.removeprefix("data: ")) for line in found if line.startswith("data: {")]
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    return {"role": "assistant", "content": "".join(delta.get("content") or "" for delta in deltas)}


FORMS = (whole, streamed, helped, parsed, raw, raw_stream, streaming_response, lines)
TIMED = {streamed, helped, raw_stream}


async def whole_async(chat, request):
    return (await chat.create(**request)).choices[0].message


async def streamed_async(chat, request):
    async with await chat.create(**request, stream=True) as chunks:
        async for _ in chunks:
            pass
    return bidikv.message_of(chunks)


async def helped_async(chat, request):
    async with chat.stream(**request) as events:
        await events.until_done()
    return bidikv.message_of(events)


async def parsed_async(chat, request):
    answer = await chat.parse(**request)
    assert isinstance(answer.choices[0].message.parsed, What)
    return bidikv.message_of(answer)


async def raw_async(chat, request):
    return bidikv.message_of(await chat.with_raw_response.create(**request))


async def streaming_response_async(chat, request):
    async with chat.with_streaming_response.create(**request) as response:
        return (await response.parse()).choices[0].message


async def lines_async(chat, request):
    async with chat.with_streaming_response.create(**request, stream=True) as response:
        return joined([line async for line in response.iter_lines()])


ASYNC_FORMS = (
    whole_async,
    streamed_async,
    helped_async,
    parsed_async,
    raw_async,
    streaming_response_async,
    lines_async,
)


def fields_of(form):
    """What a form of call asks for besides."""
    return {"response_format": What, "max_tokens": 40} if "parsed" in form.__name__ else {}


class ClientSuite:
    """To be run with a fixture `target`."""

    def test_every_form_of_a_chat(self, target):
        """Whole, streamed, by a helper, parsed, raw: turns of one conversation, each of which reads back the ones before."""
        client, talk = target.client(on_drift="raise"), Talk(target)
        with client.conversation("ticket", agent="keeper") as conversation:
            for form in FORMS:
                message = form(client.chat.completions, talk.request(**fields_of(form)))
                talk.hear(message, **fields_of(form))
        turns = conversation.turns
        target.check(turns, constrained=[FORMS.index(parsed)])
        assert [turn.index for turn in turns] == list(range(len(FORMS)))
        assert [turn.ttft_s is not None for turn in turns] == [form in TIMED for form in FORMS]
        assert [turn.drift.kind for turn in turns] == ["start"] + ["append"] * (len(FORMS) - 1)
        assert client.explain(conversation).advice.strip()
        target.explained(client, turns)
        talk.check_answers()

    def test_every_form_of_an_asynchronous_chat(self, target):
        """The asynchronous client does the same."""
        talk = Talk(target)

        async def run():
            async with target.async_client(on_drift="raise") as client:
                async with client.conversation("ticket") as conversation:
                    for form in ASYNC_FORMS:
                        message = await form(client.chat.completions, talk.request(**fields_of(form)))
                        talk.hear(message, **fields_of(form))
                assert (await client.explain(conversation)).advice
                return conversation

        turns = asyncio.run(run()).turns
        target.check(turns, constrained=[ASYNC_FORMS.index(parsed_async)])
        assert [turn.ttft_s is not None for turn in turns] == [False, True, True, *[False] * 4]
        talk.check_answers()

    def test_azures_clients(self, target):
        """Through a gateway that translates their paths, in a client of the user's own."""
        talk = Talk(target)

        async def run():
            async with target.through_gateway(bidikv.AsyncAzureOpenAI, "AsyncClient") as client:
                async with conversation:
                    await talk.ask_async(client)
                    talk.hear(await streamed_async(client.chat.completions, talk.request()))
                await conversation.aclose()

        with target.through_gateway(bidikv.AzureOpenAI) as client:
            with client.conversation("azure") as conversation:
                talk.ask(client)
                talk.hear(streamed(client.chat.completions, talk.request()))
                with client.conversation("responses"):
                    answer = client.responses.create(
                        model=target.model, input="Is it dark?", max_output_tokens=4
                    )
            asyncio.run(run())
        target.check(conversation.turns)
        assert bidikv.reuse_of(answer).reason == "new_conversation"
        talk.check_answers()

    def test_completions(self, target):
        """Prompts of plain text that grow: whole, streamed, raw."""
        client, prompt, asked = target.client(), STORY * 2, []
        with client.conversation("prose") as conversation:
            for form in ("whole", "streamed", "raw", "whole"):
                request = {"model": target.model, "prompt": prompt, "temperature": 0, "max_tokens": 12}
                if form == "streamed":
                    with client.completions.create(**request, stream=True) as chunks:
                        text = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
                elif form == "raw":
                    text = client.completions.with_raw_response.create(**request).parse().choices[0].text
                else:
                    text = client.completions.create(**request).choices[0].text
                asked.append((request, text))
                prompt += text + " And then the keeper said:"
        target.check(conversation.turns)
        assert [turn.ttft_s is not None for turn in conversation.turns] == [False, True, False, False]
        for request, text in target.compared(asked):
            again = target.ask_plain(lambda plain: plain.completions.with_raw_response.create, request)
            assert again.choices[0].text == text

    def test_responses(self, target):
        """Whole, streamed, by a helper, parsed, raw; with the model's own items as the history."""
        client, asked = target.client(on_drift="raise"), []
        items = [user(STORY * 2 + QUESTIONS[0])]
        with client.conversation("responses") as conversation:
            for form, question in zip(RESPONSE_FORMS, QUESTIONS[1:], strict=False):
                fields = {"model": target.model, "temperature": 0, "max_output_tokens": 12}
                if form is response_parsed:
                    fields |= {"text_format": What, "max_output_tokens": 40}
                request = {**fields, "input": list(items)}
                response = form(client.responses, request)
                asked.append((request, response))
                # Parsed items are not for sending back: older versions of openai warn of what they hold.
                written = {"role": "assistant", "content": response.output_text}
                items += [*([written] if form is response_parsed else response.output), user(question)]
        target.check(conversation.turns, constrained=[RESPONSE_FORMS.index(response_parsed)])
        timed = [response_streamed, response_helped]
        assert [turn.ttft_s is not None for turn in conversation.turns] == [
            f in timed for f in RESPONSE_FORMS
        ]
        self._as_plain_responses(target, asked)

    def test_responses_that_name_the_one_before(self, target):
        """The router leaves such a turn to the engine that keeps the response; what that says is what the whole history gives."""
        client = target.client()
        fields = {"model": target.model, "temperature": 0, "max_output_tokens": 12}
        first_input = user(STORY * 2 + QUESTIONS[0])
        with client.conversation("kept") as conversation:
            first = client.responses.create(**fields, input=[first_input])
            second = client.responses.create(**fields, input=QUESTIONS[1], previous_response_id=first.id)
            events = client.responses.create(
                **fields, input=QUESTIONS[2], previous_response_id=second.id, stream=True
            )
            third = list(events)[-1].response
        assert [turn.reason for turn in conversation.turns] == ["new_conversation"] + [
            "previous_response"
        ] * 2
        if isinstance(target, Fake):
            sent = [request.body.get("previous_response_id") for request in target.router.requests]
            assert sent == [None, first.id, second.id]
            assert third.id != second.id
            return
        items, asked = [first_input], []
        for response, question in ((first, QUESTIONS[1]), (second, QUESTIONS[2]), (third, None)):
            asked.append(({**fields, "input": list(items)}, response))
            items += [*response.output, user(question)]
        self._as_plain_responses(target, asked)

    @staticmethod
    def _as_plain_responses(target, asked):
        for request, response in target.compared(asked):
            form = "parse" if "text_format" in request else "create"
            again = target.ask_plain(lambda p, f=form: getattr(p.responses.with_raw_response, f), request)
            assert again.output_text == response.output_text
            assert again.output_text
            if isinstance(target, Fake):
                body = {**target.router.requests[-1].body}
                del body["cache_salt"]
                sent = [
                    {name: value for name, value in before.body.items() if name != "stream"}
                    for before in target.router.requests[:-1]
                ]
                assert body in sent

    @pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
    def test_a_tool(self, target, streams, caplog):
        """Called, run, answered; then sent back as a framework would spell it, and put right again."""
        client, talk = target.client(on_drift="raise"), Talk(target, *QUESTIONS[:2], max_tokens=40)
        form = streamed if streams else whole
        tools = [LOOK, ASK]
        named = {"tools": tools, "tool_choice": {"type": "function", "function": {"name": "look"}}}
        caplog.set_level(logging.DEBUG, "bidikv.links")
        target.reply(tool_calls=[ToolCall("look", '{ "what" :"sea"}', "call_1")])
        with client.conversation("tools") as conversation:
            message = form(client.chat.completions, talk.request(**named))
            talk.answered.append((talk.request(**named), message))
            text, ((name, arguments),) = said(message)
            assert (text, name) == ("", "look")
            call_id = message["tool_calls"][0]["id"] if streams else message.tool_calls[0].id
            with conversation.tool(name, expected_s=5):
                found = f"The {json.loads(arguments)['what']} is as it was yesterday."
            talk.messages += [message, {"role": "tool", "tool_call_id": call_id, "content": found}]
            none = {"tools": tools, "tool_choice": "none", "max_tokens": 12}
            talk.hear(form(client.chat.completions, talk.request(**none)), **none)
            written = json.dumps(json.loads(arguments), indent=1)
            call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": written}}
            respelt = [*talk.messages]
            # Whether the model's content was null or empty, a stream does not say: the caller's then stays.
            blank = None if streams else ""
            respelt[2] = {"role": "assistant", "content": blank, "tool_calls": [call]}
            request = {**talk.request(**none), "messages": respelt, "tools": tools[::-1]}
            talk.hear(form(client.chat.completions, request), **none)
        target.check(conversation.turns, constrained=[0])
        assert [turn.drift.kind for turn in conversation.turns] == ["start", "append", "append"]
        assert conversation.turns[2].restored[:2] == ("tools", "messages[2].tool_calls[0].function.arguments")
        assert [record for record in caplog.records if record.name == "bidikv.links"] == []
        talk.check_answers()

    def test_clients_made_of_clients(self, target):
        """Copies and wrapped clients go on with the conversation that the first one began, through its connections."""
        talk = Talk(target)
        first = target.client(openai.OpenAI, timeout=299)
        wrapped = bidikv.wrap(first, conversation="shared", on_drift="raise")
        for client in (
            wrapped,
            wrapped.copy(),
            wrapped.with_options(timeout=250),
            copy.copy(wrapped),
            bidikv.wrap(wrapped, readback=True),
        ):
            talk.ask(client)
            assert client._client is first._client
        target.check(wrapped._bidikv.conversation.turns)
        assert type(first) is openai.OpenAI
        talk.check_answers()

    def test_conversations_side_by_side(self, target):
        """Nested, in threads and in tasks at once: each goes on with its own."""
        client = target.client(on_drift="raise")
        talks = {
            name: Talk(target, f"And {name}? {QUESTIONS[0]}", *QUESTIONS[1:]) for name in ("oil", "wind")
        }
        outer, inner = (client.conversation(name) for name in talks)
        with outer:
            talks["oil"].ask(client)
            with inner:
                talks["wind"].ask(client)
            talks["oil"].ask(client)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(bidikv.run_in, inner, talks["wind"].ask, client).result()
        thread = threading.Thread(target=bidikv.run_in, args=(outer, talks["oil"].ask, client))
        thread.start()
        thread.join()

        async def task(other, talk, conversation):
            async with conversation:
                await talk.ask_async(other)

        async def both():
            async with target.async_client(on_drift="raise") as other:
                await asyncio.gather(task(other, talks["oil"], outer), task(other, talks["wind"], inner))

        asyncio.run(both())
        for conversation in (outer, inner):
            target.check(conversation.turns)
        assert outer.turns[0].key != inner.turns[0].key
        for talk in talks.values():
            talk.check_answers()

    def test_a_child_and_a_fork(self, target):
        """A child has a history of its own; a fork reads back what its parent's turn left, and the parent goes on too."""
        client, talk = target.client(on_drift="raise"), Talk(target)
        parent = client.conversation("parent", agent="boss")
        child, fork = parent.child("helper"), parent.fork("left")
        with parent:
            talk.ask(client)
        beside, other = Talk(target), Talk(target, "Help! " + QUESTIONS[3], QUESTIONS[4])
        beside.messages = [*talk.messages[:-1], user("And what if it rains?")]
        with child:
            other.ask(client)
            other.ask(client)
        with fork:
            beside.ask(client)
            beside.ask(client)
        with parent:
            talk.ask(client)
        target.check(parent.turns)
        target.check(child.turns)
        target.check(fork.turns, ["hit"])
        assert (
            fork.turns[0].remote_tokens >= (parent.turns[0].prompt_tokens - 1) // target.block * target.block
        )
        assert len({of.turns[0].key for of in (parent, child, fork)}) == 3
        for each in (talk, beside, other):
            each.check_answers()

    def test_what_is_said_of_turns(self, target):
        """A call on the side disturbs nothing, a final one ends all, and one that wants nothing kept gets that."""
        client, talk = target.client(), Talk(target)
        with client.conversation("hints") as conversation:
            talk.ask(client)
            with conversation.hint(kind="aux"):
                Talk(target, "Name this talk.").ask(client)
            with conversation.hint(wait_s=30, retain_s=300):
                talk.ask(client)
            with conversation.hint(final=True):
                talk.ask(client)
            talk.ask(client)
            with conversation.hint(retain_s=0):
                talk.ask(client)
            last = talk.ask(client)
        reasons = [turn.reason for turn in conversation.turns]
        assert [reasons[0], *reasons[2:]] == [
            "new_conversation", "hit", "hit", "released", "hit", "hit",
        ], reasons  # fmt: skip
        assert bidikv.reuse_of(last).remote_tokens > 0
        talk.check_answers()

    def test_the_end(self, target):
        """What is closed is cold, whoever closes it, and begins anew; decode hears of it, and of tools that run."""
        client, talk = target.client(), Talk(target)

        def tell(method, path="", **options):
            path = f"/bidikv/conversations/{conversation.turns[0].key}{path}"
            return set(target.reached(method(path, cast_to=object, **options)))

        with client.conversation("end") as conversation:
            talk.ask(client)
            told = tell(client.post, "/wait", body={"wait_s": 5}) | tell(client.delete)
            assert told == (set() if isinstance(target, Fake) else {"renewed", "released"})
            talk.ask(client)
            conversation.close()
            talk.ask(client)
            client.end(client.conversation("end"))

        async def run():
            async with target.async_client() as other, conversation:
                await talk.ask_async(other)
                await talk.ask_async(other)
                await conversation.aclose()
                await talk.ask_async(other)

        asyncio.run(run())
        cold = "new_conversation"
        target.check(conversation.turns, [cold, cold, cold, cold, "hit", cold])
        assert all(turn.remote_tokens == 0 for turn in conversation.turns if turn.reason == cold)
        # Cold turns are as good as the plain client's.
        talk.answered = [talk.answered[0], talk.answered[4]]
        talk.check_answers()

    def test_a_history_that_changes(self, target):
        """Each kind of change is told apart, costs what it has to, and gets the answer to what was sent."""
        seen = []
        client, talk = target.client(on_drift=seen.append), Talk(target, story=3)
        with client.conversation("drift") as conversation:
            talk.ask(client)
            second = talk.request()
            talk.ask(client)
            for change in (
                lambda m: m,
                lambda m: [*m[:3], user("Or of the rock?")],
                lambda m: m[:2],
                lambda m: [m[0], user(m[1]["content"].replace("What did", "Oh what did")), *m[2:]],
                lambda m: [{**m[0], "content": "Now you are a pirate, and you sing."}, *m[1:]],
            ):
                request = {**second, "messages": change(second["messages"])}
                message = whole(client.chat.completions, request)
                talk.answered.append((request, message))
            request = {**second, "tools": [LOOK], "tool_choice": "none"}
            answer = client.chat.completions.create(**request)
            talk.answered.append((request, answer.choices[0].message))
        turns = conversation.turns
        found = [(turn.drift.kind, turn.reason) for turn in turns]
        assert found[:3] == [("start", "new_conversation"), ("append", "hit"), ("retry", "hit")]
        assert found[3][0] == "fork"
        assert found[3][1] in {"hit", "hit_diverged"}
        assert found[4:6] == [("rewind", "hit"), ("edit", "hit_diverged")]
        assert [kind for kind, _ in found[6:]] == ["system", "tools"]
        assert {reason for _, reason in found[6:]} <= {"diverged", "hit_diverged"}
        assert [drift.kind for drift in seen] == ["edit", "system", "tools"]
        assert conversation.report().drifts == tuple(seen)
        assert [drift.path for drift in seen] == ["messages[1].content", "messages[0].content", "tools[look]"]
        explained = client.explain(turns[5])
        assert "messages[1].content" in str(explained)
        assert explained.advice
        strict = bidikv.wrap(client, on_drift="raise")
        with conversation, pytest.raises(bidikv.DriftError):
            whole(strict.chat.completions, {**second, "messages": [user("Ahoy!"), *second["messages"]]})
        assert len(conversation.turns) == len(found)
        target.explained(client, turns)
        talk.check_answers()

    def test_without(self, target):
        """Readback switched off is told as such; a client that is switched off names no conversation."""
        talk = Talk(target)
        client = target.client(conversation="off", readback=False)
        talk.ask(client)
        talk.ask(client)
        assert [turn.reason for turn in client._bidikv.conversation.turns] == ["readback_off"] * 2
        anonymous = target.client(conversation="off", enabled=False)
        answer = talk.ask(anonymous)
        assert bidikv.turn_of(answer).session is None
        # A real router finds what it goes on from, which kept nothing.
        assert bidikv.reuse_of(answer).reason in {"new_conversation", "not_retained"}
        assert bidikv.reuse_of(answer).remote_tokens == 0
        own = talk.ask(target.client(conversation="off"), extra_headers={SESSION_HEADER: "mine-and-mine"})
        assert bidikv.turn_of(own).session == "mine-and-mine"
        if isinstance(target, Fake):  # cold answers are as good as the plain client's
            talk.check_answers()

    def test_a_report(self, target):
        """Sums of the turns, and a table that says what became of each."""
        client, talk = target.client(), Talk(target)
        with client.conversation("report") as conversation:
            for stream in (False, True):
                answer = client.chat.completions.create(**talk.request(), stream=stream)
                if stream:
                    list(answer)
                talk.hear(bidikv.message_of(answer))
        report = conversation.report()
        assert report.prompt_tokens == report.reused_tokens + report.computed_tokens
        assert report.reused_tokens == report.remote_tokens == conversation.turns[1].remote_tokens > 0
        assert (report.ttft_s[0], report.drifts) == (None, ())
        assert report.ttft_s[1] > 0
        rows = str(report).splitlines()
        assert [row.split()[1] for row in rows[1:3]] == ["new_conversation", "hit"]


def response_whole(responses, request):
    return responses.create(**request)


def response_streamed(responses, request):
    with responses.create(**request, stream=True) as events:
        return list(events)[-1].response


def response_helped(responses, request):
    with responses.stream(**request) as events:
        return events.get_final_response()


def response_parsed(responses, request):
    response = responses.parse(**request)
    assert isinstance(response.output_parsed, What)
    return response


def response_raw(responses, request):
    return responses.with_raw_response.create(**request).parse()


RESPONSE_FORMS = (
    response_whole,
    response_streamed,
    response_helped,
    response_parsed,
    response_raw,
    response_whole,
)
