"""Builds the transfer system that the settings name."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from bidikv_server.router.core.handles import HandleBook
from bidikv_server.router.transfer import names
from bidikv_server.router.transfer.bidirectional import Bidirectional
from bidikv_server.router.transfer.combined import Combined
from bidikv_server.router.transfer.lmcache import LMCache
from bidikv_server.router.transfer.mooncake import Mooncake
from bidikv_server.router.transfer.nixl import NixlPull, NixlPush
from bidikv_server.router.transfer.readback import Readback

if TYPE_CHECKING:
    from bidikv_server.router.settings import RouterSettings
    from bidikv_server.router.transfer.system import TransferSystem
    from bidikv_server.router.upstream import EngineClient

_log = logging.getLogger(__name__)
_CAUTION: Final = (
    "transfer = nixl-bidirectional: stock engines verify nothing they read. Start all of them with"
    " bidirectional_kv_xfer, or prefill hangs; decode holds the blocks of every turn for its full"
    " decoder_kv_blocks_ttl, streamed turns included, which are never read back"
)


def build(settings: RouterSettings, client: EngineClient) -> TransferSystem:
    """The system of this router; `client` asks engines what it needs to know of them."""
    systems = [_build_one(name, settings, client) for name in names.parse(settings.transfer)]
    return systems[0] if len(systems) == 1 else Combined(systems)


def _build_one(name: str, settings: RouterSettings, client: EngineClient) -> TransferSystem:
    match name:
        case names.NIXL:
            return NixlPull()
        case names.NIXL_BIDIRECTIONAL:
            _log.warning(_CAUTION)
            return Bidirectional(
                client,
                HandleBook(max_handles=settings.max_conversations, ttl_s=settings.handle_ttl_s),
                probe_timeout_s=settings.probe_timeout_s,
                render_timeout_s=settings.prefill_timeout_s,
            )
        case names.NIXL_PUSH:
            return NixlPush()
        case names.MOONCAKE:
            return Mooncake(client, settings.mooncake_bootstrap, timeout_s=settings.probe_timeout_s)
        case names.LMCACHE:
            return LMCache()
        case _:
            return Readback()
