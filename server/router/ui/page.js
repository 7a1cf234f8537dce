// The live page. Everything it shows comes from the admin API and is written as text, never as markup.

const EVERY_MS = 2000;
const COLUMNS = 60;
const PAGE = 50;
const KEPT = "bidikv-admin-key";
const GOOD = new Set(["hit", "local"]);
const PARTLY = new Set(["hit_diverged", "hit_evicted", "new_conversation", "below_threshold"]);

const $ = (id) => document.getElementById(id);

const state = {
  key: null, // memory only, unless its owner asks for the tab's storage
  paused: false,
  timer: null,
  asking: null, // aborts what is under way when the view changes
  failures: 0,
  pages: [null], // `before` of each page up to the one shown
  next: null,
  turns: [],
  chosen: null, // number of the turn that is explained; null follows the newest one
};

// ---- elements ---------------------------------------------------------------------------------------------------

function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === false || value === null || value === undefined) continue;
    node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

// Keeps the elements of items that stay, so that a refresh takes neither focus nor selection away.
function reconcile(parent, items, keyOf, make, fill) {
  const old = new Map([...parent.children].map((node) => [node.dataset.key, node]));
  let at = parent.firstElementChild;
  for (const item of items) {
    const key = String(keyOf(item));
    let node = old.get(key);
    if (node === undefined) {
      node = make(item);
      node.dataset.key = key;
    }
    old.delete(key);
    fill(node, item);
    if (node === at) at = at.nextElementSibling;
    else parent.insertBefore(node, at);
  }
  for (const node of old.values()) node.remove();
}

function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// ---- words ------------------------------------------------------------------------------------------------------

const whole = new Intl.NumberFormat("en");
const count = (value) => (value === null || value === undefined ? "–" : whole.format(value));
const percent = (part, all) => (all > 0 ? `${((100 * part) / all).toFixed(part === all || part === 0 ? 0 : 1)} %` : "–");
const dayClock = new Intl.DateTimeFormat([], { dateStyle: "short", timeStyle: "medium" });
const todayClock = new Intl.DateTimeFormat([], { timeStyle: "medium" });

function clock(time_s) {
  const time = new Date(time_s * 1000);
  return (time.toDateString() === new Date().toDateString() ? todayClock : dayClock).format(time);
}

function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 0.0995) return `${(value * 1000).toFixed(value < 0.00995 ? 1 : 0)} ms`;
  return `${value.toFixed(value < 9.995 ? 2 : 1)} s`;
}

function span(value) {
  if (value < 60) return `${Math.floor(value)} s`;
  if (value < 3600) return `${Math.floor(value / 60)} min`;
  if (value < 172800) return `${Math.floor(value / 3600)} h`;
  return `${Math.floor(value / 86400)} d`;
}

