// An agent's last turns: seconds by part, the cache's tier, and why no more was reused.
import { html } from "../vendor/htm-preact.js";
import { count, seconds, share, time } from "../format.js";
import { CACHES } from "../words.js";

const PARTS = [
  ["queue_s", "waited"],
  ["move_s", "moved"],
  ["prepare_s", "prepared"],
  ["fetch_s", "fetched"],
  ["load_s", "loaded"],
  ["prefill_s", "computed"],
  ["decode_s", "answered"],
  ["save_s", "saved"],
];

/** List of turns, the newest first. */
export function Turns({ turns }) {
  if (!turns.length) return html`<p class="muted">No turn is recorded.</p>`;
  const total = (turn) => PARTS.reduce((sum, [part]) => sum + (turn.times?.[part] ?? 0), 0);
  const longest = Math.max(...turns.map(total), 0.001);
  return html`<ul class="legend" aria-label="Parts of a turn">
      ${PARTS.map(([part, word]) => html`<li key=${part}><span class=${`part ${part}`}></span>
        ${word}</li>`)}
    </ul>
    <ol class="turns">${turns.map((turn) => html`<${Turn} key=${turn.id + turn.node} turn=${turn}
      total=${total(turn)} longest=${longest} />`)}</ol>`;
}

function Turn({ turn, total, longest }) {
  const took = PARTS.filter(([part]) => (turn.times?.[part] ?? 0) > 0);
  const words = took.map(([part, word]) => `${word} ${seconds(turn.times[part])}`).join(", ");
  return html`<li class="turn">
    <div class="row spread">
      <span><time>${time(turn.at_s)}</time> on ${turn.node} ${" "}
        <span class=${`tier ${turn.cache}`} title=${CACHES[turn.cache]}>${turn.cache}</span></span>
      <span>${seconds(total)}</span>
    </div>
    <div class="bar" role="img" aria-label=${words || "no times"}
        style=${{ width: `${Math.max(2, (100 * total) / longest)}%` }}>
      ${took.map(([part]) => html`<span key=${part} class=${`part ${part}`}
        style=${{ flexGrow: turn.times[part] / total }}></span>`)}
    </div>
    <p class="small">${words}${turn.times?.first_token_s != null &&
      `; first token after ${seconds(turn.times.first_token_s)}`}</p>
    <p class="small">${count(turn.cached_tokens)} of ${count(turn.prompt_tokens)} tokens reused
      (${share(turn.cached_tokens, turn.prompt_tokens)}), ${count(turn.completion_tokens)} answered,
      ended by ${turn.outcome}. ${turn.reason && `Match: ${turn.reason}.`}
      ${turn.not_hot && html` <span class="muted">Not hot: ${turn.not_hot}.</span>`}</p>
  </li>`;
}
