// First conversation on the page: each answer names its node and the reused tokens.
import { html, useState } from "../vendor/htm-preact.js";
import { ApiError, path, post } from "../api.js";
import { count, seconds } from "../format.js";

const ANSWER_TOKENS = 128;
const FIRST = "The vault code of Mira is otter lantern quartz. The vault code of Mira is";
const AGENT = `try-${crypto.getRandomValues(new Uint32Array(1))[0].toString(16)}`;

/** Chat with an agent of this page. */
export function Try() {
  const [text, setText] = useState(FIRST);
  const [turns, setTurns] = useState([]);
  const [error, setError] = useState(null);
  const [isAsking, setAsking] = useState(false);
  const ask = async (event) => {
    event.preventDefault();
    setAsking(true);
    setError(null);
    const beganMs = performance.now();
    try {
      const answer = await post(path`/v1/agents/${AGENT}/generate`, {
        messages: [{ role: "user", content: text }], max_tokens: ANSWER_TOKENS,
      });
      setTurns([...turns, { text, answer, seconds: (performance.now() - beganMs) / 1000 }]);
      setText("");
    } catch (caught) {
      if (!(caught instanceof ApiError)) throw caught;
      setError(caught);
    } finally {
      setAsking(false);
    }
  };
  return html`<section aria-labelledby="try">
    <h3 id="try">Try it</h3>
    <ol class="try" aria-live="polite">${turns.map((turn, at) => html`<li key=${at}>
      <p>${turn.text}</p><p><strong>${turn.answer.text || "(no text)"}</strong></p>
      <p class="muted">${turn.answer.node}: ${count(turn.answer.cached_tokens)} of${" "}
        ${count(turn.answer.prompt_tokens)} tokens reused, ${seconds(turn.seconds)}</p></li>`)}</ol>
    <form onSubmit=${ask}>
      <label class="field"><span>Message</span>
        <textarea rows="2" required value=${text}
          onInput=${(event) => setText(event.target.value)}></textarea></label>
      <div class="row"><button disabled=${isAsking || !text.trim()}>${
        isAsking ? "Answering …" : "Send"}</button>
        <span class="muted">Its agent is <a href=${`#/agents/${encodeURIComponent(AGENT)}`}>
          <code>${AGENT}</code></a>; the second answer reuses the first.</span></div>
    </form>
    ${error && html`<p class="warning" role="alert">${error.words}</p>`}
  </section>`;
}
