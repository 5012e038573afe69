// A model's settings as a form. What is typed survives live updates; what the supervisor objects to stands at its field.

import { patch } from "./api.js";
import { h, setAttribute, setHidden, setText } from "/look/dom.js";
import { fail, refresh, store } from "./store.js";

const KV_TYPES = ["f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1"];

// key, label, how it is edited, what it means
const FIELDS = [
  ["device", "Device", "choice", "Where it runs."],
  ["context", "Context", "whole", "Tokens, of all sequences together. 0: what the model was trained for."],
  ["parallel", "Requests at a time", "whole", "Each gets its part of the context."],
  ["threads", "CPU threads", "whole", "0: all cores of the CPU share."],
  ["kv_type", "KV cache type", "choice", "A smaller type makes room, at some cost in quality."],
  ["unload_when_idle", "Unloaded when idle", "check", "Off: it stays loaded, and is the last to make room."],
  ["aliases", "Aliases", "lines", "Further names of the model. One a line."],
  ["file", "File", "text", "A path, absolute or below MODELS_DIR. Empty: the file that the name says."],
  ["projector", "Projector", "file", "File of the vision or audio part; none: not even the one beside the model."],
  ["draft", "Draft model", "text", "File of a small model that guesses ahead."],
  ["lora", "LoRA adapters", "lines", "One file a line."],
  ["args", "Engine arguments", "lines", "One a line, passed on as they are."],
];

/** How each kind of field shows a value, and reads it; null is the default. */
const KINDS = {
  choice: { show: (value) => value ?? "", read: (text) => text || null },
  text: { show: (value) => value ?? "", read: (text) => text.trim() || null },
  file: { show: (value) => (value === false ? "none" : value ?? ""), read: (text) => (text.trim() === "none" ? false : text.trim() || null) },
  whole: { show: (value) => (value === null || value === undefined ? "" : String(value)), read: whole },
  lines: {
    show: (value) => (Array.isArray(value) ? value : value ? [value] : []).join("\n"),
    read: (text) => text.split("\n").map((line) => line.trim()).filter(Boolean),
  },
};

function whole(text) {
  const digits = text.trim();
  if (digits === "") return null;
  if (!/^\d+$/.test(digits)) throw new RangeError("This has to be a whole number, or empty for the default.");
  return Number(digits);
}

export function settingsForm(id) {
  const fields = FIELDS.map((field) => fieldOf(...field));
  const save = h("button", { type: "submit", class: "primary" }, "Save");
  const undo = h("button", { type: "button" }, "Undo changes");
  const status = h("p", { class: "quiet", role: "status" });
  const form = h("form", { novalidate: true }, ...fields.map((field) => field.node), h("div", { class: "buttons" }, save, undo), status);
  let known = {};
  let loaded = false;
  let saving = false;

  const dirty = () => fields.some((field) => field.dirty());
  const redraw = () => {
    setAttribute(save, "aria-disabled", saving || !dirty());
    setAttribute(undo, "aria-disabled", saving || !dirty());
  };
  const fill = (settings, all) => {
    for (const field of fields) if (all || !field.dirty()) field.fill(settings[field.key]);
    redraw();
  };

  form.addEventListener("input", () => {
    setText(status, "");
    redraw();
  });
  undo.addEventListener("click", () => {
    for (const field of fields) field.object(null);
    fill(known, true);
  });
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (saving || !dirty()) return;
    const changes = {};
    let wrong = null;
    for (const field of fields) {
      field.object(null);
      if (!field.dirty()) continue;
      try {
        changes[field.key] = field.read();
      } catch (error) {
        field.object(error.message);
        wrong ??= field;
      }
    }
    if (wrong) return wrong.focus();
    saving = true;
    redraw();
    try {
      const model = await patch(id, changes);
      if (model?.id) store.models.set(id, model);
      else await refresh();
      known = store.models.get(id)?.settings ?? known;
      fill(known, true);
      // A name counts at once.
      const later = loaded && Object.keys(changes).some((key) => key !== "aliases");
      setText(status, later ? "Saved. It holds from the next load on." : "Saved.");
    } catch (error) {
      fail(error);
      const field = fields.find((one) => one.key === error.param);
      if (field) {
        field.object(error.message);
        field.focus();
      } else {
        setText(status, error.message);
      }
    } finally {
      saving = false;
      redraw();
    }
  });

  return {
    node: form,
    update(model) {
      loaded = ["starting", "ready", "draining"].includes(model.state);
      if (saving) return;
      known = model.settings ?? {};
      fill(known, false);
    },
  };
}

function fieldOf(key, label, kind, meaning) {
  const control = controlOf(key, kind);
  const help = h("p", { id: `${key}-help`, class: "quiet" }, meaning);
  const wrong = h("p", { id: `${key}-wrong`, class: "wrong", hidden: true });
  const name = h("label", { for: key }, label);
  setAttribute(control, "aria-describedby", `${key}-help ${key}-wrong`);
  const node = h("div", { class: `field ${kind}` }, name, control, help, wrong);
  const value = () => (kind === "check" ? control.checked : control.value);
  let filled = value();
  return {
    key,
    node,
    read: () => (kind === "check" ? control.checked : KINDS[kind].read(control.value)),
    dirty: () => value() !== filled,
    focus: () => control.focus(),
    fill(setting) {
      if (kind === "choice") offer(control, key, setting);
      const shown = kind === "check" ? setting !== false : KINDS[kind].show(setting);
      if (shown !== value()) {
        if (kind === "check") control.checked = shown;
        else control.value = shown;
      }
      filled = value();
    },
    /** Says what is wrong with the value; null takes it back. */
    object(text) {
      setText(wrong, text);
      setHidden(wrong, !text);
      setAttribute(control, "aria-invalid", text ? "true" : null);
    },
  };
}

function controlOf(key, kind) {
  const common = { id: key, name: key, autocomplete: "off" };
  if (kind === "choice") return h("select", common);
  if (kind === "check") return h("input", { ...common, type: "checkbox" });
  if (kind === "lines") return h("textarea", { ...common, rows: 2, spellcheck: "false" });
  const number = kind === "whole" ? { inputmode: "numeric", placeholder: "default" } : {};
  return h("input", { ...common, ...number, type: "text", spellcheck: "false" });
}

/** The choices of a select, the present one among them even where this page does not know it. */
function offer(select, key, present) {
  const values = key === "kv_type" ? KV_TYPES : ["auto", "cpu", "cuda", ...store.devices.map((device) => device.id)];
  const wanted = [...new Set(["", ...values, present ?? ""])];
  if (wanted.join() === [...select.options].map((option) => option.value).join()) return;
  const chosen = select.value;
  select.replaceChildren(...wanted.map((value) => h("option", { value }, value || "default")));
  select.value = chosen;
}
