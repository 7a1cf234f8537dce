"""A planner that sends out sub-agents: all of them at once, each in a conversation of its own, for as many rounds as asked.

The sub-agents are forks of the planner's conversation: they know what it knew, the router finds what both share, and each
goes on for itself. Their findings come back to the planner as the answers to its tool call.

    python -m bidikv.examples.fan_out --base-url http://127.0.0.1:8000/v1 --model MODEL --root sdk --agents 2
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import bidikv
from bidikv.examples.openai_loop import read, record_of, run_tool
from bidikv.examples.program import run_example
from bidikv.examples.source_tools import SourceTools
from bidikv.examples.turns import PLAN, SYSTEM, TurnRecord, parse_arguments, parser_for, question_of

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Mapping

    from bidikv.examples.turns import Run

_MAX_AGENTS = 8


@dataclass(slots=True)
class Member:
    """One agent: its conversation and its history, which only grows.

    Attributes:
        name: For the table and the router's logs.
        conversation: Whose turns its calls are.
        messages: What the next turn sends.
        turns: How many it has taken.
    """

    name: str
    conversation: bidikv.Conversation
    messages: list[Any]
    turns: int = 0


@dataclass(frozen=True, slots=True)
class Team:
    """What its members share.

    Attributes:
        client: To the router.
        toolbox: The sub-agents' tools; offered to the planner too, so that all prompts begin alike.
        options: Of every call.
    """

    client: bidikv.OpenAI
    toolbox: SourceTools
    options: Mapping[str, Any] = field(default_factory=dict)

    def turn(self, member: Member, tool: str | None) -> TurnRecord:
        """One model call of a member, and the tools that it called. Runs in any thread."""
        schemas: Any = self.toolbox.schemas()
        choice: Any = {"type": "function", "function": {"name": tool}} if tool else "none"
        with member.conversation:
            stream = self.client.chat.completions.create(
                messages=member.messages,
                tools=schemas,
                tool_choice=choice,
                stream=True,
                temperature=0,
                **self.options,
            )
            answer = read(stream, None)
        member.messages.append(answer)
        member.messages += [run_tool(self.toolbox, call) for call in answer.get("tool_calls", [])]
        member.turns += 1
        return record_of(member.turns - 1, answer, stream, agent=member.name)

    def wave(self, members: list[Member], tool: str | None) -> list[TurnRecord]:
        """One turn of each member, all at once."""
        with ThreadPoolExecutor(len(members)) as pool:
            return list(pool.map(partial(self.turn, tool=tool), members))


def rounds(
    team: Team, *, question: str, thread: str, agents: int, rounds: int, turns: int
) -> Iterator[list[TurnRecord]]:
    """Play the team; yields the planner's turns one by one, and the sub-agents' in waves.

    Args:
        team: From whom the calls go.
        question: The user's.
        thread: Name of the planner's conversation.
        agents: Sub-agents.
        rounds: How often they are sent out.
        turns: Of each sub-agent in a round, of which the last reports.

    Raises:
        openai.APIError: The router cannot be reached, or fails a call.
    """
    conversation = team.client.conversation(thread, agent="planner")
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    planner = Member("planner", conversation, messages)
    helpers: list[Member] = []
    for _ in range(rounds):
        yield [team.turn(planner, None)]
        if not helpers:
            helpers = [
                Member(f"helper-{n}", conversation.fork(n), list(planner.messages)) for n in range(agents)
            ]
        for helper in helpers:
            helper.messages.append(
                {"role": "user", "content": f"You are {helper.name}. Look into your part."}
            )
        for turn in range(turns):
            yield team.wave(helpers, PLAN[turn % len(PLAN)] if turn < turns - 1 else None)
        findings = "\n".join(f"{helper.name}: {helper.messages[-1]['content']}" for helper in helpers)
        planner.messages.append({"role": "user", "content": f"They found:\n{findings}\nGo on."})
    yield [team.turn(planner, None)]
    for helper in helpers:
        helper.conversation.close()


def play(arguments: argparse.Namespace, run: Run) -> Iterator[list[TurnRecord]]:
    """Run the team on one question."""
    with bidikv.OpenAI(
        base_url=arguments.base_url, api_key=arguments.api_key, readback=run.readback
    ) as client:
        options = {
            "model": arguments.model,
            "max_tokens": arguments.max_tokens,
            "extra_body": run.extra_body(),
        }
        yield from rounds(
            Team(client, SourceTools(arguments.root), options),
            question=question_of(arguments),
            thread=run.thread,
            agents=arguments.agents,
            rounds=arguments.rounds,
            turns=arguments.turns,
        )


def main(argv: list[str] | None = None) -> int:
    """Run the team on one question."""
    description = "A planner and sub-agents that work at once, over a source directory."
    parser = parser_for(description)
    parser.add_argument("--agents", type=int, default=2, help=f"sub-agents, 1 to {_MAX_AGENTS}")
    parser.add_argument("--rounds", type=int, default=2, help="how often they are sent out")
    arguments = parse_arguments(description, argv, turns=2, parser=parser)
    if not 1 <= arguments.agents <= _MAX_AGENTS:
        parser.error(f"--agents must be 1 to {_MAX_AGENTS}")
    if arguments.rounds < 1:
        parser.error("--rounds must be at least 1")
    return run_example(arguments, partial(play, arguments))


if __name__ == "__main__":
    sys.exit(main())
