"""What is built and installed: two import packages from folders of other names, and nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import bidikv
import bidikv.examples
import bidikv_server

ROOT = Path(__file__).parent.parent
FOLDERS = {"bidikv": "sdk", "bidikv.examples": "examples/agents", "bidikv_server": "server"}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist, and the wheel that is built from it, made from a copy of the sources."""
    folder = tmp_path_factory.mktemp("build")
    source = folder / "source"
    source.mkdir()
    for entry in ("sdk", "server", "examples", "tests"):
        shutil.copytree(ROOT / entry, source / entry, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(ROOT / file, source)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder / "dist"), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "dist"


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    return next(built.glob("*.whl"))


def modules_on_disk() -> set[str]:
    """Every source file as the wheel should name it."""
    found = set()
    for package, folder in FOLDERS.items():
        for path in (ROOT / folder).rglob("*"):
            if (
                path.suffix in {".py", ".jinja", ".lua", ".html", ".css", ".js", ".svg"}
                or path.name == "py.typed"
            ):
                found.add(f"{package.replace('.', '/')}/{path.relative_to(ROOT / folder).as_posix()}")
    return found


def test_the_package_list_is_what_is_on_disk():
    """A new folder with an `__init__.py` is listed in pyproject.toml, and no other."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    on_disk = {
        ".".join([package, *init.parent.relative_to(ROOT / folder).parts])
        for package, folder in FOLDERS.items()
        for init in (ROOT / folder).rglob("__init__.py")
    }
    assert set(listed) == on_disk
    assert listed == sorted(listed)


def test_the_wheel_holds_every_module_and_nothing_else(wheel):
    """Both packages, the examples, their data and types; no folder of the repository by its own name."""
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == modules_on_disk()
    assert {name.partition("/")[0] for name in names} == {"bidikv", "bidikv_server"}


def test_the_wheel_carries_licence_and_command(wheel):
    """So that an installed copy is complete."""
    archive = zipfile.ZipFile(wheel)
    info = next(name.partition("/")[0] for name in archive.namelist() if ".dist-info/" in name)
    assert archive.read(f"{info}/licenses/LICENSE").startswith(
        b"\n                                 Apache License"
    )
    assert "bidikv = bidikv_server.cli:main" in archive.read(f"{info}/entry_points.txt").decode()


def test_the_sdist_can_be_built_from(built):
    """It holds the sources in their own folders; the wheel above was built from it."""
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "LICENSE", "sdk/__init__.py", "server/launch/smollm2_tools.jinja"} <= names


def test_the_wheel_installs_offline_and_runs(wheel, tmp_path):
    """Without an index; the installed copy, not the tree, answers."""
    target = tmp_path / "site"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--target",
        str(target),
    ]
    subprocess.run([*pip, str(wheel)], check=True, timeout=60, capture_output=True)
    program = (
        "import bidikv, bidikv.examples, bidikv_server.launch.model as m; "
        "print(bidikv.__file__, bidikv.examples.__file__, m.__file__, len(m._template()) > 0, sep='\\n')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(target)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    *files, template = done.stdout.splitlines()
    assert all(file.startswith(str(target)) for file in files)
    assert template == "True"


def test_the_editable_install_imports_the_tree():
    """What a developer edits is what runs."""
    folders = {name: Path(module.__file__ or "").parent for name, module in _imported().items()}
    assert folders == {name: ROOT / folder for name, folder in FOLDERS.items()}


def _imported():
    return {"bidikv": bidikv, "bidikv.examples": bidikv.examples, "bidikv_server": bidikv_server}
