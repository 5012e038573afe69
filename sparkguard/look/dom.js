// The little that is needed of a DOM library: make a node, write only what changed, keep a list in step with its data.

/** A node. `on…` properties are listeners, `true` is an empty attribute, null and false are left out. */
export function h(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children);
  return node;
}

/** Writes text only where it differs: selection, focus and the screen reader stay undisturbed by a live update. */
export function setText(node, value) {
  const text = String(value ?? "");
  if (node.textContent !== text) node.textContent = text;
}

/** Sets an attribute where it differs; null takes it away. True and false are words, as ARIA has them. */
export function setAttribute(node, name, value) {
  const wanted = value === null || value === undefined ? null : String(value);
  if (node.getAttribute(name) === wanted) return;
  if (wanted === null) node.removeAttribute(name);
  else node.setAttribute(name, wanted);
}

/** Hides a node. Focus that was in it goes to `heir`, since the browser would drop it to the top of the page. */
export function setHidden(node, hidden, heir) {
  if (node.hidden === hidden) return;
  const held = hidden && node.contains(document.activeElement);
  node.hidden = hidden;
  if (held) heir?.focus();
}

/** A width through the CSSOM: the page's policy forbids style attributes. */
export function setWidth(node, share) {
  const width = `${(Math.min(1, Math.max(0, share)) * 100).toFixed(2)}%`;
  if (node.style.width !== width) node.style.width = width;
}

const ROWS = new WeakMap();
const OWNED = new WeakSet();

/**
 * Makes the children of `parent` those of `items`, in order. `make(item)` returns {node, update(item)} for a new key.
 * Nodes of a key are kept, so focus, selection and running transitions survive. Focus in a node that goes moves to the
 * next one's first control, else to `heir`. What stands in `parent` before the first of them, a table's head, stays there.
 */
export function keyed(parent, items, key, make, heir) {
  const rows = ROWS.get(parent) ?? new Map();
  ROWS.set(parent, rows);
  const wanted = new Map(items.map((item) => [key(item), item]));
  for (const [id, row] of rows) {
    if (wanted.has(id)) continue;
    const held = row.node.contains(document.activeElement);
    const next = row.node.nextElementSibling ?? row.node.previousElementSibling;
    row.node.remove();
    rows.delete(id);
    if (held) (next?.querySelector("button:not([hidden]), a") ?? heir)?.focus();
  }
  let place = parent.firstElementChild;
  while (place && !OWNED.has(place)) place = place.nextElementSibling;
  for (const [id, item] of wanted) {
    let row = rows.get(id);
    if (!row) {
      row = make(item);
      rows.set(id, row);
      OWNED.add(row.node);
    }
    row.update(item);
    if (row.node === place) place = place.nextElementSibling;
    else parent.insertBefore(row.node, place);
  }
}
