// Map: Macs, the links between them with kind and rate, and moves in progress.
import { html, useLayoutEffect, useRef, useState } from "../vendor/htm-preact.js";
import { migrate } from "../actions.js";
import { bytes, plural, rate } from "../format.js";
import { keyOf } from "../store.js";
import { LINKS, nodeState, stateLevel } from "../words.js";
import { dropTarget } from "./parts.js";

const NODE_WIDTH = 144;
const NODE_HEIGHT = 58;
const NARROW = 620;
const MOVES_NAMED_MAX = 3; // between two Macs at once; the others are dots
const LABELS_MAX = 6; // with more links, only those of one Mac are labelled

function useWidth() {
  const box = useRef(null);
  const [width, setWidth] = useState(0);
  useLayoutEffect(() => {
    setWidth(box.current?.clientWidth ?? 0); // before the first paint: nothing below it jumps
    const watch = new ResizeObserver(([entry]) => setWidth(Math.round(entry.contentRect.width)));
    watch.observe(box.current);
    return () => watch.disconnect();
  }, []);
  return [box, width];
}

/** Return the centre of each Mac and the height: an ellipse, or two columns if narrow. */
export function layout(count, width, scale) {
  const nodeWidth = NODE_WIDTH * scale;
  const nodeHeight = NODE_HEIGHT * scale;
  if (width < NARROW * scale) {
    const gap = nodeHeight + 46 * scale;
    const at = (i) => ({
      x: count === 1 ? width / 2 : (i % 2 ? width - nodeWidth / 2 - 4 : nodeWidth / 2 + 4),
      y: nodeHeight / 2 + 8 + Math.floor(i / 2) * gap + (i % 2 ? 26 * scale : 0),
    });
    const last = at(count - 1);
    return { at, height: Math.max(last.y, at(Math.max(0, count - 2)).y) + nodeHeight / 2 + 8 };
  }
  if (count <= 2) {
    const at = (i) => ({ x: count === 1 ? width / 2 : width * (i ? 0.72 : 0.28), y: 60 * scale });
    return { at, height: 120 * scale };
  }
  const height = Math.min(560, 200 + 45 * count) * scale;
  const rx = Math.min(width / 2 - nodeWidth / 2 - 8, height * 1.25);
  const ry = height / 2 - nodeHeight / 2 - 8;
  const angleOf = (i) => (2 * Math.PI * i) / count - Math.PI / 2 - (count === 4 ? Math.PI / 4 : 0);
  const ys = Array.from({ length: count }, (_, i) => ry * Math.sin(angleOf(i)));
  const top = Math.min(...ys) - nodeHeight / 2 - 8;
  const at = (i) => ({ x: width / 2 + rx * Math.cos(angleOf(i)), y: ys[i] - top });
  return { at, height: Math.max(...ys) + nodeHeight / 2 + 8 - top };
}

/** Return the fastest measured link of each pair of Macs: {a, b, kind, bytes_per_s, rtt_s}. */
export function linksOf(rates, names) {
  const pairs = new Map();
  for (const link of rates.values()) {
    if (!names.has(link.node) || !names.has(link.peer)) continue;
    const [a, b] = [link.node, link.peer].sort();
    const pair = pairs.get(`${a}|${b}`) ?? { a, b, kind: link.kind, bytes_per_s: 0, rtt_s: null };
    if (link.bytes_per_s > pair.bytes_per_s) {
      Object.assign(pair, { kind: link.kind, bytes_per_s: link.bytes_per_s, rtt_s: link.rtt_s });
    }
    pairs.set(`${a}|${b}`, pair);
  }
  return [...pairs.values()];
}

/** Drawing of the Macs; the cards below have the same as text. */
export function FleetMap({ store, nodes }) {
  const [box, width] = useWidth();
  const [chosen, setChosen] = useState(null);
  const scale = parseFloat(getComputedStyle(document.documentElement).fontSize) / 15;
  const { at, height } = layout(nodes.length, width, scale);
  const places = new Map(nodes.map((node, i) => [node.name, at(i)]));
  const links = linksOf(store.rates, places);
  const isFew = links.length <= LABELS_MAX && width >= NARROW * scale;
  const moves = [...store.moves.values()].filter((m) => places.has(m.from) && places.has(m.to));
  const isShown = (link) => isFew || [link.a, link.b].includes(chosen);
  return html`<section class="map" aria-labelledby="map-title">
    <h2 id="map-title">Map</h2>
    <div ref=${box}>
      ${width > 0 && html`<svg width=${width} height=${height} viewBox=${`0 0 ${width} ${height}`}
          role="group" aria-label=${`${plural(nodes.length, "Mac")} and ${plural(links.length, "link")}`}>
        ${links.map((link) => html`<${Line} key=${link.a + link.b} link=${link}
          from=${places.get(link.a)} to=${places.get(link.b)} isChosen=${isShown(link)} />`)}
        ${moves.map((move, i) => html`<${Moving} key=${move.move} move=${move}
          row=${moves.slice(0, i).filter((m) => m.from === move.from && m.to === move.to).length}
          from=${places.get(move.from)} to=${places.get(move.to)}
          agent=${store.agents.get(keyOf(move))} scale=${scale} />`)}
        ${nodes.map((node) => html`<${Mac} key=${node.name} store=${store} node=${node}
          at=${places.get(node.name)} scale=${scale} onChoose=${setChosen} />`)}
        ${links.filter(isShown).map((link) => html`<${Label} key=${link.a + link.b}
          link=${link} from=${places.get(link.a)} to=${places.get(link.b)} />`)}
      </svg>`}
    </div>
    ${links.length > 0 && !isFew && html`<${Kinds} links=${links} />`}
    ${links.length > 0 && html`<${LinkTable} links=${links} />`}
  </section>`;
}

