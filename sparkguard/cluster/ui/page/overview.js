// Overview: what is served, by which Sparks, and how they fare.

import { h, keyed, setAttribute, setHidden, setText } from "/look/dom.js";
import { button, message, stateChip } from "/look/parts.js";
import { bytesOf, count, duration, percent, plural, rate, seconds, tenth, UNKNOWN } from "/look/words.js";
import { chart, series } from "./charts.js";
import { question, sudoSheet } from "./dialogs.js";
import { facts, meter } from "./meter.js";
import { SHAPES, WORDS } from "./states.js";
import { act, isStale, latest, sampleAge, store } from "./store.js";
import { allocationsOf, isBusy, nodesOf, yueOf } from "./view.js";

export function overviewView() {
  const title = h("h1", { tabindex: "-1" }, "Overview");
  const chip = stateChip(WORDS, SHAPES);
  const mode = h("span", { class: "quiet" });
  const failed = message("error", "failed");
  const sampling = message("warning");
  const stale = message("warning");
  const models = h("div", { class: "cards allocations" });
  const none = h("div", { class: "empty" }, h("h2", {}, "Nothing is served"),
    h("p", {}, "Start a model under ", h("a", { href: "#/models" }, "Models"), ", or with ", h("code", {}, "spark-serve up MODEL"), "."));
  const yue = yueCard();
  const sparks = h("div", { class: "cards sparks" });
  const power = powerCard();
  const node = h("section", { "aria-labelledby": "title" },
    h("div", { class: "head" }, title, chip.node, mode), failed.node, sampling.node, stale.node,
    models, none, yue.node, h("h2", { class: "part-title" }, "Sparks"), sparks, power.node);
  title.id = "title";
  return {
    node, title,
    update() {
      const status = store.status ?? {};
      chip.update(status.phase ?? "unknown");
      setText(mode, { single: "Independent models", distributed: "One model on several Sparks", yue: "Song workers" }[status.mode] ?? "");
      failed.update(status.transition_error ?? status.error ?? "");
      sampling.update(store.samplingError ? `Sampling: ${store.samplingError}` : "");
      stale.update(isStale() ? `The newest figures are ${duration(sampleAge())} old.` : "");
      setAttribute(node, "data-old", isStale());
      const allocations = allocationsOf();
      keyed(models, allocations, (item) => item.key, allocationCard, title);
      yue.update();
      setHidden(none, allocations.length > 0 || yueOf().length > 0);
      keyed(sparks, nodesOf(), (item) => item.node, sparkCard, title);
      power.update();
    },
  };
}

/** One model, one endpoint, however many Sparks carry it. */
function allocationCard({ key }) {
  const title = h("h2");
  const chip = stateChip(WORDS, SHAPES);
  const ranks = h("ul", { class: "topology", "aria-label": "Sparks" });
  const where = h("p", { class: "quiet mono" });
  const why = message("error", "failed");
  const slow = message("warning");
  const speed = h("p", { class: "figure number" });
  const figures = facts("Prompt", "Requests", "First token", "Between tokens", "Whole request", "Cached prompt", "Canary");
  const cache = meter("KV cache");
  const plot = h("div");
  const drawn = chart(plot, "Tokens generated per second over time", "");
  const notice = message("error", "failed");
  const stop = button("Stop", {}, () => act(key, { verb: "stop", node: item.placement }));
  const local = button("Use in Hermes (this machine)", {}, () => act(key, { verb: "use", node: item.placement, hermes_target: "mac" }));
  const remote = button("Use in Hermes (Spark)", {}, () => act(key, { verb: "use", node: item.placement, hermes_target: "spark" }));
  let item = null;
  const node = h("article", { class: "card allocation" },
    h("header", {}, title, chip.node), ranks, where, why.node, slow.node,
    h("div", { class: "halves" }, h("div", {}, speed, cache.node, plot), figures.node),
    h("div", { class: "buttons" }, stop, local, remote), notice.node);
  return {
    node,
    update(next) {
      item = next;
      const engine = next.engine;
      setText(title, next.label);
      chip.update(next.state);
      keyed(ranks, next.ranks, (rank) => rank.node, rankItem);
      setText(where, next.url ?? "");
      setHidden(where, !next.url);
      why.update(next.error ?? "");
      slow.update(next.slow_fabric ? "The ranks talk over sockets, not RDMA: expect about half the speed." : "");
      setText(speed, engine ? `${tenth(engine.generation_tokens_s)} tokens/s` : "");
      setHidden(speed, !engine);
      setHidden(cache.node, !engine);
      setHidden(figures.node, !engine);
      setHidden(plot, !engine);
      if (engine) {
        cache.update(percent(engine.kv_usage), engine.kv_usage, engine.kv_usage > 0.9);
        figures.update(
          `${tenth(engine.prompt_tokens_s)} tokens/s`,
          `${count(engine.running)} running, ${count(engine.waiting)} waiting`,
          quantiles(engine.ttft_s), quantiles(engine.itl_s), quantiles(engine.e2e_s), percent(engine.cached_ratio),
          next.canary ? (next.canary.ok ? `${seconds(next.canary.seconds)}, ${duration(next.canary.age_s)} ago` : next.canary.error) : UNKNOWN);
        drawn.update([
          series(store.samples, "generated", (sample) => sample.allocations?.find((one) => one.model === next.model && same(one.nodes, next.nodes))?.engine?.generation_tokens_s),
        ]);
      }
      for (const control of [stop, local, remote]) setAttribute(control, "aria-disabled", isBusy() || null);
      setHidden(local, next.state !== "ready" || next.can_use === false);
      setHidden(remote, next.state !== "ready" || next.can_use === false);
      notice.update(store.notices.get(key) ?? "");
    },
  };
}

