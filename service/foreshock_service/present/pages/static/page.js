// Fetches the parts of a page and draws its figures. While a run is live and the page is visible, it refreshes both, with
// backoff on errors. In a page that was saved as a file, the parts are in the file.

const held = document.querySelector("#parts");
const parts = held && JSON.parse(held.textContent);
const isFile = parts !== null;

/** Returns the response at an address. "no-cache": the browser sends the entity tag that it has, and takes the body from
 * its own cache on a 304. */
async function ask(address) {
  if (!isFile) return fetch(address, { cache: "no-cache", credentials: "same-origin" });
  const part = parts[address];
  return part === undefined ? new Response(null, { status: 404 }) : new Response(typeof part === "string" ? part : JSON.stringify(part));
}

// All curves of a page share a state, which is kept in its address: the x axis, the zoom, the smoothing and the scale.
// The zoom is stored in steps, so that it survives a change of the axis and a refresh.
const form = document.querySelector("#curves");
const asked = new URLSearchParams(location.search);
const TITLES = { lr: "Σ η, cumulative learning rate", time: "hours since the first step" };
let axes = {};

const state = {
  x: asked.get("x") ?? "step", smooth: Number(asked.get("smooth")) || 0, log: asked.get("log") === "1",
  from: asked.has("from") ? Number(asked.get("from")) : null, to: asked.has("to") ? Number(asked.get("to")) : null,
};

/** Writes the state into the address, without a new entry in the history. */
function keep() {
  const query = new URLSearchParams(location.search);
  const set = (name, value) => (value === null || value === "" ? query.delete(name) : query.set(name, value));
  set("x", state.x === "step" ? null : state.x);
  set("smooth", state.smooth || null);
  set("log", state.log ? "1" : null);
  set("from", state.from === null ? null : Number(state.from.toPrecision(7)));
  set("to", state.to === null ? null : Number(state.to.toPrecision(7)));
  const text = query.toString();
  // A file may not change its address.
  if (!isFile) history.replaceState(null, "", `${location.pathname}${text ? `?${text}` : ""}${location.hash}`);
  if (form) form.querySelector("[data-unzoom]").hidden = state.from === null;
}

/** Interpolates linearly in ascending `from`; beyond the ends it extrapolates with the slope of the whole. */
function interpolate(from, to, value) {
  const last = from.length - 1;
  if (last < 1) return to[0] ?? value;
  const slope = (to[last] - to[0]) / (from[last] - from[0] || 1);
  if (value <= from[0]) return to[0] + (value - from[0]) * slope;
  if (value >= from[last]) return to[last] + (value - from[last]) * slope;
  let low = 0, high = last;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (from[middle] <= value) low = middle; else high = middle;
  }
  const span = from[high] - from[low];
  return to[low] + (span > 0 ? (value - from[low]) / span : 0) * (to[high] - to[low]);
}

const otherAxis = () => (state.x === "step" ? null : axes[state.x] ?? null);
function place(step) { const found = otherAxis(); return found ? interpolate(found.steps, found.values, step) : step; }
function stepAt(x) { const found = otherAxis(); return found ? interpolate(found.values, found.steps, x) : x; }

/** Returns the median of neighbouring values, which a single outlier hardly changes. */
function smoothed(values, window) {
  const reach = window >> 1;
  return values.map((value, at) => {
    if (value === null) return null;
    const near = values.slice(Math.max(at - reach, 0), at + reach + 1).filter((each) => each !== null).sort((a, b) => a - b);
    const middle = near.length >> 1;
    return near.length % 2 ? near[middle] : (near[middle - 1] + near[middle]) / 2;
  });
}

function smoothTraces(data) {
  if (!state.smooth) return data;
  const drawn = [];
  for (const trace of data) {
    if (trace.meta === "smooth") continue;
    const isLine = trace.type === "scatter" && trace.mode?.includes("lines") && trace.line?.shape !== "hv" && trace.line?.width !== 0 && !trace.fill;
    if (!isLine) { drawn.push(trace); continue; }
    const whole = { ...trace, opacity: 1, showlegend: trace.legendgroup ? true : trace.showlegend, line: { ...trace.line, width: 2 } };
    drawn.push({ ...trace, opacity: 0.35, showlegend: false, line: { ...trace.line, width: 1 }, mode: "lines" });
    drawn.push({ ...whole, mode: "lines", y: smoothed(trace.y, state.smooth), hoverinfo: "skip", hovertemplate: undefined });
  }
  return drawn;
}

