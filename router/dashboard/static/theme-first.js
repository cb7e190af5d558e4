// Runs before the first paint, so that a chosen theme does not flash in the other one's colours.
"use strict";
try {
  const chosen = localStorage.getItem("macfabric.theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch {
  // Storage is off: the system's preference decides.
}
