/* Further columns of the list of runs: arguments, settings and metrics that a person adds. */
"use strict";
(() => {
  const { element, byId, ask } = labctl;
  const GROUPS = { differing: "Different between runs", metrics: "Metrics", same: "Same in all runs" };
  const PRESENT = ["loss", "throughput", "nodes"]; // Columns of all lists.
  const values = new Map(); // Values by run id, by name.

  /* Return what a run has in a further column; undefined without. */
  function value(name, run) {
    return values.get(name)?.get(run.id);
  }

  /* Fetch columns that were not fetched yet, and of others what came after a change. */
  function load(names, since = 0) {
    return Promise.all(names.map(async (name) => {
      const known = values.get(name);
      if (known && !since) return;
      const answer = await ask(`/column.json?${new URLSearchParams({ name, since: known ? since : 0 })}`);
      values.set(name, new Map([...(known ?? []), ...Object.entries(answer)]));
    }));
  }

  /* Offer all names with checkboxes, those of the chosen columns checked; the function takes a name and true if it is. */
  async function offer(chosen, choose) {
    const names = await ask("/names.json");
    const groups = Object.entries(GROUPS).map(([group, title]) => {
      const offered = names[group].filter((name) => !PRESENT.includes(name));
      return offered.length ? element("fieldset", {}, element("legend", {}, title), ...offered.map((name) => checkbox(name))) : "";
    });
    byId("columns").replaceChildren(...groups.filter(Boolean));

    /* Return a checkbox with its name. */
    function checkbox(name) {
      const input = element("input", { type: "checkbox" });
      input.checked = chosen().includes(name);
      input.addEventListener("change", () => choose(name, input.checked));
      return element("label", {}, input, ` ${name}`);
    }
  }

  labctl.columns = { value, load, offer };
})();
