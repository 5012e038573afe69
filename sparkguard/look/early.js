// Classic and in <head>: a module would run after the first paint, and the page would flash in the wrong colours.
document.documentElement.dataset.theme = localStorage.getItem("theme") ?? "auto";

// A browser drops what it is loading when the machine's network changes (ERR_NETWORK_CHANGED), even from this machine itself.
// A page that misses one of its modules would say "Connecting" for ever, so it is loaded again, a few times.
addEventListener("error", ({ target }) => {
  const tries = Number(sessionStorage.getItem("reloads") ?? 0);
  if (!(target instanceof HTMLScriptElement) || target.type !== "module" || tries >= 5) return;
  sessionStorage.setItem("reloads", tries + 1);
  setTimeout(() => location.reload(), 300 * 2 ** tries);
}, true);
addEventListener("load", () => setTimeout(() => sessionStorage.removeItem("reloads"), 10_000));
