// State of the fabric as the page knows it: a snapshot, and the events since.
//
//     snapshot ──▶ nodes, agents, moves     event ──▶ one change     change ──▶ one redraw per 50 ms

const LOG_MAX = 1000;
const TURNS_MAX = 6000;
const SAMPLES_MAX = 1200;
const REDRAW_MS = 50;
const MOVE_SHOWN_MS = 4000; // after its end: many moves are too short to notice

/** Return the key of an agent: operators see ids of several tenants. */
export function keyOf(row) {
  return `${row.tenant ?? ""}/${row.id}`;
}

/** State of the fabric as the page knows it, and its listeners. */
export class Store {
  constructor() {
    this.listeners = new Set();
    this.reset();
  }

  /** Forget everything, as after another sign-in. */
  reset() {
    this.stream = "connecting";
    this.error = null;
    this.caller = null;
    this.health = null;
    this.router = null; // the router that serves this page, as GET /v1/router shows it
    this.nodes = new Map();
    this.agents = new Map();
    this.leftOut = 0;
    this.moves = new Map();
    this.rates = new Map(); // by "node<peer": {kind, bytes_per_s, rtt_s, at_s}
    this.log = [];
    this.turns = []; // ended turns, the oldest first
    this.samples = []; // lengths of queues, one per poll of the nodes
    this.begun = new Map(); // turns in progress, by agent
    this.stale = new Set(); // agents whose size and tiers have changed since they were read
    this.hasSnapshot = false;
    this.changed();
  }

  /** Call `listener` after changes, at most once per REDRAW_MS; return a function that unsubscribes. */
  subscribe(listener) {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  }

  changed() {
    if (this.pending) return;
    this.pending = setTimeout(() => {
      this.pending = null;
      for (const listener of this.listeners) listener();
    }, REDRAW_MS);
  }

  setStream(state, error) {
    this.stream = state;
    this.error = error;
    this.changed();
  }

  /** Count the agents of a Mac: by the events, or as it reports if the snapshot left agents out. */
  agentsOn(node) {
    if (this.leftOut) return node.agents ?? 0;
    let found = 0;
    for (const row of this.agents.values()) found += row.owner === node.name;
    return found;
  }

  /** Whether the caller sees the whole fabric. */
  get isOperator() {
    return Boolean(this.caller?.operator);
  }

  /** Whether the caller's key may act on an agent: only its own tenant's may. */
  owns(agent) {
    const tenant = this.caller?.tenant;
    return tenant != null && (agent.tenant === undefined || agent.tenant === tenant);
  }

  /** Take a frame of GET /v1/events. */
  take({ name, id, data }) {
    if (name === "snapshot") this.takeSnapshot(data);
    else {
      this.log.push({ id: id ?? `${name}${this.log.length}`, name, data });
      if (this.log.length > LOG_MAX) this.log.splice(0, this.log.length - LOG_MAX);
      HANDLERS[name]?.(this, data);
    }
    this.changed();
  }

  takeSnapshot(data) {
    this.hasSnapshot = true;
    this.caller = data.caller ?? null;
    this.health = data.health;
    this.takeNodes(data.nodes);
    this.agents = new Map(data.agents.map((row) => [keyOf(row), row]));
    this.leftOut = data.agents_left_out;
    this.moves = new Map(data.moves.map((row) => [row.move, row]));
    this.begun = new Map();
    this.stale.clear();
  }

  /** Take rows of GET /v1/nodes. */
  takeNodes(rows) {
    this.nodes = new Map(rows.map((row) => [row.name, row]));
    for (const row of rows) {
      for (const link of row.links ?? []) {
        if (!link.reachable || !link.bytes_per_s) continue;
        const key = `${row.name}<${link.peer}`;
        const known = this.rates.get(key);
        if (!known || known.bytes_per_s < link.bytes_per_s || known.kind === link.kind) {
          this.rates.set(key, {
            node: row.name, peer: link.peer, kind: link.kind,
            bytes_per_s: link.bytes_per_s, rtt_s: link.rtt_s,
          });
        }
      }
    }
    this.changed();
  }

  /** Take the answer of GET /v1/router. */
  takeRouter(row) {
    this.router = row;
    this.changed();
  }

  /** Record the lengths of the nodes' queues. */
  sample(atS) {
    let waiting = 0;
    let active = 0;
    for (const node of this.nodes.values()) {
      waiting += node.waiting ?? 0;
      active += node.active ?? 0;
    }
    this.samples.push({ at_s: atS, waiting, active });
    if (this.samples.length > SAMPLES_MAX) this.samples.shift();
  }

