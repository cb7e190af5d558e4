// Formatting of numbers, sizes and times.
const UNITS = ["B", "KB", "MB", "GB", "TB", "PB"];
const numbers = new Intl.NumberFormat("en");
const clock = new Intl.DateTimeFormat("en-GB", { timeStyle: "medium" });
const day = new Intl.DateTimeFormat("en-GB", { dateStyle: "medium", timeStyle: "medium" });
export const NONE = "–";

/** Return a size, by thousands as macOS counts. */
export function bytes(value) {
  if (value == null || !Number.isFinite(value)) return NONE;
  let unit = 0;
  let size = value;
  while (size >= 999.5 && unit < UNITS.length - 1) {
    size /= 1000;
    unit += 1;
  }
  return `${unit && size < 99.95 ? size.toFixed(1) : Math.round(size)} ${UNITS[unit]}`;
}

/** Return a rate of bytes. */
export function rate(bytesPerS) {
  return bytesPerS == null ? NONE : `${bytes(bytesPerS)}/s`;
}

/** Return a duration. */
export function seconds(value) {
  if (value == null || !Number.isFinite(value)) return NONE;
  if (value < 0.0005) return "0 s";
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  if (value < 10) return `${value.toFixed(2)} s`;
  if (value < 120) return `${value.toFixed(1)} s`;
  return value < 7200 ? `${Math.round(value / 60)} min` : `${Math.round(value / 3600)} h`;
}

/** Return a count with separators. */
export function count(value) {
  return value == null ? NONE : numbers.format(Math.round(value));
}

/** Return a share as a percentage. */
export function share(part, whole) {
  return whole > 0 ? `${Math.round((100 * part) / whole)} %` : NONE;
}

/** Return how long ago a time was. */
export function ago(atS, nowS = Date.now() / 1000) {
  if (!atS) return NONE;
  const age = Math.max(0, nowS - atS);
  if (age < 5) return "just now";
  if (age < 60) return `${Math.round(age)} s ago`;
  if (age < 3600) return `${Math.round(age / 60)} min ago`;
  if (age < 172800) return `${Math.round(age / 3600)} h ago`;
  return `${Math.round(age / 86400)} days ago`;
}

/** Return the time of day. */
export function time(atS) {
  return atS ? clock.format(atS * 1000) : NONE;
}

/** Return the date and time. */
export function date(atS) {
  return atS ? day.format(atS * 1000) : NONE;
}

/** Return a number with its noun in singular or plural. */
export function plural(value, noun) {
  return `${count(value)} ${noun}${value === 1 ? "" : "s"}`;
}
