// On a narrow screen the cards of a grid, and those that say so, fold to their headings, all but the first one: a phone scrolls little, and
// only the plots that are read are fetched and drawn.

const narrow = window.matchMedia("(max-width: 560px)");
const chosen = new Map(); // id of a heading → whether the reader wants its card open
const CARDS = ".grid:not([data-fold=no]) > .card[aria-labelledby], .card[data-fold=yes]";

/** Whether an element is in a folded card. */
export function isFolded(element) { return element.closest("[data-folded]") !== null; }

/** The heading's text, or the button that holds it. */
export function textOf(heading) { return heading.querySelector(".fold") ?? heading; }

/** The HTML of a part as the service sent it. */
export function unfoldedHtml(part) {
  const copy = part.cloneNode(true);
  for (const card of copy.querySelectorAll("[data-folded]")) card.removeAttribute("data-folded");
  for (const button of copy.querySelectorAll(".fold")) button.replaceWith(...button.childNodes);
  return copy.innerHTML;
}

function open(heading, card, wanted) {
  chosen.set(heading.id, wanted);
  foldCards();
  if (wanted) document.dispatchEvent(new CustomEvent("unfolded", { detail: card }));
}

function buttonOf(heading, card) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "fold";
  button.append(...heading.childNodes);
  button.addEventListener("click", () => open(heading, card, card.hasAttribute("data-folded")));
  heading.append(button);
  return button;
}

/** Folds and unfolds the cards as the width and the reader want them. */
export function foldCards() {
  [...document.querySelectorAll(CARDS)].forEach((card, at) => {
    const heading = card.querySelector("h2");
    if (!heading) return;
    const button = heading.querySelector(".fold");
    const isOpen = !narrow.matches || (chosen.get(heading.id) ?? at === 0);
    card.toggleAttribute("data-folded", !isOpen);
    if (narrow.matches) (button ?? buttonOf(heading, card)).setAttribute("aria-expanded", String(isOpen));
    else button?.replaceWith(...button.childNodes);
  });
}

/** Opens the card that the address names, such as #advice-title. */
function openNamed() {
  const named = document.getElementById(location.hash.slice(1));
  const card = named?.closest("[data-folded]");
  if (!card) return;
  open(card.querySelector("h2"), card, true);
  named.scrollIntoView();
}

window.addEventListener("hashchange", openNamed);
narrow.addEventListener("change", () => {
  foldCards();
  if (!narrow.matches) document.dispatchEvent(new CustomEvent("unfolded", { detail: document.body }));
});
foldCards();
openNamed();
