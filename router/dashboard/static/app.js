// The page: header, tabs, and the view that the address names.
import { html, render, useEffect, useState } from "./vendor/htm-preact.js";
import { Dialogs, Reports } from "./dialogs.js";
import { Fabric } from "./fabric.js";
import { hasKey, signOut } from "./session.js";
import { nextTheme, theme } from "./theme.js";
import { Agents } from "./views/agents.js";
import { Fleet } from "./views/fleet.js";
import { SignIn } from "./views/sign-in.js";

// Views that are not needed for the first paint are loaded when they are opened.
const TABS = [
  { name: "fleet", title: "Fleet", view: Fleet },
  { name: "agents", title: "Agents", view: Agents },
  { name: "charts", title: "Charts", load: () => import("./views/charts.js") },
  { name: "decisions", title: "Decisions", load: () => import("./views/decisions.js"),
    isForOperators: true },
  { name: "scenarios", title: "Scenarios", load: () => import("./views/scenarios.js") },
  { name: "events", title: "Events", load: () => import("./views/events.js") },
];
const STREAM_WORDS = {
  connecting: "connecting", live: "live", reconnecting: "reconnecting", refused: "signed out",
};

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text; // an address with a stray %
  }
}

function useAddress() {
  const read = () => location.hash.replace(/^#\/?/, "").split("/").map(decoded);
  const [parts, setParts] = useState(read);
  useEffect(() => {
    const follow = () => setParts(read());
    window.addEventListener("hashchange", follow);
    return () => window.removeEventListener("hashchange", follow);
  }, []);
  return parts;
}

function useChanges(store) {
  const [, setCount] = useState(0);
  useEffect(() => store.subscribe(() => setCount((count) => count + 1)), [store]);
}

function useView(tab) {
  const [loaded, setLoaded] = useState({});
  useEffect(() => {
    if (!tab.view && !loaded[tab.name]) {
      tab.load().then((module) => setLoaded((now) => ({ ...now, [tab.name]: module.View })));
    }
  }, [tab]);
  return tab.view ?? loaded[tab.name];
}

function Header({ store, current, onSignIn, onSignOut }) {
  const [mode, setMode] = useState(theme);
  const { caller } = store;
  const who = !caller ? "" : [
    caller.tenant && `tenant ${caller.tenant}`, caller.operator && "operator",
  ].filter(Boolean).join(", ");
  return html`<header class="top">
    <a class="brand" href="#/fleet" aria-label="macfabric"><img src="/dashboard/icon.svg" alt="" width="24" height="24" />
      <span>macfabric</span></a>
    <nav aria-label="Views" hidden=${store.stream === "refused"}><ul>
      ${TABS.filter((tab) => !tab.isForOperators || store.isOperator).map((tab) => html`
        <li key=${tab.name}><a href=${`#/${tab.name}`}
          aria-current=${tab.name === current ? "page" : null}>${tab.title}</a></li>`)}
    </ul></nav>
    <div class="tools">
      <span class=${`live ${store.stream}`} role="status">${STREAM_WORDS[store.stream]}</span>
      ${who && html`<span class="who">${who}</span>`}
      <button class="quiet" onClick=${() => setMode(nextTheme())}
        title="Colours: system, light or dark">Theme: ${mode}</button>
      ${caller && !caller.operator && html`
        <button class="quiet" onClick=${onSignIn}>Sign in …</button>`}
      ${hasKey() && html`<button class="quiet" onClick=${onSignOut}>Sign out</button>`}
    </div>
  </header>`;
}

/** Notice that the router is a standby, or does not answer. */
function Notice({ store }) {
  const { router, stream, error } = store;
  if (stream === "reconnecting" && error) {
    return html`<p class="warning" role="alert">
      ${`${error.words ?? "The router does not answer."} The page shows the last known state. Retrying …`}</p>`;
  }
  if (router?.role !== "standby") return null;
  const url = router.active_url;
  return html`<p class="notice" role="status">This is the standby router. ${/^https?:/.test(url)
    ? html`It forwards all requests to the active router at <a href=${`${url}/`}>${url}</a>.`
    : "No router is active at the moment."} ${router.problem}</p>`;
}

function App({ fabric }) {
  const { store } = fabric;
  const [name = "fleet", ...rest] = useAddress();
  const [isSigningIn, setSigningIn] = useState(false);
  const tab = TABS.find((each) => each.name === name) ?? TABS[0];
  const View = useView(tab);
  useChanges(store);
  useEffect(() => fabric.open(), [fabric]);
  useEffect(() => {
    document.title = `${tab.title} · macfabric`;
  }, [tab]);
  const follow = () => {
    // An agent's address depends on the key: only operators' addresses name the tenant.
    location.hash = `#/${tab.isForOperators ? TABS[0].name : tab.name}`;
    fabric.open();
  };
  const enter = () => {
    setSigningIn(false);
    follow();
  };
  const leave = () => {
    signOut();
    follow();
  };
  const isRefused = store.stream === "refused";
  let body = html`<p class="loading" role="status">Connecting to the router …</p>`;
  if (isRefused || isSigningIn) {
    body = html`<${SignIn} error=${isRefused ? store.error : null} onDone=${enter}
      onCancel=${isRefused ? null : () => setSigningIn(false)} />`;
  } else if (store.hasSnapshot && View) {
    body = html`<${Notice} store=${store} />
      <${View} fabric=${fabric} store=${store} rest=${rest} />`;
  } else if (store.error) {
    body = html`<p class="loading" role="status">
      ${`${store.error.words ?? "The router does not answer."} Retrying …`}</p>`;
  }
  return html`
    <a class="skip" href="#main" onClick=${(event) => {
      event.preventDefault();
      document.getElementById("main").focus();
    }}>Skip to content</a>
    <${Header} store=${store} current=${tab.name} onSignIn=${() => setSigningIn(true)}
      onSignOut=${leave} />
    <main id="main" tabindex="-1">${body}</main>
    <${Reports} /><${Dialogs} />`;
}

const place = document.getElementById("page");
place.replaceChildren();
render(html`<${App} fabric=${new Fabric()} />`, place);
