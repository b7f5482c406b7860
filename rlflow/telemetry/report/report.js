// Draws each [data-chart] element with uPlot; the pointer shows the same steps in all charts, and dragging zooms in all.
(() => {
  const page = JSON.parse(document.getElementById("data").textContent), tip = document.getElementById("tip");
  const color = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const compact = new Intl.NumberFormat("en", {notation: "compact", maximumSignificantDigits: 4});
  const tick = value => (value && Math.abs(value) < 1e-3 ? value.toExponential() : compact.format(value));
  const wholeSteps = Array.from({length: 24}, (_, index) => [1, 2, 5][index % 3] * 10 ** Math.floor(index / 3));
  const isAlone = (values, index) => values[index] != null && values[index - 1] == null && values[index + 1] == null;

  const draw = node => {
    const chart = page.charts[node.dataset.chart], data = [page.steps], series = [{}], bands = [];
    const readouts = [...node.parentNode.querySelectorAll("[data-readout]")];
    const last = readouts.map(readout => readout.textContent);
    const add = (values, look) => data.push(values) && series.push({points: {show: false}, width: 0, ...look}) - 1;
    chart.lines.forEach((values, rank) => {
      const ink = () => color(`--c${rank + 1}`), [low, high] = chart.bands[rank];
      if (low) bands.push({series: [add(high), add(low)], fill: () => `${ink()}29`});
      // Without neighbours a value is no line, and a stack no area: it is drawn as a dot.
      const filter = plot => values.flatMap((_, index) => (isAlone(values, index) ? [index] : []));
      add(values, {stroke: ink, width: 1.8, points: {show: true, size: 7, fill: ink, filter}, fill: chart.stacked && ink});
    });
    if (chart.stacked) [data, series].forEach(each => each.push(...each.splice(1).reverse()));  // the lowest in front

    const follow = plot => {
      const index = plot.cursor.idx;
      readouts.forEach((readout, rank) => { readout.textContent = index == null ? last[rank] : chart.texts[rank][index]; });
      if (plot.over.matches(":hover")) index == null ? (tip.style.display = "none") : point(plot, chart, index);
    };
    const axis = {stroke: () => color("--faint"), ticks: {show: false}, font: "11px system-ui, sans-serif"};
    const options = {
      width: node.clientWidth, height: 200, padding: [10, 12, 0, 0], legend: {show: false}, series, bands,
      cursor: {y: false, sync: {key: "steps"}, points: {size: (plot, index) => (series[index].width ? 8 : 0)}},
      scales: {
        x: {time: false, range: (plot, low, high) => (low === high ? [low - 1, high + 1] : [low, high])},
        y: {range: chart.range},
      },
      axes: [
        {...axis, grid: {show: false}, incrs: wholeSteps, size: 26},
        {...axis, grid: {stroke: () => color("--grid"), width: 1}, size: 56, values: (plot, at) => at.map(tick)},
      ],
      hooks: {setCursor: [follow]},
    };
    const plot = new uPlot(options, data, node);
    plot.over.addEventListener("mouseleave", () => { tip.style.display = "none"; });
    new ResizeObserver(() => plot.setSize({width: node.clientWidth, height: 200})).observe(node);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => plot.redraw());
  };

  const point = (plot, chart, index) => {
    const element = (tag, ...children) => { const made = document.createElement(tag); made.append(...children); return made; };
    const rows = chart.names.map((name, rank) => {
      const swatch = element("span");
      swatch.className = `swatch s${rank + 1}`;
      return element("div", element("span", swatch, name), element("b", chart.texts[rank][index] + chart.unit));
    });
    tip.replaceChildren(element("strong", page.labels[index]), ...rows);
    tip.style.display = "block";
    const box = plot.over.getBoundingClientRect(), x = box.left + plot.cursor.left, y = box.top + plot.cursor.top;
    const isRight = x + 18 + tip.offsetWidth > innerWidth;
    tip.style.left = `${Math.max(4, isRight ? x - tip.offsetWidth - 14 : x + 16)}px`;
    tip.style.top = `${Math.max(4, y - tip.offsetHeight - 12)}px`;
  };

  document.querySelectorAll("[data-chart]").forEach(draw);
})();
