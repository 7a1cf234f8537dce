"""A CrewAI crew of one agent with two tasks: the agent's LLM names its conversation.

pip install "bidikv[crewai]"
python -m bidikv.examples.crewai_crew --base-url http://127.0.0.1:8000/v1 --model MODEL
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import bidikv
from bidikv.examples.frameworks import INSTRUCTIONS, QUESTIONS, run_framework, weather

if TYPE_CHECKING:
    import argparse


def talk(arguments: argparse.Namespace) -> list[bidikv.TurnReport]:
    """Give the crew both questions as tasks."""
    from bidikv.integrations.crewai import BidiKVInterceptor  # noqa: I001, PLC0415 - says what to install
    from crewai import LLM, Agent, Crew, Task  # noqa: PLC0415
    from crewai.tools import tool  # noqa: PLC0415

    conversation = bidikv.conversation(arguments.thread, agent="planner")
    llm = LLM(
        model=f"openai/{arguments.model}",
        custom_openai=True,
        base_url=arguments.base_url,
        api_key=arguments.api_key,
        temperature=0,
        max_tokens=arguments.max_tokens,
        interceptor=BidiKVInterceptor(conversation),
    )
    planner = Agent(
        role="planner",
        goal="Plan a trip",
        backstory=INSTRUCTIONS,
        llm=llm,
        tools=[tool("weather")(weather)],
        max_iter=2,
    )
    tasks = [
        Task(description=question, expected_output="An answer.", agent=planner) for question in QUESTIONS
    ]
    print(Crew(agents=[planner], tasks=tasks).kickoff())
    return conversation.turns


def main(argv: list[str] | None = None) -> int:
    """Run the crew on two tasks."""
    return run_framework("A CrewAI crew.", argv, talk)


if __name__ == "__main__":
    sys.exit(main())
