// Builds a card for each chart of the page's data and draws it with uPlot when it comes into sight. The pointer and the
// arrow keys show the same steps in all charts, and zooming zooms all. A watched page asks its server for news.
(() => {
  const $ = id => document.getElementById(id);
  const make = (tag, traits, ...children) => {
    const {data = {}, aria = {}, ...plain} = traits || {}, made = Object.assign(document.createElement(tag), plain);
    Object.assign(made.dataset, data);
    for (const [name, value] of Object.entries(aria)) made.setAttribute(name === "role" ? name : `aria-${name}`, value);
    made.append(...children);
    return made;
  };
  const others = "All other metrics";  // folded until it is opened or searched
  let page = JSON.parse($("data").textContent), cards = [], zoom = null;
  const dark = matchMedia("(prefers-color-scheme: dark)"), tip = $("tip");
  const color = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const tone = rank => rank % 6 + 1;  // report.css has six; more series begin again
  const compact = new Intl.NumberFormat("en", {notation: "compact", maximumSignificantDigits: 4});
  const text = value => value == null ? "-" : value && Math.abs(value) < 1e-3 ? value.toExponential(2) : compact.format(value);
  const wholeSteps = Array.from({length: 24}, (_, index) => [1, 2, 5][index % 3] * 10 ** Math.floor(index / 3));
  const label = at => {
    const [first, last] = [page.first[at], page.last[at]];
    return first === last ? `step ${first}` : `steps ${first} to ${last}`;
  };
  const alarmsAt = at => page.alarms.filter(each => each.since <= page.last[at] && (each.until ?? Infinity) >= page.first[at]);

  // An exponential mean without the pull of its beginning; a point without a value stays without one.
  const smooth = (values, weight) => {
    let mean = 0, total = 0;
    return values.map(value => {
      if (value == null) return null;
      [mean, total] = [weight * mean + (1 - weight) * value, weight * total + 1 - weight];
      return mean / total;
    });
  };

  const describe = ({label: name, values}) => {
    const at = values.flatMap((value, index) => value == null ? [] : [index]);
    const least = at.reduce((best, index) => values[index] < values[best] ? index : best, at[0]);
    const most = at.reduce((best, index) => values[index] > values[best] ? index : best, at[0]);
    const told = index => `${text(values[index])} at ${label(index)}`;
    return `${name}: from ${told(at[0])} to ${told(at.at(-1))}; least ${told(least)}, greatest ${told(most)}.`;
  };

  const seriesOf = chart => Object.entries(chart.metrics).map(([name, label]) => ({label, ...page.columns[name]}));

  class Card {
    constructor(chart, key) {
      const readouts = Object.values(chart.metrics).map((name, rank) => {
        const readout = make("b"), swatch = make("span", {className: `swatch s${tone(rank)}`});
        return [readout, make("span", {}, ...(rank || Object.keys(chart.metrics)[1] ? [swatch, `${name} `] : []), readout)];
      });
      this.chart = chart;
      this.readouts = readouts.map(([readout]) => readout);
      this.about = make("p", {className: "unseen", id: `about-${key}`});
      this.box = make("div", {className: "chart", tabIndex: 0, data: {chart: Object.keys(chart.metrics)[0]}, aria: {
        role: "slider", label: `${chart.title} by step`, describedby: this.about.id, valuemin: 0, valuemax: 0, valuenow: 0,
      }});
      this.box.card = this;
      this.node = make("section", {className: chart.is_wide ? "card wide" : "card"},
        make("header", {}, make("h3", {}, chart.title), make("div", {className: "legend"}, ...readouts.map(each => each[1]))),
        ...(chart.note ? [make("p", {className: "note"}, chart.note)] : []), this.about, this.box);
      this.box.addEventListener("keydown", event => this.key(event));
      this.box.addEventListener("blur", () => { tip.style.display = "none"; });
      this.refresh();
    }

    refresh() {  // after a change of the data, of a control or of the colours
      this.series = seriesOf(this.chart);
      this.about.textContent = this.series.map(describe).join(" ");
      this.tell(null);
      this.isStale = true;
      if (this.isSeen) this.draw();
    }

    tell(index) {
      const last = page.first.length - 1;
      this.readouts.forEach((readout, rank) => {
        const {values} = this.series[rank];
        readout.textContent = text(index == null ? values.findLast(value => value != null) : values[index]);
      });
      const told = this.series.map(one => `${one.label} ${text(one.values[index ?? last])}`).join(", ");
      const alarms = alarmsAt(index ?? last).map(each => `, alarm ${each.name}`).join("");
      for (const [name, value] of [["valuemax", last], ["valuenow", index ?? last], ["valuetext", `${label(index ?? last)}: ${told}${alarms}`]])
        this.box.setAttribute(`aria-${name}`, value);
    }

    draw() {
      if (!this.isStale || !this.box.clientWidth) return;
      this.isStale = false;
      this.plot?.destroy();
      const weight = +$("smooth").value, isLog = $("log").checked && this.series.some(one => one.values.some(value => value > 0));
      const data = [page.first.map((first, index) => (first + page.last[index]) / 2)], series = [{}], bands = [];
      const shown = values => isLog ? values.map(value => value > 0 ? value : null) : values;
      const add = (values, look) => data.push(shown(values)) && series.push({points: {show: false}, width: 0, spanGaps: true, ...look}) - 1;
      this.series.forEach(({values, low, high}, rank) => {
        const ink = () => color(`--c${tone(rank)}`), pale = () => `${ink()}${weight ? "26" : "29"}`;
        if (low.length && !isLog) bands.push({series: [add(high), add(low)], fill: pale});
        if (weight) add(values, {stroke: () => `${ink()}66`, width: 1});
        // Few values, as of evaluations, are seen as dots.
        const count = values.filter(value => value != null).length, isSparse = count < 3 || 2 * count <= values.length;
        add(smooth(values, weight), {stroke: ink, width: 1.8, points: {show: isSparse, size: 6, fill: ink}});
      });
      const ranges = this.series.map(one => one.range);
      const axis = {stroke: () => color("--soft"), ticks: {show: false}, font: "11px system-ui, sans-serif"};
      this.plot = new uPlot({
        width: this.box.clientWidth, height: this.box.clientHeight, padding: [10, 12, 0, 0], legend: {show: false}, series, bands,
        cursor: {y: false, sync: {key: "steps", setSeries: false}, points: {size: (plot, index) => series[index].width > 1 ? 8 : 0}},
        scales: {
          x: {time: false, range: (plot, low, high) => low === high ? [low - 1, high + 1] : [low, high], ...(zoom && {min: zoom[0], max: zoom[1]})},
          y: isLog ? {distr: 3} : {range: [Math.min(...ranges.map(each => each[0])), Math.max(...ranges.map(each => each[1]))]},
        },
        axes: [
          {...axis, grid: {show: false}, incrs: wholeSteps, size: 26},
          {...axis, grid: {stroke: () => color("--grid"), width: 1}, size: 56, values: (plot, at) => at.map(value => value == null ? "" : text(value))},
        ],
        hooks: {
          drawAxes: [plot => this.mark(plot)],
          setCursor: [plot => this.follow(plot)],
          setSelect: [plot => { zoom = [plot.posToVal(plot.select.left, "x"), plot.posToVal(plot.select.left + plot.select.width, "x")]; }],
        },
      }, data, this.box);
      this.plot.over.addEventListener("mouseleave", () => { tip.style.display = "none"; });
      this.plot.over.addEventListener("dblclick", () => zoomTo(null));
    }

    mark(plot) {  // each alarm, from its first step to its end
      const {ctx, bbox} = plot, x = step => Math.min(Math.max(plot.valToPos(step, "x", true), bbox.left), bbox.left + bbox.width);
      ctx.save();
      ctx.fillStyle = ctx.strokeStyle = color("--bad");
      ctx.setLineDash([4, 4]);
      for (const {since, until} of page.alarms) {
        const start = x(since), end = x(until ?? page.last.at(-1));
        ctx.fillRect(start, bbox.top, Math.max(end - start, 3), 3 * devicePixelRatio);
        ctx.beginPath(); ctx.moveTo(start, bbox.top); ctx.lineTo(start, bbox.top + bbox.height); ctx.stroke();
      }
      ctx.restore();
    }

    follow(plot) {
      const index = plot.cursor.idx, isHere = plot.over.matches(":hover") || document.activeElement === this.box;
      this.tell(index);
      if (!isHere) return;
      if (index == null) { tip.style.display = "none"; return; }
      const rows = this.series.map((one, rank) => make("div", {},
        make("span", {}, make("span", {className: `swatch s${tone(rank)}`}), one.label), make("b", {}, text(one.values[index]))));
      const alarms = alarmsAt(index).map(each => make("p", {className: "alarm"}, `alarm: ${each.name.replaceAll("_", " ")}`));
      tip.replaceChildren(make("strong", {}, label(index)), ...rows, ...alarms);
      tip.style.display = "block";
      const area = plot.over.getBoundingClientRect(), x = area.left + plot.cursor.left, y = area.top + Math.max(plot.cursor.top, 0);
      const isRight = x + 18 + tip.offsetWidth > innerWidth;
      tip.style.left = `${Math.max(4, isRight ? x - tip.offsetWidth - 14 : x + 16)}px`;
      tip.style.top = `${Math.max(4, y - tip.offsetHeight - 12)}px`;
    }

    key(event) {
      const {plot} = this, last = page.first.length - 1, at = plot?.cursor.idx ?? last, stride = event.shiftKey ? 10 : 1;
      const go = {ArrowLeft: at - stride, ArrowRight: at + stride, ArrowDown: at - stride, ArrowUp: at + stride, Home: 0, End: last}[event.key];
      if (!plot || event.ctrlKey || event.metaKey || event.altKey) return;
      const {min, max} = plot.scales.x, middle = plot.data[0][at];
      if (go != null) {
        const left = plot.valToPos(plot.data[0][Math.min(Math.max(go, 0), last)], "x");
        plot.setCursor({left, top: plot.over.clientHeight / 2}, true, true);
      } else if (event.key === "+") zoomTo([Math.max(min, middle - (max - min) / 4), Math.min(max, middle + (max - min) / 4)]);
      else if (event.key === "0") zoomTo(null);
      else if (event.key === "Escape") tip.style.display = "none";
      else return;
      event.preventDefault();
    }
  }

  const redraw = () => cards.forEach(card => card.refresh());
  const zoomTo = range => { zoom = range; redraw(); };
  const sight = new IntersectionObserver(seen => seen.forEach(({target: {card}, isIntersecting}) => {
    card.isSeen = isIntersecting;
    if (isIntersecting) card.draw();
  }), {rootMargin: "300px"});
  const width = new ResizeObserver(sized => sized.forEach(({target: {card, clientWidth, clientHeight}}) => {
    if (card.plot && clientWidth && clientWidth !== card.plot.width) card.plot.setSize({width: clientWidth, height: clientHeight});
  }));

  const build = () => {
    const sections = Map.groupBy ? Map.groupBy(page.charts, chart => chart.section) : page.charts.reduce(
      (found, chart) => found.set(chart.section, [...(found.get(chart.section) ?? []), chart]), new Map());
    cards.forEach(card => card.plot?.destroy());
    cards = [];
    const parts = [...sections].map(([section, charts]) => {
      const made = charts.map(chart => new Card(chart, cards.length + charts.indexOf(chart)));
      cards.push(...made);
      const grid = make("div", {className: "charts"}, ...made.map(card => card.node));
      if (section !== others) return make("section", {className: "group"}, make("h2", {}, section), grid);
      return make("details", {className: "group"}, make("summary", {}, section, make("span", {}, ` ${charts.length} charts`)), grid);
    });
    $("charts").replaceChildren(...parts);
    cards.forEach(card => { sight.observe(card.box); width.observe(card.box); });
    find();
  };

  const find = () => {
    const wanted = $("find").value.toLowerCase();
    const fits = ({title, metrics}) => `${title} ${Object.keys(metrics)}`.toLowerCase().includes(wanted);
    cards.forEach(card => { card.node.hidden = !fits(card.chart); });
    document.querySelectorAll(".group").forEach(group => {
      group.hidden = !group.querySelector(".card:not([hidden])");
      if (wanted && group.matches("details")) group.open = true;
    });
  };

  // The parts of the page that the server wrote are taken over; what is open, zoomed or typed stays.
  let tag = null;
  const ask = async () => {
    try {
      const answer = await fetch(location.href, {cache: "no-cache", signal: AbortSignal.timeout(20000)});
      if (!answer.ok) throw new Error(answer.statusText);
      $("lost").textContent = "";
      if (answer.headers.get("etag") !== tag) {
        const isFirst = tag === null, next = new DOMParser().parseFromString(await answer.text(), "text/html");
        tag = answer.headers.get("etag");
        if (!isFirst) take(next);
      }
    } catch {
      $("lost").textContent = "The server does not answer; this is the state of its last answer.";
    }
    setTimeout(ask, 3000);
  };
  const take = next => {
    const charts = JSON.stringify(page.charts);
    page = JSON.parse(next.getElementById("data").textContent);
    for (const part of ["head", "alarms", "thinned", "groups", "samples", "more"]) {
      const opened = new Map([...$(part).querySelectorAll("details")].map(each => [each.firstChild.textContent, each.open]));
      const fresh = next.getElementById(part);
      if (fresh.innerHTML === $(part).written) continue;
      $(part).written = fresh.innerHTML;
      fresh.querySelectorAll("details").forEach(each => { each.open = opened.get(each.firstChild.textContent) ?? each.open; });
      $(part).replaceChildren(...fresh.childNodes);
    }
    JSON.stringify(page.charts) === charts ? redraw() : build();
  };

  $("controls").hidden = !page.charts.length;
  $("controls").addEventListener("submit", event => event.preventDefault());
  $("smooth").addEventListener("input", redraw);
  $("log").addEventListener("change", redraw);
  $("find").addEventListener("input", find);
  $("whole").addEventListener("click", () => zoomTo(null));
  dark.addEventListener("change", redraw);
  addEventListener("beforeprint", () => cards.forEach(card => card.draw()));
  build();
  if (page.watched) ask();
})();
