// Numbers and states in words. MB is 2^20 bytes and GB 2^30, as in the supervisor's own texts.

const MB = 2 ** 20;
const GB = 2 ** 30;
const WHOLE = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const TENTH = new Intl.NumberFormat("en", { minimumFractionDigits: 1, maximumFractionDigits: 1 });
const SHORT = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

export const STATES = {
  stopped: "Stopped",
  starting: "Starting",
  ready: "Ready",
  busy: "Busy",
  draining: "Draining",
  stopping: "Stopping",
  backoff: "Backing off",
  failed: "Failed",
};

/** States without a process: Load is what can be asked for. */
export const DOWN = ["stopped", "failed", "backoff"];

/** Unknown is a dash, never a zero. */
export const UNKNOWN = "–";

/** MB, in which the supervisor words its arithmetic, until the figures get too long to read. */
export function bytes(amount) {
  if (amount === null || amount === undefined) return UNKNOWN;
  return amount < 100 * GB ? `${WHOLE.format(Math.ceil(amount / MB))} MB` : `${TENTH.format(amount / GB)} GB`;
}

/** "57.2 of 119.7 GB": the unit once. */
export function bytesOf(part, whole) {
  if (whole === null || whole === undefined) return bytes(part);
  if (part === null || part === undefined) return bytes(whole);
  const [unit, name, format] = whole < 10 * GB ? [MB, "MB", WHOLE] : [GB, "GB", TENTH];
  return `${format.format(part / unit)} of ${format.format(whole / unit)} ${name}`;
}

export function count(number) {
  return number === null || number === undefined ? UNKNOWN : WHOLE.format(number);
}

/** Tokens grow fast: five digits, then 1.2M. */
export function tokens(number) {
  return number === null || number === undefined ? UNKNOWN : number < 100_000 ? WHOLE.format(number) : SHORT.format(number);
}

export function plural(number, one, many = `${one}s`) {
  return `${count(number)} ${number === 1 ? one : many}`;
}

export function percent(share) {
  return `${Math.round(share * 100)} %`;
}

/** "12 s", "5 min", "3 h 20 min", "4 d 2 h". */
export function duration(seconds) {
  const s = Math.max(0, Math.floor(seconds));
  if (s < 60) return `${s} s`;
  const minutes = Math.floor(s / 60);
  if (minutes < 60) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  if (hours < 24) return minutes % 60 ? `${hours} h ${minutes % 60} min` : `${hours} h`;
  return hours % 24 ? `${Math.floor(hours / 24)} d ${hours % 24} h` : `${Math.floor(hours / 24)} d`;
}

export function clock(milliseconds) {
  return new Date(milliseconds).toLocaleTimeString("en-GB");
}

/** The state to show: a ready runner with a request on it is busy. */
export function stateOf(runner) {
  return runner.state === "ready" && runner.running > 0 ? "busy" : runner.state;
}
