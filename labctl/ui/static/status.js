/* States, ages and hints: elements that the scripts of the page of the cluster share. */
"use strict";
(() => {
  const { element, ago, command } = labctl;

  /* Return a state: a word, and a class that has its shape and color. */
  function status({ text, kind }) {
    return element("span", { class: `status ${kind}` }, text);
  }

  /* Return how long ago a time in seconds since 1970 was; the text goes on by itself, and is not read aloud then. */
  function timeAgo(at) {
    const datetime = new Date(at * 1000).toISOString();
    return element("time", { "data-at": at, datetime, "aria-live": "off" }, ago(Date.now() / 1000 - at));
  }

  /* Update all times of the page. */
  function updateTimes() {
    for (const time of document.querySelectorAll("time[data-at]")) {
      time.textContent = ago(Date.now() / 1000 - Number(time.dataset.at));
    }
  }

  /* Return true if a text is a command to type. */
  function isCommand(text) {
    return /^[a-z][\w.-]*( |$)/.test(text);
  }

  /* Return a hint, a command with a button that copies it; empty without one. */
  function hint(text) {
    return text ? element("p", {}, "hint: ", isCommand(text) ? command(text) : text) : "";
  }

  setInterval(updateTimes, 1000);
  Object.assign(labctl, { status, timeAgo, isCommand, hint });
})();
