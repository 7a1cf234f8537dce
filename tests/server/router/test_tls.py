"""TLS with real certificates on both sides: who is let in, who is believed, and that a certificate changes under way."""

import asyncio
import contextlib
import os
import shutil
import ssl

import httpx2
import pytest
import trustme
from cryptography.hazmat.primitives import serialization
from fake_engine import CHAT_EVENTS, FakeEngine, eventually, serving

from bidikv_server.router.server import create_server
from bidikv_server.router.settings import RouterSettings, SettingsError

pytestmark = pytest.mark.anyio


class Files:
    """A folder of PEM files, made by one authority."""

    def __init__(self, folder):
        self.folder = folder
        self.authority = trustme.CA()
        self.ca = folder / "ca.pem"
        self.authority.cert_pem.write_to_path(str(self.ca))
        self._steps = iter(range(1, 1000))

    def issue(self, name, *hosts, by=None):
        """Write `name`.crt and `name`.key, and return both paths."""
        cert, key = self.folder / f"{name}.crt", self.folder / f"{name}.key"
        leaf = (by or self.authority).issue_cert(*(hosts or ("127.0.0.1",)))
        cert.write_bytes(b"".join(blob.bytes() for blob in leaf.cert_chain_pems))
        leaf.private_key_pem.write_to_path(str(key))
        step = next(self._steps)
        for path in (cert, key):
            os.utime(path, (step, step))
        return cert, key


@pytest.fixture
def files(tmp_path):
    return Files(tmp_path)


@contextlib.asynccontextmanager
async def router(*, decode=None, engine_tls=None, scheme="http", **settings):
    """A router under its own server, in front of a prefill engine without TLS; yields its base URL."""
    async with contextlib.AsyncExitStack() as stack:
        (prefill,) = await stack.enter_async_context(serving(FakeEngine("prefill")))
        (url,) = await stack.enter_async_context(
            serving(decode or FakeEngine("decode"), **(engine_tls or {}))
        )
        server = create_server(
            RouterSettings(prefill=(prefill,), decode=(url,), port=0, probe_failures=1, **settings)
        )
        task = asyncio.ensure_future(server.serve())
        try:
            await eventually(lambda: server.started or task.done())
            port = server.servers[0].sockets[0].getsockname()[1]
            yield f"{scheme}://127.0.0.1:{port}", server
        finally:
            server.should_exit = True
            await task


def client(url, files, cert=None):
    context = ssl.create_default_context(cafile=files.ca)
    if cert is not None:
        context.load_cert_chain(*cert)
    return httpx2.AsyncClient(base_url=url, verify=context, timeout=10.0)


async def chat(http, **fields):
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
    return await http.post("/v1/chat/completions", json=body)


async def test_serving(files):
    """A client that trusts the authority is served, streams included; plain HTTP is not."""
    cert, key = files.issue("router")
    async with router(tls_cert_file=cert, tls_key_file=key, scheme="https") as (url, _):
        async with client(url, files) as http:
            assert (await chat(http, stream=True)).content == b"".join(CHAT_EVENTS)
        async with httpx2.AsyncClient(timeout=10.0) as http:
            with pytest.raises(httpx2.ConnectError):
                await http.get(f"{url}/live")
            with pytest.raises(httpx2.TransportError):
                await http.get(url.replace("https", "http") + "/live")


async def test_key_and_certificate_in_one_file(files):
    """Then the key's own setting is not needed."""
    cert, key = files.issue("router")
    both = files.folder / "both.pem"
    both.write_bytes(key.read_bytes() + cert.read_bytes())
    async with router(tls_cert_file=both, scheme="https") as (url, _), client(url, files) as http:
        assert (await http.get("/live")).status_code == 200


async def test_mutual(files):
    """With a client authority, only certificates of it get in."""
    cert, key = files.issue("router")
    other = files.issue("other", by=trustme.CA())
    own = files.issue("client")
    settings = {"tls_cert_file": cert, "tls_key_file": key, "tls_client_ca_file": files.ca}
    async with router(**settings, scheme="https") as (url, _):
        async with client(url, files, own) as http:
            assert (await chat(http)).status_code == 200
        for shown in (None, other):
            async with client(url, files, shown) as http:
                with pytest.raises(httpx2.TransportError):
                    await http.get("/live")


async def test_a_changed_certificate_is_taken(files, caplog):
    """For new connections, without a restart; one that cannot be used leaves the earlier one."""
    caplog.set_level("INFO")
    cert, key = files.issue("router")
    async with router(tls_cert_file=cert, tls_key_file=key, scheme="https") as (url, server):
        before = await shown_by(url)
        files.issue("router")
        await eventually(lambda: "tls_cert_file was read again" in caplog.text)
        assert await shown_by(url) not in {before, None}
        after = await shown_by(url)
        files.issue("stranger")
        shutil.copy(files.folder / "stranger.key", key)
        await eventually(
            lambda: "tls_cert_file changed and cannot be used, the earlier one stays" in caplog.text
        )
        assert await shown_by(url) == after
        assert "key values mismatch" in caplog.text
        assert server.started


async def shown_by(url):
    """The certificate that a server shows."""
    host, port = url.removeprefix("https://").split(":")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    _, writer = await asyncio.open_connection(host, int(port), ssl=context)
    certificate = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return certificate


async def up(http):
    health = (await http.get("/health")).json()
    return health["decode"][0]["healthy"]


