"""The live page in a real browser: what it shows, what it keeps to itself, and who can use it."""

import contextlib
import shutil
import time
from dataclasses import replace

import pytest
from fake_engine import Failure
from playwright.async_api import async_playwright, expect

from bidikv_server.reasons import Reason
from bidikv_server.router.core.engines import Role
from bidikv_server.router.core.history import TurnRecord
from bidikv_server.router.core.ids import ConversationKey, EngineUrl, Scope
from bidikv_server.router.core.policy import Placement

pytestmark = pytest.mark.anyio

PATIENCE_MS = 30_000
"""For anything to come true: a deadline that nothing waits for where it does."""
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
RECORD = TurnRecord(
    turn=b"", reason=Reason.HIT, placement=Placement.HOME, prompt_tokens=100, remote_tokens=64, local_tokens=16,
    computed_tokens=20, diverged_at_token=None, prefill=None, decode=None, ttft_s=0.1, at_s=0.0,
)  # fmt: skip
HOSTILE = "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>"


@pytest.fixture(scope="module")
async def browser(anyio_backend):
    """A headless browser of the system's."""
    if CHROMIUM is None:
        pytest.skip("there is no Chromium on this machine: scripts/services.sh chromium installs it")
    expect.set_options(timeout=PATIENCE_MS)
    async with async_playwright() as playwright:
        running = await playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        yield running
        await running.close()


@pytest.fixture
async def open_page(browser):
    """A function that opens a router's page; at the end no page may have complained of anything."""
    complaints: list[str] = []
    async with contextlib.AsyncExitStack() as stack:

        async def _open(cluster, *, key: str | None = "sk-admin", **options):
            context = await browser.new_context(**options)
            stack.push_async_callback(context.close)
            page = await context.new_page()
            page.set_default_timeout(PATIENCE_MS)
            page.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
            page.on("pageerror", lambda error: complaints.append(str(error)))
            await page.goto(f"{cluster.client.base_url}/bidikv/ui")
            if key is not None:
                await page.get_by_label("Key", exact=True).fill(key)
                await page.keyboard.press("Enter")
                await expect(page.locator("#overview")).to_be_visible()
            return page

        yield _open
    # The browser itself reports answers that are errors, and what a test has the policy forbid.
    expected = ("Failed to load resource", "requires 'TrustedHTML' assignment")
    assert [complaint for complaint in complaints if not any(e in complaint for e in expected)] == []


@pytest.fixture
async def played(start):
    """A router that has seen a new conversation, a hit, a changed history and a turn that failed."""
    cluster = await start(decode=2, admin_key="sk-admin")
    engine = cluster.prefill[0]
    cluster.decode[0].index_lines += (
        'vllm:kv_cache_usage_perc{engine="0"} 0.25\nvllm:num_requests_waiting{engine="0"} 3.0\n'
        'bidikv:retained_tokens{class="soft",engine="0"} 12000\nbidikv:retained_tokens{class="protected"} 345\n'
    )
    await cluster.probe()
    headers = {"X-Session-ID": "session-1"}
    await cluster.chat("hi", headers=headers)
    await cluster.chat("hi", "Hello", "more", headers=headers)
    engine.account = {**engine.account, "reason": "hit_diverged", "diverged_at_token": 1234}
    await cluster.chat("hi", "Hello", "other", headers=headers)
    for decode in cluster.decode:
        decode.failures.append(Failure(400))
    await cluster.chat("bad", headers={"X-Session-ID": "session-2", "X-Request-Id": "req-bad"})
    return cluster


async def test_overview(played, open_page):
    """Engines and their state, turns with what they reused, reasons, and conversations."""
    page = await open_page(played)
    await expect(page.locator("#state")).to_have_text("Live")
    await expect(page.locator("#columns li")).to_have_count(4)
    segments = page.locator("#columns li").nth(1).locator("i")
    assert [await segment.get_attribute("class") for segment in await segments.all()] == [
        "remote", "local", "computed",
    ]  # fmt: skip
    widths = [await segment.evaluate("node => node.style.flexGrow") for segment in await segments.all()]
    assert widths == ["64", "16", "20"]
    rows = page.locator("#engines tr")
    await expect(rows).to_have_count(3)
    await expect(rows.nth(1)).to_contain_text("25 %")
    await expect(rows.nth(1)).to_contain_text("12,345")
    await expect(page.locator("#reasons li")).to_have_count(4)
    await expect(page.locator("#conversations tr")).to_have_count(1)
    await expect(page.locator("#conversations tr")).to_contain_text("hit_diverged")
    # The newest turn is told of: it failed, and where to look.
    await expect(page.locator("#told")).to_contain_text("refused_by_engine")
    await expect(page.locator("#told")).to_contain_text("req-bad")


