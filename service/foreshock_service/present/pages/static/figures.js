// Draws every element with data-figure: fetches its specification, inserts the theme's colours, passes it to Plotly.

import { ask, isFile } from "./ask.js";
import { arranged, link, loadAxes, showControls, state as looked } from "./curves.js";
import { save } from "./save.js";

/** Returns whether an element is in a part that is not opened yet. */
export function isFolded(element) { return element.closest("details:not([open])") !== null; }

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
export function colours() {
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
  const part = !isFile && "overSteps" in element.dataset && looked.from !== null
    ? `${address.includes("?") ? "&" : "?"}from_step=${Math.max(0, Math.floor(looked.from))}&to_step=${Math.max(0, Math.ceil(looked.to))}` : "";
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
export async function showFigure(element, address) {
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

const axesLoaded = loadAxes().then(() => showControls(redrawCurves, () => refreshFigures()));
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
export async function refreshFigures(within = document) {
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
