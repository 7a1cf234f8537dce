"""The OpenAPI description tells the truth, and requests made of it, right ones and wrong ones, never break the router."""

from __future__ import annotations

import asyncio
import re

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from bidikv_server.router.app import create_app
from bidikv_server.router.openapi import describe
from bidikv_server.router.settings import RouterSettings

pytestmark = pytest.mark.anyio

EXAMPLES = 7
"""Of each operation and mode."""
CHECKS = (not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance)
OPERATIONS = {
    (path, method): operation
    for path, methods in describe()["paths"].items()
    for method, operation in methods.items()
}


def make(**more) -> RouterSettings:
    return RouterSettings(prefill=("http://127.0.0.1:9",), decode=("http://127.0.0.1:9",), **more)


def test_every_endpoint_is_described():
    """The description and the router's own tables name the same paths and methods."""
    app = create_app(make())
    served = {(path, method.lower()) for path, methods in app._endpoints.items() for method in methods}
    served |= {
        (re.sub(r"resp_1", "{response_id}", path), method.lower())
        for path in ("/v1/responses/resp_1", "/v1/responses/resp_1/cancel")
        for method in app._responses.endpoints(path)
    }
    described = {key for key in OPERATIONS if "/bidikv/" not in key[0]}
    assert described == served


@pytest.mark.parametrize(("path", "method"), [key for key in OPERATIONS if key[0].startswith("/v1/bidikv/")])
async def test_every_described_endpoint_of_ones_own_is_there(start, path, method):
    """Also for a caller who has no such conversation."""
    cluster = await start()
    answer = await cluster.client.request(method, path.format(key="0" * 32), json={"wait_s": 1})
    assert answer.status_code == 404
    assert "no endpoint" not in answer.text


@pytest.mark.parametrize("wait_s", ["1" + "0" * 400, "9" * 5000, "1e300", "1e999", "-1", "true", "null"])
async def test_absurd_waits(start, wait_s):
    """A number that no clock has is the client's mistake."""
    cluster = await start()
    path = f"/v1/bidikv/conversations/{'0' * 32}/wait"
    answer = await cluster.client.post(path, content=f'{{"wait_s": {wait_s}}}')
    assert answer.status_code == 400


@pytest.mark.parametrize(("path", "method"), [key for key in OPERATIONS if key[0].startswith("/bidikv/")])
async def test_every_described_admin_endpoint_is_there(start, path, method):
    """And asks for the administrator's key."""
    cluster = await start(admin_key="admin")
    answer = await cluster.client.request(method, path.format(key="0" * 32), json={})
    assert answer.status_code == 401
    key = {"Authorization": "Bearer admin"}
    answer = await cluster.client.request(method, path.format(key="0" * 32), json={}, headers=key)
    assert answer.status_code in {200, 400, 404}
    assert "no endpoint" not in answer.text


async def test_it_is_served_without_a_key(start):
    """A client finds it where it looks for it."""
    cluster = await start(api_key="secret")
    assert (await cluster.client.get("/openapi.json")).json() == describe()
    assert (await cluster.client.get("/live")).status_code == 200


def send_requests(url: str) -> None:
    """Send what the description allows, and what it forbids."""
    schema = schemathesis.openapi.from_dict(describe())
    for (path, method), described in OPERATIONS.items():
        operation = schema[path][method.upper()]
        modes = (
            list(GenerationMode)
            if described.keys() & {"parameters", "requestBody"}
            else [GenerationMode.POSITIVE]
        )
        for mode in modes:

            @given(case=operation.as_strategy(generation_mode=mode))
            @settings(
                max_examples=EXAMPLES,
                deadline=None,
                database=None,
                derandomize=True,
                suppress_health_check=list(HealthCheck),
            )
            def send(case) -> None:
                response = case.call(base_url=url, headers={"Authorization": "Bearer admin"})
                case.validate_response(response, checks=CHECKS)

            send()


async def test_requests_of_the_description(start):
    """Every answer is described, and none is a server error."""
    cluster = await start(admin_key="admin")
    await asyncio.to_thread(send_requests, str(cluster.client.base_url))
    answer = await cluster.chat("hello")
    assert answer.status_code == 200
