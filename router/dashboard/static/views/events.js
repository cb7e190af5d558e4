// Log of events since the page was opened.
import { html, useState } from "../vendor/htm-preact.js";
import { time } from "../format.js";
import { eventWords } from "../words.js";
import { Empty } from "./parts.js";

const SHOWN_MAX = 200;
const KINDS = ["all", "agent", "turn", "move", "node", "drain", "link"];

/** The view. */
export function View({ store }) {
  const [kind, setKind] = useState("all");
  const [words, setWords] = useState("");
  const [paused, setPaused] = useState(null); // the log when it was paused
  const needle = words.trim().toLowerCase();
  const found = [];
  const log = paused ?? store.log;
  for (let i = log.length - 1; i >= 0 && found.length < SHOWN_MAX; i -= 1) {
    const { id, name, data } = log[i];
    if (kind !== "all" && !name.startsWith(`${kind}.`)) continue;
    const text = eventWords(name, data);
    if (needle && !`${name} ${data.tenant ?? ""} ${text}`.toLowerCase().includes(needle)) continue;
    found.push({ id, name, data, text });
  }
  return html`<h1>Events</h1>
    <div class="filter">
      <label class="field"><span>Filter</span><input type="search" value=${words}
        placeholder="agent, Mac, words …" onInput=${(event) => setWords(event.target.value)} /></label>
      <label class="field"><span>Kind</span><select value=${kind}
          onChange=${(event) => setKind(event.target.value)}>
        ${KINDS.map((each) => html`<option key=${each} value=${each}>${each}</option>`)}
      </select></label>
      <button aria-pressed=${paused !== null}
        onClick=${() => setPaused(paused ? null : [...store.log])}>Pause</button>
    </div>
    ${!found.length && html`<${Empty} title="No event yet">
      <p>Events appear here from the moment this page was opened.</p></${Empty}>`}
    ${found.length > 0 && html`<ol class="events">${found.map((one) => html`
      <li key=${one.id}><time>${time(one.data.at_s)}</time>
        <span class="kind">${one.name}</span>
        <span>${one.text}${one.data.tenant !== undefined && html`
          <span class="tenant">${one.data.tenant}</span>`}</span></li>`)}</ol>`}`;
}
