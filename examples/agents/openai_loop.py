"""A tool loop on the plain client: no framework, a `with` block says which conversation the calls belong to.

python -m bidikv.examples.openai_loop --base-url http://127.0.0.1:8000/v1 --model MODEL --root sdk
"""

from __future__ import annotations

import json
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import bidikv
from bidikv.examples.program import run_example
from bidikv.examples.source_tools import SourceTools
from bidikv.examples.turns import PLAN, SYSTEM, TurnRecord, parse_arguments, question_of

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator

    from bidikv.examples.turns import Run, Toolbox


def run_loop(
    client: bidikv.OpenAI,
    toolbox: Toolbox,
    *,
    on_turn: Callable[[TurnRecord], None] | None = None,
    **options: Any,
) -> list[TurnRecord]:
    """Ask one question and run all its turns; see `loop`.

    Raises:
        openai.APIError: The router cannot be reached, or fails a call.
    """
    records = []
    for record in loop(client, toolbox, **options):
        records.append(record)
        if on_turn:
            on_turn(record)
    return records


def loop(
    client: bidikv.OpenAI,
    toolbox: Toolbox,
    *,
    model: str,
    question: str,
    turns: int,
    max_tokens: int = 60,
    thread: str | None = None,
    extra_body: dict[str, Any] | None = None,
    on_token: Callable[[str], None] | None = None,
) -> Iterator[TurnRecord]:
    """Ask one question: `turns` model calls, of which the last answers in text.

    Raises:
        openai.APIError: The router cannot be reached, or fails a call.
    """
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    schemas: Any = toolbox.schemas()
    conversation = client.conversation(thread)
    for index in range(turns):
        tool = PLAN[index % len(PLAN)] if index < turns - 1 else None
        choice: Any = {"type": "function", "function": {"name": tool}} if tool else "none"
        # Entered for the call alone: a generator's caller shares its context.
        with conversation:
            stream = client.chat.completions.create(
                model=model,
                messages=messages,
                tools=schemas,
                tool_choice=choice,
                temperature=0,
                max_tokens=max_tokens,
                stream=True,
                extra_body=extra_body,
            )
            answer = read(stream, on_token)
        messages.append(answer)
        messages += [run_tool(toolbox, call) for call in answer.get("tool_calls", [])]
        yield record_of(index, answer, stream)


def read(stream: Any, on_token: Callable[[str], None] | None) -> dict[str, Any]:
    """Collect a streamed answer into the message that the next turn sends back, unchanged."""
    text = ""
    calls: dict[int, dict[str, Any]] = {}
    for chunk in stream:
        for choice in chunk.choices:
            piece = choice.delta.content or ""
            text += piece
            for delta in choice.delta.tool_calls or ():
                call = calls.setdefault(
                    delta.index,
                    {"id": delta.id, "type": "function", "function": {"name": "", "arguments": ""}},
                )
                call["function"]["name"] = delta.function.name or call["function"]["name"]
                call["function"]["arguments"] += delta.function.arguments or ""
                piece += delta.function.arguments or ""
            if on_token:
                on_token(piece)
    if not calls:
        return {"role": "assistant", "content": text}
    # Null where the model said nothing but a call, as its message says that is not streamed.
    return {"role": "assistant", "content": text or None, "tool_calls": list(calls.values())}


def run_tool(toolbox: Toolbox, call: dict[str, Any]) -> dict[str, Any]:
    """Answer one tool call; a call that cannot be made is answered with an error."""
    try:
        result = toolbox.call(call["function"]["name"], json.loads(call["function"]["arguments"]))
    except ValueError:
        result = "error: the arguments are not JSON"
    return {"role": "tool", "tool_call_id": call["id"], "content": result}


def record_of(index: int, answer: dict[str, Any], stream: object, *, agent: str = "") -> TurnRecord:
    """What an answer and its stream say about their turn."""
    called = answer.get("tool_calls", [{}])[0].get("function", {})
    return TurnRecord.of(
        bidikv.turn_of(stream) or bidikv.TurnReport(),
        index=index,
        text=answer["content"] or "",
        tool_name=called.get("name"),
        tool_args=called.get("arguments"),
        agent=agent,
    )


def play(arguments: argparse.Namespace, run: Run) -> Iterator[list[TurnRecord]]:
    """Run the loop on one question."""
    with bidikv.OpenAI(
        base_url=arguments.base_url, api_key=arguments.api_key, readback=run.readback
    ) as client:
        for record in loop(
            client,
            SourceTools(arguments.root),
            model=arguments.model,
            question=question_of(arguments),
            turns=arguments.turns,
            max_tokens=arguments.max_tokens,
            thread=run.thread,
            extra_body=run.extra_body(),
            on_token=run.on_token,
        ):
            yield [record]


def main(argv: list[str] | None = None) -> int:
    """Run the loop on one question."""
    arguments = parse_arguments("A tool loop on the plain client, over a source directory.", argv)
    return run_example(arguments, partial(play, arguments))


if __name__ == "__main__":
    sys.exit(main())