function Line({ link, from, to, isChosen }) {
  return html`<line x1=${from.x} y1=${from.y} x2=${to.x} y2=${to.y}
    class=${`link ${link.kind} ${isChosen ? "chosen" : ""}`} />`;
}

function Label({ link, from, to }) {
  const x = (from.x + to.x) / 2;
  const y = (from.y + to.y) / 2;
  const words = [LINKS[link.kind] ?? link.kind, rate(link.bytes_per_s)];
  const width = 0.6 * Math.max(...words.map((text) => text.length));
  return html`<g class="link-label" transform=${`translate(${x} ${y})`}>
    <rect x=${`${-width / 2}em`} y="-1.3em" width=${`${width}em`} height="2.6em" />
    <text text-anchor="middle" dy="-0.25em">${words[0]}</text>
    <text text-anchor="middle" dy="0.95em">${words[1]}</text>
  </g>`;
}

function Mac({ store, node, at, scale, onChoose }) {
  const width = NODE_WIDTH * scale;
  const height = NODE_HEIGHT * scale;
  const limit = node.memory?.hot_limit_bytes || 0;
  const part = limit ? Math.min(1, (node.bytes?.hot ?? 0) / limit) : 0;
  const inner = width - 20 * scale;
  const agents = plural(store.agentsOn(node), "agent");
  const turns = node.active == null ? "" : `${node.active} active, ${node.waiting} waiting`;
  return html`<g class=${`mac ${stateLevel(nodeState(node))}`} tabindex="0" role="img"
      aria-label=${`${node.name}: ${nodeState(node)}, ${agents}, ${turns}`}
      transform=${`translate(${at.x - width / 2} ${at.y - height / 2})`}
      onMouseEnter=${() => onChoose(node.name)} onMouseLeave=${() => onChoose(null)}
      onFocus=${() => onChoose(node.name)} onBlur=${() => onChoose(null)}
      ...${dropTarget(store, node, migrate)}>
    <rect class="mac-box" width=${width} height=${height} rx=${8 * scale} />
    <circle class="mac-dot" cx=${14 * scale} cy=${16 * scale} r=${4 * scale} />
    <text class="mac-name" x=${24 * scale} y=${20 * scale}>${short(node.name, 14)}</text>
    <text class="mac-words" x=${10 * scale} y=${36 * scale}>
      ${agents}${turns && ` · ${plural(node.active + node.waiting, "turn")}`}</text>
    <rect class="mac-bar" x=${10 * scale} y=${44 * scale} width=${inner} height=${5 * scale} rx="2" />
    <rect class="mac-used" x=${10 * scale} y=${44 * scale} width=${inner * part} height=${5 * scale}
      rx="2" />
  </g>`;
}

function short(text, most) {
  return text.length > most ? `${text.slice(0, most - 1)}…` : text;
}

/** Move in progress; `row` is its number among those between the same two Macs. */
function Moving({ move, row, from, to, agent, scale }) {
  const size = move.bytes_total || agent?.bytes?.hot || agent?.bytes?.disk || 0;
  const isOver = move.state === "committed" || move.state === "sealed";
  const part = isOver ? 1 : Math.min(0.9, size ? move.bytes_sent / size : 0.4);
  // It stops at the border of the Mac's box.
  const along = 0.2 + 0.6 * part;
  const x = from.x + (to.x - from.x) * along;
  const y = from.y + (to.y - from.y) * along;
  // The text begins at the dot and leads away from the Mac that is near.
  const isLeft = x < (from.x + to.x) / 2;
  const anchor = Math.abs(to.x - from.x) < 1 ? "middle" : isLeft ? "start" : "end";
  const words = move.state === "failed" ? `${move.id} was not moved`
    : `${move.id}: ${bytes(move.bytes_sent)}${size ? ` of ${bytes(size)}` : ""}`;
  return html`<g class=${`move ${move.state}`} role="img" aria-label=${`move of ${words}`}>
    <line x1=${from.x} y1=${from.y} x2=${to.x} y2=${to.y} class="move-line" />
    <g class="move-dot" style=${{ transform: `translate(${x}px, ${y}px)` }}>
      <circle r=${7 * scale} />
      ${row < MOVES_NAMED_MAX && html`<text text-anchor=${anchor} dy=${`${-1 - 1.2 * row}em`}>
        ${short(words, 32)}</text>`}
    </g>
  </g>`;
}

function Kinds({ links }) {
  const kinds = [...new Set(links.map((link) => link.kind))].sort();
  return html`<ul class="legend kinds" aria-label="Kinds of links">${kinds.map((kind) => html`
    <li key=${kind}><svg width="28" height="8" aria-hidden="true">
      <line x1="0" y1="4" x2="28" y2="4" class=${`link chosen ${kind}`} /></svg>
      ${LINKS[kind] ?? kind}</li>`)}
    <li class="muted">Point at a Mac, or focus it, to see the rates of its links.</li></ul>`;
}

function LinkTable({ links }) {
  return html`<details class="links">
    <summary>${plural(links.length, "link")}</summary>
    <div class="scroll" tabindex="0" role="region" aria-label="Links"><table>
      <thead><tr><th scope="col">Between</th><th scope="col">By</th>
        <th scope="col">Rate</th><th scope="col">Round trip</th></tr></thead>
      <tbody>${links.map((link) => html`<tr key=${link.a + link.b}>
        <td>${link.a} and ${link.b}</td><td>${LINKS[link.kind] ?? link.kind}</td>
        <td>${rate(link.bytes_per_s)}</td>
        <td>${link.rtt_s == null ? "–" : `${(1000 * link.rtt_s).toFixed(1)} ms`}</td>
      </tr>`)}</tbody>
    </table></div>
  </details>`;
}
