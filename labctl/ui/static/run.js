/* The page of a run: its buttons, and while the run is under way its progress and charts, by server-sent events. */
"use strict";
(() => {
  const { element, number, duration, byId, root, post, showError, charts, log } = labctl;
  const { run, running } = document.currentScript.dataset;
  const path = `/run/${encodeURIComponent(run)}`;
  const LISTED = 10_000;
  let listed = performance.now();
  let isStopping = false;
  let state = null;
  let stateCame = 0; // When the state came, as performance.now() has it.
  let source = null;
  let lastEvent = "";

  // --- buttons ---

  /* Open a dialog by a button; do the work if the dialog is confirmed. */
  function confirmed(button, dialog, work) {
    const opened = byId(dialog);
    byId(button).addEventListener("click", () => opened.showModal());
    opened.querySelector("[data-close]").addEventListener("click", () => opened.close());
    opened.querySelector("form").addEventListener("submit", (event) => {
      event.preventDefault();
      opened.close();
      work(event.target).catch(showError);
    });
  }

  /* Save the note, and show it. */
  async function saveNote(form) {
    await post(`${path}/note`, { text: form.elements.text.value });
    location.reload();
  }

  /* Stop the run, and show its result. */
  async function stop() {
    setStopping(true);
    try {
      await post(`${path}/stop`);
      location.reload();
    } catch (error) {
      setStopping(false);
      throw error;
    }
  }

  /* Show that the run is being stopped, or is not. */
  function setStopping(is) {
    isStopping = is;
    byId("stop").disabled = is;
    byId("state").textContent = is ? "stopping" : "running";
  }

  /* Show what the ranks are waiting for. */
  async function showStacks() {
    byId("stacks").disabled = true;
    try {
      const { sentence, lines = [] } = await post(`${path}/stacks`);
      byId("waits-sentence").textContent = sentence;
      byId("waits-lines").textContent = lines.join("\n");
      byId("waits-lines").hidden = !lines.length;
      byId("waits").hidden = false;
    } catch (error) {
      showError(error);
    }
    byId("stacks").disabled = false;
  }

  // --- progress ---

  /* Show the state, the steps, the metrics and the slow node of the run. */
  function showState(news) {
    state = news;
    stateCame = performance.now();
    if (!isStopping) byId("state").textContent = state.state;
    const bar = byId("progress");
    bar.hidden = !state.steps;
    if (state.steps) Object.assign(bar, { max: state.steps, value: state.step });
    byId("figures").replaceChildren(...Object.entries(state.metrics).map(newMetric));
    byId("late").textContent = state.hang || state.straggler;
    byId("connection").textContent = state.problem;
    showTime();
    listFiles().catch(() => {}); // Tried again at the next change.
  }

  /* Return the last value of a metric as an entry of the headline. */
  function newMetric([name, metric]) {
    const value = metric.value === null ? metric.note : number(metric.value);
    return element("li", {}, `${name} ${value} ${metric.unit || ""}`.trimEnd());
  }

  /* Show steps and times, which go on between two events. */
  function showTime() {
    const parts = [];
    if (state.step !== null) parts.push(`${state.counts} ${state.step}${state.steps ? ` of ${state.steps}` : ""}`);
    if (state.seconds_per_step) parts.push(`${duration(state.seconds_per_step)} per ${state.counts}`);
    if (state.seconds_left !== null) parts.push(`${duration(state.seconds_left)} left`);
    const elapsed = state.seconds + (performance.now() - stateCame) / 1000;
    parts.push(`${duration(elapsed)} elapsed (limit ${duration(state.timeout)})`);
    byId("progress-text").textContent = parts.join(", ");
  }

  // --- files ---

  /* List the files again, at most every LISTED milliseconds, unless a person is in the list. */
  async function listFiles() {
    const before = document.querySelector("table.files");
    if (performance.now() - listed < LISTED || before.contains(document.activeElement)) return;
    listed = performance.now();
    const folder = await fetch(`${root}${path}/files/`, { headers: { accept: "text/html" } });
    const now = new DOMParser().parseFromString(await folder.text(), "text/html").querySelector("table.files");
    if (!folder.ok || !now) return;
    now.rows[0].remove(); // The way back to this page.
    before.replaceWith(document.adoptNode(now));
  }

  // --- charts ---

  /* Add a chart that has appeared, unless the page has it. */
  function addChart(chart) {
    if (document.querySelector(`figure[data-chart="${CSS.escape(chart.name)}"]`)) return;
    charts.add(byId(chart.section), chart);
  }

  /* Add new points to their charts. */
  function addPoints(lines) {
    for (const { chart, line, points, ...more } of lines) charts.append(chart, line, points, more);
  }

  // --- events ---

  const WORK = { chart: addChart, points: addPoints, log: log.addNew, state: showState, ended: showResult };

  /* Receive the events of the run after the last one that came. */
  function connect() {
    source = new EventSource(`${root}${path}/events?${new URLSearchParams({ place: lastEvent })}`);
    for (const [name, work] of Object.entries(WORK)) {
      source.addEventListener(name, (event) => {
        work(JSON.parse(event.data));
        lastEvent = event.lastEventId || lastEvent;
      });
    }
    source.addEventListener("open", () => { byId("connection").textContent = ""; });
    source.addEventListener("error", showLostConnection);
  }

  /* Receive events while somebody sees the page. */
  function connectIfSeen() {
    source?.close();
    if (!document.hidden) connect();
  }

  /* Show the page of the run that has ended. */
  function showResult() {
    source.close();
    location.reload();
  }

  /* Show that no events come. */
  function showLostConnection() {
    const isClosed = source.readyState === EventSource.CLOSED;
    byId("connection").textContent = isClosed ? "Not connected. Is `labctl ui` still running?" : "Connection lost. Reconnecting…";
  }

  /* Show the run live. */
  function begin() {
    // Values in the page when it was loaded do not change.
    for (const old of document.querySelectorAll("header .headline")) old.hidden = true;
    confirmed("stop", "stopping", stop);
    byId("stacks").addEventListener("click", showStacks);
    setInterval(() => state && !document.hidden && showTime(), 1000);
    // A browser opens few connections to a server: hidden pages leave theirs to others.
    document.addEventListener("visibilitychange", connectIfSeen);
    connectIfSeen();
  }

  confirmed("note", "noting", saveNote);
  if (running) begin();
})();
