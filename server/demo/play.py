"""Play one conversation of the example LangGraph agent through the router, and pair a run with its comparison."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from bidikv.examples.langgraph_agent import build_agent, run_agent
from bidikv.examples.turns import SYSTEM
from bidikv.integrations.langgraph import BidiKVChat
from bidikv_server.demo.results import Turn
from bidikv_server.demo.workload import reused_generated_tokens

if TYPE_CHECKING:
    from collections.abc import Callable

    from bidikv.examples.source_tools import SourceTools
    from bidikv.examples.turns import TurnRecord
    from bidikv_server.demo.workload import Workload


Number = TypeVar("Number", int, float)


class DemoError(Exception):
    """A turn came back without the account of its reuse, so there is nothing to measure."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Where conversations are played.

    Attributes:
        base_url: The router, with `/v1`.
        model: Served model name.
        toolbox: The agent's tools.
        workload: How long each conversation is.
    """

    base_url: str
    model: str
    toolbox: SourceTools
    workload: Workload

    def play(
        self, questions: list[str], *, readback: bool, on_turn: Callable[[TurnRecord], None]
    ) -> list[TurnRecord]:
        """One conversation in a thread of its own; turns are numbered through all its questions.

        A cache salt of its own keeps it from finding another run's blocks in any engine's prefix cache.
        """
        run = uuid.uuid4().hex
        chat = BidiKVChat(
            model=self.model,
            base_url=self.base_url,
            temperature=0,
            max_tokens=self.workload.max_tokens,
            extra_body={"cache_salt": run},
            readback=readback,
        )
        agent = build_agent(chat, self.toolbox)
        records: list[TurnRecord] = []

        def note(record: TurnRecord) -> None:
            records.append(replace(record, index=len(records)))
            on_turn(records[-1])

        for question in questions:
            turns = self.workload.turns_per_question
            run_agent(agent, thread_id=run, question=question, turns=turns, on_turn=note)
        return records

    def first_request(self, question: str) -> dict[str, Any]:
        """What the agent's first turn asks, for the engine's tokenizer to count."""
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
        return {"model": self.model, "messages": messages, "tools": self.toolbox.schemas()}


def pair(history: int, on: list[TurnRecord], off: list[TurnRecord]) -> list[Turn]:
    """Turns of the run with readback beside those without.

    Raises:
        DemoError: A turn has no account of its reuse.
    """
    previous = [None, *(record.prompt_tokens for record in on)]
    return [
        _turn(history, record, other, before)
        for record, other, before in zip(on, off, previous[:-1], strict=True)
    ]


def _turn(history: int, on: TurnRecord, off: TurnRecord, previous_prompt_tokens: int | None) -> Turn:
    remote, local = _known(on.remote_tokens, on), _known(on.local_tokens, on)
    return Turn(
        history=history,
        turn=on.index,
        prompt_tokens=_known(on.prompt_tokens, on),
        reused_remote_tokens=remote,
        reused_local_tokens=local,
        reused_generated_tokens=reused_generated_tokens(remote + local, previous_prompt_tokens),
        computed_tokens=_known(on.computed_tokens, on),
        reason=on.reason or "",
        ttft_on_s=_known(on.ttft_s, on),
        ttft_off_s=_known(off.ttft_s, off),
        reused_local_tokens_off=_known(off.local_tokens, off),
        identical=_said(on) == _said(off),
        answer=on.text or f"{on.tool_name}({on.tool_args})",
    )


def _said(record: TurnRecord) -> tuple[str | None, ...]:
    return record.text, record.tool_name, record.tool_args


def _known(value: Number | None, record: TurnRecord) -> Number:
    if value is None:
        raise DemoError(f"turn {record.index} has no account of its reuse: {record.line()}")
    return value
