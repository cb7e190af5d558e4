// One agent: its properties, actions and last turns.
import { html, useEffect, useState } from "../vendor/htm-preact.js";
import { erase, evict, fork, migrate, pin } from "../actions.js";
import { ApiError, get, path, tenantQuery } from "../api.js";
import { ago, bytes, count, date, share } from "../format.js";
import { keyOf } from "../store.js";
import { matchWords } from "../words.js";
import { Tiers } from "./parts.js";
import { Turns } from "./turns.js";

const QUIET_MS = 400; // turns in quick succession are read once

/** Panel of one agent, beside the list. */
export function Agent({ fabric, store, agent }) {
  const [turns, setTurns] = useState(null);
  const [error, setError] = useState(null);
  const key = keyOf(agent);
  const read = async (signal) => {
    try {
      store.takeAgent(key, await get(path`/v1/agents/${agent.id}` + tenantQuery(agent), { signal }));
      const { data } = await get(path`/v1/agents/${agent.id}/turns` + tenantQuery(agent), { signal });
      setTurns(data);
      setError(null);
    } catch (caught) {
      if (caught instanceof ApiError) setError(caught);
    }
  };
  useEffect(() => {
    const abort = new AbortController();
    const timer = setTimeout(() => read(abort.signal), turns ? QUIET_MS : 0);
    return () => {
      clearTimeout(timer);
      abort.abort();
    };
  }, [key, agent.used_s, agent.owner, agent.busy]);
  const close = () => {
    location.hash = "#/agents";
  };
  const after = async (work) => {
    if (await work) {
      await read();
      fabric.poll();
    }
  };
  const eraseIt = async () => {
    if (await erase(agent)) close();
  };
  return html`<aside class="agent" aria-labelledby="agent-title">
    <div class="row spread"><h2 id="agent-title">${agent.id}</h2>
      <button class="quiet" onClick=${close}>Back to all agents</button></div>
    <${Facts} agent=${agent} turn=${turns?.[0]} />
    ${store.owns(agent)
      ? html`<div class="row" role="group" aria-label=${`Actions on ${agent.id}`}>
          <button onClick=${() => after(migrate(store, agent))}>Move …</button>
          <button onClick=${() => after(pin(agent))}>${agent.pinned ? "Unpin" : "Pin"}</button>
          <button onClick=${() => after(fork(store, agent))}>Fork …</button>
          <button onClick=${() => after(evict(agent))}
            disabled=${!agent.tiers?.includes("hot")}>Evict …</button>
          <button class="danger" onClick=${eraseIt}>Erase …</button>
        </div>`
      : html`<p class="muted">To move, pin, fork or erase it, also sign in with a key of${" "}
          tenant <strong>${agent.tenant}</strong>.</p>`}
    <h3>Last turns</h3>
    ${error && html`<p class="warning" role="alert">${error.words}</p>`}
    ${turns ? html`<${Turns} turns=${turns} />` : !error && html`<p class="muted">Reading …</p>`}
  </aside>`;
}

function Facts({ agent, turn }) {
  const match = agent.last_match ?? (turn ? { ...turn, kind: turn.match } : null);
  const copies = (agent.copies ?? []).map((copy) =>
    `${copy.node}${copy.kept ? " (kept)" : ""}${copy.current ? "" : " (older)"}`);
  const facts = [
    ["Mac", agent.owner ?? "none"],
    ["Tenant", agent.tenant],
    ["State", `${agent.state}, epoch ${count(agent.epoch)}`],
    ["Tier", html`<${Tiers} agent=${agent} />`],
    ["Tokens", count(agent.tokens)],
    ["Size", agent.bytes && `${bytes(agent.bytes.hot)} memory, ${bytes(agent.bytes.disk)} disk`],
    ["Copies", copies.join(", ") || "none"],
    ["Saved", agent.durable === undefined ? null : (agent.durable ? "completely" : "not yet")],
    ["Created", agent.created_s && date(agent.created_s)],
    ["Last used", ago(agent.used_s)],
    ["Name in logs", agent.alias],
    ["Last match", match && `${count(match.cached_tokens)} of ${count(match.prompt_tokens)} tokens ` +
      `(${share(match.cached_tokens, match.prompt_tokens)})`],
    ["Why it ended", matchWords(match)],
  ];
  return html`<dl class="pairs">${facts.filter(([, value]) => value != null).map(([name, value]) =>
    html`<div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>`;
}
