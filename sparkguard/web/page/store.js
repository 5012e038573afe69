// What is known of the supervisor, and since when. Views read it; `changed` asks for one drawing a frame.

import { ApiError, forgetKey, hasKey, lines, list, QUIET_MILLISECONDS } from "./api.js";

const RETRY_SECONDS = [1, 2, 4, 8, 15];

export const store = {
  models: new Map(),
  runners: new Map(),
  devices: [],
  warning: null, // about the list of models: that not all of the folder was looked at
  known: false, // something was read, so that an empty list is an empty list
  connected: false,
  locked: false, // a key is wanted
  keyRefused: false,
  heardAt: null, // milliseconds: what is shown is from then
  retryAt: null,
  notices: new Map(), // model -> what the supervisor said to the last thing asked of it
};

let draw = () => {};
let pending = false;

export function onChange(callback) {
  draw = callback;
}

/** Draws before the next frame, however often it is called. */
export function changed() {
  if (pending) return;
  pending = true;
  // A hidden tab has no frames; it is drawn when it is looked at.
  requestAnimationFrame(() => {
    pending = false;
    draw();
  });
}

export function notice(model, text) {
  if (text) store.notices.set(model, text);
  else store.notices.delete(model);
  changed();
}

const byId = (rows) => new Map(rows.map((row) => [row.id, row]));

function take({ models, warning, runners, devices }) {
  store.models = byId(models);
  store.runners = byId(runners);
  store.warning = warning;
  store.devices = devices;
  store.known = true;
  changed();
}

async function readAll() {
  const lists = await Promise.all([list("models"), list("runners"), list("devices")]);
  take(Object.assign({}, ...lists));
}

let reading = null;
let again = false;

/** Reads the lists anew; calls that come meanwhile share one more reading after it. */
export function refresh() {
  if (reading) {
    again = true;
    return reading;
  }
  reading = readAll().finally(() => {
    reading = null;
    if (again) {
      again = false;
      refresh().catch(fail);
    }
  });
  return reading;
}

// A model's file is gone; a runner in these states has no process, and waits for no restart.
const GONE = { model: ["removed"], runner: ["stopped", "failed"] };

/** An event about one model or runner is that whole. One that this page does not know makes it read the lists. */
function apply({ type, ...event }) {
  const rows = { model: store.models, runner: store.runners }[type];
  if (type === "snapshot") {
    take(event);
    store.connected = true;
    store.retryAt = null;
  } else if (rows && event.id && event.state) {
    if (GONE[type].includes(event.state)) rows.delete(event.id);
    else rows.set(event.id, event);
  } else if (type === "queue") {
    const model = store.models.get(event.model);
    if (model) model.queue = event.queue;
    const runner = store.runners.get(event.model); // a runner is called as its model is
    if (runner) runner.queue = event.queue;
  } else if (type === "library") {
    store.warning = event.warning;
  } else if (type === "devices") {
    store.devices = event.devices;
  } else if (type !== "log") {
    refresh().catch(fail);
  }
  changed();
}

/** A request failed. Only the key changes what the whole page shows; the rest is told where it was asked. */
export function fail(error) {
  if (!(error instanceof ApiError)) console.error(error); // a fault of this page's own
  else if (error.status === 401 && !store.locked) {
    store.keyRefused = hasKey();
    forgetKey();
    store.locked = true;
    store.known = false;
    wake();
    changed();
  }
}

let wakeUp = () => {};

/** Ends the wait between two tries. */
export function wake() {
  wakeUp();
}

const wait = (milliseconds) =>
  new Promise((resolve) => {
    const timer = setTimeout(resolve, milliseconds);
    wakeUp = () => {
      clearTimeout(timer);
      resolve();
    };
  });

const unlocked = () =>
  new Promise((resolve) => {
    wakeUp = () => store.locked || resolve();
  });

/** Follows the events until the stream ends. Its first event is everything as it is, so nothing falls in between. */
async function listen() {
  await lines("/api/events", {
    signal: new AbortController().signal,
    quiet: QUIET_MILLISECONDS,
    onLines(received) {
      store.heardAt = Date.now();
      for (const line of received) if (line.startsWith("data:")) apply(JSON.parse(line.slice(5)));
    },
  });
}

/** Stays connected for as long as the page is open. */
export async function connect() {
  addEventListener("online", wake);
  let tries = 0;
  for (;;) {
    try {
      await listen();
    } catch (error) {
      fail(error);
    }
    if (store.connected) tries = 0;
    store.connected = false;
    store.heardAt ??= Date.now();
    changed();
    if (store.locked) {
      await unlocked();
      continue;
    }
    const seconds = RETRY_SECONDS[Math.min(tries, RETRY_SECONDS.length - 1)];
    tries += 1;
    store.retryAt = Date.now() + seconds * 1000;
    changed();
    await wait(seconds * 1000);
  }
}