/** Returns the traces and the layout of a figure over steps for the current state. */
function arranged({ data, layout }) {
  const traces = smoothTraces(data).map((trace) => ({
    ...trace, customdata: trace.x, ...(otherAxis() ? { x: trace.x.map(place) } : {}),
  }));
  const placed = (shape) => (/^x\d*$/.test(shape.xref) ? { ...shape, ...("x" in shape ? { x: place(shape.x) } : { x0: place(shape.x0), x1: place(shape.x1) }) } : shape);
  const changed = { ...layout, shapes: layout.shapes?.map(placed), annotations: layout.annotations?.map(placed), uirevision: `${state.x} ${state.log}` };
  for (const key of Object.keys(changed)) {
    if (!/^xaxis\d*$/.test(key)) continue;
    changed[key] = { ...changed[key] };
    if (otherAxis()) {
      changed[key] = { ...changed[key], tickformat: "", rangemode: "normal", ...(changed.panels ? {} : { title: { text: TITLES[state.x] } }) };
      if (layout[key].range) changed[key].range = layout[key].range.map(place);
    }
    if (state.from !== null) changed[key].range = [place(state.from), place(state.to)];
  }
  for (const key of Object.keys(changed)) {
    // An axis with its own range, such as a share, is not changed.
    if (!state.log || !/^yaxis\d*$/.test(key) || changed[key].type === "log" || changed[key].range) continue;
    changed[key] = { ...changed[key], type: "log", rangemode: "normal", tickformat: "~g", nticks: 6 };
    const name = key.replace("axis", "");
    changed.annotations = changed.annotations?.map((each) => (each.yref === name && each.y > 0 ? { ...each, y: Math.log10(each.y) } : each));
  }
  return { data: traces, layout: changed };
}

let linking = false, zooming = 0;

/** Requests the curves of the visible steps, once the reader has stopped zooming. */
function lookCloser() { clearTimeout(zooming); zooming = setTimeout(refreshFigures, 250); }

let pointed = null, pointing = 0;

/** Shows the values of a step in all curves in view; null: of none. */
function pointAt(step) {
  pointed = step;
  pointing ||= requestAnimationFrame(() => {
    pointing = 0;
    for (const each of document.querySelectorAll("[data-over-steps].js-plotly-plot")) {
      const { top, bottom } = each.getBoundingClientRect();
      if (pointed === null) window.Plotly.Fx.unhover(each);
      else if (bottom > 0 && top < innerHeight) window.Plotly.Fx.hover(each, { xval: place(pointed) }, Object.keys(each._fullLayout._plots));
    }
  });
}

/** Links a drawn figure to the others: a zoom moves all of them, pointing at a step shows its values in all of them, and
 * a click on a point opens its step. */
function link(element) {
  element.on("plotly_hover", (event) => { const step = event.points[0]?.customdata; if (step !== undefined) pointAt(step); });
  element.on("plotly_unhover", () => pointAt(null));
  element.on("plotly_relayout", (change) => {
    if (linking) return;
    if (change["xaxis.autorange"]) { state.from = null; state.to = null; }
    else if ("xaxis.range[0]" in change) { state.from = stepAt(change["xaxis.range[0]"]); state.to = stepAt(change["xaxis.range[1]"]); }
    else return;
    keep();
    zoomAll(element);
    lookCloser();
  });
  element.on("plotly_click", (event) => {
    const step = event.points[0]?.customdata;
    if (Number.isInteger(step) && form?.dataset.steps) location.href = form.dataset.steps + step;
  });
}

async function zoomAll(except = null) {
  linking = true;
  try {
    const change = state.from === null ? { "xaxis.autorange": true } : { "xaxis.range": [place(state.from), place(state.to)] };
    const others = [...document.querySelectorAll("[data-over-steps].js-plotly-plot")].filter((each) => each !== except);
    await Promise.all(others.map((each) => window.Plotly.relayout(each, change)));
  } finally {
    linking = false;
  }
}

/** Fetches the axes if an axis other than the step is selected. */
async function loadAxes() {
  if (!form || state.x === "step" || axes[state.x]) return;
  if (!form.dataset.axes) { state.x = "step"; return; }
  try {
    const response = await ask(form.dataset.axes);
    if (response.ok) axes = await response.json();
  } catch { /* The curves stay over steps. */ }
  if (!axes[state.x]) state.x = "step";
}

