// Charts of metrics: one panel each, drawn by uPlot. Curves come downsampled; a zoom fetches its range again.
import { notify, send } from "./common.js";

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
export const colour = (number) => css(`--series-${(number % 6) + 1}`);
export const format = (value) => value == null ? "–" : Math.abs(value) >= 1e5 || (value !== 0 && Math.abs(value) < 1e-3) ? value.toExponential(3) : String(Number(value.toPrecision(5)));
const tick = (value) => (value == null ? "" : value !== 0 && Math.abs(value) < 1e-3 ? value.toExponential(1).replace(".0e", "e") : Math.abs(value) >= 1e4 ? short(value) : String(Number(value.toPrecision(4))));
const POINTS = 1500;
const WHOLE = Array.from({ length: 16 }, (_, exponent) => [1, 2, 5].map((digit) => digit * 10 ** exponent)).flat();

export function axes(labels = {}) {
  const common = { stroke: css("--dim"), grid: { stroke: css("--line"), width: 1 }, ticks: { stroke: css("--line"), width: 1 }, font: "11px system-ui, sans-serif" };
  return [{ ...common, size: 28, ...labels.x }, { ...common, size: 52, values: (_, values) => values.map(tick), ...labels.y }];
}

export function seriesUrl(runs, metrics, more = {}, path = "/dashboard/series") {
  const query = new URLSearchParams();
  runs.forEach((run) => query.append("run", run.id));
  metrics.forEach((metric) => query.append("metric", metric));
  Object.entries(more).forEach(([name, value]) => query.set(name, value));
  return `${path}?${query}`;
}

// An exponential mean that does not start at zero; gaps stay gaps.
export function smooth(values, weight) {
  let mean = 0, correction = 0;
  return values.map((value) => {
    if (value == null) return value;
    mean = weight * mean + (1 - weight) * value;
    correction = weight * correction + (1 - weight);
    const smoothed = mean / correction;
    return Math.abs(smoothed - value) <= 1e-12 * Math.abs(value) ? value : smoothed; // a constant has no noise to zoom into
  });
}

// The range of a logarithmic axis; values that hardly differ need a part of a decade too.
function logRange(_, low, high) {
  if (low == null) return [null, null];
  return high < 1.001 * low ? uPlot.rangeLog(low / 2, high * 2, 10, false) : uPlot.rangeLog(low, high, 10, false);
}

// A loop may log steps in any order, so later steps may have an earlier time.
function ascending(x, values) {
  if (x.every((value, place) => !place || value >= x[place - 1])) return [x, values];
  const order = x.map((_, place) => place).sort((one, other) => x[one] - x[other]);
  return [order.map((place) => x[place]), order.map((place) => values[place])];
}

// Values between two gaps are points: a line does not show them. Other runs' steps are no gaps; they are undefined.
const LONELY = {
  show: false,
  size: 5,
  filter: ({ data }, number) => {
    const values = data[number], places = [...values.keys()].filter((place) => values[place] !== undefined);
    return places.filter((place, n) => values[place] !== null && values[places[n - 1]] == null && values[places[n + 1]] == null);
  },
};

const emptyColumns = () => ({ step: [], value: [], at: [], tokens: [] });

export class Panel {
  constructor(parent, runs, metric, settings, height) {
    this.runs = runs;
    this.metric = metric;
    this.settings = settings;
    this.height = height;
    this.full = new Map(); // by run: columns
    this.zoomed = null;
    const make = (tag, className, text) => { const made = document.createElement(tag); if (className) made.className = className; if (text) made.textContent = text; return made; };
    this.figure = make("figure", "panel");
    this.figure.tabIndex = 0;
    this.figure.dataset.metric = metric.id;
    const caption = make("figcaption");
    this.last = make("span", "last");
    const tools = make("span", "tools");
    this.reset = make("button", "quiet", "Reset");
    this.reset.type = "button";
    this.reset.hidden = true;
    this.reset.addEventListener("click", () => this.showAll());
    const csv = make("a", "", "CSV");
    csv.href = seriesUrl(runs, [metric.id], {}, "/dashboard/series.csv");
    csv.setAttribute("download", "");
    csv.setAttribute("aria-label", `Download ${metric.name} as CSV`);
    const png = make("button", "quiet", "PNG");
    png.type = "button";
    png.setAttribute("aria-label", `Download ${metric.name} as PNG`);
    png.addEventListener("click", () => this.download());
    tools.append(this.reset, csv, png);
    caption.append(this.name(make("span", "name", metric.name)), ...(metric.source === "logged" ? [make("span", "tag", "logged")] : []), this.last, tools);
    this.box = make("div", "chart");
    this.readout = make("p", "readout");
    this.figure.append(caption, this.box, this.readout);
    this.figure.addEventListener("keydown", (event) => this.onKey(event));
    parent.append(this.figure);
    new ResizeObserver(() => { if (this.plot && this.box.clientWidth && this.box.clientWidth !== this.plot.width) this.plot.setSize({ width: this.box.clientWidth, height: this.height }); }).observe(this.box);
  }

