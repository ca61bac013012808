/* The page of a run: its log, what a person does to it, and while it is under way its events. All data from the run enters
   the page as text. */
"use strict";
(function () {
  const { root, run, running } = document.currentScript.dataset;
  const base = `${root}/run/${encodeURIComponent(run)}`;
  const byId = (id) => document.getElementById(id);

  function element(name, attributes = {}, ...content) {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...content);
    return made;
  }

  async function answer(address, options) {
    const response = await fetch(`${base}/${address}`, options);
    const data = await response.json().catch(() => ({}));
    if (response.ok) return data;
    const error = data.error || { message: `the server answered ${response.status}`, hint: "" };
    throw new Error(error.hint ? `${error.message}; hint: ${error.hint}` : error.message);
  }

  function post(address, data) {
    return answer(address, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(data) });
  }

  function complain(error) {
    byId("problem").textContent = error.message;
  }

  // --- log ---

  const LINES = 300; // Lines of a window.
  const MOST_ROWS = 3000; // Lines in the page.
  const NEAR = 300; // Pixels from an end at which more is loaded.
  const LOOKS = 8; // Windows without a line of the rank after which a person has to scroll again.
  const box = byId("log-lines");
  // Offsets of the first and behind the last line that are shown, and the length of the log.
  const view = { begin: 0, end: 0, size: 0, follows: true, busy: false, fresh: 0 };
  const count = (number, noun) => `${number.toLocaleString("en-US")} ${noun}${number === 1 ? "" : "s"}`;

  function marked(text, wanted) {
    const at = wanted ? text.toLowerCase().indexOf(wanted.toLowerCase()) : -1;
    if (at < 0) return [text];
    return [text.slice(0, at), element("mark", {}, text.slice(at, at + wanted.length)), text.slice(at + wanted.length)];
  }

  function row(line) {
    const when = line.when === null ? "" : new Date(line.when * 1000).toLocaleString();
    const made = element("div", { class: "row", "data-at": line.at, title: when });
    made.append(
      element("span", { class: "place" }, line.number.toLocaleString("en-US")),
      element("span", { class: "rank" }, line.rank === null ? "" : `r${line.rank}`),
      element("span", { class: "text" }, line.text),
    );
    return made;
  }

  function windowOf(query) {
    const rank = byId("log-rank").value;
    return answer(`log?${new URLSearchParams(rank ? { ...query, rank } : query)}`);
  }

  function status(text = "") {
    byId("log-status").textContent = text;
  }

  function settle() {
    byId("log-end").disabled = view.follows;
    if (view.follows) view.fresh = 0;
    if (!box.childElementCount) status(running ? "No output yet." : "No output.");
    else status(view.fresh ? `${count(view.fresh, "new line")} below` : "");
  }

  function toEnd() {
    view.follows = true;
    box.scrollTop = box.scrollHeight;
    settle();
  }

  function show(shown) {
    Object.assign(view, { begin: shown.begin, end: shown.end, size: shown.size });
    box.replaceChildren(...shown.lines.map(row));
  }

  function append(lines, end) {
    box.append(...lines.map(row));
    view.end = end;
    while (box.childElementCount > MOST_ROWS) box.firstChild.remove();
    const first = box.querySelector(".row");
    if (first && box.childElementCount >= MOST_ROWS) view.begin = Number(first.dataset.at);
  }

  function prepend(lines, begin) {
    const height = box.scrollHeight;
    box.prepend(...lines.map(row));
    box.scrollTop += box.scrollHeight - height;
    view.begin = begin;
    while (box.childElementCount > MOST_ROWS) {
      view.end = Number(box.lastChild.dataset.at ?? view.end);
      box.lastChild.remove();
    }
  }

  // One change of the view at a time; what fails is told.
  async function changing(work) {
    if (view.busy) return;
    view.busy = true;
    try {
      await work();
    } catch (error) {
      complain(error);
    }
    view.busy = false;
    settle();
  }

  function open() {
    return changing(async () => {
      let shown = await windowOf({ before: LINES });
      const { end, size } = shown;
      for (let look = 0; !shown.lines.length && shown.begin > 0 && look < LOOKS; look++) {
        shown = await windowOf({ end: shown.begin, before: LINES });
      }
      show({ ...shown, end, size });
      toEnd();
    });
  }

  function goTo(at) {
    return changing(async () => {
      const [earlier, later] = await Promise.all([windowOf({ end: at, before: 100 }), windowOf({ begin: at, after: 200 })]);
      show({ ...later, begin: earlier.begin, lines: [...earlier.lines, ...later.lines] });
      view.follows = false;
      const found = [...box.children].find((each) => Number(each.dataset.at) >= at);
      if (!found) return;
      found.classList.add("found");
      box.scrollTop = found.offsetTop - box.offsetTop - box.clientHeight / 3;
    });
  }

  function earlier() {
    return changing(async () => {
      for (let look = 0, lines = []; !lines.length && view.begin > 0 && look < LOOKS; look++) {
        const shown = await windowOf({ end: view.begin, before: LINES });
        lines = shown.lines;
        prepend(lines, shown.begin);
      }
    });
  }

  function later() {
    return changing(async () => {
      for (let look = 0, lines = []; !lines.length && view.end < view.size && look < LOOKS; look++) {
        const shown = await windowOf({ begin: view.end, after: LINES });
        lines = shown.lines;
        view.size = shown.size;
        append(lines, shown.end);
      }
    });
  }

  function scrolled() {
    const below = box.scrollHeight - box.clientHeight - box.scrollTop;
    const follows = below < 4 && view.end >= view.size;
    if (follows !== view.follows && !view.busy) {
      view.follows = follows;
      settle();
    }
    if (box.scrollTop < NEAR && view.begin > 0) earlier();
    else if (below < NEAR && view.end < view.size) later();
  }

  function gap(skipped, at) {
    const button = element("button", { type: "button" }, `${count(skipped, "line")} skipped: show`);
    button.addEventListener("click", () => goTo(at));
    return element("div", { class: "gap" }, button);
  }

  // Lines of a run under way; those that have come already do not come again.
  function printed(news) {
    const rank = byId("log-rank").value;
    const lines = news.lines.filter((line) => line.at >= view.size && (!rank || line.rank === Number(rank)));
    const first = !view.size;
    const before = view.end;
    view.size = news.size;
    if (!view.follows || view.busy) {
      view.fresh += lines.length + news.skipped;
      settle();
      return;
    }
    if (first) view.begin = news.begin;
    else if (news.skipped) box.append(gap(news.skipped, before));
    append(lines, news.end);
    view.size = news.end;
    toEnd();
  }

  // --- search ---

  let searches = 0;

  async function search() {
    const wanted = byId("log-search").value;
    const hits = byId("log-hits");
    const number = ++searches;
    hits.hidden = !wanted;
    if (!wanted) {
      hits.replaceChildren();
      return settle();
    }
    try {
      const { lines, more } = await windowOf({ search: wanted });
      if (number !== searches) return; // Another text has been typed.
      hits.replaceChildren(...lines.map((line) => hit(line, wanted)));
      hits.hidden = !lines.length;
      status(more ? `First ${count(lines.length, "matching line")}` : count(lines.length, "matching line"));
    } catch (error) {
      complain(error);
    }
  }

  function hit(line, wanted) {
    const button = element("button", { type: "button" }, `${line.number.toLocaleString("en-US")}: `, ...marked(line.text, wanted));
    button.addEventListener("click", () => goTo(line.at));
    return element("li", {}, button);
  }

  function delayed(work, milliseconds) {
    let timer = 0;
    return () => {
      clearTimeout(timer);
      timer = setTimeout(work, milliseconds);
    };
  }

  function pressed(event) {
    const typing = event.target.matches("input, textarea, select") || document.querySelector("dialog[open]");
    if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey && !event.altKey) {
      event.preventDefault();
      byId("log-search").focus();
    } else if (event.target === box && event.key === "Home") {
      event.preventDefault();
      goTo(0);
    } else if (event.target === box && event.key === "End") {
      event.preventDefault();
      open();
    }
  }

  box.addEventListener("scroll", scrolled, { passive: true });
  byId("log-end").addEventListener("click", open);
  byId("log-search").addEventListener("input", delayed(search, 250));
  byId("log-rank").addEventListener("input", delayed(() => open().then(search), 250));
  document.addEventListener("keydown", pressed);

  // --- stop, note, ranks, path ---

  function asking(button, dialog, work) {
    const opened = byId(dialog);
    byId(button).addEventListener("click", () => opened.showModal());
    opened.querySelector("[data-close]").addEventListener("click", () => opened.close());
    opened.querySelector("form").addEventListener("submit", (event) => {
      event.preventDefault();
      opened.close();
      work(event.target).catch(complain);
    });
  }

  asking("note", "noting", async (form) => {
    await post("note", { text: form.elements.text.value });
    location.reload();
  });

  byId("copy").addEventListener("click", async () => {
    await navigator.clipboard.writeText(byId("path").textContent);
    byId("copy").textContent = "Copied";
  });

  if (!running) {
    open();
    return;
  }

  // What the page said when it was made does not grow.
  for (const old of document.querySelectorAll("header .headline, figcaption .dim")) old.hidden = true;

  let stopping = false;
  asking("stop", "stopping", async () => {
    stopping = true;
    byId("stop").disabled = true;
    word("stopping");
    try {
      await post("stop", {});
      location.reload();
    } catch (error) {
      stopping = false;
      byId("stop").disabled = false;
      word("running");
      throw error;
    }
  });

  byId("stacks").addEventListener("click", async () => {
    byId("stacks").disabled = true;
    try {
      const hang = await post("stacks", {});
      byId("waits-sentence").textContent = hang.sentence;
      byId("waits-lines").textContent = (hang.lines || []).join("\n");
      byId("waits-lines").hidden = !(hang.lines || []).length;
      byId("waits").hidden = false;
    } catch (error) {
      complain(error);
    }
    byId("stacks").disabled = false;
  });

  // --- state ---

  const UNITS = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];
  let state = null;
  let since = 0;

  function duration(seconds) {
    const whole = Math.round(seconds);
    const at = Math.max(0, UNITS.findIndex(([, length]) => whole >= length * (length === 60 ? 2 : 1)));
    if (whole < 120) return seconds < 10 && seconds % 1 ? `${Number(seconds.toPrecision(2))} s` : `${whole} s`;
    const [[unit, length], smaller] = [UNITS[at], UNITS[at + 1]];
    const rest = smaller ? Math.floor((whole % length) / smaller[1]) : 0;
    return `${Math.floor(whole / length)} ${unit}${rest ? ` ${rest} ${smaller[0]}` : ""}`;
  }

  function word(text) {
    byId("state").textContent = text;
  }

  function figure([name, metric]) {
    const value = metric.value === null ? metric.note : labctl.charts.number(metric.value);
    return element("li", {}, `${name} ${value} ${metric.unit || ""}`.trimEnd());
  }

  function told() {
    const parts = [];
    if (state.step !== null) parts.push(`${state.counts} ${state.step}${state.steps ? ` of ${state.steps}` : ""}`);
    if (state.seconds_per_step) parts.push(`${duration(state.seconds_per_step)} per ${state.counts}`);
    if (state.seconds_left !== null) parts.push(`${duration(state.seconds_left)} left`);
    parts.push(`${duration(state.seconds + (performance.now() - since) / 1000)} of ${duration(state.timeout)} allowed`);
    byId("progress-text").textContent = parts.join(", ");
  }

  function changed(news) {
    state = news;
    since = performance.now();
    if (!stopping) word(state.state);
    const bar = byId("progress");
    bar.hidden = !state.steps;
    if (state.steps) Object.assign(bar, { max: state.steps, value: state.step });
    byId("figures").replaceChildren(...Object.entries(state.metrics).map(figure));
    byId("late").textContent = state.straggler;
    byId("connection").textContent = state.problem;
    told();
  }

  setInterval(() => state && !document.hidden && told(), 1000);

  // --- charts ---

  function appeared(chart) {
    const known = [...document.querySelectorAll("figure[data-chart]")].some((each) => each.dataset.chart === chart.name);
    if (known) return;
    const container = byId(chart.section);
    container.closest("section").hidden = false;
    labctl.charts.add(container, chart);
  }

  function grown(lines) {
    for (const { chart, line, points } of lines) labctl.charts.append(chart, line, points);
  }

  // --- events ---

  let source = null;
  let place = "";

  function connect() {
    source = new EventSource(place ? `${base}/events?place=${encodeURIComponent(place)}` : `${base}/events`);
    const on = (name, work) =>
      source.addEventListener(name, (event) => {
        work(JSON.parse(event.data));
        place = event.lastEventId || place;
      });
    on("chart", appeared);
    on("points", grown);
    on("log", printed);
    on("state", changed);
    on("ended", () => {
      source.close();
      location.reload();
    });
    source.addEventListener("open", () => (byId("connection").textContent = ""));
    source.addEventListener("error", () => {
      const lost = source.readyState === EventSource.CLOSED;
      byId("connection").textContent = lost
        ? "Not connected. Is `labctl ui` still running?"
        : "Connection lost. Reconnecting…";
    });
  }

  // A browser opens few connections to a server: pages that nobody sees leave theirs to others.
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) source.close();
    else connect();
  });
  connect();
  settle();
})();
