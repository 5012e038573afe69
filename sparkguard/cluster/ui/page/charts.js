// Charts over time. plotly's file is 4 MB: it is loaded after the first paint, and a page without it has its figures all the same.

let loading = null;

/** plotly, once. */
function plotly() {
  loading ??= new Promise((resolve, reject) => {
    const script = document.createElement("script");
    script.src = "/charts.js";
    script.addEventListener("load", () => resolve(globalThis.Plotly));
    script.addEventListener("error", () => {
      loading = null;
      reject(new Error("the charts' library did not come"));
    });
    document.head.append(script);
  });
  return loading;
}

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** light-dark() is no colour to plotly: the browser resolves it on a node. */
function resolved(name) {
  const probe = document.createElement("span");
  probe.style.color = colour(name);
  document.body.append(probe);
  const value = getComputedStyle(probe).color;
  probe.remove();
  return value;
}

function layout(unit, range, sweep) {
  const ink = resolved("--quiet");
  const axis = { color: ink, gridcolor: resolved("--line"), zeroline: false, fixedrange: true };
  return {
    height: sweep ? 200 : 150, margin: { l: 40, r: 12, t: 6, b: sweep ? 40 : 24 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { size: 11, color: ink, family: "system-ui, sans-serif" }, showlegend: false, hovermode: "x unified",
    hoverlabel: { bgcolor: resolved("--card"), font: { color: resolved("--ink") } },
    xaxis: sweep ? { ...axis, type: "category", title: { text: sweep, standoff: 6 } } : { ...axis, type: "date", nticks: 5, tickformat: "%H:%M:%S" }, yaxis: { ...axis, ticksuffix: unit, range, rangemode: "tozero", nticks: 4 },
  };
}

/**
 * A chart of lines in `node`. `update([{name, dash, x, y}])` draws them: null is a gap, and nothing is drawn across it.
 * With `sweep`, the axis is that quantity instead of time. A screen reader gets `label` and the last figures instead.
 */
export function chart(node, label, unit, range, sweep = null) {
  node.setAttribute("role", "img");
  node.setAttribute("aria-label", label);
  node.classList.add("chart");
  let wanted = null;
  let drawing = false;
  const draw = async () => {
    if (drawing || !wanted) return;
    drawing = true;
    const lines = wanted;
    wanted = null;
    try {
      const Plotly = await plotly();
      const colours = [resolved("--accent"), resolved("--warning"), resolved("--quiet")];
      await Plotly.react(node, lines.map((line, index) => ({
        type: "scatter", mode: sweep ? "lines+markers" : "lines", name: line.name, x: line.x, y: line.y, connectgaps: false,
        line: { width: 1.75, color: colours[index % colours.length], dash: ["solid", "dot", "dash"][index % 3] },
      })), layout(unit, range, sweep), { displayModeBar: false, responsive: true });
    } catch {
      node.textContent = "Charts are not available.";
    }
    drawing = false;
    draw();
  };
  addEventListener("themechange", () => node.isConnected && draw());
  return {
    update(lines) {
      wanted = lines;
      if (document.visibilityState === "visible") requestIdleCallback ? requestIdleCallback(draw) : setTimeout(draw);
    },
  };
}

/** Samples to a line. A gap of the samples is a gap of the line. */
export function series(samples, name, value) {
  const x = [];
  const y = [];
  let before = null;
  for (const sample of samples) {
    const at = Date.parse(sample.at);
    if (before !== null && at - before > Math.max(6000, 3000 * (sample.interval_s ?? 2))) {
      x.push(new Date(before + 1));
      y.push(null);
    }
    x.push(new Date(at));
    y.push(value(sample) ?? null);
    before = at;
  }
  return { name, x, y };
}
