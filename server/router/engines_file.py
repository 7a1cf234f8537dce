"""The file that lists engines (`engines_file`), read again when it changes."""

from __future__ import annotations

import json
import logging
import os
import tomllib
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from bidikv_server.router.core.discovery import EngineList, Entry, read_entries
from bidikv_server.router.files import Watch
from bidikv_server.router.settings import SettingsError, describe

if TYPE_CHECKING:
    from pathlib import Path

_log = logging.getLogger(__name__)


class _Content(BaseModel):
    """Two lists of engines."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    prefill: tuple[Entry, ...] = ()
    decode: tuple[Entry, ...] = ()

    @field_validator("prefill", "decode", mode="before")
    @classmethod
    def _read(cls, value: Any) -> tuple[Entry, ...]:
        if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
            raise ValueError('must be a list of engines: ["http://host:port", "dns://name:port"]')
        return read_entries(value)


class EnginesFile:
    """What a TOML or JSON file says about engines."""

    def __init__(self, path: Path) -> None:
        """Read it for the first time.

        Raises:
            SettingsError: It cannot be used.
        """
        self._path = path
        self._watch = Watch(path)
        try:
            self.listed = _read(path)
        except ValueError as error:
            raise SettingsError(f"engines_file: {error}") from None

    def read_again(self) -> bool:
        """Whether `listed` is new. A file that cannot be used is a line in the log and leaves it as it was."""
        if not self._watch.changed():
            return False
        try:
            self.listed = _read(self._path)
        except ValueError as error:
            _log.warning("engines_file changed and cannot be used, its earlier engines stay: %s", error)
            return False
        _log.info(
            "engines_file was read again: %d prefill and %d decode entries",
            len(self.listed.prefill),
            len(self.listed.decode),
        )
        return True


def _read(path: Path) -> EngineList:
    """Read a list of engines; a name that ends with `.json` is JSON, any other one TOML.

    Raises:
        ValueError: It cannot be used; the message is one line and names the path, and the key if it is one.
    """
    try:
        text = path.read_text(encoding="utf-8")
        values = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno is not None else "unknown error"
        raise ValueError(f"cannot read {path}: {reason}") from None
    except (ValueError, RecursionError) as error:
        kind = "JSON" if path.suffix == ".json" else "TOML"
        raise ValueError(f"{path} is not valid {kind}: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path}: must be an object with the keys prefill and decode")  # noqa: TRY004  # one kind of error
    try:
        content = _Content(**values)
    except ValidationError as error:
        raise ValueError(f"{path}: {describe(error)}") from None
    if not content.prefill and not content.decode:
        raise ValueError(f"{path}: prefill and decode list no engine at all")
    return EngineList(content.prefill, content.decode)
