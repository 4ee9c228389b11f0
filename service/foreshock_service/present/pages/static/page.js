// Draws the page's figures. While a run is live and the page is visible, it refreshes both, with backoff on errors.

import { ask } from "./ask.js";
import { isFolded, refreshFigures, showFigure } from "./figures.js";

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
