// List of agents: filtered, sorted, in pages; a row opens the agent in a panel.
import { html, useEffect, useMemo, useRef, useState } from "../vendor/htm-preact.js";
import { migrate } from "../actions.js";
import { ago, bytes, count, plural, share } from "../format.js";
import { keyOf } from "../store.js";
import { matchWords } from "../words.js";
import { Agent } from "./agent.js";
import { Empty, StateBadge, Tiers, draggable, dropTarget } from "./parts.js";

const PAGE_ROWS = 50;
const REFRESH_MS = 1000;
const COLUMNS = [
  { name: "id", title: "Agent", value: (row) => row.id },
  { name: "owner", title: "Mac", value: (row) => row.owner ?? "" },
  { name: "tiers", title: "Tier", value: (row) => (row.tiers ?? []).join() },
  { name: "tokens", title: "Tokens", value: (row) => row.tokens ?? -1, isNumber: true },
  { name: "size", title: "Size", value: sizeOf, isNumber: true },
  { name: "reused", title: "Reused", value: reusedOf, isNumber: true },
  { name: "why", title: "Why the last match ended", value: (row) => matchWords(row.last_match) },
  { name: "used", title: "Last used", value: (row) => row.used_s ?? 0, isNumber: true },
];

function sizeOf(row) {
  return Math.max(row.bytes?.hot ?? 0, row.bytes?.disk ?? 0);
}

function reusedOf(row) {
  const match = row.last_match;
  return match?.prompt_tokens ? match.cached_tokens / match.prompt_tokens : -1;
}

/** Return the rows that match a filter, sorted. */
export function chosenRows(rows, { words, node }, { by, isDown }) {
  const needles = words.toLowerCase().split(/\s+/).filter(Boolean);
  const text = (row) => [
    row.id, row.tenant, row.owner, row.group, ...(row.tiers ?? []),
    row.pinned && "pinned", row.busy && "busy", matchWords(row.last_match),
  ].filter(Boolean).join(" ").toLowerCase();
  const left = rows.filter((row) => {
    if (node && row.owner !== node) return false;
    if (!needles.length) return true;
    const found = text(row);
    return needles.every((needle) => found.includes(needle));
  });
  const { value } = COLUMNS.find((column) => column.name === by);
  const order = (a, b) => (a < b ? -1 : a > b ? 1 : 0);
  left.sort((a, b) => order(value(a), value(b)) || order(keyOf(a), keyOf(b)));
  return isDown ? left.reverse() : left;
}

/** The view; `rest` is an agent's key, or `on` and a Mac's name. */
export function Agents({ fabric, store, rest }) {
  const node = rest[0] === "on" ? rest[1] : "";
  const opened = rest[0] && rest[0] !== "on" ? store.agents.get(rest[0]) : null;
  const [words, setWords] = useState("");
  const [sort, setSort] = useState({ by: "used", isDown: true });
  const [page, setPage] = useState(0);
  const rows = chosenRows([...store.agents.values()], { words, node }, sort);
  const last = Math.max(0, Math.ceil(rows.length / PAGE_ROWS) - 1);
  const at = Math.min(page, last);
  const shown = rows.slice(at * PAGE_ROWS, (at + 1) * PAGE_ROWS);
  const visible = useRef([]);
  visible.current = shown;
  useEffect(() => {
    const refresh = () => fabric.refreshAgent(visible.current.map(keyOf));
    refresh();
    const timer = setInterval(refresh, REFRESH_MS);
    return () => clearInterval(timer);
  }, [fabric]);
  if (!store.agents.size && !opened) {
    return html`<h1>Agents</h1><${Empty} title="No agents yet">
      <p>An agent appears with its first request. <a href="#/fleet">Fleet</a> shows how to send
        one.</p></${Empty}>`;
  }
  const sortBy = (column) => setSort((now) => ({
    by: column.name,
    isDown: now.by === column.name ? !now.isDown : Boolean(column.isNumber),
  }));
  return html`<h1 id="agents-title">Agents</h1>
  <div class=${`agents ${opened ? "has-opened" : ""}`}>
    <section class="agents-list" aria-labelledby="agents-title">
      <${Filter} store=${store} node=${node} words=${words} onWords=${(text) => {
        setWords(text);
        setPage(0);
      }} />
      <p class="muted" role="status">${plural(rows.length, "agent")}${
        rows.length < store.agents.size ? ` of ${count(store.agents.size)}` : ""}${
        store.leftOut ? `; ${count(store.leftOut)} used less recently are not listed` : ""}</p>
      <${Table} store=${store} rows=${shown} sort=${sort} onSort=${sortBy} opened=${opened} />
      ${last > 0 && html`<${Pager} at=${at} last=${last} onTurn=${setPage} />`}
    </section>
    ${opened && html`<${Agent} key=${keyOf(opened)} fabric=${fabric} store=${store}
      agent=${opened} />`}
    ${rest[0] && rest[0] !== "on" && !opened && html`<aside class="agent">
      <p>This agent no longer exists. <a href="#/agents">Close</a></p></aside>`}
  </div>`;
}

