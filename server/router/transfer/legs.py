"""The two legs of a turn, one after the other or at once."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from bidikv_server.router.relay import LegFailed, RefusedByEngine
from bidikv_server.router.transfer.system import LegOrder

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import Any

    from bidikv_server.router.core.accounts import PrefillAnswer


async def run_legs(
    order: LegOrder,
    prefill: Callable[[], Coroutine[Any, Any, PrefillAnswer]],
    decode: Callable[[asyncio.Future[PrefillAnswer]], Coroutine[Any, Any, None]],
) -> None:
    """Run both. At once, the first that fails ends the other: decode would wait in vain, or prefill compute for nobody.

    Args:
        order: When the decode leg is sent.
        prefill: Runs the prefill leg.
        decode: Runs the decode leg, given prefill's answer or its promise.

    Raises:
        LegFailed: A leg failed.
        RefusedByEngine: An engine refused the request.
    """
    if order is LegOrder.IN_TURN:
        known = asyncio.get_running_loop().create_future()
        known.set_result(await prefill())
        await decode(known)
        return
    try:
        async with asyncio.TaskGroup() as legs:
            prefilling = legs.create_task(prefill())
            await decode(prefilling)
    except* (LegFailed, RefusedByEngine) as group:
        failed = group.exceptions[0]
    else:
        return
    raise failed
