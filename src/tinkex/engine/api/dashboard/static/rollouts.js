// Rollouts: the colours of tokens, and the histogram of rewards by step.
const groups = document.getElementById("groups");
document.getElementById("colour")?.addEventListener("change", (event) => { groups.className = `by-${event.target.value}`; });
document.querySelector("select[name=step]")?.addEventListener("change", (event) => event.target.form.requestSubmit());

const place = document.getElementById("histogram");
if (place) {
  const { edges, steps, counts } = JSON.parse(place.dataset.histogram), chosen = Number(place.dataset.step);
  const svg = (tag, attributes) => { const made = document.createElementNS("http://www.w3.org/2000/svg", tag); Object.entries(attributes).forEach(([name, value]) => made.setAttribute(name, value)); return made; };
  const bins = edges.length - 1, most = Math.max(...counts.flat(), 1);
  const picture = svg("svg", { viewBox: `0 0 ${steps.length} ${bins}`, preserveAspectRatio: "none" });
  const text = (value) => String(Number(value.toPrecision(4)));
  steps.forEach((step, column) => {
    const link = svg("a", { href: `?step=${step}`, "aria-label": `Step ${step}` });
    counts[column].forEach((count, bin) => {
      if (!count) return;
      const cell = svg("rect", { x: column, y: bins - bin - 1, width: 1, height: 1, "fill-opacity": 0.15 + 0.85 * (count / most) });
      const title = svg("title", {});
      title.textContent = `step ${step}: ${count} with a reward of ${text(edges[bin])} to ${text(edges[bin + 1])}`;
      cell.append(title);
      link.append(cell);
    });
    picture.append(link);
  });
  const at = steps.findLastIndex((step) => step <= chosen);
  if (at >= 0) picture.append(svg("rect", { class: "chosen", x: at, y: 0, width: 1, height: bins }));
  const axis = document.createElement("div");
  axis.className = "axis";
  for (const label of [`step ${steps[0]}`, `rewards ${text(edges[0])} (bottom) to ${text(edges[bins])} (top)`, `step ${steps[steps.length - 1]}`]) { const each = document.createElement("span"); each.textContent = label; axis.append(each); }
  place.append(picture, axis);
}
