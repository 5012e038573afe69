// What is known, and since when. Views read it; `changed` asks for one drawing a frame.

import { ApiError, follow, get, post } from "./api.js";

const RETRY_SECONDS = [1, 2, 4, 8, 15];
const SAMPLES = 900;
const ACTIVITY = 1000;

export const store = {
  known: false,
  locked: false, // opened without the key
  connected: false,
  heardAt: null,
  retryAt: null,
  catalog: null,
  status: null,
  statusAt: null, // this machine's clock: a node's may be off by hours
  running: null, // the verb at work
  activity: [],
  samples: [],
  sampleAt: null,
  samplingError: null,
  bench: null, // the benchmark at work
  benchEvent: null,
  benchError: null,
  runs: null, // saved benchmarks
  notices: new Map(), // what was answered to the last thing asked of a card
};

let draw = () => {};
let pending = false;

export function onChange(callback) {
  draw = callback;
}

export function changed() {
  if (pending) return;
  pending = true;
  requestAnimationFrame(() => {
    pending = false;
    draw();
  });
}

/** The newest sample, and how old it is. Old figures are shown as old. */
export const latest = () => store.samples.at(-1) ?? null;
export const sampleAge = () => (store.sampleAt === null ? null : (Date.now() - store.sampleAt) / 1000);
export const isStale = () => {
  const sample = latest();
  return sample !== null && sampleAge() > Math.max(6, 3 * (sample.interval_s ?? 2));
};

function keep(list, item, length) {
  list.push(item);
  if (list.length > length) list.splice(0, list.length - length);
}

async function readAll() {
  const state = await get("/api/state");
  store.catalog = state.catalog;
  takeStatus(state.status);
  store.running = state.running;
  store.activity = state.activity;
  store.samples = state.samples;
  store.sampleAt = null; // from before; the next one is fresh
  store.samplingError = state.sampling_error;
  store.bench = state.bench;
  store.known = true;
  store.connected = true;
  store.retryAt = null;
  changed();
}

function takeStatus(status) {
  if (!status) return;
  store.status = status;
  store.statusAt = Date.now();
}

const APPLY = {
  sample({ sample }) {
    keep(store.samples, { ...sample, received: Date.now() }, SAMPLES);
    store.sampleAt = Date.now();
  },
  sampling: ({ error }) => (store.samplingError = error),
  status: ({ status }) => takeStatus(status),
  busy: ({ running }) => (store.running = running),
  activity({ line }) {
    // An hour's download tells its progress thousands of times; of each node the newest is enough.
    if (line.event === "pull_progress") store.activity = store.activity.filter((old) => old.event !== line.event || old.node !== line.node);
    keep(store.activity, line, ACTIVITY);
  },
  bench_event: ({ event }) => (store.benchEvent = event),
  bench({ running, error }) {
    if (store.bench && !running) readRuns();
    store.bench = running;
    store.benchError = error;
    store.benchEvent = null;
  },
  beat: () => {},
};

export async function readRuns() {
  try {
    store.runs = (await get("/api/bench")).runs;
  } catch (error) {
    store.benchError = error.message;
    store.runs ??= [];
  }
  changed();
}

/** Asks for a verb; what is wrong with it is told at the card that asked. That it runs and has ended is the feed's to tell, in
 * this order: the answer may come after both. */
export async function act(place, body) {
  store.notices.delete(place);
  try {
    await post("/api/actions", body);
  } catch (error) {
    store.notices.set(place, error.message);
  }
  changed();
}

let wakeUp = () => {};
export const wake = () => wakeUp();

const wait = (milliseconds) =>
  new Promise((resolve) => {
    const timer = setTimeout(resolve, milliseconds);
    wakeUp = () => {
      clearTimeout(timer);
      resolve();
    };
  });

/** Stays connected for as long as the page is open. The feed is opened first, so nothing falls in between. */
export async function connect() {
  addEventListener("online", wake);
  let tries = 0;
  for (;;) {
    try {
      await follow(readAll, (message) => {
        store.heardAt = Date.now();
        APPLY[message.type]?.(message);
        changed();
      });
    } catch (error) {
      if (error instanceof ApiError && error.status === 401) {
        store.locked = true;
        changed();
        return;
      }
      if (!(error instanceof ApiError) && error.name !== "AbortError" && error.name !== "TypeError") console.error(error);
    }
    if (store.connected) tries = 0;
    store.connected = false;
    store.heardAt ??= Date.now();
    const seconds = RETRY_SECONDS[Math.min(tries, RETRY_SECONDS.length - 1)];
    tries += 1;
    store.retryAt = Date.now() + seconds * 1000;
    changed();
    await wait(seconds * 1000);
  }
}
