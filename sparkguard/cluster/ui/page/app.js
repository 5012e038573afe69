// Wires the page: which view is shown, what stands in its place before the server has answered, and what is being done.

import { h, setText } from "/look/dom.js";
import { connectionLine, header, markLink, titleOf } from "/look/frame.js";
import { activityLog } from "./activity.js";
import { benchmarksView } from "./benchmarks.js";
import { busyLine } from "./busy.js";
import { modelsView } from "./models.js";
import { overviewView } from "./overview.js";
import { connect, onChange, store, wake } from "./store.js";

const main = document.querySelector("main");
const VIEWS = { overview: overviewView, models: modelsView, benchmarks: benchmarksView };
const made = new Map(); // a view is made once: its form keeps what was typed
let view = null;

function show(moved) {
  const asked = /^#\/([a-z]+)/.exec(location.hash)?.[1];
  const name = asked in VIEWS ? asked : "overview";
  if (!made.has(name)) made.set(name, VIEWS[name]());
  view = made.get(name);
  document.title = `${titleOf(name)} – Spark Serve`;
  markLink(name);
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
const drawConnection = connectionLine(store, wake);

function draw() {
  const wanted = store.locked ? locked : store.known ? view.node : first;
  if (main.firstElementChild !== wanted) main.replaceChildren(wanted);
  document.body.dataset.locked = store.locked;
  if (store.known) view.update();
  else setText(first, store.retryAt ? "spark-serve ui does not answer." : "Asking the Sparks …");
  busy.update();
  activity.update();
  drawConnection(view?.title);
}

onChange(draw);
header();
show(false);
addEventListener("hashchange", () => show(true));
setInterval(draw, 1000); // ages, and the seconds until the next try
connect();
