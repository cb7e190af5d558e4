// Requests to the router, and its errors in plain words.
import { keyHeaders } from "./session.js";

const WORDS = {
  401: "The router does not accept this key.",
  403: "This key may not do that.",
  429: "The router is busy. Try again in a moment.",
  507: "The disk of that Mac is full or refuses to write.",
};

/** Error of a request: `status` is 0 where the router was not reached. */
export class ApiError extends Error {
  constructor(status, code, message, retryAfterS = null) {
    super(message);
    this.status = status;
    this.code = code;
    this.retryAfterS = retryAfterS;
  }

  /** What happened, and the router's own words for it. */
  get words() {
    if (this.status === 0) return "The router cannot be reached. It may be starting, or stopped.";
    const own = this.message && this.message[0].toUpperCase() + this.message.slice(1);
    const first = WORDS[this.status];
    if (!own) return first ?? `The router answered with status ${this.status}.`;
    return first ? `${first} ${own}` : own;
  }
}

/** Return the error of an answer that is none. */
export async function errorOf(response) {
  let body = null;
  try {
    body = await response.json();
  } catch {
    // A proxy's page, say: the status has to do.
  }
  const error = body?.error ?? {};
  const wait = Number(response.headers.get("retry-after"));
  const message = typeof error.message === "string" ? error.message : "";
  return new ApiError(response.status, error.code ?? "", message, wait > 0 ? wait : null);
}

/** Send a request with the keys; raise ApiError unless it was answered well. */
export async function send(path, options = {}) {
  let response;
  try {
    response = await fetch(path, {
      ...options,
      headers: { ...keyHeaders(), ...options.headers },
      cache: "no-store",
      credentials: "omit",
      redirect: "error",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "unreachable", "");
  }
  if (!response.ok) throw await errorOf(response);
  return response;
}

/** Return what a GET answers. */
export async function get(path, options = {}) {
  return (await send(path, options)).json();
}

/** Return what a POST of `body` answers. */
export async function post(path, body = null) {
  const options = { method: "POST" };
  if (body !== null) {
    options.headers = { "Content-Type": "application/json" };
    options.body = JSON.stringify(body);
  }
  return (await send(path, options)).json();
}

/** Return what a DELETE answers. */
export async function remove(path) {
  return (await send(path, { method: "DELETE" })).json();
}

/** Return the query that names an agent's tenant, for operators. */
export function tenantQuery(agent) {
  return agent.tenant === undefined ? "" : `?tenant=${encodeURIComponent(agent.tenant)}`;
}

/** Return a path with its names escaped: path`/v1/agents/${id}`. */
export function path(texts, ...names) {
  return texts.reduce((whole, text, i) => whole + encodeURIComponent(names[i - 1]) + text);
}
