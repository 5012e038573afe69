// The dashboard's own HTTP. A cookie says who asks.

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function send(path, options = {}) {
  let response;
  try {
    response = await fetch(path, { cache: "no-store", ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "spark-serve ui does not answer. Is it still running?");
  }
  if (response.ok) return response;
  const text = await response.text().catch(() => "");
  let message = `${response.status} ${response.statusText}`;
  try {
    message = JSON.parse(text).error.message ?? message;
  } catch {
    // Not JSON: something in between speaks its own language.
  }
  throw new ApiError(response.status, message);
}

export const get = async (path) => (await send(path)).json();

export const post = async (path, body = {}) =>
  (await send(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) })).json();

/** Reads the feed until it ends. The server sends something every 10 s; `quiet` milliseconds of silence end it. */
export async function follow(onOpen, onMessage, quiet = 25_000) {
  const silence = new AbortController();
  const response = await send("/api/live", { signal: silence.signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let timer;
  const heard = () => {
    clearTimeout(timer);
    timer = setTimeout(() => silence.abort(), quiet);
  };
  try {
    heard();
    await onOpen();
    let rest = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      heard();
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) if (line) onMessage(JSON.parse(line));
    }
  } finally {
    clearTimeout(timer);
    silence.abort();
  }
}
