// The supervisor's HTTP. Streams are read with fetch: an EventSource could not send the key.

const KEY = "sparkguard-api-key";
// The supervisor sends something at least every 10 s. Two and a half of that in silence, and the connection is dead.
export const QUIET_MILLISECONDS = 25_000;

export class ApiError extends Error {
  constructor(status, message, param = null) {
    super(message);
    this.status = status;
    this.param = param; // the setting that the message is about
  }
}

export function setKey(key) {
  sessionStorage.setItem(KEY, key);
}

export function hasKey() {
  return sessionStorage.getItem(KEY) !== null;
}

export function forgetKey() {
  sessionStorage.removeItem(KEY);
}

async function send(path, options = {}) {
  const key = sessionStorage.getItem(KEY);
  const headers = { ...options.headers, ...(key === null ? {} : { Authorization: `Bearer ${key}` }) };
  let response;
  try {
    response = await fetch(path, { cache: "no-store", ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The supervisor cannot be reached.");
  }
  if (!response.ok) throw await failure(response);
  return response;
}

async function failure(response) {
  const text = await response.text().catch(() => "");
  try {
    const { error } = JSON.parse(text);
    if (error?.message) return new ApiError(response.status, error.message, error.param ?? null);
  } catch {
    // Not JSON: a proxy in between speaks its own language.
  }
  return new ApiError(response.status, text.slice(0, 500) || `${response.status} ${response.statusText}`);
}

/** A list, which stands under its name, and what else is told with it. */
export async function list(name) {
  return (await send(`/api/${name}`)).json();
}

/** A segment of a path: an id may hold a slash. */
const segment = encodeURIComponent;

export const load = (id) => send(`/api/models/${segment(id)}/load`, { method: "POST" });
export const unload = (id) => send(`/api/models/${segment(id)}/unload`, { method: "POST" });
export const kill = (id) => send(`/api/runners/${segment(id)}/kill`, { method: "POST" });

export async function patch(id, changes) {
  const response = await send(`/api/models/${segment(id)}`, {
    method: "PATCH",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(changes),
  });
  return response.status === 204 ? null : response.json();
}

export const logPath = (id) => `/api/runners/${segment(id)}/log?follow=1`;

function cut(error) {
  throw error instanceof ApiError || error.name === "AbortError" ? error : new ApiError(0, "The connection was cut.");
}

/**
 * Reads a stream line by line until it ends. `onOpen` is called with the first answer, `onLines` with each batch, whole lines
 * only. Silence of `quiet` milliseconds ends it with an error. Memory stays bounded by the longest line.
 */
export async function lines(path, { signal, onOpen, onLines, quiet }) {
  const silence = new AbortController();
  const response = await send(path, { signal: AbortSignal.any([signal, silence.signal]) });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let timer;
  const heard = () => {
    clearTimeout(timer);
    if (quiet) timer = setTimeout(() => silence.abort(new ApiError(0, "The connection went silent.")), quiet);
  };
  try {
    heard();
    onOpen?.();
    let rest = "";
    for (;;) {
      const { done, value } = await reader.read().catch(cut);
      if (done) break;
      heard();
      const parts = (rest + value).split(/\r?\n/);
      rest = parts.pop();
      onLines(parts);
    }
    if (rest) onLines([rest]);
  } finally {
    clearTimeout(timer);
  }
}
