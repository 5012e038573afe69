// A runner's log, in a drawer. Followed as it is written; the page keeps the last lines only, however fast they come.

import { lines, logPath } from "./api.js";
import { h, setAttribute, setHidden, setText } from "/look/dom.js";
import { icon } from "/look/icons.js";
import { stateChip } from "/look/parts.js";
import { fail, store } from "./store.js";
import { count } from "/look/words.js";
import { STATES, stateOf } from "./words.js";

export const MOST_LINES = 2000;
const LINE = /^(error|warning|warn|info|debug|trace): ([^:]{1,40}): (.*)$/s;
const RETRY_MILLISECONDS = 2000;

let open = null;

/** Opens the drawer. Escape closes it, and focus returns to where it was. */
export function showLog(runner) {
  open?.close();
  open = drawer(runner);
}

/** Draws what the page's live data says about the runner. */
export function updateLog() {
  open?.update();
}

function drawer(id) {
  const model = store.runners.get(id)?.model ?? id;
  const stop = new AbortController();
  const state = stateChip(STATES);
  const pause = h("button", { type: "button", "aria-pressed": "false" }, "Pause");
  const close = h("button", { type: "button", class: "bare", "aria-label": "Close the log" }, icon("close"));
  const status = h("p", { class: "quiet", role: "status" });
  const newest = h("button", { type: "button", class: "newest", hidden: true }, "Newest lines");
  // No live region: a log read aloud line by line says nothing. It can be focused, so that the keyboard scrolls it.
  const output = h("div", { class: "log-lines", tabindex: 0, role: "region", "aria-label": `Log lines of ${model}` });
  const dialog = h("dialog", { class: "log", "aria-labelledby": "log-title" },
    h("div", { class: "head" }, h("h2", { id: "log-title" }, `Log of ${model}`), state.node, h("div", { class: "buttons" }, pause, close)),
    output, h("div", { class: "foot" }, status, newest));

  let held = []; // lines not drawn yet
  let dropped = 0;
  let paused = false;
  let scheduled = false;
  let following = true;

  const atEnd = () => output.scrollHeight - output.scrollTop - output.clientHeight < 24;
  const toEnd = () => { output.scrollTop = output.scrollHeight; };

  const say = () => {
    const waiting = paused && held.length ? `${count(held.length)} more ${held.length === 1 ? "line" : "lines"} since the pause. ` : "";
    setText(status, waiting + (dropped ? `The last ${count(MOST_LINES)} lines are kept; ${count(dropped)} older ones are not shown.` : ""));
  };

  const draw = () => {
    scheduled = false;
    if (!paused && held.length) {
      const over = Math.max(0, output.childElementCount + held.length - MOST_LINES);
      output.append(...held.map(lineOf));
      held = [];
      for (let i = 0; i < over; i += 1) output.firstElementChild.remove();
      dropped += over;
      if (following) toEnd();
    }
    setHidden(newest, following, output);
    say();
  };
  const schedule = () => {
    if (scheduled) return;
    scheduled = true;
    requestAnimationFrame(draw);
  };
  const take = (received) => {
    held.push(...received.filter((line) => line !== ""));
    if (held.length > MOST_LINES) {
      dropped += held.length - MOST_LINES;
      held = held.slice(-MOST_LINES);
    }
    schedule();
  };

  pause.addEventListener("click", () => {
    paused = !paused;
    setAttribute(pause, "aria-pressed", paused);
    schedule();
  });
  output.addEventListener("scroll", () => {
    following = atEnd();
    setHidden(newest, following, output);
  });
  newest.addEventListener("click", () => {
    following = true;
    toEnd();
    setHidden(newest, true, output);
  });
  close.addEventListener("click", () => dialog.close());
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close()); // the backdrop
  dialog.addEventListener("close", () => {
    stop.abort();
    dialog.remove();
    open = null;
  });

  /** Reads the log until the drawer is closed; after a cut it begins again, with the lines that the supervisor kept. */
  async function follow() {
    while (!stop.signal.aborted) {
      try {
        await lines(logPath(id), {
          signal: stop.signal,
          onOpen() {
            output.replaceChildren();
            held = [];
            dropped = 0;
            schedule();
          },
          onLines: take,
        });
              } catch (error) {
        if (stop.signal.aborted) return;
        fail(error);
        setText(status, error.status === 404 ? "There is no log: no runner of it has been started." : `${error.message} Trying again.`);
        if (error.status === 404) return;
        if (error.status === 401) return dialog.close();
      }
      await new Promise((resolve) => setTimeout(resolve, RETRY_MILLISECONDS));
    }
  }

  const update = () => {
    const shown = store.runners.get(id) ?? store.models.get(id); // a model that failed has a log, and no runner
    state.update(shown ? stateOf(shown) : "stopped");
  };
  update();
  document.body.append(dialog);
  dialog.showModal();
  output.focus();
  follow();
  return { update, close: () => dialog.close() };
}

/** "level: category: message" in three columns; what is not so written stays whole. */
function lineOf(text) {
  const [, level, category, words] = LINE.exec(text) ?? [];
  if (!level) return h("div", { class: "entry" }, h("span", { class: "words whole" }, text));
  return h("div", { class: "entry", "data-level": level === "warn" ? "warning" : level },
    h("span", { class: "level" }, level), h("span", { class: "category" }, category), h("span", { class: "words" }, words));
}
