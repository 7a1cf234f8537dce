"""Who calls: the tenant behind a request, and the credential that engines get instead of the client's."""

from __future__ import annotations

import logging
import os
import time
import tomllib
from typing import TYPE_CHECKING, Final

from bidikv_server.router.core.ids import tenant_of
from bidikv_server.router.core.requests import credential_of
from bidikv_server.router.core.tenants import KeyRing, presented_key, read_keys
from bidikv_server.router.errors import Unauthorized
from bidikv_server.router.files import Watch
from bidikv_server.router.settings import SettingsError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from bidikv_server.router.settings import RouterSettings

_log = logging.getLogger(__name__)
_TRACE: Final = ("traceparent", "tracestate")
"""Client headers that engines get as they are, whoever calls."""
_LOOK_EVERY_S: Final = 1.0


class KeyFile:
    """A TOML file of API keys to tenants, read again when it changes."""

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Read it for the first time.

        Raises:
            SettingsError: It cannot be used.
        """
        self._path = path
        self._clock = clock
        self._watch = Watch(path)
        self._looked_s = clock()
        try:
            self._ring = _read(path)
        except ValueError as error:
            raise SettingsError(f"api_keys_file: {error}") from None

    def ring(self) -> KeyRing:
        """The keys as the file has them, at most a second ago. A file that cannot be used leaves them as they were."""
        if self._clock() - self._looked_s >= _LOOK_EVERY_S:
            self._looked_s = self._clock()
            if self._watch.changed():
                self._reload()
        return self._ring

    def _reload(self) -> None:
        try:
            self._ring = _read(self._path)
        except ValueError as error:
            _log.warning("api_keys_file changed and cannot be used, its earlier keys stay: %s", error)
        else:
            _log.info("api_keys_file was read again: %d tenants", len(self._ring.counts()))


def _read(path: Path) -> KeyRing:
    """Read a file of keys.

    Raises:
        ValueError: It cannot be used; the message shows nothing of it.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno is not None else "unknown error"
        raise ValueError(f"cannot read {path}: {reason}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError):
        raise ValueError(f'{path} is not valid TOML: each line is "key" = "tenant"') from None
    try:
        return read_keys(table)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


class Access:
    """Tells tenants by their API keys, if any are configured.

    Attributes:
        by_key: API keys are configured: a request needs one.
    """

    def __init__(self, settings: RouterSettings) -> None:
        """Read the file of keys, if there is one.

        Raises:
            SettingsError: It cannot be used.
        """
        self._fixed = settings.fixed_keys()
        self._file = KeyFile(settings.api_keys_file) if settings.api_keys_file is not None else None
        self._upstream = settings.upstream_api_key
        self.by_key = bool(self._fixed.tenants) or self._file is not None

    def tenant(self, headers: Mapping[str, str]) -> str | None:
        """The caller's tenant; None while no API keys are configured.

        Raises:
            Unauthorized: API keys are configured, and this request carries none of them.
        """
        if not self.by_key:
            return None
        key = presented_key(headers)
        tenant = self._tenant_of(key) if key is not None else None
        if tenant is None:
            raise Unauthorized(missing=key is None)
        return tenant

    def share(self, headers: Mapping[str, str]) -> str:
        """Whose share of the router a turn takes: its tenant's, or while no API keys are configured its credential's.

        Raises:
            Unauthorized: As of `tenant`.
        """
        tenant = self.tenant(headers)
        return tenant_of(credential_of(headers)) if tenant is None else tenant

    def counts(self) -> dict[str, int]:
        """How many keys each tenant has now, from wherever they come."""
        ring = self._fixed if self._file is None else self._file.ring().merged(self._fixed)
        return ring.counts()

    def engine_headers(self, headers: Mapping[str, str]) -> dict[str, str]:
        """Headers for engines: the client's trace, and the router's credential.

        The client's own goes on only where it is not the router's to check and nothing stands in for it.
        """
        passed_on = {name: headers[name] for name in _TRACE if name in headers}
        if self._upstream is not None:
            passed_on["authorization"] = f"Bearer {self._upstream.get_secret_value()}"
        elif not self.by_key and "authorization" in headers:
            passed_on["authorization"] = headers["authorization"]
        elif not self.by_key and "x-api-key" in headers:
            passed_on["x-api-key"] = headers["x-api-key"]
        return passed_on

    def refused_by_engine(self, status: int) -> bool:
        """Whether an engine's answer with this status is about the router's credential and not about the client's."""
        return status in {401, 403} and (self.by_key or self._upstream is not None)

    def _tenant_of(self, key: str) -> str | None:
        tenant = self._fixed.tenant_of(key)
        return tenant if tenant is not None or self._file is None else self._file.ring().tenant_of(key)
