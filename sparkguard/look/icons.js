// Shapes, so that no state is told by colour alone. Drawn on a 16 by 16 grid.

const SVG = "http://www.w3.org/2000/svg";
const RING = "M8 2.75a5.25 5.25 0 1 0 0 10.5a5.25 5.25 0 1 0 0-10.5z";
const DISC = "M8 2a6 6 0 1 0 0 12a6 6 0 1 0 0-12z";

// [path, "stroke" or "fill"]...
const SHAPES = {
  stopped: [[RING, "stroke"]],
  starting: [["M8 2.75a5.25 5.25 0 1 1-5.25 5.25", "stroke"]],
  ready: [[DISC, "fill"]],
  busy: [[RING, "stroke"], ["M8 5.25a2.75 2.75 0 1 0 0 5.5a2.75 2.75 0 1 0 0-5.5z", "fill"]],
  draining: [["M2.5 4.5h11L8 13.25z", "fill"]],
  stopping: [["M3.75 3.75h8.5v8.5h-8.5z", "stroke"]],
  backoff: [[RING, "stroke"], ["M8 5v3.2l2.2 1.4", "stroke"]],
  failed: [["M8 1.75L14.75 13.75H1.25z", "fill"], ["M8 6v3.5M8 11.2v.9", "cut"]],
  warning: [["M8 2.75L13.6 13H2.4z", "stroke"], ["M8 6.6v2.9M8 11v.6", "stroke"]],
  theme: [[RING, "stroke"], ["M8 2.75a5.25 5.25 0 0 1 0 10.5z", "fill"]],
  close: [["M4 4l8 8M12 4l-8 8", "stroke"]],
  spark: [["M9.5 1.5L3.5 9h3.8L6.5 14.5L12.5 7H8.7z", "fill"]],
};

/** The shape, hidden from the screen reader: its word stands beside it. */
export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", "0 0 16 16");
  svg.setAttribute("aria-hidden", "true");
  svg.setAttribute("class", "icon");
  redraw(svg, name);
  return svg;
}

export function redraw(svg, name) {
  if (svg.dataset.name === name) return;
  svg.dataset.name = name;
  svg.replaceChildren(
    ...(SHAPES[name] ?? SHAPES.stopped).map(([path, kind]) => {
      const shape = document.createElementNS(SVG, "path");
      shape.setAttribute("d", path);
      shape.setAttribute("class", kind);
      return shape;
    }),
  );
}
