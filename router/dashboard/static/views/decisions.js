// Placement decisions: where turns went and why, estimated and actual times.
import { html, useState } from "../vendor/htm-preact.js";
import { count, seconds, share, time } from "../format.js";
import { Empty } from "./parts.js";
import { useRowsByTurn } from "./rows_by_turn.js";

const LIMIT = 200;
const QUIET_MS = 1000;
const HOW = {
  stay: "stayed", move: "moved the agent", load: "loaded a part", fetch: "fetched a part",
  recompute: "recomputed",
};
const TERMS = {
  queue_s: "queue", bring_s: "transfer", load_s: "load", prefill_s: "prefill", answer_s: "decode",
  delay_s: "delay others", evict_s: "evict", share_s: "share", risk_s: "risk", price_s: "move",
};

/** The view. */
export function View({ store }) {
  const [rows, error] = useRowsByTurn(store, `/v1/placement/decisions?limit=${LIMIT}`, QUIET_MS);
  const [words, setWords] = useState("");
  const needle = words.trim().toLowerCase();
  const shown = (rows ?? []).filter((row) => !needle ||
    [row.agent, row.node, row.how, row.cache, row.outcome, row.turn].join(" ").toLowerCase()
      .includes(needle));
  return html`<h1>Decisions of the router</h1>
    <p class="muted">The newest ${LIMIT}. Agents are named as in logs.</p>
    ${error && html`<p class="warning" role="alert">${error.words}</p>`}
    ${rows && !rows.length && html`<${Empty} title="No decision yet">
      <p>Each turn adds a decision.</p></${Empty}>`}
    ${rows?.length > 0 && html`
      <div class="filter"><label class="field"><span>Filter</span>
        <input type="search" value=${words} placeholder="agent, Mac, how, cache …"
          onInput=${(event) => setWords(event.target.value)} /></label></div>
      <div class="scroll" tabindex="0" role="region" aria-label="Table of decisions">
        <table class="stacks">
          <thead><tr>${["Time", "Agent", "Mac", "How", "Reused", "First token, estimated",
            "First token, actual", "Estimate by cause", "Outcome"].map((title) => html`
            <th scope="col" key=${title}>${title}</th>`)}</tr></thead>
          <tbody>${shown.map((row) => html`<${Decision} key=${row.turn ?? row.at_s} row=${row} />`)}</tbody>
        </table>
      </div>`}`;
}

function Decision({ row }) {
  const ratio = row.first_token_s != null && row.first_token_estimate_s > 0
    ? row.first_token_s / row.first_token_estimate_s : null;
  const off = ratio !== null && (ratio > 2 || ratio < 0.5) && row.first_token_s > 0.2;
  const terms = Object.entries(row.terms).filter(([, value]) => Math.abs(value) >= 0.0005)
    .sort((a, b) => b[1] - a[1]);
  return html`<tr>
    <td data-title="Time">${time(row.at_s)}</td>
    <td data-title="Agent"><code>${row.agent}</code></td>
    <td data-title="Mac">${row.node}${row.served_by !== row.node && ` (served by ${row.served_by})`}</td>
    <td data-title="How">${HOW[row.how] ?? row.how}${row.from && ` from ${row.from}`}</td>
    <td data-title="Reused">${share(row.cached_tokens, row.prompt_tokens)}
      <span class="muted"> of ${count(row.prompt_tokens)}</span></td>
    <td data-title="Estimated" class="number">${seconds(row.first_token_estimate_s)}</td>
    <td data-title="Actual" class=${`number ${off ? "off" : ""}`}>${seconds(row.first_token_s)}${
      off ? ` (${ratio >= 2 ? `${ratio.toFixed(1)} times` : `${Math.round(100 * ratio)} %`})` : ""}</td>
    <td data-title="By cause" class="small">${terms.map(([name, value]) =>
      `${TERMS[name] ?? name} ${seconds(value)}`).join(", ")}</td>
    <td data-title="Outcome">${row.outcome}</td>
  </tr>`;
}
