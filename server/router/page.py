"""The live page under /bidikv/ui: three static files that hold no data. What they show they ask of the admin API."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING, Final

from bidikv_server.router.errors import MethodNotAllowed, NotFound
from bidikv_server.router.replies import headers_of

if TYPE_CHECKING:
    from bidikv_server.router.replies import Endpoint, Reply, Scope

PATH: Final = "/bidikv/ui"
_FILES: Final = {
    PATH: ("page.html", "text/html; charset=utf-8"),
    PATH + "/page.css": ("page.css", "text/css; charset=utf-8"),
    PATH + "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    PATH + "/icon.svg": ("icon.svg", "image/svg+xml"),
}
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
"""Nothing inline, nothing from elsewhere, and no text that becomes markup."""
_SAFETY: Final = (
    (b"content-security-policy", _POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-cache"),
)


@dataclass(frozen=True, slots=True)
class _File:
    body: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    tag: bytes


class LivePage:
    """Serves the page while there is an admin API for it to ask."""

    def __init__(self, *, enabled: bool) -> None:
        self._files = {path: _read(name, kind) for path, (name, kind) in _FILES.items()} if enabled else {}

    def serves(self, path: str) -> bool:
        """Whether the path is one of the page's, or looks like it."""
        return path == PATH or path.startswith(PATH + "/")

    def endpoint(self, scope: Scope) -> Endpoint:
        """The endpoint of a request.

        Raises:
            NotFound: There is no such file, or no page.
            MethodNotAllowed: It is not read.
        """
        file = self._files.get(scope["path"])
        if file is None:
            raise NotFound(f"There is no endpoint {scope['path']}.")
        if scope["method"] not in {"GET", "HEAD"}:
            raise MethodNotAllowed(f"{scope['path']} does not take {scope['method']}.")
        return lambda scope, _raw, reply: _send(file, scope, reply)


async def _send(file: _File, scope: Scope, reply: Reply) -> None:
    if headers_of(scope).get("if-none-match", "").encode() == file.tag:
        await reply.start(304, file.headers)
        await reply.end()
        return
    await reply.whole(200, file.headers, b"" if scope["method"] == "HEAD" else file.body)


def _read(name: str, kind: str) -> _File:
    body = (files("bidikv_server.router") / "ui" / name).read_bytes()
    tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'.encode()
    return _File(body, ((b"content-type", kind.encode()), (b"etag", tag), *_SAFETY), tag)
