// Neighbours: the images, or patches, of the atlas that are nearest to the one that is shown.
(function (atlas) {
  "use strict";

  const { filling, number, tile } = atlas.maps;
  const NEAREST = 10;

  /** Returns the rows that are nearest to a row, [row, distance], by all components. */
  function nearest(row, accepted, count) {
    const { components, about } = atlas.data, width = about.components, found = [];
    for (let other = 0; other < about.rows; other++) {
      if (other === row || !accepted(other)) continue;
      let squared = 0;
      for (let b = 0; b < width; b++) squared += (components[other * width + b] - components[row * width + b]) ** 2;
      found.push([other, Math.sqrt(squared)]);
    }
    return found.sort((a, b) => a[1] - b[1] || a[0] - b[0]).slice(0, count);
  }

  /** Returns a tile for each of the rows, [row, distance], which shows it when it is clicked. */
  async function tiles(near, detail = () => []) {
    if (!near.length) return ["There is no other in this atlas."];
    const pictures = await Promise.all(near.map(([row]) => atlas.data.pictureOf(row)));
    return near.map(([row, distance], k) => {
      const name = atlas.panels.nameOf(row), text = "distance " + number(distance);
      const canvases = atlas.maps.canvases(pictures[k], { map: null }, 96, "");
      const label = "Image " + name + ", " + text + ": show this image";
      return tile(canvases, [text, ...detail(row), name], label, () => atlas.view.set({ row }));
    });
  }

  /** Returns in words where neighbours come from, and how they are measured. */
  function note() {
    const { components } = atlas.data.about;
    return "These are " + atlas.data.units() + " of this atlas, not necessarily training images; " + atlas.view.said("how far away they are is "
      + "measured by ", "distances are Euclidean, in the space of ") + (components === 1 ? "its component." : "all " + components + " components.");
  }

  function shown() {
    const { row, headData: head } = atlas.view.current, { images } = atlas.data;
    const near = nearest(row, (other) => !images || images[other] !== images[row], NEAREST);
    return tiles(near, (other) => (head && head.classes ? ["predicted " + head.classes[head.predictions[other]]] : []));
  }

  /** Makes the neighbours follow the row that is shown. */
  function setUp() {
    const of = (id) => document.getElementById(id), from = atlas.data.images ? " of other images" : "";
    of("near-title").textContent = "Nearest " + atlas.data.units() + from;
    of("near-where").textContent = note();
    atlas.view.on(["math"], () => { of("near-where").textContent = note(); });
    atlas.view.on(["row", "headData"], filling(of("near"), shown));
  }

  atlas.neighbours = { nearest, note, setUp, tiles };
})((window.atlas = window.atlas || {}));
