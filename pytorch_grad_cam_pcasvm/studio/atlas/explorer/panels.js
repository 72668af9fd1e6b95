// Panels: the image that was chosen, its component maps, the two ends of a component, and mean maps.
(function (atlas) {
  "use strict";

  const { darkest, element, filling, number, tile, withError } = atlas.maps, { said } = atlas.view;
  const AT_FIRST = 24; // components that are drawn before all are asked for
  const AT_AN_END = 10;
  const LONGEST = 32; // characters of a name in a tile

  let every = false;

  function classNameOf(row) {
    const { groupOf, groupsOf, current } = atlas.view, group = groupOf(row);
    return group < 0 ? "" : groupsOf(current)[group];
  }

  /** Returns the name of an image without the folder of its class, and of long ones the end. */
  function nameOf(row) {
    const folders = atlas.data.ids[row].split(/[\\/]/), file = folders.pop();
    const name = [...folders.filter((each) => each !== classNameOf(row)), file].join("/");
    return name.length > LONGEST ? "…" + name.slice(1 - LONGEST) : name;
  }

  /** Returns an image in words: its class, unless its name begins with that, and its name. */
  function titleOf(row) {
    const group = classNameOf(row), name = nameOf(row);
    const begins = /\p{L}/u.test(group) && name.toLowerCase().startsWith(group.toLowerCase());
    const repeated = begins && !/^[\p{L}\p{N}]/u.test(name.slice(group.length));
    return group && !repeated ? group + " · " + name : name;
  }

  /** Returns how strong the map of a component of a row is, in units in which all maps compare. */
  function strengthOf(row, b, nu) {
    const { about, logScale } = atlas.data;
    return nu * Math.exp(logScale ? logScale[row * about.components + b] : 0);
  }

  const largestOf = (numbers) => numbers.reduce((most, each) => Math.max(most, Math.abs(each)), 0);

  const unstable = (b) => (atlas.data.about.unstable.includes(b) ? " (not stable)" : "");

  /** Returns where the sign of a component's map is sure: nowhere, as it is one of chance, or null, which is not known. */
  const sureOf = (b) => (unstable(b) ? new Uint8Array(atlas.data.about.height * atlas.data.about.width) : null);

  /** Returns the map of a component, which has a strength, to be drawn on a scale; a negative strength turns its signs. */
  function shownOf(maps, b, strength, scale) {
    const { about } = atlas.data, size = about.height * about.width;
    const part = (array) => array && array.subarray(b * size, (b + 1) * size);
    const map = part(maps.maps), turned = strength < 0 ? map.map((value) => -value) : map;
    // It is divided by its nu already.
    return { map: turned, opposite: part(maps.opposite), divisor: scale ? scale / Math.abs(strength) : 1, sure: sureOf(b) };
  }

  async function large() {
    const { row } = atlas.view.current, { about } = atlas.data;
    const [found, picture] = await Promise.all([atlas.decision.current(), atlas.data.pictureOf(row)]);
    const title = titleOf(row), width = document.getElementById("large").clientWidth;
    const split = atlas.view.current.style === "split";
    const size = split ? Math.max(150, width / 3 - 14) : Math.min(280, width / 2 - 14);
    const plain = tile(atlas.maps.canvases(picture, { map: null }, size, "image " + title), ["What the network saw"]);
    if (!found || !found.map) return [plain];
    const what = "map of " + atlas.decision.described(found);
    const shown = { map: found.map, divisor: found.nu, sure: found.sure };
    const drawn = atlas.maps.canvases(picture, shown, split ? size / 0.75 : size, what + " over image " + title);
    const lines = [atlas.maps.colourBar(found.nu, found.logScale)];
    if (about.addsUp && found.nu && !atlas.view.current.math) lines.push("its ends: what one place adds");
    if (found.nu === 0) lines.push("blank: no component contributes");
    if (about.addsUp && found.remainder) lines.push("not on the map: " + number(found.remainder));
    const { headData } = atlas.view.current;
    if (found.sure) lines.push("pale and hatched: another hundred training photos might turn it around");
    else if (headData.errors) lines.push("how sure it is, is known for the predicted class against all others only");
    return [plain, tile(drawn, ["Map of " + atlas.decision.described(found), ...lines])];
  }

  /** Returns the margin of the predicted class, with what it is: Python tells it in words, with {} for the number. */
  function margin(head, row) {
    const [what, rest] = head.meaning.replaceAll("predicted class", () => head.classes[head.predictions[row]]).split("{}");
    const told = withError(head.margins[row], head.errors ? head.errors[row] : undefined);
    return [what.charAt(0).toUpperCase() + what.slice(1).trim(), told + rest];
  }

  function facts() {
    const { row, headData: head } = atlas.view.current, { about, labels, numbers, ids } = atlas.data;
    const pairs = [];
    if (about.labels) pairs.push(["Class", about.labels[labels[row]]]);
    if (numbers) pairs.push(["Label", number(numbers[row])]);
    if (head && head.classes) {
      const words = { open: ": open, other training photos might decide otherwise", right: " ✓ right", wrong: " ✗ wrong", "": "" };
      const verdict = words[atlas.view.judgementOf(head, row)];
      pairs.push(["Predicted", head.classes[head.predictions[row]] + verdict], margin(head, row));
    } else if (head) {
      const value = head.margins[row], named = { "one-class": "Value (above 0 is like the training images)", anomaly: "Anomaly (higher is less like the training images)" };
      pairs.push([named[head.kind] || "Predicted value", number(head.kind === "anomaly" ? -value : value)]);
    }
    document.getElementById("image-id").textContent = ids[row] + " (row " + row + ")";
    document.getElementById("facts").replaceChildren(
      ...pairs.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value))));
    const { p } = atlas.data.pointOf(row), { x, y } = atlas.view.current;
    document.getElementById("live").textContent = "Image " + ids[row] + ". "
      + pairs.map(([name, value]) => name + ": " + value + ". ").join("")
      + "Component " + (x + 1) + ": " + number(p[x]) + ". Component " + (y + 1) + ": " + number(p[y]) + ".";
  }

  async function components() {
    const { row, scale } = atlas.view.current, { about } = atlas.data;
    const [maps, picture, found] = await Promise.all([
      atlas.data.mapsOf(row), atlas.data.pictureOf(row), scale === "parts" ? atlas.decision.current() : null,
    ]);
    const { p, p0 } = atlas.data.pointOf(row), parts = found && found.factors;
    const strengths = Array.from(maps.nu, (nu, b) => (parts ? nu * parts[b] : strengthOf(row, b, nu)));
    const one = scale === "own" || (scale === "parts" && !parts) ? null : largestOf(strengths);
    const note = document.getElementById("components-note");
    const less = parts && found.moved ? ", apart from a constant" : "";
    note.textContent = parts ? said("Each map times how much it counts", "Each map times its factor g") + ", all on one scale: they add up to the map of the decision" + less + "."
      : one === null ? "Each map has a strongest colour of its own. Click one to see the two ends of its component."
        : "All on one scale. Click one to see the two ends of its component.";
    if (about.unstable.length) note.textContent += " Not stable: other training photos would make another component of it, so its map is one of chance.";
    const button = document.getElementById("every"), count = every ? about.components : Math.min(AT_FIRST, about.components);
    button.hidden = about.components <= AT_FIRST;
    button.textContent = every ? "Show the first " + AT_FIRST : "Show all " + about.components + " components";
    return Array.from({ length: count }, (_, b) => {
      const shown = shownOf(maps, b, strengths[b], one === null ? Math.abs(strengths[b]) : one);
      const title = "Component " + (b + 1) + ": " + said("position ", "p ") + number(p[b]) + unstable(b), nu = parts ? Math.abs(strengths[b]) : maps.nu[b];
      const log = parts ? found.logScale : atlas.data.logScale ? atlas.data.logScale[row * about.components + b] : 0;
      const drawn = atlas.maps.canvases(picture, shown, 108, title);
      const scaleLine = darkest(nu, log, parts ? "nu of g·P " : "nu ");
      const start = p0 && Math.abs(p0[b]) > 1e-6 * Math.abs(p[b]) ? p0[b] : 0; // at the mean it is 0 but for rounding
      const from = p0 && (start || atlas.view.current.math)
        ? [said("starts at ", "from ") + number(start) + said("", " at the baseline")] : [];
      return tile(drawn, [title, ...from, ...scaleLine], [title, ...scaleLine].join(", ") + ": show its two ends",
        () => atlas.view.set({ component: b }));
    });
  }

  /** Returns the rows at an end of a component among those that pass the filters. */
  function endOf(component, direction) {
    const { components: values, about } = atlas.data, value = (row) => values[row * about.components + component];
    return [...atlas.view.selected()].sort((a, b) => direction * (value(b) - value(a)) || a - b).slice(0, AT_AN_END);
  }

  async function end(direction) {
    const { component, scale } = atlas.view.current, { about, components: values } = atlas.data;
    const rows = endOf(component, direction);
    const maps = await Promise.all(rows.map(atlas.data.mapsOf));
    const pictures = await Promise.all(rows.map(atlas.data.pictureOf));
    const strengths = maps.map((each, k) => strengthOf(rows[k], component, each.nu[component]));
    const largest = largestOf(strengths);
    if (!rows.length) return ["None passes the filters."];
    return rows.map((row, k) => {
      const nu = maps[k].nu[component], value = number(values[row * about.components + component]);
      const shown = shownOf(maps[k], component, strengths[k], scale === "one" ? largest : strengths[k]);
      const title = titleOf(row), colour = darkest(nu);
      const label = "Image " + title + ", component " + (component + 1) + " " + value + ": show this image";
      return tile(atlas.maps.canvases(pictures[k], shown, 96, title), [said("position ", "p ") + value, ...colour, title], label, () => atlas.view.set({ row }));
    });
  }

  function endTitles() {
    const { component } = atlas.view.current;
    document.getElementById("ends-title").textContent = "Component " + (component + 1) + unstable(component) + ": its two ends";
    document.getElementById("low-title").textContent = "Lowest values";
    document.getElementById("high-title").textContent = "Highest values";
    document.getElementById("means-title").textContent = "Mean maps of component " + (component + 1) + unstable(component);
  }

  async function means() {
    const { about } = atlas.data, panel = document.getElementById("means-panel");
    panel.hidden = !about.means.length;
    if (panel.hidden) return [];
    const { component, by } = atlas.view.current, found = await atlas.data.means(by || about.means[0]);
    const count = found.groups.length, size = about.height * about.width, start = component * count * size;
    const of = (g) => found.maps.subarray(start + g * size, start + (g + 1) * size);
    const nus = found.groups.map((_, g) => largestOf(of(g))), largest = largestOf(nus);
    document.getElementById("means-note").textContent = "Over all images, regardless of the filters; all on one scale, up to "
      + number(largest) + ".";
    return found.groups.map((name, g) => {
      const alt = "mean map of " + name + ", component " + (component + 1);
      const drawn = atlas.maps.canvases(null, { map: of(g), divisor: largest, sure: sureOf(component) }, 84, alt);
      return tile(drawn, [name, found.counts[g] + (found.counts[g] === 1 ? " image" : " images"), ...darkest(nus[g])]);
    });
  }

  /** Makes all panels follow the view. */
  function setUp() {
    const { on, set } = atlas.view, of = (id) => document.getElementById(id);
    const drawing = ["style", "opacity", "math"], decision = ["category", "versus"];
    const redrawn = filling(of("components"), components);
    on(["row", "headData", "x", "y"], facts);
    on(["row", "headData", ...decision, ...drawing], filling(of("large"), large));
    on(["row", "scale", "headData", ...decision, ...drawing], redrawn);
    on(["component"], endTitles);
    const filters = ["class", "judged", "low", "high", "headData"];
    on(["component", "scale", ...filters, ...drawing], filling(of("lowest"), () => end(-1)));
    on(["component", "scale", ...filters, ...drawing], filling(of("highest"), () => end(1)));
    on(["component", "by", ...drawing], filling(of("means"), means));
    of("every").addEventListener("click", () => {
      every = !every;
      redrawn();
    });
    const step = (direction) => {
      const rows = atlas.view.selected(), { row } = atlas.view.current;
      const ahead = direction > 0 ? rows.find((each) => each > row) : rows.findLast((each) => each < row);
      if (ahead !== undefined) set({ row: ahead });
    };
    of("previous").addEventListener("click", () => step(-1));
    of("next").addEventListener("click", () => step(1));
  }

  atlas.panels = { nameOf, setUp, sureOf, titleOf, unstable };
})((window.atlas = window.atlas || {}));
