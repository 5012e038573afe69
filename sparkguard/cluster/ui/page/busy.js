// The line under the header while a verb is at work. It stays until the last of its cleanup.

import { h, setHidden, setText } from "/look/dom.js";
import { icon } from "/look/icons.js";
import { button } from "/look/parts.js";
import { duration } from "/look/words.js";
import { post } from "./api.js";
import { store } from "./store.js";
import { wordsOf } from "./events.js";

const VERBS = { up: "Starting", stop: "Stopping", use: "Changing the client", pull: "Preparing", reboot: "Restarting", shutdown: "Shutting down" };

export function busyLine(node) {
  const words = h("span", { class: "words", role: "status" });
  const since = h("span", { class: "quiet number" });
  const cancel = button("Cancel", {}, () => post("/api/actions/interrupt").catch(() => {}));
  const shape = h("span", { class: "chip", "data-state": "starting" }, icon("starting"));
  node.append(h("div", { class: "inner" }, shape, words, since, cancel));
  return {
    update() {
      const { running } = store;
      setHidden(node, running === null, document.querySelector("main"));
      if (!running) return;
      const last = store.activity.at(-1);
      const subject = running.model ?? running.node ?? (running.verb === "reboot" || running.verb === "shutdown" ? "the Sparks" : "");
      setText(words, [`${VERBS[running.verb] ?? running.verb} ${subject}`.trim(), last ? wordsOf(last) : ""].filter(Boolean).join(" · "));
      setText(since, duration(Date.now() / 1000 - running.since));
    },
  };
}
