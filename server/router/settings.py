"""The router's settings: a TOML file, `BIDIKV_ROUTER_*` variables and explicit overrides, checked once at start."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path  # noqa: TC003  (pydantic reads annotations)
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Self

from pydantic import Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, EnvSettingsSource, NoDecode, SettingsConfigDict

from bidikv_server.router.core.discovery import EngineList, read_entries, read_name_server
from bidikv_server.router.core.tenants import KeyRing
from bidikv_server.router.secrets import ApiKeys, ComparedKey, Secret, StateAddress  # noqa: TC001  (pydantic reads annotations)
from bidikv_server.router.transfer import names
from bidikv_server.wire import SECRET_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pydantic_settings import PydanticBaseSettingsSource

ENV_PREFIX: Final = "BIDIKV_ROUTER_"
_NO_ENGINE: Final = "at least one engine is needed: a URL, a dns:// name, or engines_file"
DEFAULT_TENANT: Final = "default"
"""Owner of the one key that `api_key` gives."""

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class SettingsError(ValueError):
    """Settings that cannot be used; the message is one line and names the offending key."""


class RouterSettings(BaseSettings):
    """Everything the router can be told. Constructing it reads no file and no environment: `load` does."""

    model_config = SettingsConfigDict(
        frozen=True, extra="forbid", env_prefix=ENV_PREFIX, use_attribute_docstrings=True
    )

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Port to listen on; 0 takes a free one."""
    prefill: Annotated[tuple[str, ...], NoDecode] = ()
    """Prefill engines: base URLs without a path, or names to look up (`dns://name:port` for its addresses,
    `dns://_service._proto.name` for its SRV records, `dns+https://` for engines with TLS). In a variable separated by
    commas."""
    decode: Annotated[tuple[str, ...], NoDecode] = ()
    """Decode engines, likewise."""
    engines_file: Path | None = None
    """TOML or JSON (`.json`) file with further `prefill` and `decode` engines; read again within a second when it
    changes."""
    dns_interval_s: Seconds = 5.0
    """Between two lookups of one name, in seconds."""
    dns_server: str | None = None
    """Name server to ask, as `address` or `address:port`; without it those of /etc/resolv.conf."""

    transfer: str = names.BIDIKV
    """How KV gets from engine to engine, as the engines were started (docs/transfer.md): `bidikv`, `nixl`,
    `nixl-bidirectional`, `nixl-push`, `mooncake`, `lmcache`, or some joined by `+` for a MultiConnector."""
    mooncake_bootstrap: dict[str, str] = Field(default_factory=dict)
    """Base URLs of Mooncake's bootstrap servers by those of their prefill engines; without an entry port 8998 of the
    engine's host."""
    handle_ttl_s: Seconds = 450.0
    """How long a handle of `nixl-bidirectional` may be used, in seconds; keep it below decode's decoder_kv_blocks_ttl."""
    readback: bool = True
    """False serves plain disaggregation: no readback sources, nothing retained."""
    prefill_fallback: bool = True
    """Answer on decode alone when no prefill engine can take the request; False answers with an error."""
    default_ttl_s: float = Field(default=480.0, ge=0, allow_inf_nan=False)
    """How long decode retains a turn when the client gives no hint, in seconds."""
    max_ttl_s: float = Field(default=480.0, ge=0, allow_inf_nan=False)
    """The most a client's hint may ask for, in seconds; keep it at or below the engines' own limit."""

    api_keys: Annotated[ApiKeys, NoDecode] = Field(default_factory=KeyRing)
    """Table of API keys to tenants, a key as it is or as `sha256:` and the 64 hex digits of its digest. Given this,
    `api_keys_file` or `api_key`, `/v1` needs a known key, and engines never see it."""
    api_keys_file: Path | None = None
    """TOML file with such a table and nothing else; read again within a second when it changes."""
    api_key: ComparedKey | None = None
    """One API key, of the tenant `default`."""
    upstream_api_key: Secret | None = None
    """Sent to engines instead of the client's credential."""
    admin_key: ComparedKey | None = None
    """Key of the admin API; without it there is none."""
    secret: SecretStr | None = None
    """Secret of the engines' side channel, to release conversations on decode; `load` takes it from BIDIKV_SECRET."""

    tokenise_once: bool = True
    """Decode takes the prompt's tokens from prefill instead of tokenising it again."""
    normalise_history: bool = True
    """Find a conversation in spite of what clients change in its history by themselves (an attribution line, a token
    countdown, dates in the system text, cache breakpoints, the tools' order). Engines get every body as it came."""
    tls_cert_file: Path | None = None
    """PEM file with the router's certificate and its chain: given this, it serves HTTPS only. Read again within a
    second when it changes."""
    tls_key_file: Path | None = None
    """PEM file with its key, without a password; not needed where `tls_cert_file` holds it too."""
    tls_client_ca_file: Path | None = None
    """PEM file of authorities: given this, every client needs a certificate of one of them (mutual TLS)."""
    upstream_ca_file: Path | None = None
    """PEM file of the authorities that engines with TLS are checked by; without it those of the machine."""
    upstream_cert_file: Path | None = None
    """PEM file with the certificate that the router shows engines, and its chain. Read again when it changes."""
    upstream_key_file: Path | None = None
    """PEM file with its key, without a password; not needed where `upstream_cert_file` holds it too."""
    upstream_verify: bool = True
    """False speaks TLS with engines without checking who they are."""

    connect_timeout_s: Seconds = 5.0
    """To open a connection to an engine, in seconds."""
    prefill_timeout_s: Seconds = 300.0
    """For the whole prefill leg, in seconds."""
    first_byte_timeout_s: Seconds = 300.0
    """From sending a streamed decode leg to the first byte of its body, in seconds."""
    decode_timeout_s: Seconds = 900.0
    """The same for an answer that is not streamed: its first byte comes after its last token."""
    idle_timeout_s: Seconds = 120.0
    """Between two reads of a decode leg's body, in seconds."""
    request_timeout_s: Seconds = 120.0
    """For a request to arrive whole, in seconds; after that, status 408."""
    stalled_timeout_s: Seconds = 120.0
    """How long an answer may wait for a client that takes nothing of it, in seconds; then its connection ends. On Linux."""
    max_attempts: int = Field(default=8, ge=1)
    """How often a turn is tried while the client has seen nothing of an answer, the first time included."""
    retry_budget_s: Seconds = 310.0
    """How long after its first attempt a turn is tried again, in seconds; above `prefill_timeout_s`, or a prompt whose
    prefill engine hangs is tried nowhere else."""
    refused_wait_s: float = Field(default=5.0, ge=0, allow_inf_nan=False)
    """How long a turn waits in all for engines when every one of them refuses it for now (429, 503), in seconds."""
    circuit_failures: int = Field(default=5, ge=1)
    """Legs that must fail in a row on an engine before it is left alone for a while."""
    circuit_open_s: Seconds = 5.0
    """For how long, in seconds, until one leg tries; twice as long whenever that fails, up to 32 times."""
    decode_policy: str = "sticky"
    """Where turns are decoded: `sticky`, `pinned`, `spread`, or a policy of your own as `module:name`."""
    pressure_ratio: float = Field(default=2.0, ge=1, allow_inf_nan=False)
    """`sticky`: a turn moves away from an engine with more than so many times the load of the calmest one and
    `pressure_margin`."""
    pressure_margin: int = Field(default=16, ge=0)
    """`sticky`: how many requests on top of that."""
    prefill_policy: str = "cached_prefix"
    """Where prompts are computed: `cached_prefix`, `least_loaded`, or a policy of your own as `module:name`."""
    mode_policy: str = "readback"
    """How turns get their prompts' KV: `readback`, `cheapest`, or a policy of your own as `module:name`."""
    alone_tokens: int = Field(default=256, ge=0)
    """`cheapest`: how many tokens of a prompt decode may compute itself."""
    max_prefixes: int = Field(default=50_000, ge=1)
    """Beginnings of prompts whose prefill engine is remembered (about 400 bytes each)."""
    probe_interval_s: Seconds = 2.0
    """Between two probes of one engine, in seconds."""
    probe_timeout_s: Seconds = 2.0
    """For one probe, in seconds."""
    probe_failures: int = Field(default=2, ge=1)
    """Probes that must fail in a row before an engine counts as down."""
    shutdown_grace_s: Seconds = 30.0
    """How long running turns may go on after a stop signal, in seconds."""

    busy_poll_s: float = Field(default=0.0, ge=0, le=1, allow_inf_nan=False)
    """How long to go on looking for packets after each one before the core may sleep, in seconds: 0.002 takes a third from
    what a router with traffic adds to a turn, and up to one core of its own while packets come."""
    max_in_flight: int | None = Field(default=None, ge=1)
    """Turns that run at once; without it as many as come."""
    max_in_flight_per_tenant: int | None = Field(default=None, ge=1)
    """Turns of one tenant that run at once; without it as many as come. Without API keys a credential is a tenant."""
    max_queue: int = Field(default=100, ge=0)
    """Turns that wait for one of them to end; the next one is refused with status 429."""
    max_body_bytes: int = Field(default=64 * 1024 * 1024, ge=1)
    """Largest request body, in bytes."""
    max_head_bytes: int = Field(default=64 * 1024, ge=1024)
    """Largest target and headers of a request together, in bytes; above, status 431."""
    max_connections: int = Field(default=10_000, ge=1)
    """Connections of clients that are open at once; one more gets status 503."""
    max_conversations: int = Field(default=100_000, ge=1)
    """Conversations remembered (with all else that is kept about 1 KB each); the least recently used one goes first."""
    max_turns: int = Field(default=64, ge=1)
    """Turns remembered per conversation; the oldest one goes first."""
    max_records: int = Field(default=16, ge=1, le=1000)
    """Turns per conversation that `explain` tells about (57 bytes each)."""
    conversation_idle_s: Seconds = 3600.0
    """A conversation without a turn for this long is forgotten, in seconds."""
    max_responses: int = Field(default=20_000, ge=1)
    """Responses of the Responses API whose engine is remembered (about 500 bytes each); the oldest one goes first."""
    response_ttl_s: Seconds = 86_400.0
    """A response is forgotten after this long, in seconds."""

    state_url: StateAddress | None = None
    """Redis or Valkey server that several routers share, `redis://host:port/0` or `rediss://` over TLS; a password in it is
    not shown. Without it each router goes by its own memory."""
    state_password: Secret | None = None
    """Password for that server, if `state_url` has none."""
    state_prefix: str = Field(default="bidikv", pattern=r"^[\x21-\x7e]{1,64}$")
    """What all keys there begin with; routers with the same one share their conversations."""
    state_timeout_s: Seconds = 0.2
    """For one call to that server; after one that took longer the router goes on alone for a while, in seconds."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe log line written."""
    log_format: Literal["text", "json"] = "text"
    """`json` writes one JSON object per line."""
    tracing: Literal["auto", "on", "off"] = "auto"
    """OpenTelemetry spans; `auto` makes them when OTEL_* variables say where to send them."""

    @field_validator("prefill", "decode", mode="before")
    @classmethod
    def _split_urls(cls, value: Any) -> Any:
        return (
            tuple(part.strip() for part in value.split(",") if part.strip())
            if isinstance(value, str)
            else value
        )

    @field_validator("prefill", "decode")
    @classmethod
    def _check_engines(cls, texts: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(str(entry) for entry in read_entries(texts))

    @field_validator("dns_server")
    @classmethod
    def _check_name_server(cls, text: str | None) -> str | None:
        if text is not None:
            read_name_server(text)
        return text

    @model_validator(mode="after")
    def _check_roles(self) -> Self:
        missing = [name for name in ("prefill", "decode") if not getattr(self, name)]
        if missing and self.engines_file is None:
            raise ValueError("; ".join(f"{name}: {_NO_ENGINE}" for name in missing))
        return self

    @field_validator("transfer")
    @classmethod
    def _check_transfer(cls, value: str) -> str:
        return "+".join(names.parse(value))

    @field_validator("mooncake_bootstrap")
    @classmethod
    def _check_bootstrap(cls, table: dict[str, str]) -> dict[str, str]:
        return names.base_urls(table)

    @model_validator(mode="after")
    def _check_ttl(self) -> Self:
        if self.default_ttl_s > self.max_ttl_s:
            raise ValueError(
                f"default_ttl_s ({self.default_ttl_s:g}) is above max_ttl_s ({self.max_ttl_s:g})"
            )
        return self

    @model_validator(mode="after")
    def _check_tls(self) -> Self:
        for name, needed in (
            ("tls_key_file", "tls_cert_file"),
            ("tls_client_ca_file", "tls_cert_file"),
            ("upstream_key_file", "upstream_cert_file"),
        ):
            if getattr(self, name) is not None and getattr(self, needed) is None:
                raise ValueError(f"{name}: has no use without {needed}")
        if self.upstream_ca_file is not None and not self.upstream_verify:
            raise ValueError("upstream_ca_file: has no use while upstream_verify is false")
        return self

    def engine_list(self) -> EngineList:
        """The engines that these settings themselves name."""
        return EngineList(read_entries(self.prefill), read_entries(self.decode))

    def name_server(self) -> tuple[str, int] | None:
        """Address and port of the name server to ask; None leaves that to the machine."""
        return read_name_server(self.dns_server) if self.dns_server is not None else None

    def fixed_keys(self) -> KeyRing:
        """The API keys that do not come from `api_keys_file`."""
        if self.api_key is None:
            return self.api_keys
        return KeyRing({self.api_key.digest: DEFAULT_TENANT}).merged(self.api_keys)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],  # noqa: ARG003
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Take explicit values only, so that a test or an embedding program gets what it wrote."""
        return (init_settings,)

    @classmethod
    def load(cls, path: Path | None = None, **overrides: Any) -> Self:
        """Read the settings: overrides win over the environment, which wins over the file.

        Args:
            path: TOML file with the field names as top-level keys.
            overrides: Field values; None means "not given".

        Raises:
            SettingsError: The file, a variable or a value is wrong.
        """
        values = _read_toml(path) if path is not None else {}
        if secret := os.environ.get(SECRET_VARIABLE):
            values["secret"] = secret
        values |= _read_environment(cls)
        values |= {key: value for key, value in overrides.items() if value is not None}
        try:
            return cls(**values)
        except ValidationError as error:
            raise SettingsError(describe(error)) from None


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} is not valid TOML: {error}") from None


def _read_environment(cls: type[RouterSettings]) -> dict[str, Any]:
    _reject_unknown_variables(cls, os.environ)
    return EnvSettingsSource(cls)()


def _reject_unknown_variables(cls: type[RouterSettings], environ: Mapping[str, str]) -> None:
    for name in sorted(environ):
        key = name.upper().removeprefix(ENV_PREFIX)
        if name.upper().startswith(ENV_PREFIX) and key.lower() not in cls.model_fields:
            raise SettingsError(f"{name}: unknown setting")


def describe(error: ValidationError) -> str:
    """All problems in one line, each with its key first."""
    return "; ".join(_describe_one(dict(detail)) for detail in error.errors(include_url=False))


def _describe_one(detail: dict[str, Any]) -> str:
    key = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "extra_forbidden":
        return f"{key}: unknown setting"
    message = str(detail["msg"]).removeprefix("Value error, ")
    return f"{key}: {message}" if key else message
