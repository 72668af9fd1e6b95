// Data: what Python wrote, asked for by its name when it is needed.
(function (atlas) {
  "use strict";

  const waiting = new Map();

  /** Takes a text from a file of the folder data/: each of them is one call of this. */
  atlas.receive = function (name, text) {
    const resolve = waiting.get(name);
    waiting.delete(name);
    if (resolve) resolve(text);
  };

  /** Loads the text of an item: from this file if it is all in one, else from a script. fetch fails under file://. */
  function textOf(name) {
    if (document.getElementById("data-atlas")) {
      const block = document.getElementById("data-" + name);
      return block ? Promise.resolve(block.textContent) : Promise.reject(new Error("This page has no " + name + "."));
    }
    return new Promise((resolve, reject) => {
      waiting.set(name, resolve);
      const script = document.createElement("script");
      script.src = "data/" + name + ".js";
      script.addEventListener("load", () => script.remove());
      script.addEventListener("error", () => {
        waiting.delete(name);
        reject(new Error("The file data/" + name + ".js is missing: keep index.html together with its folder."));
      });
      document.head.append(script);
    });
  }

  async function load(name) {
    return JSON.parse(await textOf(name));
  }

  /** Keeps what was asked for last, so that memory does not grow with the data set. */
  function recent(limit, make) {
    const kept = new Map();
    return function (key) {
      let found = kept.get(key);
      kept.delete(key);
      if (found === undefined) {
        found = make(key);
        found.catch(() => kept.delete(key));
      }
      kept.set(key, found);
      if (kept.size > limit) kept.delete(kept.keys().next().value);
      return found;
    };
  }

  function bytesOf(base64) {
    if (Uint8Array.fromBase64) return Uint8Array.fromBase64(base64);
    const text = atob(base64);
    const bytes = new Uint8Array(text.length);
    for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
    return bytes;
  }

  let halves = null;

  /** Returns the number that each of the 65536 half-precision patterns stands for. */
  function halfTable() {
    if (halves) return halves;
    halves = new Float32Array(65536);
    for (let bits = 0; bits < 65536; bits++) {
      const exponent = (bits >> 10) & 31, fraction = bits & 1023;
      let value = fraction * 2 ** -24;
      if (exponent === 31) value = fraction ? NaN : Infinity;
      else if (exponent) value = (1 + fraction / 1024) * 2 ** (exponent - 15);
      halves[bits] = bits & 0x8000 ? -value : value;
    }
    return halves;
  }

  const TYPES = {
    float64: Float64Array, float32: Float32Array, int32: Int32Array, uint16: Uint16Array, uint8: Uint8Array,
  };

  /** Decodes an array: {type, shape, base64} to {shape, values}; half precision to single. */
  function unpacked(array) {
    if (array === null || array === undefined) return null;
    const bytes = bytesOf(array.base64);
    if (array.type !== "float16") return { shape: array.shape, values: new TYPES[array.type](bytes.buffer) };
    const table = halfTable();
    const halved = new Uint16Array(bytes.buffer), values = new Float32Array(halved.length);
    for (let i = 0; i < halved.length; i++) values[i] = table[halved[i]];
    return { shape: array.shape, values };
  }

  function valuesOf(array) {
    const found = unpacked(array);
    return found && found.values;
  }

  const numbered = (name, number) => name + "-" + String(number).padStart(5, "0");

  const chunk = recent(48, async (number) => {
    const found = await load(numbered("maps", number));
    return { maps: valuesOf(found.maps), nu: valuesOf(found.nu), opposite: valuesOf(found.opposite), sure: valuesOf(found.sure) };
  });

  /** Returns the maps of all components of a row, divided by their nu, and nu: views, not copies. */
  async function mapsOf(row) {
    const { about } = atlas.data;
    const count = about.components, size = about.height * about.width;
    const found = await chunk(Math.floor(row / about.rowsPerChunk));
    const place = row % about.rowsPerChunk, start = place * count;
    const part = (array) => array && array.subarray(start * size, (start + count) * size);
    const sure = found.sure && found.sure.subarray(place * size, (place + 1) * size);
    return { maps: part(found.maps), opposite: part(found.opposite), nu: found.nu.subarray(start, start + count), sure };
  }

  /** Returns the picture in a WebP file, or null where it is none. */
  function decoded(base64) {
    const image = new Image();
    image.src = "data:image/webp;base64," + base64;
    return image.decode().then(() => image, () => null);
  }

  const pictures = recent(24, (number) => load(numbered("pictures", number)));

  /** Returns the picture of a row, or null where there is none. */
  const pictureOf = recent(400, async (row) => {
    const count = atlas.data.about.rowsPerPictures;
    const base64 = (await pictures(Math.floor(row / count)))[row % count];
    if (!base64) return null;
    return decoded(base64);
  });

  const heads = new Map();

  /** Adds for each row whether its decision is within two standard errors of where it turns; null where unknown. */
  function withOpen(head) {
    const { margins, errors, meaning, classes } = head, isKnown = errors && classes && meaning.includes("above 0");
    return { ...head, open: isKnown ? margins.map((margin, row) => Number(Math.abs(margin) < 2 * errors[row])) : null };
  }

  /** Returns what a head says of all rows, and its machine, once it was asked for. */
  function head(number) {
    if (!heads.has(number)) {
      heads.set(number, load("head-" + number).then((found) => withOpen({
        ...atlas.data.about.heads[number],
        number,
        predictions: valuesOf(found.predictions),
        first: valuesOf(found.first),
        second: valuesOf(found.second),
        margins: valuesOf(found.margins),
        decisions: valuesOf(found.decisions),
        correct: valuesOf(found.correct),
        errors: valuesOf(found.errors), // of the margins, where they are known
        machine: found.machine.reason ? null : atlas.machine.read(found.machine),
        reason: found.machine.reason || null,
        steps: found.steps && { slopes: valuesOf(found.steps.slopes), starts: valuesOf(found.steps.starts) },
        examples: found.examples,
      })));
    }
    return heads.get(number);
  }

  const means = recent(4, async (by) => {
    const found = await load("means-" + by);
    return { groups: found.groups, counts: found.counts, maps: valuesOf(found.maps) };
  });

  /** Loads what the page needs to open: all but maps, pictures and further heads. */
  async function open() {
    const [about, rows] = await Promise.all(["atlas", "rows"].map(load));
    Object.assign(atlas.data, {
      about,
      ids: rows.ids,
      components: valuesOf(rows.components),
      labels: valuesOf(rows.labels),
      numbers: valuesOf(rows.numbers),
      images: valuesOf(rows.images), // of patches
      baseline: unpacked(rows.baseline),
      remainder: valuesOf(rows.remainder),
      logScale: valuesOf(rows.logScale),
    });
  }

  /** Returns the components of a row, and those of its baseline or null. */
  function pointOf(row) {
    const { about, components, baseline } = atlas.data;
    const count = about.components;
    const of = (values, at) => values.subarray(at * count, (at + 1) * count);
    const from = baseline && of(baseline.values, baseline.shape[0] === 1 ? 0 : row);
    return { p: of(components, row), p0: from };
  }

  /** Returns what the rows are, in words: images, or patches of them; so many, if a number is given. */
  function units(count) {
    const plural = atlas.data.about.unit === "patch" ? "patches" : "images";
    return count === undefined ? plural : count + " " + (count === 1 ? atlas.data.about.unit : plural);
  }

  atlas.data = { decoded, open, head, means, mapsOf, pictureOf, pointOf, units, unpacked };
})((window.atlas = window.atlas || {}));
