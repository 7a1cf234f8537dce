"""What lets a chat model see the whole config of a call, also outside of a graph.

LangChain passes only parts of an explicit config down to `_generate` and its like. Streams keep it in reach around each
step, because a generator's context is its caller's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bidikv.integrations._config import scope

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from langchain_core.language_models import LanguageModelInput
    from langchain_core.language_models.chat_models import BaseChatModel
    from langchain_core.messages import AIMessage, AIMessageChunk
    from langchain_core.runnables import RunnableConfig

    Base = BaseChatModel
else:
    Base = object


class Scoped(Base):
    """To stand before a chat model's class."""

    def invoke(
        self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any
    ) -> AIMessage:
        """Answer, as part of the config's thread."""
        with scope(config):
            return super().invoke(input, config, **kwargs)

    async def ainvoke(
        self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any
    ) -> AIMessage:
        """Answer, as part of the config's thread."""
        with scope(config):
            return await super().ainvoke(input, config, **kwargs)

    def stream(
        self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any
    ) -> Iterator[AIMessageChunk]:
        """Answer piece by piece, as part of the config's thread."""
        pieces = super().stream(input, config, **kwargs)
        try:
            while True:
                with scope(config):
                    piece = next(pieces, None)
                if piece is None:
                    return
                yield piece
        finally:
            pieces.close()  # type: ignore[attr-defined] # a generator

    async def astream(
        self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any
    ) -> AsyncIterator[AIMessageChunk]:
        """Answer piece by piece, as part of the config's thread."""
        pieces = super().astream(input, config, **kwargs)
        try:
            while True:
                with scope(config):
                    piece = await anext(pieces, None)
                if piece is None:
                    return
                yield piece
        finally:
            await pieces.aclose()  # type: ignore[attr-defined] # a generator
