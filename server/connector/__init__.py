"""The out-of-tree vLLM connector: NIXL's pull connector with a retention index and verified readback.

vLLM loads it with `kv_connector_module_path="bidikv_server.connector"` and `kv_connector="BidiNixlConnector"`; the
attribute is resolved lazily so that reading the configuration of a connector does not import vLLM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bidikv_server.connector.connector import BidiNixlConnector

__all__ = ["BidiNixlConnector"]


def __getattr__(name: str) -> object:
    if name == "BidiNixlConnector":
        from bidikv_server.connector.connector import BidiNixlConnector  # noqa: PLC0415

        return BidiNixlConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
