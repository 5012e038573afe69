// The runners: one row each, and what waits for one.

import { kill, unload } from "./actions.js";
import { deviceStrip } from "./devices.js";
import { h, keyed, setAttribute, setHidden, setText, setWidth } from "/look/dom.js";
import { loader } from "./loader.js";
import { showLog } from "./log.js";
import { button, code, empty, message, progressBar, stateChip } from "/look/parts.js";
import { store } from "./store.js";
import { bytes, count, duration, percent, plural, tokens } from "/look/words.js";
import { STATES, stateOf } from "./words.js";

const COLUMNS = [
  ["Model", "model"], ["State", "state"], ["Device", "device"], ["Memory", "memory"],
  ["Requests", "number"], ["Tokens", "number"], ["Waiting", "number"], ["Actions", "actions"],
];
const GOING = ["draining", "stopping"];

/** A link to a model's page. */
export const modelHref = (id) => `#/models/${encodeURIComponent(id)}`;

export function runnersView() {
  const title = h("h1", { tabindex: -1 }, "Runners");
  const summary = h("p", { class: "quiet summary" });
  const byHand = loader();
  const strip = deviceStrip();
  // The roles are said, since some browsers drop a table's own once CSS lays its rows out as cards on a phone.
  const table = h("table", { role: "table", class: "rows runners", "aria-label": "Runners" },
    h("thead", { role: "rowgroup" }, h("tr", { role: "row" },
      ...COLUMNS.map(([name, kind]) => h("th", { role: "columnheader", scope: "col", class: kind }, name)))));
  const waiting = waitingList();
  const none = h("div");
  const node = h("section", { "aria-label": "Runners" },
    h("header", { class: "head" }, title, summary, byHand.node), byHand.said, strip.node, table, waiting.node, none);
  let shown = null;
  return {
    node,
    title,
    update() {
      const runners = [...store.runners.values()].sort((a, b) => a.model.localeCompare(b.model));
      setText(summary, inWords(runners));
      byHand.update();
      strip.update();
      keyed(table, runners, (runner) => runner.id, runnerRow, title);
      setHidden(table, runners.length === 0);
      waiting.update();
      const wanted = runners.length ? null : store.models.size ? "idle" : "none";
      if (wanted !== shown) none.replaceChildren(...(wanted ? [whatToDo(wanted)] : []));
      shown = wanted;
    },
  };
}

function inWords(runners) {
  if (!runners.length) return "none loaded";
  const ready = runners.filter((runner) => runner.state === "ready").length;
  const starting = runners.filter((runner) => runner.state === "starting").length;
  const down = runners.filter((runner) => ["backoff", "failed"].includes(runner.state)).length;
  return [[ready, "ready"], [starting, "starting"], [down, "down"]]
    .filter(([number]) => number)
    .map(([number, word]) => `${number} ${word}`)
    .join(" · ");
}

function cell(label, kind, ...children) {
  return h("td", { role: "cell", class: kind, "data-label": label }, ...children);
}

