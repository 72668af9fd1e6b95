// The scatter: all images by two of their components.
(function (atlas) {
  "use strict";

  const { element, number } = atlas.maps;
  const EDGE = { left: 52, right: 10, top: 10, bottom: 40 };
  const NEAR = 12; // pixels from a point that still hit it

  let canvas, box = null, style = null, hovered = null;

  /** Returns for every row its colour and shape, and what the legend says of them. */
  function styleOf() {
    const { current, groupOf, groupsOf } = atlas.view, head = current.headData;
    const { palette } = atlas;
    if (current.colour === "error" && head && head.correct) {
      const glyphs = { right: palette.RIGHT, open: palette.OPEN, wrong: palette.WRONG }, names = Object.keys(glyphs);
      const judgement = (row) => atlas.view.judgementOf(head, row);
      return {
        of: (row) => glyphs[judgement(row)],
        legend: names.filter((name) => name !== "open" || head.open).map((name) => [glyphs[name], name]),
        first: (row) => -names.indexOf(judgement(row)), // what is wrong is drawn on top
      };
    }
    if (current.colour === "decision" && head) {
      const values = atlas.explanation.valuesOf(head, current.category, current.versus) || head.margins;
      const sizes = Float32Array.from(values, Math.abs).sort();
      const top = sizes[Math.floor(0.98 * (sizes.length - 1))] || 1; // a few far ones would make all others pale
      return {
        of: (row) => palette.ofValue(Math.min(Math.max(values[row] / top, -1), 1)),
        legend: [-1, -0.5, 0, 0.5, 1].map((place) => [palette.ofValue(place), number(place * top, 0, 2)]),
      };
    }
    if (current.colour === "prediction" && head && head.classes) {
      return ofNames(head.classes, (row) => head.predictions[row]);
    }
    if (atlas.data.numbers) return ofNumbers(atlas.data.numbers);
    return ofNames(groupsOf(current), groupOf);
  }

  function ofNumbers(numbers) {
    const { palette } = atlas, known = numbers.filter(Number.isFinite);
    const low = known.reduce((least, each) => Math.min(least, each), Infinity);
    const size = known.reduce((most, each) => Math.max(most, each - low), 0) || 1;
    return {
      of: (row) => palette.ofNumber((numbers[row] - low) / size || 0),
      legend: [0, 0.25, 0.5, 0.75, 1].map((place) => [palette.ofNumber(place), number(low + place * size, 0, 2)]),
    };
  }

  function ofNames(names, of) {
    const { palette } = atlas;
    const glyphs = names.map((_, k) => palette.ofClass(k)), none = { colour: "#555555", shape: "circle" };
    const legend = names.length ? names.map((name, k) => [glyphs[k], name]) : [[none, atlas.data.units()]];
    return { of: (row) => glyphs[of(row)] || none, legend };
  }

  function pixelOf(row) {
    const { components, about } = atlas.data, { x, y } = atlas.view.current;
    const { low, high, width, height } = box;
    const at = (value, axis, from, size) => from + ((value - low[axis]) / (high[axis] - low[axis])) * size;
    return [
      at(components[row * about.components + x], 0, EDGE.left, width - EDGE.left - EDGE.right),
      at(components[row * about.components + y], 1, height - EDGE.bottom, EDGE.top + EDGE.bottom - height),
    ];
  }

  function extentOf(component) {
    const { components, about } = atlas.data;
    let low = Infinity, high = -Infinity;
    for (let i = component; i < components.length; i += about.components) {
      low = Math.min(low, components[i]);
      high = Math.max(high, components[i]);
    }
    const margin = 0.04 * (high - low || 1);
    return [low - margin, high + margin];
  }

  /** Shows all points again. */
  function whole() {
    const { x, y } = atlas.view.current, across = extentOf(x), up = extentOf(y);
    box = { ...box, low: [across[0], up[0]], high: [across[1], up[1]] };
  }

  function ticks(low, high, count) {
    const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((k) => k * power).find((each) => each >= rough);
    const found = [];
    for (let k = Math.ceil(low / step); k * step <= high; k++) found.push(k * step);
    return found;
  }

  function drawAxes(context) {
    const { low, high, width, height } = box, { x, y } = atlas.view.current;
    const right = width - EDGE.right, bottom = height - EDGE.bottom;
    const place = (value, axis) => (value - low[axis]) / (high[axis] - low[axis]);
    context.font = "12px system-ui, sans-serif";
    context.fillStyle = "#444";
    context.textAlign = "center";
    for (const value of ticks(low[0], high[0], width / 90)) {
      const at = EDGE.left + place(value, 0) * (right - EDGE.left);
      context.fillText(number(value), at, bottom + 15);
      context.fillStyle = value === 0 ? "#999" : "#e4e4e4";
      context.fillRect(at, EDGE.top, 1, bottom - EDGE.top);
      context.fillStyle = "#444";
    }
    context.textAlign = "right";
    for (const value of ticks(low[1], high[1], height / 70)) {
      const at = bottom - place(value, 1) * (bottom - EDGE.top);
      context.fillText(number(value), EDGE.left - 6, at + 4);
      context.fillStyle = value === 0 ? "#999" : "#e4e4e4";
      context.fillRect(EDGE.left, at, right - EDGE.left, 1);
      context.fillStyle = "#444";
    }
    context.textAlign = "center";
    context.fillText("Component " + (x + 1), (EDGE.left + right) / 2, height - 6);
    context.save();
    context.translate(12, (EDGE.top + bottom) / 2);
    context.rotate(-Math.PI / 2);
    context.fillText("Component " + (y + 1), 0, 0);
    context.restore();
  }

  /** Returns a function that draws a glyph; each is drawn once, then copied. */
  function stamps(size, density) {
    const made = new Map();
    return function (context, glyph, x, y) {
      const key = glyph.colour + glyph.shape;
      if (!made.has(key)) {
        const side = Math.ceil(density * (3 * size + 2)), stamp = element("canvas", { width: side, height: side });
        const on = stamp.getContext("2d");
        on.scale(density, density);
        atlas.palette.draw(on, glyph, side / density / 2, side / density / 2, size);
        made.set(key, stamp);
      }
      const stamp = made.get(key), side = stamp.width / density;
      context.drawImage(stamp, x - side / 2, y - side / 2, side, side);
    };
  }

  function draw() {
    const width = canvas.clientWidth, height = canvas.clientHeight;
    if (!width || !height) return;
    if (!box || !box.low) whole();
    box.width = width;
    box.height = height;
    const density = Math.min(window.devicePixelRatio || 1, 2), context = canvas.getContext("2d");
    canvas.width = Math.round(width * density);
    canvas.height = Math.round(height * density);
    context.scale(density, density);
    context.clearRect(0, 0, width, height);
    drawAxes(context);
    context.save();
    context.beginPath();
    context.rect(EDGE.left, EDGE.top, width - EDGE.left - EDGE.right, height - EDGE.top - EDGE.bottom);
    context.clip();
    const rows = atlas.view.selected(), all = atlas.data.about.rows;
    const size = all > 3000 ? 2.6 : all > 600 ? 3.6 : 5;
    context.fillStyle = "#dddddd";
    if (rows.length < all) {
      for (let row = 0; row < all; row++) {
        const [x, y] = pixelOf(row);
        context.fillRect(x - 1, y - 1, 2, 2);
      }
    }
    context.globalAlpha = 0.8;
    const stamp = stamps(size, density);
    const ordered = style.first ? [...rows].sort((a, b) => style.first(b) - style.first(a)) : rows;
    for (const row of ordered) {
      const [x, y] = pixelOf(row);
      stamp(context, style.of(row), x, y);
    }
    context.globalAlpha = 1;
    const [x, y] = pixelOf(atlas.view.current.row);
    for (const [radius, line, colour] of [[size + 5, 4, "white"], [size + 5, 2, "black"]]) {
      context.strokeStyle = colour;
      context.lineWidth = line;
      context.beginPath();
      context.arc(x, y, radius, 0, 2 * Math.PI);
      context.stroke();
    }
    context.restore();
  }

  function drawLegend() {
    const items = style.legend.map(([glyph, name]) => {
      const sample = element("canvas", { width: 28, height: 28, className: "glyph", "aria-hidden": "true" });
      atlas.palette.draw(sample.getContext("2d"), glyph, 14, 14, 9);
      return element("span", {}, sample, name);
    });
    document.getElementById("legend").replaceChildren(...items);
  }

  function nearest(event) {
    const bounds = canvas.getBoundingClientRect(), x = event.clientX - bounds.left, y = event.clientY - bounds.top;
    let found = null, least = NEAR ** 2;
    for (const row of atlas.view.selected()) {
      const at = pixelOf(row), squared = (at[0] - x) ** 2 + (at[1] - y) ** 2;
      if (squared <= least) {
        found = row;
        least = squared;
      }
    }
    return found;
  }

  async function hover(row) {
    if (row === hovered) return;
    hovered = row;
    const panel = document.getElementById("hover");
    panel.hidden = row === null;
    if (row === null) return;
    const picture = await atlas.data.pictureOf(row);
    if (hovered !== row) return;
    const [shown] = atlas.maps.canvases(picture, { map: null }, 72, "");
    panel.replaceChildren(...(picture ? [shown] : []), element("span", {}, atlas.panels.titleOf(row)));
  }

  /** Goes to the next image along an axis. */
  function step(axis, direction) {
    const { current, selected, set } = atlas.view, { components, about } = atlas.data;
    const component = axis ? current.y : current.x, value = (row) => components[row * about.components + component];
    const rows = [...selected()].sort((a, b) => value(a) - value(b) || a - b);
    if (!rows.length) return;
    const here = rows.indexOf(current.row);
    const after = rows.findIndex((row) => value(row) > value(current.row));
    const from = here >= 0 ? here + direction : direction > 0 ? after : (after < 0 ? rows.length : after) - 1;
    set({ row: rows[Math.min(Math.max(from, 0), rows.length - 1)] });
  }

  function zoom(factor, x, y) {
    const shares = [
      (x - EDGE.left) / (box.width - EDGE.left - EDGE.right),
      1 - (y - EDGE.top) / (box.height - EDGE.top - EDGE.bottom),
    ];
    shares.forEach((share, axis) => {
      const size = box.high[axis] - box.low[axis], centre = box.low[axis] + share * size;
      box.low[axis] = centre - share * size * factor;
      box.high[axis] = centre + (1 - share) * size * factor;
    });
    draw();
  }

  function move(dx, dy) {
    const steps = [
      (-dx * (box.high[0] - box.low[0])) / (box.width - EDGE.left - EDGE.right),
      (dy * (box.high[1] - box.low[1])) / (box.height - EDGE.top - EDGE.bottom),
    ];
    steps.forEach((size, axis) => {
      box.low[axis] += size;
      box.high[axis] += size;
    });
    draw();
  }

  function listen() {
    let held = null, moved = 0;
    canvas.addEventListener("pointerdown", (event) => { held = event; moved = 0; });
    window.addEventListener("pointerup", () => { held = null; });
    canvas.addEventListener("pointermove", (event) => {
      if (held && event.pointerType === "mouse") {
        moved += Math.abs(event.movementX) + Math.abs(event.movementY);
        if (moved > 4) move(event.movementX, event.movementY);
      }
      hover(nearest(event)).catch(atlas.report);
    });
    canvas.addEventListener("pointerleave", () => hover(null).catch(atlas.report));
    canvas.addEventListener("click", (event) => {
      const row = moved > 4 ? null : nearest(event);
      if (row !== null) atlas.view.set({ row });
    });
    canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      zoom(1.15 ** Math.sign(event.deltaY), event.offsetX, event.offsetY);
    }, { passive: false });
    canvas.addEventListener("keydown", (event) => {
      const steps = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowDown: [1, -1], ArrowUp: [1, 1] };
      if (event.key in steps) step(...steps[event.key]);
      else if (event.key === "Escape") {
        whole();
        draw();
      } else return;
      event.preventDefault();
    });
  }

  /** Makes the scatter follow the view. */
  function setUp() {
    canvas = document.getElementById("scatter");
    const { on, current } = atlas.view;
    on(["x", "y"], () => {
      whole();
      canvas.setAttribute("aria-label", atlas.data.units(atlas.data.about.rows) + ", component " + (current.x + 1) + " across, component "
        + (current.y + 1) + " up");
    });
    on(["colour", "category", "versus", "headData"], () => {
      style = styleOf();
      drawLegend();
    });
    on(["x", "y", "colour", "category", "versus", "headData", "row", "class", "judged", "low", "high"], draw);
    new ResizeObserver(draw).observe(canvas);
    listen();
  }

  atlas.scatter = { setUp };
})((window.atlas = window.atlas || {}));
