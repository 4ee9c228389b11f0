// Sets the reader's theme before the page is painted: the system's, or the one selected by the button.
(() => {
  const root = document.documentElement, kept = localStorage.getItem("theme");
  if (kept) root.dataset.theme = kept;
  document.addEventListener("DOMContentLoaded", () => {
    const button = document.querySelector("[data-theme-button]");
    const isDark = () => (root.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
    button.hidden = false;
    button.addEventListener("click", () => {
      root.dataset.theme = isDark() ? "light" : "dark";
      localStorage.setItem("theme", root.dataset.theme);
      document.dispatchEvent(new Event("themechange"));
    });
  });
})();
