// The overview, live: the server sends its parts as HTML, and the rates for the chart.
import { follow } from "./common.js";
import { axes, colour, short } from "./charts.js";

const status = document.getElementById("status");
const box = document.getElementById("rates");
const history = [[], [], []];
const KEPT = 900;
let plot;

function draw() {
  plot?.destroy();
  if (history[0].length < 2) return; // a range of time needs two
  plot = new uPlot({
    width: box.clientWidth || 300, height: 150, legend: { show: false }, cursor: { drag: { x: false, y: false } },
    scales: { x: { range: (_, low, high) => [Math.min(low, high - 60), high] }, y: { range: (_, low, high) => [0, Math.max(high ?? 1, 1)] } },
    axes: axes({ y: { values: (_, values) => values.map(short) } }),
    series: [{}, { label: "trained", stroke: colour(0), width: 1.6, points: { show: false } }, { label: "sampled", stroke: colour(1), width: 1.6, points: { show: false } }],
  }, history, box);
}

follow(status.dataset.url, {
  message(news) {
    const focused = document.activeElement?.id;
    if (!status.contains(getSelection()?.anchorNode) || getSelection().isCollapsed) status.innerHTML = news.html;
    if (focused && document.activeElement?.id !== focused) document.getElementById(focused)?.focus();
    [news.at, news.trained, news.sampled].forEach((value, n) => { history[n].push(value); if (history[n].length > KEPT) history[n].shift(); });
    if (plot) plot.setData(history); else draw();
  },
});
new ResizeObserver(() => { if (plot && box.clientWidth && box.clientWidth !== plot.width) plot.setSize({ width: box.clientWidth, height: 150 }); }).observe(box);
document.addEventListener("themechange", draw);
