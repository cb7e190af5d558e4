// Light, dark, or as the system prefers.
const NAME = "macfabric.theme";
const ORDER = ["system", "light", "dark"];

/** Return the chosen theme: `system`, `light` or `dark`. */
export function theme() {
  return document.documentElement.dataset.theme ?? "system";
}

/** Choose the next theme of system, light and dark; return it. */
export function nextTheme() {
  const next = ORDER[(ORDER.indexOf(theme()) + 1) % ORDER.length];
  if (next === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = next;
  try {
    localStorage.setItem(NAME, next);
  } catch {
    // Storage is off: the choice lasts as long as the page.
  }
  window.dispatchEvent(new Event("themechange"));
  return next;
}

/** Return the value of a colour of the current theme, for canvases. */
export function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}
