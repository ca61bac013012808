/* Interactive charts of a page: those of its data block, the JSON in the element #charts, and those that
   a script adds. labctl.charts.add(container, chart) draws one in a new figure of a container; labctl.charts.append(name,
   line, points) adds points to one. A chart is {name, title, caption, along, unit, lines: [{name, points: [[x, y]], color,
   dash, band: [[low, high]]}]}; a y of null is a gap. */
"use strict";
(function () {
  const HEIGHT = 220;
  const MOST = 2000; // Points of a line above which it is thinned.
  const PAUSE = 500; // Milliseconds between two drawings of a chart that grows.
  const WIDTH = 1.75;
  const views = new Map();
  const dark = matchMedia("(prefers-color-scheme: dark)");

  // --- text ---

  function number(value, digits = 4) {
    if (value === null || value === undefined || !Number.isFinite(value)) return "no figure";
    if (Math.abs(value) >= 10 ** (digits - 1)) return value.toLocaleString("en-US", { maximumFractionDigits: 0 });
    const rounded = Number(value.toPrecision(digits));
    if (rounded === 0 || Math.abs(rounded) >= 1e-4) return String(rounded);
    const [digitsOnly, exponent] = rounded.toExponential().split("e-");
    return `${digitsOnly}e-${exponent.padStart(2, "0")}`;
  }

  function withUnit(value, unit) {
    return value === null || value === undefined ? "–" : `${number(value)} ${unit}`.trimEnd();
  }

  function element(name, attributes = {}, text = "") {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text) made.textContent = text;
    return made;
  }

  // --- style: the page's CSS variables ---

  function css(name) {
    return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  }

  function dashes(line) {
    const text = css(`--dash-${line.dash}`);
    return text ? text.split(" ").map((part) => Number(part) * WIDTH) : [];
  }

  // --- lines ---

  function Line(name, place, data = {}) {
    const line = { name, color: data.color ?? place % 6, dash: data.dash ?? place % 6, shown: true };
    line.xs = (data.points || []).map((point) => point[0]);
    line.ys = (data.points || []).map((point) => point[1]);
    line.band = data.band && data.band.length ? data.band.slice() : null;
    return line;
  }

  function extend(line, points) {
    for (const [x, y] of points) {
      const last = line.xs.length - 1;
      if (last >= 0 && x < line.xs[last]) continue; // It has come already.
      if (last >= 0 && x === line.xs[last]) line.ys[last] = y;
      else {
        line.xs.push(x);
        line.ys.push(y);
        if (line.band) line.band.push([y, y]);
      }
    }
    if (line.xs.length > MOST && !line.band) thin(line);
  }

  // Keeps the lowest and the highest point of each part, so that a spike stays.
  function thin(line) {
    const kept = [];
    const parts = MOST / 4;
    const size = Math.ceil(line.xs.length / parts);
    for (let from = 0; from < line.xs.length; from += size) {
      let low = -1;
      let high = -1;
      for (let at = from; at < Math.min(from + size, line.xs.length); at++) {
        if (line.ys[at] === null) continue;
        if (low < 0 || line.ys[at] < line.ys[low]) low = at;
        if (high < 0 || line.ys[at] > line.ys[high]) high = at;
      }
      if (low < 0) kept.push(from);
      else if (low === high) kept.push(low);
      else kept.push(Math.min(low, high), Math.max(low, high));
    }
    line.xs = kept.map((at) => line.xs[at]);
    line.ys = kept.map((at) => line.ys[at]);
  }

  function nearest(line, x) {
    const xs = line.xs;
    let low = 0;
    let high = xs.length - 1;
    if (high < 0 || x < xs[0] || x > xs[high]) return -1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (xs[middle] <= x) low = middle;
      else high = middle;
    }
    return x - xs[low] <= xs[high] - x ? low : high;
  }

  // --- a chart ---

  function View(figure, chart) {
    const view = { figure, chart, lines: [], plot: null, drawn: 0, waiting: 0 };
    view.box = element("div", { class: "plot", tabindex: "0", role: "group", "aria-label": `${chart.title}: chart` });
    view.legend = element("div", { class: "legend" });
    view.said = element("p", { class: "said-aloud", "aria-live": "polite" });
    figure.append(view.box, view.legend, view.said);
    figure.classList.add("interactive");
    for (const line of chart.lines || []) view.lines.push(Line(line.name, view.lines.length, line));
    build(view);
    new ResizeObserver(() => resize(view)).observe(view.box);
    return view;
  }

  function data(view) {
    const tables = view.lines.map((line) => [line.xs, line.ys]);
    return tables.length ? uPlot.join(tables) : [[], []];
  }

  function build(view) {
    if (view.plot) view.plot.destroy();
    const series = view.lines.map((line) => ({
      label: line.name, stroke: () => css(`--line-${line.color}`), dash: dashes(line), width: WIDTH, show: line.shown,
      points: { show: false },
    }));
    const axis = { stroke: () => css("--dim"), grid: { stroke: () => css("--line"), width: 1 }, ticks: { show: false } };
    const texts = (plot, splits) => splits.map((value) => (value === null ? "" : number(value)));
    view.plot = new uPlot(
      {
        width: Math.max(view.box.clientWidth, 100), height: HEIGHT, legend: { show: false }, scales: { x: { time: false } },
        axes: [{ ...axis, values: texts, label: view.chart.along }, { ...axis, values: texts, size: 60 }],
        series: [{}, ...series], hooks: { setCursor: [() => point(view)] },
      },
      data(view),
      view.box,
    );
    entries(view);
  }

  function resize(view) {
    const width = view.box.clientWidth;
    if (width && width !== view.plot.width) view.plot.setSize({ width, height: HEIGHT });
  }

  function swatch(line) {
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    const stroke = document.createElementNS("http://www.w3.org/2000/svg", "line");
    for (const [key, value] of Object.entries({ width: 36, height: 10, "aria-hidden": "true" })) svg.setAttribute(key, value);
    for (const [key, value] of Object.entries({ x1: 0, x2: 36, y1: 5, y2: 5, "stroke-dasharray": dashes(line).join(" ") })) {
      stroke.setAttribute(key, value);
    }
    stroke.style.stroke = `var(--line-${line.color})`;
    svg.append(stroke);
    return svg;
  }

  function entries(view) {
    view.place = element("span", { class: "place" });
    view.legend.replaceChildren(view.place);
    view.lines.forEach((line, at) => {
      const button = element("button", { type: "button", "aria-pressed": String(line.shown) });
      line.value = element("span", { class: "value" });
      button.append(swatch(line), element("span", {}, line.name || view.chart.title), line.value);
      button.addEventListener("click", () => {
        line.shown = !line.shown;
        button.setAttribute("aria-pressed", String(line.shown));
        view.plot.setSeries(at + 1, { show: line.shown });
      });
      view.legend.append(button);
    });
    point(view);
  }

  // Writes the values under the pointer into the legend; without a pointer the last ones.
  function point(view) {
    if (!view.plot) return;
    const at = view.plot.cursor.idx;
    const x = at === null || at === undefined || view.plot.cursor.left < 0 ? null : view.plot.data[0][at];
    view.place.textContent = x === null ? "last" : `${view.chart.along} ${number(x, 7)}`;
    for (const line of view.lines) {
      const place = x === null ? line.ys.findLastIndex((y) => y !== null) : nearest(line, x);
      line.value.textContent = place < 0 ? "–" : withUnit(line.ys[place], view.chart.unit);
    }
  }

  // --- growing charts ---

  function redraw(view) {
    view.waiting = 0;
    view.drawn = performance.now();
    view.plot.setData(data(view));
    point(view);
  }

  function later(view) {
    if (view.waiting) return;
    view.waiting = setTimeout(() => redraw(view), Math.max(0, view.drawn + PAUSE - performance.now()));
  }

  function add(container, chart) {
    const figure = element("figure", { "data-chart": chart.name });
    const caption = element("figcaption");
    caption.append(element("strong", {}, chart.title), element("br"), element("span", { class: "dim" }, chart.caption));
    figure.append(caption);
    container.append(figure);
    const section = container.closest("section");
    if (section) section.hidden = false;
    views.set(chart.name, View(figure, chart));
  }

  function append(name, lineName, points) {
    const view = views.get(name);
    if (!view) return;
    let line = view.lines.find((known) => known.name === lineName);
    if (!line) {
      line = Line(lineName, view.lines.length);
      view.lines.push(line);
      extend(line, points);
      build(view);
    } else extend(line, points);
    later(view);
  }

  // --- the page ---

  dark.addEventListener("change", () => {
    for (const view of views.values()) view.plot.redraw(false);
  });

  window.labctl = window.labctl || {};
  window.labctl.charts = { add, append, number };

  const block = document.getElementById("charts");
  for (const chart of block ? JSON.parse(block.textContent) : []) {
    const figure = [...document.querySelectorAll("figure[data-chart]")].find((each) => each.dataset.chart === chart.name);
    if (figure) views.set(chart.name, View(figure, chart));
  }
})();
