// Colours that the colour-blind can tell apart, and shapes beside them.
(function (atlas) {
  "use strict";

  // Okabe and Ito's colours, with three more; and as many shapes.
  const CLASSES = [
    "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000", "#B8A800", "#7F7F7F", "#8C510A",
  ];
  const SHAPES = ["circle", "square", "up", "down", "diamond", "plus", "star", "cross", "left", "right"];

  // ColorBrewer's RdBu, from blue at -1 to red at 1, as the figures of the package have it.
  const DIVERGING = [
    [5, 48, 97], [33, 102, 172], [67, 147, 195], [146, 197, 222], [209, 229, 240], [247, 247, 247],
    [253, 219, 199], [244, 165, 130], [214, 96, 77], [178, 24, 43], [103, 0, 31],
  ];
  // For points on white paper, whose middle must be seen, too.
  const POINTS = [[33, 102, 172], [120, 150, 185], [150, 150, 150], [200, 115, 110], [178, 24, 43]];
  const VIRIDIS = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [200, 200, 30]];

  const RIGHT = { colour: "#0072B2", shape: "circle" };
  const OPEN = { colour: "#7F7F7F", shape: "diamond" };
  const WRONG = { colour: "#D55E00", shape: "cross" };

  /** Returns a colour [red, green, blue] of a list, at a place from 0 to 1. */
  function between(colours, place) {
    const at = Math.min(Math.max(place, 0), 1) * (colours.length - 1), low = Math.min(Math.floor(at), colours.length - 2);
    return colours[low].map((value, c) => Math.round(value + (at - low) * (colours[low + 1][c] - value)));
  }

  const css = (colour) => "rgb(" + colour.join(",") + ")";

  /** Returns colour and shape of a class by its number; each pair of them occurs once among the first hundred. */
  function ofClass(number) {
    const again = Math.floor(number / CLASSES.length);
    return { colour: CLASSES[number % CLASSES.length], shape: SHAPES[(number + again) % SHAPES.length] };
  }

  const POLYGONS = {
    square: [[-0.8, -0.8], [0.8, -0.8], [0.8, 0.8], [-0.8, 0.8]],
    up: [[0, -1], [0.95, 0.8], [-0.95, 0.8]],
    down: [[0, 1], [0.95, -0.8], [-0.95, -0.8]],
    left: [[-1, 0], [0.8, -0.95], [0.8, 0.95]],
    right: [[1, 0], [-0.8, -0.95], [-0.8, 0.95]],
    diamond: [[0, -1.1], [0.85, 0], [0, 1.1], [-0.85, 0]],
    plus: [
      [-0.35, -1], [0.35, -1], [0.35, -0.35], [1, -0.35], [1, 0.35], [0.35, 0.35], [0.35, 1], [-0.35, 1], [-0.35, 0.35],
      [-1, 0.35], [-1, -0.35], [-0.35, -0.35],
    ],
  };
  POLYGONS.cross = POLYGONS.plus.map(([x, y]) => [0.75 * (x - y), 0.75 * (x + y)]);
  POLYGONS.star = Array.from({ length: 10 }, (_, k) => {
    const size = k % 2 ? 0.5 : 1.15, angle = (k * Math.PI) / 5;
    return [size * Math.sin(angle), -size * Math.cos(angle)];
  });

  /** Fills a shape around (x, y). */
  function draw(context, { colour, shape }, x, y, size) {
    context.fillStyle = colour;
    context.beginPath();
    if (shape === "circle") context.arc(x, y, 0.9 * size, 0, 2 * Math.PI);
    else POLYGONS[shape].forEach(([dx, dy]) => context.lineTo(x + size * dx, y + size * dy));
    context.fill();
  }

  const signed = Array.from({ length: 511 }, (_, k) => {
    const value = (k - 255) / 255;
    return between(DIVERGING, 0.5 + 0.5 * Math.sign(value) * (0.4 + 0.6 * Math.abs(value)));
  });

  /** Returns the colour of a value from -1 to 1 in a map over a picture: never whitish, clear at 0 by its opacity. */
  function ofMap(value) {
    return signed[Math.round(Math.min(Math.max(value, -1), 1) * 255) + 255];
  }

  const STRONGEST = 0.75; // opacity, so that the photo stays visible

  /** Returns the opacity of a value from -1 to 1 over a picture; alone: from 0 to 1, how far it is to stand alone. */
  function opacityOf(value, alone = 0) {
    return (STRONGEST + alone * (0.95 - STRONGEST)) * Math.min(Math.abs(value), 1) ** 0.7;
  }

  /** Returns colour and shape of a value in the scatter, from -1 to 1. */
  function ofValue(value) {
    const step = Math.round(value * 12) / 12; // few colours, so that each is drawn once
    return { colour: css(between(POINTS, 0.5 + step / 2)), shape: value >= 0 ? "up" : "down" };
  }

  const ofNumber = (place) => ({ colour: css(between(VIRIDIS, Math.round(place * 24) / 24)), shape: "circle" });

  atlas.palette = { OPEN, RIGHT, WRONG, ofClass, ofMap, ofNumber, ofValue, opacityOf, draw };
})((window.atlas = window.atlas || {}));
