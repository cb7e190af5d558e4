// Labels and sentences for the states, events and problems that the API reports.
import { ago } from "./format.js";

const EXIT_SHOWN_S = 3600;
const CERTIFICATE_DAYS = 30;

export const STATES = {
  ready: "ready",
  starting: "starting",
  joining: "joining: its agents are not known yet",
  draining: "draining",
  drained: "drained: it may be closed or switched off",
  stuck: "draining is stuck",
  suspect: "no heartbeat for some seconds",
  expired: "lost",
  lost: "lost",
  asleep: "asleep",
  stopping: "stopping",
  failed: "failed to start",
};

export const LINKS = {
  thunderbolt: "Thunderbolt",
  ethernet: "Ethernet",
  wifi: "Wi-Fi",
  loopback: "same machine",
  other: "other network",
};

export const CACHES = {
  hot: "memory",
  disk: "disk",
  peer: "another Mac",
  cold: "nothing: computed",
};

const MATCHES = {
  exact: "All of it was stored",
  extend: "It continued the stored context",
  diverge: "It differs from the stored context",
  edit: "Reused after an edit",
  spans: "Parts were reused from other contexts",
  none: "Nothing was stored",
};

/** Describe an agent's last match: its kind, and why it ended there. */
export function matchWords(match) {
  if (!match) return "unknown: no turn since it moved to its Mac";
  const kind = MATCHES[match.kind] ?? match.kind;
  return match.reason ? `${kind}: ${match.reason}` : `${kind}.`;
}

/** Return a node's state, or that of its drain. */
export function nodeState(node) {
  const drain = node.drain?.state;
  if (drain && (node.state === "ready" || node.state === "draining")) return drain;
  return node.state;
}

/** Return the level of a node's state: good, busy or bad. */
export function stateLevel(state) {
  if (state === "ready") return "good";
  return ["draining", "drained", "starting", "joining", "asleep"].includes(state) ? "busy" : "bad";
}

/** List the present problems of the fabric: {level, where, text, effect}. */
export function problems(state, nowS = Date.now() / 1000) {
  const found = [];
  const add = (level, where, text, effect) => found.push({ level, where, text, effect });
  const health = state.health ?? {};
  for (const name of health.missing ?? []) {
    add("bad", name, "has not joined", "its agents wait until it has");
  }
  if (health.unmet) add("bad", "fabric", `${health.unmet} expected Macs have not joined`, "");
  for (const node of state.nodes.values()) {
    const at = nodeState(node);
    if (["expired", "lost", "suspect", "failed", "stuck"].includes(at)) {
      add("bad", node.name, STATES[at] ?? at, "agents with copies elsewhere continue there");
    }
    if (node.failure) add("bad", node.name, node.failure, "its start is retried");
    if (node.degraded) add("bad", node.name, node.degraded, "turns continue; see its log");
    if (node.self_test && node.self_test.passed === false) {
      add("bad", node.name, "its self-test failed", "it reuses no caches");
    }
    const exit = node.last_exit;
    if (exit && exit.cause !== "stopped" && nowS - exit.at_s < EXIT_SHOWN_S) {
      add("busy", node.name, `its previous process ended, last seen ${ago(exit.at_s, nowS)}: ${exit.detail}`,
        "it was restarted; agents were kept on disk");
    }
    const days = node.certificate_ends_s ? (node.certificate_ends_s - nowS) / 86400 : Infinity;
    if (days < CERTIFICATE_DAYS) {
      add(days < 7 ? "bad" : "busy", node.name, `its certificate ends in ${Math.max(0, Math.floor(days))} days`,
        "rotate it with macfabric certs rotate");
    }
    if (node.template_warning) add("busy", node.name, node.template_warning, "");
    const pressure = node.memory?.pressure;
    if (pressure && pressure !== "normal") {
      add(pressure === "critical" ? "bad" : "busy", node.name, `memory pressure is ${pressure}`,
        "it keeps fewer agents in memory");
    }
    const thermal = node.thermal_state;
    if (thermal && thermal !== "nominal" && thermal !== "fair") {
      add(thermal === "critical" ? "bad" : "busy", node.name, `it is hot (${thermal})`,
        "macOS slows it down");
    }
    for (const stuck of node.drain?.stuck ?? []) {
      add("bad", node.name, `cannot move ${stuck.id}: ${stuck.message}`, "the drain waits for it");
    }
  }
  return found;
}

/** Describe an event in a sentence. */
export function eventWords(name, data) {
  const who = data.id ?? data.node ?? "";
  switch (name) {
    case "agent.created": return `${who} was created on ${data.node}`;
    case "agent.found": return `${who} was found on ${data.node}`;
    case "agent.moved": return `${who} moved from ${data.from} to ${data.to}`;
    case "agent.forked": return `${who} was forked from ${data.forked_from} on ${data.node}`;
    case "agent.hibernated": return `${who} was saved to a file from ${data.node}`;
    case "agent.resumed": return `${who} was restored from a file on ${data.node}`;
    case "agent.evicted": return `${data.replica ? "A copy of " : ""}${who} left ${data.node}`;
    case "agent.erased": return `${who} was erased`;
    case "turn.began":
      return `${who} began a turn on ${data.node}: ${data.cached_tokens} of ` +
        `${data.prompt_tokens} tokens from ${CACHES[data.cache] ?? data.cache}`;
    case "turn.ended":
      return `${who} ended a turn on ${data.node} (${data.outcome}): ` +
        `${data.completion_tokens} tokens`;
    case "move.state":
      return `Move of ${who} from ${data.from} to ${data.to}: ${data.state}` +
        (data.code ? ` (${data.code})` : "");
    case "node.state": return `${who} is ${STATES[data.state] ?? data.state}`;
    case "node.memory": return `${who} has ${data.pressure} memory pressure`;
    case "drain.state":
      return `Drain of ${who}: ${data.state}, ${data.agents_moved} moved, ${data.agents_left} left`;
    case "link.rate":
      return `Link from ${data.peer} to ${data.node} (${LINKS[data.kind] ?? data.kind}) measured`;
    case "missed": return `${data.count} events were skipped: they came too fast`;
    default: return name;
  }
}
