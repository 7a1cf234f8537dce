"""The version gate: what runs, and what the others are told."""

import subprocess
import sys

import pytest

from bidikv_server.versions import SUPPORTED_VLLM, vllm_objection


@pytest.mark.parametrize("version", ["0.32.0", "0.33.0", "0.33.1.post2", "0.32", "0.33.0+cu130", "0.33rc1"])
def test_supported_versions_run(version):
    """Patch releases, local versions and builds of a supported release are no other version."""
    assert vllm_objection(version) is None


@pytest.mark.parametrize("version", ["0.31.9", "0.34.0", "0.330.0", "1.32.0", "0.3", "dev", ""])
def test_other_versions_are_told_what_to_do(version):
    """Which versions are supported, and how to try this one anyway."""
    objection = vllm_objection(version)
    assert all(supported in objection for supported in SUPPORTED_VLLM)
    assert "allow_untested_vllm" in objection


def test_a_moved_surface_is_answered_with_the_version(tmp_path):
    """Another vLLM fails in an import; the message says which version to install instead of what moved."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text('__version__ = "0.40.1"\n')
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\nfrom bidikv_server.connector import BidiNixlConnector"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "ImportError: bidikv: this is vLLM 0.40.1" in result.stderr
