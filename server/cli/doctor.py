"""`bidikv doctor`: what is installed, what is missing, and what to do."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bidikv_server.launch.doctor import Finding, check, is_well
from bidikv_server.launch.inspection import inspect_machine

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red", "info": "cyan"}


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Check the installation and this machine. Exit code 1 when something needed is missing."""
    findings = check(inspect_machine())
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        Console(soft_wrap=True).print(_table(findings))
    raise typer.Exit(0 if is_well(findings) else 1)


def _table(findings: list[Finding]) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("", "what", "found", "what to do"):
        table.add_column(column, overflow="fold")
    for finding in findings:
        # As text: a fix names extras in brackets, which are markup otherwise.
        status = Text(finding.status, style=_COLOURS[finding.status])
        table.add_row(status, Text(finding.name), Text(finding.detail), Text(finding.fix))
    return table
