// Draws the page's figures. While a run is live and the page is visible, it refreshes both, with backoff on errors.

import { refreshFigures, showFigure } from "./figures.js";
import { foldCards, isFolded, unfoldedHtml } from "./folding.js";

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
    if (newer && newer.innerHTML !== unfoldedHtml(part) && !part.contains(document.activeElement)) {
      part.replaceChildren(...document.importNode(newer, true).childNodes);
      changed = true;
    }
  }
  if (changed) foldCards();
  return changed;
}

/** Fetches the page again (the browser sends its entity tag); returns whether the run is still live. */
async function refreshPage() {
  const response = await fetch(window.location.href, { cache: "no-cache", credentials: "same-origin" });
  if (!response.ok) throw new Error(String(response.status));
  const fresh = new DOMParser().parseFromString(await response.text(), "text/html");
  if (replaceParts(fresh)) await fillFragments();
  return fresh.body.dataset.live === "yes";
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

/** Fills every element with data-fragment that is not folded away, the slow parts of the page. On an error the older
 * content stays. */
async function fillFragments(within = document) {
  for (const element of within.querySelectorAll("[data-fragment]")) {
    if (isFolded(element) || element.contains(document.activeElement)) continue;
    try {
      const response = await fetch(element.dataset.fragment, { credentials: "same-origin" });
      if (!response.ok) throw new Error(String(response.status));
      const fresh = new DOMParser().parseFromString(await response.text(), "text/html");
      element.replaceChildren(...document.importNode(fresh.body, true).childNodes);
      element.dataset.filled = "yes";
    } catch {
      if (!element.dataset.filled) element.textContent = "This part could not be loaded. The service may be away; reload to try again.";
    }
  }
}

for (const chooser of document.querySelectorAll("select[data-chooser]")) {
  const element = chooser.closest("section").querySelector("[data-figure]");
  chooser.addEventListener("change", () => showFigure(element, chooser.value));
}

document.addEventListener("unfolded", async ({ detail: card }) => {
  await Promise.allSettled([refreshFigures(card), fillFragments(card)]);
});
await Promise.all([refreshFigures(), fillFragments()]);
document.body.dataset.drawn = "yes";
if (document.body.dataset.live === "yes") keepFresh(Number(document.body.dataset.refreshSeconds));