async def test_why_a_turn_missed(played, open_page):
    """A conversation's turns, newest first, each with its bar, its counts and the advice that `explain` gives."""
    page = await open_page(played)
    await page.locator("#conversations a").click()
    turns = page.locator("#recent li")
    await expect(turns).to_have_count(3)
    await expect(page.locator("#conversation-title")).to_be_focused()
    await expect(turns.nth(0)).to_contain_text("The history changed at prompt token 1,234")
    await expect(turns.nth(0)).to_contain_text("64 read back, 16 from prefill's cache, 20 computed")
    await expect(turns.nth(2)).to_contain_text("No known turn belongs to this conversation")
    await expect(page.locator("#tree li")).to_have_count(3)
    await expect(page.locator("#tree li.branch")).to_have_count(2)
    await page.go_back()
    await expect(page.locator("#overview")).to_be_visible()


async def test_it_is_live(played, open_page):
    """What happens shows without a reload, and what has the focus keeps it; paused, it stays as it is."""
    page = await open_page(played)
    await page.locator("#conversations a").focus()
    await played.chat("new", headers={"X-Session-ID": "session-3"})
    await played.client.post(
        "/bidikv/v1/engines/drain",
        json={"url": played.urls["decode-1"]},
        headers={"Authorization": "Bearer sk-admin"},
    )
    await expect(page.locator("#conversations tr")).to_have_count(2)
    await expect(page.locator("#engines tr").nth(2)).to_contain_text("draining")
    for _ in range(10):
        played.app.engines.leg_failed(EngineUrl(played.urls["decode-0"]), Role.DECODE, time.monotonic())
    await expect(page.locator("#engines tr").nth(1)).to_contain_text("circuit open")
    focused = page.locator("#conversations tr").nth(1).locator("a")
    await expect(focused).to_be_focused()
    await page.get_by_role("button", name="Pause").click()
    await expect(page.locator("#state")).to_have_text("Paused")


async def test_by_keyboard_alone(played, open_page):
    """Every step of the way has a key: sign in, walk the turns, open one, come back."""
    page = await open_page(played)
    await page.locator("#columns .chosen a").focus()
    await page.keyboard.press("Home")
    await expect(page.locator("#told")).to_contain_text("new_conversation")
    await page.keyboard.press("ArrowRight")
    await expect(page.locator("#told")).to_contain_text("nothing to change")
    assert await page.locator("#columns a[tabindex='0']").count() == 1
    await page.keyboard.press("Enter")
    await expect(page.locator("#conversation")).to_be_visible()
    await page.keyboard.press("Shift+Tab")
    await page.keyboard.press("Enter")
    await expect(page.locator("#overview")).to_be_visible()


@pytest.mark.parametrize("stored", [False, True])
async def test_the_key(played, open_page, stored):
    """A wrong one is said so; the right one is in memory, or in the tab's storage if asked for, until it is forgotten."""
    page = await open_page(played, key=None)
    assert "hit" not in await page.content()
    await page.get_by_label("Key", exact=True).fill("sk-wrong")
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("alert")).to_have_text("The router does not take this key.")
    await page.get_by_label("Key", exact=True).fill("sk-admin")
    if stored:
        await page.get_by_label("Keep it in this tab").check()
    await page.get_by_role("button", name="Open").first.click()
    await expect(page.locator("#overview")).to_be_visible()
    assert "sk-admin" not in await page.content()
    assert "sk-admin" not in page.url
    kept = await page.evaluate("[sessionStorage.length, localStorage.length, document.cookie]")
    assert kept == [1 if stored else 0, 0, ""]
    await page.reload()
    await expect(page.locator("#overview" if stored else "#sign-in")).to_be_visible()
    if stored:
        await page.get_by_role("button", name="Forget key").click()
        await expect(page.locator("#sign-in")).to_be_visible()
        assert await page.evaluate("sessionStorage.length") == 0


