// Wires the page: which view is shown, whether the supervisor is there, and the theme.

import { setKey } from "./api.js";
import { devicesView } from "./devices.js";
import { h, setAttribute, setHidden, setText } from "/look/dom.js";
import { icon } from "/look/icons.js";
import { updateLog } from "./log.js";
import { modelView } from "./model.js";
import { modelsView } from "./models.js";
import { runnersView } from "./runners.js";
import { changed, connect, fail, onChange, refresh, store, wake } from "./store.js";
import { clock, duration } from "/look/words.js";

const main = document.querySelector("main");
const THEMES = ["auto", "light", "dark"];
let view = null;
let route = null;

function routeOf(hash) {
  const [, name = "runners", id] = /^#\/([a-z]+)(?:\/(.+))?$/.exec(hash) ?? [];
  if (name === "models" && id) return ["models", () => modelView(decodeURIComponent(id)), decodeURIComponent(id)];
  const views = { runners: runnersView, models: modelsView, devices: devicesView };
  return views[name] ? [name, views[name], titleOf(name)] : ["runners", runnersView, "Runners"];
}

const titleOf = (name) => name[0].toUpperCase() + name.slice(1);

/** Shows the view of the address. Focus goes to its heading after a move, so that a screen reader reads on from there. */
function show(moved) {
  const [name, make, title] = routeOf(location.hash);
  view = make();
  route = name;
  document.title = `${title} – Spark`;
  for (const link of document.querySelectorAll("nav.views a")) {
    setAttribute(link, "aria-current", link.hash === `#/${name}` ? "page" : null);
  }
  draw();
  if (moved) {
    scrollTo(0, 0);
    if (!store.locked) view.title.focus();
  }
}

const key = keyView();
const first = h("p", { class: "quiet first", role: "status" });

function draw() {
  const wanted = store.locked ? key.node : store.known ? view.node : first;
  if (main.firstElementChild !== wanted) {
    main.replaceChildren(wanted);
    if (store.locked) key.focus();
  }
  document.body.dataset.locked = store.locked;
  if (store.locked) key.update();
  else if (store.known) view.update();
  else setText(first, store.retryAt ? "The supervisor does not answer." : "Reading …");
  updateLog();
  drawConnection();
}

const pill = document.querySelector("#connection");
const lost = document.querySelector("#lost");
const lostWords = lost.querySelector("p");
const again = lost.querySelector("button");

function drawConnection() {
  const away = !store.connected && store.retryAt !== null && !store.locked;
  setAttribute(pill, "data-live", store.connected);
  setText(pill.lastElementChild, store.connected ? "Live" : store.locked ? "Locked" : away ? "Not connected" : "Connecting");
  setAttribute(document.body, "data-stale", away && store.known);
  if (away) {
    const rest = store.known ? ". What you see is from then" : "";
    setText(lostWords, `Not connected since ${clock(store.heardAt)}${rest}.`);
    const seconds = (store.retryAt - Date.now()) / 1000;
    setText(again, seconds > 0 ? `Try now (${duration(Math.ceil(seconds))})` : "Trying …");
  }
  setHidden(lost, !away, view?.title);
}

again.addEventListener("click", wake);

function keyView() {
  const input = h("input", { id: "key", type: "password", autocomplete: "current-password", spellcheck: "false", "aria-describedby": "key-wrong" });
  const wrong = h("p", { id: "key-wrong", class: "wrong" });
  const form = h("form", {},
    h("label", { for: "key" }, "API key"), input, wrong,
    h("div", { class: "buttons" }, h("button", { type: "submit", class: "primary" }, "Continue")));
  const node = h("section", { class: "key card", "aria-labelledby": "key-title" },
    h("h1", { id: "key-title" }, "This supervisor asks for a key"),
    h("p", { class: "quiet" }, "It is in the file that SPARK_API_KEY_FILE names. This tab keeps it until it is closed."), form);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const typed = input.value.trim();
    if (!typed) return input.focus();
    setKey(typed);
    input.value = "";
    store.locked = false;
    wake();
    if (store.connected) refresh().catch(fail);
    changed();
  });
  return {
    node,
    focus: () => input.focus(),
    update() {
      setText(wrong, store.keyRefused ? "That key was not accepted." : "");
      setAttribute(input, "aria-invalid", store.keyRefused ? "true" : null);
    },
  };
}

const theme = document.querySelector("#theme");

function drawTheme() {
  const name = document.documentElement.dataset.theme;
  setAttribute(theme, "aria-label", `Colours: ${name === "auto" ? "as the system" : name}`);
  setText(theme.lastElementChild, titleOf(name));
}

theme.addEventListener("click", () => {
  const next = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length];
  document.documentElement.dataset.theme = next;
  localStorage.setItem("theme", next);
  drawTheme();
});
// By hand, since an address of "#main" would be taken for a view's.
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});
theme.prepend(icon("theme"));
document.querySelector(".brand").prepend(icon("spark"));

onChange(draw);
drawTheme();
show(false);
addEventListener("hashchange", () => show(true));
setInterval(draw, 1000); // uptimes, and the seconds until the next try
connect();
