"""The OpenAI clients, which say of each call which conversation it belongs to and keep its history as the model wrote it.

Real subclasses: everything of the OpenAI client works and is typed as before. What a call says
is decided in `request`, which runs once per logical call; its history is looked at in `_build_request`, when its bytes are
there, before its first try. Retries repeat what was decided.
"""

from __future__ import annotations

import functools
import logging
import operator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, cast

import openai

from bidikv import calls, links
from bidikv.conversations import Conversation
from bidikv.environment import options_from
from bidikv.explain import Explanation, explain_locally, explain_with
from bidikv.identity import is_generation
from bidikv.options import (
    OURS,
    AzureOptions,
    BidiKVOptions,
    OnDrift,
    OpenAIOptions,
    PlainOptions,
    Settings,
    split,
)
from bidikv.reuse import TurnReport, account_in, remember, turn_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Self, TypeVar, Unpack

    from bidikv.hints import Kind
    from bidikv.ids import Key
    from bidikv.memory import Restore
    from bidikv.retry import RetryPolicy

    ClientT = TypeVar("ClientT", bound="openai.OpenAI | openai.AsyncOpenAI")


log = logging.getLogger(__name__)

# The call that this task or thread is sending: the OpenAI client makes its requests from copies of what it is given.
_running: ContextVar[calls.Call | None] = ContextVar("bidikv_running_call", default=None)


