// Benchmarks: run one against what is ready, look at saved ones, compare two.

import { h, keyed, setAttribute, setHidden, setText } from "/look/dom.js";
import { button, message, stateChip } from "/look/parts.js";
import { count, duration, seconds, tenth, UNKNOWN } from "/look/words.js";
import { get, post } from "./api.js";
import { chart } from "./charts.js";
import { wordsOf } from "./events.js";
import { SHAPES, WORDS } from "./states.js";
import { changed, readRuns, store } from "./store.js";
import { allocationsOf, isBusy } from "./view.js";

let shown = null; // the run whose figures are shown
let chosen = []; // the two that are compared, in the order of choosing
let compared = null;
let fault = "";

async function fetched(work) {
  fault = "";
  try {
    await work();
  } catch (error) {
    fault = error.message;
  }
  changed();
}

const show = (id) => fetched(async () => (shown = (await get(`/api/bench/${encodeURIComponent(id)}`)).run));

const choose = (id) => fetched(async () => {
  chosen = chosen.includes(id) ? chosen.filter((one) => one !== id) : [...chosen, id].slice(-2);
  compared = null;
  if (chosen.length === 2) compared = await get(`/api/bench/compare?a=${encodeURIComponent(chosen[0])}&b=${encodeURIComponent(chosen[1])}`);
});

export function benchmarksView() {
  const title = h("h1", { tabindex: "-1", id: "title" }, "Benchmarks");
  const form = benchForm();
  const wrong = message("error", "failed");
  const rows = h("tbody");
  const none = h("p", { class: "quiet" }, "No run is saved yet.");
  const table = h("table", {}, h("thead", {}, h("tr", {}, ...["Compare", "Run", "Model", "State"].map((name) => h("th", { scope: "col" }, name)),
    ...["Decode", "First token", "Prefill"].map((name) => h("th", { scope: "col", class: "number" }, name)))), rows);
  const saved = h("article", { class: "card" }, h("header", {}, h("h2", {}, "Saved runs")),
    h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Saved runs" }, table), none);
  const details = runCard();
  const comparison = compareCard();
  const node = h("section", { "aria-labelledby": "title" }, h("div", { class: "head" }, title), wrong.node,
    h("div", { class: "bench" }, form.node, saved), h("div", { class: "below" }, comparison.node, details.node));
  return {
    node, title,
    shown: () => store.runs ?? readRuns(),
    update() {
      form.update();
      wrong.update(fault);
      const runs = store.runs ?? [];
      setHidden(none, runs.length > 0);
      setHidden(table, runs.length === 0);
      keyed(rows, runs, (run) => run.id, runRow, title);
      details.update();
      comparison.update();
    },
  };
}

function runRow({ id }) {
  const pick = h("input", { type: "checkbox", onchange: () => choose(id) });
  const open = button("", { class: "bare" }, () => show(id));
  const subject = h("td");
  const chip = stateChip(WORDS, SHAPES);
  const figures = [0, 1, 2].map(() => h("td", { class: "number" }));
  const node = h("tr", {}, h("td", {}, pick), h("td", {}, open), subject, h("td", {}, chip.node), ...figures);
  return {
    node,
    update(run) {
      const when = new Date(run.at).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" });
      setText(open, when);
      setAttribute(pick, "aria-label", `Compare the run of ${when}`);
      pick.checked = chosen.includes(id);
      setAttribute(node, "aria-selected", shown?.id === id || null);
      setText(subject, `${run.label ?? run.model}, ${run.kind}`);
      chip.update(run.status);
      setText(figures[0], tenth(run.summary?.decode_tokens_per_s, " tokens/s"));
      setText(figures[1], seconds(run.summary?.ttft_s));
      setText(figures[2], run.summary?.prefill_tokens_per_s == null ? UNKNOWN : `${count(run.summary.prefill_tokens_per_s)} tokens/s`);
    },
  };
}

function field(label, control, wide = false) {
  return h("div", { class: wide ? "field wide" : "field" }, h("label", { for: control.id }, label), control);
}

function benchForm() {
  const number = (id, value, min, max) => h("input", { id, type: "number", value, min, max, step: 1, inputmode: "numeric" });
  const select = (id, ...options) => h("select", { id }, ...options.map(([value, text]) => h("option", { value }, text)));
  const target = select("bench-target");
  const kind = select("bench-kind", ["decode", "Decode: tokens out"], ["prefill", "Prefill: tokens in, a sweep"]);
  const requests = number("bench-requests", 3, 1, 1000);
  const concurrency = h("input", { id: "bench-concurrency", value: "1", inputmode: "numeric", pattern: "[0-9]+(,[0-9]+)*" });
  const maxTokens = number("bench-max", 256, 1, 8192);
  const prompt = h("input", { id: "bench-prompt", value: "512", inputmode: "numeric", pattern: "[0-9]+(,[0-9]+)*" });
  const reasoning = select("bench-reasoning", ["default", "As the model does"], ["on", "On"], ["off", "Off"]);
  kind.addEventListener("change", () => {
    const sweep = kind.value === "prefill";
    prompt.value = sweep ? "512,2048,8192" : "512";
    maxTokens.value = sweep ? "16" : "256";
  });
  const wrong = message("error", "failed");
  const said = h("p", { class: "quiet wide", role: "status" });
  const bar = h("progress", { class: "wide", max: 1, "aria-label": "Progress of the benchmark" });
  const run = h("button", { type: "submit", class: "primary" }, "Run");
  const cancel = button("Cancel", {}, () => post("/api/bench/cancel").catch(() => {}));
  const form = h("form", {},
    field("Endpoint", target, true), field("Kind", kind, true), field("Requests", requests), field("Concurrency", concurrency),
    field("Output tokens", maxTokens), field("Prompt tokens", prompt), field("Reasoning", reasoning, true),
    h("div", { class: "buttons wide" }, run, cancel), bar, said);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (run.getAttribute("aria-disabled") === "true") return;
    store.benchError = null;
    try {
      await post("/api/bench", { node: target.value, kind: kind.value, requests: Number(requests.value), concurrency: concurrency.value,
        max_tokens: Number(maxTokens.value), prompt_tokens: prompt.value, reasoning: reasoning.value });
    } catch (error) {
      store.benchError = error.message;
    }
    changed();
  });
  const node = h("article", { class: "card" }, h("header", {}, h("h2", {}, "New run")), form, wrong.node);
  return {
    node,
    update() {
      const ready = allocationsOf().filter((one) => one.state === "ready");
      const names = ready.map((one) => `${one.placement}|${one.label} on ${one.nodes.join(" and ")}`);
      if (target.dataset.names !== names.join("\n")) {
        target.dataset.names = names.join("\n");
        target.replaceChildren(...(names.length ? names : ["|Nothing is ready"]).map((name) => h("option", { value: name.split("|")[0] }, name.split("|")[1])));
      }
      const running = store.bench !== null;
      setAttribute(run, "aria-disabled", running || isBusy() || ready.length === 0 || null);
      setHidden(cancel, !running, run);
      setHidden(bar, !running);
      const last = store.benchEvent ?? store.bench?.last;
      if (last?.total) setAttribute(bar, "value", (last.done ?? 0) / last.total);
      else setAttribute(bar, "value", null);
      setText(said, running ? `${duration(Date.now() / 1000 - store.bench.since)} · ${last ? wordsOf(last) : "Beginning"}` : "");
      wrong.update(running ? "" : (store.benchError ?? ""));
    },
  };
}

