/* Values of the columns of the list of runs, and how it is filtered and sorted by them. */
"use strict";
(() => {
  // A leading dash for "not", then a quoted text, a name with sign and value, or a word. Blanks may stand around a sign, but
  // not after a "=" that follows its name: that is for any value.
  const SIGN = /\s*(?:<=|>=|!=|<|>)\s*|==\s*|=|\s+==?\s*/;
  const VALUE = /"[^"]*"?|'[^']*'?|[^\s"]*/;
  const TERM = new RegExp(`(-(?=[^-\\s]))?(?:"([^"]*)"?|([^\\s"'<>=!]+)(${SIGN.source})(${VALUE.source})|([^\\s"]+))`, "g");
  const SIGNS = {
    "<": (own, limit) => own < limit,
    "<=": (own, limit) => own <= limit,
    ">": (own, limit) => own > limit,
    ">=": (own, limit) => own >= limit,
    "=": (own, limit) => own === limit,
    "!=": (own, limit) => own !== limit,
  };

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

  // What terms compare here; other names are arguments, settings and metrics, which the server knows.
  const COMPARED = {
    loss: VALUES.loss,
    throughput: (run) => (run.metric ? undefined : run.value),
    time: seconds,
    run: VALUES.id,
    workload: VALUES.workload,
    verdict,
    cause: VALUES.cause,
    node: (run) => run.nodes,
    note: VALUES.note,
  };

  /* Return the terms of a filter: words and comparisons for this page, texts of comparisons for the server, and problems. */
  function parse(text) {
    const terms = { words: [], compared: [], asked: [], problems: [] };
    for (const [, dash, quoted, name, sign, value, word] of text.matchAll(TERM)) {
      const isNegated = Boolean(dash);
      if (name) addComparison(terms, { isNegated, name, sign: sign.trim().replace("==", "="), limit: unquoted(value) });
      else if (quoted || word) terms.words.push({ isNegated, word: (quoted || word).toLowerCase() });
    }
    // As in queries of MLflow.
    if (terms.compared.length + terms.asked.length) terms.words = terms.words.filter(({ word }) => word !== "and");
    return terms;
  }

  /* Add a comparison to the terms. */
  function addComparison(terms, { isNegated, name, sign, limit }) {
    const column = name.toLowerCase();
    if (limit && /[<>]/.test(sign) && asNumber(limit) === undefined) terms.problems.push(`“${limit}” is not a number.`);
    if (Object.hasOwn(COMPARED, column)) terms.compared.push({ isNegated, value: COMPARED[column], sign, limit });
    else terms.asked.push(`${isNegated ? "-" : ""}${name}${sign}${limit}`);
  }

  /* Return a text without the quotes around it. */
  function unquoted(text) {
    return /^["']/.test(text) ? text.replaceAll(text[0], "") : text;
  }

  /* Return a value as a number, also "inf", as results have it; undefined if it is none. */
  function asNumber(value) {
    const text = String(value).trim().replace(/^([+-]?)inf$/i, "$1Infinity");
    const number = text === "" ? NaN : Number(text);
    return Number.isNaN(number) ? undefined : number;
  }

  /* Return true if one of a run's values holds, or none if the comparison is negated. */
  function isMatch(run, { isNegated, value, sign, limit }) {
    return [value(run)].flat().some((own) => !isMissing(own) && holds(own, sign, limit)) !== isNegated;
  }

  /* Compare as numbers if both are, else as texts for equality; an empty limit is for any value. */
  function holds(own, sign, limit) {
    if (limit === "") return true;
    const numbers = [asNumber(own), asNumber(limit)];
    if (!numbers.includes(undefined)) return SIGNS[sign](...numbers);
    return /[<>]/.test(sign) ? false : SIGNS[sign](String(own).toLowerCase(), limit.toLowerCase());
  }

  /* Return true if a run has the chosen workload, verdict and age, and matches all words and comparisons. */
  function matches(run, terms, chosen) {
    if (chosen.workload && run.workload !== chosen.workload) return false;
    if (!hasVerdict(run, chosen.verdict)) return false;
    if (chosen.since && !(run.started >= now() - chosen.since * 3600)) return false;
    return terms.words.every(({ word, isNegated }) => run.text.includes(word) !== isNegated)
      && terms.compared.every((term) => isMatch(run, term));
  }

  /* Return true if a run has a verdict of the filter; an empty one matches every run. */
  function hasVerdict(run, wanted) {
    if (wanted === "in progress") return run.state !== "done";
    return !wanted || verdict(run) === wanted;
  }

  /* Return true for a value that a run does not have. */
  function isMissing(value) {
    return value === undefined || value === null || value === "";
  }

  /* Return a comparison of runs by a column, "-" before its name for descending; runs without a value come last. */
  function ordering(sort) {
    const value = valueOf(columnOf(sort));
    const sign = sort.startsWith("-") ? -1 : 1;
    return (run, other) => {
      const [own, its] = [value(run), value(other)];
      if (isMissing(own) || isMissing(its)) return isMissing(own) - isMissing(its) || latestFirst(run, other);
      if (own === its) return latestFirst(run, other);
      // Numbers come before texts.
      if (typeof own !== typeof its) return typeof own === "number" ? -sign : sign;
      return own < its ? -sign : sign;
    };
  }

  /* Return the column of an order. */
  function columnOf(sort) {
    return sort.replace(/^-/, "");
  }

  /* Return a function of a run's value in a column, as a number if it is one; further columns have a "=" before their name. */
  function valueOf(column) {
    if (!column.startsWith("=")) return VALUES[column];
    return (run) => {
      const value = labctl.columns.value(column.slice(1), run);
      return asNumber(value ?? "") ?? value;
    };
  }

  /* Compare runs by id, which begins with the time of their start. */
  function latestFirst(run, other) {
    return run.id < other.id ? 1 : -1;
  }

  /* Return true if there is a column of this name. */
  function isColumn(name) {
    return name.startsWith("=") || Object.hasOwn(VALUES, name);
  }

  labctl.filter = { now, seconds, verdict, parse, matches, ordering, columnOf, isColumn, isMissing };
})();
