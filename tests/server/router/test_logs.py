"""How log lines look, and what they leave out."""

import asyncio
import io
import json
import logging
import sys

import pytest

from bidikv_server.router.errors import UpstreamFault
from bidikv_server.router.logs import JsonFormatter, TextFormatter, configure_logging, log_fields

CANARY = "sk-canary-prompt"


@pytest.fixture(params=[TextFormatter, JsonFormatter])
def written(request):
    """A logger, and what it has written so far."""
    stream, logger = io.StringIO(), logging.getLogger(f"name.{request.param.__name__}")
    handler = logging.StreamHandler(stream)
    handler.setFormatter(request.param())
    logger.addHandler(handler)
    yield logger, stream
    logger.removeHandler(handler)


def line_of(formatter: logging.Formatter, message: str, *args, **fields) -> str:
    record = logging.LogRecord("name", logging.INFO, "file", 1, message, args, None)
    record.created = 1767225600.0429
    record.__dict__.update(log_fields(fields))
    return formatter.format(record)


LEGS = [
    {"leg": "prefill", "engine": "http://p:1", "outcome": "ok", "seconds": 0.1},
    {"leg": "decode", "engine": "http://d:1", "outcome": "ok", "seconds": 0.2},
]


def test_text():
    """Fields follow the message; what would blur their edges is quoted."""
    line = line_of(
        TextFormatter(), "a %s", "turn", plain="x-1", odd='m "\n x=1', legs=LEGS, none=[], empty=""
    )
    assert line == (
        '2026-01-01T00:00:00.042Z INFO name: a turn plain=x-1 odd="m \\"\\n x=1" '
        'legs=prefill:http://p:1:ok:0.1,decode:http://d:1:ok:0.2 none=none empty=""'
    )


def test_json():
    """One object on one line, fields beside the message."""
    line = line_of(JsonFormatter(), "a %s", "turn", odd='m "\n x=1', legs=LEGS)
    assert "\n" not in line
    assert json.loads(line) == {
        "time": "2026-01-01T00:00:00.042Z", "level": "info", "logger": "name", "message": "a turn",
        "odd": 'm "\n x=1', "legs": LEGS,
    }  # fmt: skip


def fail_twice():
    try:
        {}[CANARY]
    except KeyError as error:
        raise ExceptionGroup(CANARY, [ValueError(CANARY), UpstreamFault("engine down")]) from error


def test_exceptions_tell_no_values(written):
    """Frames and types of the whole chain and of a group's members; of messages only ours and the system's."""
    logger, stream = written
    try:
        fail_twice()
    except ExceptionGroup:
        logger.exception("failed")
    try:
        open("/nonexistent/file")  # noqa: PTH123, SIM115
    except OSError:
        logger.exception("failed")
    text = stream.getvalue()
    assert CANARY not in text
    for told in ("KeyError", "which led to:", "ExceptionGroup", "of which:", "ValueError", "engine down",
                 "No such file", "test_logs.py", "fail_twice"):  # fmt: skip
        assert told in text


def test_foreign_attributes_stay_out(written):
    """What another logger attaches to its records is not ours to write."""
    logger, stream = written
    logger.info("x", extra={"prompt": CANARY, "color_message": CANARY})
    assert CANARY not in stream.getvalue()


async def _lose_a_task() -> None:
    async def fail():
        raise ValueError(CANARY)

    task = asyncio.ensure_future(fail())
    await asyncio.wait((task,))
    del task


def test_lost_tasks_tell_no_values(monkeypatch):
    """asyncio's report of an exception that nobody read names its type and place."""  # noqa: D403
    stream, logger = io.StringIO(), logging.getLogger("asyncio")
    handler = logging.StreamHandler(stream)
    handler.setFormatter(TextFormatter())
    monkeypatch.setattr(logger, "handlers", [handler])
    asyncio.run(_lose_a_task())
    assert "never retrieved" in stream.getvalue()
    assert "ValueError" in stream.getvalue()
    assert CANARY not in stream.getvalue()


def test_configured_once_for_all(monkeypatch, capsys):
    """All loggers write to stderr in the chosen format, at the chosen level; a second call replaces the first."""
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", list(root.handlers))
    level = root.level
    try:
        configure_logging("text", "info")
        configure_logging("json", "warning")
        logging.getLogger("uvicorn.error").warning("hello")
        logging.getLogger("anything").info("not this")
    finally:
        root.setLevel(level)
    (line,) = capsys.readouterr().err.splitlines()
    assert json.loads(line)["message"] == "hello"
    assert sys.stderr is not None
