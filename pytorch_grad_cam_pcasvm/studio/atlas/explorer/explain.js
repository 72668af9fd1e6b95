// Explanations: maps of decisions from maps of components, S = sum_b g_b P_b.
(function (atlas) {
  "use strict";

  /** Returns which decision of a row is meant, as positions of classes. */
  function targetOf(head, row, category, versus) {
    if (!head.classes) return { category: 0, versus: null };
    const bestBut = (one) => (head.first[row] === one ? head.second[row] : head.first[row]);
    let first = category === null ? head.predictions[row] : category;
    if (category === null && versus === first) first = bestBut(versus); // as SVMTarget(versus=...)
    return { category: first, versus: versus === "second" ? bestBut(first) : versus };
  }

  /** Returns a class by its name or position; null: the predicted one, or none. */
  function classOf(head, given) {
    if (given === null || given === undefined || given === "second") return given === undefined ? null : given;
    const position = typeof given === "number" ? given : (head.classes || []).indexOf(given);
    if (!head.classes || !(position >= 0 && position < head.classes.length)) {
      throw new Error(given + " is not a class of " + head.name + ".");
    }
    return position;
  }

  /** Returns whether a decision is that for the predicted class. */
  function isPredicted({ classes, predictions }, row, { category, versus }) {
    return versus === null && (!classes || category === predictions[row]);
  }

  /** Returns value, gradient and each component's part for a row, without maps; or {reason} why there is none. */
  function decisionOf(head, row, category, versus) {
    const target = targetOf(head, row, category, versus);
    if (head.steps && isPredicted(head, row, target)) return { ...target, ...storedOf(head, row) };
    if (head.reason) return { ...target, reason: head.reason };
    const seed = atlas.machine.seedOf(head.machine, target.category, target.versus);
    if (!seed) return { ...target, reason: "There are too many pairs of classes for this page: it explains single classes only." };
    const { p, p0: mean } = atlas.data.pointOf(row);
    const start = mean && atlas.machine.startOf(head.machine, target.category, target.versus), p0 = start || mean;
    const sum = (values) => values.reduce((total, value, d) => total + seed[d] * value, 0);
    const found = atlas.machine.gradient(head.machine, seed, p, p0);
    const factor = Math.exp(found.logScale);
    return {
      ...target,
      seed,
      value: sum(atlas.machine.decisions(head.machine, p)),
      baselineValue: p0 ? sum(atlas.machine.decisions(head.machine, p0)) : null,
      p0,
      moved: Boolean(start),
      gradient: found.gradient,
      logScale: found.logScale,
      parts: found.gradient.map((g, b) => factor * g * (p0 ? p[b] - p0[b] : p[b])),
    };
  }

  /** Returns value, secants and each component's part for the predicted class of a row, as Python has computed them. */
  function storedOf({ margins, steps }, row) {
    const { p, p0: mean } = atlas.data.pointOf(row), count = p.length;
    const [gradient, p0] = [steps.slopes, steps.starts].map((values) => values.subarray(row * count, (row + 1) * count));
    const parts = [...gradient].map((g, b) => g * (p[b] - p0[b])), value = margins[row];
    const moved = p0.some((number, b) => number !== mean[b]);
    const baselineValue = value - parts.reduce((sum, part) => sum + part, 0);
    return { seed: null, value, baselineValue, p0, moved, gradient, logScale: 0, parts };
  }

  /** Returns the part of some components in the map of a decision; that of all is the map itself. */
  function partMap({ factors, moved, p0 }, row, { maps, nu }, components) {
    const size = atlas.data.about.height * atlas.data.about.width, map = new Float64Array(size);
    const { p0: mean } = atlas.data.pointOf(row);
    for (const b of components) {
      if (factors[b] === 0) continue;
      // The component maps start at the mean; from another start every position has the same share less.
      const less = moved ? (factors[b] * (p0[b] - mean[b])) / size : 0;
      for (let i = 0; i < size; i++) map[i] += factors[b] * nu[b] * maps[b * size + i] - less;
    }
    return map;
  }

  /** Adds the map of the decision, divided by exp(logScale), its nu, and each component's factor in it. */
  function combined(decision, row, maps) {
    const { about, logScale, remainder } = atlas.data, count = about.components;
    // Factors that were taken out of single components.
    const sizes = Array.from(decision.gradient, (g, b) => (g === 0 || !logScale ? 0 : logScale[row * count + b]));
    const used = sizes.filter((_, b) => decision.gradient[b] !== 0);
    const largest = logScale && used.length ? Math.max(...used) : 0;
    const factors = decision.gradient.map((g, b) => g * Math.exp(sizes[b] - largest));
    const map = partMap({ ...decision, factors }, row, maps, factors.keys());
    const outside = remainder ? factors.reduce((all, factor, b) => all + factor * remainder[row * count + b], 0) : 0;
    const total = decision.logScale + largest;
    return {
      ...decision, map, factors, nu: largestOf(map), logScale: total, remainder: outside * Math.exp(total),
    };
  }

  const largestOf = (map) => map.reduce((found, value) => Math.max(found, Math.abs(value)), 0);

  /**
   * Explains a decision about a row, as store.explain does in Python.
   *
   * row: its number. head: its number or name. category: a class, by name or position; null: the predicted one.
   * versus: another class, "second" for the one that came second, or null.
   * Returns {value, baselineValue, parts, map, nu, logScale, ...}; {reason} where the page cannot.
   */
  atlas.explain = async function (row, { head = 0, category = null, versus = null } = {}) {
    const { heads, linear } = atlas.data.about;
    const number = typeof head === "number" ? head : heads.findIndex((each) => each.name === head);
    if (!heads[number]) throw new Error("There is no head " + head + ".");
    const chosen = await atlas.data.head(number);
    const decision = decisionOf(chosen, row, classOf(chosen, category), classOf(chosen, versus));
    if (decision.reason) return decision;
    if (!linear) return { ...decision, parts: null, map: null };
    const maps = await atlas.data.mapsOf(row);
    // Between two classes there is one decision, and its map may be turned around.
    const isOne = chosen.classes && chosen.classes.length === 2 && decision.versus !== decision.category;
    const isKnown = chosen.errors && (isOne || isPredicted(chosen, row, decision));
    return { ...combined(decision, row, maps), sure: isKnown ? maps.sure : null };
  };

  /** Returns the value of what is explained for all rows, or null where they are too many for the page. */
  function valuesOf(head, category, versus) {
    const none = versus === null || !head.classes;
    if (none && (category === null || !head.classes)) return head.margins;
    if (!head.decisions || !head.machine) return null;
    const outputs = head.machine.outputs, seeds = new Map();
    return head.margins.map((_, row) => {
      const target = targetOf(head, row, category, versus);
      const key = target.category + " " + target.versus;
      if (!seeds.has(key)) {
        const seed = atlas.machine.seedOf(head.machine, target.category, target.versus);
        seeds.set(key, seed && [...seed].map((factor, d) => [d, factor]).filter(([, factor]) => factor !== 0));
      }
      const seed = seeds.get(key);
      return seed ? seed.reduce((sum, [d, factor]) => sum + factor * head.decisions[row * outputs + d], 0) : NaN;
    });
  }

  atlas.explanation = { partMap, valuesOf };
})((window.atlas = window.atlas || {}));
