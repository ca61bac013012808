/* The page of the cluster: a tile per node, doctor and health, by server-sent events. */
"use strict";
(() => {
  const { element, byId, root, post, command, status, timeAgo, hint, isCommand } = labctl;
  const TILE = "tile "; // Prefix of the names of tiles among the parts of the page.
  const EXAMINATIONS = ["doctor", "health"];
  const STATES = { up: "good", partial: "unsure", down: "not-reached", unknown: "unsure" };
  const HAS_HEALTH = Boolean(document.querySelector('[data-examine="health"]')); // Health of hosts is known.
  const FEW = 3; // Remarks of a tile that are shown at once.
  const parts = {}; // Last value of each part of the page.
  const tiles = new Map(); // Element of each node's tile.
  const LATE = 2; // Seconds behind the time of an update after which the page says that it waits.
  let waitingSince = Date.now(); // When the page began to wait for the hosts; 0 once they have answered.

  // --- tiles ---

  /* Show a node: its state, run, devices, health and remarks. */
  function showTile(name, tile) {
    if (!tiles.has(name)) tiles.set(name, element("li"));
    const shown = tiles.get(name);
    const isOpen = shown.querySelector("details")?.open;
    const focused = shown.contains(document.activeElement) ? document.activeElement.tagName : "";
    shown.className = `tile ${tile.state.kind}`;
    shown.replaceChildren(...tileContent(tile).filter(Boolean));
    if (isOpen && shown.querySelector("details")) shown.querySelector("details").open = true;
    if (focused) shown.querySelector(focused)?.focus({ preventScroll: true });
  }

  /* Return the elements of a tile, from top to bottom. */
  function tileContent(tile) {
    return [
      element("h3", {}, tile.node, element("span", { class: "dim" }, tile.role, tile.host && ` on ${tile.host}`)),
      element("p", {}, status(tile.state), tile.reason ? `: ${tile.reason}` : ""),
      tile.run && labelled("run", element("a", { href: `${root}/run/${encodeURIComponent(tile.run)}` }, tile.run_name)),
      tile.hardware && labelled("hardware", tile.hardware),
      tile.devices.length && element("ul", { class: "devices" }, ...tile.devices.map(newDevice)),
      newValues(tile),
      HAS_HEALTH && labelled("health", ...healthContent(tile)),
      newRemarks(tile.remarks),
    ];
  }

  /* Return a line with a dim label before it. */
  function labelled(label, ...content) {
    return element("p", {}, element("span", { class: "dim" }, `${label} `), ...content);
  }

  /* Return a device with its values. */
  function newDevice(device) {
    return element("li", {}, element("span", {}, device.name), element("span", {}, device.values.join(" · ")));
  }

  /* Return the samples of a node, and when they were read unless that is now. */
  function newValues(tile) {
    const read = tile.source === "health" ? [" (labctl health, ", timeAgo(tile.read), ")"] : [];
    if (!tile.values.length && !read.length) return "";
    return element("p", {}, tile.values.join(" · "), ...read);
  }

  /* Return the health of a node, when it was examined if that matters, and its fitness. */
  function healthContent(tile) {
    const fitness = tile.fitness ? `; ${tile.fitness}` : "";
    if (!tile.health) return ["not checked", fitness];
    const when = tile.health.kind === "good" ? [] : [" ", timeAgo(tile.examined)];
    return [status(tile.health), ...when, fitness];
  }

  /* Return remarks, all but the first few folded away. */
  function newRemarks(remarks) {
    if (!remarks.length) return "";
    const first = element("ul", { class: "remarks" }, ...remarks.slice(0, FEW).map(newRemark));
    if (remarks.length <= FEW) return first;
    const rest = element("ul", { class: "remarks" }, ...remarks.slice(FEW).map(newRemark));
    const summary = element("summary", {}, `${remarks.length - FEW} more`);
    return element("div", {}, first, element("details", {}, summary, rest));
  }

  /* Return a remark with the command that mends it. */
  function newRemark(remark) {
    const text = element("span", {}, status({ text: remark.of, kind: remark.kind }), ` ${remark.text}`);
    return element("li", {}, text, remark.fix && isCommand(remark.fix) ? command(remark.fix) : "");
  }

  /* Put the tiles in the order of the nodes, and remove those of nodes that are gone. */
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

  // --- above and below the tiles ---

  /* Show the state of the lab. */
  function showHead(head) {
    waitingSince = 0;
    const outdated = head.out_of_date ? `, out of date: ${head.out_of_date}` : "";
    const state = status({ text: head.state, kind: STATES[head.state] ?? "unsure" });
    byId("head").replaceChildren(`lab ${head.lab}: `, state, outdated);
  }

  /* Show how long the page has waited for the hosts: for the first time, or beyond the time of the next update. */
  function showWaiting() {
    if (events?.readyState !== EventSource.OPEN) return;
    const { at, pause } = parts.looked ?? {};
    const late = Date.now() / 1000 - at - pause;
    if (late > LATE) byId("updated").replaceChildren("Updated ", timeAgo(at), `, contacting hosts for ${Math.floor(late)} s…`);
    if (waitingSince) byId("updated").textContent = `Waited ${Math.floor((Date.now() - waitingSince) / 1000)} s`;
  }

  /* Show errors, hosts that do not answer, warnings, and what to type next. */
  function showTroubles() {
    const { head, error, devices } = parts;
    const warnings = (head?.warnings ?? []).map((message) => ({ message }));
    const troubles = [error, ...(head?.unreachable ?? []), devices, ...warnings].filter(Boolean);
    const shown = troubles.map(({ message, hint: advice }) => (
      element("div", { class: "trouble" }, element("p", {}, message), hint(advice))));
    if (head?.state === "down") shown.push(element("p", {}, "The lab has no nodes."));
    if (head?.hint) shown.push(hint(head.hint));
    byId("troubles").replaceChildren(...shown);
  }

  /* Show when the hosts were asked, and when they will be again. */
  function showLooked({ at, pause }) {
    if (!parts.head) waitingSince = 0;
    if (parts.error && !parts.head) byId("head").textContent = "Cannot read the lab.";
    byId("updated").replaceChildren("Updated ", timeAgo(at), `, next update after ${pause} s`);
  }

  // --- doctor and health ---

  /* Show the result of doctor or health, or that it is running. */
  function showExamination(name, result) {
    for (const button of document.querySelectorAll("[data-examine]")) {
      button.disabled = EXAMINATIONS.some((each) => parts[each]?.busy);
    }
    if (result.busy) {
      byId(name).replaceChildren(element("p", {}, `Running ${name}…`));
      return;
    }
    const text = result.error ? [status({ text: "failed", kind: "failed" }), ` ${result.error}`] : [result.text];
    const problems = element("ul", { class: "problems" }, ...result.problems.map(newProblem));
    byId(name).replaceChildren(element("p", {}, `${name} `, timeAgo(result.at), ": ", ...text), hint(result.hint), problems);
  }

  /* Return findings with the same fix, what follows from them, and the fix. */
  function newProblem({ findings, consequences = [], fix }) {
    const list = element("ul", { class: "plain" }, ...findings.map(newFinding));
    const following = element("ul", { class: "plain" }, ...consequences.map(newFinding));
    const summary = element("summary", {}, `${consequences.length} consequences`);
    return element("li", {}, list, consequences.length ? element("details", {}, summary, following) : "",
      fix ? element("p", {}, "fix: ", command(fix)) : "");
  }

  /* Return a finding with its impact and the steps that mend it. */
  function newFinding({ word, kind, text, impact, steps = [] }) {
    const list = element("ol", {}, ...steps.map((step) => element("li", {}, step)));
    return element("li", {}, status({ text: word, kind }), ` ${text}`,
      impact ? element("p", { class: "dim" }, impact) : "", steps.length ? list : "");
  }

  /* Start doctor or health; the result comes by the events. */
  async function examine(name) {
    try {
      await post(`/cluster/${name}`);
    } catch (error) {
      byId(name).replaceChildren(element("p", {}, error.message), hint(error.hint));
    }
  }

  for (const button of document.querySelectorAll("[data-examine]")) {
    button.addEventListener("click", () => examine(button.dataset.examine));
  }

  // --- events ---

  /* Show the parts of the page that have changed. */
  function show(changed) {
    Object.assign(parts, changed);
    const names = Object.keys(changed);
    const nodes = names.filter((name) => name.startsWith(TILE));
    for (const name of nodes) showTile(name.slice(TILE.length), changed[name]);
    if (nodes.length || "order" in changed) showOrder(parts.order);
    if ("head" in changed) showHead(changed.head);
    if ("looked" in changed) showLooked(changed.looked);
    for (const name of EXAMINATIONS.filter((each) => each in changed)) showExamination(name, changed[name]);
    if (["head", "error", "devices"].some((name) => name in changed)) showTroubles();
  }

  let events = null;

  /* Receive events while somebody sees the page: for one that nobody sees, hosts are not asked. */
  function connectIfSeen() {
    events?.close();
    if (document.hidden) return;
    events = new EventSource(`${root}/cluster/events`);
    events.addEventListener("parts", (event) => show(JSON.parse(event.data)));
    events.onerror = () => { byId("updated").textContent = "Not connected. Is `labctl ui` still running?"; };
  }

  document.addEventListener("visibilitychange", connectIfSeen);
  connectIfSeen();
  setInterval(showWaiting, 1000);
})();
