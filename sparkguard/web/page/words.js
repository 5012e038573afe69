// The words of runners' states.

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

/** The state to show: a ready runner with a request on it is busy. */
export function stateOf(runner) {
  return runner.state === "ready" && runner.running > 0 ? "busy" : runner.state;
}
