"""A pydantic-ai agent: the framework's own conversation id names the conversation.

pip install "bidikv[pydantic-ai]"
python -m bidikv.examples.pydantic_ai_agent --base-url http://127.0.0.1:8000/v1 --model MODEL
"""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Any

import bidikv
from bidikv.examples.frameworks import INSTRUCTIONS, QUESTIONS, run_framework, weather

if TYPE_CHECKING:
    import argparse


async def talk(arguments: argparse.Namespace) -> list[bidikv.TurnReport]:
    """Ask both questions."""
    from bidikv.integrations.pydantic_ai import BidiKV  # noqa: I001, PLC0415 - says what to install
    from pydantic_ai import Agent  # noqa: PLC0415
    from pydantic_ai.models.openai import OpenAIChatModel  # noqa: PLC0415
    from pydantic_ai.providers.openai import OpenAIProvider  # noqa: PLC0415

    capability = BidiKV()
    async with bidikv.AsyncOpenAI(base_url=arguments.base_url, api_key=arguments.api_key) as client:
        agent = Agent(
            OpenAIChatModel(arguments.model, provider=OpenAIProvider(openai_client=client)),
            name="planner",
            instructions=INSTRUCTIONS,
            tools=[weather],
            model_settings={"temperature": 0, "max_tokens": arguments.max_tokens},
            capabilities=[capability],
        )
        history: list[Any] = []
        for question in QUESTIONS:
            result = await agent.run(question, message_history=history, conversation_id=arguments.thread)
            print(result.output)
            history = result.all_messages()
        conversation = capability.conversation(arguments.thread, "planner")
        await conversation.aclose()
    return conversation.turns


def main(argv: list[str] | None = None) -> int:
    """Run the agent on two questions."""
    return run_framework("A pydantic-ai agent.", argv, lambda given: asyncio.run(talk(given)))


if __name__ == "__main__":
    sys.exit(main())
