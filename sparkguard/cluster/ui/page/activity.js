// Everything that the verbs have said, newest at the end.

import { h, setText } from "/look/dom.js";
import { clock, plural } from "/look/words.js";
import { levelOf, timeOf, wordsOf } from "./events.js";
import { store } from "./store.js";

export function activityLog(node) {
  const count = h("span", { class: "quiet" });
  const list = h("ol", { class: "lines", tabindex: "0", "aria-label": "Activity log" });
  const details = h("details", {}, h("summary", {}, h("h2", {}, "Activity"), count), list);
  node.append(details);
  let last = null;
  return {
    update() {
      const newest = store.activity.at(-1) ?? null;
      if (newest === last) return;
      if (newest?.event === "begin" && last !== null) details.open = true;
      const atEnd = list.scrollHeight - list.scrollTop - list.clientHeight < 24;
      list.replaceChildren(
        ...store.activity.map((event) =>
          h("li", { class: "entry", "data-level": levelOf(event) || null },
            h("time", { class: "quiet number" }, Number.isNaN(timeOf(event)) ? "" : clock(timeOf(event))),
            h("span", { class: "words" }, wordsOf(event)))));
      if (atEnd || last === null) list.scrollTop = list.scrollHeight;
      last = newest;
      setText(count, plural(store.activity.length, "line"));
    },
  };
}
