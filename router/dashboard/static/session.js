// The keys that were entered, for this tab only. They are sent as headers that a page must set
// itself, so no request of another site ever carries them.
const KEY = "macfabric.key";
const OPERATOR_KEY = "macfabric.operator-key";
const held = new Map();

function read(name) {
  try {
    return sessionStorage.getItem(name) ?? "";
  } catch {
    return held.get(name) ?? "";
  }
}

function write(name, value) {
  held.set(name, value);
  try {
    if (value) sessionStorage.setItem(name, value);
    else sessionStorage.removeItem(name);
  } catch {
    // Storage is off: the keys last as long as the page.
  }
}

/** Keep the keys that were entered; empty ones are forgotten. */
export function signIn(key, operatorKey) {
  write(KEY, key.trim());
  write(OPERATOR_KEY, operatorKey.trim());
}

/** Forget the keys. */
export function signOut() {
  signIn("", "");
}

/** Return whether a key was entered. */
export function hasKey() {
  return Boolean(read(KEY) || read(OPERATOR_KEY));
}

/** Return the headers that carry the keys. */
export function keyHeaders() {
  const headers = {};
  if (read(KEY)) headers.Authorization = `Bearer ${read(KEY)}`;
  if (read(OPERATOR_KEY)) headers["X-Macfabric-Operator-Key"] = read(OPERATOR_KEY);
  return headers;
}
