// Explains photos in the browser, with the model that lies beside the page.
"use strict";
const explainer = (() => {
  const TILE = 224; // pixels
  const ONE = 2 ** 22; // of weights, when pictures are resampled
  const $ = (id) => document.getElementById(id);
  const received = {};
  const photos = []; // {name, seen, found}
  let about, session, queue = Promise.resolve();

  /** Takes a part of a file, in base64: scripts are all that a page from the file system may read. */
  function receive(name, base64) {
    const text = atob(base64), bytes = new Uint8Array(text.length);
    for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
    (received[name] ||= []).push(bytes);
  }

  /** Returns the bytes of a file by its name, from the scripts with its parts. */
  async function bytesOf(name, count) {
    for (let part = 0; part < count; part++) {
      await new Promise((resolve, reject) => {
        const script = document.createElement("script");
        script.src = `data/${name}${part}.js`;
        script.onload = () => resolve(script.remove());
        script.onerror = () => reject(new Error(`${script.src} is missing: copy the whole folder`));
        document.body.append(script);
      });
    }
    const parts = received[name];
    delete received[name];
    return new Uint8Array(await new Blob(parts).arrayBuffer());
  }

  /** Resamples pixels (height x width x channels, 8 bits) to the last bit as Pillow does: in whole numbers. */
  function resized(pixels, width, height, channels, toWidth, toHeight, bicubic) {
    const kernel = bicubic
      ? (x) => (x < 1 ? (1.5 * x - 2.5) * x * x + 1 : x < 2 ? ((-0.5 * x + 2.5) * x - 4) * x + 2 : 0)
      : (x) => Math.max(0, 1 - x);
    const along = (source, size, to, lines, step, lineStep, target, toStep, toLineStep) => {
      const scale = size / to, wide = Math.max(scale, 1), support = (bicubic ? 2 : 1) * wide;
      for (let i = 0; i < to; i++) {
        const centre = (i + 0.5) * scale;
        const first = Math.max(0, Math.trunc(centre - support + 0.5));
        const last = Math.min(size, Math.trunc(centre + support + 0.5));
        const weights = [];
        for (let k = first; k < last; k++) weights.push(kernel(Math.abs((k - centre + 0.5) * (1 / wide))));
        const total = weights.reduce((sum, weight) => sum + weight, 0);
        const whole = weights.map((weight) => Math.trunc((weight / total) * ONE + (weight < 0 ? -0.5 : 0.5)));
        for (let line = 0; line < lines; line++) {
          for (let c = 0; c < channels; c++) {
            let sum = ONE / 2;
            for (let k = first; k < last; k++) sum += whole[k - first] * source[line * lineStep + k * step + c];
            target[line * toLineStep + i * toStep + c] = Math.floor(sum / ONE); // and clamped
          }
        }
      }
      return target;
    };
    if (toWidth !== width) {
      const row = toWidth * channels;
      const target = new Uint8ClampedArray(row * height);
      pixels = along(pixels, width, toWidth, height, channels, width * channels, target, channels, row);
    }
    if (toHeight !== height) {
      const row = toWidth * channels;
      pixels = along(pixels, height, toHeight, toWidth, row, channels, new Uint8ClampedArray(row * toHeight), row, channels);
    }
    return pixels;
  }

  /** Returns a photo that no browser turns, and how people see it, from 1 (as it is stored) to 8, as EXIF has it. */
  async function unturned(file) {
    let orientation; // of a phone's file with several pictures, that of the first
    const view = new DataView(await file.arrayBuffer()), after = { 0x45786966: 6, 0x65584966: 4, 0x45584946: 8 };
    for (let at = 0; at + 20 < view.byteLength; at++) {
      const start = at + (after[view.getUint32(at)] || -at); // "Exif" of JPEG, "eXIf" of PNG, "EXIF" of WebP
      const little = view.getUint16(start) === 0x4949;
      if (start === 0 || view.getUint16(start + 2, little) !== 42) continue;
      const entries = start + view.getUint32(start + 4, little) + 2;
      const count = entries <= view.byteLength ? view.getUint16(entries - 2, little) : 0;
      for (let entry = entries; entry < Math.min(entries + 12 * count, view.byteLength - 10); entry += 12) {
        if (view.getUint16(entry, little) !== 0x0112) continue;
        orientation ??= view.getUint16(entry + 8, little);
        view.setUint16(entry + 8, 1, little);
      }
    }
    return [new Blob([view], { type: file.type }), orientation ?? 1];
  }

  /** Refuses a PNG of 16 bits whose white is not the largest number, as for the browser. */
  async function checkDepth(file) {
    const view = new DataView(await file.slice(0, 26).arrayBuffer());
    const deep = view.byteLength > 24 && view.getUint32(0) === 0x89504e47 && view.getUint8(24) === 16;
    if (deep && (about.input.white_level ?? null) !== null) {
      throw new Error(`${file.name} has 16 bits, which this page cannot scale as the network expects: save it with 8 bits`);
    }
  }

  /** Returns pixels (height x width, 4 numbers each) turned as people see them, and their width and height. */
  function upright(rgba, width, height, orientation) {
    if (!(orientation > 1 && orientation < 9)) return [rgba, width, height];
    const onItsSide = orientation > 4, [w, h] = onItsSide ? [height, width] : [width, height];
    const mirrored = [2, 3, 7, 8].includes(orientation), upsideDown = [3, 4, 6, 7].includes(orientation);
    const turned = new Uint8ClampedArray(rgba.length);
    for (let y = 0, i = 0; y < h; y++) {
      for (let x = 0; x < w; x++, i += 4) {
        let [column, row] = onItsSide ? [y, x] : [x, y];
        if (mirrored) column = width - 1 - column;
        if (upsideDown) row = height - 1 - row;
        const from = 4 * (row * width + column);
        for (let c = 0; c < 4; c++) turned[i + c] = rgba[from + c];
      }
    }
    return [turned, w, h];
  }

  /** Returns the part of a photo that the network sees, (height x width x channels), 8 bits. */
  async function seenOf(file) {
    await checkDepth(file);
    const as = { colorSpaceConversion: "none", premultiplyAlpha: "none" };
    const [stored, orientation] = await unturned(file);
    const bitmap = await createImageBitmap(stored, as).catch(() => {
      throw new Error(`${file.name} is not a picture this browser can read`);
    });
    const canvas = new OffscreenCanvas(bitmap.width, bitmap.height), context = canvas.getContext("2d");
    context.drawImage(bitmap, 0, 0);
    const pixelsStored = context.getImageData(0, 0, bitmap.width, bitmap.height).data;
    // Of a file that does not say so, networks are trained on pixels as they are stored.
    const [rgba, across, down] = upright(pixelsStored, bitmap.width, bitmap.height, about.input.exif ? orientation : 1);
    for (let j = 3; j < rgba.length; j += 4) {
      if (rgba[j] < 255) throw new Error(`${file.name} is partly transparent: save it without transparency`);
    }
    const [channels, height, width] = about.input.shape, { resize, interpolation } = about.input;
    let pixels = new Uint8ClampedArray(across * down * channels);
    for (let i = 0, j = 0; j < rgba.length; j += 4) {
      if (channels === 3) for (let c = 0; c < 3; c++) pixels[i++] = rgba[j + c];
      else pixels[i++] = (19595 * rgba[j] + 38470 * rgba[j + 1] + 7471 * rgba[j + 2] + 32768) >> 16;
    }
    const even = (x) => (x % 1 === 0.5 ? 2 * Math.round(x / 2) : Math.round(x)); // as Python rounds
    let [w, h] = [width, height];
    if (resize === "pad") {
      const part = Math.min(width / across, height / down);
      [w, h] = [across, down].map((side) => Math.max(1, even(part * side)));
    } else if (resize !== null) {
      const short = Math.min(across, down);
      [w, h] = [across, down].map((side) => Math.floor((resize * side) / short));
    }
    pixels = resized(pixels, across, down, channels, w, h, interpolation === "bicubic");
    const cut = new Uint8ClampedArray(height * width * channels);
    if (resize === "pad") { // in a frame of the colour that becomes 0
      const rim = Array.from({ length: channels }, (_, c) => even(255 * (about.input.mean || [])[c] || 0));
      for (let i = 0; i < cut.length; i++) cut[i] = rim[i % channels];
      const left = Math.floor((width - w) / 2), top = Math.floor((height - h) / 2);
      for (let y = 0; y < h; y++) {
        cut.set(pixels.subarray(y * w * channels, (y + 1) * w * channels), ((top + y) * width + left) * channels);
      }
      return cut;
    }
    const left = even((w - width) / 2), top = even((h - height) / 2);
    for (let y = 0; y < height; y++) {
      const from = ((top + y) * w + left) * channels;
      cut.set(pixels.subarray(from, from + width * channels), y * width * channels);
    }
    return cut;
  }

  /** Returns all outputs for one photo, by name, and what the network sees of it. */
  async function explain(file) {
    const seen = await seenOf(file), [channels, height, width] = about.input.shape;
    const x = new Float32Array(seen.length), count = height * width;
    for (let c = 0; c < channels; c++) {
      const mean = Math.fround((about.input.mean || [])[c] ?? 0), std = Math.fround((about.input.std || [])[c] ?? 1);
      for (let i = 0; i < count; i++) {
        x[c * count + i] = Math.fround(Math.fround(seen[i * channels + c] / 255) - mean) / std;
      }
    }
    const outputs = await session.run({ images: new ort.Tensor("float32", x, [1, channels, height, width]) });
    const found = Object.fromEntries(
      Object.entries(outputs).map(([name, tensor]) => [name, { dims: tensor.dims, data: Array.from(tensor.data, Number) }]),
    );
    if (!found.maps.data.every(Number.isFinite)) throw new Error(`the maps of ${file.name} are not finite`);
    return { name: file.name, seen, found };
  }

  const number = (x) => String(Number(x.toPrecision(4))).replace("-", "\u2212");
  const element = (kind, text = "", name = "") => Object.assign(document.createElement(kind), { textContent: text, className: name });

  function canvasOf(width, height, colour) {
    const canvas = Object.assign(document.createElement("canvas"), { width, height });
    const context = canvas.getContext("2d"), image = context.createImageData(width, height);
    for (let y = 0, i = 0; y < height; y++) {
      for (let x = 0; x < width; x++, i += 4) image.data.set([...colour(x, y), 255], i);
    }
    context.putImageData(image, 0, 0);
    return canvas;
  }

  /** Returns a function of the centre of a pixel that interpolates numbers (height x width) between theirs. */
  function between(numbers, height, width, toHeight, toWidth, channels = 1) {
    const place = (i, size, to) => {
      const at = Math.min(Math.max(((i + 0.5) * size) / to - 0.5, 0), size - 1), low = Math.floor(at);
      return [low, Math.min(low + 1, size - 1), at - low];
    };
    return (x, y, c = 0) => {
      const [left, right, across] = place(x, width, toWidth), [top, bottom, down] = place(y, height, toHeight);
      const at = (row, column) => numbers[(row * width + column) * channels + c];
      const mixed = (row) => at(row, left) + across * (at(row, right) - at(row, left));
      return mixed(top) + down * (mixed(bottom) - mixed(top));
    };
  }

  /** Returns the colour of a value from -1 to 1 over a grey. */
  function over(grey, value, strength) {
    const count = about.colours.length;
    const place = Math.min(Math.max(Math.floor((0.5 + 0.5 * value) * count), 0), count - 1);
    const opacity = strength * 0.95 * Math.abs((2 * place) / (count - 1) - 1) ** 0.7;
    return about.colours[place].map((part) => Math.round(opacity * part + (1 - opacity) * grey));
  }

  /** Returns a value and its standard error in words, both to the place that the error leaves, as on sheets. */
  function withError(value, error) {
    if (error === undefined) return number(value);
    if (!Number.isFinite(error)) return `${number(value)} (not stable)`;
    const digits = error.toExponential()[0] === "1" ? 2 : 1;
    const places = Math.max(0, digits - 1 - Number(error.toExponential(digits - 1).split("e")[1]));
    if (!(error > 0 && error < 1e4) || places > 4) return `${number(value)} \u00b1 ${Number(error.toPrecision(2))}`;
    const rounded = Number(value.toFixed(places)) + 0; // no -0
    return `${rounded.toFixed(places)} \u00b1 ${error.toFixed(places)}`.replace("-", "\u2212");
  }

  /** Returns whether the decision for a class, which turns at 0, is not two standard errors from there. */
  function isOpen({ found }) {
    const k = about.titles.findIndex((title) => !title.startsWith("component ")), classes = about.classes || [];
    if (k < 0 || !found.values_error || found.label?.data.length !== 1 || about.threshold !== undefined) return false;
    const whole = ["predicted class", `against ${about.normal}`, `for ${about.normal}`].some((end) => about.titles[k].endsWith(end));
    if (!about.meanings[k].includes("above 0") || classes.length < 2 || (classes.length > 2 && !whole)) return false;
    return Math.abs(found.values.data[k]) < 2 * found.values_error.data[k];
  }

  /** Returns why a photo is anomalous, in words, as on sheets: empty where that is not known. */
  function reasonOf({ found }) {
    const { expressing: count, usually_outside: usual } = about, parts = [...(found.parts?.data ?? [])];
    const total = (some) => some.reduce((a, b) => a + b, 0), share = (part) => `${Math.round((100 * part) / total(parts))}%`;
    if (count === undefined || !total(parts)) return "";
    const inside = parts.slice(0, count), largest = Math.max(...inside);
    const most = largest >= 0.1 * total(parts) ? `component ${inside.indexOf(largest) + 1} alone adds ${share(largest)}` : "no component alone adds a tenth";
    const beside = usual === null ? "" : ` (of other good photos ${Math.round(100 * usual)}%)`;
    return `${share(total(parts.slice(count)))} of the anomaly is outside of the ${count} main components of good photos${beside}; ${most}`;
  }

  /** Says that a photo is unlike the training set; empty: it is not, or nothing tells. */
  function unlike({ found }) {
    const outside = found.outside?.data[0] ?? 0;
    return outside > 1 ? `unlike the training pictures: do not trust this decision (${outside.toFixed(2)} times the limit)` : "";
  }

  /** Returns what is left of the colour at a place: all where the sign of the map is sure; the rest is pale and hatched. */
  function fading({ found }, k) {
    if (!found.error || found.opposite) return () => 1;
    const [, , height, width] = found.maps.dims, first = k * height * width;
    const isSure = (i) => Math.abs(found.maps.data[first + i]) > about.sure_from * found.error.data[first + i];
    const cell = (x, size) => Math.floor((x * size) / TILE);
    return (x, y) => (isSure(cell(y, height) * width + cell(x, width)) ? 1 : (((x + y) * 20) / TILE) % 1 < 1 / 3 ? 0.75 : 0.2);
  }

  /** Returns the predicted class of a photo; of dense features, with several, nothing. */
  const labelOf = ({ found }) => (found.label?.data.length === 1 && about.classes ? String(about.classes[found.label.data[0]]) : "");
  const sizeOf = ({ found }, k) => Math.log(found.nu.data[k]) + found.log_scale.data[k];

  /** Returns a panel: a heading, a caption, and a picture, or several parts; below a bar of colours, what its ends mean. */
  function panel(heading, caption, parts, colour, ends) {
    const figure = element("figure", "", "tile");
    figure.append(element("b", heading), element("span", caption), ...[parts].flat());
    if (!colour) return figure;
    const bar = canvasOf(TILE, 1, colour), words = element("div", "", "ends");
    bar.className = "bar";
    words.append(...ends);
    figure.append(bar, words);
    return figure;
  }

  /** Returns the grey of a photo at a place. */
  const greyOf = (pixel) => (x, y) => 255 * 0.35 + 0.65 * (pixel(x, y, 0) + pixel(x, y, 1) + pixel(x, y, 2)) / 3;

  function tile(photo, pixel, k) {
    const { found } = photo, [, , height, width] = found.maps.dims, first = k * height * width;
    const signed = Array.from({ length: height * width }, (_, i) => {
      const value = found.maps.data[first + i];
      return found.opposite ? Math.max(value, 0) - Math.max(found.opposite.data[first + i], 0) : value;
    });
    const blank = found.nu.data[k] === 0;
    let ends = photo; // whose largest value ends the colours
    if ($("scale").value === "target") ends = photos.reduce((a, b) => (sizeOf(b, k) > sizeOf(a, k) ? b : a), photo);
    const nu = ends.found.nu.data[k], scale = ends.found.log_scale.data[k];
    const size = blank ? 1 : nu * Math.exp(scale - found.log_scale.data[k]);
    const map = between(signed.map((value) => value / size), height, width, TILE, TILE);
    const strength = Number($("opacity").value);
    const grey = greyOf(pixel), left = fading(photo, k);
    const baseline = found.baseline_values?.data[k] ?? 0, value = found.values.data[k];
    const meaning = about.meanings?.[k] ?? "value {}";
    const strongest = (about.strongest || []).indexOf(k), change = value - baseline;
    const from = Math.abs(baseline) > 1e-3 * Math.max(Math.abs(value), nu * Math.exp(scale))
      ? ` = ${number(baseline)} before any evidence ${change < 0 ? "\u2212" : "+"} ${number(Math.abs(change))} by the photo` : "";
    const box = about.strongest?.length > 1 ? `patch ${strongest + 1}` : "the outlined patch";
    const title = strongest >= 0 && found.evidence ? `Why: what of the photo made ${box} so`
      : about.titles[k].replace("predicted class", () => (labelOf(photo) ? `${labelOf(photo)} (predicted)` : "commonest class"));
    const why = strongest >= 0 && found.evidence ? reasonOf(photo) : "";
    const caption = meaning.replace("{}", withError(value, found.values_error?.data[k])).replaceAll("predicted class", () => labelOf(photo) || "commonest class") + from + (why && `; ${why}`);
    const canvas = boxed(canvasOf(TILE, TILE, (x, y) => over(grey(x, y), left(x, y) * map(x, y), strength)), photo, strongest);
    const end = number(nu) + (scale ? ` × exp(${number(scale)})` : "");
    const below = [element("b", blank ? "blank: all zero" : "lowers", "blue"), element("b", blank ? "" : `raises, to ${end}`, "red")];
    return panel(title, caption, canvas, (x) => over(255, (2 * x) / (TILE - 1) - 1, 1), below);
  }

  /** Outlines the positions of a photo that maps explain, or one of them, and numbers them if there are several. */
  function boxed(canvas, { found }, only = null) {
    if (!found.evidence || found.evidence.dims.length !== 4 || only === -1) return canvas;
    const [, targets, height, width] = found.evidence.dims, context = canvas.getContext("2d");
    for (let k = 0; k < targets; k++) {
      if (only !== null && only !== k) continue;
      const values = found.evidence.data.slice(k * height * width, (k + 1) * height * width);
      const place = values.reduce((best, value, i) => (value > values[best] ? i : best), 0);
      const x = ((place % width + 0.5) * TILE) / width, y = ((Math.floor(place / width) + 0.5) * TILE) / height;
      const across = Math.max(TILE / width, 10), down = Math.max(TILE / height, 10);
      for (const [line, colour] of [[4, "black"], [2, "white"]]) {
        context.lineWidth = line;
        context.strokeStyle = colour;
        context.strokeRect(x - across / 2, y - down / 2, across, down);
        if (targets > 1) context.strokeText(String(k + 1), x + across / 2 + 4, y);
      }
      if (targets > 1) context.fillText(String(k + 1), x + across / 2 + 4, y);
    }
    return canvas;
  }

  /** Returns the scale of the numbers at every position: where colours begin and end, and where they are bright. */
  function scaleOf({ found }) {
    const highest = (data) => data.reduce((a, b) => Math.max(a, b), -Infinity);
    if (!found.anomaly) {
      return { low: 0, high: highest(found.evidence.data.map(Math.abs)), mark: null, words: "0 or less: no colour", told: "" };
    }
    const shared = $("scale").value === "target" ? photos.flatMap((photo) => photo.found.anomaly.data) : found.anomaly.data;
    const [start, end] = about.anomaly_range, { usual, threshold } = about, told = [];
    let low = start, high = end;
    if (usual !== undefined) {
      low += (2 / 3) * (Math.min(usual, threshold ?? usual) - low);
      told.push(`good patches reach ${number(usual)}`);
    }
    if (threshold !== undefined) {
      high = Math.max(2 * threshold - low, usual ?? threshold);
      told.unshift(`line: threshold ${number(threshold)}`);
    }
    return { low, high: Math.max(high, highest(shared)), mark: threshold ?? null, words: `up to ${number(low)}: no colour`, told: told.join("; ") };
  }

  /** Returns the colour of a number at a position over a grey. */
  function hot(value, { low, high, mark }, shade) {
    const between = (from, to, first, last) => first + (Math.min(Math.max((value - from) / (to - from || 1), 0), 1)) * (last - first);
    const marked = mark !== null && low < mark && mark < high;
    const share = !(low < high) ? 0 : !marked ? between(low, high, 0, 1) : value < mark ? between(low, mark, 0, 0.55) : between(mark, high, 0.55, 1);
    const colour = about.heat[Math.round((0.25 + 0.75 * share) * (about.heat.length - 1))], opacity = 0.8 * Math.min(share / 0.3, 1);
    return colour.map((part) => Math.round(opacity * part + (1 - opacity) * shade));
  }

  /** Returns what is decided at every position of a photo over it: how anomalous it is, a margin or its class; or nothing. */
  function positions(photo, pixel) {
    const { found } = photo, one = about.strongest?.length === 1 && about.classes?.length === 2 && found.evidence;
    if (!about.heat || !(found.anomaly || found.label)) return [];
    const grey = greyOf(pixel);
    const mixed = (opacity, colour, shade) => colour.map((part) => Math.round(opacity * part + (1 - opacity) * shade));
    const [height, width] = (found.anomaly || found.label).dims.slice(-2);
    let [name, meaning] = (about.meanings?.[about.strongest?.[0]] ?? "value {}").split("{}").map((part) => part.replace(/[\s:]+$|^[\s:]+/g, ""));
    if (found.anomaly) [name, meaning] = ["anomaly", about.anomaly ?? ""];
    else if (["margin", "log-ratio"].includes(name)) name += ` of ${about.titles[about.strongest[0]].replace(" where strongest", "")}`;
    const told = about.strongest?.length && found.evidence ? "outlined: the strongest, explained beside" : `${height} × ${width} positions`;
    const heading = `Where: ${found.anomaly || one ? name : "class"} at every position`;
    const caption = [(found.anomaly || one) && meaning, told].filter(Boolean).join("; ");
    const shares = () => [...new Set(found.label.data)].sort((a, b) => a - b).map((label) => shareOf(found.label.data, label));
    if (found.anomaly || one) {
      const values = found.anomaly || found.evidence, scale = scaleOf(photo);
      const at = between(values.data, height, width, TILE, TILE);
      const canvas = boxed(canvasOf(TILE, TILE, (x, y) => hot(at(x, y), scale, grey(x, y))), photo);
      const place = scale.mark === null ? -9 : Math.round(((scale.mark - scale.low) / (scale.high - scale.low || 1)) * (TILE - 1));
      const colour = (x) => (Math.abs(x - place) < 2 ? [0, 0, 0] : hot(scale.low + (x / (TILE - 1)) * (scale.high - scale.low), scale, 255));
      const figure = panel(heading, caption, canvas, colour, [element("b", scale.words), element("b", number(scale.high))]);
      figure.append(...(scale.told ? [element("span", scale.told)] : []), ...(found.anomaly ? [] : shares()));
      return [figure];
    }
    const place = (x, size) => Math.floor(((x + 0.5) * size) / TILE);
    const painted = (x, y) => mixed(0.55, labelColour(found.label.data[place(y, height) * width + place(x, width)]), grey(x, y));
    return [panel(heading, caption, [boxed(canvasOf(TILE, TILE, painted), photo), ...shares()])];
  }

  /** Returns the colour of a class. */
  const labelColour = (label) => about.label_colours[label % about.label_colours.length];

  /** Returns the line of a legend: the colour of a class, its name, and its share of all positions. */
  function shareOf(labels, label) {
    const line = element("div", "", "class"), share = labels.filter((other) => other === label).length / labels.length;
    line.append(canvasOf(12, 12, () => labelColour(label)), element("span", `${about.classes[label]}, ${(100 * share).toFixed(1)}%`));
    return line;
  }

  function scoresOf({ found }) {
    const table = element("div", "", "scores"), scores = found.scores?.data || [];
    if (!about.classes || about.pairwise_scores || scores.length !== about.classes.length) return table;
    const low = Math.min(...scores), high = Math.max(...scores);
    scores.forEach((score, c) => {
      const bar = element("div"), filled = element("i");
      filled.style.width = `${(100 * (score - low)) / (high - low || 1)}%`;
      bar.append(filled);
      table.append(element("span", String(about.classes[c])), bar, element("span", number(score)));
    });
    return table;
  }

  function draw() {
    if (!session) return;
    const [channels, height, width] = about.input.shape;
    $("photos").replaceChildren(...photos.map((photo) => {
      const card = element("section", "", "photo"), tiles = element("div", "", "tiles");
      const at = between(photo.seen, height, width, TILE, TILE, channels);
      const pixel = (x, y, c) => at(x, y, channels === 3 ? c : 0);
      const seen = canvasOf(TILE, TILE, (x, y) => [0, 1, 2].map((c) => Math.round(pixel(x, y, c))));
      const original = panel("What the network sees", `${width} × ${height} pixels`, [seen, scoresOf(photo)]);
      tiles.append(original, ...positions(photo, pixel), ...about.titles.map((_, k) => tile(photo, pixel, k)));
      const verdict = isOpen(photo) ? `open, ${labelOf(photo)} is ahead, but other training photos might decide otherwise` : labelOf(photo);
      card.append(element("h2", [photo.name, verdict, unlike(photo)].filter(Boolean).join(": ")), tiles);
      return card;
    }));
  }

  function status(text, name = "") {
    Object.assign($("status"), { textContent: text, className: name });
  }

  /** Explains files one after another, the newest on top. */
  function add(files) {
    for (const file of files) {
      queue = queue.then(async () => {
        status(`Explaining ${file.name}…`);
        await new Promise((resolve) => setTimeout(resolve)); // the browser draws first
        photos.unshift(await explain(file));
        draw();
        status(`${photos.length} explained`);
      }).catch((error) => status(error.message, "error"));
    }
    return queue;
  }

  async function start() {
    about = JSON.parse(new TextDecoder().decode(await bytesOf("about", 1)));
    for (const name of ["colours", "label_colours", "heat"]) {
      about[name] &&= about[name].map((colour) => [0, 2, 4].map((i) => parseInt(colour.slice(i, i + 2), 16)));
    }
    document.title = document.querySelector("h1").textContent = about.page.title;
    $("what").textContent = `${about.method}: ${about.titles.join(", ")}` + (about.classes ? `; classes: ${about.classes.join(", ")}.` : ".");
    $("sure").textContent = about.sure_from
      ? "Pale and hatched: another hundred training photos might turn it around. \u00b1: how far they might move a value (one standard error). "
        + "Open: a decision within twice that. Not stable: they would make another component of it."
      : "How sure these maps are is not known: the file was exported without errors.";
    for (const [name, value] of [
      ["target layers", about.target_layers.join(", ")], ["features", about.features], ["options", JSON.stringify(about.options)],
      ["input", JSON.stringify(about.input)], ["digest", JSON.stringify(about.digest)], ["versions", JSON.stringify(about.versions)],
      ["The maps explain", "the network as it was when the file was written. Further training changes the digest."],
    ]) $("about").append(element("dt", name), element("dd", value));
    const glue = new Blob([await bytesOf("glue", about.page.parts.glue)], { type: "text/javascript" });
    ort.env.wasm.wasmPaths = { mjs: URL.createObjectURL(glue) };
    ort.env.wasm.wasmBinary = (await bytesOf("wasm", about.page.parts.wasm)).buffer;
    ort.env.wasm.numThreads = 1; // more need a server with special headers
    session = await ort.InferenceSession.create(await bytesOf("model", about.page.parts.model), { executionProviders: ["wasm"] });
    $("files").disabled = false;
    status("Ready");
  }

  const ready = start().catch((error) => {
    status(`The model cannot be loaded: ${error.message}`, "error");
    throw error;
  });
  $("files").addEventListener("change", () => {
    add([...$("files").files]);
    $("files").value = ""; // or the same photo could not be chosen again
  });
  for (const kind of ["dragover", "dragleave", "drop"]) {
    document.addEventListener(kind, (event) => {
      event.preventDefault();
      $("drop").classList.toggle("over", kind === "dragover");
      if (kind === "drop" && session) add([...event.dataTransfer.files]);
    });
  }
  for (const id of ["opacity", "scale"]) $(id).addEventListener("input", draw);
  $("clear").addEventListener("click", () => {
    photos.length = 0;
    draw();
    if (session) status("Ready");
  });
  return { receive, ready, add, photos };
})();
