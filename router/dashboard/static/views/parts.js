// Components that several views share.
import { html } from "../vendor/htm-preact.js";
import { CACHES, STATES, nodeState, stateLevel } from "../words.js";

/** Bar of a value within its maximum, with a label and a text. */
export function Meter({ label, value, max, text, isHigh = false }) {
  const part = max > 0 ? Math.min(1, value / max) : 0;
  return html`<div class="meter">
    <div class="meter-words"><span>${label}</span><span>${text}</span></div>
    <div class=${`meter-bar ${isHigh || part > 0.92 ? "high" : ""}`} role="meter"
      aria-label=${label} aria-valuemin="0" aria-valuemax=${max || 1}
      aria-valuenow=${Math.min(value ?? 0, max || 1)} aria-valuetext=${text}>
      <span style=${{ width: `${(100 * part).toFixed(1)}%` }}></span>
    </div>
  </div>`;
}

/** Badge with a node's state. */
export function StateBadge({ node }) {
  const state = nodeState(node);
  return html`<span class=${`badge ${stateLevel(state)}`} title=${STATES[state] ?? state}>
    ${state}</span>`;
}

/** Tiers that hold an agent's cache. */
export function Tiers({ agent }) {
  if (!agent.tiers?.length) return html`<span class="muted">–</span>`;
  return agent.tiers.map((tier, i) => html`${i ? " " : ""}<span key=${tier}
    class=${`tier ${tier}`} title=${CACHES[tier] ?? tier}>${tier}</span>`);
}

/** Placeholder of a view without rows. */
export function Empty({ title, children }) {
  return html`<div class="empty"><h2>${title}</h2>${children}</div>`;
}

/** Props of an element that can be dragged onto a Mac. */
export function draggable(agent, canMove) {
  if (!canMove) return {};
  return {
    draggable: true,
    onDragStart: (event) => {
      event.dataTransfer.setData("application/x-macfabric-agent", `${agent.tenant ?? ""}/${agent.id}`);
      event.dataTransfer.effectAllowed = "move";
    },
  };
}

/** Props of an element of a Mac onto which agents can be dropped. */
export function dropTarget(store, node, migrate) {
  const mark = (isOver) => (event) => {
    if (!event.dataTransfer.types.includes("application/x-macfabric-agent")) return;
    event.preventDefault();
    event.currentTarget.classList.toggle("drop-over", isOver);
  };
  return {
    onDragEnter: mark(true),
    onDragOver: mark(true),
    onDragLeave: (event) => event.currentTarget.classList.remove("drop-over"),
    onDrop: (event) => {
      event.preventDefault();
      event.currentTarget.classList.remove("drop-over");
      const agent = store.agents.get(event.dataTransfer.getData("application/x-macfabric-agent"));
      if (agent) migrate(store, agent, node.name);
    },
  };
}
