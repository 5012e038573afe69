// A figure with its bar.

import { h, setAttribute, setHidden, setText, setWidth } from "/look/dom.js";

export function meter(label) {
  const figure = h("span", { class: "number" });
  const part = h("span", { class: "part shade-0" });
  const bar = h("div", { class: "bar", "aria-hidden": "true" }, part);
  const node = h("div", { class: "meter" }, h("div", { class: "line" }, h("span", { class: "quiet" }, label), figure), bar);
  return {
    node,
    /** `share` null: unknown, and then there is no bar. */
    update(text, share, warns = false) {
      setText(figure, text);
      setHidden(part, share === null || share === undefined);
      setAttribute(part, "data-warns", warns || null);
      if (share !== null && share !== undefined) setWidth(part, share);
    },
  };
}

/** Names and figures, one a line; `update` takes the figures in their order. */
export function facts(...names) {
  const values = names.map(() => h("dd"));
  const node = h("dl", { class: "facts" }, ...names.map((name, index) => h("div", {}, h("dt", {}, name), values[index])));
  return { node, update: (...texts) => values.forEach((value, index) => setText(value, texts[index] ?? "–")) };
}