/** Shows the controls. */
function showControls() {
  if (!form) return;
  form.hidden = false;
  form.elements.x.value = state.x;
  form.elements.smooth.value = state.smooth ? String(state.smooth) : "";
  form.elements.log.checked = state.log;
  keep();
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (form.elements.step?.value) location.href = form.dataset.steps + Number(form.elements.step.value);
  });
  form.addEventListener("change", async (event) => {
    if (event.target === form.elements.step) return;
    state.x = form.elements.x.value;
    state.smooth = Number(form.elements.smooth.value) || 0;
    state.log = form.elements.log.checked;
    await loadAxes();
    if (form.elements.x.value !== state.x) form.elements.x.value = state.x;
    keep();
    await redrawCurves();
  });
  form.querySelector("[data-unzoom]").addEventListener("click", () => { state.from = null; state.to = null; keep(); zoomAll(); lookCloser(); });
}

// A plot is saved as PNG, or its numbers as CSV: a row for each x, a column for each trace, or the figure's own columns.
function download(address, name) {
  const anchor = document.createElement("a");
  anchor.href = address;
  anchor.download = name;
  anchor.click();
}

const quoted = (value) => (/[",\n]/.test(String(value)) ? `"${String(value).replaceAll('"', '""')}"` : value ?? "");
const joined = (lines) => lines.map((line) => line.map(quoted).join(",")).join("\n") + "\n";

function csvOf(specification) {
  if (specification.columns) {
    const columns = Object.values(specification.columns);
    return joined([Object.keys(specification.columns), ...columns[0].map((_, row) => columns.map((column) => column[row]))]);
  }
  const names = [], columns = [], places = new Map();
  for (const trace of specification.data) {
    if (trace.meta === "smooth" || !trace.x || !trace.y) continue;
    const column = new Map(trace.x.map((x, at) => [x, trace.y[at]]));
    names.push(trace.name ?? "");
    columns.push(column);
    for (const x of column.keys()) if (!places.has(x)) places.set(x, places.size);
  }
  const xs = [...places.keys()];
  if (xs.every((x) => typeof x === "number")) xs.sort((a, b) => a - b);
  const head = specification.layout.xaxis?.title?.text ?? "x";
  const lines = [[head, ...names], ...xs.map((x) => [x, ...columns.map((column) => column.get(x) ?? "")])];
  return joined(lines);
}

/** Saves the figure drawn in `element`; `kind` is "png" or "csv". */
async function save(element, specification, kind) {
  const name = specification.title.replace(/[^A-Za-z0-9]+/g, "-").replace(/^-|-$/g, "").toLowerCase();
  if (kind === "csv") {
    const address = URL.createObjectURL(new Blob([csvOf(specification)], { type: "text/csv" }));
    download(address, `${name}.csv`);
    URL.revokeObjectURL(address);
    return;
  }
  // Plotly draws without a background; a picture needs the page's background.
  const background = getComputedStyle(element.closest(".card") ?? document.body).backgroundColor;
  const figure = { data: element.data, layout: { ...element.layout, paper_bgcolor: background }, config: {} };
  await window.Plotly.downloadImage(figure, { format: "png", filename: name, width: element.clientWidth, height: specification.height, scale: 2 });
}

// Every element with data-figure: fetches its specification, inserts the theme's colours, passes it to Plotly.
/** Returns whether an element is in a part that is not opened yet. */
function isFolded(element) { return element.closest("details:not([open])") !== null; }

const ROLE = /^var\((--[a-z0-9-]+)\)$/;
const drawn = new WeakMap(); // element → {etag, specification}

/** Loads Plotly if the page names it. Meanwhile the figures are requested. */
function loadPlotly() {
  const named = document.querySelector("#plotly");
  if (!named) return null;
  const script = document.createElement("script");
  script.src = named.href;
  const loaded = new Promise((resolve, reject) => {
    script.addEventListener("load", resolve);
    script.addEventListener("error", () => reject(new Error("Plotly could not be loaded")));
  });
  document.head.append(script);
  return loaded;
}

/** Returns a function that gives a role's colour in the current theme, as the browser computes it. */
function colours() {
  const probe = document.body.appendChild(document.createElement("i")), found = new Map();
  const colour = (role) => {
    if (!found.has(role)) {
      probe.style.color = `var(${role})`;
      found.set(role, getComputedStyle(probe).color);
    }
    return found.get(role);
  };
  queueMicrotask(() => probe.remove());
  return colour;
}

/** Returns a copy of `value` in which every "var(--role)" is replaced by that role's current colour. */
function withColours(value, colour) {
  if (typeof value === "string") {
    const role = ROLE.exec(value);
    return role ? colour(role[1]) : value;
  }
  if (Array.isArray(value)) return value.map((item) => withColours(item, colour));
  if (value && typeof value === "object") {
    return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, withColours(item, colour)]));
  }
  return value;
}

