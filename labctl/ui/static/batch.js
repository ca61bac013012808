// The page of a batch that is under way: it is fetched again while somebody looks, and its live part replaced.
"use strict";
(() => {
  const PACE = 5000;

  // Where the timeline was scrolled to stays.
  function replaced(now) {
    const before = document.getElementById("live");
    const scrolled = before.querySelector(".scroll");
    const { scrollLeft, scrollTop } = scrolled;
    const isFocused = document.activeElement === scrolled;
    before.replaceWith(document.adoptNode(now));
    const after = now.querySelector(".scroll");
    after.scrollTo(scrollLeft, scrollTop);
    if (isFocused) after.focus({ preventScroll: true });
  }

  async function look() {
    const before = document.getElementById("live");
    if (!before.dataset.live) return;
    const isInUse = before.contains(document.activeElement) && document.activeElement.tagName === "A";
    if (!document.hidden && !isInUse) {
      try {
        const answer = await fetch(location.href, { headers: { accept: "text/html" } });
        const page = new DOMParser().parseFromString(await answer.text(), "text/html");
        const now = page.getElementById("live");
        if (answer.ok && now) replaced(now);
      } catch {
        // The server has ended, or the tunnel: the page stays as it is.
      }
    }
    setTimeout(look, PACE);
  }

  setTimeout(look, PACE);
})();
