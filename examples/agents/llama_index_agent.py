"""A LlamaIndex agent: the conversation that is current when it runs is its own.

pip install "bidikv[llama-index]"
python -m bidikv.examples.llama_index_agent --base-url http://127.0.0.1:8000/v1 --model MODEL
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
    from bidikv.integrations.llama_index import llm  # noqa: I001, PLC0415 - says what to install
    from llama_index.core.agent.workflow import FunctionAgent  # noqa: PLC0415
    from llama_index.core.workflow import Context  # noqa: PLC0415

    options: dict[str, Any] = {"base_url": arguments.base_url, "api_key": arguments.api_key}
    with bidikv.OpenAI(**options) as client:
        async with bidikv.AsyncOpenAI(**options) as async_client:
            model = llm(
                arguments.model,
                client=client,
                async_client=async_client,
                max_tokens=arguments.max_tokens,
                context_window=8192,
            )
            agent = FunctionAgent(name="planner", tools=[weather], llm=model, system_prompt=INSTRUCTIONS)
            context = Context(agent)
            with bidikv.conversation(arguments.thread) as conversation:
                for question in QUESTIONS:
                    print(await agent.run(question, ctx=context))
            await conversation.aclose()
    return conversation.turns


def main(argv: list[str] | None = None) -> int:
    """Run the agent on two questions."""
    return run_framework("A LlamaIndex agent.", argv, lambda given: asyncio.run(talk(given)))


if __name__ == "__main__":
    sys.exit(main())