function runnerRow(first) {
  const { id, model } = first;
  const name = h("a", { href: modelHref(model), class: "strong" }, model);
  const detail = h("span", { class: "quiet detail" });
  const bar = progressBar(`Loading ${model}`);
  const state = stateChip(STATES);
  const device = h("span", { class: "mono" });
  const measured = h("span", { class: "number" });
  const estimated = h("span", { class: "quiet number" });
  const fill = h("span", { class: "part runner" });
  const mark = h("span", { class: "mark" });
  const share = h("div", { class: "bar", "aria-hidden": "true" }, fill, mark);
  const requests = h("span");
  const spent = h("span");
  const queue = h("span");
  const error = message("error", "failed");
  const said = message("error", "failed");
  const log = button("Log", { "aria-label": `Log of ${model}` }, () => showLog(id));
  const stop = button("Unload", { "aria-label": `Unload ${model}` }, () => unload(model));
  const end = h("button", {
    type: "button",
    class: "danger",
    "aria-label": `Kill the runner of ${model}`,
    onclick: () => kill(store.runners.get(id)), // asks first, so a second press does no harm
  }, "Kill");
  const messages = h("tr", { role: "row", class: "below" }, h("td", { role: "cell", colspan: COLUMNS.length }, error.node, said.node));
  const node = h("tbody", { role: "rowgroup" },
    h("tr", {
      role: "row",
      class: "opens",
      onclick: (event) => event.target.closest("a, button") || String(getSelection()) || showLog(id),
    },
      cell("", "model", name, detail),
      cell("State", "state", state.node, bar.node),
      cell("Device", "device", device),
      cell("Memory", "memory", h("div", { class: "line" }, measured, estimated), share),
      cell("Requests", "number", requests),
      cell("Tokens", "number", spent),
      cell("Waiting", "number", queue),
      cell("Actions", "actions", h("div", { class: "buttons" }, log, stop, end))),
    messages);
  return {
    node,
    update(runner) {
      const shown = stateOf(runner);
      setAttribute(node, "data-state", shown);
      state.update(shown);
      setText(detail, detailOf(runner));
      setHidden(bar.node, runner.state !== "starting");
      bar.update(runner.progress);
      setText(device, runner.device);
      setText(measured, runner.memory_bytes ? bytes(runner.memory_bytes) : "");
      setText(estimated, `${runner.memory_bytes ? "est." : "estimated"} ${bytes(runner.estimated_bytes)}`);
      const total = store.devices.find((one) => one.id === runner.device)?.total_bytes;
      setHidden(fill, !runner.memory_bytes);
      setWidth(fill, total ? (runner.memory_bytes ?? 0) / total : 0);
      mark.style.left = `${total ? Math.min(100, (100 * (runner.estimated_bytes ?? 0)) / total).toFixed(2) : 0}%`;
      setText(requests, count(runner.requests));
      setText(spent, tokens(runner.tokens));
      setText(queue, count(runner.queue));
      setAttribute(queue, "class", runner.queue ? "strong" : "quiet");
      const down = ["backoff", "failed"].includes(runner.state);
      error.update(down ? runner.last_error : null);
      said.update(store.notices.get(model));
      setHidden(messages, error.node.hidden && said.node.hidden);
      setHidden(stop, GOING.includes(runner.state), log);
      setHidden(end, !runner.pid || runner.state === "stopped", log);
    },
  };
}

function detailOf(runner) {
  const now = Date.now() / 1000;
  if (runner.state === "starting") return runner.progress === null ? "loading" : `loading, ${percent(runner.progress)}`;
  if (runner.state === "backoff" && runner.retry_at) {
    return runner.retry_at > now ? `restarts in ${duration(Math.ceil(runner.retry_at - now))}` : "restarting";
  }
  const parts = [];
  if (runner.pid && runner.started_at) parts.push(`up ${duration(now - runner.started_at)}`);
  if (runner.pid) parts.push(`pid ${runner.pid}`);
  if (runner.restarts) parts.push(plural(runner.restarts, "restart"));
  return parts.join(" · ");
}

/** Models with requests and no runner yet: they wait for memory, or for a place under the cap. */
function waitingList() {
  const list = h("ul", { class: "plain" });
  const node = h("section", { class: "waiting", "aria-label": "Waiting" }, h("h2", {}, "Waiting for a runner"), list);
  return {
    node,
    update() {
      const served = new Set([...store.runners.values()].map((runner) => runner.model));
      const models = [...store.models.values()].filter((model) => model.queue > 0 && !served.has(model.id));
      keyed(list, models, (model) => model.id, (model) => {
        const words = h("span", { class: "number" });
        return {
          node: h("li", {}, h("a", { href: modelHref(model.id), class: "strong" }, model.id), words),
          update: (now) => setText(words, plural(now.queue, "request")),
        };
      });
      setHidden(node, models.length === 0);
    },
  };
}

function whatToDo(wanted) {
  if (wanted === "none") return noModels();
  const id = [...store.models.keys()][0];
  return empty("No model is loaded",
    h("p", {}, "The first request for a model starts a runner for it. Or load one by hand, above or on ",
      h("a", { href: "#/models" }, "Models"), "."),
    h("pre", { tabindex: 0, "aria-label": "An example request" },
      `curl ${location.origin}/v1/chat/completions -H 'Content-Type: application/json' \\\n` +
      `  -d '{"model": "${id}", "messages": [{"role": "user", "content": "Hello"}]}'`));
}

/** For the runners' and the models' view: there is no file to run. */
export function noModels() {
  return empty("No model was found",
    h("p", {}, "Put a GGUF file into the folder that ", code("MODELS_DIR"), " names, ", code("~/models"),
      " unless it says otherwise. It appears here by itself; a subfolder becomes part of its name."),
    h("p", { class: "quiet" }, code("MODELS_DIR"), " is set in ", code("~/.config/spark/spark.conf"), "."));
}
