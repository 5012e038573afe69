// Loading a model by hand where the runners are.

import { load } from "./actions.js";
import { h, keyed, setHidden } from "/look/dom.js";
import { button, message } from "/look/parts.js";
import { store } from "./store.js";
import { DOWN } from "./words.js";

/** node: a choice of the models that are not loaded. said: what the supervisor answered about the last one. */
export function loader() {
  let asked = null;
  const choice = h("select", { "aria-label": "Model to load" });
  const start = button("Load", {}, () => {
    asked = choice.value;
    load(asked); // its row shows the rest, and another may be loaded meanwhile
  });
  const node = h("div", { class: "loader" }, choice, start);
  const said = message("error", "failed");
  said.node.setAttribute("role", "alert");
  return {
    node,
    said: said.node,
    update() {
      const models = [...store.models.values()].filter((model) => DOWN.includes(model.state));
      models.sort((a, b) => a.id.localeCompare(b.id));
      keyed(choice, models, (model) => model.id, ({ id }) => ({ node: h("option", { value: id }, id), update() {} }));
      setHidden(node, models.length === 0);
      const hasRow = [...store.runners.values()].some((runner) => runner.model === asked);
      said.update(hasRow ? null : store.notices.get(asked));
    },
  };
}