const same = (first, second) => first?.join() === second?.join();

const quantiles = (value) =>
  !value || (value.mean ?? null) === null ? UNKNOWN
    : value.p50 === null || value.p50 === undefined ? `${seconds(value.mean)} mean`
      : `${seconds(value.p50)} median, ${seconds(value.p95)} p95`;

function rankItem() {
  const chip = stateChip({ ...WORDS, ready: "Ready" }, SHAPES);
  const name = h("span", { class: "strong" });
  const node = h("li", {}, name, chip.node);
  return { node, update: (rank) => (setText(name, rank.node), chip.update(rank.state)) };
}

function sparkCard() {
  const title = h("h2");
  const chip = stateChip(WORDS, SHAPES);
  const why = message("warning");
  const cpu = meter("CPU");
  const gpu = meter("GPU");
  const memory = meter("Memory");
  const plot = h("div");
  const drawn = chart(plot, "CPU and GPU use over time", " %", [0, 100]);
  const key = h("p", { class: "key-line quiet", "aria-hidden": "true" }, h("span", { class: "solid" }), "CPU", h("span", { class: "dotted" }), "GPU");
  const figures = facts("Temperature", "Power", "Clock", "Pressure", "Network", "RoCE", "Disk", "Swap");
  const node = h("article", { class: "card spark" },
    h("header", {}, title, chip.node), why.node, cpu.node, gpu.node, memory.node, plot, key, figures.node);
  return {
    node,
    update(next) {
      setText(title, next.host && next.host !== next.node ? `${next.node} (${next.host})` : next.node);
      chip.update(next.state);
      why.update(next.error ?? "");
      const { gpu: card, memory: ram, psi, disk } = next;
      const known = next.sampled;
      for (const part of [cpu.node, gpu.node, memory.node, plot, key, figures.node]) setHidden(part, !known);
      if (!known) return;
      cpu.update(next.cpu_percent === null ? UNKNOWN : `${count(next.cpu_percent)} %`, share(next.cpu_percent));
      gpu.update(card?.utilization_percent == null ? UNKNOWN : `${count(card.utilization_percent)} %`, share(card?.utilization_percent));
      memory.update(bytesOf(ram?.used_bytes, ram?.total_bytes), ram?.total_bytes ? ram.used_bytes / ram.total_bytes : null,
        ram?.available_bytes < 6 * 2 ** 30);
      drawn.update([
        series(store.samples, "CPU", (sample) => sample.nodes.find((one) => one.node === next.node)?.cpu_percent),
        series(store.samples, "GPU", (sample) => sample.nodes.find((one) => one.node === next.node)?.gpu?.utilization_percent),
      ]);
      figures.update(
        card?.temperature_c == null ? UNKNOWN : `${count(card.temperature_c)} °C${card.throttle?.length ? `, throttled: ${card.throttle.join(", ")}` : ""}`,
        card?.power_w == null ? UNKNOWN : `${tenth(card.power_w)} W`,
        card?.clock_mhz == null ? UNKNOWN : `${count(card.clock_mhz)} MHz`,
        psi ? `memory ${tenth(psi.memory_full10)} %, CPU ${tenth(psi.cpu_some10)} %, disk ${tenth(psi.io_full10)} %` : UNKNOWN,
        links(next.network, (link) => link.name), links(next.roce, (link) => link.device),
        disk ? `${rate(disk.read_bytes_s)} read, ${rate(disk.write_bytes_s)} written` : UNKNOWN,
        ram?.swap_used_bytes == null ? UNKNOWN : bytesOf(ram.swap_used_bytes));
    },
  };
}

