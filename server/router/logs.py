"""How log lines are written: as text or as one JSON object each, and what never gets into them.

The standard library does this on purpose: a formatter of a library writes every attribute that any logger attaches to
a record, while here only a message and our own fields leave the process, and of an exception its type and its frames.
Its message may quote what it failed on, which may be a prompt or a key.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
import traceback
from typing import TYPE_CHECKING, Any, Final, Literal

from bidikv_server.router.errors import RouterFault

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

LogFormat = Literal["text", "json"]
_BARE: Final = re.compile(r"[A-Za-z0-9._:/@+\[\]-]+")


def log_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """`extra` of a log call that attaches these fields to its line."""
    return {"fields": fields}


def configure_logging(log_format: LogFormat, level: str) -> None:
    """Send every logger's lines to stderr in this format, uvicorn's too."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


class TextFormatter(logging.Formatter):
    """`time LEVEL logger: message key=value ...`, and an exception's frames below it."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, or several with an exception."""
        head = f"{_time(record)} {record.levelname} {record.name}: {_message(record)}"
        pairs = (f"{key}={_bare(value)}" for key, value in _fields(record).items())
        lines = _exception_lines(record)
        return "\n".join([" ".join([head, *pairs]), *lines])


class JsonFormatter(logging.Formatter):
    """One JSON object per line: `time`, `level`, `logger`, `message`, our fields, `exception`."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        document = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _message(record),
            **_fields(record),
        }
        if lines := _exception_lines(record):
            document["exception"] = "\n".join(lines)
        return json.dumps(document)


def _time(record: logging.LogRecord) -> str:
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{seconds}.{int(record.created * 1000) % 1000:03d}Z"


def _message(record: logging.LogRecord) -> str:
    """Leave out what asyncio adds in further lines: the `repr` of what failed, exceptions and all."""
    message = record.getMessage()
    return message.partition("\n")[0] if record.name == "asyncio" else message


def _fields(record: logging.LogRecord) -> Mapping[str, Any]:
    return getattr(record, "fields", {})


def _bare(value: Any) -> str:
    """A value after `key=`: quoted where a reader could not see its end."""
    if isinstance(value, list):
        return ",".join(":".join(_bare(part) for part in entry.values()) for entry in value) or "none"
    text = str(value)
    return text if _BARE.fullmatch(text) else json.dumps(text)


def _exception_lines(record: logging.LogRecord) -> list[str]:
    if not record.exc_info or record.exc_info[1] is None:
        return []
    return [line for text in _told(record.exc_info[1]) for line in text.rstrip().splitlines()]


def _told(error: BaseException) -> Iterator[str]:
    """Frames and types of an exception, of what caused it before it, and of the members of a group after it."""
    before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if before is not None:
        yield from _told(before)
        yield "which led to:"
    yield from traceback.format_tb(error.__traceback__)
    name = f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins.")
    yield f"{name}: {error}" if _is_harmless(error) else name
    if isinstance(error, BaseExceptionGroup):
        for member in error.exceptions:
            yield "of which:"
            yield from _told(member)


def _is_harmless(error: BaseException) -> bool:
    """Whether its message is known to quote nothing: ours, and the operating system's."""
    return isinstance(error, RouterFault) or (
        isinstance(error, OSError) and type(error).__module__ == "builtins"
    )
