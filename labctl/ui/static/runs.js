/* The list of runs, which is sorted and filtered here; the server compares settings and further metrics, and sends runs that change. */
"use strict";
(() => {
  const { element, number, duration, ago, count, byId, root, ask, showError } = labctl;
  const { now, seconds, verdict, parse, matches, ordering, columnOf, isColumn, isMissing } = labctl.filter;
  const { columns } = labctl;
  const FIRST = 200; // Runs of the first request.
  const STEP = 100; // Rows that are added at once.
  const MOST = 20; // Runs that can be compared.
  const LONGEST = 60; // Characters of a cell.
  const PAUSE = 30000; // Milliseconds between two updates of the times.
  const DEFAULTS = { sort: "-started", query: "", workload: "", verdict: "", since: "" };
  const SELECTS = ["workload", "verdict", "since"];
  const DESCENDING_FIRST = ["started", "throughput", "nodes", "time"];
  const body = byId("runs");
  const runs = new Map();
  const selected = new Set();
  const further = new Set(); // Names of further columns.
  let chosen = { ...DEFAULTS }; // Order and filter.
  let terms = parse("");
  let answered = null; // Ids of the runs that match the terms for the server; null without such terms.
  let requests = 0; // Number of the last request for these.
  let listed = []; // Runs that match the filter, in order.
  let most = STEP; // Rows that are shown.
  let rows = new Map(); // Each row that is shown with the run that it was filled with, by id.
  let change = 0; // Number of the last change that the server sent.
  let total = 0;
  let events = null;

  // --- the address, which keeps order, filter, columns and selection ---

  /* Take order, filter, columns and selection from the address. */
  function readAddress() {
    const kept = new URLSearchParams(location.hash.slice(1));
    chosen = Object.fromEntries(Object.entries(DEFAULTS).map(([name, value]) => [name, kept.get(name) ?? value]));
    if (!isColumn(columnOf(chosen.sort))) chosen.sort = DEFAULTS.sort;
    for (const [names, name] of [[selected, "pick"], [further, "column"]]) {
      names.clear();
      for (const value of kept.getAll(name)) names.add(value);
    }
  }

  /* Write order, filter, columns and selection to the address. */
  function writeAddress() {
    const kept = new URLSearchParams(Object.entries(chosen).filter(([name, value]) => value !== DEFAULTS[name]));
    for (const name of further) kept.append("column", name);
    for (const id of selected) kept.append("pick", id);
    history.replaceState(null, "", `#${kept}`);
  }

  // --- runs ---

  /* Keep the runs of an answer, and forget those that were removed. */
  function keep(answer) {
    for (const run of answer.runs) {
      const words = [run.id, run.workload, run.cause, run.note, verdict(run), ...(run.nodes ?? [])];
      runs.set(run.id, { ...run, text: words.join("\n").toLowerCase() });
    }
    for (const id of answer.removed) {
      runs.delete(id);
      selected.delete(id);
    }
    total = answer.total;
    change = answer.change;
    showWorkloads();
  }

  /* Ask which runs match the terms for the server; an answer is dropped if there was a later request. */
  async function askTerms() {
    const request = ++requests;
    if (!terms.asked.length) {
      answered = null;
      showProblems();
      body.removeAttribute("aria-busy");
      return;
    }
    body.setAttribute("aria-busy", "true");
    try {
      const answer = await ask(`/runs.json?${new URLSearchParams(terms.asked.map((term) => ["term", term]))}`);
      if (request !== requests) return;
      answered = new Set(answer.runs);
      showProblems(answer.unknown);
    } finally {
      if (request === requests) body.removeAttribute("aria-busy");
    }
  }

  /* Say which terms of the filter cannot match. */
  function showProblems(unknown = {}) {
    const missing = Object.entries(unknown).map(([name, similar]) => {
      const question = similar ? ` Did you mean “${plain(similar)}”?` : "";
      return `No run has a metric, argument or setting “${plain(name)}”.${question}`;
    });
    byId("problems").textContent = [...terms.problems, ...missing].join(" ");
  }

  // --- rows ---

  /* Return a text without characters that control a terminal or change the direction of writing. */
  function plain(text) {
    return text.replace(/[\u0000-\u001f\u007f-\u009f\u200e\u200f\u202a-\u202e\u2066-\u2069]/g, "\ufffd");
  }

  /* Write a text to a cell, cut if it is long; the whole text is its title. */
  function write(cell, text, title = "") {
    const whole = plain(text);
    const shown = whole.length > LONGEST ? `${whole.slice(0, LONGEST - 1)}…` : whole;
    if (cell.textContent !== shown) cell.textContent = shown;
    cell.title = title || (shown === whole ? "" : whole);
  }

  /* Return an empty row of a run. */
  function newRow(id) {
    const link = element("a", { href: `${root}/run/${encodeURIComponent(id)}`, title: id });
    const numbers = ["Loss", "Throughput", "Nodes", "Time"];
    return element("tr", { "data-run": id },
      element("td", { class: "pick" }, newCheckbox(id)),
      element("th", { scope: "row" }, link),
      element("td", { "data-head": "When" }, element("time")),
      element("td", { "data-head": "Workload" }),
      element("td"),
      element("td", { "data-head": "Cause" }),
      ...numbers.map((head) => element("td", { "data-head": head, class: "number" })),
      ...[...further].map((name) => element("td", { "data-head": name })),
      element("td", { "data-head": "Note" }));
  }

  /* Return the checkbox that selects a run. */
  function newCheckbox(id) {
    const checkbox = element("input", { type: "checkbox", "aria-label": `Select ${id}` });
    checkbox.addEventListener("change", () => {
      if (checkbox.checked) selected.add(id);
      else selected.delete(id);
      writeAddress();
      showSelected();
    });
    return checkbox;
  }

  /* Write the values of a run to its row. */
  function fill(row, run) {
    const [pick, name, when, workload, result, cause, loss, throughput, nodes, time, ...rest] = row.children;
    pick.firstChild.checked = selected.has(run.id);
    write(name.firstChild, run.short, run.id);
    const start = run.started ? new Date(run.started * 1000) : null;
    when.firstChild.dateTime = start?.toISOString() ?? "";
    write(when.firstChild, start ? ago(now() - run.started) : "", start?.toLocaleString() ?? "");
    write(workload, run.workload ?? "");
    write(result, [verdict(run), run.outcome ? "" : run.step].filter(Boolean).join(" "));
    // A run that was stopped has not failed.
    result.className = `status ${run.cause === "interrupted" ? "interrupted" : verdict(run).toLowerCase()}`;
    write(cause, run.cause ?? "");
    write(loss, figure(run.loss));
    write(throughput, isMissing(run.value) ? "" : [run.metric, figure(run.value), run.unit].filter(Boolean).join(" "));
    write(nodes, run.nodes?.length ? String(run.nodes.length) : "", run.nodes?.join(", "));
    write(time, seconds(run) ? duration(seconds(run)) : "");
    write(rest.pop(), run.note ?? "");
    for (const [place, name] of [...further].entries()) writeFurther(rest[place], columns.value(name, run));
  }

  /* Write a value to the cell of a further column, on the right if it is a number. */
  function writeFurther(cell, value) {
    cell.className = !isMissing(value) && Number.isNaN(Number(value)) ? "further" : "number";
    write(cell, figure(value));
  }

  /* Format a number; a text, such as nan, as it is. */
  function figure(value) {
    return typeof value === "number" ? number(value) : value ?? "";
  }

  /* Show the first runs that are listed; rows of runs that stay are kept, with the focus in them. */
  function draw() {
    const before = rows;
    rows = new Map();
    for (const run of listed.slice(0, most)) {
      const known = before.get(run.id);
      const row = known?.row ?? newRow(run.id);
      if (known?.run !== run) fill(row, run);
      rows.set(run.id, { row, run });
    }
    replaceRows([...rows.values()].map(({ row }) => row));
    const left = listed.length - rows.size;
    byId("more").hidden = !left;
    byId("more").textContent = `Show more (${left.toLocaleString("en-US")} left)`;
  }

  /* Put rows in the table, unless it has the same. */
  function replaceRows(wanted) {
    if (wanted.length === body.children.length && wanted.every((row, place) => body.children[place] === row)) return;
    const focused = document.activeElement;
    body.replaceChildren(...wanted);
    if (focused !== document.activeElement && body.contains(focused)) focused.focus({ preventScroll: true });
  }

  /* Fill all rows again: times go on, and checkboxes follow the selection. */
  function refill() {
    for (const { row, run } of rows.values()) fill(row, run);
    showSelected();
  }

  /* Show more rows. */
  function showMore() {
    most += STEP;
    draw();
  }

  // --- around the table ---

  /* Show the runs that match the filter, and their number. */
  function update() {
    const isListed = (run) => matches(run, terms, chosen) && (!answered || answered.has(run.id));
    listed = [...runs.values()].filter(isListed).sort(ordering(chosen.sort));
    draw();
    // Values of further columns come after the rows.
    if (further.size) refill();
    const isFiltered = chosen.query || SELECTS.some((name) => chosen[name]);
    const all = count(total, "run");
    // It is read aloud when it changes.
    write(byId("count"), isFiltered ? `${listed.length.toLocaleString("en-US")} of ${all}` : all);
    byId("all").hidden = !isFiltered;
    byId("reading").hidden = true;
    byId("none").hidden = total > 0;
    byId("controls").hidden = total === 0;
    showSelected();
  }

  /* Show the link that compares the selected runs, or why there is none. */
  function showSelected() {
    const link = byId("compare");
    link.hidden = selected.size < 2 || selected.size > MOST;
    link.textContent = `Compare ${selected.size}`;
    link.href = `${root}/compare?${new URLSearchParams([...selected].map((id) => ["run", id]))}`;
    byId("clear").hidden = !selected.size;
    byId("picking").classList.toggle("stuck", selected.size > 0);
    const first = listed.slice(0, MOST);
    byId("first").checked = first.length > 0 && first.every((run) => selected.has(run.id));
    const tooMany = `${selected.size} selected. You can compare at most ${MOST}.`;
    const hint = selected.size > MOST ? tooMany : "1 selected. Select another run to compare.";
    byId("picked").textContent = link.hidden && selected.size ? hint : "";
  }

  /* Show the order in the heads of the columns, and in the select of narrow pages. */
  function showSort() {
    const direction = chosen.sort.startsWith("-") ? "descending" : "ascending";
    for (const head of document.querySelectorAll("th[data-sort]")) {
      if (head.dataset.sort === columnOf(chosen.sort)) head.setAttribute("aria-sort", direction);
      else head.removeAttribute("aria-sort");
    }
    byId("sort").value = chosen.sort;
  }

  /* Show the filter and the order in their controls. */
  function showFilter() {
    byId("query").value = chosen.query;
    for (const name of SELECTS) byId(name).value = chosen[name];
    showSort();
  }

  /* Offer the workloads of all runs in the filter. */
  function showWorkloads() {
    const select = byId("workload");
    const names = new Set([...runs.values()].map((run) => run.workload).filter(Boolean));
    if (chosen.workload) names.add(chosen.workload);
    const values = ["", ...[...names].sort()];
    if (values.length === select.options.length && values.every((name, place) => select.options[place].value === name)) return;
    select.replaceChildren(...values.map((name) => new Option(name ? plain(name).slice(0, LONGEST) : "all", name)));
    select.value = chosen.workload;
  }

  // --- controls ---

  /* List runs by the order and filter that were chosen. */
  async function changed() {
    writeAddress();
    most = STEP;
    terms = parse(chosen.query);
    try {
      await Promise.all([askTerms(), columns.load([...further])]);
      showError(null);
    } catch (error) {
      showError(error);
    }
    update();
  }

  /* Sort by a column, "-" before its name for descending. */
  function sortBy(sort) {
    chosen.sort = sort;
    showSort();
    changed();
  }

  /* Sort by the head of a column, the other way by the next click; and by the select of narrow pages. */
  function offerSort(head) {
    const column = head.dataset.sort;
    const [first, second] = DESCENDING_FIRST.includes(column) ? [`-${column}`, column] : [column, `-${column}`];
    head.firstElementChild.addEventListener("click", () => sortBy(chosen.sort === first ? second : first));
  }

  /* Offer the order by each column in the select of narrow pages. */
  function showSortOptions() {
    byId("sort").replaceChildren(...[...document.querySelectorAll("th[data-sort]")].flatMap((head) => {
      const [column, title] = [head.dataset.sort, head.textContent.trim()];
      const shown = column.startsWith("=") ? title : title.toLowerCase();
      return [new Option(`${shown}, ascending`, column), new Option(`${shown}, descending`, `-${column}`)];
    }));
  }

  /* Show the heads of further columns, and draw all rows again with their cells. */
  function showColumns() {
    for (const head of document.querySelectorAll('th[data-sort^="="]')) head.remove();
    for (const name of further) {
      const head = element("th", { scope: "col", "data-sort": `=${name}` }, element("button", { type: "button" }, name));
      document.querySelector('th[data-sort="note"]').before(head);
      offerSort(head);
    }
    showSortOptions();
    showSort();
    rows = new Map();
  }

  /* Add or remove a further column. */
  function chooseColumn(name, isChosen) {
    if (isChosen) further.add(name);
    else further.delete(name);
    if (!isChosen && columnOf(chosen.sort) === `=${name}`) chosen.sort = DEFAULTS.sort;
    showColumns();
    changed();
  }

  /* Select the first runs of the list, as many as can be compared, or none. */
  function selectFirst(isSelected) {
    selected.clear();
    for (const run of isSelected ? listed.slice(0, MOST) : []) selected.add(run.id);
    writeAddress();
    refill();
  }

  /* Move to the filter by "/", unless a person types it. */
  function focusFilter(event) {
    const isTyped = event.target.closest("input:not([type=checkbox]), textarea, select") || event.ctrlKey || event.metaKey || event.altKey;
    if (event.key !== "/" || isTyped) return;
    event.preventDefault();
    byId("query").focus();
  }

  /* Select no runs. */
  function clearSelection() {
    selected.clear();
    writeAddress();
    refill();
    byId("query").focus();
  }

  /* List all runs. */
  function clearFilter() {
    chosen = { ...DEFAULTS, sort: chosen.sort };
    showFilter();
    changed();
    byId("query").focus();
  }

  /* Follow the address, as by the browser's back button. */
  function addressChanged() {
    readAddress();
    showWorkloads();
    showColumns();
    showFilter();
    changed();
  }

  /* Connect the controls with what they do. */
  function listen() {
    byId("query").addEventListener("input", (event) => { chosen.query = event.target.value; changed(); });
    for (const name of SELECTS) {
      byId(name).addEventListener("change", (event) => { chosen[name] = event.target.value; changed(); });
    }
    document.querySelectorAll("th[data-sort]").forEach(offerSort);
    byId("sort").addEventListener("change", (event) => sortBy(event.target.value));
    byId("clear").addEventListener("click", clearSelection);
    byId("all").addEventListener("click", clearFilter);
    byId("more").addEventListener("click", showMore);
    byId("first").addEventListener("change", (event) => selectFirst(event.target.checked));
    byId("columns-control").addEventListener("toggle", (event) => {
      if (event.target.open) columns.offer(() => [...further], chooseColumn).catch(showError);
    });
    document.addEventListener("keydown", focusFilter);
    const nearEnd = new IntersectionObserver((seen) => seen.some((each) => each.isIntersecting) && showMore(), { rootMargin: "400px" });
    nearEnd.observe(byId("more"));
    addEventListener("hashchange", addressChanged);
    document.addEventListener("visibilitychange", () => (document.hidden ? events?.close() : connect()));
    setInterval(refill, PAUSE);
  }

  // --- requests ---

  /* Receive the changes of runs. */
  function connect() {
    events?.close();
    events = new EventSource(`${root}/events?since=${change}`);
    events.onopen = () => { byId("live").textContent = ""; };
    events.onerror = () => { byId("live").textContent = "Not connected. Is `labctl ui` still running?"; };
    events.addEventListener("runs", (event) => receive(JSON.parse(event.data)));
  }

  /* Keep and list runs that have changed. */
  async function receive(answer) {
    const since = change;
    keep(answer);
    await Promise.all([askTerms(), columns.load([...further], since)]).catch(showError);
    update();
  }

  /* List the latest runs, then all, then follow changes. */
  async function begin() {
    readAddress();
    listen();
    showWorkloads();
    showColumns();
    showFilter();
    terms = parse(chosen.query);
    try {
      const latest = await ask(`/runs.json?limit=${FIRST}`);
      keep(latest);
      await Promise.all([askTerms(), columns.load([...further])]);
      update();
      if (latest.runs.length < latest.total) {
        keep(await ask("/runs.json"));
        update();
      }
      if (!document.hidden) connect();
    } catch (error) {
      byId("reading").hidden = true;
      showError(error);
    }
  }

  begin();
})();
