// Sign-in form.
import { html, useEffect, useRef, useState } from "../vendor/htm-preact.js";
import { hasKey, signIn } from "../session.js";

/** Form for the keys of a tenant and an operator; one of them is enough. */
export function SignIn({ error, onDone, onCancel }) {
  const [key, setKey] = useState("");
  const [operatorKey, setOperatorKey] = useState("");
  const first = useRef(null);
  useEffect(() => first.current.focus(), []);
  const submit = (event) => {
    event.preventDefault();
    signIn(key, operatorKey);
    onDone();
  };
  return html`<section class="sign-in">
    <h1>Sign in</h1>
    ${error && hasKey() && html`<p class="warning" role="alert">${error.words}</p>`}
    ${error && !hasKey() && html`<p>This router shows its fabric only with a key.</p>
      <p class="hint small">The router says: ${error.message}</p>`}
    <form onSubmit=${submit}>
      <label class="field"><span>API key</span>
        <input ref=${first} type="password" value=${key} autocomplete="off"
          aria-describedby="key-hint" onInput=${(event) => setKey(event.target.value)} />
        <small id="key-hint">A key of <code>router.api_keys</code>: shows its tenant's agents and
          may move, pin, fork and erase them.</small>
      </label>
      <label class="field"><span>Operator key</span>
        <input type="password" value=${operatorKey} autocomplete="off"
          aria-describedby="operator-hint"
          onInput=${(event) => setOperatorKey(event.target.value)} />
        <small id="operator-hint">A key of <code>router.operator_keys</code>: shows all tenants and
          the Macs' details, and may drain Macs. On the router's own machine,${" "}
          <code>operator.key</code> in the data folder has one.</small>
      </label>
      <p class="hint">Keys stay in this tab and are forgotten when it is closed.</p>
      <div class="row">
        <button class="primary" type="submit" disabled=${!key && !operatorKey}>Sign in</button>
        ${onCancel && html`<button type="button" onClick=${onCancel}>Cancel</button>`}
      </div>
    </form>
  </section>`;
}
