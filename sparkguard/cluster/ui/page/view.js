// What the views show, from the last status and the newest sample. The sample is newer, the status knows more; a stale one is unknown.

import { isStale, latest, store } from "./store.js";

export const isBusy = () => store.running !== null;

const labelOf = (id) => store.catalog?.models?.find((model) => model.id === id)?.label ?? id;

/** One entry for each endpoint. */
export function allocationsOf() {
  const sample = latest();
  const live = new Map((sample?.allocations ?? []).map((one) => [keyOf(one.model, one.nodes), one]));
  const found = new Map();
  for (const node of store.status?.nodes ?? []) {
    if (!node.model || node.mode === "yue") continue;
    // The nodes of a distributed model are one endpoint; an independent one has its own.
    const key = node.mode === "distributed" ? `${node.model}@all` : `${node.model}@${node.node}`;
    const entry = found.get(key) ?? { model: node.model, nodes: [], ranks: [], mode: node.mode, url: null, state: node.phase, error: null, can_use: false };
    entry.nodes.push(node.node);
    entry.ranks.push({ node: node.node, state: node.state ?? "unknown" });
    entry.url ??= node.url;
    entry.error ??= node.error;
    entry.can_use ||= node.can_use === true;
    entry.state = worse(entry.state, node.phase);
    found.set(key, entry);
  }
  for (const one of sample?.allocations ?? []) {
    const exists = [...found.values()].some((entry) => keyOf(entry.model, entry.nodes) === keyOf(one.model, one.nodes));
    if (!exists) found.set(keyOf(one.model, one.nodes), { ...one, can_use: one.state === "ready" });
  }
  return [...found.values()].map((entry) => {
    const now = live.get(keyOf(entry.model, entry.nodes));
    const old = isStale();
    return {
      ...entry,
      key: keyOf(entry.model, entry.nodes),
      label: now?.label ?? labelOf(entry.model),
      placement: placementOf(entry.nodes),
      ranks: now?.ranks?.length ? now.ranks : entry.ranks,
      state: old ? "stale" : (now?.state ?? entry.state ?? "unknown"),
      url: now?.url ?? entry.url,
      error: now?.error ?? entry.error,
      engine: now?.engine ?? null,
      canary: now?.canary ?? null,
      slow_fabric: now?.slow_fabric ?? false,
    };
  });
}

const keyOf = (model, nodes) => `${model}@${[...(nodes ?? [])].sort().join("+")}`;

/** For --node. Of three Sparks "both" means all three. */
const placementOf = (nodes) => (nodes.length > 1 && nodes.length === store.catalog?.nodes?.length ? "both" : nodes.join(","));

const ORDER = ["failed", "unknown", "draining", "starting", "stopped", "ready"];
const worse = (first, second) => (ORDER.indexOf(first) < ORDER.indexOf(second) ? first : second);

export function nodesOf() {
  const sampled = new Map((latest()?.nodes ?? []).map((node) => [node.node, node]));
  const named = store.catalog?.nodes ?? store.status?.nodes ?? [];
  const told = new Map((store.status?.nodes ?? []).map((node) => [node.node, node]));
  return named.map(({ node, host }) => {
    const live = sampled.get(node);
    return {
      node, host,
      ...(live ?? {}),
      sampled: live !== undefined && live.state !== "unknown",
      state: isStale() ? "stale" : (live?.state ?? (told.get(node)?.error ? "unknown" : told.has(node) ? "ok" : "unknown")),
      error: live?.error ?? told.get(node)?.error ?? null,
    };
  });
}

/** Song workers: a sample's know their jobs; before the first one, and while there is none, the status tells what is ready. */
export function yueOf() {
  const sampled = latest()?.yue;
  if (sampled?.length) return sampled;
  if (store.status?.mode !== "yue" && store.status?.mode !== "mixed") return [];
  return (store.status.yue_workers ?? []).map((worker) => ({ ...worker, worker: worker.id, error: worker.reason, state: worker.ready ? "ready" : worker.accepting === false ? "draining" : "unknown" }));
}
