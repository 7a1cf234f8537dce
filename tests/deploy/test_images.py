"""The Dockerfile and the guide: what they name exists."""

from __future__ import annotations

import re
import tomllib

import pytest
from deployed import DEPLOY, VARIABLES, commands_in, parse

from bidikv_server.router.settings import RouterSettings

ROOT = DEPLOY.parent
DOCKERFILE = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
TEXTS = sorted(path for path in DEPLOY.rglob("*") if path.is_file())


def stages() -> dict[str, str]:
    """Each build stage's instructions by its name."""
    parts = re.split(r"^FROM (\S+) AS (\w+)\n", DOCKERFILE, flags=re.MULTILINE)
    return dict(zip(parts[2::3], parts[3::3], strict=True))


def test_base_images_are_pinned_by_tag():
    """Each FROM is an argument whose default names a version."""
    defaults = dict(re.findall(r"^ARG (\w+)=(\S+)$", DOCKERFILE, re.MULTILINE))
    used = re.findall(r"^FROM \$\{(\w+)\} AS", DOCKERFILE, re.MULTILINE)
    assert len(used) == DOCKERFILE.count("\nFROM ")
    for name in used:
        _, _, tag = defaults[name].partition(":")
        assert re.match(r"v?\d", tag), defaults[name]


def test_the_engines_base_is_the_vllm_that_the_connector_is_made_for():
    """Its tag is the version of the extra `gpu`; other companions are pinned alike."""
    extra = {re.split(r"[=<>]", line)[0]: line for line in PROJECT["optional-dependencies"]["gpu"]}
    assert f"vllm/vllm-openai:v{extra['vllm'].partition('==')[2]}\n" in DOCKERFILE
    for name in ("nixl", "msgspec", "pyzmq"):
        assert f'"{extra[name]}"' in stages()["engine"]
    assert '[router]"' in stages()["router"]


@pytest.mark.parametrize("name", ["router", "engine"])
def test_images_do_not_run_as_root(name):
    """By a number, which Kubernetes can judge, and with the command as the entry point."""
    assert re.findall(r"^USER (\S+)$", stages()[name], re.MULTILINE) == ["10001:10001"]
    assert 'ENTRYPOINT ["bidikv"]' in stages()[name]
    (words,) = re.findall(r"^CMD \[(.*)\]$", stages()[name], re.MULTILINE)
    if name == "router":
        assert parse(re.findall(r'"([^"]+)"', words))["host"] == "0.0.0.0"
        assert f"EXPOSE {RouterSettings.model_fields['port'].default}\n" in stages()[name]


def test_what_is_copied_exists_and_is_not_ignored():
    """The build context holds what the wheel is made of."""
    copied = [
        word
        for line in re.findall(r"^COPY (?!--from)(.*) \S+$", DOCKERFILE, re.MULTILINE)
        for word in line.split()
    ]
    kept = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    assert "pyproject.toml" in copied
    for path in copied:
        assert (ROOT / path).exists()
        assert f"!{path}" in kept


@pytest.mark.parametrize("path", TEXTS, ids=[str(path.relative_to(DEPLOY)) for path in TEXTS])
def test_variables_and_commands_are_real(path):
    """Every BIDIKV_ variable and every command line of bidikv anywhere in deploy/, prose included."""
    text = path.read_text(encoding="utf-8")
    assert set(re.findall(r"BIDIKV_[A-Z_]+", text)) <= VARIABLES
    blocks = "\n".join(re.findall(r"```bash\n(.*?)```", text, re.DOTALL)) if path.suffix == ".md" else text
    for words in commands_in(blocks):
        parse(words)
