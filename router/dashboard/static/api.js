// Requests to the router, and messages for its errors.
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

  /** Message for people: the kind of error, then the router's message. */
  get words() {
    if (this.status === 0) return "The router cannot be reached. It may be starting, or stopped.";
    const own = this.message && this.message[0].toUpperCase() + this.message.slice(1);
    const first = WORDS[this.status];
    if (!own) return first ?? `The router answered with status ${this.status}.`;
    return first ? `${first} ${own}` : own;
  }
}

/** Return the error in a response whose status is not 2xx. */
export async function errorOf(response) {
  let body = null;
  try {
    body = await response.json();
  } catch {
    // Not JSON, such as a proxy's page: only the status is known.
  }
  const error = body?.error ?? {};
  const wait = Number(response.headers.get("retry-after"));
  const message = typeof error.message === "string" ? error.message : "";
  return new ApiError(response.status, error.code ?? "", message, wait > 0 ? wait : null);
}

/** Send a request with the keys; raise ApiError unless the status is 2xx. */
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

/** GET a JSON document. */
export async function get(path, options = {}) {
  return (await send(path, options)).json();
}

/** POST a JSON body and return the JSON response. */
export async function post(path, body = null) {
  const options = { method: "POST" };
  if (body !== null) {
    options.headers = { "Content-Type": "application/json" };
    options.body = JSON.stringify(body);
  }
  return (await send(path, options)).json();
}

/** DELETE a resource and return the JSON response. */
export async function remove(path) {
  return (await send(path, { method: "DELETE" })).json();
}

/** Return the query string with an agent's tenant, which only operators see. */
export function tenantQuery(agent) {
  return agent.tenant === undefined ? "" : `?tenant=${encodeURIComponent(agent.tenant)}`;
}

/** Return a path with its names escaped: path`/v1/agents/${id}`. */
export function path(texts, ...names) {
  return texts.reduce((whole, text, i) => whole + encodeURIComponent(names[i - 1]) + text);
}
