// Events of spark-serve in words.

/** The words that came with it, else its facts; and of which Spark, as the command line says it. */
export function wordsOf(event) {
  const words = bare(event);
  return event.node && !words.startsWith(event.node) ? `${event.node}: ${words}` : words;
}

function bare(event) {
  if (event.words) return event.words;
  if (event.text) return event.text;
  if (event.message) return event.message;
  const { event: name, at, schema_version: version, ...facts } = event;
  const told = Object.entries(facts)
    .filter(([, value]) => value !== null && typeof value !== "object")
    .map(([key, value]) => `${key} ${value}`);
  return [String(name ?? "").replaceAll("_", " "), ...told].join(", ");
}

const BAD = ["error", "startup_diagnostics", "host_down"];

export function levelOf(event) {
  if (BAD.includes(event.event) || (event.event === "end" && event.status !== 0)) return "error";
  return ["ready", "stopped", "rebooted"].includes(event.event) ? "info" : "";
}

/** Milliseconds; lines of ours count seconds, spark-serve's are ISO. */
export const timeOf = (event) => (typeof event.at === "number" ? event.at * 1000 : Date.parse(event.at));
