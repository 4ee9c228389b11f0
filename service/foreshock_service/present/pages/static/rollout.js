// Draws the tokens of one rollout in blocks: those around the selected token at once, the others after the page is shown.
// Of all of them the browser lays out those near the view (`content-visibility`).

const root = document.querySelector("[data-rollout]");
const pane = root.querySelector(".tokens");
const lines = root.querySelector(".lines");
const panel = root.querySelector(".token");
const chooser = root.querySelector("[data-comparison]");
const BLOCK = 512; // Tokens of a block.
const SPECIAL = /[\u0000-\u001f&<]/;
const FULL = Math.log(4), LEAST = 1e-3; // The |d| with the full colour, and the least |d| with any colour.

let rollout, differences, ranked, rankOf, blocks, selected = -1;

/** Returns a token as it is shown: a space stays, line ends and other control characters become signs. */
function shown(position) {
  const text = rollout.texts[rollout.ids[position]];
  if (text === undefined) return `${rollout.ids[position]} `;
  if (!SPECIAL.test(text)) return text || "∅";
  return text.replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/[\u0000-\u001f]/g, "·");
}

/** Returns a text as HTML. */
function escaped(text) { return SPECIAL.test(text) ? text.replaceAll("&", "&amp;").replaceAll("<", "&lt;") : text; }

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
  const sizes = Float64Array.from(differences, Math.abs);
  ranked = [...rollout.ids.keys()].filter((at) => differences[at] !== null && sampled(at));
  ranked.sort((a, b) => sizes[b] - sizes[a] || a - b);
  rankOf = new Map(ranked.map((at, rank) => [at, rank]));
}

/** Returns the class and the strength of a token's colour, by d of the selected comparison. */
function look(at) {
  if (!sampled(at)) return ["masked", ""];
  const size = Math.abs(differences[at] ?? 0);
  if (size < LEAST) return ["", ""];
  const strength = Math.min(1, Math.log(size / LEAST) / Math.log(FULL / LEAST));
  return [differences[at] < 0 ? "below" : "above", `${Math.round(12 + 58 * strength)}%`];
}

/** Lays out the blocks, empty; a new turn begins a new block. */
function draw() {
  const whole = document.createDocumentFragment();
  let turn = null;
  blocks = [];
  for (let at = 0; at < rollout.ids.length; at++) {
    const begins = rollout.turn && rollout.turn[at] !== turn;
    if (begins) {
      turn = rollout.turn[at];
      const title = whole.appendChild(document.createElement("div"));
      title.className = "turn";
      title.textContent = `turn ${turn}`;
    }
    if (begins || at === 0 || at - blocks.at(-1).from === BLOCK) blocks.push({ from: at, element: whole.appendChild(document.createElement("div")) });
    blocks.at(-1).end = at + 1;
  }
  lines.replaceChildren(whole);
}

/** Writes the tokens of a block, coloured by d; a line end in the text begins a new line. */
function fill(block) {
  let html = "";
  for (let at = block.from; at < block.end; at++) {
    const text = shown(at), [name, strength] = look(at);
    html += `<span data-at="${at}" class="${name}${at === selected ? " selected" : ""}"${strength && ` style="--strength:${strength}"`}>${escaped(text)}${text.includes("⏎") ? "\n" : ""}</span>`;
  }
  block.element.innerHTML = html;
  block.isFilled = true;
}

/** Fills the other blocks, one at a time, so that the page answers meanwhile. */
function fillRest() {
  const block = blocks.find((each) => !each.isFilled);
  if (!block) return;
  fill(block);
  setTimeout(fillRest);
}

/** Returns the element of a token; its block and those beside it are filled then. */
function elementOf(at) {
  const place = blocks.findIndex((each) => at < each.end);
  for (const each of blocks.slice(Math.max(place - 1, 0), place + 2)) if (!each.isFilled) fill(each);
  return blocks[place].element.children[at - blocks[place].from];
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
  if (selected >= 0) elementOf(selected).classList.remove("selected");
  selected = at;
  const element = elementOf(at);
  element.classList.add("selected");
  if (scroll) {
    const { scrollX, scrollY } = window;
    element.scrollIntoView({ block: "nearest" });
    window.scrollTo(scrollX, scrollY); // Only the pane scrolls.
  }
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
  document.querySelector(".prompt-text").textContent = text || "No token of the prompt was logged.";
}

async function start() {
  const response = await fetch(root.dataset.rollout, { cache: "no-cache", credentials: "same-origin" });
  if (!response.ok) throw new Error(String(response.status));
  rollout = await response.json();
  chooser.replaceChildren(...rollout.comparisons.map((name) => new Option(name, name, false, name === rollout.comparison)));
  choose(rollout.comparison);
  fillPrompt();
  draw();
  const asked = /^#token-(\d+)$/.exec(location.hash);
  select(asked ? Number(asked[1]) : ranked[0] ?? 0);
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
  chooser.addEventListener("change", () => { choose(chooser.value); blocks.forEach(fill); if (selected >= 0) describe(selected); });
  document.body.dataset.drawn = "yes";
  setTimeout(fillRest, 300); // After the first view is painted.
}

start().catch(() => { lines.textContent = "The tokens could not be loaded. The service may be away; reload to try again."; });
