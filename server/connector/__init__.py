"""The out-of-tree vLLM connector: NIXL's pull connector with a retention index and verified readback.

vLLM loads it with `kv_connector_module_path="bidikv_server.connector"` and `kv_connector="BidiNixlConnector"`; the
attribute is resolved lazily so that reading the configuration of a connector does not import vLLM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bidikv_server.versions import vllm_objection

if TYPE_CHECKING:
    from bidikv_server.connector.connector import BidiNixlConnector

__all__ = ["BidiNixlConnector"]


def __getattr__(name: str) -> object:
    if name == "BidiNixlConnector":
        try:
            from bidikv_server.connector.connector import BidiNixlConnector  # noqa: PLC0415
        except ImportError as error:
            from vllm import __version__  # noqa: PLC0415

            objection = vllm_objection(__version__)
            if objection is None:
                raise
            # What moved in another version is a riddle; which version to install is an answer.
            raise ImportError(f"bidikv: {objection}") from error
        return BidiNixlConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
