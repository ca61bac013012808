/* The log of a run: a window that loads more lines as it is scrolled, follows new ones, and can be searched. */
"use strict";
(() => {
  const { element, count, byId, ask, showError } = labctl;
  const { run, running } = document.currentScript.dataset;
  const WINDOW = 300; // Lines of a request.
  const MOST_ROWS = 3000; // Lines in the page.
  const NEAR = 300; // Pixels from an end at which more is loaded.
  const MOST_REQUESTS = 8; // Requests without a line of the rank after which one has to scroll again.
  const PAUSE = 250; // Milliseconds from the last key to a search.
  const box = byId("log-lines");
  // Offsets of the first line and behind the last line that are shown, and the length of the log.
  const held = []; // New lines that came while the view changed.
  const view = { begin: 0, end: 0, size: 0, follows: true, busy: false, unseen: 0 };

  // --- rows ---

  /* Return the row of a line, with its number, rank and time. */
  function newRow(line) {
    const title = line.when === null ? "" : new Date(line.when * 1000).toLocaleString();
    return element("div", { class: "row", "data-at": line.at, title },
      element("span", { class: "place" }, line.number.toLocaleString("en-US")),
      element("span", { class: "rank" }, line.rank === null ? "" : `r${line.rank}`),
      element("span", { class: "text" }, line.text));
  }

  /* Return a row in place of lines that were skipped, which shows them. */
  function newGap(skipped, at) {
    const button = element("button", { type: "button" }, `${count(skipped, "line")} skipped: show`);
    button.addEventListener("click", () => goTo(at));
    return element("div", { class: "gap" }, button);
  }

  /* Show the lines of an answer in place of all others. */
  function replaceRows(answer) {
    Object.assign(view, { begin: answer.begin, end: answer.end, size: answer.size });
    box.replaceChildren(...answer.lines.map(newRow));
  }

  /* Add lines at the end, and remove the first ones beyond MOST_ROWS. */
  function append(lines, end) {
    box.append(...lines.map(newRow));
    view.end = end;
    while (box.childElementCount > MOST_ROWS) box.firstChild.remove();
    const first = box.querySelector(".row");
    if (first && box.childElementCount >= MOST_ROWS) view.begin = Number(first.dataset.at);
  }

  /* Add lines at the beginning, and remove the last ones beyond MOST_ROWS. */
  function prepend(lines, begin) {
    const height = box.scrollHeight;
    box.prepend(...lines.map(newRow));
    box.scrollTop += box.scrollHeight - height;
    view.begin = begin;
    while (box.childElementCount > MOST_ROWS) {
      view.end = Number(box.lastChild.dataset.at ?? view.end);
      box.lastChild.remove();
    }
  }

  // --- status ---

  /* Show a text beside the controls. */
  function showStatus(text) {
    byId("log-status").textContent = text;
  }

  /* Show if there is output, and how many new lines are below. */
  function update() {
    byId("log-end").disabled = view.follows;
    if (view.follows) view.unseen = 0;
    if (!box.childElementCount) showStatus(running ? "No output yet." : "No output.");
    else showStatus(view.unseen ? `${count(view.unseen, "new line")} below` : "");
  }

  // --- requests ---

  /* Ask for lines of the log, of the chosen rank if there is one. */
  function askLines(query) {
    const rank = byId("log-rank").value;
    const parameters = new URLSearchParams(rank ? { ...query, rank } : query);
    return ask(`/run/${encodeURIComponent(run)}/log?${parameters}`);
  }

  /* Change the view, one change at a time. */
  async function change(work) {
    if (view.busy) return;
    view.busy = true;
    try {
      await work();
    } catch (error) {
      showError(error);
    }
    view.busy = false;
    held.splice(0).forEach(addNew);
    update();
  }

  /* Scroll to the end, and follow new lines there. */
  function follow() {
    view.follows = true;
    box.scrollTop = box.scrollHeight;
    update();
  }

  /* Show the last lines. */
  function openEnd() {
    return change(async () => {
      let answer = await askLines({ before: WINDOW });
      const { end, size } = answer;
      for (let number = 0; !answer.lines.length && answer.begin > 0 && number < MOST_REQUESTS; number++) {
        answer = await askLines({ end: answer.begin, before: WINDOW });
      }
      replaceRows({ ...answer, end, size });
      follow();
    });
  }

  /* Show the lines around an offset, and mark the one there. */
  function goTo(at) {
    return change(async () => {
      const [earlier, later] = await Promise.all([askLines({ end: at, before: 100 }), askLines({ begin: at, after: 200 })]);
      replaceRows({ ...later, begin: earlier.begin, lines: [...earlier.lines, ...later.lines] });
      view.follows = false;
      const target = [...box.children].find((row) => Number(row.dataset.at) >= at);
      if (!target) return;
      target.classList.add("found");
      box.scrollTop = target.offsetTop - box.offsetTop - box.clientHeight / 3;
    });
  }

  /* Load lines before the first one that is shown. */
  function loadEarlier() {
    return change(async () => {
      for (let number = 0, lines = []; !lines.length && view.begin > 0 && number < MOST_REQUESTS; number++) {
        const answer = await askLines({ end: view.begin, before: WINDOW });
        lines = answer.lines;
        prepend(lines, answer.begin);
      }
    });
  }

  /* Load lines after the last one that is shown. */
  function loadLater() {
    return change(async () => {
      for (let number = 0, lines = []; !lines.length && view.end < view.size && number < MOST_REQUESTS; number++) {
        const answer = await askLines({ begin: view.end, after: WINDOW });
        lines = answer.lines;
        view.size = answer.size;
        append(lines, answer.end);
      }
    });
  }

  /* Load more near an end; follow new lines while the last one can be seen. */
  function scrolled() {
    const below = box.scrollHeight - box.clientHeight - box.scrollTop;
    const follows = below < 4 && view.end >= view.size;
    if (follows !== view.follows && !view.busy) {
      view.follows = follows;
      update();
    }
    if (box.scrollTop < NEAR && view.begin > 0) loadEarlier();
    else if (below < NEAR && view.end < view.size) loadLater();
  }

  /* Add new lines of a run under way; lines that came before do not come again. */
  function addNew(news) {
    if (view.busy) return void held.push(news);
    if (news.end <= view.end) return;
    const rank = byId("log-rank").value;
    const lines = news.lines.filter((line) => line.at >= view.size && (!rank || line.rank === Number(rank)));
    const isFirst = !view.size;
    const before = view.end;
    view.size = news.size;
    if (!view.follows) {
      view.unseen += lines.length + news.skipped;
      update();
      return;
    }
    if (isFirst) view.begin = news.begin;
    else if (news.skipped && news.begin > before) box.append(newGap(news.skipped, before));
    append(lines, news.end);
    view.size = news.end;
    follow();
  }

  // --- search ---

  let searches = 0;

  /* List the lines with the text that was typed; an answer is dropped if another text was typed meanwhile. */
  async function search() {
    const text = byId("log-search").value;
    const number = ++searches;
    if (!text) return showMatches([], text);
    try {
      const { lines, more } = await askLines({ search: text });
      if (number !== searches) return;
      showMatches(lines, text);
      const matching = count(lines.length, "matching line");
      showStatus(more ? `First ${matching}` : matching);
    } catch (error) {
      showError(error);
    }
  }

  /* Go to the first matching line by Enter: other controls are between. */
  async function toMatches(event) {
    if (event.key !== "Enter") return;
    await search();
    byId("log-matches").querySelector("button")?.focus();
  }

  /* Show the lines with a text, or that there are none. */
  function showMatches(lines, text) {
    const list = byId("log-matches");
    list.replaceChildren(...lines.map((line) => newMatch(line, text)));
    list.hidden = !lines.length;
    update();
  }

  /* Return an entry of the list of matching lines, which shows the line in the log. */
  function newMatch(line, text) {
    const button = element("button", { type: "button" }, `${line.number.toLocaleString("en-US")}: `, ...highlight(line.text, text));
    button.addEventListener("click", () => goTo(line.at));
    return element("li", {}, button);
  }

  /* Return a line with the first place of a text marked. */
  function highlight(line, text) {
    const at = line.toLowerCase().indexOf(text.toLowerCase());
    if (at < 0) return [line];
    const end = at + text.length;
    return [line.slice(0, at), element("mark", {}, line.slice(at, end)), line.slice(end)];
  }

  // --- keys and controls ---

  /* Return a function that calls another one once, after a pause without further calls. */
  function debounced(work) {
    let timer = 0;
    return () => {
      clearTimeout(timer);
      timer = setTimeout(work, PAUSE);
    };
  }

  /* Go to the search by "/", to the ends of the log by Home and End. */
  function pressed(event) {
    const isTyping = event.target.matches("input, textarea, select") || document.querySelector("dialog[open]");
    const hasModifier = event.ctrlKey || event.metaKey || event.altKey;
    if (event.key === "/" && !isTyping && !hasModifier) byId("log-search").focus();
    else if (event.target === box && event.key === "Home") goTo(0);
    else if (event.target === box && event.key === "End") openEnd();
    else return;
    event.preventDefault();
  }

  box.addEventListener("scroll", scrolled, { passive: true });
  byId("log-end").addEventListener("click", openEnd);
  byId("log-search").addEventListener("input", debounced(search));
  byId("log-search").addEventListener("keydown", toMatches);
  byId("log-rank").addEventListener("input", debounced(() => openEnd().then(search)));
  document.addEventListener("keydown", pressed);
  labctl.log = { addNew };
  if (running) update();
  else openEnd();
})();
