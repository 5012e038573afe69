// Pieces that more than one view shows.

import { h, setAttribute, setHidden, setText } from "./dom.js";
import { icon, redraw } from "./icons.js";

/** A state as shape and word; `words` and `shapes` name those that are not called like the state itself. */
export function stateChip(words = {}, shapes = {}) {
  const shape = icon("stopped");
  const word = h("span");
  const node = h("span", { class: "chip" }, shape, word);
  return {
    node,
    update(state) {
      setAttribute(node, "data-state", state);
      redraw(shape, shapes[state] ?? state);
      setText(word, words[state] ?? state);
    },
  };
}

/** A message in its place: `kind` is error, warning or note. Empty text hides it. */
export function message(kind, shape = "warning") {
  const words = h("span", { class: "words" });
  const node = h("div", { class: `message ${kind}`, hidden: true }, icon(shape), words);
  return {
    node,
    update(text) {
      setText(words, text);
      setHidden(node, !text);
    },
  };
}

/** A button that ignores a second press while the first is at work, and keeps focus meanwhile (`disabled` would drop it). */
export function button(label, properties, act) {
  const node = h("button", {
    type: "button",
    ...properties,
    onclick: async () => {
      if (node.getAttribute("aria-disabled") === "true") return;
      setAttribute(node, "aria-disabled", "true");
      try {
        await act();
      } finally {
        setAttribute(node, "aria-disabled", null);
      }
    },
  }, label);
  return node;
}

/** What to do where there is nothing to show. */
export function empty(title, ...body) {
  return h("div", { class: "empty" }, h("h2", {}, title), ...body);
}

export function code(text) {
  return h("code", {}, text);
}

/** A progress bar with its words; `share` null: how far is not known. */
export function progressBar(label) {
  const bar = h("progress", { max: 1, "aria-label": label });
  return {
    node: bar,
    update(share) {
      if (share === null || share === undefined) setAttribute(bar, "value", null);
      else setAttribute(bar, "value", share);
    },
  };
}
