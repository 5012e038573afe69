// Wires the page: which view is shown, whether the server is there, what is being done, and the theme.

import { setAttribute, setHidden, setText, h } from "/look/dom.js";
import { icon } from "/look/icons.js";
import { clock, duration } from "/look/words.js";
import { activityLog } from "./activity.js";
import { benchmarksView } from "./benchmarks.js";
import { busyLine } from "./busy.js";
import { modelsView } from "./models.js";
import { overviewView } from "./overview.js";
import { connect, onChange, store, wake } from "./store.js";

const main = document.querySelector("main");
const THEMES = ["auto", "light", "dark"];
const VIEWS = { overview: overviewView, models: modelsView, benchmarks: benchmarksView };
const titleOf = (name) => name[0].toUpperCase() + name.slice(1);
const made = new Map(); // a view is made once: its form keeps what was typed
let view = null;

function show(moved) {
  const asked = /^#\/([a-z]+)/.exec(location.hash)?.[1];
  const name = asked in VIEWS ? asked : "overview";
  if (!made.has(name)) made.set(name, VIEWS[name]());
  view = made.get(name);
  document.title = `${titleOf(name)} – Spark Serve`;
  for (const link of document.querySelectorAll("nav.views a")) {
    setAttribute(link, "aria-current", link.hash === `#/${name}` ? "page" : null);
  }
  view.shown?.();
  draw();
  if (moved) {
    scrollTo(0, 0);
    view.title.focus();
  }
}

const first = h("p", { class: "quiet first", role: "status" });
const locked = h("section", { class: "empty" }, h("h1", {}, "This page needs its key"),
  h("p", {}, "Open the address that spark-serve ui has printed in the terminal. It carries the key, and is new at each start."));
const busy = busyLine(document.querySelector("#busy"));
const activity = activityLog(document.querySelector("#activity"));

function draw() {
  const wanted = store.locked ? locked : store.known ? view.node : first;
  if (main.firstElementChild !== wanted) main.replaceChildren(wanted);
  document.body.dataset.locked = store.locked;
  if (store.known) view.update();
  else setText(first, store.retryAt ? "spark-serve ui does not answer." : "Asking the Sparks …");
  busy.update();
  activity.update();
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
    setText(lostWords, `Not connected since ${clock(store.heardAt)}${store.known ? ". What you see is from then" : ""}.`);
    const seconds = (store.retryAt - Date.now()) / 1000;
    setText(again, seconds > 0 ? `Try now (${duration(Math.ceil(seconds))})` : "Trying …");
  }
  setHidden(lost, !away, view?.title);
}

again.addEventListener("click", wake);

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
  dispatchEvent(new Event("themechange"));
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
setInterval(draw, 1000); // ages, and the seconds until the next try
connect();
