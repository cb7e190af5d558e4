// Actions on agents and Macs: confirm, send the request, report the result.
import { ApiError, path, post, remove } from "./api.js";
import { confirm, report } from "./dialogs.js";
import { bytes, count, plural, seconds } from "./format.js";
import { nodeState } from "./words.js";

const ID_PATTERN = "[A-Za-z0-9][A-Za-z0-9._:@\\-]*";

async function perform(work, words) {
  try {
    report("good", words(await work()));
    return true;
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    report("bad", error.words);
    return false;
  }
}

function targets(store, agent) {
  const nodes = [...store.nodes.values()];
  return nodes.filter((node) => node.name !== agent.owner && nodeState(node) === "ready");
}

/** Move an agent to a Mac: to `to`, if one was chosen by dragging. */
export async function migrate(store, agent, to = null) {
  if (to === agent.owner) return report("bad", `${agent.id} is on ${to} already.`);
  const open = targets(store, agent);
  if (!open.length) return report("bad", "No other Mac is ready to take an agent. Wait until one is, or undrain one.");
  const options = open.map((node) => ({ value: node.name, text: node.name }));
  const value = to && open.some((node) => node.name === to) ? to : options[0].value;
  const chosen = await confirm({
    title: `Move ${agent.id}`,
    text: "Its memory is copied to that Mac, even in the middle of an answer, which continues there. " +
      "You can move it back.",
    fields: [{ name: "to", label: "To", options, value }],
    verb: "Move",
  });
  if (!chosen) return null;
  return perform(
    () => post(path`/v1/agents/${agent.id}/migrate`, { to: chosen.to }),
    (done) => `${agent.id} moved to ${done.to} in ${seconds(done.seconds)} and paused for ` +
      `${seconds(done.pause_seconds)}; ${bytes(done.bytes_sent)} were sent.`,
  );
}

/** Pin an agent, or unpin it. */
export function pin(agent) {
  const pinned = !agent.pinned;
  return perform(
    () => post(path`/v1/agents/${agent.id}/pin`, { pinned }),
    (done) => {
      if (!pinned) return `${agent.id} is no longer pinned.`;
      return done.pin_held ? `${agent.id} is pinned: it is the last to be evicted.`
        : `${agent.id} is pinned, but its tenant's pins exceed their share of the disk: the pin has no effect yet.`;
    },
  );
}

/** Make a new agent with this one's context. */
export async function fork(store, agent) {
  const nodes = [...store.nodes.values()].filter((node) => nodeState(node) === "ready");
  const options = [
    { value: "", text: "where the router places it" },
    ...nodes.map((node) => ({ value: node.name, text: node.name })),
  ];
  const chosen = await confirm({
    title: `Fork ${agent.id}`,
    text: "A new agent begins with everything this one remembers. Nothing is computed again, and " +
      "this agent stays as it is.",
    fields: [
      { name: "as", label: "Id of the new agent", value: `${agent.id}-2`, pattern: ID_PATTERN },
      { name: "to", label: "On", options, value: "", isOptional: true },
    ],
    verb: "Fork",
  });
  if (!chosen) return null;
  const body = { as: chosen.as, operation: crypto.getRandomValues(new Uint32Array(4)).join("-") };
  if (chosen.to) body.to = chosen.to;
  return perform(
    () => post(path`/v1/agents/${agent.id}/fork`, body),
    (done) => `${done.id} was forked from ${agent.id} on ${done.node}, with ` +
      `${count(done.tokens)} tokens.`,
  );
}

/** Drop an agent's cache from memory; its copy on disk stays. */
export async function evict(agent) {
  const chosen = await confirm({
    title: `Evict ${agent.id} from memory`,
    text: "Its memory stays on disk, and its next turn loads it from there. Nothing is lost.",
    verb: "Evict",
  });
  if (!chosen) return null;
  return perform(
    () => post(path`/v1/agents/${agent.id}/evict`, { from: "memory" }),
    () => `${agent.id} left the memory of ${agent.owner}.`,
  );
}

/** Erase an agent everywhere. */
export async function erase(agent) {
  const chosen = await confirm({
    title: `Erase ${agent.id}`,
    text: "Everything it remembers is removed from every Mac, including what other agents borrowed from it.",
    warning: "No copy remains on any Mac. Only a file that macfabric hibernate saved earlier can bring " +
      "it back.",
    typed: agent.id,
    verb: "Erase permanently",
  });
  if (!chosen) return null;
  return perform(
    () => remove(path`/v1/agents/${agent.id}`),
    (done) => {
      const removed = `${plural(done.blocks_removed, "block")} (${bytes(done.bytes_removed)})`;
      const runs = done.quoting_runs.length
        ? ` ${plural(done.quoting_runs.length, "scenario run")} still quote it.` : "";
      return done.deleted ? `${agent.id} was erased: ${removed}.${runs}`
        : `${agent.id} is being erased: ${removed} so far. Not reached yet: ` +
          `${done.unreachable.join(", ")}.${runs}`;
    },
  );
}

/** Move all agents off a Mac, so that it can be switched off. */
export async function drain(node) {
  const chosen = await confirm({
    title: `Drain ${node.name}`,
    text: `All its agents move to other Macs, and it gets no new ones until you choose Undrain. ` +
      `Wait for the state "drained" before you close or switch it off.`,
    verb: "Drain",
  });
  if (!chosen) return null;
  return perform(
    () => post(path`/v1/nodes/${node.name}/drain`),
    (done) => done.state === "drained" ? `${node.name} is drained.`
      : `${node.name} is draining: ${plural(done.agents_left, "agent")} left.`,
  );
}

/** Let a Mac take agents again. */
export function undrain(node) {
  return perform(
    () => post(path`/v1/nodes/${node.name}/undrain`),
    () => `${node.name} takes agents again.`,
  );
}
