/* Values of the columns of the list of runs, and how it is filtered and sorted by them. */
"use strict";
(() => {
  const LIMITED = ["loss", "throughput", "nodes", "time"]; // Columns that a term such as loss<5 can name.
  const LIMIT = /^([a-z]+)(<=|>=|<|>)(-?[0-9.]+(?:e-?[0-9]+)?)$/i;

  /* Return the seconds since 1970. */
  function now() {
    return Date.now() / 1000;
  }

  /* Return how long a run took, or has taken so far; undefined if it is unknown. */
  function seconds(run) {
    return run.seconds ?? (run.state === "running" && run.started ? now() - run.started : undefined);
  }

  /* Return the verdict of a run, or its state without one. */
  function verdict(run) {
    return run.outcome || (run.state === "done" ? "unreadable" : run.state);
  }

  const VALUES = {
    id: (run) => run.id,
    started: (run) => run.started,
    workload: (run) => run.workload,
    verdict,
    cause: (run) => run.cause,
    loss: (run) => run.loss,
    throughput: (run) => run.value,
    nodes: (run) => run.nodes?.length,
    time: seconds,
    note: (run) => run.note,
  };

  /* Return the terms of a filter: words, settings (NAME=VALUE) and limits of columns (loss<5). */
  function parse(text) {
    const terms = { words: [], settings: [], limits: [] };
    for (const quoted of text.match(/(?:[^\s"]|"[^"]*"?)+/g) ?? []) {
      const term = quoted.replaceAll('"', "");
      const [, column, sign, limit] = term.toLowerCase().match(LIMIT) ?? [];
      if (LIMITED.includes(column)) terms.limits.push({ value: VALUES[column], sign, limit: Number(limit) });
      else if (/^[^=<>]+=/.test(term) && !quoted.startsWith('"')) terms.settings.push(term);
      else if (term) terms.words.push(term.toLowerCase());
    }
    return terms;
  }

  /* Return true if a run has a value within a limit. */
  function isWithin(run, { value, sign, limit }) {
    const own = value(run);
    if (isMissing(own)) return false;
    if (sign === "<") return own < limit;
    if (sign === "<=") return own <= limit;
    return sign === ">" ? own > limit : own >= limit;
  }

  /* Return true if a run has the chosen workload, verdict and age, and matches all words and limits. */
  function matches(run, terms, chosen) {
    if (chosen.workload && run.workload !== chosen.workload) return false;
    if (!hasVerdict(run, chosen.verdict)) return false;
    if (chosen.since && !(run.started >= now() - chosen.since * 3600)) return false;
    return terms.words.every((word) => run.text.includes(word)) && terms.limits.every((limit) => isWithin(run, limit));
  }

  /* Return true if a run has a verdict of the filter; an empty one matches every run. */
  function hasVerdict(run, wanted) {
    if (wanted === "in progress") return run.state !== "done";
    return !wanted || run.verdict === wanted;
  }

  /* Return true for a value that a run does not have. */
  function isMissing(value) {
    return value === undefined || value === null || value === "";
  }

  /* Return a comparison of runs by a column, "-" before its name for descending; runs without a value come last. */
  function ordering(sort) {
    const value = VALUES[sort.replace("-", "")];
    const sign = sort.startsWith("-") ? -1 : 1;
    return (run, other) => {
      const [own, its] = [value(run), value(other)];
      if (isMissing(own) || isMissing(its)) return isMissing(own) - isMissing(its) || latestFirst(run, other);
      if (own === its) return latestFirst(run, other);
      return own < its ? -sign : sign;
    };
  }

  /* Compare runs by id, which begins with the time of their start. */
  function latestFirst(run, other) {
    return run.id < other.id ? 1 : -1;
  }

  /* Return true if there is a column of this name. */
  function isColumn(name) {
    return Object.hasOwn(VALUES, name);
  }

  labctl.filter = { now, seconds, verdict, parse, matches, ordering, isColumn, isMissing };
})();
