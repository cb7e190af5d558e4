// Server-sent events by fetch, which can send keys as headers; EventSource cannot.
import { ApiError, send } from "./api.js";

const WAITS_MS = [300, 1000, 2000, 4000, 8000, 15000];
const SILENCE_MS = 20000; // the router sends a comment after four seconds

/** Yield {name, id, data} of a stream's body as frames arrive. */
export async function* framesOf(body, onBytes = () => {}) {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  let parts = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      onBytes();
      const text = decoder.decode(value, { stream: true });
      // The two newlines that end a frame may be split between two chunks.
      const last = parts.at(-1) ?? "";
      if (!text.includes("\n\n") && !(last.endsWith("\n") && text.startsWith("\n"))) {
        parts.push(text);
        continue;
      }
      const blocks = (parts.join("") + text).split("\n\n");
      parts = [blocks.pop()];
      for (const block of blocks) {
        const frame = frameOf(block);
        if (frame) yield frame;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function frameOf(block) {
  const frame = { name: "message", id: null, data: "" };
  for (const line of block.split("\n")) {
    const colon = line.indexOf(":");
    if (colon <= 0) continue; // a comment, which keeps the stream alive
    const field = line.slice(0, colon);
    const value = line.slice(colon + 1).replace(/^ /, "");
    if (field === "event") frame.name = value;
    else if (field === "id") frame.id = value;
    else if (field === "data") frame.data += (frame.data ? "\n" : "") + value;
  }
  if (!frame.data) return null;
  try {
    return { ...frame, data: JSON.parse(frame.data) };
  } catch {
    return null;
  }
}

/** Stream that reconnects after the last received event whenever it breaks. */
export class LiveStream {
  /** Follow `url`; `onFrame(frame)`, and `onState(state, error)` of connecting, live, reconnecting
   * or refused. `until(frame)` says that a frame is the last one. */
  constructor(url, { onFrame, onState = () => {}, until = () => false }) {
    this.url = url;
    this.onFrame = onFrame;
    this.onState = onState;
    this.until = until;
    this.lastId = null;
    this.isClosed = false;
    this.tries = 0;
    this.run();
  }

  /** Stop following. */
  close() {
    this.isClosed = true;
    this.abort?.abort();
    clearTimeout(this.timer);
    this.wake?.();
  }

  /** Reconnect after the last received event. */
  restart() {
    this.abort?.abort();
  }

  async run() {
    this.onState("connecting", null);
    while (!this.isClosed) {
      let error = null;
      try {
        if (await this.follow()) return;
      } catch (caught) {
        error = caught;
      }
      if (this.isClosed) return;
      if (error instanceof ApiError && [400, 401, 403, 404].includes(error.status)) {
        this.onState("refused", error);
        return;
      }
      this.onState("reconnecting", error);
      await this.pause(error?.retryAfterS);
    }
  }

  async follow() {
    this.abort = new AbortController();
    const headers = { Accept: "text/event-stream" };
    if (this.lastId) headers["Last-Event-ID"] = this.lastId;
    this.hear();
    try {
      const response = await send(this.url, { headers, signal: this.abort.signal });
      this.tries = 0;
      this.onState("live", null);
      for await (const frame of framesOf(response.body, () => this.hear())) {
        if (this.isClosed) return true;
        if (frame.id) this.lastId = frame.id;
        this.onFrame(frame);
        if (this.until(frame)) return true;
      }
      return false;
    } finally {
      clearTimeout(this.silence);
      this.abort.abort();
    }
  }

  /** Note that the stream is alive; silence ends it. */
  hear() {
    clearTimeout(this.silence);
    this.silence = setTimeout(() => this.abort.abort(), SILENCE_MS);
  }

  pause(atLeastS) {
    const usual = WAITS_MS[Math.min(this.tries++, WAITS_MS.length - 1)];
    const wait = Math.max(usual * (0.75 + Math.random() / 2), (atLeastS ?? 0) * 1000);
    return new Promise((resolve) => {
      this.wake = resolve;
      this.timer = setTimeout(resolve, wait);
    });
  }
}