function Filter({ store, node, words, onWords }) {
  const nodes = useMemo(() => [...store.nodes.keys()].sort(), [store.nodes]);
  return html`<div class="filter">
    <label class="field"><span>Filter</span>
      <input type="search" value=${words} placeholder="id, tenant, Mac, tier, reason …"
        onInput=${(event) => onWords(event.target.value)} /></label>
    <nav aria-label="Agents by Mac"><ul class="node-strip">
      <li><a href="#/agents" aria-current=${node ? null : "true"}>All Macs</a></li>
      ${nodes.map((name) => html`<li key=${name}>
        <a href=${`#/agents/on/${name}`} aria-current=${node === name ? "true" : null}
          ...${dropTarget(store, { name }, migrate)}>${name}
          <${StateBadge} node=${store.nodes.get(name)} /></a></li>`)}
    </ul></nav>
  </div>`;
}

function Table({ store, rows, sort, onSort, opened }) {
  const direction = sort.isDown ? "descending" : "ascending";
  return html`<div class="scroll" tabindex="0" role="region" aria-label="Table of agents">
    <table class="stacks">
      <thead><tr>${COLUMNS.map((column) => html`
        <th key=${column.name} scope="col" class=${`${column.name} ${column.isNumber ? "number" : ""}`}
          aria-sort=${sort.by === column.name ? direction : null}>
          <button class="sort" onClick=${() => onSort(column)}>${column.title}
            <span aria-hidden="true">${sort.by === column.name ? (sort.isDown ? "▼" : "▲") : ""}</span>
          </button></th>`)}</tr></thead>
      <tbody>${rows.map((row) => html`<${Row} key=${keyOf(row)} store=${store} row=${row}
        isOpened=${row === opened} />`)}</tbody>
    </table>
  </div>`;
}

function Row({ store, row, isOpened }) {
  const match = row.last_match;
  const href = `#/agents/${encodeURIComponent(keyOf(row))}`;
  return html`<tr class=${isOpened ? "opened" : ""} ...${draggable(row, store.owns(row))}
      onClick=${(event) => event.target.closest("a") || (location.hash = href)}>
    <th scope="row" data-title="Agent"><a href=${href}
        aria-current=${isOpened ? "true" : null} draggable=${false}>${row.id}</a>
      ${row.tenant !== undefined && row.tenant !== store.caller?.tenant &&
        html`<span class="tenant">${row.tenant}</span>`}
      ${row.pinned && html`<span class="tag">pinned</span>`}
      ${row.busy && html`<span class="tag busy">busy</span>`}</th>
    <td data-title="Mac" class="word">${row.owner ?? html`<span class="muted">none</span>`}${
      row.replicas?.length ? html` <span class="muted">+${row.replicas.length}</span>` : ""}</td>
    <td data-title="Tier" class="word"><${Tiers} agent=${row} /></td>
    <td data-title="Tokens" class="number">${count(row.tokens)}</td>
    <td data-title="Size" class="number size">${bytes(row.bytes ? sizeOf(row) : null)}</td>
    <td data-title="Reused" class="number">${
      match ? share(match.cached_tokens, match.prompt_tokens) : "–"}</td>
    <td data-title="Why" class="why">${matchWords(match)}</td>
    <td data-title="Last used" class="number used">${ago(row.used_s)}</td>
  </tr>`;
}

function Pager({ at, last, onTurn }) {
  return html`<nav class="row" aria-label="Pages">
    <button disabled=${at === 0} onClick=${() => onTurn(at - 1)}>Previous</button>
    <span>Page ${at + 1} of ${last + 1}</span>
    <button disabled=${at === last} onClick=${() => onTurn(at + 1)}>Next</button>
  </nav>`;
}
