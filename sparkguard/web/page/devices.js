// The devices: as a strip above the runners, and in full.

import { h, keyed, setAttribute, setHidden, setText } from "/look/dom.js";
import { inUse, memoryBar, memoryLegend, partsOf, usedBytes } from "./memory.js";
import { message } from "/look/parts.js";
import { store } from "./store.js";
import { bytesOf } from "/look/words.js";

const KINDS = { cpu: "CPU", cuda: "CUDA" };

/** Whose the device's memory is: devices of one pool share it. */
function memoryOf(device) {
  const sharing = store.devices.filter((other) => other.id !== device.id && other.pool === device.pool);
  return sharing.length ? `shared with ${sharing.map((other) => other.id).join(", ")}` : "its own";
}

/** One line a device: whose memory is how full. */
export function deviceStrip() {
  const list = h("ul", { class: "strip" });
  const node = h("section", { "aria-label": "Devices" }, list);
  return {
    node,
    update() {
      setHidden(node, store.devices.length === 0);
      keyed(list, store.devices, (device) => device.id, () => {
        const id = h("a", { href: "#/devices" });
        const name = h("span", { class: "quiet name" });
        const use = h("span", { class: "number" });
        const bar = memoryBar();
        const card = h("li", {}, h("div", { class: "line" }, id, name, use), bar.node);
        return {
          node: card,
          update(device) {
            setText(id, device.id);
            setText(name, device.usable ? device.name : "not usable");
            setText(use, bytesOf(usedBytes(device), device.total_bytes));
            setAttribute(card, "data-usable", device.usable);
            bar.update(device, partsOf(device, store.devices, store.runners.values()));
          },
        };
      });
    },
  };
}

export function devicesView() {
  const title = h("h1", { tabindex: -1 }, "Devices");
  const cards = h("div", { class: "cards" });
  const node = h("section", { "aria-label": "Devices" }, h("header", { class: "head" }, title), cards);
  return {
    node,
    title,
    update() {
      keyed(cards, store.devices, (device) => device.id, deviceCard, title);
    },
  };
}

function deviceCard() {
  const id = h("h2");
  const name = h("p", { class: "quiet" });
  const use = h("p", { class: "figure number" });
  const bar = memoryBar();
  const legend = memoryLegend();
  const reason = message("warning");
  const facts = { kind: h("dd"), memory: h("dd"), capability: h("dd"), usable: h("dd"), uuid: h("dd", { class: "mono" }) };
  const capabilityRow = h("div", {}, h("dt", {}, "Compute capability"), facts.capability);
  const uuidRow = h("div", {}, h("dt", {}, "UUID"), facts.uuid);
  const node = h("article", { class: "card" },
    h("header", {}, h("div", {}, id, name), use), bar.node, legend.node, reason.node,
    h("dl", { class: "facts" },
      h("div", {}, h("dt", {}, "Kind"), facts.kind),
      h("div", {}, h("dt", {}, "Memory"), facts.memory), capabilityRow,
      h("div", {}, h("dt", {}, "Runners may use it"), facts.usable), uuidRow));
  return {
    node,
    update(device) {
      const parts = partsOf(device, store.devices, store.runners.values());
      setText(id, device.id);
      setText(name, device.name);
      setText(use, inUse(device));
      bar.update(device, parts);
      legend.update(parts);
      reason.update(device.usable ? null : device.reason);
      setText(facts.kind, KINDS[device.kind] ?? device.kind);
      setText(facts.memory, memoryOf(device));
      setText(facts.capability, device.compute_capability);
      setHidden(capabilityRow, !device.compute_capability);
      setText(facts.usable, device.usable ? "yes" : "no");
      setText(facts.uuid, device.uuid);
      setHidden(uuidRow, !device.uuid);
    },
  };
}
