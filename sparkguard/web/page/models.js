// The models: every file that could be run, and what it would take.

import { load, unload } from "./actions.js";
import { h, keyed, setAttribute, setHidden, setText } from "/look/dom.js";
import { icon } from "/look/icons.js";
import { button, message, stateChip } from "/look/parts.js";
import { modelHref, noModels } from "./runners.js";
import { store } from "./store.js";
import { bytes, plural } from "/look/words.js";
import { STATES, DOWN } from "./words.js";

const COLUMNS = [["Model", "model"], ["State", "state"], ["Needs", "needs"], ["Device", "device"], ["Actions", "actions"]];

export function modelsView() {
  const title = h("h1", { tabindex: -1 }, "Models");
  const summary = h("p", { class: "quiet summary" });
  const filter = h("input", { type: "search", id: "filter", placeholder: "Filter", "aria-label": "Filter by name", autocomplete: "off" });
  const table = h("table", { role: "table", class: "rows models", "aria-label": "Models" },
    h("thead", { role: "rowgroup" }, h("tr", { role: "row" },
      ...COLUMNS.map(([name, kind]) => h("th", { role: "columnheader", scope: "col", class: kind }, name)))));
  const unmatched = h("p", { class: "quiet unmatched", hidden: true });
  const none = h("div");
  const warning = message("warning");
  const node = h("section", { "aria-label": "Models" },
    h("header", { class: "head" }, title, summary, filter), warning.node, table, unmatched, none);
  const view = {
    node,
    title,
    update() {
      const wanted = filter.value.trim().toLowerCase();
      const all = [...store.models.values()].sort((a, b) => a.id.localeCompare(b.id));
      const models = all.filter((model) => [model.id, ...(model.aliases ?? [])].some((name) => name.toLowerCase().includes(wanted)));
      warning.update(store.warning);
      setText(summary, wanted ? `${models.length} of ${plural(all.length, "model")}` : plural(all.length, "model"));
      keyed(table, models, (model) => model.id, modelRow, title);
      setHidden(table, models.length === 0);
      setText(unmatched, `No model's name holds “${filter.value.trim()}”.`);
      setHidden(unmatched, models.length > 0 || all.length === 0);
      setHidden(filter, all.length === 0);
      if (all.length) none.replaceChildren();
      else if (!none.firstChild) none.append(noModels());
    },
  };
  filter.addEventListener("input", () => view.update());
  return view;
}

function modelRow({ id }) {
  const name = h("a", { href: modelHref(id), class: "strong" }, id);
  const detail = h("span", { class: "quiet detail" });
  const state = stateChip(STATES);
  const total = h("span", { class: "number" });
  const context = h("span", { class: "quiet detail" });
  const unfit = h("span", { class: "unfit", hidden: true }, icon("warning"), h("span", {}, "does not fit now"));
  const device = h("span", { class: "mono" });
  const start = button("Load", { "aria-label": `Load ${id}` }, () => load(id));
  const stop = button("Unload", { "aria-label": `Unload ${id}` }, () => unload(id));
  const said = message("error", "failed");
  const messages = h("tr", { role: "row", class: "below" }, h("td", { role: "cell", colspan: COLUMNS.length }, said.node));
  const cell = (label, kind, ...children) => h("td", { role: "cell", class: kind, "data-label": label }, ...children);
  const node = h("tbody", { role: "rowgroup" },
    h("tr", { role: "row" },
      cell("", "model", name, detail),
      cell("State", "state", state.node),
      cell("Needs", "needs", total, context, unfit),
      cell("Device", "device", device),
      cell("Actions", "actions", h("div", { class: "buttons" }, start, stop))),
    messages);
  return {
    node,
    update(model) {
      const down = DOWN.includes(model.state);
      state.update(model.state);
      setText(detail, detailOf(model));
      setText(total, bytes(model.needs?.total_bytes));
      setText(context, model.context ? `${model.context} tokens of context` : "");
      setHidden(unfit, !(down && model.fits === false));
      setText(device, model.device ?? "auto");
      setHidden(start, !down, stop);
      setHidden(stop, down, start);
      setAttribute(stop, "aria-disabled", model.state === "stopping");
      said.update(store.notices.get(id) ?? model.error);
      setHidden(messages, said.node.hidden);
    },
  };
}

function detailOf(model) {
  const parts = [];
  if (model.aliases?.length) parts.push(`also ${model.aliases.join(", ")}`);
  if (model.pinned) parts.push("stays loaded");
  if (model.queue) parts.push(`${model.queue} waiting`);
  return parts.join(" · ");
}
