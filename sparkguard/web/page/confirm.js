// Asks before a kill, and says what it does.

import { button } from "/look/parts.js";
import { h } from "/look/dom.js";

/** True when the kill was confirmed. Focus begins at Cancel, and returns to where it was. */
export function confirmKill(runner) {
  return new Promise((resolve) => {
    const close = button("Cancel", { autofocus: true }, () => dialog.close());
    const confirm = button("Kill the process", { class: "danger" }, () => dialog.close("kill"));
    const dialog = h("dialog", { class: "confirm", "aria-labelledby": "confirm-title", "aria-describedby": "confirm-text" },
      h("h2", { id: "confirm-title" }, `Kill ${runner.model}?`),
      h("p", { id: "confirm-text" },
        "This is the same as a crash. A running request ends with an error, waiting ones are answered once the runner is back: " +
        "it restarts by itself. To stop the model and keep it stopped, unload it instead."),
      h("div", { class: "buttons" }, close, confirm));
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(dialog.returnValue === "kill");
    });
    document.body.append(dialog);
    dialog.showModal();
  });
}
