/* Requests, errors and copy buttons: used by the scripts of all served pages. */
"use strict";
(() => {
  const { element } = labctl;
  const { root } = document.currentScript.dataset;
  const COPIED = 2000; // Milliseconds for which a copy button says that it copied.

  /* Return an element of the page. */
  function byId(id) {
    return document.getElementById(id);
  }

  /* Return the JSON of a path below the site; throw an error with the message and hint of the server. */
  async function ask(path, options) {
    const response = await fetch(root + path, options);
    const data = await response.json().catch(() => ({}));
    if (response.ok) return data;
    const { message, hint } = data.error ?? { message: `the server answered ${response.status}`, hint: "" };
    throw Object.assign(new Error(message), { hint });
  }

  /* Send data to a path below the site; return its JSON. */
  function post(path, data = {}) {
    return ask(path, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(data) });
  }

  /* Show an error with its hint in the page's place for errors; without one, clear it. */
  function showError(error) {
    byId("problem").textContent = error ? [error.message, error.hint].filter(Boolean).join("; hint: ") : "";
  }

  /* Return a button that copies the text of an element. */
  function copyButton(source) {
    const button = element("button", { type: "button", class: "copy", "aria-label": `Copy ${source.textContent}` }, "Copy");
    button.addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText(source.textContent);
        button.textContent = "Copied";
      } catch {
        getSelection().selectAllChildren(source);
        button.textContent = "Selected";
      }
      setTimeout(() => { button.textContent = "Copy"; }, COPIED);
    });
    return button;
  }

  /* Return a command with a button that copies it. */
  function command(text) {
    const code = element("code", {}, text);
    return element("span", { class: "command" }, code, copyButton(code));
  }

  // A link without an address would leave out what the page's own address keeps.
  for (const button of document.querySelectorAll("[data-reload]")) button.addEventListener("click", () => location.reload());
  for (const source of document.querySelectorAll("code[data-copy]")) source.after(" ", copyButton(source));
  Object.assign(labctl, { root, byId, ask, post, showError, command });
})();
