"""The command that plays a run again."""

from __future__ import annotations

import shlex

from typer.testing import CliRunner

from bidikv_server.cli.app import app
from bidikv_server.verify.options import VerifyOptions


def test_the_replay_has_everything_that_decides_a_run(tmp_path):
    """But not the key, the file and the limits; and the command line takes it."""
    options = VerifyOptions(
        turns=7,
        seed=-3,
        chaos=True,
        decode=2,
        prefix_caching=True,
        model=tmp_path / "no model",
        api_key="secret",
        engine_args=("--max-model-len", "2048"),
    )
    words = shlex.split(options.replay(conversation=4))
    assert words[:2] == ["bidikv", "verify"]
    assert "secret" not in words
    assert words[-3:] == ["--", "--max-model-len", "2048"]
    result = CliRunner().invoke(app, words[1:])
    assert result.exit_code == 2
    assert "does not exist" in result.output
