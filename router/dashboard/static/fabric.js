// The page's connection to the router: the live stream, and polls of what no event reports.
import { get, path, tenantQuery } from "./api.js";
import { Store } from "./store.js";
import { LiveStream } from "./stream.js";

const OPERATOR_POLL_MS = 3000;
const TENANT_POLL_MS = 10000; // the router asks every node for it
const EARLIER_TURNS = 1000;
const READS_PER_POLL = 5;
const READ_PAUSE_MS = 4; // per agent of the fabric: for each read, nodes list all their agents

/** The fabric as this page follows it. */
export class Fabric {
  constructor() {
    this.store = new Store();
    this.readAgainMs = 0;
    document.addEventListener("visibilitychange", () => this.poll());
  }

  /** Begin to follow, with the present keys. */
  open() {
    this.close();
    this.store.reset();
    let isFirst = true;
    this.stream = new LiveStream("/v1/events", {
      onFrame: (frame) => {
        this.store.take(frame);
        if (frame.name === "snapshot" && isFirst) {
          isFirst = false;
          this.poll();
          this.readEarlierTurns();
        }
      },
      onState: (state, error) => this.store.setStream(state, error),
    });
  }

  /** Stop following. */
  close() {
    this.stream?.close();
    clearTimeout(this.timer);
  }

  /** Read the nodes' queues and sizes now, and again after a while if the page is visible. */
  async poll() {
    clearTimeout(this.timer);
    if (document.hidden || !this.store.hasSnapshot) return;
    await this.readRouter();
    try {
      const { data } = await get("/v1/nodes");
      this.store.takeNodes(data);
      this.store.sample(Date.now() / 1000);
      await this.readAgents(this.store.possiblyIdleAgents().slice(0, READS_PER_POLL));
    } catch {
      // The stream shows that the router is away.
    }
    clearTimeout(this.timer);
    const wait = this.store.isOperator ? OPERATOR_POLL_MS : TENANT_POLL_MS;
    this.timer = setTimeout(() => this.poll(), wait);
  }

  /** Read the role of this page's router; reopen the stream if another router became active. */
  async readRouter() {
    try {
      const router = await get("/v1/router");
      const known = this.store.router;
      this.store.takeRouter(router);
      // A router that has lost its term still streams, but other routers run the turns.
      if (known && known.active_url !== router.active_url) this.stream.restart();
    } catch {
      // The stream shows that the router is away.
    }
  }

  /** Read size and tiers of the first of these agents that is outdated. */
  async refreshAgent(keys) {
    if (document.hidden || !this.store.hasSnapshot) return;
    await this.readAgents(keys.filter((key) => this.store.stale.has(key)).slice(0, 1));
  }

  /** Read these agents, unless the last one was read a moment ago. */
  async readAgents(keys) {
    const { store } = this;
    for (const key of keys) {
      if (performance.now() < this.readAgainMs) return;
      this.readAgainMs = performance.now() + READ_PAUSE_MS * store.agents.size;
      const agent = store.agents.get(key);
      store.stale.delete(key); // even if the read fails: the next turn marks it again
      if (!agent) continue;
      try {
        store.takeAgent(key, await get(path`/v1/agents/${agent.id}` + tenantQuery(agent)));
      } catch {
        return; // it was erased meanwhile, or the router is away
      }
    }
  }

  /** Read the turns that ended before the page was opened, for the charts. */
  async readEarlierTurns() {
    if (!this.store.isOperator) return;
    try {
      const { data } = await get(`/v1/placement/decisions?limit=${EARLIER_TURNS}`);
      const ended = data.filter((row) => row.ended_s != null).reverse();
      this.store.addEarlierTurns(ended.map((row) => ({
        ...row, node: row.served_by, at_s: row.at_s + row.ended_s, seconds: row.ended_s,
        times: row.times ?? { first_token_s: row.first_token_s },
      })));
    } catch {
      // The charts begin with the next turn.
    }
  }
}
