// Confirmation dialogs, and short reports of finished actions.
import { html, useEffect, useRef, useState } from "./vendor/htm-preact.js";

const SHOWN_MS = 8000;
let showDialog = () => {};
let showReport = () => {};

/** Ask before an action; resolve to the values of its fields, or to null if it was cancelled.
 *
 * `warning` says what cannot be undone. `typed` is a text that has to be typed first. A field is
 * {name, label, options?: [{value, text}], value?, pattern?, hint?}. */
export function confirm({ title, text, warning, typed, fields = [], verb }) {
  return new Promise((resolve) => {
    showDialog({ title, text, warning, typed, fields, verb, resolve });
  });
}

/** Show the result of an action; `level` is good or bad. */
export function report(level, text) {
  showReport({ level, text, key: `${performance.now()}` });
}

/** Container of the open dialog. */
export function Dialogs() {
  const [open, setOpen] = useState(null);
  showDialog = setOpen;
  if (!open) return null;
  const close = (values) => {
    setOpen(null);
    open.resolve(values);
  };
  return html`<${Confirmation} key=${open.title} ...${open} onClose=${close} />`;
}

function Confirmation({ title, text, warning, typed, fields, verb, onClose }) {
  const dialog = useRef(null);
  const [values, setValues] = useState(() =>
    Object.fromEntries(fields.map((field) => [field.name, field.value ?? ""])));
  const [answer, setAnswer] = useState("");
  useEffect(() => {
    dialog.current.showModal();
  }, []);
  const finish = (values) => {
    dialog.current.close(); // returns the focus to the element that had it
    onClose(values);
  };
  const isMissing = fields.some((field) => !field.isOptional && !values[field.name]);
  const isReady = (typed === undefined || answer === typed) && !isMissing;
  const set = (name) => (event) => setValues({ ...values, [name]: event.target.value });
  const submit = (event) => {
    event.preventDefault();
    if (isReady) finish(values);
  };
  return html`<dialog ref=${dialog} aria-labelledby="dialog-title"
      onCancel=${(event) => { event.preventDefault(); finish(null); }}>
    <form onSubmit=${submit}>
      <h2 id="dialog-title">${title}</h2>
      <p>${text}</p>
      ${warning && html`<p class="warning" role="note"><strong>Cannot be undone.</strong> ${warning}</p>`}
      ${fields.map((field) => html`<label class="field" key=${field.name}>
        <span>${field.label}</span>
        ${field.options
          ? html`<select value=${values[field.name]} onChange=${set(field.name)}>
              ${field.options.map((option) => html`<option value=${option.value}
                selected=${option.value === values[field.name]}>${option.text}</option>`)}
            </select>`
          : html`<input value=${values[field.name]} onInput=${set(field.name)} autocomplete="off"
              spellcheck=${false} pattern=${field.pattern} />`}
        ${field.hint && html`<small>${field.hint}</small>`}
      </label>`)}
      ${typed !== undefined && html`<label class="field">
        <span>Type <strong>${typed}</strong> to confirm</span>
        <input value=${answer} onInput=${(event) => setAnswer(event.target.value)}
          autocomplete="off" spellcheck=${false} />
      </label>`}
      <div class="row end">
        <button type="button" onClick=${() => finish(null)}>Cancel</button>
        <button type="submit" class=${warning ? "danger" : "primary"} disabled=${!isReady}>
          ${verb}</button>
      </div>
    </form>
  </dialog>`;
}

/** List of reports, also announced to screen readers. */
export function Reports() {
  const [shown, setShown] = useState([]);
  showReport = (one) => {
    setShown((now) => [...now.slice(-3), one]);
    // A fault stays until it is dismissed.
    if (one.level === "good") setTimeout(() => dismiss(one.key), SHOWN_MS);
  };
  const dismiss = (key) => setShown((now) => now.filter((each) => each.key !== key));
  return html`<div class="reports" role="status" aria-live="polite">
    ${shown.map((one) => html`<div class=${`report ${one.level}`} key=${one.key}>
      <span>${one.text}</span>
      <button class="quiet" aria-label="Dismiss" onClick=${() => dismiss(one.key)}>×</button>
    </div>`)}
  </div>`;
}
