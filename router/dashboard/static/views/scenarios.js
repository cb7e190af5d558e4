// Scenario runs, and the transcript of one as it happens.
import { html, useEffect, useState } from "../vendor/htm-preact.js";
import { ApiError, get, path, post, remove } from "../api.js";
import { confirm, report } from "../dialogs.js";
import { date, plural, share } from "../format.js";
import { LiveStream } from "../stream.js";
import { Empty } from "./parts.js";

const POLL_MS = 4000;

/** Let the user choose a shipped scenario, start it, and open its run. */
async function start(shipped) {
  const chosen = await confirm({
    title: "Start a scenario",
    text: "Its agents talk to each other with the texts of the scenario. The run continues in the " +
      "router when this page is closed, and can be cancelled.",
    fields: [{ name: "scenario", label: "Scenario", value: shipped[0].name,
      options: shipped.map(({ name, title }) => ({ value: name, text: title || name })) }],
    verb: "Start",
  });
  if (!chosen) return;
  try {
    const run = await post("/v1/scenarios", { scenario: chosen.scenario });
    report("good", `${run.id} has started.`);
    location.hash = `#/scenarios/${encodeURIComponent(run.id)}`;
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    report("bad", error.words);
  }
}

/** The view; `rest` may name a run. */
export function View({ rest }) {
  const [runs, setRuns] = useState(null);
  const [shipped, setShipped] = useState([]);
  const [error, setError] = useState(null);
  const read = async () => {
    try {
      const answer = await get("/v1/scenarios");
      setRuns(answer.data);
      setShipped(answer.shipped ?? []);
      setError(null);
    } catch (caught) {
      if (caught instanceof ApiError) setError(caught);
    }
  };
  useEffect(() => {
    read();
    const timer = setInterval(() => document.hidden || read(), POLL_MS);
    return () => clearInterval(timer);
  }, []);
  const run = runs?.find((each) => each.id === rest[0]);
  return html`<div class="row spread"><h1>Scenarios</h1>
      ${shipped.length > 0 && html`<button onClick=${() => start(shipped).then(read)}>
        Start a scenario …</button>`}</div>
    ${error && html`<p class="warning" role="alert">${error.words}</p>`}
    ${!runs && !error && html`<p class="muted">Reading …</p>`}
    ${runs && !runs.length && html`<${Empty} title="No run yet">
      <p>Start one here, or your own with <code>macfabric scenario run FILE</code>.</p></${Empty}>`}
    ${runs?.length > 0 && html`<ul class="runs">${runs.map((each) => html`
      <li key=${each.id}><a href=${`#/scenarios/${encodeURIComponent(each.id)}`}
        aria-current=${each === run ? "true" : null}>
        <strong>${each.title || each.scenario}</strong> <span class="muted">${each.id}</span>
        <span class=${`badge ${levelOf(each)}`}>${each.state}${
          each.holds === false ? ", not as expected" : ""}</span>
        <span>${each.turns.done} of ${plural(each.turns.total, "turn")}</span></a></li>`)}</ul>`}
    ${run && html`<${Run} key=${run.id} run=${run} onGone=${read} />`}`;
}

function levelOf(run) {
  if (run.state === "running") return "busy";
  return run.state === "ended" && run.holds !== false ? "good" : "bad";
}

function Run({ run, onGone }) {
  const [lines, setLines] = useState([]);
  const [state, setState] = useState("connecting");
  useEffect(() => {
    let all = [];
    let timer = null;
    const stream = new LiveStream(path`/v1/scenarios/${run.id}` + "?stream=true", {
      onFrame: ({ name, data }) => {
        if (name === "run.began") all = [];
        const line = lineOf(name, data);
        if (line) all.push({ ...line, key: all.length });
        timer ??= setTimeout(() => {
          timer = null;
          setLines([...all]);
        }, 100);
      },
      onState: setState,
      until: ({ name }) => name === "run.ended",
    });
    return () => {
      stream.close();
      clearTimeout(timer);
    };
  }, [run.id]);
  const isRunning = run.state === "running";
  const end = async () => {
    const chosen = await confirm({
      title: isRunning ? `Cancel ${run.id}` : `Delete ${run.id}`,
      text: isRunning ? "Its turns stop. The transcript so far is kept, and the run can be resumed."
        : "Its agents keep what they remember; erase them by their ids.",
      warning: isRunning ? undefined : "Its transcript and journals are removed.",
      verb: isRunning ? "Cancel the run" : "Delete",
    });
    if (!chosen) return;
    try {
      await remove(path`/v1/scenarios/${run.id}`);
      report("good", isRunning ? `${run.id} was cancelled.` : `${run.id} was deleted.`);
      onGone();
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      report("bad", error.words);
    }
  };
  return html`<section class="transcript" aria-labelledby="run-title">
    <div class="row spread"><h2 id="run-title">${run.title || run.scenario}</h2>
      <button class=${isRunning ? "" : "danger"} onClick=${end}>
        ${isRunning ? "Cancel the run …" : "Delete …"}</button></div>
    <p class="muted">${run.model}, began ${date(run.created_s)}${
      isRunning ? ` · ${state}` : ""}</p>
    ${run.error && html`<p class="warning" role="alert">${run.error.message}</p>`}
    <ol class="lines" aria-live="off">${lines.map((line) => html`
      <li key=${line.key} class=${line.kind}>${line.who && html`<strong>${line.who}</strong>`}
        <span>${line.text}</span>${line.note && html` <small>${line.note}</small>`}</li>`)}</ol>
  </section>`;
}

/** Return an event of a run as a line of its transcript, or null. */
export function lineOf(name, data) {
  const event = data.event ?? data;
  switch (name) {
    case "arm.began": return { kind: "phase", text: `Run ${data.number}, ${data.arm}` };
    case "phase.began": return { kind: "phase", text: event.phase };
    case "turn.ended": {
      const { utterance, figures } = event;
      const reused = figures?.prompt_tokens
        ? `${share(figures.cached_tokens, figures.prompt_tokens)} reused` : "";
      return { kind: "speech", who: utterance.speaker,
        text: utterance.text, note: [figures?.node, reused].filter(Boolean).join(", ") };
    }
    case "agent.copied":
      return { kind: "note", text: event.source ? `${event.agent} was forked from ${event.source}`
        : `${event.agent} was moved` };
    case "memory.edited": return { kind: "note", text: `The memory of ${event.agent} was edited` };
    case "waited": return { kind: "note", text: `Waited: ${event.what} (${event.why})` };
    case "phase.ended":
      return event.verdicts?.length ? { kind: "note", text: event.verdicts.map((verdict) =>
        `${verdict.holds ? "Holds" : "Does not hold"}: ${verdict.found}`).join("; ") } : null;
    case "run.ended": return { kind: "phase", text: `The run ${data.state}` };
    default: return null;
  }
}
