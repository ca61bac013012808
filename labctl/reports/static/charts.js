/* Interactive charts of a page: those of its data block, the JSON in the element #charts, and those that a script adds.
   labctl.charts.add(container, chart) draws one in a new figure of a container; labctl.charts.append(name, line, points,
   {times, band, remark, last, replaces}) adds points to one. A chart is {name, title, caption, remark, along, unit, lines:
   [{name, points: [[x, y]], color, dash, band: [[low, high]], times: [seconds], last}]}; a y of null is a gap, a band is the
   range of the values that a line stands for, times are those of points over steps, last is the text of the value that came
   last, if it is not that of the last point. */
"use strict";
(() => {
  const { element, number } = labctl;
  const HEIGHT = 220;
  const LARGE = 520; // Height of a chart that is enlarged.
  const MOST = 2000; // Points of a line that grows, above which it is thinned.
  const PARTS = 240; // Parts of a line whose steps began again, as labctl/reports/curves.py has them.
  const PAUSE = 500; // Milliseconds between two drawings of a chart that grows.
  const WIDTH = 1.75;
  const MOST_SMOOTH = 0.99;
  const OUTSIDE = -10; // Place of a pointer that is not on the chart.
  const views = new Map();
  const settings = new WeakMap(); // Smoothing, scale and axis of the charts of a container.
  const block = document.getElementById("charts"); // The charts' data; its data-of begins the names of their files.
  const dark = matchMedia("(prefers-color-scheme: dark)");
  let following = false; // True while charts follow the pointer of another.

  // --- text and style: the page's CSS variables differ in a dark page ---

  /* Format the lowest and the highest of values, with their unit. */
  function span(values, unit) {
    let low = Infinity;
    let high = -Infinity;
    let count = 0;
    for (const value of values) {
      if (value === null) continue;
      low = Math.min(low, value);
      high = Math.max(high, value);
      count += 1;
    }
    return `${number(low)}${count > 1 ? ` to ${number(high)}` : ""} ${unit}`.trimEnd();
  }

  /* Return a CSS variable of the page. */
  function css(name) {
    return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  }

  /* Return the dashes and gaps of a line, in pixels. */
  function dashes(line) {
    const lengths = css(`--dash-${line.dash}`);
    return lengths ? lengths.split(" ").map((length) => Number(length) * WIDTH) : [];
  }

  // --- lines ---

  /* Return a line as a chart keeps it, from its data. */
  function newLine(place, { name, points = [], band = [], times = [], last = "", color = place % 6, dash = place % 6 }) {
    const [xs, ys] = [points.map((point) => point[0]), points.map((point) => point[1])];
    const [ranges, seconds] = [band.length ? [...band] : null, times.length ? [...times] : null];
    const line = { name, color, dash, xs, ys, band: ranges, times: seconds, last, shown: true, beganAgain: beginsAgain(xs) };
    return line.beganAgain ? Object.assign(line, ordered(line, xs)) : line;
  }

  /* Return true if a value is not higher than the one before it. */
  function beginsAgain(xs) {
    return xs.some((x, at) => x <= xs[at - 1]);
  }

  /* Add points to a line. Over steps all stay, which may begin again in another epoch. Else a late one is left out, and one
     with the x of the last replaces it. Points without times end those of the line. */
  function extend(line, points, overSteps, { times = [], band = [], last = "", replaces = false }) {
    line.last = last;
    if (replaces) Object.assign(line, { xs: [], ys: [], band: null, times: null, beganAgain: false });
    line.beganAgain ||= overSteps && beginsAgain([...line.xs.slice(-1), ...points.map(([x]) => x)]);
    if (band.length) line.band ||= line.ys.map((y) => [y, y]);
    if (!line.xs.length && times.length) line.times = [];
    if (!times.length) line.times = null;
    points.forEach(([x, y], number) => {
      const last = line.xs.length - 1;
      if (!overSteps && x < line.xs[last]) return;
      const place = !overSteps && x === line.xs[last] ? last : last + 1;
      line.xs[place] = x;
      line.ys[place] = y;
      if (line.band) line.band[place] = band[number] ?? [y, y];
      if (line.times) line.times[place] = times[number];
    });
    if (line.beganAgain) Object.assign(line, ordered(line, line.xs));
    if (line.beganAgain && line.xs.length > MOST) Object.assign(line, merged(line));
    if (line.xs.length > MOST) thin(line);
  }

  /* Return the points of a line in the order of these values of theirs. */
  function ordered(line, values) {
    const order = values.map((_, at) => at).sort((one, other) => values[one] - values[other]);
    const picked = (all) => all && order.map((at) => all[at]);
    return { xs: picked(line.xs), ys: picked(line.ys), band: picked(line.band), times: picked(line.times) };
  }

  /* Return the medians of parts of a line, with the lowest and highest values as band; they have no time in common. */
  function merged({ xs, ys, band }) {
    const width = (xs.at(-1) - xs[0]) / PARTS || 1;
    const parts = [];
    xs.forEach((x, at) => (parts[Math.min(Math.floor((x - xs[0]) / width), PARTS - 1)] ??= []).push(at));
    const all = parts.filter(Boolean);
    const known = (values) => values.filter((y) => y !== null).sort((one, other) => one - other);
    const middle = (values) => (values.length ? (values[(values.length - 1) >> 1] + values[values.length >> 1]) / 2 : null);
    const bounds = all.map((part) => known(part.flatMap((at) => (band ? band[at] : ys[at]))));
    return {
      xs: all.map((part) => part.reduce((sum, at) => sum + xs[at], 0) / part.length),
      ys: all.map((part) => middle(known(part.map((at) => ys[at])))),
      band: bounds.map((values) => [values[0] ?? null, values.at(-1) ?? null]),
      times: null,
    };
  }

  /* Keep the lowest and the highest point of each part, so that a spike stays. */
  function thin(line) {
    const kept = [];
    const size = Math.ceil(line.xs.length / (MOST / 4));
    const [lows, highs] = line.band ? [0, 1].map((bound) => line.band.map((range) => range[bound])) : [line.ys, line.ys];
    for (let from = 0; from < line.xs.length; from += size) {
      let [low, high] = [-1, -1];
      for (let at = from; at < Math.min(from + size, line.xs.length); at++) {
        if (line.ys[at] === null) continue;
        if (low < 0 || lows[at] < lows[low]) low = at;
        if (high < 0 || highs[at] > highs[high]) high = at;
      }
      if (low < 0) kept.push(from);
      else kept.push(...new Set([Math.min(low, high), Math.max(low, high)]));
    }
    line.xs = kept.map((at) => line.xs[at]);
    line.ys = kept.map((at) => line.ys[at]);
    line.band = line.band && kept.map((at) => line.band[at]);
    line.times = line.times && kept.map((at) => line.times[at]);
  }

  /* Return the exponential moving average, as TensorBoard has it: its beginning is not drawn towards zero. */
  function smoothed(ys, weight) {
    if (!weight) return ys;
    let [sum, part] = [0, 0];
    return ys.map((y) => {
      if (y === null) return null;
      sum = sum * weight + (1 - weight) * y;
      part = part * weight + (1 - weight);
      return sum / part;
    });
  }

  /* Return the place of the point nearest to x; -1 before the first and after the last point. */
  function nearest(line, x) {
    let [low, high] = [0, line.xs.length - 1];
    if (high < 0 || x < line.xs[low] || x > line.xs[high]) return -1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (line.xs[middle] <= x) low = middle;
      else high = middle;
    }
    return x - line.xs[low] <= line.xs[high] - x ? low : high;
  }

  /* Return the place of the last point with a value; -1 without one. */
  function lastKnown(line) {
    let at = line.ys.length - 1;
    while (at >= 0 && line.ys[at] === null) at -= 1;
    return at;
  }

  /* Return a line over its times. */
  function overTime(line) {
    const { times, ...rest } = ordered(line, line.times);
    return { ...rest, xs: times };
  }

  // --- the x axis: as the chart has it, or the time of steps ---

  /* Return true if a chart over steps can be drawn over time. */
  function hasTimes(view) {
    return view.chart.along === "step" && view.lines.length > 0 && view.lines.every((line) => line.times);
  }

  /* Return what a chart is drawn over now. */
  function along(view) {
    return view.settings.time && hasTimes(view) ? "seconds" : view.chart.along;
  }

  // --- a chart ---

  /* Make a figure interactive: draw its chart, with a legend, keys and a text for screen readers. */
  function newView(figure, chart) {
    const view = { figure, chart, caption: chart.caption, plot: null, x: null, range: null, drawn: 0, waiting: 0 };
    view.lines = chart.lines.map((line, place) => newLine(place, line));
    view.settings = settingsOf(figure.parentElement);
    view.box = element("div", { class: "plot", tabindex: "0", role: "application" });
    view.legend = element("div", { class: "legend" });
    view.spoken = element("p", { class: "unseen", "aria-live": "polite" });
    figure.append(view.box, view.legend, view.spoken);
    figure.prepend(tools(view));
    figure.classList.add("interactive");
    views.set(chart.name, view);
    build(view);
    view.box.addEventListener("keydown", (event) => pressed(view, event));
    new ResizeObserver(() => resize(view)).observe(view.box);
  }

  /* Show the caption of a chart, and have it read out. */
  function describe(view) {
    const text = view.figure.querySelector("figcaption .dim");
    if (text) text.textContent = view.caption;
    const label = `${view.chart.title} over ${along(view)}, ${view.caption}; arrow keys move through the values`;
    view.box.setAttribute("aria-label", label);
  }

  /* Return the tracks of all lines: curve, bounds and raw values, in the order of the plot's series. */
  function tracks(view) {
    const { weight } = view.settings;
    const all = [];
    for (const line of view.lines) {
      const overSteps = line.beganAgain ? merged(line) : line;
      const drawn = along(view) === view.chart.along ? overSteps : overTime(line);
      if (drawn.band) {
        all.push({ line, drawn, kind: "high", ys: drawn.band.map((range) => range[1]) });
        all.push({ line, drawn, kind: "low", ys: drawn.band.map((range) => range[0]) });
      }
      if (weight && !drawn.band) all.push({ line, drawn, kind: "raw", ys: drawn.ys });
      all.push({ line, drawn, kind: "main", ys: smoothed(drawn.ys, weight) });
    }
    return all;
  }

  /* Return the points of all tracks as uPlot takes them; a log scale leaves out values that are not positive. */
  function data(view) {
    const positive = (y) => (y !== null && y > 0 ? y : null);
    const tables = view.tracks.map(({ drawn, ys }) => [drawn.xs, view.settings.log ? ys.map(positive) : ys]);
    return tables.length ? uPlot.join(tables) : [[]];
  }

  /* Redraw a chart, as its lines or settings have changed. */
  function build(view) {
    if (view.plot) view.plot.destroy();
    view.plot = null;
    view.tracks = tracks(view);
    view.plot = new uPlot(options(view), data(view), view.box);
    entries(view);
    describe(view);
    restore(view);
  }

  /* Return the options of the plot: size, scales, axes, series and events. */
  function options(view) {
    const { log } = view.settings;
    const axis = {
      stroke: () => css("--dim"), grid: { stroke: () => css("--line"), width: 1 }, ticks: { show: false }, gap: 4,
      font: "12px system-ui, sans-serif", labelFont: "12px system-ui, sans-serif",
      values: (plot, splits) => splits.map((value) => (value === null ? "" : number(value))),
    };
    const y = log ? { distr: 3, range: (plot, low, high) => (low ? [low / 1.05, high * 1.05] : [1, 10]) } : {};
    return {
      width: Math.max(view.box.clientWidth, 100), height: height(view), padding: [8, 12, 0, 0], legend: { show: false },
      scales: { x: { time: false }, y },
      axes: [
        { ...axis, size: 22, label: along(view), labelSize: 18, labelGap: 0 },
        { ...axis, size: 56, ...(log ? { splits: logSplits, filter: (plot, splits) => splits } : {}) },
      ],
      series: [{}, ...view.tracks.map(series)], bands: bands(view), cursor: cursor(view),
      hooks: { setCursor: [() => moved(view)], setSelect: [() => selected(view)] },
    };
  }

  /* Return the style of a track. */
  function series({ line, kind }) {
    const bounds = kind === "low" || kind === "high";
    return {
      stroke: () => (bounds ? "transparent" : css(`--line-${line.color}`)), show: line.shown,
      points: { show: false, size: 5, filter: (plot, at) => (kind === "main" ? alone(plot.data[at]) : null) },
      width: kind === "main" ? WIDTH : 1, alpha: kind === "raw" ? 0.35 : 1, dash: kind === "main" ? dashes(line) : [],
    };
  }

  /* Return the indices of points between gaps, of which no line would be drawn; undefined is the x of another line. */
  function alone(ys) {
    const own = [...ys.keys()].filter((at) => ys[at] !== undefined);
    return own.filter((at, place) => {
      return ys[at] !== null && [own[place - 1], own[place + 1]].every((next) => next === undefined || ys[next] === null);
    });
  }

  /* Return the bands between the lowest and the highest values. */
  function bands(view) {
    const found = [];
    view.tracks.forEach(({ line, kind }, at) => {
      if (kind === "high") found.push({ series: [at + 1, at + 2], fill: () => `${css(`--line-${line.color}`)}33` });
    });
    return found;
  }

  /* Return ticks: round numbers, or powers of ten if there are several. */
  function logSplits(plot, axis, low, high) {
    const ticks = [];
    if (high / low >= 20) {
      const parts = high / low < 1e3 ? [1, 2, 5] : [1];
      for (let power = 10 ** Math.floor(Math.log10(low)); power <= high; power *= 10) {
        ticks.push(...parts.map((part) => part * power).filter((tick) => tick >= low && tick <= high));
      }
      return ticks;
    }
    const rough = (high - low) / 5;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = power * [1, 2, 5, 10].find((part) => part * power >= rough);
    for (let tick = Math.ceil(low / step) * step; tick <= high; tick += step) ticks.push(tick);
    return ticks;
  }

  /* Return the height of a plot. */
  function height({ figure }) {
    return figure.classList.contains("large") ? LARGE : HEIGHT;
  }

  /* Fit a plot to its box. */
  function resize(view) {
    const size = { width: view.box.clientWidth, height: height(view) };
    if (size.width && (size.width !== view.plot.width || size.height !== view.plot.height)) view.plot.setSize(size);
  }

  // --- a chart alone: large, or as a file ---

  /* Return the button that enlarges a chart, and the link to its points. */
  function tools(view) {
    const { name, title } = view.chart;
    view.enlarge = element("button", { type: "button", "aria-pressed": "false", "aria-label": `Enlarge ${title}` }, "Enlarge");
    view.enlarge.addEventListener("click", () => setLarge(view, !view.figure.classList.contains("large")));
    const { of } = block.dataset;
    const file = element("a", { href: "#", download: `${of ? `${of}-` : ""}${name}.csv`, "aria-label": `Save ${title} as CSV` }, "CSV");
    file.addEventListener("click", () => { file.href = `data:text/csv;charset=utf-8,${encodeURIComponent(csv(view))}`; });
    return element("span", { class: "tools" }, view.enlarge, file);
  }

  /* Draw a chart over the width of the page, or as before. */
  function setLarge(view, large) {
    view.figure.classList.toggle("large", large);
    view.enlarge.setAttribute("aria-pressed", String(large));
    resize(view);
    view.figure.scrollIntoView({ block: "nearest" });
  }

  /* Return the points of a chart, not smoothed: a column for each line, and two for the bounds of one that has a band. */
  function csv(view) {
    const kept = view.tracks.filter(({ kind }) => kind !== "raw");
    const heads = kept.map(({ line, kind }) => `${line.name || view.chart.title}${kind === "main" ? "" : ` ${kind}`}`);
    const columns = uPlot.join(kept.map(({ drawn, kind, ys }) => [drawn.xs, kind === "main" ? drawn.ys : ys]));
    const rows = columns[0].map((_, at) => columns.map((ys) => ys[at]).join(","));
    return [[along(view), ...heads.map((head) => `"${head.replaceAll('"', '""')}"`)].join(","), ...rows, ""].join("\n");
  }

  // --- legend ---

  /* Return a picture of a line's color and dashes. */
  function swatch(line) {
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    const stroke = document.createElementNS("http://www.w3.org/2000/svg", "line");
    svg.setAttribute("viewBox", "0 0 36 10");
    svg.setAttribute("aria-hidden", "true");
    for (const [key, value] of Object.entries({ x1: 0, x2: 36, y1: 5, y2: 5 })) stroke.setAttribute(key, value);
    stroke.setAttribute("stroke-dasharray", dashes(line).join(" "));
    stroke.style.stroke = `var(--line-${line.color})`;
    svg.append(stroke);
    return svg;
  }

  /* Fill the legend: a place on the axis, and a button for each line. */
  function entries(view) {
    view.place = element("span", { class: "place" });
    view.legend.replaceChildren(view.place, ...view.lines.map((line) => entry(view, line)));
    values(view);
  }

  /* Return a line's entry in the legend, a button that shows or hides it. */
  function entry(view, line) {
    const title = "Show or hide this line";
    const button = element("button", { type: "button", title, "aria-pressed": String(line.shown) });
    line.value = element("span", { class: "value" });
    button.append(swatch(line), element("span", {}, line.name || view.chart.title), line.value);
    button.addEventListener("click", () => {
      line.shown = !line.shown;
      button.setAttribute("aria-pressed", String(line.shown));
      view.tracks.forEach((track, at) => {
        if (track.line === line) view.plot.setSeries(at + 1, { show: line.shown });
      });
    });
    return button;
  }

  /* Write the values at the crosshair into the legend; without one the last ones. */
  function values(view) {
    view.place.textContent = view.x === null ? "last" : `${along(view)} ${number(view.x, 7)}`;
    for (const { line, drawn, kind, ys } of view.tracks) {
      if (kind === "main") line.value.textContent = valueOf(view, line.last, drawn, ys);
    }
  }

  /* Return the value of a line at the crosshair as text, with its range or smoothed value; without one that of the end. */
  function valueOf(view, last, line, ys) {
    const atEnd = view.x === null;
    const at = atEnd ? lastKnown(line) : nearest(line, view.x);
    const cameLast = atEnd && last;
    if (at < 0 && !cameLast) return "–";
    const text = `${cameLast || number(line.ys[at])} ${view.chart.unit}`.trimEnd();
    if (at < 0 || line.ys[at] === null) return text;
    // The range at the last step is not that of the value which came last.
    if (line.band) return cameLast ? text : `${text} (${line.band[at].map((y) => number(y)).join(" to ")})`;
    return view.settings.weight ? `${text} (smoothed ${number(ys[at])})` : text;
  }

  // --- crosshair: in all charts with the same axis at once ---

  /* Return all charts with the same axis. */
  function peers(view) {
    return [...views.values()].filter((other) => along(other) === along(view));
  }

  /* Return the options of the crosshair, which snaps to points. */
  function cursor(view) {
    return {
      y: false,
      points: { size: 7 },
      drag: { x: true, y: false, setScale: false },
      move: (plot, left, top) => [left < 0 ? left : plot.valToPos(plot.data[0][plot.posToIdx(left)], "x"), top],
      dataIdx: (plot, at, index) => (at ? marked(view, plot, at, index) : index),
      bind: { dblclick: () => () => zoom(view, null) },
    };
  }

  /* Return the place of a line's point that is marked: the nearest with a value, since lines do not share all x. */
  function marked(view, plot, at, index) {
    if (view.tracks[at - 1].kind !== "main") return null;
    const ys = plot.data[at];
    for (let off = 0; off < ys.length; off++) {
      for (const place of [index - off, index + off]) {
        if (ys[place] !== undefined) return place;
      }
    }
    return null;
  }

  /* Show the values at the crosshair, and move those of the other charts. */
  function moved(view) {
    if (!view.plot) return;
    const { idx, left } = view.plot.cursor;
    view.x = left < 0 || idx === null || idx === undefined ? null : view.plot.data[0][idx];
    values(view);
    if (following) return;
    following = true;
    for (const other of peers(view)) {
      if (other !== view) show(other, view.x);
    }
    following = false;
  }

  /* Move the crosshair to a place on the axis; null hides it. */
  function show(view, x) {
    const { min, max } = view.plot.scales.x;
    const visible = x !== null && x >= min && x <= max;
    view.plot.setCursor({ left: visible ? view.plot.valToPos(x, "x") : OUTSIDE, top: 0 });
  }

  // --- zoom ---

  /* Zoom in to the range that was dragged over. */
  function selected(view) {
    const { left, width } = view.plot.select;
    if (!width) return;
    const range = [left, left + width].map((at) => view.plot.posToVal(at, "x"));
    view.plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    zoom(view, range);
  }

  /* Show a range of the axis in all charts that have it; null shows all. */
  function zoom(view, range) {
    for (const other of peers(view)) {
      other.range = range;
      redraw(other);
    }
  }

  /* Zoom in and show the crosshair as before the drawing. */
  function restore(view) {
    const { x, range } = view;
    if (range) view.plot.setScale("x", { min: range[0], max: range[1] });
    if (x !== null) show(view, x);
  }

  /* Zoom around the crosshair, else the middle; below 1 zooms in. */
  function zoomBy(view, factor) {
    const { min, max } = view.plot.scales.x;
    const middle = view.x ?? (min + max) / 2;
    zoom(view, [middle - (middle - min) * factor, middle + (max - middle) * factor]);
  }

  // --- keys ---

  const KEYS = {
    ArrowLeft: (at, by) => at - by,
    ArrowRight: (at, by) => at + by,
    Home: () => 0,
    End: () => Infinity,
  };

  /* Move the crosshair or zoom by a key. */
  function pressed(view, event) {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    if (event.key in KEYS) step(view, (at) => KEYS[event.key](at, event.shiftKey ? 10 : 1));
    else if (event.key === "Escape") show(view, null);
    else if (event.key === "+") zoomBy(view, 0.5);
    else if (event.key === "-") zoomBy(view, 2);
    else if (event.key === "0") zoom(view, null);
    else return;
    event.preventDefault();
  }

  /* Move the crosshair along the points, and read the values there out. */
  function step(view, next) {
    const xs = view.plot.data[0];
    if (!xs.length) return;
    const { min, max } = view.plot.scales.x;
    let [first, last] = [0, xs.length - 1];
    while (first < last && xs[first] < min) first += 1;
    while (last > first && xs[last] > max) last -= 1;
    // Without a crosshair, the first key shows the end: there are the values that are looked for.
    const at = next(view.x === null ? last + 1 : view.plot.cursor.idx);
    show(view, xs[Math.max(first, Math.min(at, last))]);
    const shown = view.lines.filter((line) => line.shown);
    const texts = shown.map((line) => `${line.name || view.chart.title} ${line.value.textContent}`);
    view.spoken.textContent = `${view.place.textContent}: ${texts.join("; ")}`;
  }

  // --- charts that grow ---

  /* Draw the points that a chart has now. */
  function redraw(view) {
    clearTimeout(view.waiting);
    view.waiting = 0;
    view.drawn = performance.now();
    const before = view.tracks.length;
    view.tracks = tracks(view);
    if (view.tracks.length !== before) return build(view);
    view.plot.setData(data(view), !view.range);
    restore(view);
    values(view);
  }

  /* Redraw a chart soon, at most once in PAUSE. */
  function later(view) {
    view.waiting ||= setTimeout(() => redraw(view), Math.max(0, view.drawn + PAUSE - performance.now()));
  }

  /* Draw a chart in a new figure of a container, unless the page has one of its name. */
  function add(container, chart) {
    if (views.has(chart.name)) return;
    const figure = element("figure", { "data-chart": chart.name });
    const caption = element("figcaption");
    caption.append(element("strong", {}, chart.title), element("br"), element("span", { class: "dim" }, chart.caption));
    figure.append(caption);
    container.append(figure);
    const section = container.closest("section");
    if (section) section.hidden = false;
    newView(figure, { lines: [], ...chart });
  }

  /* Add points to a line of a chart; a new line if there is none of this name. */
  function append(name, lineName, points, more = {}) {
    const view = views.get(name);
    if (!view) return;
    let line = view.lines.find((other) => other.name === lineName);
    const isNew = !line;
    if (isNew) {
      line = newLine(view.lines.length, { name: lineName });
      view.lines.push(line);
    }
    const before = along(view);
    extend(line, points, view.chart.along === "step", more);
    view.chart.remark = more.remark || view.chart.remark;
    const values = view.lines.flatMap((each) => (each.band ? each.band.flat() : each.ys));
    view.caption = [span(values, view.chart.unit), view.chart.remark].filter(Boolean).join("; ");
    describe(view);
    offerTime(view.settings);
    if (isNew || before !== along(view)) build(view);
    else later(view);
  }

  // --- controls of a container's charts ---

  /* Return smoothing, scale and axis of the charts of a container. */
  function settingsOf(container) {
    if (!settings.has(container)) settings.set(container, { weight: 0, log: false, time: false, axis: null });
    return settings.get(container);
  }

  /* Show the choice of the x axis if there is one. */
  function offerTime(chosen) {
    if (chosen.axis) chosen.axis.hidden = ![...views.values()].some((view) => view.settings === chosen && hasTimes(view));
  }

  /* Draw charts over steps, or over time; a zoom and crosshair of the other axis end. */
  function drawOver(container, time) {
    settingsOf(container).time = time;
    for (const view of views.values()) {
      if (view.figure.parentElement === container) Object.assign(view, { x: null, range: null });
    }
    rebuild(container);
  }

  /* Redraw the charts of a container. */
  function rebuild(container) {
    for (const view of views.values()) {
      if (view.figure.parentElement === container) build(view);
    }
  }

  /* Take smoothing, scale and axis from the page's address, which keeps them when the page is loaded again or shared. */
  function readAddress(chosen) {
    const kept = new URLSearchParams(location.hash.slice(1));
    chosen.weight = Math.min(Math.max(Number(kept.get("smoothing")) || 0, 0), MOST_SMOOTH);
    chosen.log = kept.get("scale") === "log";
    chosen.time = kept.get("axis") === "time";
  }

  /* Write smoothing, scale and axis to the page's address. */
  function writeAddress({ weight, log, time }) {
    const all = { smoothing: weight, scale: log && "log", axis: time && "time" };
    history.replaceState(null, "", `#${new URLSearchParams(Object.entries(all).filter(([, value]) => value))}`);
  }

  /* Put controls of smoothing, scale and axis above the charts of a container. */
  function controls(container) {
    const chosen = settingsOf(container);
    readAddress(chosen);
    const slider = element("input", { type: "range", min: "0", max: MOST_SMOOTH, step: "0.01", value: chosen.weight });
    const weight = element("output", {}, String(chosen.weight));
    const log = element("input", { type: "checkbox" });
    log.checked = chosen.log;
    slider.addEventListener("input", () => {
      chosen.weight = Number(slider.value);
      weight.textContent = slider.value;
      rebuild(container);
    });
    log.addEventListener("change", () => {
      chosen.log = log.checked;
      rebuild(container);
    });
    const axis = element("select", {}, element("option", { value: "step" }, "step"), element("option", { value: "time" }, "time"));
    axis.value = chosen.time ? "time" : "step";
    axis.addEventListener("change", () => drawOver(container, axis.value === "time"));
    const bar = element("div", { class: "chart-controls" });
    bar.addEventListener("change", () => writeAddress(chosen));
    const [smoothing, scale] = [element("label", {}, "Smoothing "), element("label")];
    chosen.axis = element("label", { hidden: "hidden" }, "X axis ", axis);
    smoothing.append(slider, weight);
    scale.append(log, " Log scale");
    bar.append(smoothing, scale, chosen.axis, element("span", { class: "dim" }, "Drag or press + to zoom in, double-click or press 0 to zoom out."));
    container.before(bar);
  }

  // --- the page ---

  labctl.charts = { add, append };

  addEventListener("keydown", ({ key }) => {
    if (key === "Escape") document.querySelectorAll("figure.large").forEach((figure) => setLarge(views.get(figure.dataset.chart), false));
  });
  dark.addEventListener("change", () => {
    for (const view of views.values()) view.plot.redraw(false);
  });
  for (const container of document.querySelectorAll(".charts[data-controls]")) controls(container);
  const charts = new Map(JSON.parse(block.textContent || "[]").map((chart) => [chart.name, chart]));
  for (const figure of document.querySelectorAll("figure[data-chart]")) {
    const chart = charts.get(figure.dataset.chart);
    if (chart) newView(figure, chart);
  }
  for (const view of views.values()) offerTime(view.settings);
})();
