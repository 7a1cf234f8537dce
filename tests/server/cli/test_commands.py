"""What each command prints and how it ends, without engines."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import textwrap

import pytest
from typer.testing import CliRunner

from bidikv._version import __version__
from bidikv_server.cli.app import app
from bidikv_server.launch import inspection

RUNNER = CliRunner()


def run(*words: str):
    return RUNNER.invoke(app, list(words), env={"NO_COLOR": "1", "COLUMNS": "200", "TERM": "dumb"})


def test_help_lists_every_command_and_the_exit_codes():
    """A newcomer sees all of it at once."""
    result = run("--help")
    assert result.exit_code == 0
    for word in ("up", "demo", "doctor", "router", "verify", "engine", "model", "130 interrupted"):
        assert word in result.output


@pytest.mark.parametrize(
    "command",
    [
        ["up"],
        ["demo"],
        ["doctor"],
        ["router"],
        ["verify"],
        ["engine"],
        ["engine", "prefill"],
        ["engine", "decode"],
        ["engine", "wait-idle"],
        ["model"],
    ],
)
def test_every_command_explains_itself(command):
    """`--help` works everywhere and loads no engine."""
    result = run(*command, "--help")
    assert result.exit_code == 0, result.output
    assert "Usage" in result.output


def test_version():
    """One line, the package's own version."""
    assert run("--version").output == f"bidikv {__version__}\n"


@pytest.mark.parametrize("words", [["frobnicate"], ["up", "--prefill", "0"], ["engine", "decode"]])
def test_wrong_use_ends_with_2(words):
    """Unknown commands, impossible numbers and missing options."""
    assert run(*words).exit_code == 2


def test_an_unknown_model_path_names_the_fix(tmp_path):
    """And is wrong use, not a crash."""
    result = run("engine", "decode", "--model", str(tmp_path / "none"))
    assert result.exit_code == 2
    assert "does not exist" in result.output
    assert "bidikv model smollm2" in result.output
    assert "Traceback" not in result.output


def test_engine_print_shows_the_command_with_what_follows_the_dashes(model):
    """One line for a shell; arguments after `--` reach vLLM last."""
    result = run(
        "engine", "prefill", "--model", str(model), "--port", "9999", "--print", "--", "--max-num-seqs", "4"
    )
    assert result.exit_code == 0
    line = result.output.strip()
    assert "\n" not in line
    assert "--port 9999" in line
    assert '"kv_role": "kv_both"' in line
    assert line.endswith("--max-num-seqs 4")


def test_engines_take_how_much_is_reused(model):
    """Each role has the options that concern it, and a wrong one is named."""
    shown = run("engine", "prefill", "--model", str(model), "--recompute-threshold", "auto", "--print").output
    assert '"learn_threshold": true' in shown
    # A number all the same: vLLM's own connector reads it first.
    assert '"kv_recompute_threshold": 64' in shown
    options = ("--retention-ttl", "30", "--protected-share", "0.5")
    shown = run("engine", "decode", "--model", str(model), *options, "--print").output
    assert '"decoder_kv_blocks_ttl": 30.0' in shown
    assert '"protected_share": 0.5' in shown
    wrong = run("engine", "prefill", "--model", str(model), "--recompute-threshold", "often", "--print")
    assert wrong.exit_code == 2
    assert "neither a number of tokens nor auto" in wrong.output


def test_engine_stock_turns_readback_off(model):
    """The same engine, one-directional."""
    assert '"readback": false' in run("engine", "decode", "--model", str(model), "--stock", "--print").output


def test_a_taken_port_names_its_holder(model):
    """With pid and option."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        result = run("engine", "decode", "--model", str(model), "--port", port)
    assert result.exit_code == 1
    assert f"port {port} on 127.0.0.1 is in use by pid {os.getpid()}" in result.output
    assert "choose another --port" in result.output


@pytest.mark.parametrize(
    ("toml", "expected"),
    [("prefill = [", "not valid TOML"), ("prefil = []", "prefil: unknown setting"), (None, "cannot read")],
)
def test_a_bad_router_file_names_the_problem(tmp_path, toml, expected):
    """The file, the key and what is wrong with it, in one line."""
    path = tmp_path / "router.toml"
    if toml is not None:
        path.write_text(toml)
    result = run("router", "--config", str(path))
    assert result.exit_code == 2
    assert expected in result.output
    assert "Traceback" not in result.output


def test_a_router_without_engines_says_so():
    """Each missing side is named."""
    result = run("router")
    assert result.exit_code == 2
    for role in ("prefill", "decode"):
        assert f"{role}: at least one engine is needed" in result.output


def test_router_help_says_where_secrets_come_from():
    """Operators' options are there; secrets are variables, and no option takes one."""
    output = run("router", "--help").output
    operators = ("--api-keys-file", "--max-in-flight", "--max-queue", "--shutdown-grace", "--log-level")
    for word in (
        *operators,
        "--engines-file",
        "--tls-cert-file",
        "--tls-client-ca-file",
        "--check",
        "--settings",
    ):
        assert word in output
    for name in (
        "BIDIKV_ROUTER_API_KEY",
        "BIDIKV_ROUTER_UPSTREAM_API_KEY",
        "BIDIKV_ROUTER_ADMIN_KEY",
        "BIDIKV_SECRET",
    ):
        assert name in output
    assert "--api-key " not in output
    assert "--admin-key" not in output


