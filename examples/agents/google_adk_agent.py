"""An agent of Google's ADK, with a model by LiteLLM: the session and the agent name the conversation.

    pip install "bidikv[google-adk]"
    python -m bidikv.examples.google_adk_agent --base-url http://127.0.0.1:8000/v1 --model MODEL

LiteLLM makes the calls, so what the router said of them is in its metrics and admin API, not here.
"""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

from bidikv.examples.frameworks import INSTRUCTIONS, QUESTIONS, run_framework, weather

if TYPE_CHECKING:
    import argparse

    import bidikv


async def talk(arguments: argparse.Namespace) -> list[bidikv.TurnReport]:
    """Ask both questions."""
    from bidikv.integrations.google_adk import BidiKVPlugin  # noqa: I001, PLC0415 - says what to install
    from google.adk.agents import LlmAgent  # noqa: PLC0415
    from google.adk.models.lite_llm import LiteLlm  # noqa: PLC0415
    from google.adk.runners import Runner  # noqa: PLC0415
    from google.adk.sessions import InMemorySessionService  # noqa: PLC0415
    from google.genai import types  # noqa: PLC0415

    settings = types.GenerateContentConfig(temperature=0, max_output_tokens=arguments.max_tokens)
    agent = LlmAgent(
        name="planner",
        model=LiteLlm(
            model=f"openai/{arguments.model}", api_base=arguments.base_url, api_key=arguments.api_key
        ),
        instruction=INSTRUCTIONS,
        tools=[weather],
        generate_content_config=settings,
    )
    sessions = InMemorySessionService()
    runner = Runner(app_name="trips", agent=agent, session_service=sessions, plugins=[BidiKVPlugin()])
    await sessions.create_session(app_name="trips", user_id="me", session_id=arguments.thread)
    for question in QUESTIONS:
        message = types.Content(role="user", parts=[types.Part(text=question)])
        async for event in runner.run_async(user_id="me", session_id=arguments.thread, new_message=message):
            if event.is_final_response() and event.content and event.content.parts:
                print("".join(part.text or "" for part in event.content.parts))
    return []


def main(argv: list[str] | None = None) -> int:
    """Run the agent on two questions."""
    return run_framework(
        "An agent of Google's Agent Development Kit.", argv, lambda given: asyncio.run(talk(given))
    )


if __name__ == "__main__":
    sys.exit(main())
