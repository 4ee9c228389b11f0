// State shared by all curves of a page and kept in its address: the x axis, the zoom, the smoothing and the scale.
// The zoom is stored in steps, so that it survives a change of the axis and a refresh.

import { ask, isFile } from "./ask.js";

const form = document.querySelector("#curves");
const asked = new URLSearchParams(location.search);
const TITLES = { lr: "Σ η, cumulative learning rate", time: "hours since the first step" };
let axes = {};

export const state = {
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

const axis = () => (state.x === "step" ? null : axes[state.x] ?? null);
export function place(step) { const found = axis(); return found ? interpolate(found.steps, found.values, step) : step; }
function stepAt(x) { const found = axis(); return found ? interpolate(found.values, found.steps, x) : x; }

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
export function arranged({ data, layout }) {
  const traces = smoothTraces(data).map((trace) => ({
    ...trace, customdata: trace.x, ...(axis() ? { x: trace.x.map(place) } : {}),
  }));
  const placed = (shape) => (/^x\d*$/.test(shape.xref) ? { ...shape, ...("x" in shape ? { x: place(shape.x) } : { x0: place(shape.x0), x1: place(shape.x1) }) } : shape);
  const changed = { ...layout, shapes: layout.shapes?.map(placed), annotations: layout.annotations?.map(placed), uirevision: `${state.x} ${state.log}` };
  for (const key of Object.keys(changed)) {
    if (!/^xaxis\d*$/.test(key)) continue;
    changed[key] = { ...changed[key] };
    if (axis()) {
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

let linking = false, refetch = () => {}, waiting = 0;

/** Requests the curves of the visible steps, once the reader has stopped zooming. */
function lookCloser() { clearTimeout(waiting); waiting = setTimeout(refetch, 250); }

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
export function link(element) {
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
export async function loadAxes() {
  if (!form || state.x === "step" || axes[state.x]) return;
  if (!form.dataset.axes) { state.x = "step"; return; }
  try {
    const response = await ask(form.dataset.axes);
    if (response.ok) axes = await response.json();
  } catch { /* The curves stay over steps. */ }
  if (!axes[state.x]) state.x = "step";
}

/** Shows the controls, calls `redraw` whenever one is used, and `ask` after a zoom. */
export function showControls(redraw, ask) {
  if (!form) return;
  refetch = ask;
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
    await redraw();
  });
  form.querySelector("[data-unzoom]").addEventListener("click", () => { state.from = null; state.to = null; keep(); zoomAll(); lookCloser(); });
}