const share = (number) => (number === null || number === undefined ? null : number / 100);

function links(all, nameOf) {
  if (!all?.length) return UNKNOWN;
  return all.map((link) => `${nameOf(link)} ${rate(link.rx_bytes_s)} in, ${rate(link.tx_bytes_s)} out${link.errors_s > 0 ? `, ${tenth(link.errors_s)} errors/s` : ""}`).join("; ");
}

/** Song workers share nothing: one line each. */
function yueCard() {
  const list = h("ul", { class: "plain" });
  const notice = message("error", "failed");
  const stop = button("Stop", {}, () => act("yue", { verb: "stop" }));
  const cancel = button("Cancel jobs & stop …", { class: "danger" }, async () => {
    const jobs = yueOf().flatMap((worker) => worker.jobs ?? []);
    const sure = await question({ title: "Cancel the running renders?", confirm: "Cancel jobs & stop",
      text: `${jobs.length ? `${plural(jobs.length, "render")} (${jobs.join(", ")}) will be lost.` : "Renders that run will be lost."} Stop alone waits for nothing and ends nothing that renders.` });
    if (sure) await act("yue", { verb: "stop", cancel_jobs: true });
  });
  const node = h("article", { class: "card" }, h("header", {}, h("h2", {}, "YuE song workers")), list,
    h("div", { class: "buttons" }, stop, cancel), notice.node);
  return {
    node,
    update() {
      const workers = yueOf();
      setHidden(node, workers.length === 0);
      keyed(list, workers, (worker) => worker.node, () => {
        const chip = stateChip(WORDS, SHAPES);
        const name = h("span", { class: "strong" });
        const work = h("span", { class: "quiet" });
        return {
          node: h("li", {}, name, work, chip.node),
          update(worker) {
            setText(name, worker.node);
            setText(work, worker.error ?? (worker.jobs?.length ? worker.jobs.join(", ") : ""));
            chip.update(worker.busy ? "busy" : (worker.state ?? "unknown"));
          },
        };
      });
      for (const control of [stop, cancel]) setAttribute(control, "aria-disabled", isBusy() || null);
      notice.update(store.notices.get("yue") ?? "");
    },
  };
}

function powerCard() {
  const notice = message("error", "failed");
  const ask = (verb, title, text, confirm) => async () => {
    const values = await sudoSheet(title, text, confirm);
    if (values) await act("power", { verb, ...(values.password ? { password: values.password } : {}) });
  };
  const restart = button("Restart Sparks …", {}, ask("reboot", "Restart the Sparks?",
    "What is served is drained and stopped, both machines restart, and nothing is started afterwards. A render that runs blocks this.", "Restart"));
  const off = button("Shut down the Sparks …", { class: "danger" }, ask("shutdown", "Shut down the Sparks?",
    "What is served is drained and stopped, and the machines stay off until somebody presses their power buttons.", "Shut down"));
  const node = h("div", { class: "power" }, h("div", { class: "buttons" }, restart, off), notice.node);
  return {
    node,
    update() {
      for (const control of [restart, off]) setAttribute(control, "aria-disabled", isBusy() || null);
      notice.update(store.notices.get("power") ?? "");
    },
  };
}