function axis(given, colour) {
  return {
    automargin: true, gridcolor: colour("--grid"), linecolor: colour("--rule"), zerolinecolor: colour("--grid"),
    tickfont: { color: colour("--muted"), size: 12 }, ...given,
    title: { standoff: 8, font: { size: 12.5, color: colour("--muted") }, ...(given.title ?? {}) },
  };
}

function completeLayout(given, height, colour) {
  const layout = {
    height, autosize: true, margin: { l: 52, r: 12, t: 22, b: 44 },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: getComputedStyle(document.body).fontFamily, size: 13, color: colour("--ink") },
    hovermode: "x unified", dragmode: "zoom",
    hoverlabel: { bgcolor: colour("--card"), bordercolor: colour("--rule"), font: { color: colour("--ink") } },
    legend: { orientation: "h", x: 0, xanchor: "left", y: 1.02, yanchor: "bottom", font: { size: 12.5 } },
    ...given,
  };
  for (const key of Object.keys(layout)) {
    if (/^[xy]axis\d*$/.test(key)) layout[key] = axis(layout[key], colour);
  }
  // On touch screens, a finger on the plot scrolls the page.
  if (window.matchMedia("(pointer: coarse)").matches) layout.dragmode = false;
  return layout;
}

const GAP_X = 0.05;

/** Places the panels of small multiples: as many columns as the width allows; returns the height. */
function placePanels(layout, width) {
  const columns = Math.min(layout.panels, width >= 1500 ? 6 : width >= 900 ? 3 : width >= 540 ? 2 : 1), rows = Math.ceil(layout.panels / columns);
  const panel = layout.panels > 8 ? 110 : 200, height = rows * (panel + 52) + 8, wide = (1 - GAP_X * (columns - 1)) / columns, high = panel / height;
  for (let at = 0; at < layout.panels; at++) {
    const axis = at ? String(at + 1) : "", left = (at % columns) * (wide + GAP_X), top = 1 - (Math.floor(at / columns) * (panel + 52) + 20) / height;
    layout[`xaxis${axis}`].domain = [left, left + wide];
    layout[`yaxis${axis}`].domain = [Math.max(top - high, 0), top];
  }
  layout.margin = { l: 44, r: 8, t: 0, b: 0 };
  layout.hovermode = "x";
  return height;
}

function showText(element, text) {
  window.Plotly?.purge(element);
  const paragraph = document.createElement("p");
  paragraph.className = "missing";
  paragraph.textContent = text;
  element.replaceChildren(paragraph);
  element.removeAttribute("role");
  element.removeAttribute("aria-label");
  element.classList.remove("waiting");
  element.style.minHeight = "0";
}

async function draw(element, specification) {
  const caption = element.closest("figure").querySelector("figcaption");
  if (specification.missing) {
    if (caption) caption.hidden = true;
    showText(element, specification.missing);
    return;
  }
  if (element.classList.contains("waiting") || element.querySelector(".missing")) {
    element.replaceChildren();
    element.classList.remove("waiting");
  }
  const colour = colours();
  const isCurve = "overSteps" in element.dataset;
  const given = { data: specification.data, layout: specification.layout };
  const { data, layout } = withColours(isCurve ? arranged(given) : given, colour);
  // Plotly reads names as markup.
  for (const trace of data) if (trace.name) trace.name = trace.name.replaceAll("&", "&amp;").replaceAll("<", "&lt;");
  const height = specification.layout.panels ? Math.max(placePanels(layout, element.clientWidth), specification.height) : specification.height;
  element.style.minHeight = `${height}px`;
  // To a screen reader, the drawing is an image with a label.
  element.setAttribute("role", "img");
  element.setAttribute("aria-label", `${specification.title}. ${specification.summary}`);
  if (caption) {
    caption.hidden = !specification.caption;
    caption.querySelector(".words").textContent = specification.caption;
  }
  await window.Plotly.react(element, data, completeLayout(layout, height, colour), {
    displayModeBar: false, responsive: true,
  });
  if (element.dataset.linked) return;
  element.dataset.linked = "yes";
  if (isCurve) link(element);
  const buttons = element.closest("figure").querySelector(".save");
  if (buttons) buttons.hidden = false;
}

