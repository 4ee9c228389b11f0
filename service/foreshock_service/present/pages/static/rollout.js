// Draws the tokens of one rollout. Only the lines in view are in the document, so 32,000 tokens scroll like 100.

const root = document.querySelector("[data-rollout]");
const pane = root.querySelector(".tokens");
const lines = root.querySelector(".lines");
const panel = root.querySelector(".token");
const chooser = root.querySelector("[data-comparison]");
const LINE = 24; // Height of a line in pixels, as in the style sheet.
const BEYOND = 10; // Lines drawn above and below those in view.
const FULL = Math.log(4), LEAST = 1e-3; // The |d| with the full colour, and the least |d| with any colour.

let rollout, differences, ranked, rankOf, rows = [], rowOf, selected = -1, width = 0, cell = 8;
const drawn = new Map(); // Line number → its element.

/** Returns a token as it is shown: a space stays, line ends and other control characters become signs. */
function shown(position) {
  const text = rollout.texts[rollout.ids[position]];
  if (text === undefined) return `${rollout.ids[position]} `;
  return text.replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/[\u0000-\u001f]/g, "·") || "∅";
}

function sampled(position) { return !rollout.generated || rollout.generated[position] === 1; }

function difference(position) {
  const d = differences[position];
  return d === null ? "missing" : d.toPrecision(3).replace("-", "−");
}

/** Computes d of the selected comparison, and the order of the tokens by its size. */
function choose(comparison) {
  const [target, behaviour] = comparison ? comparison.split("/").map((name) => rollout.scores[name]) : [];
  differences = rollout.ids.map((_, at) => {
    if (!comparison || target[at] === null || behaviour[at] === null) return null;
    return target[at] - behaviour[at];
  });
  ranked = [...rollout.ids.keys()].filter((at) => differences[at] !== null && sampled(at));
  ranked.sort((a, b) => Math.abs(differences[b]) - Math.abs(differences[a]) || a - b);
  rankOf = new Map(ranked.map((at, rank) => [at, rank]));
}

/** Breaks the tokens into lines of the pane's width; a new turn or a line end in the text begins a new line. */
function layOut() {
  const probe = document.createElement("span");
  probe.textContent = "0".repeat(50);
  lines.replaceChildren(probe);
  cell = probe.getBoundingClientRect().width / 50;
  width = pane.clientWidth;
  const most = Math.max(8, Math.floor((width - 24) / cell));
  rows = [];
  rowOf = new Int32Array(rollout.ids.length);
  let row = null, used = 0, turn = null;
  const begin = (at) => { row = { from: at, to: at, turn: null }; rows.push(row); used = 0; };
  for (let at = 0; at < rollout.ids.length; at++) {
    const text = shown(at);
    const newTurn = rollout.turn && rollout.turn[at] !== turn;
    if (newTurn) {
      turn = rollout.turn[at];
      rows.push({ from: at, to: at, turn });
      begin(at);
    } else if (!row || used + text.length > most) begin(at);
    used += text.length;
    row.to = at + 1;
    rowOf[at] = rows.length - 1;
    if (text.includes("⏎")) row = null;
  }
  lines.style.height = `${rows.length * LINE}px`;
}

function tokenElement(at) {
  const element = document.createElement("span");
  element.dataset.at = at;
  element.textContent = shown(at);
  const d = differences[at];
  if (!sampled(at)) element.className = "masked";
  else if (d !== null && Math.abs(d) >= LEAST) {
    const strength = Math.min(1, Math.log(Math.abs(d) / LEAST) / Math.log(FULL / LEAST));
    element.className = d < 0 ? "below" : "above";
    element.style.setProperty("--strength", `${Math.round(12 + 58 * strength)}%`);
  }
  if (at === selected) element.classList.add("selected");
  return element;
}

function lineElement(number) {
  const line = document.createElement("div"), row = rows[number];
  line.style.top = `${number * LINE}px`;
  if (row.turn !== null) {
    line.className = "turn";
    line.textContent = `turn ${row.turn}`;
  } else for (let at = row.from; at < row.to; at++) line.append(tokenElement(at));
  return line;
}

/** Draws the lines in view anew. */
function drawLines() {
  drawn.clear();
  lines.replaceChildren();
  drawMissingLines();
}

/** Draws the lines that came into view and removes those that left it. */
function drawMissingLines() {
  const first = Math.max(0, Math.floor(pane.scrollTop / LINE) - BEYOND);
  const last = Math.min(rows.length, Math.ceil((pane.scrollTop + pane.clientHeight) / LINE) + BEYOND);
  for (const [number, line] of drawn) {
    if (number >= first && number < last) continue;
    line.remove();
    drawn.delete(number);
  }
  // Elements are in the order of the text, which copying and screen readers follow.
  const kept = Math.min(...drawn.keys()), before = document.createDocumentFragment(), after = document.createDocumentFragment();
  for (let number = first; number < last; number++) {
    if (drawn.has(number)) continue;
    const line = lineElement(number);
    drawn.set(number, line);
    (number < kept ? before : after).append(line);
  }
  lines.prepend(before);
  lines.append(after);
}

