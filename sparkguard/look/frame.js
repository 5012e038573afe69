// What stands around the views of every page: links to them, whether the server is there, the colours, and the way past all that.

import { setAttribute, setHidden, setText } from "./dom.js";
import { icon } from "./icons.js";
import { clock, duration } from "./words.js";

const THEMES = ["auto", "light", "dark"];

export const titleOf = (name) => name[0].toUpperCase() + name.slice(1);

/** Marks the link of the view that is shown. */
export function markLink(name) {
  for (const link of document.querySelectorAll("nav.views a")) {
    setAttribute(link, "aria-current", link.hash === `#/${name}` ? "page" : null);
  }
}

/** Returns what draws the connection as `store` has it; `wake` tries again at once. Focus goes to `title` when it is back. */
export function connectionLine(store, wake) {
  const pill = document.querySelector("#connection");
  const lost = document.querySelector("#lost");
  const words = lost.querySelector("p");
  const again = lost.querySelector("button");
  again.addEventListener("click", wake);
  return function draw(title) {
    const away = !store.connected && store.retryAt !== null && !store.locked;
    setAttribute(pill, "data-live", store.connected);
    setText(pill.lastElementChild, store.connected ? "Live" : store.locked ? "Locked" : away ? "Not connected" : "Connecting");
    setAttribute(document.body, "data-stale", away && store.known);
    if (away) {
      const rest = store.known ? ". What you see is from then" : "";
      setText(words, `Not connected since ${clock(store.heardAt)}${rest}.`);
      const seconds = (store.retryAt - Date.now()) / 1000;
      setText(again, seconds > 0 ? `Try now (${duration(Math.ceil(seconds))})` : "Trying …");
    }
    setHidden(lost, !away, title);
  };
}

/** The header's icons, its button for the colours ("themechange" tells what paints by itself), and its way to the content. */
export function header() {
  const theme = document.querySelector("#theme");
  const draw = () => {
    const name = document.documentElement.dataset.theme;
    setAttribute(theme, "aria-label", `Colours: ${name === "auto" ? "as the system" : name}`);
    setText(theme.lastElementChild, titleOf(name));
  };
  theme.addEventListener("click", () => {
    const next = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length];
    document.documentElement.dataset.theme = next;
    localStorage.setItem("theme", next);
    draw();
    dispatchEvent(new Event("themechange"));
  });
  theme.prepend(icon("theme"));
  draw();
  document.querySelector(".brand").prepend(icon("spark"));
  // By hand, since an address of "#main" would be taken for a view's.
  document.querySelector(".skip").addEventListener("click", (event) => {
    event.preventDefault();
    document.querySelector("main").focus();
  });
}
