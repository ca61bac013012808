/* The tables below the tiles of the cluster: validations, batches and labs, which are fetched again while they are seen. */
"use strict";
(() => {
  const { element, byId, root, ask, command, status, hint } = labctl;
  const PACE = 30000; // Milliseconds between two requests.
  const STATUSES = { passed: "passed", missed: "missed", unsure: "unsure", "no threshold": "skipped" };
  const CONTENT = { validations, batches, labs };

  /* Return a link to a page below the site. */
  function link(path, text) {
    return element("a", { href: root + path }, text);
  }

  /* Return a paragraph of less weight. */
  function dim(...content) {
    return element("p", { class: "dim" }, ...content);
  }

  /* Return a date and time in the browser's time zone, as 2026-01-02 15:04. */
  function dateText(date) {
    return new Date(date).toLocaleString("sv").slice(0, 16);
  }

  /* Return a table; each row is a list of cells. */
  function table(label, heads, rows) {
    const head = element("tr", {}, ...heads.map((text) => element("th", { scope: "col" }, text)));
    const body = rows.map((cells) => (
      element("tr", {}, ...cells.map((cell, place) => element("td", { "data-head": heads[place] }, cell)))));
    return element("table", { class: "wide", "aria-label": label },
      element("thead", {}, head), element("tbody", {}, ...body));
  }

  /* Return the latest validations, the worst results of the last one, and the baseline. */
  function validations({ validations: all, baseline }) {
    if (!all.length) return [dim("No validations yet."), command("labctl validate"), baselineText(baseline)];
    const rows = all.map((each) => [status(each.verdict), dateText(each.started), each.profile, each.seconds, each.message,
      link(`/cluster/reports/${encodeURIComponent(each.name)}/report.html`, "report")]);
    const list = table("Validations", ["Verdict", "Date", "Profile", "Duration", "Message", "Report"], rows);
    return [list, ...worstResults(all[0].figures), baselineText(baseline)];
  }

  /* Return the worst results of a validation, if it has any. */
  function worstResults(results) {
    if (!results.length) return [];
    const rows = results.map((each) => [status({ text: each.status, kind: STATUSES[each.status] }), each.what,
      each.node || "all", each.value, each.limit, each.source]);
    return [element("h3", {}, "Worst results of the latest validation"),
      table("Worst results", ["Status", "Metric", "Node", "Value", "Threshold", "Source"], rows)];
  }

  /* Return a sentence on the recorded baseline. */
  function baselineText(baseline) {
    if (!baseline) return dim("No baseline yet: ", command("labctl baseline"));
    if (baseline.error) return element("div", {}, element("p", {}, baseline.error), hint(baseline.hint));
    const { recorded, profile, figures } = baseline;
    return element("p", {}, `Baseline of ${dateText(recorded)}: profile ${profile}, ${figures} values.`);
  }

  /* Return the latest batches and bisections. */
  function batches({ batches: all, more }) {
    if (!all.length) return [dim("No batches in output/ or reports/.")];
    const rows = all.map((each) => [batchLink(each.path), each.workload, dateText(each.began * 1000), status(each.state),
      each.rounds ? `${each.jobs} in ${each.rounds} rounds` : `${each.passed} of ${each.jobs} passed`]);
    const list = table("Batches", ["Directory", "Workload", "Started", "State", "Jobs"], rows);
    return [list, more ? dim(`${more} earlier batches are not shown`) : ""];
  }

  /* Return a link to the page of a batch, by its path below the lab. */
  function batchLink(path) {
    return link(`/cluster/batches/${path.split("/").map(encodeURIComponent).join("/")}`, path);
  }

  /* Return the user's labs on this machine, each with the command that opens its pages. */
  function labs({ labs: all, why }) {
    if (why) return [dim(why)];
    if (!all.length) return [dim("You have no labs on Docker on this machine.")];
    const rows = all.map((each) => [each.here ? `${each.name} (this lab)` : each.name, each.directory, status(each.state),
      each.nodes, each.command && !each.here ? command(each.command) : ""]);
    return [table("Labs", ["Lab", "Directory", "State", "Nodes", "Open its pages"], rows)];
  }

  // --- requests ---

  /* Fetch a table, and show it or the error, unless the focus is in it. */
  async function fill(name) {
    const place = byId(name);
    let content;
    try {
      content = CONTENT[name](await ask(place.dataset.from));
    } catch (error) {
      // Without a hint it is no answer of the server, which has ended: the table stays.
      if (error.hint === undefined) return;
      content = [element("p", {}, error.message), hint(error.hint)];
    }
    if (!place.contains(document.activeElement)) place.replaceChildren(...content.filter(Boolean));
  }

  /* Fetch all tables, if the page can be seen. */
  function fillAll() {
    if (!document.hidden) Object.keys(CONTENT).forEach(fill);
  }

  fillAll();
  setInterval(fillAll, PACE);
})();
