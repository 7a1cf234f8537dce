"""`OpenAI` and `AsyncOpenAI` that say which conversation each call belongs to.

Real subclasses: everything of the OpenAI client works and is typed as before. Requests are touched in `request`, which
runs once per logical call; retries repeat what was decided there.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict, cast

import openai

from bidikv.conversations import Conversation
from bidikv.identity import Identity, headers_for, is_generation, resolve
from bidikv.reuse import TurnReport, remember, reuse_in, turn_of, watch_stream

if TYPE_CHECKING:
    from typing import Self, Unpack

    from bidikv.conversations import Key


class ClientOptions(TypedDict, total=False):
    """Arguments that the OpenAI client itself takes; those it has beyond these are passed on just the same."""

    api_key: str | Callable[[], str] | Callable[[], Awaitable[str]] | None
    organization: str | None
    project: str | None
    base_url: Any
    timeout: Any
    max_retries: int
    default_headers: Mapping[str, str] | None
    default_query: Mapping[str, object] | None
    http_client: Any


class _BidiMixin:
    """What both clients share. Holds no per-call state, so one client serves any number of conversations."""

    _conversation: Conversation | None
    _readback: bool

    if TYPE_CHECKING:

        @property
        def default_headers(self) -> Any: ...

    def conversation(
        self, key: Key | None = None, *, agent: str | None = None, retain_s: float | None = None
    ) -> Conversation:
        """Name a conversation; see `bidikv.conversation`."""
        return Conversation(key, agent=agent, retain_s=retain_s)

    def _own_arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Constructor arguments that a copy must receive beyond the OpenAI client's."""
        return {"conversation": self._conversation, "readback": self._readback, **given}

    def _begin(self, options: Any) -> _Call | None:
        """Decide once per logical call; None for requests that read no prompt. Leaves `options` unchanged."""
        if not is_generation(options.method, options.url):
            return None
        headers = options.headers if isinstance(options.headers, Mapping) else {}
        body = options.json_data if isinstance(options.json_data, Mapping) else {}
        if isinstance(options.extra_json, Mapping):
            body = {**body, **options.extra_json}
        client_headers = self.default_headers
        identity = resolve(headers, body, self._conversation, client_headers)
        added = headers_for(identity, headers, body, client_headers, readback=self._readback)
        if added:
            options = options.model_copy(update={"headers": {**headers, **added}})
        return _Call(options, identity, time.perf_counter())


@dataclass(frozen=True, slots=True)
class _Call:
    options: Any
    identity: Identity
    started_s: float

    def answered(self, response: Any) -> Any:
        """Report the call, and return the response."""
        report = turn_of(response) or TurnReport()
        report.session = self.identity.session
        remember(response, report)
        watch_stream(response, report, self.started_s)
        if self.identity.conversation is not None:
            self.identity.conversation.turns.append(report)
        return response


def _named(conversation: Conversation | str | None) -> Conversation | None:
    return Conversation(conversation) if isinstance(conversation, str) else conversation


class OpenAI(_BidiMixin, openai.OpenAI):
    """`openai.OpenAI` for a bidikv router.

    Args:
        conversation: Whose turns this client's calls are when nothing nearer says so; text is a key as in
            `bidikv.conversation`.
        readback: False serves every call without reuse from decode, for comparisons.
        options: As for `openai.OpenAI`.
    """

    def __init__(
        self,
        *,
        conversation: Conversation | str | None = None,
        readback: bool = True,
        **options: Unpack[ClientOptions],
    ) -> None:
        super().__init__(**cast("Any", options))
        self._conversation = _named(conversation)
        self._readback = readback

    def copy(self, *, _extra_kwargs: Mapping[str, Any] = {}, **options: Any) -> Self:
        """A client with the same options, except those given."""
        return super().copy(_extra_kwargs=self._own_arguments(_extra_kwargs), **options)

    # Bound again, because the base class bound its own `copy` to this name.
    with_options = copy

    def __copy__(self) -> Self:
        # The default would share resources that are bound to the original.
        return self.copy()

    def request(self, cast_to: Any, options: Any, **kwargs: Any) -> Any:
        """Send one call: identity is added to a generation, everything else passes untouched."""
        call = self._begin(options)
        if call is None:
            return super().request(cast_to, options, **kwargs)
        return call.answered(super().request(cast_to, call.options, **kwargs))

    def _process_response(self, **kwargs: Any) -> Any:
        # The last place where a parsed model and its response's headers are both at hand.
        result = super()._process_response(**kwargs)
        remember(result, TurnReport(reuse=reuse_in(kwargs["response"].headers)))
        return result


class AsyncOpenAI(_BidiMixin, openai.AsyncOpenAI):
    """`openai.AsyncOpenAI` for a bidikv router; see `OpenAI`."""

    def __init__(
        self,
        *,
        conversation: Conversation | str | None = None,
        readback: bool = True,
        **options: Unpack[ClientOptions],
    ) -> None:
        super().__init__(**cast("Any", options))
        self._conversation = _named(conversation)
        self._readback = readback

    def copy(self, *, _extra_kwargs: Mapping[str, Any] = {}, **options: Any) -> Self:
        """A client with the same options, except those given."""
        return super().copy(_extra_kwargs=self._own_arguments(_extra_kwargs), **options)

    with_options = copy

    def __copy__(self) -> Self:
        return self.copy()

    async def request(self, cast_to: Any, options: Any, **kwargs: Any) -> Any:
        """Send one call: identity is added to a generation, everything else passes untouched."""
        call = self._begin(options)
        if call is None:
            return await super().request(cast_to, options, **kwargs)
        return call.answered(await super().request(cast_to, call.options, **kwargs))

    async def _process_response(self, **kwargs: Any) -> Any:
        result = await super()._process_response(**kwargs)
        remember(result, TurnReport(reuse=reuse_in(kwargs["response"].headers)))
        return result
