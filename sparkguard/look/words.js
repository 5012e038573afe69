// Numbers in words. MB is 2^20 bytes and GB 2^30, as in every text of the project.

const MB = 2 ** 20;
const GB = 2 ** 30;
const WHOLE = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const TENTH = new Intl.NumberFormat("en", { minimumFractionDigits: 1, maximumFractionDigits: 1 });
const SHORT = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

/** Unknown is a dash, never a zero. */
export const UNKNOWN = "–";

const absent = (value) => value === null || value === undefined || Number.isNaN(value);

/** MB, in which the arithmetic is worded, until the figures get too long to read. */
export function bytes(amount) {
  if (absent(amount)) return UNKNOWN;
  return amount < 100 * GB ? `${WHOLE.format(Math.ceil(amount / MB))} MB` : `${TENTH.format(amount / GB)} GB`;
}

/** "57.2 of 119.7 GB": the unit once. */
export function bytesOf(part, whole) {
  if (absent(whole)) return bytes(part);
  if (absent(part)) return bytes(whole);
  const [unit, name, format] = whole < 10 * GB ? [MB, "MB", WHOLE] : [GB, "GB", TENTH];
  return `${format.format(part / unit)} of ${format.format(whole / unit)} ${name}`;
}

export function count(number) {
  return absent(number) ? UNKNOWN : WHOLE.format(number);
}

export function tenth(number, unit = "") {
  return absent(number) ? UNKNOWN : `${TENTH.format(number)}${unit}`;
}

/** Tokens grow fast: five digits, then 1.2M. */
export function tokens(number) {
  return absent(number) ? UNKNOWN : number < 100_000 ? WHOLE.format(number) : SHORT.format(number);
}

export function plural(number, one, many = `${one}s`) {
  return `${count(number)} ${number === 1 ? one : many}`;
}

export function percent(share) {
  return absent(share) ? UNKNOWN : `${Math.round(share * 100)} %`;
}

/** A rate of bytes: kB/s of 1000, as networks and disks are sold. */
export function rate(perSecond) {
  if (absent(perSecond)) return UNKNOWN;
  const [unit, name] = perSecond >= 1e9 ? [1e9, "GB/s"] : perSecond >= 1e6 ? [1e6, "MB/s"] : [1e3, "kB/s"];
  return `${(perSecond / unit >= 100 ? WHOLE : TENTH).format(perSecond / unit)} ${name}`;
}

/** "180 ms", "1.2 s". */
export function seconds(value) {
  if (absent(value)) return UNKNOWN;
  return value < 1 ? `${WHOLE.format(value * 1000)} ms` : `${TENTH.format(value)} s`;
}

/** "12 s", "5 min", "3 h 20 min", "4 d 2 h". */
export function duration(value) {
  if (absent(value)) return UNKNOWN;
  const s = Math.max(0, Math.floor(value));
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
