// Questions before what cannot be undone, and the sheet for the sudo password.

import { h } from "/look/dom.js";
import { button } from "/look/parts.js";

let titles = 0;

/** Resolves to null when it was cancelled, else to the values of its inputs. Focus begins at Cancel or the first input. */
export function question({ title, text, confirm, danger = true, inputs = [] }) {
  return new Promise((resolve) => {
    const id = `question-${(titles += 1)}`;
    const fields = inputs.map(({ name, label, type, note }) => {
      const input = h("input", { id: `${id}-${name}`, name, type, autocomplete: "off", autofocus: true, "aria-describedby": note ? `${id}-${name}-note` : null });
      return { name, input, node: h("div", { class: "field" }, h("label", { for: `${id}-${name}` }, label), input, note ? h("p", { class: "quiet", id: `${id}-${name}-note` }, note) : "") };
    });
    const form = h("form", { method: "dialog", class: "plain-form" },
      h("h2", { id }, title), h("p", { id: `${id}-text` }, text), ...fields.map((field) => field.node),
      h("div", { class: "buttons" },
        button("Cancel", fields.length ? {} : { autofocus: true }, () => dialog.close()),
        h("button", { type: "submit", class: danger ? "danger" : "primary", value: "yes" }, confirm)));
    const dialog = h("dialog", { class: "confirm", "aria-labelledby": id, "aria-describedby": `${id}-text` }, form);
    dialog.addEventListener("close", () => {
      const values = Object.fromEntries(fields.map((field) => [field.name, field.input.value]));
      for (const field of fields) field.input.value = "";
      dialog.remove();
      resolve(dialog.returnValue === "yes" ? values : null);
    });
    document.body.append(dialog);
    dialog.showModal();
  });
}

/** For reboot and shutdown: the password is used once and kept nowhere. */
export function sudoSheet(title, text, confirm) {
  return question({
    title, text, confirm,
    inputs: [{ name: "password", label: "sudo password of the Sparks", type: "password",
      note: "Leave it empty where sudo needs none for systemctl. It goes to spark-serve's standard input for this one call, and is stored nowhere." }],
  });
}
