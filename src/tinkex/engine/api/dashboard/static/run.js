// The curves of one run, each in a panel, or of several runs in one: fetched once, then live.
import { follow, notify, send } from "./common.js";
import { Panel, seriesUrl } from "./charts.js";

const place = document.getElementById("charts");
if (place) start();

function start() {
  const { runs, metrics } = JSON.parse(place.dataset.config);
  const isSingle = place.classList.contains("single");
  const controls = document.getElementById("controls");
  const choice = document.getElementById("metric");
  const settings = readSettings(controls);
  const panels = new Map();
  let isReady = false, early = [];

  const height = () => (isSingle ? Math.max(260, Math.min(520, innerHeight - 330)) : 190);
  const add = (metric) => {
    const panel = new Panel(place, runs, metric, settings, height());
    panels.set(metric.id, panel);
    return panel;
  };

  async function load(shown) {
    for (let first = 0; first < shown.length; first += 12) {
      const part = shown.slice(first, first + 12);
      const reply = await (await send(seriesUrl(runs, part.map((metric) => metric.id), { points: 1500 }))).json();
      for (const each of reply.metrics) panels.get(each.metric)?.setData(each.runs);
    }
  }

  // Also after a pause: panels that are there stay as they are, with all values until now.
  async function showAll() {
    const shown = isSingle ? metrics.filter((metric) => metric.id === choice.value) : metrics;
    for (const [id, panel] of panels) if (!shown.some((metric) => metric.id === id)) { panel.figure.remove(); panels.delete(id); }
    shown.forEach((metric) => panels.has(metric.id) || add(metric));
    isReady = false;
    try {
      await load(shown);
      isReady = true;
      early.splice(0).forEach(append);
    } catch (error) { notify(error.message, true); }
  }

  function append(news) {
    if (!isReady) { early.push(news); return; }
    for (const [runId, byMetric] of Object.entries(news)) {
      for (const [id, columns] of Object.entries(byMetric)) {
        if (!metrics.some((metric) => metric.id === id)) {
          const slash = id.indexOf("/");
          metrics.push({ id, source: id.slice(0, slash), name: id.slice(slash + 1) });
          document.getElementById("no-metrics")?.setAttribute("hidden", "");
          if (!isSingle) add(metrics[metrics.length - 1]);
          else choice.add(new Option(id.slice(slash + 1), id));
        }
        panels.get(id)?.append(runId, columns);
        if (id.startsWith("automatic/")) showProgress(columns);
      }
    }
    document.dispatchEvent(new Event("newvalues"));
  }

  controls.addEventListener("input", () => {
    Object.assign(settings, readSettings(controls));
    for (const panel of panels.values()) panel.showAll();
  });
  controls.addEventListener("submit", (event) => event.preventDefault());
  choice?.addEventListener("change", showAll);
  document.addEventListener("themechange", () => panels.forEach((panel) => { panel.shape = ""; panel.draw(); }));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => panels.forEach((panel) => { panel.shape = ""; panel.draw(); }));
  follow(seriesUrl(runs, [], {}, "/dashboard/series/events"), { ready: showAll, message: append });
}

function showProgress(columns) {
  for (const [name, values] of [["steps", columns.step], ["tokens", columns.tokens]]) {
    const shown = document.querySelector(`[data-${name}]`);
    if (shown) shown.textContent = values[values.length - 1].toLocaleString("en-US");
  }
}

function readSettings(controls) {
  const smoothing = Number(controls.elements.smoothing.value);
  controls.elements.shown.value = smoothing;
  return { x: controls.elements.x.value, smoothing, log: controls.elements.log.checked };
}

// The operations of the run, at most every two seconds while it makes steps.
const rows = document.getElementById("operations");
let isWaiting = false;
if (rows) document.addEventListener("newvalues", () => {
  if (isWaiting) return;
  isWaiting = true;
  setTimeout(async () => {
    isWaiting = false;
    try { rows.innerHTML = await (await send(rows.dataset.url)).text(); } catch { /* the next step tries again */ }
  }, 2000);
});
