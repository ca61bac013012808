/* Links to files that take a moment to make: they say so meanwhile. */
"use strict";
(() => {
  const KEPT = 60_000; // Milliseconds in which the browser takes the file.

  /* Save the file that a link leads to, by the name that the server gives it. */
  async function save(link) {
    const response = await fetch(link.href);
    if (!response.ok) throw new Error(`the server answered ${response.status}`);
    const [, name] = /filename="(.+)"/.exec(response.headers.get("content-disposition"));
    const href = URL.createObjectURL(await response.blob());
    labctl.element("a", { href, download: name }).click();
    setTimeout(() => URL.revokeObjectURL(href), KEPT);
  }

  for (const link of document.querySelectorAll("a[data-download]")) {
    const title = link.textContent;
    let isBusy = false;
    link.addEventListener("click", async (event) => {
      event.preventDefault();
      if (isBusy) return;
      isBusy = true;
      link.textContent = "Making the file…";
      try {
        await save(link);
        link.textContent = title;
      } catch (error) {
        link.textContent = `Download failed: ${error.message}. Try again`;
      }
      isBusy = false;
    });
  }
})();