  /** Take one agent as GET /v1/agents/ID shows it. */
  takeAgent(key, row) {
    const known = this.agents.get(key);
    this.stale.delete(key);
    // After a move, the new Mac does not know the agent's last match.
    const last_match = row.last_match ?? known?.last_match ?? null;
    if (known) this.agents.set(key, { ...known, ...row, last_match, tenant: known.tenant });
    this.changed();
  }

  /** List the busy agents whose turn began before the snapshot: its end may have been missed. */
  possiblyIdleAgents() {
    return [...this.agents].filter(([key, row]) => row.busy && !this.begun.has(key)).map(([key]) => key);
  }

  /** Add turns that ended before the page was opened, the oldest first. */
  addEarlierTurns(turns) {
    const first = this.turns[0]?.at_s ?? Infinity;
    this.turns = [...turns.filter((turn) => turn.at_s < first), ...this.turns];
    this.changed();
  }

  patch(data, change) {
    const key = keyOf(data);
    const known = this.agents.get(key) ?? newAgent(data);
    this.agents.set(key, { ...known, ...change });
    this.stale.add(key);
  }
}

function newAgent({ id, tenant }) {
  const row = {
    id, owner: null, state: "owned", epoch: 0, tokens: null, blocks: 0, bytes: null, tiers: [],
    replicas: [], copies: [], pinned: false, busy: false, last_match: null, used_s: null,
  };
  return tenant === undefined ? row : { ...row, tenant };
}

function placed(store, data) {
  store.patch(data, { owner: data.node, epoch: data.epoch ?? 0, used_s: data.at_s });
}

const HANDLERS = {
  "agent.created": placed,
  "agent.found": placed,
  "agent.resumed": placed,
  "agent.forked": placed,
  "agent.moved": (store, data) => {
    store.patch(data, { owner: data.to, epoch: data.epoch });
  },
  "agent.erased": (store, data) => store.agents.delete(keyOf(data)),
  "agent.evicted": (store, data) => {
    const known = store.agents.get(keyOf(data));
    if (!known) return;
    const replicas = (known.replicas ?? []).filter((name) => name !== data.node);
    const copies = (known.copies ?? []).filter((copy) => copy.node !== data.node);
    const owner = !data.replica && known.owner === data.node ? null : known.owner;
    if (!owner && !replicas.length) store.agents.delete(keyOf(data));
    else store.agents.set(keyOf(data), { ...known, owner, replicas, copies });
  },
  "turn.began": (store, data) => {
    store.begun.set(keyOf(data), data);
    const last_match = data.match === undefined ? undefined : {
      kind: data.match, reason: data.reason,
      cached_tokens: data.cached_tokens, prompt_tokens: data.prompt_tokens,
    };
    store.patch(data, {
      busy: true, owner: data.node, epoch: data.epoch, used_s: data.at_s,
      ...(last_match && { last_match }),
    });
  },
  "turn.ended": (store, data) => {
    const began = store.begun.get(keyOf(data));
    store.begun.delete(keyOf(data));
    store.turns.push({ ...began, ...data });
    if (store.turns.length > TURNS_MAX) store.turns.splice(0, store.turns.length - TURNS_MAX);
    const tokens = began && began.prompt_tokens + data.completion_tokens;
    store.patch(data, { busy: false, used_s: data.at_s, ...(tokens && { tokens }) });
  },
  "move.state": (store, data) => {
    store.moves.set(data.move, data);
    if (data.state === "committed" || data.state === "failed") {
      setTimeout(() => {
        store.moves.delete(data.move);
        store.changed();
      }, MOVE_SHOWN_MS);
    }
  },
  "node.state": (store, data) => {
    const known = store.nodes.get(data.node) ?? { name: data.node };
    store.nodes.set(data.node, { ...known, state: data.state });
  },
  "node.memory": (store, data) => {
    const known = store.nodes.get(data.node);
    if (known) store.nodes.set(data.node, { ...known, memory: { ...known.memory, ...data } });
  },
  "drain.state": (store, data) => {
    const known = store.nodes.get(data.node);
    if (known) store.nodes.set(data.node, { ...known, drain: { ...known.drain, ...data } });
  },
  "link.rate": (store, data) => {
    store.rates.set(`${data.node}<${data.peer}`, data);
  },
};