def test_router_check_prints_what_is_in_effect(tmp_path):
    """Options, variables and file put together, secrets hidden, and nothing is served."""
    config = tmp_path / "router.toml"
    config.write_text('admin_key = "sk-hush"\nport = 1\nmax_queue = 5\nprefill = ["http://127.0.0.1:9"]\n')
    result = RUNNER.invoke(
        app,
        [
            "router",
            "--config",
            str(config),
            "--decode",
            "dns://decode.example:9",
            "--max-queue",
            "6",
            "--check",
        ],
        env={"BIDIKV_ROUTER_PORT": "2", "BIDIKV_SECRET": "sk-hush"},
    )
    assert result.exit_code == 0, result.output
    for line in (
        "port = 2",
        "max_queue = 6",
        'decode = ["dns://decode.example:9"]',
        "# admin_key: **********",
    ):
        assert line in result.stdout.splitlines()
    assert "hush" not in result.output


@pytest.mark.parametrize(
    ("option", "text", "expected"),
    [
        ("--engines-file", 'decode = ["x"]', "engines_file: {path}: decode: 'x' is not an engine's base URL"),
        ("--api-keys-file", "", "api_keys_file: {path}: must be a table"),
        ("--tls-cert-file", "x", "tls_cert_file: {path}: "),
        ("--engines-file", None, "engines_file: cannot read {path}"),
        ("--tls-cert-file", None, "tls_cert_file: cannot read {path}"),
    ],
)
def test_router_check_reads_every_file(tmp_path, option, text, expected):
    """Not only the settings: also what they name, each with setting, path and key."""
    path = tmp_path / "file"
    if text is not None:
        path.write_text(text)
    engines = ["--prefill", "http://127.0.0.1:9", "--decode", "http://127.0.0.1:9"]
    result = run("router", *engines, option, str(path), "--check")
    assert result.exit_code == 2
    assert "router settings: " + expected.format(path=path) in result.output
    assert result.stdout == ""
    assert "Traceback" not in result.output


def test_router_settings_lists_them_all():
    """With variable, default, unit and meaning, without any engine."""
    result = run("router", "--settings")
    assert result.exit_code == 0
    assert "idle_timeout_s = 120  (seconds; BIDIKV_ROUTER_IDLE_TIMEOUT_S)" in result.output
    assert "Between two reads of a decode leg's body." in result.output


@pytest.mark.parametrize(
    ("text", "expected"),
    [(None, "cannot read"), ("sk-hush = 1", "entry 1"), ("sk-hush = = 1", "is not valid TOML")],
)
def test_a_bad_file_of_api_keys_names_the_problem(tmp_path, text, expected):
    """At start, with setting and path, and without the keys."""
    path = tmp_path / "keys.toml"
    if text is not None:
        path.write_text(text)
    engines = ["--prefill", "http://127.0.0.1:9", "--decode", "http://127.0.0.1:9"]
    result = run(
        "router", *engines, "--config", os.devnull, "--api-keys-file", str(path), "--port", free_port()
    )
    assert result.exit_code == 2
    assert "router settings: api_keys_file: " in result.output
    assert expected in result.output
    assert "hush" not in result.output
    assert "Traceback" not in result.output


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


def test_model_smollm2_prints_its_folder():
    """On stdout and alone, so that a script can use it."""
    result = run("model", "smollm2")
    assert result.exit_code == 0
    assert result.stdout.strip().endswith("smollm2-135m-instruct")
    assert "\n" not in result.stdout.strip()


def test_doctor_as_json_can_be_read_by_a_program():
    """A list of findings; the exit code follows them."""
    result = run("doctor", "--json")
    findings = json.loads(result.stdout)
    assert {"name", "status", "detail", "fix"} == set(findings[0])
    assert result.exit_code == int(any(finding["status"] == "fail" for finding in findings))


def test_doctor_fails_when_something_needed_is_missing(monkeypatch):
    """With the fix in the table."""
    monkeypatch.setattr(inspection, "_ROUTER_MODULES", ("a_module_that_is_missing",))
    result = run("doctor")
    assert result.exit_code == 1
    assert 'pip install "bidikv[router]"' in result.output


def test_without_typer_one_message_names_the_extra():
    """The base install has the command but not what it needs: exit code 2 and no traceback."""
    program = """
        import importlib.util, sys
        real = importlib.util.find_spec
        importlib.util.find_spec = lambda name, *rest: None if name == "typer" else real(name, *rest)
        import bidikv_server.cli
        bidikv_server.cli.main()
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert result.returncode == 2
    assert result.stderr == 'bidikv: the command line needs typer: pip install "bidikv[router]"\n'
    assert result.stdout == ""


def test_the_command_line_starts_without_loading_an_engine_library():
    """`bidikv --help` imports neither torch nor vLLM nor the router."""
    program = (
        "import sys; from bidikv_server.cli.app import app; "
        "print([m for m in ('torch', 'vllm', 'transformers', 'uvicorn', 'aiohttp', 'nixl') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=30
    )
    assert result.stdout == "[]\n"
