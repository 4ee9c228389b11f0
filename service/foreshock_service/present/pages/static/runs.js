// The list of runs: filters that submit themselves, and ticks that persist from page to page.

const KEY = "ticked";
const ticked = new Set(JSON.parse(sessionStorage.getItem(KEY) ?? "[]"));
const compare = document.querySelector("#compare");
const button = compare.querySelector("button.primary"), clear = compare.querySelector("[data-untick]");

function show() {
  for (const box of compare.querySelectorAll("input[name=run]:not([type=hidden])")) box.checked = ticked.has(box.value);
  sessionStorage.setItem(KEY, JSON.stringify([...ticked]));
  if (!button) return;
  button.textContent = ticked.size ? `Compare ${ticked.size} ticked ${ticked.size === 1 ? "run" : "runs"}` : "Compare the ticked runs";
  button.disabled = ticked.size === 0;
  clear.hidden = ticked.size === 0;
}

compare.addEventListener("change", ({ target }) => {
  if (target.name !== "run") return;
  if (target.checked) ticked.add(target.value); else ticked.delete(target.value);
  show();
});
clear?.addEventListener("click", () => { ticked.clear(); show(); });
// The form also sends the runs that are ticked on other pages.
compare.addEventListener("formdata", ({ formData }) => {
  formData.delete("run");
  for (const run of ticked) formData.append("run", run);
});
document.addEventListener("replaced", show);

const filters = document.querySelector("[data-submits-itself]");
filters.addEventListener("change", () => filters.requestSubmit());
filters.addEventListener("formdata", ({ formData }) => {
  for (const [name, value] of [...formData]) if (!value) formData.delete(name);
});
show();
