"""The live page's files: what they may do, and who gets them."""

import re
from importlib.resources import files

import pytest

pytestmark = pytest.mark.anyio

UI = "/bidikv/ui"
FILES = {
    "": "text/html",
    "/page.css": "text/css",
    "/page.js": "text/javascript",
    "/icon.svg": "image/svg+xml",
}


@pytest.mark.parametrize(("name", "kind"), FILES.items())
async def test_files(start, name, kind):
    """Served without a key, under a policy that lets nothing in but these files, and revalidated by tag."""
    cluster = await start(admin_key="sk-admin", api_key="sk-client")
    answer = await cluster.client.get(UI + name)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith(kind)
    policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["require-trusted-types-for"] == "'script'"
    assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert answer.headers["x-content-type-options"] == "nosniff"
    again = await cluster.client.get(UI + name, headers={"If-None-Match": answer.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    head = await cluster.client.head(UI + name)
    assert (head.status_code, head.content) == (200, b"")


@pytest.mark.parametrize("settings", [{}, {"api_key": "sk-1"}])
@pytest.mark.parametrize("name", FILES)
async def test_without_an_admin_key_there_is_no_page(start, settings, name):
    """As any path that does not exist."""
    cluster = await start(**settings)
    assert (await cluster.client.get(UI + name)).status_code == 404


@pytest.mark.parametrize("name", ["/", "/page.html", "/../metrics", "/%2e%2e/app.py", "/page.js/x"])
async def test_nothing_else_is_served(start, name):
    """Four paths, each as it is."""
    cluster = await start(admin_key="sk-admin")
    assert (await cluster.client.get(UI + name)).status_code in {404, 200 if "metrics" in name else 404}
    assert (await cluster.client.post(UI)).status_code == 405


def test_the_page_needs_nothing_from_elsewhere():
    """No address, nothing inline that the policy would block, and no way from text to markup."""
    folder = files("bidikv_server.router") / "ui"
    sources = {path.name: path.read_text("utf-8") for path in folder.iterdir()}
    assert set(sources) == {"page.html", "page.css", "page.js", "icon.svg"}
    for name, text in sources.items():
        addresses = set(re.findall(r"https?://[\w.]+", text)) - {"http://www.w3.org"}
        assert addresses == set(), name
    html, script = sources["page.html"], sources["page.js"]
    assert not re.search(r"\son\w+=|\sstyle=|<style|javascript:|<script(?![^>]*\ssrc=)", html)
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|srcdoc", script
    )
    assert "localStorage" not in script
