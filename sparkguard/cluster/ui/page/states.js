// The words and the shapes of states, one table for every chip.

export const WORDS = {
  unmanaged: "Not managed", draining: "Draining", stopping: "Stopping", stopped: "Stopped", starting: "Starting", ready: "Ready",
  failed: "Failed", rebooting: "Restarting", powering_off: "Shutting down", preparing: "Preparing", unknown: "Unknown", stale: "Stale",
  dead: "Dead", ok: "Reachable", running: "Running", gone: "Gone", busy: "Rendering", idle: "Idle", completed: "Completed",
  cancelled: "Cancelled", interrupted: "Interrupted",
  revoked: "Gave way",
};

export const SHAPES = {
  unmanaged: "stopped", rebooting: "starting", powering_off: "stopping", preparing: "starting", unknown: "backoff", stale: "backoff",
  dead: "failed", ok: "ready", running: "ready", gone: "failed", idle: "ready", completed: "ready", cancelled: "stopped", interrupted: "failed",
  revoked: "stopped",
};
