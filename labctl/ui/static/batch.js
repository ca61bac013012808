/* The page of a batch that is under way: it is fetched again while it is seen, and its live part replaced. */
"use strict";
(() => {
  const { byId } = labctl;
  const PACE = 5000; // Milliseconds between two requests.

  /* Fetch the page, unless nobody sees it or a link in it has the focus; then wait, until the batch has ended. */
  async function refresh() {
    const live = byId("live");
    if (!live.dataset.live) return;
    const isInUse = live.contains(document.activeElement) && document.activeElement.tagName === "A";
    if (!document.hidden && !isInUse) await fetchLive().then(replace).catch(() => {}); // Without an answer the page stays as it is.
    setTimeout(refresh, PACE);
  }

  /* Return the live part of the page as it is now. */
  async function fetchLive() {
    const response = await fetch(location.href, { headers: { accept: "text/html" } });
    const page = new DOMParser().parseFromString(await response.text(), "text/html");
    return page.getElementById("live");
  }

  /* Replace the live part of the page; the timeline stays scrolled and focused. */
  function replace(now) {
    const before = byId("live").querySelector(".scroll");
    const { scrollLeft, scrollTop } = before;
    const isFocused = document.activeElement === before;
    byId("live").replaceWith(document.adoptNode(now));
    const after = now.querySelector(".scroll");
    after.scrollTo(scrollLeft, scrollTop);
    if (isFocused) after.focus({ preventScroll: true });
  }

  setTimeout(refresh, PACE);
})();
