"""A tool loop on the plain client: no framework, a `with` block says which conversation the calls belong to.

python -m bidikv.examples.openai_loop --base-url http://127.0.0.1:8000/v1 --model MODEL --root sdk
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import openai

import bidikv
from bidikv.examples.source_tools import SourceTools
from bidikv.examples.turns import PLAN, SYSTEM, TurnRecord, parse_arguments

if TYPE_CHECKING:
    from collections.abc import Callable


def run_loop(
    client: bidikv.OpenAI,
    toolbox: SourceTools,
    *,
    model: str,
    question: str,
    turns: int,
    max_tokens: int = 60,
    thread: str | None = None,
    on_turn: Callable[[TurnRecord], None] | None = None,
    on_token: Callable[[str], None] | None = None,
) -> list[TurnRecord]:
    """Ask one question: `turns` model calls, of which the last answers in text.

    Raises:
        openai.APIError: The router cannot be reached, or fails a call.
    """
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    schemas: Any = toolbox.schemas()
    records: list[TurnRecord] = []
    with client.conversation(thread):
        for index in range(turns):
            tool = PLAN[index % len(PLAN)] if index < turns - 1 else None
            choice: Any = {"type": "function", "function": {"name": tool}} if tool else "none"
            stream = client.chat.completions.create(
                model=model,
                messages=messages,
                tools=schemas,
                tool_choice=choice,
                temperature=0,
                max_tokens=max_tokens,
                stream=True,
            )
            answer = _read(stream, on_token)
            messages.append(answer)
            messages += [_run(toolbox, call) for call in answer.get("tool_calls", [])]
            records.append(_record(index, answer, bidikv.turn_of(stream) or bidikv.TurnReport()))
            if on_turn:
                on_turn(records[-1])
    return records


def _read(stream: Any, on_token: Callable[[str], None] | None) -> dict[str, Any]:
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
    answer: dict[str, Any] = {"role": "assistant", "content": text}
    return {**answer, "tool_calls": list(calls.values())} if calls else answer


def _run(toolbox: SourceTools, call: dict[str, Any]) -> dict[str, Any]:
    try:
        result = toolbox.call(call["function"]["name"], json.loads(call["function"]["arguments"]))
    except ValueError:
        result = "error: the arguments are not JSON"
    return {"role": "tool", "tool_call_id": call["id"], "content": result}


def _record(index: int, answer: dict[str, Any], report: bidikv.TurnReport) -> TurnRecord:
    called = answer.get("tool_calls", [{}])[0].get("function", {})
    return TurnRecord(
        index=index,
        text=answer["content"],
        tool_name=called.get("name"),
        tool_args=called.get("arguments"),
        ttft_s=report.ttft_s,
        session=report.session,
        reason=report.reason,
        prompt_tokens=report.prompt_tokens,
        remote_tokens=report.remote_tokens,
        local_tokens=report.local_tokens,
        computed_tokens=report.computed_tokens,
    )


def main(argv: list[str] | None = None) -> int:
    """Run the loop on one question."""
    arguments = parse_arguments("A tool loop on the plain client, over a source directory.", argv)
    try:
        run_loop(
            bidikv.OpenAI(base_url=arguments.base_url, api_key="none"),
            SourceTools(arguments.root),
            model=arguments.model,
            question=arguments.question,
            turns=arguments.turns,
            max_tokens=arguments.max_tokens,
            thread=arguments.thread,
            on_turn=lambda record: print(f"\n{record.line()}"),
            on_token=lambda text: print(text, end="", flush=True),
        )
    except openai.APIConnectionError as error:
        print(f"cannot reach the router at {arguments.base_url}: {error.__cause__ or error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
