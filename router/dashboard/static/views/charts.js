// Charts over time: first token, reuse, queues and tokens per second.
import uPlot from "../vendor/uplot.js";
import { html, useEffect, useLayoutEffect, useRef, useState } from "../vendor/htm-preact.js";
import { seconds } from "../format.js";
import { series } from "../series.js";
import { color } from "../theme.js";
import { Empty } from "./parts.js";
import { Savings } from "./savings.js";

const SPANS = [
  { title: "5 min", stepS: 5, count: 60 },
  { title: "1 hour", stepS: 60, count: 60 },
  { title: "6 hours", stepS: 300, count: 72 },
];
const percent = (value) => (value == null ? "–" : `${Math.round(value)} %`);
const plain = (value) => (value == null ? "–" : `${Math.round(value * 10) / 10}`);
const CHARTS = [
  { title: "Seconds to the first token", form: seconds,
    lines: [["median", "firstTokenMedian", "line-1"], ["95 %", "firstTokenP95", "line-2"]] },
  { title: "Share of prompts from memory", form: percent, max: 100,
    lines: [["reused", "hitShare", "line-1"]] },
  { title: "Turns, maximum at once", form: plain, least: 4,
    lines: [["active", "active", "line-1"], ["waiting", "waiting", "line-2"]] },
  { title: "Tokens decoded per second", form: plain, least: 1,
    lines: [["tokens/s", "tokensPerS", "line-1"]] },
];

/** The view. */
export function View({ store }) {
  const [span, setSpan] = useState(SPANS[0]);
  const [nowS, setNowS] = useState(() => Date.now() / 1000);
  useEffect(() => {
    const timer = setInterval(() => setNowS(Date.now() / 1000), 1000);
    return () => clearInterval(timer);
  }, []);
  const data = series(store.turns, store.samples, nowS, span.stepS, span.count);
  return html`<h1>Charts</h1>
    <div class="row" role="group" aria-label="Time shown">
      ${SPANS.map((each) => html`<button key=${each.title} aria-pressed=${each === span}
        onClick=${() => setSpan(each)}>${each.title}</button>`)}
    </div>
    ${store.turns.length === 0 && html`<${Empty} title="No turn yet">
      <p>Charts begin with the first turn${store.isOperator ? "" : " after this page was opened"}.</p>
    </${Empty}>`}
    <div class="charts">${CHARTS.map((chart) => html`<${Chart} key=${chart.title} ...${chart}
      data=${data} />`)}</div>
    <${Savings} store=${store} />`;
}

function Chart({ title, form, lines, max, least = 0.001, data }) {
  const place = useRef(null);
  const plot = useRef(null);
  const [theme, setTheme] = useState(0);
  const rows = [data.times, ...lines.map(([, name]) => data[name])];
  useEffect(() => {
    const again = () => setTheme((count) => count + 1);
    const dark = matchMedia("(prefers-color-scheme: dark)");
    window.addEventListener("themechange", again);
    dark.addEventListener("change", again);
    return () => {
      window.removeEventListener("themechange", again);
      dark.removeEventListener("change", again);
    };
  }, []);
  useLayoutEffect(() => {
    plot.current = new uPlot(optionsOf({ form, lines, max, least }, place.current), rows, place.current);
    const watch = new ResizeObserver(([entry]) => {
      plot.current?.setSize(sizeOf(entry.contentRect.width));
    });
    watch.observe(place.current);
    return () => {
      watch.disconnect();
      plot.current.destroy();
      plot.current = null;
    };
  }, [theme]);
  useLayoutEffect(() => plot.current?.setData(rows), [data]);
  const latest = lines.map(([word, name]) => {
    const value = data[name].findLast((each) => each != null);
    return `${word} ${value == null ? "–" : form(value)}`;
  }).join(", ");
  return html`<figure class="chart">
    <figcaption><h2>${title}</h2><span>${lines.map(([word, , hue]) => html`
      <span key=${word}><span class=${`swatch ${hue}`}></span>${word} </span>`)}</span></figcaption>
    <div ref=${place} role="img" aria-label=${`${title}: ${latest}`}></div>
  </figure>`;
}

function clock(atS, stepS) {
  return new Date(atS * 1000).toTimeString().slice(0, stepS < 60 ? 8 : 5);
}

function sizeOf(width) {
  const scale = parseFloat(getComputedStyle(document.documentElement).fontSize);
  return { width: Math.max(100, Math.floor(width)), height: Math.round(15 * scale) };
}

function optionsOf({ form, lines, max, least }, place) {
  const rem = parseFloat(getComputedStyle(document.documentElement).fontSize);
  const axis = {
    stroke: color("muted"), font: `${0.8 * rem}px system-ui`,
    grid: { stroke: color("line"), width: 1 }, ticks: { stroke: color("line"), width: 1 },
  };
  return {
    ...sizeOf(place.clientWidth),
    legend: { show: false },
    cursor: { drag: { x: false, y: false } },
    scales: { y: { range: (_, low, high) => [0, max ?? Math.max((high ?? 0) * 1.1, least)] } },
    axes: [
      { ...axis, values: (_, times) => times.map((at) => clock(at, times[1] - times[0])),
        space: 4.4 * rem, size: 2 * rem },
      { ...axis, size: 4.6 * rem, values: (_, values) => values.map(form) },
    ],
    series: [
      {},
      ...lines.map(([word, , hue]) => ({
        label: word, stroke: color(hue), width: 2, spanGaps: true,
        points: { show: true, size: 4, fill: color(hue) },
      })),
    ],
  };
}
