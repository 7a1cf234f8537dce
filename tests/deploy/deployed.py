"""What the files of deploy/ say, and the real command line and settings to compare with."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import typer.main
import yaml

from bidikv_server.cli.app import app
from bidikv_server.router.settings import ENV_PREFIX, RouterSettings

DEPLOY = Path(__file__).parents[2] / "deploy"
BASE = DEPLOY / "kubernetes" / "base"
VARIABLES = frozenset({"BIDIKV_SECRET", *(ENV_PREFIX + name.upper() for name in RouterSettings.model_fields)})
"""Variables that router or engine read."""
SAMPLES = {"POD_IP": "10.0.0.9", "MODEL_PATH": "/models/model", "MODEL_NAME": "model"}
"""Values of what a manifest leaves to the cluster."""


def documents(path: Path) -> list[dict[str, Any]]:
    """Every YAML document of a file."""
    return [document for document in yaml.safe_load_all(path.read_text(encoding="utf-8")) if document]


def filled(word: str) -> str:
    """A word with `$(NAME)` and `$NAME` replaced by samples; an unknown name is an error."""
    return re.sub(r"\$\(?(\w+)\)?", lambda match: SAMPLES[match[1]], word)


def parse(words: list[str]) -> dict[str, Any]:
    """The parameters that the real command line reads from these words, without running anything."""
    command: Any = typer.main.get_command(app)
    words = [filled(word) for word in words]
    while hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    parameters: dict[str, Any] = command.make_context("bidikv", words).params
    return parameters


def commands_in(text: str) -> list[list[str]]:
    """Command lines of bidikv in a script, each as its words after the program."""
    lines = re.findall(r"^(?:.*\s)?bidikv ((?:router|engine|up|verify|doctor)\b.*)$", text, re.MULTILINE)
    return [shlex.split(line, comments=True) for line in lines]
