// One model: what it needs, its settings, and how to start and stop it.

import { load, unload } from "./actions.js";
import { h, keyed, setAttribute, setHidden, setText, setWidth } from "/look/dom.js";
import { button, empty, message, progressBar, stateChip } from "/look/parts.js";
import { showLog } from "./log.js";
import { settingsForm } from "./settings.js";
import { store } from "./store.js";
import { bytes, percent, plural } from "/look/words.js";
import { STATES, DOWN } from "./words.js";

// In the order of the text under Needs.
const PARTS = [
  ["weights_bytes", "weights"], ["kv_cache_bytes", "KV cache"], ["state_bytes", "state"], ["compute_bytes", "work buffers"],
  ["output_bytes", "output"], ["projector_bytes", "projector"], ["prompt_cache_bytes", "prompt cache"],
];

export function modelView(id) {
  const title = h("h1", { tabindex: -1 }, id);
  const state = stateChip(STATES);
  const detail = h("p", { class: "quiet summary" });
  const start = button("Load", { class: "primary" }, () => load(id));
  const stop = button("Unload", {}, () => unload(id));
  const log = button("Log", {}, () => showLog(id));
  const bar = progressBar(`Loading ${id}`);
  const said = message("error", "failed");
  said.node.setAttribute("role", "alert"); // a refusal answers the press of a button
  const error = message("error", "failed");
  const warning = message("warning");
  const unfit = message("warning");
  const needs = needsOf();
  const form = settingsForm(id);
  const facts = { file: h("dd", { class: "mono" }), size: h("dd"), aliases: h("dd"), device: h("dd", { class: "mono" }) };
  const aliasesRow = h("div", {}, h("dt", {}, "Aliases"), facts.aliases);
  const body = h("div", { class: "columns" },
    h("div", {},
      h("section", { class: "card", "aria-labelledby": "needs" }, h("h2", { id: "needs" }, "Needs"), needs.node),
      h("section", { class: "card", "aria-labelledby": "on-disk" }, h("h2", { id: "on-disk" }, "On disk"),
        h("dl", { class: "facts" },
          h("div", {}, h("dt", {}, "Path"), facts.file), h("div", {}, h("dt", {}, "Size"), facts.size),
          aliasesRow, h("div", {}, h("dt", {}, "Device"), facts.device)))),
    h("section", { class: "card", "aria-labelledby": "settings" }, h("h2", { id: "settings" }, "Settings"), form.node));
  const gone = h("div", { hidden: true }, empty("There is no such model",
    h("p", {}, "Its file may have been removed or renamed. ", h("a", { href: "#/models" }, "All models"))));
  const page = h("div", {},
    h("div", { class: "titled" }, state.node, detail, h("div", { class: "buttons" }, log, start, stop)),
    bar.node, said.node, error.node, warning.node, unfit.node, body);
  const node = h("section", { "aria-label": `Model ${id}` },
    h("nav", { class: "crumbs", "aria-label": "Breadcrumb" }, h("a", { href: "#/models" }, "Models")),
    h("header", { class: "head" }, title), page, gone);
  return {
    node,
    title,
    update() {
      const model = store.models.get(id);
      setHidden(page, !model);
      setHidden(gone, Boolean(model));
      if (!model) return;
      const down = DOWN.includes(model.state);
      const runner = [...store.runners.values()].find((one) => one.model === id);
      const progress = runner?.progress ?? model.progress ?? null;
      state.update(model.state);
      setText(detail, [
        model.state === "starting" && progress !== null ? `loading, ${percent(progress)}` : null,
        model.pinned ? "stays loaded" : null,
        model.queue ? `${plural(model.queue, "request")} waiting` : null,
      ].filter(Boolean).join(" · "));
      setAttribute(bar.node, "data-shown", model.state === "starting");
      bar.update(model.state === "starting" ? progress : 0);
      setHidden(start, !down, stop);
      setHidden(stop, down, start);
      setAttribute(stop, "aria-disabled", model.state === "stopping");
      const notice = store.notices.get(id);
      said.update(notice);
      error.update(model.error === notice ? null : model.error);
      warning.update(model.warning);
      unfit.update(down && model.fits === false && !notice && !model.error ? model.reason : null);
      needs.update(model);
      setText(facts.file, model.file);
      setText(facts.size, bytes(model.bytes));
      setText(facts.aliases, (model.aliases ?? []).join(", "));
      setHidden(aliasesRow, !model.aliases?.length);
      setText(facts.device, model.device ?? "not loaded");
      form.update(model);
    },
  };
}

function needsOf() {
  const figure = h("p", { class: "figure number" });
  const context = h("p", { class: "quiet" });
  const bar = h("div", { class: "bar stacked", role: "img" });
  const legend = h("ul", { class: "legend" });
  const node = h("div", {}, figure, context, bar, legend);
  return {
    node,
    update(model) {
      const total = model.needs?.total_bytes;
      setText(figure, total ? bytes(total) : "not known");
      setText(context, model.context ? `for ${model.context} tokens of context` : "");
      const parts = PARTS.map(([key, name], index) => ({ key, name, index, bytes: model.needs?.[key] })).filter((part) => part.bytes);
      keyed(bar, parts, (part) => part.key, (part) => {
        const piece = h("span", { class: `part shade-${part.index}` });
        return { node: piece, update: (now) => setWidth(piece, total ? now.bytes / total : 0) };
      });
      keyed(legend, parts, (part) => part.key, (part) => {
        const size = h("span", { class: "number" });
        return {
          node: h("li", {}, h("span", { class: `swatch shade-${part.index}` }), h("span", { class: "name" }, part.name), size),
          update: (now) => setText(size, bytes(now.bytes)),
        };
      });
      setAttribute(bar, "aria-label", model.needs?.text);
      setHidden(bar, parts.length === 0);
    },
  };
}
