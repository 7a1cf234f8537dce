"""An agent of the OpenAI Agents SDK: the framework's own session, one conversation at the router.

pip install "bidikv[openai-agents]"
python -m bidikv.examples.openai_agents_agent --base-url http://127.0.0.1:8000/v1 --model MODEL
"""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

import bidikv
from bidikv.examples.frameworks import INSTRUCTIONS, QUESTIONS, run_framework, weather

if TYPE_CHECKING:
    import argparse


async def talk(arguments: argparse.Namespace) -> list[bidikv.TurnReport]:
    """Ask both questions."""
    from bidikv.integrations.openai_agents import BidiKVHooks, provider  # noqa: I001, PLC0415 - says what to install
    from agents import Agent, ModelSettings, RunConfig, Runner, SQLiteSession, function_tool  # noqa: PLC0415

    settings = ModelSettings(temperature=0, max_tokens=arguments.max_tokens)
    agent = Agent(
        name="planner",
        instructions=INSTRUCTIONS,
        tools=[function_tool(weather)],
        model=arguments.model,
        model_settings=settings,
    )
    async with (
        bidikv.AsyncOpenAI(base_url=arguments.base_url, api_key=arguments.api_key) as client,
        client.conversation(arguments.thread) as conversation,
    ):
        session = SQLiteSession(arguments.thread)
        config = RunConfig(model_provider=provider(client), tracing_disabled=True)
        for question in QUESTIONS:
            result = await Runner.run(
                agent, question, session=session, run_config=config, hooks=BidiKVHooks()
            )
            print(result.final_output)
        await conversation.aclose()
    return conversation.turns


def main(argv: list[str] | None = None) -> int:
    """Run the agent on two questions."""
    return run_framework("An agent of the OpenAI Agents SDK.", argv, lambda given: asyncio.run(talk(given)))


if __name__ == "__main__":
    sys.exit(main())
