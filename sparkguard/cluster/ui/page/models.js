// Models: the catalog, and where each is placed, started and stopped.

import { h, keyed, setAttribute, setHidden, setText } from "/look/dom.js";
import { button, message, stateChip } from "/look/parts.js";
import { plural, tokens } from "/look/words.js";
import { question } from "./dialogs.js";
import { SHAPES, WORDS } from "./states.js";
import { act, store } from "./store.js";
import { allocationsOf, isBusy, yueOf } from "./view.js";

export function modelsView() {
  const title = h("h1", { tabindex: "-1", id: "title" }, "Models");
  const count = h("span", { class: "quiet" });
  const broken = message("error", "failed");
  const cards = h("div", { class: "cards models" });
  const node = h("section", { "aria-labelledby": "title" }, h("div", { class: "head" }, title, count), broken.node, cards);
  return {
    node, title,
    update() {
      const models = store.catalog?.models ?? [];
      broken.update(store.catalog?.error ?? "");
      setText(count, models.length ? plural(models.length, "model") : "");
      keyed(cards, models, (model) => model.id, modelCard, title);
    },
  };
}

function modelCard({ id }) {
  const place = `model ${id}`;
  const title = h("h2");
  const chip = stateChip(WORDS, SHAPES);
  const about = h("p", { class: "quiet" });
  const notes = h("p", { class: "notes" });
  const notice = message("error", "failed");
  const where = h("select", { "aria-label": `Where to start ${id}` });
  const client = h("input", { type: "checkbox", id: `client-${id}`, checked: true });
  const clientLine = h("div", { class: "field check" }, client, h("label", { for: `client-${id}` }, "Point Hermes on this machine at it when it is ready"));
  let model = null;
  let running = null;
  const start = button("Start", { class: "primary" }, async () => {
    const others = allocationsOf().filter((one) => one.model !== id);
    const jobs = yueOf().flatMap((worker) => worker.jobs ?? []);
    const all = (store.catalog?.nodes ?? []).map((spark) => spark.node);
    // A model of several takes the first ones; what a third Spark serves goes on.
    const taken = model.mode === "yue" ? all : model.sparks > 1 ? all.slice(0, model.sparks) : [where.value];
    const replaced = others.filter((one) => one.nodes.some((name) => taken.includes(name)));
    if (replaced.length || jobs.length) {
      const sure = await question({ title: `Start ${model.label}?`, confirm: "Drain and start", danger: false,
        text: [replaced.length ? `${replaced.map((one) => one.label).join(" and ")} will be drained and stopped first.` : "",
          jobs.length ? `Renders that run (${jobs.join(", ")}) block this; cancel them on the Overview.` : ""].filter(Boolean).join(" ") });
      if (!sure) return;
    }
    await act(place, { verb: "up", model: id, ...(model.sparks > 1 ? {} : { node: where.value }), ...(client.checked ? {} : { no_hermes: true }) });
  });
  const stop = button("Stop", {}, () => act(place, { verb: "stop", node: running.placement }));
  const use = button("Use in Hermes", {}, () => act(place, { verb: "use", node: running.placement, hermes_target: "mac" }));
  const prepare = button("Prepare", {}, () => act(place, { verb: "pull", model: id }));
  const node = h("article", { class: "card model" },
    h("header", {}, title, chip.node), about, notes, clientLine, h("div", { class: "buttons" }, where, start, stop, use, prepare), notice.node);
  return {
    node,
    update(next) {
      model = next;
      running = next.mode === "yue" ? (yueOf().length ? { state: "ready", placement: "both" } : null) : (allocationsOf().find((one) => one.model === id) ?? null);
      const starting = store.running?.verb === "up" && store.running.model === id;
      setText(title, next.label);
      chip.update(starting ? "starting" : (running?.state ?? "stopped"));
      setText(about, [id, plural(next.sparks, "Spark"), next.context ? `${tokens(next.context)} context` : "", next.wrapper ?? "", next.vision ? "vision" : ""].filter(Boolean).join(" · "));
      setText(notes, next.notes ?? "");
      const free = next.sparks > 1 || next.mode === "yue" ? [] : (store.catalog?.nodes ?? []);
      if (where.options.length !== free.length) where.replaceChildren(...free.map((spark) => h("option", { value: spark.node }, spark.node)));
      setHidden(where, free.length === 0 || running !== null);
      setHidden(clientLine, next.mode === "yue" || running !== null, title);
      setHidden(start, running !== null && running.state === "ready", title);
      setHidden(stop, running === null, title);
      setHidden(use, running?.state !== "ready" || next.mode === "yue", title);
      for (const control of [start, stop, use, prepare]) setAttribute(control, "aria-disabled", isBusy() || null);
      notice.update(store.notices.get(place) ?? "");
    },
  };
}
