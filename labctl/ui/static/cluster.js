// Tiles of hosts and nodes, live by events, and the lists below them.
"use strict";
(() => {
  const root = document.currentScript.dataset.root;
  const parts = {};
  const tiles = new Map();
  let asking = Date.now();
  const byId = (id) => document.getElementById(id);

  // --- elements: data enters the page as text ---

  function element(tag, properties = {}, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(properties)) {
      if (value !== undefined && value !== "") made.setAttribute(name, value);
    }
    made.append(...children.filter((child) => child !== "" && child !== null && child !== undefined));
    return made;
  }

  const status = (word, tag = "span") => element(tag, { class: `status ${word.kind}` }, word.text);
  const link = (path, text) => element("a", { href: root + path }, text);

  function copyable(command) {
    const button = element("button", { type: "button", class: "copy", "aria-label": `Copy ${command}` }, "copy");
    button.addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText(command);
        button.textContent = "copied";
      } catch {
        getSelection().selectAllChildren(button.previousSibling);
        button.textContent = "selected";
      }
      setTimeout(() => { button.textContent = "copy"; }, 2000);
    });
    return element("span", { class: "command" }, element("code", {}, command), button);
  }

  const isCommand = (text) => /^[a-z][\w.-]*( |$)/.test(text);
  const hint = (text) => (text ? element("p", {}, "hint: ", isCommand(text) ? copyable(text) : text) : "");

  function age(seconds) {
    for (const [unit, length] of [["d", 86400], ["h", 3600], ["m", 60]]) {
      if (seconds >= length) return `${Math.floor(seconds / length)}${unit} ago`;
    }
    return `${Math.max(0, Math.floor(seconds))}s ago`;
  }

  // Times are told as ages, which go on while nothing is sent.
  const ago = (at) => element("time", { "data-at": at, datetime: new Date(at * 1000).toISOString() }, age(Date.now() / 1000 - at));

  function agesGoOn() {
    for (const time of document.querySelectorAll("time[data-at]")) {
      time.textContent = age(Date.now() / 1000 - Number(time.dataset.at));
    }
    if (asking) {
      const seconds = Math.floor((Date.now() - asking) / 1000);
      byId("head").textContent = seconds < 1 ? "Contacting hosts…" : `Contacting hosts… ${seconds} s`;
    }
  }

  // --- tiles ---

  function remark(each) {
    const text = element("span", {}, status({ text: each.of, kind: each.kind }), ` ${each.text}`);
    return element("li", {}, text, each.fix && isCommand(each.fix) ? copyable(each.fix) : "");
  }

  function device(each) {
    return element("li", {}, element("span", {}, each.name), element("span", {}, each.values.join(" · ")));
  }

  const FEW = 3;
  function remarks(all) {
    if (!all.length) return "";
    const shown = element("ul", { class: "remarks" }, ...all.slice(0, FEW).map(remark));
    if (all.length <= FEW) return shown;
    const rest = element("ul", { class: "remarks" }, ...all.slice(FEW).map(remark));
    return element("div", {}, shown, element("details", {}, element("summary", {}, `${all.length - FEW} more`), rest));
  }

  function lineOf(name, ...content) {
    return element("p", {}, element("span", { class: "dim" }, `${name} `), ...content);
  }

  function filled(tile) {
    const run = tile.run ? lineOf("run", link(`/run/${encodeURIComponent(tile.run)}`, tile.run_name)) : "";
    const read = tile.source === "health" ? [" (labctl health, ", ago(tile.read), ")"] : [];
    const values = tile.values.length || read.length ? element("p", {}, tile.values.join(" · "), ...read) : "";
    const examined = !tile.health ? ["not checked"] : [status(tile.health)];
    if (tile.health && tile.health.kind !== "good") examined.push(" ", ago(tile.examined));
    return [
      element("h3", {}, tile.node, element("span", { class: "dim" }, `${tile.role} on ${tile.host}`)),
      element("p", {}, status(tile.state), tile.reason ? `: ${tile.reason}` : ""),
      run,
      tile.hardware ? lineOf("hardware", tile.hardware) : "",
      tile.devices.length ? element("ul", { class: "devices" }, ...tile.devices.map(device)) : "",
      values,
      lineOf("health", ...examined, tile.fitness ? `; ${tile.fitness}` : ""),
      remarks(tile.remarks),
    ].filter(Boolean);
  }

  function showTile(name, tile) {
    let shown = tiles.get(name);
    if (!shown) {
      shown = element("li", { class: "tile" });
      tiles.set(name, shown);
    }
    const isOpen = shown.querySelector("details")?.open;
    const focused = shown.contains(document.activeElement) ? document.activeElement.tagName : "";
    shown.className = `tile ${tile.state.kind}`;
    shown.replaceChildren(...filled(tile));
    if (isOpen && shown.querySelector("details")) shown.querySelector("details").open = true;
    if (focused) shown.querySelector(focused)?.focus({ preventScroll: true });
  }

  function showOrder(order) {
    for (const name of [...tiles.keys()].filter((name) => !order.includes(name))) {
      tiles.get(name).remove();
      tiles.delete(name);
    }
    const list = byId("tiles");
    order.forEach((name, place) => {
      const tile = tiles.get(name);
      if (tile && list.children[place] !== tile) list.insertBefore(tile, list.children[place] ?? null);
    });
  }

  // --- above the tiles ---

  const STATES = { up: "good", partial: "unsure", down: "not-reached", unknown: "unsure" };

  function showHead(head) {
    asking = 0;
    const late = head.out_of_date ? `, out of date: ${head.out_of_date}` : "";
    byId("head").replaceChildren(`lab ${head.lab}: `, status({ text: head.state, kind: STATES[head.state] ?? "unsure" }), late);
  }

  function trouble(each) {
    return element("div", { class: "trouble" }, element("p", {}, each.message), hint(each.hint));
  }

  function showTroubles() {
    const { head, error, devices } = parts;
    const all = [error, ...(head?.unreachable ?? []), devices, ...(head?.warnings ?? []).map((message) => ({ message }))];
    const shown = all.filter(Boolean).map(trouble);
    if (head?.state === "down") shown.push(element("p", {}, "The lab has no nodes."));
    if (head?.hint) shown.push(hint(head.hint));
    byId("troubles").replaceChildren(...shown);
  }

  function showLooked({ at, pause }) {
    if (!parts.head) asking = 0;
    if (parts.error && !parts.head) byId("head").textContent = "Cannot read the lab.";
    byId("updated").replaceChildren("Updated ", ago(at), `, next update after ${pause} s`);
  }

  // --- doctor and health ---

  function finding(each) {
    const steps = (each.steps ?? []).map((step) => element("li", {}, step));
    return element("li", {}, status({ text: each.word, kind: each.kind }), ` ${each.text}`,
      each.impact ? element("p", { class: "dim" }, each.impact) : "", steps.length ? element("ol", {}, ...steps) : "");
  }

  function problem(each) {
    const following = each.consequences?.length
      ? element("details", {}, element("summary", {}, `${each.consequences.length} consequences`),
        element("ul", { class: "plain" }, ...each.consequences.map(finding)))
      : "";
    return element("li", {}, element("ul", { class: "plain" }, ...each.findings.map(finding)), following,
      each.fix ? element("p", {}, "fix: ", copyable(each.fix)) : "");
  }

  function showExamination(name, answer) {
    for (const button of document.querySelectorAll("[data-examine]")) {
      button.disabled = ["doctor", "health"].some((each) => parts[each]?.busy);
    }
    const place = byId(name);
    if (answer.busy) {
      place.replaceChildren(element("p", {}, `Running ${name}…`));
      return;
    }
    const told = answer.error ? [status({ text: "failed", kind: "failed" }), ` ${answer.error}`] : [answer.text];
    place.replaceChildren(element("p", {}, `${name} `, ago(answer.at), ": ", ...told), hint(answer.hint),
      element("ul", { class: "problems" }, ...answer.problems.map(problem)));
  }

  for (const button of document.querySelectorAll("[data-examine]")) {
    button.addEventListener("click", async () => {
      const answer = await fetch(`${root}/cluster/${button.dataset.examine}`, { method: "POST" });
      if (!answer.ok) {
        const { error } = await answer.json();
        byId(button.dataset.examine).replaceChildren(element("p", {}, error.message), hint(error.hint));
      }
    });
  }

  // --- events ---

  const SHOW = { head: showHead, looked: showLooked, order: showOrder };

  function show(changed) {
    Object.assign(parts, changed);
    for (const [name, value] of Object.entries(changed)) {
      if (name.startsWith("tile ")) showTile(name.slice(5), value);
    }
    if (Object.keys(changed).some((name) => name.startsWith("tile "))) showOrder(parts.order);
    for (const [name, value] of Object.entries(changed)) {
      SHOW[name]?.(value);
      if (name === "doctor" || name === "health") showExamination(name, value);
    }
    if ("head" in changed || "error" in changed || "devices" in changed) showTroubles();
  }

  const events = new EventSource(`${root}/cluster/events`);
  events.addEventListener("parts", (event) => show(JSON.parse(event.data)));
  events.onerror = () => { byId("updated").textContent = "Not connected. Is `labctl ui` still running?"; };
  setInterval(agesGoOn, 1000);

  // --- lists ---

  function table(label, heads, rows) {
    const head = element("tr", {}, ...heads.map((text) => element("th", { scope: "col" }, text)));
    const body = rows.map((cells) => element("tr", {}, ...cells.map((cell, place) => (
      element("td", { "data-head": heads[place] }, ...[cell].flat())))));
    return element("table", { class: "wide", "aria-label": label }, element("thead", {}, head), element("tbody", {}, ...body));
  }

  const day = (text) => new Date(text).toLocaleString("sv").slice(0, 16);
  const pathOf = (path) => path.split("/").map(encodeURIComponent).join("/");
  const FIGURES = { passed: "passed", missed: "missed", unsure: "unsure", "no threshold": "skipped" };

  function baselineText(kept) {
    if (!kept) return element("p", { class: "dim" }, "No baseline yet: ", copyable("labctl baseline"));
    if (kept.error) return element("p", {}, kept.error, " ", hint(kept.hint));
    return element("p", {}, `Baseline of ${day(kept.recorded)}: profile ${kept.profile}, ${kept.figures} values.`);
  }

  function showValidations({ validations, baseline }) {
    if (!validations.length) return [element("p", { class: "dim" }, "No validations yet."), copyable("labctl validate"), baselineText(baseline)];
    const rows = validations.map((each) => [status(each.verdict), day(each.started), each.profile, each.seconds, each.message,
      link(`/cluster/reports/${encodeURIComponent(each.name)}/report.html`, "report")]);
    const figures = validations[0].figures.map((each) => [status({ text: each.status, kind: FIGURES[each.status] }), each.what,
      each.node || "all", each.value, each.limit, each.source]);
    return [
      table("Validations", ["Verdict", "Date", "Profile", "Duration", "Message", "Report"], rows),
      ...(figures.length ? [element("h3", {}, "Worst results of the latest validation"),
        table("Worst results", ["Status", "Metric", "Node", "Value", "Threshold", "Source"], figures)] : []),
      baselineText(baseline),
    ];
  }

  function showBatches({ batches, more }) {
    if (!batches.length) return [element("p", { class: "dim" }, "No batches in output/ or reports/.")];
    const rows = batches.map((each) => [link(`/cluster/batches/${pathOf(each.path)}`, each.path), each.workload, day(each.began * 1000),
      status(each.state), each.rounds ? `${each.jobs} in ${each.rounds} rounds` : `${each.passed} of ${each.jobs} passed`]);
    return [table("Batches", ["Directory", "Workload", "Started", "State", "Jobs"], rows),
      more ? element("p", { class: "dim" }, `${more} earlier batches are not shown`) : ""];
  }

  function showLabs({ labs, why }) {
    if (why) return [element("p", { class: "dim" }, why)];
    if (!labs.length) return [element("p", { class: "dim" }, "You have no labs on this machine.")];
    const rows = labs.map((each) => [each.here ? `${each.name} (this lab)` : each.name, each.directory, status(each.state), each.nodes,
      each.command && !each.here ? copyable(each.command) : ""]);
    return [table("Labs", ["Lab", "Directory", "State", "Nodes", "Open its pages"], rows)];
  }

  const LISTS = { validations: showValidations, batches: showBatches, labs: showLabs };
  const AGAIN = 30000;

  async function fill(name) {
    const place = byId(name);
    try {
      const answer = await fetch(root + place.dataset.from);
      const data = await answer.json();
      const shown = answer.ok ? LISTS[name](data) : [element("p", {}, data.error.message), hint(data.error.hint)];
      if (!place.contains(document.activeElement)) place.replaceChildren(...shown.filter(Boolean));
    } catch {
      // The server has ended: what is shown stays.
    }
  }

  function fillAll() {
    if (!document.hidden) Object.keys(LISTS).forEach(fill);
  }

  fillAll();
  setInterval(fillAll, AGAIN);
})();