/** Requests and draws one figure; does nothing if the server's figure has not changed. */
async function refreshFigure(element) {
  const address = element.dataset.figure;
  // If zoomed, it requests the curves of these steps in more detail.
  const part = !isFile && "overSteps" in element.dataset && state.from !== null
    ? `${address.includes("?") ? "&" : "?"}from_step=${Math.max(0, Math.floor(state.from))}&to_step=${Math.max(0, Math.ceil(state.to))}` : "";
  const response = await ask(address + part);
  if (!response.ok) throw new Error(`${response.status} for ${address}`);
  const specification = await response.json();
  await readyToDraw;
  // The reader has selected another figure meanwhile.
  if (element.dataset.figure !== address) return;
  const etag = response.headers.get("ETag");
  if (etag && drawn.get(element)?.etag === etag) return;
  drawn.set(element, { etag, specification });
  await inTurn(() => draw(element, drawn.get(element).specification));
}

let last = Promise.resolve();

/** Draws one figure after the other, with a pause for scrolling and typing between them. */
function inTurn(act) {
  const done = last.then(act);
  last = done.catch(() => {}).then(() => new Promise((resolve) => setTimeout(resolve)));
  return done;
}

/** Draws all curves again, after a change of the axis, the smoothing or the scale. */
async function redrawCurves() {
  await readyToDraw;
  for (const element of document.querySelectorAll("[data-over-steps]")) {
    const state = drawn.get(element);
    if (state) await inTurn(() => draw(element, state.specification));
  }
}

/** Draws another figure in the same place, with its own title. */
async function showFigure(element, address) {
  element.dataset.figure = address;
  drawn.delete(element);
  try {
    await refreshFigure(element);
  } catch {
    if (element.dataset.figure === address) showText(element, "This figure could not be loaded. The service may be away; choose it again.");
  }
  const specification = drawn.get(element)?.specification;
  const heading = element.closest("section")?.querySelector("h2");
  if (specification && heading && element.dataset.figure === address) heading.textContent = specification.title;
}

const axesLoaded = loadAxes().then(() => showControls());
const readyToDraw = Promise.all([axesLoaded, loadPlotly()]);
readyToDraw.catch(() => {}); // Each figure reports by itself that Plotly could not be loaded.
document.addEventListener("click", (event) => {
  const button = event.target.closest?.("[data-save]");
  const element = button?.closest("figure").querySelector("[data-figure]");
  const state = element && drawn.get(element);
  if (state && !state.specification.missing) save(element, state.specification, button.dataset.save);
});

/** Refreshes the figures of the page, or of a part of it, that are not folded away. A figure that fails shows a text and
 * does not stop the others. */
async function refreshFigures(within = document) {
  const elements = [...within.querySelectorAll("[data-figure]")].filter((each) => !isFolded(each));
  const results = await Promise.allSettled(elements.map(refreshFigure));
  let failures = 0;
  results.forEach((result, index) => {
    if (result.status !== "rejected") return;
    failures += 1;
    if (!drawn.has(elements[index])) showText(elements[index], "This figure could not be loaded. The service may be away; reload to try again.");
  });
  return failures;
}

function recolour() {
  for (const element of document.querySelectorAll("[data-figure]")) {
    const state = drawn.get(element);
    if (state) draw(element, state.specification);
  }
}
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", recolour);
document.addEventListener("themechange", recolour);

let resized = 0;
window.addEventListener("resize", () => { clearTimeout(resized); resized = setTimeout(recolour, 200); });

const SLOWEST_SECONDS = 120;

/** Keeps the <details> that the reader opened or closed. */
function keepOpened(part, newer) {
  const shown = new Map([...part.querySelectorAll("details")].map((each) => [each.querySelector("summary")?.textContent, each.open]));
  for (const details of newer.querySelectorAll("details")) {
    details.open = shown.get(details.querySelector("summary")?.textContent) ?? details.open;
  }
}

