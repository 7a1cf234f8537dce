"""What the clients can be told: our own arguments, checked once, and those of the OpenAI client, for type checkers."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, TypedDict, cast

from bidikv.conversations import Conversation
from bidikv.errors import ConfigurationError
from bidikv.memory import RESTORE, Memory, Restore

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from bidikv.drift import Drift
    from bidikv.retry import RetryPolicy

OnDrift: TypeAlias = "Literal['ignore', 'warn', 'raise'] | Callable[[Drift], None]"
_ON_DRIFT: Final = ("ignore", "warn", "raise")


class BidiKVOptions(TypedDict, total=False):
    """Arguments of ours; see `bidikv.OpenAI`."""

    conversation: Conversation | str | None
    readback: bool
    enabled: bool
    restore: Restore
    on_drift: OnDrift
    retry: RetryPolicy | None
    secret: bytes | None


class PlainOptions(TypedDict, total=False):
    """Arguments of `openai.OpenAI`; those that it takes beyond these are passed on just the same."""

    api_key: str | Callable[[], str] | Callable[[], Awaitable[str]] | None
    organization: str | None
    project: str | None
    base_url: Any
    timeout: Any
    max_retries: int
    default_headers: Mapping[str, str] | None
    default_query: Mapping[str, object] | None
    http_client: Any


class OpenAIOptions(BidiKVOptions, PlainOptions, total=False):
    """Arguments of `bidikv.OpenAI`."""


class AzureOptions(OpenAIOptions, total=False):
    """Arguments of `bidikv.AzureOpenAI`."""

    azure_endpoint: str
    azure_deployment: str | None
    api_version: str | None
    azure_ad_token: str | None
    azure_ad_token_provider: Any


@dataclass(frozen=True, slots=True)
class Settings:
    """Our arguments, and what copies of a client share.

    Attributes:
        conversation: Whose turns the calls are when nothing nearer says so.
        readback: False serves every call without reuse from decode.
        enabled: False sends every call as the plain client would.
        restore: How far the history is put back into the model's own spelling.
        on_drift: What happens when history changes that should have stayed.
        retry: The policy in place of the OpenAI client's own retries.
        secret: Keys the ids of conversations that are named by a key here.
        memory: Of the conversations; shared, so that a copy knows them too.
    """

    conversation: Conversation | None = None
    readback: bool = True
    enabled: bool = True
    restore: Restore = "spelling"
    on_drift: OnDrift = "ignore"
    retry: RetryPolicy | None = None
    secret: bytes | None = None
    memory: Memory = field(default_factory=Memory)

    def __post_init__(self) -> None:
        """Refuse what cannot mean anything.

        Raises:
            ConfigurationError: An argument has no such value.
        """
        if self.restore not in RESTORE:
            raise ConfigurationError(f"restore is one of {', '.join(RESTORE)}, not {self.restore!r}")
        if self.on_drift not in _ON_DRIFT and not callable(self.on_drift):
            raise ConfigurationError(
                f"on_drift is one of {', '.join(_ON_DRIFT)} or a function, not {self.on_drift!r}"
            )

    def updated(self, given: Mapping[str, Any]) -> Settings:
        """These settings with other values."""
        return replace(self, **_named(given, self.secret)) if given else self

    def arguments(self) -> dict[str, Any]:
        """As arguments of a client's constructor."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


OURS: Final = frozenset(f.name for f in fields(Settings))


def split(options: Mapping[str, Any]) -> tuple[Settings, dict[str, Any]]:
    """Part a constructor's arguments into ours and the OpenAI client's.

    Raises:
        ConfigurationError: An argument has no such value, or two owners are named for retries.
    """
    ours = {name: value for name, value in options.items() if name in OURS}
    theirs = {name: value for name, value in options.items() if name not in OURS}
    settings = Settings(**_named(ours, ours.get("secret")))
    if settings.retry is not None:
        if theirs.get("max_retries"):
            raise ConfigurationError("give either retry or max_retries: one of them owns the retries")
        theirs["max_retries"] = 0
    return settings, theirs


def _named(ours: Mapping[str, Any], secret: bytes | None) -> dict[str, Any]:
    key = ours.get("conversation")
    named = (
        {}
        if key is None or isinstance(key, Conversation)
        else {"conversation": Conversation(key, secret=secret)}
    )
    return cast("dict[str, Any]", {**ours, **named})
