// The decision: its parts by component as bars, and the support vectors that drive it.
(function (atlas) {
  "use strict";

  const { element, filling, number } = atlas.maps;
  const STRONGEST = 12;

  /** Returns the explanation of the image that is shown, or null where the head decides nothing. */
  function current() {
    const { row, head, category, versus } = atlas.view.current;
    return atlas.data.about.heads.length ? atlas.explain(row, { head, category, versus }) : Promise.resolve(null);
  }

  /** Returns in words what is explained. */
  function described(found) {
    const { classes } = atlas.view.current.headData;
    if (!classes) return "the head’s value";
    const first = classes[found.category];
    if (found.versus === null) return "the margin of " + first;
    return "the decision for " + first + " against " + classes[found.versus];
  }

  function bar(value, largest) {
    const share = largest > 0 ? (50 * Math.abs(value)) / largest : 0;
    const fill = element("span", { className: value < 0 ? "fill minus" : "fill plus" });
    fill.style.width = share + "%";
    fill.style.left = (value < 0 ? 50 - share : 50) + "%";
    return element("td", { className: "track" }, fill);
  }

  const cell = (text) => element("td", { className: "number" }, text);

  /** Returns a table of the parts, strongest first, and of what they add up to. */
  function table(found) {
    const { p } = atlas.data.pointOf(atlas.view.current.row), { p0 } = found;
    const order = [...found.parts.keys()].sort((a, b) => Math.abs(found.parts[b]) - Math.abs(found.parts[a]));
    const shown = order.length > STRONGEST + 1 ? order.slice(0, STRONGEST) : order, others = order.slice(shown.length);
    const largest = Math.abs(found.parts[order[0]]);
    const sum = (numbers) => numbers.reduce((total, b) => total + found.parts[b], 0);
    const { said } = atlas.view;
    const names = ["Component", ...(p0 ? [said("its change", "p − p₀"), said("slope", "secant g"), said("adds", "g (p − p₀)")]
      : [said("its value", "p"), said("slope", "gradient g"), said("product", "g p")]), ""];
    const head = element("thead", {}, element("tr", {}, ...names.map((name) => element("th", { scope: "col" }, name))));
    const rows = shown.map((b) => {
      const go = element("button", { type: "button", className: "link" }, b + 1 + atlas.panels.unstable(b));
      go.setAttribute("aria-label", "Component " + (b + 1) + ": show its ends");
      go.addEventListener("click", () => atlas.view.set({ component: b }));
      const made = element("tr", {}, element("th", { scope: "row" }, go), cell(number(p0 ? p[b] - p0[b] : p[b])));
      made.append(cell(number(found.gradient[b], found.logScale)), cell(number(found.parts[b])));
      made.append(bar(found.parts[b], largest));
      return made;
    });
    const line = (name, value, bold) => {
      const made = element("tr", { className: bold ? "total" : "" }, element("th", { scope: "row", colSpan: 3 }, name));
      made.append(cell(number(value)), element("td"));
      return made;
    };
    if (others.length) rows.push(line(others.length + " others", sum(others)));
    if (p0) {
      const start = Math.abs(found.baselineValue) < 1e-6 * Math.abs(found.value) ? 0 : found.baselineValue; // rounding
      rows.push(line(said("Sum", "Sum = value − value at the baseline"), sum(order), true));
      rows.push(line(said("Starts at", "Baseline"), start));
    } else {
      rows.push(line("Sum", sum(order), true));
      rows.push(line(said("Not from single components", "Not in the gradient: intercept, curvature"), found.value - sum(order)));
    }
    rows.push(line("Value", found.value, true));
    const caption = element("caption", { className: "unseen" }, "Parts of " + described(found));
    return element("table", { className: "bars" }, caption, head, element("tbody", {}, ...rows));
  }

  async function bars() {
    const note = document.getElementById("parts-note"), panel = document.getElementById("parts-panel");
    const found = await current(), { about } = atlas.data;
    panel.hidden = !found;
    if (!found) return [];
    if (found.reason) {
      note.textContent = found.reason;
      return [];
    }
    if (!found.parts) {
      note.textContent = "Value: " + number(found.value) + ". With " + about.method + ", a decision’s map is not a sum of component maps, "
        + "so only the components are shown.";
      return [];
    }
    const same = found.versus !== null && found.versus === found.category;
    note.textContent = same ? "Both classes are the same: choose another one."
      : "What each component adds to " + described(found) + ", which is " + number(found.value) + ".";
    return same ? [] : [table(found)];
  }

  async function vectors() {
    const note = document.getElementById("vectors-note"), panel = document.getElementById("vectors-panel");
    const found = await current(), head = atlas.view.current.headData;
    panel.hidden = !found || !found.seed;
    if (panel.hidden) return [];
    const { p } = atlas.data.pointOf(atlas.view.current.row);
    const { said } = atlas.view;
    document.getElementById("vectors-title").textContent = said("Training images that count most", "Strongest support vectors");
    const { parts, intercept } = atlas.machine.vectorParts(head.machine, found.seed, p);
    if (!parts.length) {
      note.textContent = head.machine.machines.some((machine) => machine.kind === "kernel")
        ? said("No training image", "No support vector") + " affects this decision."
        : "This head makes a linear decision, " + said("which no single training images make.", "without support vectors.");
      return [];
    }
    const size = (list) => list.reduce((total, { part }) => total + Math.abs(part), 0);
    const shown = parts.slice(0, STRONGEST);
    const share = Math.round((100 * size(shown)) / (size(parts) || 1));
    const alone = size(parts) < 1e-6 * Math.abs(intercept);
    note.textContent = alone ? said("No training image that counts is near: the decision is the same wherever none is, ",
      "No support vector is near: the decision is the intercept alone, ") + number(intercept) + "."
      : "What each " + said("of these training images", "support vector") + " adds to " + described(found) + said("", " (α c K)") + ", strongest first: these " + shown.length
      + " of " + parts.length + " account for " + share + " % of the total, regardless of sign. "
      + said("Without any it is ", "Intercept: ") + number(intercept) + ".";
    if (shown.some(({ row, training }) => row < 0 && !head.examples[training])) {
      note.textContent += " Some are not in this atlas: to see them, build it with the training images.";
    }
    const largest = Math.abs(shown[0].part);
    return Promise.all(shown.map((vector) => tileOf(vector, largest)));
  }

  async function tileOf({ part, row, training }, largest) {
    const meter = element("span", { className: "meter" });
    const fill = element("span", { className: part < 0 ? "fill minus" : "fill plus" });
    fill.style.width = (100 * Math.abs(part)) / (largest || 1) + "%";
    meter.append(fill);
    const value = (part < 0 ? "" : "+") + number(part);
    const [name, file] = atlas.view.current.headData.examples[training] || [];
    if (row < 0 && name) {
      const shown = atlas.maps.canvases(await atlas.data.decoded(file), { map: null }, 84, "training image " + name);
      return atlas.maps.tile(shown, [value, meter, name], "", null);
    }
    if (row < 0) {
      const none = element("span", { className: "none" }, "not in this atlas");
      return atlas.maps.tile([none], [value, meter, "training row " + training], "", null);
    }
    const pictures = atlas.maps.canvases(await atlas.data.pictureOf(row), { map: null }, 84, "");
    const title = atlas.panels.titleOf(row);
    const label = atlas.view.said("Training image ", "Support vector ") + title + ", part " + value + ": show this image";
    return atlas.maps.tile(pictures, [value, meter, title], label, () => atlas.view.set({ row }));
  }

  /** Makes bars and support vectors follow the view. */
  function setUp() {
    const names = ["row", "headData", "category", "versus", "math"], { on } = atlas.view;
    on(names, filling(document.getElementById("bars"), bars));
    on(names, filling(document.getElementById("vectors"), vectors));
  }

  atlas.decision = { current, described, setUp };
})((window.atlas = window.atlas || {}));
