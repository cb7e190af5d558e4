// Fleet view: present problems, the map of Macs, and a card for each.
import { html } from "../vendor/htm-preact.js";
import { drain, migrate, undrain } from "../actions.js";
import { ago, bytes, count, plural, seconds, share } from "../format.js";
import { NONE } from "../format.js";
import { keyOf } from "../store.js";
import { figures } from "../series.js";
import { nodeState, problems } from "../words.js";
import { FleetMap } from "./map.js";
import { Connect } from "./connect.js";
import { Empty, Meter, StateBadge, draggable, dropTarget } from "./parts.js";

const AGENTS_SHOWN = 8;
const FIGURES_S = 300;

/** Fleet view, the first one. */
export function Fleet({ fabric, store }) {
  const nodes = [...store.nodes.values()].sort((a, b) => a.name.localeCompare(b.name));
  const byNode = new Map(nodes.map((node) => [node.name, []]));
  for (const agent of store.agents.values()) byNode.get(agent.owner)?.push(agent);
  for (const list of byNode.values()) list.sort((a, b) => (b.used_s ?? 0) - (a.used_s ?? 0));
  return html`<h1 class="only-read">Fleet</h1>
    <${Summary} store=${store} nodes=${nodes} />
    <${Problems} store=${store} />
    ${nodes.length > 0 && html`<${FleetMap} store=${store} nodes=${nodes} />`}
    <section aria-labelledby="macs">
      <h2 id="macs">Macs</h2>
      ${!nodes.length && html`<${Empty} title="No Mac yet">
        <p>A Mac appears once it has joined: <code>macfabric up</code> or <code>ray up</code> starts
          them.</p></${Empty}>`}
      <div class="cards">
        ${nodes.map((node) => html`<${NodeCard} key=${node.name} fabric=${fabric} store=${store}
          node=${node} agents=${byNode.get(node.name)} />`)}
      </div>
    </section>
    <${Connect} store=${store} isOpen=${store.agents.size === 0} />`;
}

function Summary({ store, nodes }) {
  const since = figures(store.turns, Date.now() / 1000 - FIGURES_S);
  const ready = nodes.filter((node) => nodeState(node) === "ready").length;
  const agents = store.agents.size + store.leftOut;
  const facts = [
    ["Macs ready", `${ready} of ${nodes.length}`],
    ["Agents", count(agents)],
    ["Turns now", count(store.begun.size)],
    ["Turns in 5 min", count(since.turns)],
    ["First token, median", seconds(since.firstTokenS)],
    ["Reused", share(since.cached, since.prompt)],
    ["Tokens/s", since.turns ? since.tokensPerS.toFixed(1) : NONE],
  ];
  return html`<dl class="facts">${facts.map(([name, value]) => html`
    <div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>`;
}

function Problems({ store }) {
  const found = problems(store);
  if (!found.length) return null;
  return html`<section class="problems" aria-labelledby="problems">
    <h2 id="problems">Problems</h2>
    <ul>${found.map((one) => html`<li key=${one.where + one.text} class=${one.level}>
      <strong>${one.where}</strong> ${one.text}${one.effect && html`; <span>${one.effect}</span>`}
    </li>`)}</ul>
  </section>`;
}

function NodeCard({ fabric, store, node, agents }) {
  const hot = node.bytes?.hot ?? 0;
  const disk = node.bytes?.disk ?? 0;
  const hotLimit = node.memory?.hot_limit_bytes;
  const state = nodeState(node);
  const isDraining = Boolean(node.drain);
  const again = () => fabric.poll();
  return html`<article class=${`card ${state}`} aria-label=${node.name}
      ...${dropTarget(store, node, migrate)}>
    <header><h3>${node.name}</h3><${StateBadge} node=${node} /></header>
    <p class="muted">${[node.usage?.chip, node.host, node.model].filter(Boolean).join(" · ")}</p>
    ${hotLimit > 0 && html`<${Meter} label="Agents' caches in RAM" value=${hot} max=${hotLimit}
      text=${`${bytes(hot)} of ${bytes(hotLimit)}`} />`}
    ${node.free && html`<${Meter} label="Agents' caches on disk" value=${disk} max=${disk + node.free.disk}
      text=${`${bytes(disk)}, ${bytes(node.free.disk)} left`} />`}
    ${!node.free && node.bytes && html`<p>${bytes(hot)} in memory, ${bytes(disk)} on disk${
      store.isOperator ? "" : ", of your agents"}</p>`}
    ${node.usage?.machine_bytes > 0 && html`<${Meter} label="RAM of its process"
      value=${node.usage.process_bytes} max=${node.usage.machine_bytes}
      text=${`${bytes(node.usage.process_bytes)} of ${bytes(node.usage.machine_bytes)}`} />`}
    ${node.active != null && html`<${Facts} node=${node} />`}
    ${isDraining && html`<p class="drain">${drainWords(node.drain)}</p>`}
    <${AgentChips} store=${store} agents=${agents} node=${node} />
    ${store.isOperator && html`<div class="row end">
      ${isDraining
        ? html`<button onClick=${() => undrain(node).then(again)}>Undrain ${node.name}</button>`
        : html`<button onClick=${() => drain(node).then(again)}>Drain ${node.name} …</button>`}
    </div>`}
  </article>`;
}

function drainWords(drain) {
  if (drain.state === "drained") return "Drained: it may be closed or switched off.";
  const left = drain.agents_left == null ? "" : `, ${plural(drain.agents_left, "agent")} left`;
  const moved = drain.agents_moved == null ? "" : `: ${count(drain.agents_moved)} moved${left}`;
  return `${drain.state === "stuck" ? "Draining is stuck" : "Draining"}${moved}.`;
}

function Facts({ node }) {
  const facts = [
    ["Turns", `${node.active} active, ${node.waiting} waiting`],
    ["Queue", seconds(node.queue_s)],
    ["Prefill", node.prefill_tokens_per_s ? `${count(node.prefill_tokens_per_s)} tokens/s` : NONE],
    ["Decode", node.decode_tokens_per_s ? `${node.decode_tokens_per_s.toFixed(1)} tokens/s` : NONE],
    ["Weights", bytes(node.usage?.weights_bytes)],
    ["Heat", node.thermal_state ?? NONE],
    ["Pressure", node.memory?.pressure ?? NONE],
  ];
  return html`<dl class="pairs">${facts.map(([name, value]) => html`
    <div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>`;
}

function AgentChips({ store, agents, node }) {
  const more = agents.length - AGENTS_SHOWN;
  return html`<div class="chips">
    <a class="chips-all" href=${`#/agents/on/${node.name}`}>${plural(store.agentsOn(node), "agent")}</a>
    ${agents.slice(0, AGENTS_SHOWN).map((agent) => html`<a key=${keyOf(agent)}
      class=${`chip ${agent.busy ? "busy" : ""}`}
      href=${`#/agents/${encodeURIComponent(keyOf(agent))}`}
      title=${`${agent.id}: used ${ago(agent.used_s)}`}
      ...${draggable(agent, store.owns(agent))}>${agent.id}</a>`)}
    ${more > 0 && html`<span class="muted">and ${count(more)} more</span>`}
  </div>`;
}