const stat = (value, unit) =>
  !value?.n ? UNKNOWN : value.p95 == null ? `${unit(value.median)} (${unit(value.min)} to ${unit(value.max)})` : `${unit(value.p50 ?? value.median)}, p95 ${unit(value.p95)}`;
const perSecond = (value) => tenth(value);
/** The mean of whole repeats; of a run that was cut short, what the last one gave. */
const together = (level) => level.over_repeats.generated_tokens_per_s?.mean ?? level.repeats.at(-1)?.generated_tokens_per_s ?? null;
const COLUMNS = [
  ["Requests", (level) => `${count(level.ok)} of ${count(level.n)}`],
  ["Decode tokens/s", (level) => stat(level.statistics.decode_tokens_per_s, perSecond)],
  ["All together tokens/s", (level) => tenth(together(level))],
  ["First token", (level) => stat(level.statistics.ttft_s, seconds)],
  ["First visible", (level) => stat(level.statistics.ttfo_s, seconds)],
  ["Prefill tokens/s", (level) => stat(level.statistics.prefill_tokens_per_s, count)],
  ["Between chunks", (level) => stat(level.statistics.gap_s, seconds)],
];

function runCard() {
  const heading = h("h2");
  const chip = stateChip(WORDS, SHAPES);
  const settings = h("p", { class: "quiet" });
  const warning = message("warning");
  const head = h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Level"), ...COLUMNS.map(([name]) => h("th", { scope: "col", class: "number" }, name))));
  const body = h("tbody");
  const plots = h("div", { class: "plots" });
  const node = h("article", { class: "card", hidden: true }, h("header", {}, heading, chip.node), settings, warning.node,
    h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Figures of the run" }, h("table", {}, head, body)), plots);
  let drawn = null;
  return {
    node,
    update() {
      setHidden(node, shown === null);
      if (!shown || drawn === shown) return;
      drawn = shown;
      setText(heading, `${shown.target.name ?? shown.target.model}, ${shown.kind}`);
      chip.update(shown.status);
      setText(settings, Object.entries(shown.settings ?? {}).filter(([, value]) => value !== null && typeof value !== "object").map(([key, value]) => `${key.replaceAll("_", " ")} ${value}`).join(" · "));
      warning.update([shown.reason ?? "", ...(shown.notes ?? [])].filter(Boolean).join("\n"));
      body.replaceChildren(...(shown.levels ?? []).map((level) =>
        h("tr", {}, h("th", { scope: "row" }, `${count(level.concurrency)} at once${level.prompt_tokens ? `, ${count(level.prompt_tokens.median)} tokens in` : ""}`),
          ...COLUMNS.map(([, of]) => h("td", { class: "number" }, of(level))))));
      plots.replaceChildren();
      for (const [name, axis, x, y] of SWEEPS) sweep(plots, shown.levels ?? [], name, axis, x, y);
    },
  };
}

const SWEEPS = [
  ["Tokens/s of all requests together", "requests at once", (level) => level.concurrency, together],
  ["Prefill tokens/s", "prompt tokens", (level) => level.prompt_tokens?.median ?? null, (level) => level.statistics.prefill_tokens_per_s?.median ?? null],
];

/** A chart where a quantity was varied: of one point there is nothing to see. */
function sweep(node, levels, name, axis, x, y) {
  if (new Set(levels.map(x)).size < 2) return;
  const plot = h("div");
  node.append(h("figure", {}, h("figcaption", { class: "quiet" }, name), plot));
  chart(plot, `${name} by ${axis}`, "", undefined, axis).update([{ name, x: levels.map((level) => String(x(level))), y: levels.map((level) => y(level) ?? null) }]);
}

// Of a comparison: the number's name there -> its name here, and its unit.
const FIGURES = {
  decode_tokens_per_s: ["Decode", (value) => tenth(value, " tokens/s")],
  generated_tokens_per_s: ["All together", (value) => tenth(value, " tokens/s")],
  ttft_s: ["First token", seconds],
  ttfo_s: ["First visible", seconds],
  prefill_tokens_per_s: ["Prefill", (value) => (value === null ? UNKNOWN : `${count(value)} tokens/s`)],
  gap_s: ["Between chunks", seconds],
};

function figuresOf(comparison) {
  return (comparison?.levels ?? []).flatMap((level) =>
    Object.entries(FIGURES).filter(([key]) => level.medians[key]?.first != null || level.medians[key]?.second != null).map(([key, [name, unit]]) =>
      ({ ...level.medians[key], name, unit, level: `${count(level.concurrency)} at once, ${count(level.prompt_tokens_wanted)} tokens in` })));
}

function compareCard() {
  const differs = message("warning");
  const hint = h("p", { class: "quiet" });
  const body = h("tbody");
  const table = h("table", {}, h("thead", {}, h("tr", {}, ...["Level", "Figure"].map((name) => h("th", { scope: "col" }, name)),
    ...["First", "Second", "Ratio"].map((name) => h("th", { scope: "col", class: "number" }, name)))), body);
  const scroll = h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Comparison of two runs" }, table);
  const node = h("article", { class: "card" }, h("header", {}, h("h2", {}, "Comparison")), hint, differs.node, scroll);
  let drawn;
  return {
    node,
    update() {
      setHidden(node, chosen.length === 0);
      setHidden(scroll, compared === null);
      setText(hint, chosen.length === 1 ? "Choose a second run." : "");
      if (drawn === compared) return;
      drawn = compared;
      differs.update(compared?.comparable === false || compared?.differences?.length
        ? `These runs differ in ${compared.differences.map((one) => `${one.what.split(".").pop().replaceAll("_", " ")} (${one.first ?? "nothing"}, ${one.second ?? "nothing"})`).join(", ")}.` : "");
      body.replaceChildren(...figuresOf(compared).map((row) =>
        h("tr", {}, h("th", { scope: "row" }, row.level), h("td", {}, row.name), ...[row.first, row.second].map((value) => h("td", { class: "number" }, row.unit(value))),
          h("td", { class: "number" }, row.ratio === null ? UNKNOWN : `${row.ratio.toFixed(2)}`))));
    },
  };
}