async def test_hostile_names(start, open_page):
    """What clients write is text: model, session and request names with markup in them change nothing."""
    cluster = await start(admin_key="sk-admin")
    headers = {"X-Session-ID": HOSTILE.replace(" ", "/"), "X-Request-Id": "<b>x</b>"}
    await cluster.chat("hi", headers=headers, model=HOSTILE)
    await cluster.chat("hi", headers={"baggage": f"session.id={HOSTILE}"}, model=HOSTILE)
    page = await open_page(cluster)
    await expect(page.locator("#conversations tr").first).to_contain_text("<img src=x")
    await page.locator("#conversations a").first.click()
    await expect(page.locator("#facts")).to_contain_text("<script>")
    assert await page.locator("main img, main script").count() == 0
    assert await page.title() == "bidikv router"
    # Not even the page's own code could turn text into markup.
    write = "() => { try { document.body.innerHTML = '<p>x'; return false; } catch { return true; } }"
    assert await page.evaluate(write)


async def test_a_thousand_conversations(start, open_page):
    """The list comes in pages, and goes there and back."""
    cluster = await start(admin_key="sk-admin")
    for number in range(1000):
        key = ConversationKey(f"{number:032x}")
        cluster.app.history.record(key, Scope("", "m"), replace(RECORD, at_s=time.time()))
    page = await open_page(cluster)
    links = page.locator("#conversations a")
    older, newer = (page.get_by_role("button", name=name) for name in ("Older", "Newer"))
    await expect(links).to_have_count(50)
    await expect(newer).to_be_disabled()
    for first in (1, 51, 101):
        await expect(page.locator("#page")).to_have_text(f"{first} to {first + 49}")
        await expect(links.first).to_have_attribute("href", f"#/c/{1000 - first:032x}")
        await older.click()
    for first in (151, 101, 51):
        await expect(page.locator("#page")).to_have_text(f"{first} to {first + 49}")
        await newer.click()
    await expect(links.first).to_have_attribute("href", f"#/c/{999:032x}")
    for first in range(1, 951, 50):
        await expect(page.locator("#page")).to_have_text(f"{first} to {first + 49}")
        await older.click()
    await expect(page.locator("#page")).to_have_text("951 to 1,000")
    await expect(older).to_be_disabled()


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_narrow_and_dark(played, open_page, scheme):
    """On a phone nothing is wider than the screen; text stands out from its ground in both schemes."""
    page = await open_page(played, color_scheme=scheme, viewport={"width": 360, "height": 740})
    for view in ("#overview", "#conversation"):
        await expect(page.locator(view)).to_be_visible()
        assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert await page.evaluate(CONTRASTS) == []
        if view == "#overview":
            await page.locator("#conversations a").click()


async def test_a_router_that_goes_away(played, open_page):
    """The page says so, goes on asking, and recovers."""
    page = await open_page(played)
    await page.route("**/bidikv/v1/**", lambda route: route.abort())
    await expect(page.locator("#state")).to_have_text("The router does not answer")
    await page.unroute_all()
    await expect(page.locator("#state")).to_have_text("Live")


async def test_unknown_conversation(played, open_page):
    """A key that nobody knows is said so; one that cannot be a key is not asked for."""
    page = await open_page(played)
    await page.get_by_placeholder("Key, as in").fill("0" * 32)
    await page.keyboard.press("Enter")
    await expect(page.locator("#missing")).to_contain_text("0" * 32)
    await page.get_by_role("link", name="All conversations").last.click()
    await expect(page.locator("#overview")).to_be_visible()


CONTRASTS = """() => {
  const channel = (v) => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const ground = (node) => {
    for (; node; node = node.parentElement) {
      const [r, g, b, a = 1] = parse(getComputedStyle(node).backgroundColor);
      if (a === 1) return [r, g, b];
    }
    return [255, 255, 255];
  };
  const bad = [];
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
    if (!own || !node.checkVisibility() || node.closest(":disabled")) continue;
    const [a, b] = [light(parse(getComputedStyle(node).color)), light(ground(node))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) bad.push(`${node.textContent.trim()} ${ratio.toFixed(2)}`);
  }
  return bad;
}"""
"""Texts whose contrast with what is behind them is below what WCAG asks for."""