class _Shared:
    """What all clients share. Holds no per-call state, so one client serves any number of conversations."""

    _bidikv: Settings

    if TYPE_CHECKING:

        @property
        def default_headers(self) -> Any: ...

    def __init__(self, **options: Any) -> None:
        settings, theirs = split(options)
        super().__init__(**theirs)
        self._bidikv = settings

    @classmethod
    def from_env(cls, **options: Any) -> Self:
        """A client by the environment; no other function reads it.

        `BIDIKV_BASE_URL` (with `/v1`), `BIDIKV_API_KEY`, `BIDIKV_SESSION_SECRET`, `BIDIKV_READBACK` and `BIDIKV_DISABLED`
        (on or off), `BIDIKV_ON_DRIFT` (ignore, warn or raise), `BIDIKV_RESTORE` (off, spelling or all).

        Args:
            options: Arguments of the constructor; they win over the variables.

        Raises:
            ConfigurationError: A variable has no such value.
            openai.OpenAIError: There is no API key, from `OPENAI_API_KEY` neither.
        """
        return cls(**{**options_from(), **options})

    def conversation(
        self,
        key: Key | None = None,
        *,
        agent: str | None = None,
        kind: Kind = "main",
        retain_s: float | None = None,
        freeze_system: bool = False,
    ) -> Conversation:
        """Name a conversation, its id keyed with this client's secret; see `bidikv.conversation`."""
        return Conversation(
            key,
            agent=agent,
            kind=kind,
            retain_s=retain_s,
            secret=self._bidikv.secret,
            freeze_system=freeze_system,
        )

    def _copied(self, extra: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments for a copy. Whoever names a number of retries for it owns its retries."""
        settings = self._bidikv.updated({name: extra[name] for name in OURS & extra.keys()})
        ours = settings.arguments()
        given = dict(options)
        if options.get("max_retries") is not None and "retry" not in extra:
            ours["retry"] = None
        elif ours["retry"] is not None:
            given.setdefault("max_retries", 0)
        theirs = {name: value for name, value in extra.items() if name not in OURS}
        return {**given, "_extra_kwargs": {**ours, **theirs}}

    def _begin(self, options: Any) -> calls.Call | None:
        """Decide what a call carries; None for those that go out as they came, as one does of which this fails.

        Leaves `options` unchanged.
        """
        if not self._bidikv.enabled or not is_generation(options.method, options.url):
            return None
        try:
            return calls.begin(options, self._bidikv, lambda: self.default_headers)
        except Exception:
            log.exception("the conversation of a call cannot be told; the call goes out without one")
            return None

    def _build_request(self, options: Any, **kwargs: Any) -> Any:
        # The one place where a body's bytes and its fields are both at hand. Runs for each try of a call.
        request = super()._build_request(options, **kwargs)  # type: ignore[misc]
        call = _running.get()
        if call is None:
            return request
        changes = call.fit(request)
        if changes is not None:
            request = super()._build_request(options.model_copy(update=changes), **kwargs)  # type: ignore[misc]
        return call.tell(request)

    def _received(self, result: Any, response: Any) -> Any:
        """Keep what a response's headers say of its turn, of a call that names none too."""
        call = _running.get()
        if call is not None:
            call.received(response)
        else:
            told, key = account_in(response.headers)
            remember(result, TurnReport(told=told, key=key))
        return result

    def _retries(self, options: Any) -> RetryPolicy | None:
        """The policy for a request; None for one that is to be tried once, or that the OpenAI client retries itself."""
        return None if options.max_retries == 0 else self._bidikv.retry


class _SyncCalls(_Shared):
    """The synchronous half."""

    def copy(self, *, _extra_kwargs: Mapping[str, Any] = {}, **options: Any) -> Self:
        """A client with the same options, except those given. It knows the same conversations."""
        copied = super().copy(**self._copied(_extra_kwargs, options))  # type: ignore[misc]
        return cast("Self", copied)

    # Bound again, because the base class bound its own `copy` to this name.
    with_options = copy

    def __copy__(self) -> Self:
        # The default would share resources that are bound to the original.
        return self.copy()

    def request(self, cast_to: Any, options: Any, **kwargs: Any) -> Any:
        """Send one call: identity is added to a generation, everything else passes untouched."""
        call = self._begin(options)
        sent = options if call is None else call.options
        policy = self._retries(sent)
        attempt = operator.call if policy is None else policy.call
        token = _running.set(call)
        try:
            response = attempt(super().request, cast_to, sent, **kwargs)  # type: ignore[misc]
        finally:
            _running.reset(token)
        return response if call is None else call.answered(response, self)

    def _process_response(self, **kwargs: Any) -> Any:
        # The last place where a parsed model and its response's headers are both at hand.
        return self._received(super()._process_response(**kwargs), kwargs["response"])  # type: ignore[misc]

    def explain(self, turn: object) -> Explanation:
        """Ask the router why a turn reused no more, and what to change.

        Args:
            turn: A response of this client, its report, or a conversation, whose last turn is meant.

        Raises:
            ValueError: The turn is none that was answered through this package's clients.
            openai.APIError: The router cannot be reached.
        """
        report = _report_of(turn)
        if report.key is None:
            return explain_locally(report)
        try:
            told = cast("Any", self).get(links.PATH + report.key, cast_to=object)
        except openai.NotFoundError:  # forgotten, or a router that does not explain
            return explain_locally(report)
        return explain_with(report, told)

    def end(self, conversation: Conversation) -> None:
        """End a conversation whose turns went through this client, whichever object named them; see `Conversation.close`."""
        for key in self._bidikv.memory.keys(conversation.id, forget=True):
            links.release(cast("Any", self), key)


class _AsyncCalls(_Shared):
    """The asynchronous half; see `_SyncCalls`."""

    def copy(self, *, _extra_kwargs: Mapping[str, Any] = {}, **options: Any) -> Self:
        """A client with the same options, except those given. It knows the same conversations."""
        copied = super().copy(**self._copied(_extra_kwargs, options))  # type: ignore[misc]
        return cast("Self", copied)

    with_options = copy

    def __copy__(self) -> Self:
        return self.copy()

    async def request(self, cast_to: Any, options: Any, **kwargs: Any) -> Any:
        """Send one call: identity is added to a generation, everything else passes untouched."""
        call = self._begin(options)
        sent = options if call is None else call.options
        policy = self._retries(sent)
        attempt = operator.call if policy is None else policy.acall
        token = _running.set(call)
        try:
            response = await attempt(super().request, cast_to, sent, **kwargs)  # type: ignore[misc]
        finally:
            _running.reset(token)
        return response if call is None else call.answered(response, self)

    async def _process_response(self, **kwargs: Any) -> Any:
        return self._received(await super()._process_response(**kwargs), kwargs["response"])  # type: ignore[misc]

    async def explain(self, turn: object) -> Explanation:
        """Ask the router why a turn reused no more, and what to change; see `OpenAI.explain`."""
        report = _report_of(turn)
        if report.key is None:
            return explain_locally(report)
        try:
            told = await cast("Any", self).get(links.PATH + report.key, cast_to=object)
        except openai.NotFoundError:
            return explain_locally(report)
        return explain_with(report, told)

    async def end(self, conversation: Conversation) -> None:
        """End a conversation whose turns went through this client, whichever object named them; see `Conversation.close`."""
        for key in self._bidikv.memory.keys(conversation.id, forget=True):
            await links.arelease(cast("Any", self), key)


def _report_of(turn: object) -> TurnReport:
    if isinstance(turn, Conversation):
        report = turn.turns[-1] if turn.turns else None
    else:
        report = turn if isinstance(turn, TurnReport) else turn_of(turn)
    if report is None:
        raise ValueError(f"{type(turn).__name__} is no turn that a router answered")
    return report


class OpenAI(_SyncCalls, openai.OpenAI):
    """`openai.OpenAI` for a bidikv router.

    Args:
        conversation: Whose turns this client's calls are when nothing nearer says so; text is a key as in
            `bidikv.conversation`.
        readback: False serves every call without reuse from decode, for comparisons.
        enabled: False sends every call as the plain client would: no identity, no comparison, no restoring.
        restore: How far a conversation's history is put back into the model's own spelling before it goes out.
            `spelling` (the default): raw tool arguments where they mean the same, null or empty content, tools in the order
            in which they were first offered. `all`: also reasoning that the caller has dropped. `off`: nothing.
        on_drift: What to do when history changes that should have stayed (see `Drift`): `ignore` (the default), `warn`
            (`DriftWarning`), `raise` (`DriftError`, nothing is sent), or a function of the drift.
        retry: A `RetryPolicy` in place of the OpenAI client's own retries.
        secret: Keys the ids of conversations named through this client; see `session_id`.
        options: As for `openai.OpenAI`.

    Raises:
        ConfigurationError: An argument has no such value, or both `retry` and `max_retries` are given.
    """

    if TYPE_CHECKING:

        def __init__(
            self,
            *,
            conversation: Conversation | str | None = None,
            readback: bool = True,
            enabled: bool = True,
            restore: Restore = "spelling",
            on_drift: OnDrift = "ignore",
            retry: RetryPolicy | None = None,
            secret: bytes | None = None,
            **options: Unpack[PlainOptions],
        ) -> None: ...


class AsyncOpenAI(_AsyncCalls, openai.AsyncOpenAI):
    """`openai.AsyncOpenAI` for a bidikv router; see `OpenAI`."""

    if TYPE_CHECKING:

        def __init__(self, **options: Unpack[OpenAIOptions]) -> None: ...


class AzureOpenAI(_SyncCalls, openai.AzureOpenAI):
    """`openai.AzureOpenAI` for a bidikv router; see `OpenAI`.

    Azure's paths (`/openai/deployments/MODEL/...`) and its `api-key` header are no router's: for use behind a gateway that
    translates both. Straight to a router, use `OpenAI`.
    """

    if TYPE_CHECKING:

        def __init__(self, **options: Unpack[AzureOptions]) -> None: ...


class AsyncAzureOpenAI(_AsyncCalls, openai.AsyncAzureOpenAI):
    """`openai.AsyncAzureOpenAI` for a bidikv router; see `AzureOpenAI`."""

    if TYPE_CHECKING:

        def __init__(self, **options: Unpack[AzureOptions]) -> None: ...


_OURS_FOR = {
    openai.OpenAI: OpenAI,
    openai.AsyncOpenAI: AsyncOpenAI,
    openai.AzureOpenAI: AzureOpenAI,
    openai.AsyncAzureOpenAI: AsyncAzureOpenAI,
}


def wrap(client: ClientT, **options: Unpack[BidiKVOptions]) -> ClientT:
    """A client like this one that also does what ours do. It shares the connections of the one given, which stays as it is.

    A client of ours comes back with those options changed, and still knows its conversations.

    Args:
        client: An `openai.OpenAI`, `AsyncOpenAI`, `AzureOpenAI`, `AsyncAzureOpenAI`, or an instance of a subclass.
        options: Our arguments of `bidikv.OpenAI`.

    Returns:
        An instance of the class given (of `bidikv.OpenAI` for an `openai.OpenAI`, and so on).

    Raises:
        ConfigurationError: An option has no such value.
        TypeError: It is no such client.
    """
    if not isinstance(client, openai.OpenAI | openai.AsyncOpenAI):
        raise TypeError(f"wrap takes a client of the openai package, not {type(client).__name__}")
    if isinstance(client, _Shared):
        settings, kind = client._bidikv.updated(options), cast("Any", type(client))  # noqa: SLF001 - ours
    else:
        settings, kind = split(options)[0], _wrapping(cast("Any", type(client)))
    wrapped = object.__new__(kind)
    # What is cached on the instance (`chat`, `with_raw_response`) is bound to it; everything else is taken over.
    cached = {
        name for base in kind.__mro__ for name, value in vars(base).items() if hasattr(value, "attrname")
    }
    vars(wrapped).update({name: value for name, value in vars(client).items() if name not in cached})
    wrapped._bidikv = settings
    if settings.retry is not None:
        wrapped.max_retries = 0
    return cast("ClientT", wrapped)


@functools.cache
def _wrapping(kind: Any) -> Any:
    known = _OURS_FOR.get(kind)
    if known is not None:
        return known
    half = _AsyncCalls if issubclass(kind, openai.AsyncOpenAI) else _SyncCalls
    return type(kind.__name__, (half, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})
