// Opening the page.
(function (atlas) {
  "use strict";

  /** Shows an error to the reader. */
  atlas.report = function (error) {
    const problem = document.getElementById("problem");
    problem.textContent = error.message;
    problem.hidden = false;
    console.error(error);
  };

  function applied(hash) {
    const { about } = atlas.data, found = atlas.view.parsed(hash);
    if (about.opposite) found.style = "split";
    if (found.by === null && about.means.length) found.by = about.means[0];
    return found;
  }

  async function open() {
    await atlas.data.open();
    const { about } = atlas.data, { view } = atlas;
    Object.assign(view.current, applied(location.hash));
    view.current.headData = about.heads.length ? await atlas.data.head(view.current.head) : null;
    atlas.controls.setUp();
    atlas.scatter.setUp();
    atlas.decision.setUp();
    atlas.panels.setUp();
    atlas.neighbours.setUp();
    atlas.mistake.setUp();
    view.start();
    // The address as it was given: a change of the view may have overwritten it meanwhile.
    window.addEventListener("hashchange", (event) => view.set(applied(new URL(event.newURL).hash)));
    performance.mark("open");
  }

  /** Fulfilled when the page can be asked: atlas.ready.then(() => atlas.explain(0)). */
  atlas.ready = open();
  atlas.ready.catch(atlas.report);
})((window.atlas = window.atlas || {}));