  name(element) {
    element.title = this.metric.name; // it may be cut
    return element;
  }

  setData(byRun) {
    this.full = new Map(Object.entries(byRun));
    this.draw();
  }

  // Values after those that are there; a fetch and an event may both have them.
  append(runId, columns) {
    const own = this.full.get(runId) ?? emptyColumns();
    this.full.set(runId, own);
    let newest = own.step.length ? own.step[own.step.length - 1] : -1;
    columns.step.forEach((step, place) => {
      if (step <= newest) return;
      newest = step;
      for (const name of ["step", "value", "at", "tokens"]) own[name].push(columns[name][place]);
    });
    this.schedule();
  }

  schedule() {
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => { this.waiting = false; this.draw(); });
  }

  x(columns, runId) {
    const kind = this.settings.x;
    if (kind === "step") return columns.step;
    if (kind === "tokens") return columns.tokens;
    const first = this.full.get(runId)?.at[0] ?? 0;
    return columns.at.map((at) => at - first);
  }

  tables() {
    const { smoothing, log } = this.settings;
    const shown = this.zoomed ?? this.full;
    const tables = [], series = [];
    this.runs.forEach((run, number) => {
      const columns = shown.get(run.id) ?? emptyColumns();
      const [x, given] = ascending(this.x(columns, run.id), columns.value);
      const values = log ? given.map((value) => (value != null && value > 0 ? value : null)) : given;
      const stroke = colour(number);
      if (smoothing > 0) {
        tables.push([x, values, smooth(values, smoothing)]);
        series.push({ stroke: `${stroke}55`, width: 1, points: { show: false } }, { label: run.label, run: run.id, stroke, width: 2, points: LONELY });
      } else {
        tables.push([x, values]);
        series.push({ label: run.label, run: run.id, stroke, width: 1.6, points: LONELY });
      }
    });
    const data = tables.length === 1 ? tables[0] : uPlot.join(tables);
    return { data, series };
  }

  draw() {
    const { data, series } = this.tables();
    const { x, log, smoothing } = this.settings;
    const shape = JSON.stringify([x, log, smoothing > 0, document.documentElement.dataset.theme, series.map((each) => each.label)]);
    this.figure.dataset.points = data[0].length;
    const before = this.problem;
    this.problem = data.slice(1).some((values) => values.some((value) => value != null)) || !data[0].length ? "" : `No ${log ? "positive" : "finite"} values to show.`;
    if (this.problem !== before) this.readout.textContent = this.problem;
    this.label();
    if (this.plot && shape === this.shape) {
      this.plot.setData(data, !this.zoomed);
      if (this.zoomed) this.plot.redraw();
      return;
    }
    this.shape = shape;
    this.plot?.destroy();
    this.plot = new uPlot({
      width: this.box.clientWidth || 300,
      height: this.height,
      legend: { show: false },
      padding: [8, 12, 0, 0],
      cursor: { drag: { x: true, y: false }, points: { size: 6 } },
      scales: { x: { time: false }, y: log ? { distr: 3, range: logRange } : { distr: 1 } },
      axes: axes({ x: x === "time" ? { values: (_, values) => values.map(duration) } : { incrs: WHOLE, values: (_, values) => values.map(short) } }),
      series: [{}, ...series],
      hooks: { setCursor: [(plot) => this.read(plot)], setSelect: [(plot) => this.select(plot)] },
    }, data, this.box);
    this.plot.over.addEventListener("dblclick", () => this.showAll());
  }

  label() {
    const parts = this.runs.map((run) => {
      const columns = this.full.get(run.id);
      return columns?.step.length ? format(columns.value[columns.value.length - 1]) : null;
    });
    this.last.textContent = this.runs.length === 1 ? parts[0] ?? "" : "";
    this.figure.setAttribute("aria-label", `Chart of ${this.metric.name}: ${this.runs.map((run, n) => `${run.label}, last value ${parts[n] ?? "none"}`).join("; ")}`);
  }

  read(plot) {
    const place = plot.cursor.idx;
    if (place == null) { this.readout.textContent = this.problem; return; }
    const at = plot.data[0][place];
    const parts = plot.series.map((series, n) => (n && series.label ? [series, plot.data[n][place]] : null)).filter((each) => each && each[1] !== undefined);
    const where = this.settings.x === "time" ? duration(at) : `${this.settings.x} ${short(at)}`;
    this.readout.textContent = `${where}: ${parts.map(([series, value]) => (this.runs.length > 1 ? `${series.label} ${format(value)}` : format(value))).join(" · ")}`;
  }

  select(plot) {
    if (plot.select.width < 3) return;
    this.zoom(plot.posToVal(plot.select.left, "x"), plot.posToVal(plot.select.left + plot.select.width, "x"));
  }

  // Shows a range of the horizontal axis with all its values, as far as the server sends them.
  zoom(low, high) { this.fetchRange(low, high).catch((error) => notify(error.message, true)); }

  async fetchRange(low, high) {
    this.range = [low, high];
    this.reset.hidden = false;
    let start = Infinity, stop = -Infinity;
    for (const run of this.runs) {
      const columns = this.full.get(run.id);
      if (!columns) continue;
      const x = this.x(columns, run.id);
      const inside = x.map((value, place) => (value >= low && value <= high ? place : -1)).filter((place) => place >= 0);
      const first = inside.length ? inside[0] : x.findIndex((value) => value >= low);
      if (first < 0) continue;
      const last = inside.length ? inside[inside.length - 1] : first;
      start = Math.min(start, columns.step[Math.max(0, first - 1)]);
      stop = Math.max(stop, columns.step[Math.min(columns.step.length - 1, last + 1)]);
    }
    if (start > stop) return;
    const range = this.range;
    const reply = await (await send(seriesUrl(this.runs, [this.metric.id], { start, stop, points: POINTS }))).json();
    if (this.range !== range) return; // another zoom is newer
    const runs = reply.metrics[0].runs;
    this.zoomed = new Map(Object.entries(runs));
    this.figure.dataset.exact = Object.values(runs).every((each) => each.exact);
    this.draw();
    this.plot.setScale("x", { min: low, max: high });
  }

  showAll() {
    this.range = this.zoomed = null;
    this.reset.hidden = true;
    delete this.figure.dataset.exact;
    this.shape = "";
    this.draw();
  }

  onKey(event) {
    if (event.target !== this.figure || !this.plot) return;
    const { min, max } = this.plot.scales.x;
    if (min == null) return;
    const width = max - min, middle = (min + max) / 2;
    const moves = { "+": [middle - width / 4, middle + width / 4], "=": [middle - width / 4, middle + width / 4], "-": [middle - width, middle + width], ArrowLeft: [min - width / 4, max - width / 4], ArrowRight: [min + width / 4, max + width / 4] };
    if (event.key === "0" || event.key === "Escape") this.showAll();
    else if (moves[event.key]) this.zoom(...moves[event.key]);
    else return;
    event.preventDefault();
  }

  download() {
    const source = this.plot.ctx.canvas, scale = devicePixelRatio;
    const head = 26 * scale, canvas = document.createElement("canvas");
    canvas.width = source.width;
    canvas.height = source.height + head + (this.runs.length > 1 ? 18 * scale * this.runs.length : 0);
    const pen = canvas.getContext("2d");
    pen.fillStyle = css("--card");
    pen.fillRect(0, 0, canvas.width, canvas.height);
    pen.fillStyle = css("--text");
    pen.font = `600 ${13 * scale}px system-ui, sans-serif`;
    pen.fillText(this.metric.name, 10 * scale, 18 * scale);
    pen.drawImage(source, 0, head);
    if (this.runs.length > 1) this.runs.forEach((run, n) => {
      pen.fillStyle = colour(n);
      pen.font = `${12 * scale}px system-ui, sans-serif`;
      pen.fillText(run.label, 10 * scale, head + source.height + (13 + 18 * n) * scale);
    });
    canvas.toBlob((blob) => {
      const link = document.createElement("a");
      link.href = URL.createObjectURL(blob);
      link.download = `${this.metric.name.replace(/[^\w.-]+/g, "_")}.png`;
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 1000);
    });
  }
}

export function short(value) {
  if (value == null) return "";
  for (const [unit, size] of [["B", 1e9], ["M", 1e6], ["k", 1e3]]) if (Math.abs(value) >= size * (size === 1e3 ? 10 : 1)) return `${Number((value / size).toPrecision(4))}${unit}`;
  return String(Number(value.toPrecision(6)));
}

export function duration(seconds) {
  if (seconds == null) return "";
  const sign = seconds < 0 ? "-" : "", whole = Math.abs(seconds);
  if (whole < 60) return `${sign}${Number(whole.toPrecision(3))}s`;
  if (whole < 3600) return `${sign}${Math.floor(whole / 60)}m${String(Math.floor(whole % 60)).padStart(2, "0")}`;
  return `${sign}${Math.floor(whole / 3600)}h${String(Math.floor((whole % 3600) / 60)).padStart(2, "0")}`;
}