async def test_engines_with_tls(files, caplog):
    """They are believed by the authority that the settings name, and by nobody else's word."""
    cert, key = files.issue("engine")
    engine_tls = {"ssl_certfile": str(cert), "ssl_keyfile": str(key)}
    async with (
        router(engine_tls=engine_tls, upstream_ca_file=files.ca) as (url, _),
        httpx2.AsyncClient(base_url=url, timeout=10.0) as http,
    ):
        assert (await chat(http, stream=True)).content == b"".join(CHAT_EVENTS)
    (files.folder / "strangers").mkdir()
    strangers = Files(files.folder / "strangers")
    for settings in ({}, {"upstream_ca_file": strangers.ca}):
        caplog.clear()
        async with (
            router(engine_tls=engine_tls, **settings) as (url, _),
            httpx2.AsyncClient(base_url=url, timeout=10.0) as http,
        ):
            assert not await up(http)
            assert (await chat(http)).status_code == 503
        assert "is not trusted" in caplog.text
        assert "setting 'upstream_ca_file'" in caplog.text


async def test_an_engine_under_another_name(files, caplog):
    """A certificate of the right authority for another host is not believed either."""
    cert, key = files.issue("engine", "engine.example")
    engine_tls = {"ssl_certfile": str(cert), "ssl_keyfile": str(key)}
    async with (
        router(engine_tls=engine_tls, upstream_ca_file=files.ca) as (url, _),
        httpx2.AsyncClient(base_url=url, timeout=10.0) as http,
    ):
        assert not await up(http)
    assert "is not trusted" in caplog.text


async def test_unverified_engines(files, caplog):
    """Only on demand, and with a warning."""
    cert, key = files.issue("engine", "engine.example")
    engine_tls = {"ssl_certfile": str(cert), "ssl_keyfile": str(key)}
    async with (
        router(engine_tls=engine_tls, upstream_verify=False) as (url, _),
        httpx2.AsyncClient(base_url=url, timeout=10.0) as http,
    ):
        assert (await chat(http)).status_code == 200
    assert "upstream_verify is off" in caplog.text


async def test_engines_that_ask_for_a_certificate(files):
    """They get the router's; without one they are down."""
    cert, key = files.issue("engine")
    own_cert, own_key = files.issue("router")
    engine_tls = {
        "ssl_certfile": str(cert), "ssl_keyfile": str(key), "ssl_ca_certs": str(files.ca),
        "ssl_cert_reqs": ssl.CERT_REQUIRED,
    }  # fmt: skip
    shown = {"upstream_cert_file": own_cert, "upstream_key_file": own_key}
    for settings, status in ((shown, 200), ({}, 503)):
        async with (
            router(engine_tls=engine_tls, upstream_ca_file=files.ca, **settings) as (url, _),
            httpx2.AsyncClient(base_url=url, timeout=10.0) as http,
        ):
            assert (await chat(http)).status_code == status


ENGINES = {"prefill": ("http://p:1",), "decode": ("http://d:1",)}


async def test_files_that_cannot_be_used(files):
    """Each is named with its setting at start, and a key with a password does not ask for it."""
    cert, key = files.issue("router")
    _, other = files.issue("other")
    text = files.folder / "text.pem"
    text.write_text("no certificate")
    locked = files.folder / "locked.key"
    locked.write_bytes(encrypted(key.read_bytes()))
    missing = files.folder / "missing.pem"
    for settings, message in (
        ({"tls_cert_file": missing}, f"tls_cert_file: cannot read {missing}"),
        ({"tls_cert_file": cert, "tls_key_file": missing}, f"tls_cert_file: cannot read {missing}"),
        ({"tls_cert_file": text}, f"tls_cert_file: {text}: "),
        ({"tls_cert_file": cert, "tls_key_file": other}, "key values mismatch"),
        ({"tls_cert_file": cert, "tls_key_file": locked}, "its key without a password"),
        (
            {"tls_cert_file": cert, "tls_key_file": key, "tls_client_ca_file": text},
            f"tls_client_ca_file: {text}: ",
        ),
        ({"upstream_ca_file": missing}, f"upstream_ca_file: cannot read {missing}"),
        ({"upstream_cert_file": text}, f"upstream_cert_file: {text}: "),
    ):
        with pytest.raises(SettingsError) as caught:
            create_server(RouterSettings(**ENGINES, **settings))
        assert message in str(caught.value), settings
        assert "\n" not in str(caught.value)


def encrypted(pem: bytes) -> bytes:
    return serialization.load_pem_private_key(pem, None).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"hush"),
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tls_key_file": "k"}, "tls_key_file: has no use without tls_cert_file"),
        ({"tls_client_ca_file": "c"}, "tls_client_ca_file: has no use without tls_cert_file"),
        ({"upstream_key_file": "k"}, "upstream_key_file: has no use without upstream_cert_file"),
        (
            {"upstream_ca_file": "c", "upstream_verify": False},
            "upstream_ca_file: has no use while upstream_verify is false",
        ),
    ],
)
async def test_settings_without_effect(monkeypatch, settings, message):
    """Half a configuration is an error: it would leave something open that looks closed."""
    for name in [name for name in os.environ if name.upper().startswith("BIDIKV_ROUTER_")]:
        monkeypatch.delenv(name)
    with pytest.raises(SettingsError) as caught:
        RouterSettings.load(**ENGINES, **settings)
    assert str(caught.value) == message
