"""Each example's `--compare`, as a program, through the real router to engines that are not real."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

pytest.importorskip("aiohttp", reason="needs the router's libraries")
sys.path.insert(0, str(Path(__file__).parents[2] / "doubles"))

from fake_engine import FakeEngine, serving

from bidikv.examples import bfcl_agent, fan_out, langgraph_agent, openai_loop
from bidikv_server.router.app import create_app
from bidikv_server.router.settings import RouterSettings


class Tools:
    """In place of BFCL's package, which test_bfcl.py tests: here the calls count."""

    def __init__(self, *args, **options):
        pass

    def schemas(self):
        return []

    def call(self, *args):
        return "done"


def compared(main, *arguments):
    """Run a program against a router and its two engines; returns its exit code and what prefill was asked."""

    async def run():
        prefill, decode = FakeEngine("p"), FakeEngine("d")
        decode.publish_index("d", "10.0.0.1:7000")
        async with serving(prefill, decode) as (prefill_url, decode_url):
            settings = RouterSettings(prefill=(prefill_url,), decode=(decode_url,))
            async with serving(create_app(settings), lifespan="on") as (url,):
                given = ["--base-url", f"{url}/v1", "--model", "m", "--compare", *arguments]
                return await asyncio.to_thread(main, given), prefill.prefilled

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("module", "turns", "warm", "options"),
    [
        (langgraph_agent, 3, 2, ("--turns", "3")),
        (openai_loop, 3, 2, ("--turns", "3")),
        (fan_out, 6, 3, ("--agents", "2", "--rounds", "1", "--turns", "2")),
        (bfcl_agent, 10, 9, ()),
    ],
)
def test_compare(module, turns, warm, options, tmp_path, capsys, monkeypatch):  # noqa: PLR0917 - fixtures
    """Every turn is played with readback and without, in two conversations that share nothing; table and picture come out."""
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(bfcl_agent, "BfclTools", Tools)
    (tmp_path / "a.py").write_text("import os\n")
    picture = tmp_path / "ttft.png"
    root = () if module is bfcl_agent else ("--root", str(tmp_path))
    code, prefilled = compared(module.main, *options, *root, "--plot", str(picture))
    printed = capsys.readouterr().out
    assert code == 0, printed
    lines = printed.splitlines()
    assert lines[0].split()[-2:] == ["ratio", "reuse"]
    assert printed.count(" hit") + printed.count("new_conversation") == turns
    assert f" of {warm}" in printed
    assert "answers with and without readback: identical" in printed
    assert picture.read_bytes().startswith(b"\x89PNG")
    salts = [seen.body["cache_salt"] for seen in prefilled if "cache_salt" in seen.body]
    assert len(salts) == 2 * turns
    assert len(set(salts)) == 2
    sources = {salt: [s for s in prefilled if s.body.get("cache_salt") == salt] for salt in salts}
    read, unread = (
        sum(bool(seen.ours["sources"]) for seen in sources[salt]) for salt in dict.fromkeys(salts)
    )
    assert unread == 0
    assert read >= warm


@pytest.mark.parametrize("module", [langgraph_agent, openai_loop, fan_out, bfcl_agent])
@pytest.mark.parametrize(
    "wrong", [["--plot", "x.png"], ["--compare", "--thread", "t"], ["--max-tokens", "0"]]
)
def test_bad_arguments(module, wrong, capsys):
    """What cannot be compared is refused by the argument's name."""
    with pytest.raises(SystemExit):
        module.main(["--model", "m", *wrong])
    assert wrong[0] in capsys.readouterr().err


def test_a_refusal_is_one_line(tmp_path, capsys):
    """An error of the router's is told, not thrown."""

    async def run():
        settings = RouterSettings(prefill=("http://127.0.0.1:9",), decode=("http://127.0.0.1:9",))
        async with serving(create_app(settings), lifespan="on") as (url,):
            given = ["--base-url", f"{url}/v1/nowhere", "--model", "m", "--root", str(tmp_path)]
            return await asyncio.to_thread(openai_loop.main, given)

    assert asyncio.run(run()) == 2
    error = capsys.readouterr().err
    assert error.startswith("the router at http://127.0.0.1:")
    assert "refuses: " in error
    assert "Traceback" not in error