/** Replaces the parts marked data-part, except one with the keyboard focus; returns whether any was newer. */
function replaceParts(fresh) {
  let changed = false;
  for (const part of document.querySelectorAll("[data-part]")) {
    const newer = fresh.querySelector(`[data-part="${part.dataset.part}"]`);
    if (newer) keepOpened(part, newer);
    if (newer && newer.innerHTML !== part.innerHTML && !part.contains(document.activeElement)) {
      part.replaceChildren(...document.importNode(newer, true).childNodes);
      changed = true;
    }
  }
  if (changed) {
    tellAges();
    document.dispatchEvent(new Event("replaced"));
  }
  return changed;
}

/** Fetches the page again (the browser sends its entity tag); returns whether the run is still live. */
async function refreshPage() {
  const response = await ask(window.location.href);
  if (!response.ok) throw new Error(String(response.status));
  const fresh = new DOMParser().parseFromString(await response.text(), "text/html");
  if (replaceParts(fresh)) await fillFragments();
  return fresh.body.dataset.live === "yes";
}

const AGES = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];

/** Writes the age of each moment in a list. */
function tellAges() {
  for (const time of document.querySelectorAll(".age time")) {
    const seconds = Math.max((Date.now() - Date.parse(time.dateTime)) / 1000, 1);
    const [size, unit] = AGES.find(([size]) => seconds >= size);
    time.title ||= time.textContent;
    time.textContent = `${Math.floor(seconds / size)} ${unit}`;
  }
}

function announce(text) {
  const status = document.querySelector("#freshness");
  if (status) status.textContent = text;
}

async function keepFresh(seconds) {
  let pause = seconds;
  for (let live = true; live; ) {
    await new Promise((resolve) => setTimeout(resolve, pause * 1000));
    if (document.hidden) continue;
    try {
      live = await refreshPage();
      if (await refreshFigures()) throw new Error("figures");
      pause = seconds;
      announce(live ? "" : "The run has ended; this page no longer changes.");
    } catch {
      pause = Math.min(pause * 2, SLOWEST_SECONDS);
      announce(`The service does not answer; trying again in ${pause} seconds.`);
    }
  }
}

const filled = new WeakMap(); // element → the address and the text of what it shows

/** Fills every element with data-fragment (the slow parts of the page) that is not folded away. On an error the older
 * content stays. */
async function fillFragments(within = document) {
  for (const element of within.querySelectorAll("[data-fragment]")) {
    if (isFolded(element) || element.contains(document.activeElement)) continue;
    try {
      const address = element.dataset.fragment, response = await ask(address);
      if (!response.ok) throw new Error(String(response.status));
      const text = await response.text();
      const before = filled.get(element);
      if (before?.text === text || element.dataset.fragment !== address) continue;
      const fresh = new DOMParser().parseFromString(text, "text/html");
      if (before?.address === address) keepOpened(element, fresh.body);
      element.replaceChildren(...document.importNode(fresh.body, true).childNodes);
      filled.set(element, { address, text });
    } catch {
      if (!filled.has(element)) element.textContent = "This part could not be loaded. The service may be away; reload to try again.";
    }
  }
}

document.addEventListener("change", ({ target }) => {
  if (target.matches("select[data-chooser]")) showFigure(target.closest("section").querySelector("[data-figure]"), target.value);
});

let waiting = 0;
document.addEventListener("input", ({ target }) => {
  if (!target.matches("[data-filter]")) return;
  clearTimeout(waiting);
  waiting = setTimeout(() => {
    const part = target.closest("details");
    part.querySelector("[data-fragment]").dataset.fragment = target.dataset.filter + encodeURIComponent(target.value);
    show(part);
  }, 250);
});

/** Draws and fetches what is in view within a part of the page. */
async function show(within) {
  document.body.dataset.drawn = "no";
  await fillFragments(within);
  await refreshFigures(within);
  document.body.dataset.drawn = "yes";
}
// When a part is opened for the first time; later its figures are refreshed with the page.
document.addEventListener("toggle", ({ target }) => { if (target.open && target.querySelector("[data-figure], [data-fragment]")) show(target); }, true);

/** Opens the part that the address names, such as #figure-attribution. */
function openNamed() {
  const named = document.getElementById(location.hash.slice(1));
  const part = named?.closest("details");
  if (part) part.open = true;
  named?.scrollIntoView();
}
window.addEventListener("hashchange", openNamed);
openNamed();
tellAges();
await show(document);
if (document.body.dataset.live === "yes") keepFresh(Number(document.body.dataset.refreshSeconds));
