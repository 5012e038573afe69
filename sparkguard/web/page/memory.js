// Whose memory it is: a device's total in parts, as a bar and in words.

import { h, keyed, setAttribute, setText, setWidth } from "/look/dom.js";
import { bytes, bytesOf } from "/look/words.js";

/**
 * The parts of a device: each runner by its measured size, all other programs, what is free. Unknown sizes leave parts out.
 * Devices of one pool share their memory, so the runners of all of them count.
 */
export function partsOf(device, devices, runners) {
  const pool = device.pool ?? device.id;
  const sharing = new Set(devices.filter((one) => (one.pool ?? one.id) === pool).map((one) => one.id));
  const parts = [];
  let known = 0;
  for (const runner of runners) {
    if (!sharing.has(runner.device) || !runner.memory_bytes) continue;
    parts.push({ id: runner.id, name: runner.model, kind: "runner", bytes: runner.memory_bytes });
    known += runner.memory_bytes;
  }
  if (device.total_bytes === null || device.available_bytes === null) return parts;
  const others = Math.max(0, device.total_bytes - device.available_bytes - known);
  return [
    ...parts,
    { id: " others", name: "everything else", kind: "others", bytes: others },
    { id: " free", name: "free", kind: "free", bytes: device.available_bytes },
  ];
}

export function usedBytes(device) {
  return device.total_bytes === null || device.available_bytes === null ? null : device.total_bytes - device.available_bytes;
}

export function inUse(device) {
  return `${bytesOf(usedBytes(device), device.total_bytes)}${usedBytes(device) === null ? "" : " in use"}`;
}

/** The bar. To the screen reader it is one image with all its numbers. */
export function memoryBar() {
  const node = h("div", { class: "bar stacked", role: "img" });
  return {
    node,
    update(device, parts) {
      const drawn = parts.filter((part) => part.kind !== "free");
      keyed(node, drawn, (part) => part.id, (part) => {
        const piece = h("span", { class: `part ${part.kind}` });
        return { node: piece, update: (now) => setWidth(piece, device.total_bytes ? now.bytes / device.total_bytes : 0) };
      });
      setAttribute(node, "aria-label",
        `${inUse(device)}: ${parts.map((part) => `${part.name} ${bytes(part.bytes)}`).join(", ")}`);
    },
  };
}

/** The parts by name, each with the pattern that it has in the bar. */
export function memoryLegend() {
  const node = h("ul", { class: "legend" });
  return {
    node,
    update(parts) {
      keyed(node, parts, (part) => part.id, (part) => {
        const name = h("span", { class: "name" });
        const size = h("span", { class: "number" });
        return {
          node: h("li", {}, h("span", { class: `swatch ${part.kind}` }), name, size),
          update(now) {
            setText(name, now.name);
            setText(size, bytes(now.bytes));
          },
        };
      });
    },
  };
}