const short = (key) => `${key.slice(0, 12)}…`;
const host = (url) => (url ? url.replace(/^https?:\/\//, "") : "–");

function kind(reason) {
  if (GOOD.has(reason)) return "good";
  return PARTLY.has(reason) ? "" : "warn";
}

const failed = (turn) => turn.outcome !== undefined && turn.outcome !== "ok";
const title = (turn) => (failed(turn) ? turn.outcome : turn.reason || "unknown");
const tag = (turn) => el("span", { class: `tag ${failed(turn) ? "bad" : kind(turn.reason)}` }, title(turn));
const partsKnown = (turn) => ["remote", "local", "computed"].some((source) => turn[`${source}_tokens`] > 0);

function countsLine(turn) {
  if (!partsKnown(turn)) return turn.prompt_tokens ? `${count(turn.prompt_tokens)} prompt tokens` : "tokens not known";
  return (
    `${count(turn.prompt_tokens)} prompt tokens: ${count(turn.remote_tokens)} read back, ` +
    `${count(turn.local_tokens)} from prefill's cache, ${count(turn.computed_tokens)} computed`
  );
}

function where(turn) {
  if (!turn.decode) return "";
  const placed = turn.placement ? ` (${turn.placement.replaceAll("_", " ")})` : "";
  return turn.prefill ? `${host(turn.prefill)} → ${host(turn.decode)}${placed}` : `${host(turn.decode)} alone${placed}`;
}

// Segments of one bar in proportion to tokens; `along` is how long a segment is in its container.
function fillParts(bar, turn) {
  const parts = failed(turn)
    ? [["failed", 1]]
    : partsKnown(turn)
      ? ["remote", "local", "computed"].map((source) => [source, turn[`${source}_tokens`] || 0])
      : [["unknown", 1]];
  reconcile(
    bar,
    parts,
    ([source]) => source,
    ([source]) => el("i", { class: source }),
    (segment, [, tokens]) => {
      segment.style.flexGrow = String(tokens);
      segment.style.flexBasis = "0";
    },
  );
}

// ---- the admin API ----------------------------------------------------------------------------------------------

class KeyRefused extends Error {}
class NotKnown extends Error {}

async function ask(path) {
  const answer = await fetch(`v1/${path}`, {
    headers: { Authorization: `Bearer ${state.key}` },
    cache: "no-store",
    credentials: "omit",
    signal: state.asking.signal,
  });
  if (answer.status === 401) throw new KeyRefused();
  if (answer.status === 404) throw new NotKnown();
  if (!answer.ok) throw new Error(`status ${answer.status}`);
  return answer.json();
}

// ---- views ------------------------------------------------------------------------------------------------------

const VIEWS = ["sign-in", "overview", "conversation", "missing"];

function show(view) {
  const changed = $(view).hidden;
  for (const id of VIEWS) $(id).hidden = id !== view;
  $("pause").hidden = $("forget").hidden = view === "sign-in";
  return changed;
}

function say(text, mood = "") {
  setText($("state"), text);
  $("state").className = `state ${mood}`;
}

const wanted = () => /^#\/c\/([0-9a-f]{32})$/.exec(location.hash)?.[1] ?? null;

async function refresh() {
  clearTimeout(state.timer);
  if (state.key === null) return;
  state.asking?.abort();
  const mine = (state.asking = new AbortController());
  try {
    const key = wanted();
    if (key === null) await showOverview();
    else await showConversation(key);
    state.failures = 0;
    if (!state.paused) say("Live", "live");
  } catch (error) {
    if (mine.signal.aborted) return;
    if (error instanceof KeyRefused) {
      signOut("The router does not take this key.");
      return;
    }
    if (error instanceof NotKnown) {
      showMissing();
    } else {
      state.failures += 1;
      say("The router does not answer", "broken");
    }
  }
  schedule();
}

function schedule() {
  clearTimeout(state.timer);
  if (state.paused || document.hidden || state.key === null) return;
  state.timer = setTimeout(refresh, EVERY_MS * 2 ** Math.min(state.failures, 4));
}

function showMissing() {
  const key = wanted();
  setText(
    $("missing-text"),
    key === null
      ? "The router has no admin API."
      : `The router knows no conversation ${key}: it was released, idle for too long, or never there.`,
  );
  if (show("missing")) $("missing").querySelector("h1").focus();
}

// ---- overview ---------------------------------------------------------------------------------------------------

async function showOverview() {
  const before = state.pages.at(-1);
  const [overview, engines, turns, page] = await Promise.all([
    ask("overview"),
    ask("engines"),
    ask(`turns?limit=${COLUMNS}`),
    ask(`conversations?limit=${PAGE}${before === null ? "" : `&before=${before}`}`),
  ]);
  setText($("version"), overview.version);
  fillTiles(overview);
  fillReasons(overview);
  reconcile($("engines"), engines.data, (e) => `${e.role} ${e.url}`, makeEngine, fillEngine);
  state.turns = turns.data.reverse();
  fillColumns();
  fillConversations(page);
  if (show("overview")) $("overview").querySelector("h1").focus();
}

function fillTiles(overview) {
  const turns = Object.values(overview.turns).reduce((sum, n) => sum + n, 0);
  const bad = Object.values(overview.failed_turns).reduce((sum, n) => sum + n, 0);
  const tokens = { remote: 0, local: 0, computed: 0, ...overview.prompt_tokens };
  const all = tokens.remote + tokens.local + tokens.computed;
  const tiles = [
    ["Conversations", count(overview.conversations), ""],
    ["Running turns", count(overview.turns_in_flight), `${count(overview.turns_queued)} waiting`],
    ["Turns", count(turns), bad > 0 ? `${count(bad)} failed` : "none failed"],
    ["Read back", percent(tokens.remote, all), `${count(tokens.remote)} tokens`],
    ["Prefill's cache", percent(tokens.local, all), `${count(tokens.local)} tokens`],
    ["Router", overview.phase, `up for ${span(overview.uptime_s)}`],
  ];
  reconcile(
    $("tiles"),
    tiles,
    ([name]) => name,
    ([name]) => el("div", {}, el("dt", {}, name), el("dd", {}, el("span"), el("small"))),
    (tile, [, value, note]) => {
      setText(tile.querySelector("span"), value);
      setText(tile.querySelector("small"), note || "\u00a0");
    },
  );
}

function fillReasons(overview) {
  const rows = [
    ...Object.entries(overview.turns).map(([name, n]) => [name, n, kind(name)]),
    ...Object.entries(overview.failed_turns).map(([name, n]) => [name, n, "bad"]),
  ].filter(([, n]) => n > 0);
  rows.sort((a, b) => b[1] - a[1]);
  const all = rows.reduce((sum, [, n]) => sum + n, 0);
  reconcile(
    $("reasons"),
    rows,
    ([name, , mood]) => `${mood === "bad"} ${name}`,
    ([name]) =>
      el("li", {}, el("span", { class: "tagged" }, el("span", { class: "tag" }, name)), el("span", { class: "share" }, el("i")), el("span", { class: "number" })),
    (row, [, n, mood]) => {
      row.className = mood;
      row.querySelector(".tag").className = `tag ${mood}`;
      row.querySelector("i").style.width = `${(100 * n) / all}%`;
      setText(row.querySelector(".number"), `${count(n)} · ${percent(n, all)}`);
    },
  );
  $("no-reasons").hidden = rows.length > 0;
}

function makeEngine(engine) {
  return el(
    "tr",
    {},
    el("td", { class: "long", title: engine.url }, host(engine.url), el("br"), el("span", { class: "role" }, engine.role)),
    el("td", {}, el("span", { class: "tag" })),
    el("td", { class: "number legs" }),
    el("td", { class: "number waiting" }),
    el("td", {}, el("span", { class: "meter" }, el("span", { class: "share", "aria-hidden": true }, el("i", { class: "remote" })), el("span", { class: "usage" }))),
    el("td", { class: "number retained" }),
  );
}

function fillEngine(row, engine) {
  const [word, mood] = !engine.healthy
    ? ["down", "bad"]
    : engine.circuit === "open" || engine.circuit === "half_open"
      ? [`circuit ${engine.circuit.replace("_", " ")}`, "bad"]
      : engine.draining
        ? ["draining", "warn"]
        : ["up", "good"];
  const label = row.querySelector(".tag");
  label.className = `tag ${mood}`;
  setText(label, word);
  setText(row.querySelector(".legs"), count(engine.in_flight));
  setText(row.querySelector(".waiting"), count(engine.waiting));
  const usage = engine.kv_usage;
  const known = usage !== null && usage !== undefined;
  row.querySelector(".share").hidden = !known;
  row.querySelector(".share i").style.width = known ? `${100 * usage}%` : "0";
  setText(row.querySelector(".usage"), known ? `${Math.round(100 * usage)} %` : "–");
  const retained = row.querySelector(".retained");
  setText(retained, count(engine.retained_tokens));
  retained.title = engine.protected_tokens ? `${count(engine.protected_tokens)} of them protected` : "";
}

// ---- columns ----------------------------------------------------------------------------------------------------

// A turn's wait: to its first byte, else as long as it was there.
const waited = (turn) => turn.ttft_s ?? turn.seconds ?? 0;

function fillColumns() {
  const turns = state.turns;
  const top = Math.max(...turns.map(waited), 0.001);
  setText($("axis-top"), turns.length ? seconds(top) : "");
  setText($("axis-mid"), turns.length ? seconds(top / 2) : "");
  if (!turns.some((turn) => turn.number === state.chosen)) state.chosen = null;
  const chosen = state.chosen ?? turns.at(-1)?.number;
  reconcile(
    $("columns"),
    turns,
    (turn) => turn.number,
    (turn) => el("li", {}, el("a", {}, el("span", { class: "column" }))),
    (item, turn) => {
      const link = item.firstElementChild;
      const name = `${title(turn)}, ${seconds(waited(turn))}, ${countsLine(turn)}`;
      link.setAttribute("aria-label", name);
      link.setAttribute("title", name);
      if (turn.conversation) link.setAttribute("href", `#/c/${turn.conversation}`);
      link.tabIndex = turn.number === chosen ? 0 : -1;
      item.className = turn.number === chosen ? "chosen" : "";
      link.firstElementChild.style.height = `${(100 * waited(turn)) / top}%`;
      fillParts(link.firstElementChild, turn);
    },
  );
  $("no-turns").hidden = turns.length > 0;
  fillTold(turns.find((turn) => turn.number === chosen));
}

function fillTold(turn) {
  const box = $("told");
  box.hidden = turn === undefined;
  if (turn === undefined || box.dataset.number === String(turn.number)) return;
  box.dataset.number = String(turn.number);
  const hadFocus = box.contains(document.activeElement);
  const link = turn.conversation
    ? el("a", { href: `#/c/${turn.conversation}`, class: "mono" }, short(turn.conversation))
    : null;
  box.replaceChildren(
    el("div", { class: "line" }, tag(turn), el("b", {}, seconds(waited(turn))), link,
      el("span", { class: "when" }, clock(turn.time_s)), el("span", { class: "muted" }, where(turn))),
    el("p", { class: "counts" }, countsLine(turn)),
    why(turn),
  );
  if (hadFocus) box.querySelector("a")?.focus();
}

// Why a turn reused no more, and what to change; what stands in backticks is code.
function why(turn) {
  const text = failed(turn)
    ? `The turn failed: ${turn.outcome}. Look for request \`${turn.request_id}\` in the router's log.`
    : turn.advice || "";
  const parts = text.split("`").map((part, index) => (index % 2 === 1 ? el("code", {}, part) : part));
  return el("p", { class: `why ${failed(turn) ? "" : kind(turn.reason)}` }, ...parts);
}

function choose(number, focus) {
  state.chosen = number;
  fillColumns();
  if (focus) $("columns").querySelector(".chosen a")?.focus();
}

function columnOf(event) {
  const item = event.target.closest("li");
  return item === null ? null : Number(item.dataset.key);
}

$("columns").addEventListener("keydown", (event) => {
  const step = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
  const number = columnOf(event);
  if (step === undefined || number === null) return;
  event.preventDefault();
  const at = state.turns.findIndex((turn) => turn.number === number);
  const to = Math.min(Math.max(at + step, 0), state.turns.length - 1);
  choose(state.turns[to].number, true);
});
$("columns").addEventListener("pointerover", (event) => {
  const number = columnOf(event);
  if (number !== null) choose(number, false);
});
$("columns").addEventListener("focusin", (event) => {
  const number = columnOf(event);
  if (number !== null && number !== state.chosen) choose(number, false);
});
$("columns").addEventListener("pointerleave", () => {
  if (!$("columns").contains(document.activeElement)) choose(null, false);
});

// ---- conversations ----------------------------------------------------------------------------------------------

function fillConversations(page) {
  state.next = page.next_before;
  reconcile(
    $("conversations"),
    page.data,
    (one) => one.key,
    (one) =>
      el(
        "tr",
        {},
        el("td", {}, el("a", { href: `#/c/${one.key}`, class: "mono", title: one.key }, short(one.key))),
        el("td", {}, el("span", { class: "tag" })),
        el("td", { class: "number ttft" }),
        el("td", { class: "reuse" }, el("span", { class: "share", role: "img" })),
        el("td", { class: "number turns-known" }),
        el("td", { class: "long", title: one.model }, one.model),
        el("td", { class: "long", title: one.tenant }, one.tenant || "–"),
        el("td", { class: "decode" }),
        el("td", { class: "number idle" }),
      ),
    (row, one) => {
      const label = row.querySelector(".tag");
      label.className = `tag ${kind(one.latest.reason)}`;
      setText(label, one.latest.reason);
      setText(row.querySelector(".ttft"), seconds(one.latest.ttft_s));
      const share = row.querySelector(".share");
      fillParts(share, one.latest);
      share.setAttribute("aria-label", countsLine(one.latest));
      share.setAttribute("title", countsLine(one.latest));
      setText(row.querySelector(".turns-known"), count(one.turns));
      setText(row.querySelector(".decode"), host(one.decode));
      setText(row.querySelector(".idle"), `${span(one.idle_s)} ago`);
    },
  );
  $("no-conversations").hidden = page.data.length > 0;
  $("newer").disabled = state.pages.length === 1;
  $("older").disabled = !page.has_more;
  const first = (state.pages.length - 1) * PAGE + 1;
  setText($("page"), page.data.length ? `${count(first)} to ${count(first + page.data.length - 1)}` : "");
}

$("older").addEventListener("click", () => {
  if (state.next === null) return;
  state.pages.push(state.next);
  state.next = null; // until the page is there, which says what comes after it
  refresh();
});
$("newer").addEventListener("click", () => {
  if (state.pages.length > 1) state.pages.pop();
  refresh();
});

// ---- one conversation -------------------------------------------------------------------------------------------

async function showConversation(key) {
  const told = await ask(`conversations/${key}`);
  setText($("conversation-title"), `Conversation ${told.key}`);
  const facts = [
    ["Model", told.model],
    ["Tenant", told.tenant || "–"],
    ["Turns in the table", count(told.turns)],
    ["Lives on", host(told.decode)],
    ["Last used", `${span(told.idle_s)} ago`],
  ];
  reconcile(
    $("facts"),
    facts,
    ([name]) => name,
    ([name]) => el("div", {}, el("dt", {}, name), el("dd")),
    (fact, [, value]) => setText(fact.querySelector("dd"), value),
  );
  const longest = Math.max(...told.recent.map((turn) => turn.ttft_s), 0.001);
  // Turns of one prompt may end within a millisecond: their number from the oldest on tells them apart.
  const rows = told.recent.map((turn, index) => ({ ...turn, row: `${turn.time_s.toFixed(1)} ${told.recent.length - index}` }));
  reconcile($("recent"), rows, (turn) => turn.row, makeTurn, (row, turn) => {
    row.querySelector(".wait .share").style.width = `${(100 * turn.ttft_s) / longest}%`;
  });
  fillTree(told.tree);
  if (show("conversation")) $("conversation-title").focus();
}

function makeTurn(turn) {
  const share = el("span", { class: "share", role: "img", "aria-label": countsLine(turn), title: countsLine(turn) });
  fillParts(share, turn);
  return el(
    "li",
    {},
    el("div", { class: "line" }, tag(turn), el("span", { class: "when" }, clock(turn.time_s)),
      el("span", { class: "muted" }, where(turn))),
    el("div", { class: "wait" }, el("b", {}, seconds(turn.ttft_s)), el("span", { class: "room" }, share)),
    el("p", { class: "counts" }, countsLine(turn)),
    why(turn),
  );
}

// A straight line of turns stays at one depth; only where a turn was continued twice does it branch off.
function fillTree(tree) {
  const known = new Set(tree.map((turn) => turn.turn));
  const children = new Map();
  for (const turn of tree) {
    const parent = known.has(turn.parent) ? turn.parent : null;
    children.set(parent, [...(children.get(parent) ?? []), turn]);
  }
  const rows = [];
  const stack = [...(children.get(null) ?? [])].reverse().map((turn) => ({ turn, depth: 0, branch: false }));
  while (stack.length > 0) {
    const row = stack.pop();
    rows.push(row);
    const next = children.get(row.turn.turn) ?? [];
    const depth = row.depth + (next.length > 1 ? 1 : 0);
    stack.push(...[...next].reverse().map((turn) => ({ turn, depth, branch: next.length > 1 })));
  }
  reconcile(
    $("tree"),
    rows,
    (row) => row.turn.turn,
    () => el("li", {}, el("span")),
    (item, { turn, depth, branch }) => {
      item.style.setProperty("--depth", String(Math.min(depth, 12)));
      item.className = branch ? "branch" : "";
      setText(item.firstElementChild, `${count(turn.messages)} ${turn.messages === 1 ? "message" : "messages"} on ${host(turn.decode)} · ${turn.turn.slice(0, 8)}`);
    },
  );
  $("no-tree").hidden = tree.length > 0;
}

// ---- signing in and out -----------------------------------------------------------------------------------------

function signOut(message) {
  clearTimeout(state.timer);
  state.asking?.abort();
  state.key = null;
  sessionStorage.removeItem(KEPT);
  setText($("key-error"), message);
  say("");
  setText($("version"), "");
  show("sign-in");
  $("key").focus();
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const key = $("key").value.trim();
  if (!/^[\x21-\x7e]+$/.test(key)) {
    setText($("key-error"), "A key has printable ASCII characters only.");
    return;
  }
  state.key = key;
  $("key").value = "";
  setText($("key-error"), "");
  if ($("keep").checked) sessionStorage.setItem(KEPT, key);
  say("Asking…");
  refresh();
});
$("forget").addEventListener("click", () => signOut(""));
$("pause").addEventListener("click", () => {
  state.paused = !state.paused;
  setText($("pause"), state.paused ? "Resume" : "Pause");
  if (state.paused) {
    clearTimeout(state.timer);
    say("Paused");
  } else {
    refresh();
  }
});
$("find-form").addEventListener("submit", (event) => {
  event.preventDefault();
  location.hash = `#/c/${$("find").value.trim()}`;
});
$("skip").addEventListener("click", (event) => {
  event.preventDefault();
  $("main").focus();
});
window.addEventListener("hashchange", refresh);
document.addEventListener("visibilitychange", () => (document.hidden ? clearTimeout(state.timer) : state.paused || refresh()));

state.key = sessionStorage.getItem(KEPT);
if (state.key === null) show("sign-in");
else refresh();
