// Wires the page: which view is shown, and what stands in its place before the supervisor has answered or without its key.

import { setKey } from "./api.js";
import { devicesView } from "./devices.js";
import { h, setAttribute, setText } from "/look/dom.js";
import { connectionLine, header, markLink, titleOf } from "/look/frame.js";
import { updateLog } from "./log.js";
import { modelView } from "./model.js";
import { modelsView } from "./models.js";
import { runnersView } from "./runners.js";
import { changed, connect, fail, onChange, refresh, store, wake } from "./store.js";

const main = document.querySelector("main");
let view = null;

function routeOf(hash) {
  const [, name = "runners", id] = /^#\/([a-z]+)(?:\/(.+))?$/.exec(hash) ?? [];
  if (name === "models" && id) return ["models", () => modelView(decodeURIComponent(id)), decodeURIComponent(id)];
  const views = { runners: runnersView, models: modelsView, devices: devicesView };
  return views[name] ? [name, views[name], titleOf(name)] : ["runners", runnersView, "Runners"];
}

/** Shows the view of the address. Focus goes to its heading after a move, so that a screen reader reads on from there. */
function show(moved) {
  const [name, make, title] = routeOf(location.hash);
  view = make();
  document.title = `${title} – Spark`;
  markLink(name);
  draw();
  if (moved) {
    scrollTo(0, 0);
    if (!store.locked) view.title.focus();
  }
}

const key = keyView();
const first = h("p", { class: "quiet first", role: "status" });
const drawConnection = connectionLine(store, wake);

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
  drawConnection(view?.title);
}

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

onChange(draw);
header();
show(false);
addEventListener("hashchange", () => show(true));
setInterval(draw, 1000); // uptimes, and the seconds until the next try
connect();
