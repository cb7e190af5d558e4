// Savings by reuse: tokens that were not computed again and the seconds saved, by day and tenant.
import { html } from "../vendor/htm-preact.js";
import { count, plural, seconds, share } from "../format.js";
import { useRowsByTurn } from "./rows_by_turn.js";

const LIMIT = 60;
const QUIET_MS = 2000; // turns in quick succession are read once
const COLUMNS = ["Day (UTC)", "Tenant", "Turns", "Of prompts", "Reused", "Computed", "Time saved"];

/** Section of the charts view. */
export function Savings({ store }) {
  const [rows, error] = useRowsByTurn(store, `/v1/usage?period=day&limit=${LIMIT}`, QUIET_MS);
  const sum = (name) => (rows ?? []).reduce((total, row) => total + (row[name] ?? 0), 0);
  const days = new Set((rows ?? []).map((row) => row.start_s)).size;
  return html`<section aria-labelledby="savings">
    <h2 id="savings">Saved by reuse</h2>
    ${error && html`<p class="warning" role="alert">${error.words}</p>`}
    ${rows?.length > 0 && html`
      <p><strong>${seconds(sum("saved_s"))}</strong> of computing in ${plural(days, "day")}:${" "}
        ${count(sum("cached_tokens"))} of ${count(sum("prompt_tokens"))} prompt tokens
        (${share(sum("cached_tokens"), sum("prompt_tokens"))}) were not computed again.</p>
      <div class="scroll" tabindex="0" role="region" aria-label="Table of savings">
        <table class="stacks">
          <thead><tr>${COLUMNS.map((title) => html`<th scope="col" key=${title}>${title}</th>`)}</tr></thead>
          <tbody>${rows.map((row) => html`<${Day} key=${row.start_s + row.tenant} row=${row} />`)}</tbody>
        </table>
      </div>`}
    ${rows?.length === 0 && html`<p class="muted">No turn yet.</p>`}
  </section>`;
}

function Day({ row }) {
  const cells = [
    new Date(row.start_s * 1000).toISOString().slice(0, 10),
    row.tenant,
    count(row.turns),
    `${count(row.prompt_tokens)} tokens`,
    `${count(row.cached_tokens)} (${share(row.cached_tokens, row.prompt_tokens)})`,
    count(row.computed_tokens),
    seconds(row.saved_s),
  ];
  return html`<tr>${cells.map((value, at) => html`<td key=${COLUMNS[at]} data-title=${COLUMNS[at]}>
    ${value}</td>`)}</tr>`;
}