/** Formats a log-prob to a part in 100,000; further digits are rounding of float32. */
function logProb(value) { return String(Number(value.toPrecision(5))).replace("-", "−"); }

function cellOf(kind, text, isNumber) {
  const element = document.createElement(kind);
  element.textContent = text;
  if (isNumber) element.className = "number";
  if (kind === "th") element.scope = "row";
  return element;
}

/** Shows every scorer's values of a token. */
function describe(at) {
  const text = rollout.texts[rollout.ids[at]] === undefined ? [] : [`“${shown(at)}”`];
  const words = [`Position ${at}`, ...text, `id ${rollout.ids[at]}`];
  if (chooser.value) words.push(`d = ${difference(at)} (${chooser.value})`);
  if (rankOf.has(at)) words.push(`|d| no. ${rankOf.get(at) + 1} of ${ranked.length}`);
  if (!sampled(at)) words.push("not sampled by the model");
  if (rollout.turn) words.push(`turn ${rollout.turn[at]}`);
  if (rollout.weights_version) words.push(`weights version ${rollout.weights_version[at]}`);
  if (rollout.entropy && rollout.entropy[at] !== null) words.push(`entropy ${rollout.entropy[at].toPrecision(3)} nats`);
  const table = document.createElement("table");
  table.createCaption().textContent = words.join(", ");
  const head = table.createTHead().insertRow();
  ["Scorer", "log-prob", "probability"].forEach((text, index) => {
    const cell = cellOf("th", text, index > 0);
    cell.scope = "col";
    head.append(cell);
  });
  const body = table.createTBody();
  for (const [name, values] of Object.entries(rollout.scores)) {
    const value = values[at];
    const row = body.insertRow();
    row.append(cellOf("th", name, false), cellOf("td", value === null ? "–" : logProb(value), true),
      cellOf("td", value === null ? "–" : Math.exp(value).toPrecision(4), true));
  }
  panel.replaceChildren(table);
}

function select(at, scroll = true) {
  if (at < 0 || at >= rollout.ids.length) return;
  selected = at;
  const top = rowOf[at] * LINE;
  if (scroll && (top < pane.scrollTop || top + LINE > pane.scrollTop + pane.clientHeight)) {
    pane.scrollTop = top - pane.clientHeight / 2;
  }
  drawLines();
  describe(at);
  history.replaceState(null, "", `#token-${at}`);
}

function selectRank(step) {
  const rank = rankOf.get(selected) ?? (step > 0 ? -1 : 1);
  select(ranked[Math.min(Math.max(rank + step, 0), ranked.length - 1)] ?? -1);
}

const ACTIONS = {
  largest: () => select(ranked[0] ?? -1), next: () => selectRank(1), previous: () => selectRank(-1),
};
const KEYS = {
  ArrowRight: () => select(selected + 1), ArrowLeft: () => select(selected - 1), n: ACTIONS.next, p: ACTIONS.previous, Home: ACTIONS.largest,
};

function fillPrompt() {
  const text = rollout.prompt.map((id) => rollout.texts[id] ?? `${id} `).join("");
  document.querySelector(".prompt-text").textContent = text;
}

async function start() {
  const response = await fetch(root.dataset.rollout, { cache: "no-cache", credentials: "same-origin" });
  if (!response.ok) throw new Error(String(response.status));
  rollout = await response.json();
  chooser.replaceChildren(...rollout.comparisons.map((name) => new Option(name, name, false, name === rollout.comparison)));
  choose(rollout.comparison);
  layOut();
  drawLines();
  const asked = /^#token-(\d+)$/.exec(location.hash);
  select(asked ? Number(asked[1]) : ranked[0] ?? 0);
  pane.addEventListener("scroll", () => requestAnimationFrame(drawMissingLines), { passive: true });
  pane.addEventListener("keydown", (event) => {
    const act = KEYS[event.key];
    if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    act();
  });
  const tokenAt = (event) => event.target.closest("[data-at]");
  lines.addEventListener("pointerover", (event) => { const token = tokenAt(event); if (token) describe(Number(token.dataset.at)); });
  lines.addEventListener("click", (event) => { const token = tokenAt(event); if (token) select(Number(token.dataset.at), false); });
  for (const button of root.querySelectorAll("[data-do]")) button.addEventListener("click", ACTIONS[button.dataset.do]);
  chooser.addEventListener("change", () => { choose(chooser.value); drawLines(); if (selected >= 0) describe(selected); });
  document.querySelector("details.prompt").addEventListener("toggle", fillPrompt, { once: true });
  new ResizeObserver(() => { if (pane.clientWidth !== width) { layOut(); drawLines(); } }).observe(pane);
  document.body.dataset.drawn = "yes";
}

start().catch(() => { lines.textContent = "The tokens could not be loaded. The service may be away; reload to try again."; });
