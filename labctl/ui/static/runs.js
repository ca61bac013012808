/* List of runs: sorted and filtered here; the server filters by settings and sends rows that change. */
"use strict";
(() => {
const ROOT = document.currentScript.dataset.root;
const FIRST = 200; // rows of the first request
const STEP = 100; // rows that are drawn at once
const MOST = 20; // runs to compare
const LONGEST = 60; // characters of a cell
const BEGIN = { sort: "-started", query: "", workload: "", verdict: "", since: "" };
const DESCENDING_FIRST = ["started", "throughput", "nodes", "time"];

// --- values -------------------------------------------------------------------------------------------------

const now = () => Date.now() / 1000;
const seconds = (row) => row.seconds ?? (row.state === "running" && row.started ? now() - row.started : undefined);
const verdict = (row) => row.outcome || (row.state === "done" ? "unreadable" : row.state);
const VALUES = {
  id: (row) => row.id,
  started: (row) => row.started,
  workload: (row) => row.workload,
  verdict,
  cause: (row) => row.cause,
  loss: (row) => row.loss,
  throughput: (row) => row.value,
  nodes: (row) => row.nodes?.length,
  time: seconds,
  note: (row) => row.note,
};
const COMPARED = ["loss", "throughput", "nodes", "time"];

function number(value) {
  return Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en-US") : String(Number(value.toPrecision(4)));
}

function duration(value) {
  const whole = Math.round(value);
  if (whole < 120) return `${Number(value.toPrecision(2))} s`;
  const units = [["d", 86400, "h", 3600], ["h", 3600, "min", 60], ["min", 60, "s", 1]];
  const [unit, length, smaller, part] = units.find(([, length]) => whole >= length);
  const rest = Math.floor((whole % length) / part);
  return `${Math.floor(whole / length)} ${unit}${rest ? ` ${rest} ${smaller}` : ""}`;
}

function ago(value) {
  const whole = Math.max(0, Math.floor(value));
  const [unit, length] = [["d", 86400], ["h", 3600], ["m", 60], ["s", 1]].find(([, length]) => whole >= length) ?? ["s", 1];
  return `${Math.floor(whole / length)}${unit} ago`;
}

// Texts of others: without characters that control a terminal or turn the direction of what follows.
function plain(text) {
  return text.replace(/[\u0000-\u001f\u007f-\u009f\u200e\u200f\u202a-\u202e\u2066-\u2069]/g, "\ufffd");
}

// --- filter -------------------------------------------------------------------------------------------------

/* Terms of a filter: words, settings (NAME=VALUE) and bounds of columns (loss<5). */
function parsed(text) {
  const terms = { words: [], settings: [], bounds: [] };
  for (const quoted of text.match(/(?:[^\s"]|"[^"]*"?)+/g) ?? []) {
    const term = quoted.replaceAll('"', "");
    const bound = term.match(/^([a-z]+)(<=|>=|<|>)(-?[0-9.]+(?:e-?[0-9]+)?)$/i);
    if (bound && COMPARED.includes(bound[1].toLowerCase())) {
      terms.bounds.push({ value: VALUES[bound[1].toLowerCase()], sign: bound[2], limit: Number(bound[3]) });
    } else if (/^[^=<>]+=/.test(term) && !quoted.startsWith('"')) {
      terms.settings.push(term);
    } else if (term) {
      terms.words.push(term.toLowerCase());
    }
  }
  return terms;
}

function isWithin(row, { value, sign, limit }) {
  const own = value(row);
  if (own === undefined || own === null) return false;
  if (sign === "<") return own < limit;
  if (sign === "<=") return own <= limit;
  return sign === ">" ? own > limit : own >= limit;
}

function matches(row, terms, { workload, verdict: sought, since }, withSettings) {
  if (workload && row.workload !== workload) return false;
  if (sought === "in progress" ? row.state === "done" : sought && row.verdict !== sought) return false;
  if (since && !(row.started >= now() - since * 3600)) return false;
  if (withSettings && !withSettings.has(row.id)) return false;
  return terms.words.every((word) => row.text.includes(word)) && terms.bounds.every((bound) => isWithin(row, bound));
}

/* Order by a column, "-" before its name for descending; runs without a value come last. */
function ordering(sort) {
  const value = VALUES[sort.replace("-", "")], sign = sort.startsWith("-") ? -1 : 1;
  const isMissing = (own) => own === undefined || own === null || own === "";
  return (one, other) => {
    const a = value(one), b = value(other);
    if (isMissing(a) || isMissing(b)) return isMissing(a) - isMissing(b) || latestFirst(one, other);
    if (a === b) return latestFirst(one, other);
    return a < b ? -sign : sign;
  };
}

function latestFirst(one, other) {
  return one.id < other.id ? 1 : -1;
}

// --- state --------------------------------------------------------------------------------------------------

const element = (id) => document.getElementById(id);
const body = element("runs");
const rows = new Map();
const picked = new Set();
let state = { ...BEGIN };
let terms = parsed("");
let withSettings = null; // ids of the runs with the settings of the filter
let order = [];
let drawn = STEP;
let drawnRows = new Map();
let change = 0;
let total = 0;
let events = null;

function readAddress() {
  const found = new URLSearchParams(location.hash.slice(1));
  state = Object.fromEntries(Object.entries(BEGIN).map(([name, usual]) => [name, found.get(name) ?? usual]));
  if (!Object.hasOwn(VALUES, state.sort.replace("-", ""))) state.sort = BEGIN.sort;
  picked.clear();
  for (const id of found.getAll("pick")) picked.add(id);
}

function writeAddress() {
  const kept = new URLSearchParams(Object.entries(state).filter(([name, value]) => value !== BEGIN[name]));
  for (const id of picked) kept.append("pick", id);
  history.replaceState(null, "", `#${kept}`);
}

async function answer(path) {
  const response = await fetch(ROOT + path);
  const found = await response.json();
  if (!response.ok) throw new Error([found.error.message, found.error.hint].filter(Boolean).join("; hint: "));
  return found;
}

function keep(found) {
  for (const row of found.runs) {
    const words = [row.id, row.workload, row.cause, row.note, verdict(row), ...(row.nodes ?? [])];
    rows.set(row.id, { ...row, text: words.join("\n").toLowerCase() });
  }
  for (const id of found.removed) {
    rows.delete(id);
    picked.delete(id);
  }
  total = found.total;
  change = found.change;
}

/* Ask for the runs with the settings of the filter; an answer that comes after that to a later one is dropped. */
let asked = 0;
async function askForSettings() {
  const number = ++asked;
  if (!terms.settings.length) {
    withSettings = null;
    body.removeAttribute("aria-busy");
    return;
  }
  const query = new URLSearchParams(terms.settings.map((term) => ["setting", term]));
  body.setAttribute("aria-busy", "true");
  try {
    const found = await answer(`/runs.json?${query}`);
    if (number === asked) withSettings = new Set(found.runs);
  } finally {
    if (number === asked) body.removeAttribute("aria-busy");
  }
}

// --- page ---------------------------------------------------------------------------------------------------

function cell(tag, head) {
  const made = document.createElement(tag);
  if (head) made.dataset.head = head;
  return made;
}

function newLine(id) {
  const line = document.createElement("tr");
  line.dataset.run = id;
  const box = document.createElement("input");
  box.type = "checkbox";
  box.setAttribute("aria-label", `Select ${id}`);
  box.addEventListener("change", () => {
    box.checked ? picked.add(id) : picked.delete(id);
    writeAddress();
    showPicked();
  });
  const pick = cell("td"), run = cell("th"), link = document.createElement("a"), when = cell("td", "When");
  pick.className = "pick";
  run.scope = "row";
  link.href = `${ROOT}/run/${encodeURIComponent(id)}`;
  link.title = id;
  pick.append(box);
  run.append(link);
  when.append(document.createElement("time"));
  line.append(pick, run, when, cell("td", "Workload"), cell("td"), cell("td", "Cause"));
  for (const head of ["Loss", "Throughput", "Nodes", "Time"]) {
    const made = cell("td", head);
    made.className = "number";
    line.append(made);
  }
  line.append(cell("td", "Note"));
  line.lastChild.className = "note";
  return line;
}

function write(cell, text, title = "") {
  const clean = plain(text);
  const cut = clean.length > LONGEST ? `${clean.slice(0, LONGEST - 1)}…` : clean;
  if (cell.textContent !== cut) cell.textContent = cut;
  cell.title = title || (cut === clean ? "" : clean);
}

function rate(row) {
  if (row.value === undefined || row.value === null) return "";
  return [row.metric, number(row.value), row.unit].filter(Boolean).join(" ");
}

function fill(line, row) {
  const [pick, run, when, workload, result, cause, loss, throughput, nodes, time, note] = line.children;
  pick.firstChild.checked = picked.has(row.id);
  write(run.firstChild, row.short, row.id);
  const began = row.started ? new Date(row.started * 1000) : null;
  when.firstChild.dateTime = began?.toISOString() ?? "";
  write(when.firstChild, began ? ago(now() - row.started) : "", began?.toLocaleString() ?? "");
  write(workload, row.workload ?? "");
  write(result, [verdict(row), row.outcome ? "" : row.step].filter(Boolean).join(" "));
  result.className = `status ${verdict(row).toLowerCase()}`;
  write(cause, row.cause ?? "");
  write(loss, row.loss === undefined || row.loss === null ? "" : number(row.loss));
  write(throughput, rate(row));
  write(nodes, row.nodes?.length ? String(row.nodes.length) : "", row.nodes?.join(", "));
  write(time, seconds(row) ? duration(seconds(row)) : "");
  write(note, row.note ?? "");
}

/* Draw the first rows of the order; lines of runs that stay are kept, with the focus in them. */
function draw() {
  const lines = new Map();
  for (const row of order.slice(0, drawn)) {
    const before = drawnRows.get(row.id);
    const line = before?.line ?? newLine(row.id);
    if (before?.row !== row) fill(line, row);
    lines.set(row.id, { line, row });
  }
  drawnRows = lines;
  const wanted = [...lines.values()].map(({ line }) => line);
  const isSame = wanted.length === body.children.length && wanted.every((line, place) => body.children[place] === line);
  if (!isSame) {
    const focused = document.activeElement;
    body.replaceChildren(...wanted);
    if (focused !== document.activeElement && body.contains(focused)) focused.focus({ preventScroll: true });
  }
  const left = order.length - wanted.length;
  element("more").hidden = !left;
  element("more").textContent = `Show more (${left.toLocaleString("en-US")} left)`;
}

function apply() {
  order = [...rows.values()].filter((row) => matches(row, terms, state, withSettings)).sort(ordering(state.sort));
  draw();
  const count = (amount) => `${amount.toLocaleString("en-US")} run${amount === 1 ? "" : "s"}`;
  const isFiltered = ["query", "workload", "verdict", "since"].some((name) => state[name]);
  // It is read aloud when it changes.
  write(element("count"), isFiltered ? `${order.length.toLocaleString("en-US")} of ${count(total)}` : count(total));
  element("all").hidden = !isFiltered;
  element("reading").hidden = true;
  element("none").hidden = total > 0;
  element("controls").hidden = total === 0;
  showPicked();
}

function showPicked() {
  const link = element("compare");
  link.hidden = picked.size < 2 || picked.size > MOST;
  link.textContent = `Compare ${picked.size}`;
  link.href = `${ROOT}/compare?${new URLSearchParams([...picked].map((id) => ["run", id]))}`;
  element("clear").hidden = !picked.size;
  const hint = picked.size > MOST ? `${picked.size} selected. You can compare at most ${MOST}.` : "1 selected. Select another run to compare.";
  element("picked").textContent = link.hidden && picked.size ? hint : "";
}

function showSort() {
  for (const head of document.querySelectorAll("th[data-sort]")) {
    if (head.dataset.sort === state.sort.replace("-", "")) {
      head.setAttribute("aria-sort", state.sort.startsWith("-") ? "descending" : "ascending");
    } else {
      head.removeAttribute("aria-sort");
    }
  }
  element("sort").value = state.sort;
}

function showFilter() {
  element("query").value = state.query;
  for (const name of ["workload", "verdict", "since"]) element(name).value = state[name];
  showSort();
}

function showWorkloads() {
  const select = element("workload");
  const names = new Set([...rows.values()].map((row) => row.workload).filter(Boolean));
  if (state.workload) names.add(state.workload);
  const wanted = ["", ...[...names].sort()];
  if (wanted.length === select.options.length && wanted.every((name, place) => select.options[place].value === name)) return;
  select.replaceChildren(...wanted.map((name) => new Option(name ? plain(name).slice(0, LONGEST) : "all", name)));
  select.value = state.workload;
}

function showError(error) {
  element("reading").hidden = true;
  element("failed").textContent = error ? plain(String(error.message)) : "";
  element("failed").hidden = !error;
}

// --- what a person does -------------------------------------------------------------------------------------

async function changed() {
  writeAddress();
  drawn = STEP;
  terms = parsed(state.query);
  try {
    await askForSettings();
    showError(null);
  } catch (error) {
    showError(error);
  }
  apply();
}

function sortBy(sort) {
  state.sort = sort;
  showSort();
  changed();
}

function listen() {
  element("query").addEventListener("input", (event) => { state.query = event.target.value; changed(); });
  for (const name of ["workload", "verdict", "since"]) {
    element(name).addEventListener("change", (event) => { state[name] = event.target.value; changed(); });
  }
  for (const head of document.querySelectorAll("th[data-sort]")) {
    const column = head.dataset.sort, usual = DESCENDING_FIRST.includes(column) ? `-${column}` : column;
    const reversed = usual === column ? `-${column}` : column;
    head.firstElementChild.addEventListener("click", () => sortBy(state.sort === usual ? reversed : usual));
    const title = head.textContent.trim().toLowerCase();
    element("sort").append(new Option(`${title}, ascending`, column), new Option(`${title}, descending`, `-${column}`));
  }
  element("sort").addEventListener("change", (event) => sortBy(event.target.value));
  element("clear").addEventListener("click", () => { picked.clear(); writeAddress(); redraw(); element("query").focus(); });
  element("all").addEventListener("click", () => {
    state = { ...BEGIN, sort: state.sort };
    showFilter();
    changed();
    element("query").focus();
  });
  element("more").addEventListener("click", more);
  new IntersectionObserver((entries) => { if (entries.some((entry) => entry.isIntersecting)) more(); }, { rootMargin: "400px" })
    .observe(element("more"));
  addEventListener("hashchange", () => { readAddress(); showWorkloads(); showFilter(); changed(); redraw(); });
  document.addEventListener("visibilitychange", () => (document.hidden ? unfollow() : follow()));
  setInterval(redraw, 30000);
}

function more() {
  drawn += STEP;
  draw();
}

/* Write all cells again: times go on, and boxes follow the selection. */
function redraw() {
  for (const { line, row } of drawnRows.values()) fill(line, row);
  showPicked();
}

// --- what the server says -----------------------------------------------------------------------------------

/* Follow changes while the page can be seen. */
function follow() {
  unfollow();
  events = new EventSource(`${ROOT}/events?since=${change}`);
  events.onopen = () => { element("live").textContent = ""; };
  events.onerror = () => { element("live").textContent = "Not connected. Is `labctl ui` still running?"; };
  events.addEventListener("runs", async (event) => {
    const found = JSON.parse(event.data);
    const isNew = found.runs.some((row) => !rows.has(row.id));
    keep(found);
    showWorkloads();
    if (isNew) await askForSettings().catch(showError);
    apply();
  });
}

function unfollow() {
  events?.close();
  events = null;
}

async function begin() {
  readAddress();
  listen();
  showWorkloads();
  showFilter();
  terms = parsed(state.query);
  try {
    const first = await answer(`/runs.json?limit=${FIRST}`);
    keep(first);
    await askForSettings();
    showWorkloads();
    apply();
    if (first.runs.length < first.total) {
      keep(await answer("/runs.json"));
      showWorkloads();
      apply();
    }
    body.dataset.loaded = "all";
    if (!document.hidden) follow();
  } catch (error) {
    showError(error);
  }
}

begin();
})();
