// Addresses and a first request for clients, to copy.
import { html, useState } from "../vendor/htm-preact.js";
import { Try } from "./try.js";

/** Addresses and a first request. */
export function Connect({ store, isOpen }) {
  const [open, setOpen] = useState(isOpen); // stays open when the first agent appears
  const base = location.origin;
  const model = [...store.nodes.values()].find((node) => node.model)?.model ?? "MODEL";
  const key = store.caller?.tenant === "default" ? "" : " \\\n  -H \"Authorization: Bearer $KEY\"";
  const curl = `curl ${base}/v1/chat/completions -H 'content-type: application/json'${key} \\
  -d '{"model": "${model}", "messages": [{"role": "user", "content": "Hello"}]}'`;
  return html`<details class="connect" open=${open}
      onToggle=${(event) => setOpen(event.target.open)}>
    <summary>Use this fabric</summary>
    <dl class="pairs wide">
      <div><dt>OpenAI's clients</dt><dd><code>base_url = "${base}/v1"</code></dd></div>
      <div><dt>Anthropic's clients</dt><dd><code>base_url = "${base}"</code></dd></div>
      <div><dt>Coding agents</dt><dd><code>macfabric launch claude</code></dd></div>
    </dl>
    <pre tabindex="0" aria-label="A first request">${curl}</pre>
    ${store.caller?.tenant && html`<${Try} />`}
  </details>`;
}
