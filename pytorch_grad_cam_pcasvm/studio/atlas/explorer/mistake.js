// The mistake: why an image was not taken for the class that it is labelled, and which images of both classes are near.
(function (atlas) {
  "use strict";

  const { element, filling, number, tile, withError } = atlas.maps;
  const STRONGEST = 5; // components that are drawn by themselves
  const NEAREST = 5; // images of each class
  const SIZE = 126;

  const of = (id) => document.getElementById(id);

  /** Returns the predicted class of the image that is shown and the one it is labelled, by names; null if it is right. */
  function classes() {
    const { row, headData: head } = atlas.view.current, { about, labels } = atlas.data;
    if (!head || !head.correct || head.correct[row]) return null;
    return { row, head, predicted: head.classes[head.predictions[row]], truth: about.labels[labels[row]] };
  }

  /** Returns the decision between both classes, with parts where they add up; or {reason}. */
  async function explained({ row, head, truth }) {
    const first = head.predictions[row], second = head.classes.indexOf(truth);
    if (second < 0) return { reason: "This head has no class " + truth + "." };
    const found = await atlas.explain(row, { head: head.number, category: first, versus: second });
    return { ...found, parts: found.p0 && found.parts };
  }

  /** Returns the fewest components, from the largest part on, without whose parts it would be right; null if none. */
  function tipping({ parts, value }) {
    const found = [], least = 1e-6 * Math.abs(value); // less is rounding
    let left = value;
    for (const b of [...parts.keys()].sort((first, second) => parts[second] - parts[first])) {
      if (left <= least || parts[b] <= 0) break;
      found.push(b);
      left -= parts[b];
    }
    return left > least ? null : found;
  }

  function listed(components) {
    const names = components.map((b) => String(b + 1));
    if (names.length > 4) names.splice(3, names.length, names.length - 3 + " others");
    return (names.length > 1 ? "components " : "component ") + new Intl.ListFormat("en-GB").format(names);
  }

  /** Returns in a sentence or two why it is wrong. */
  function why(found, { row, head, predicted, truth }) {
    if (found.reason) return found.reason;
    const outcome = "Predicted: " + predicted + ". Labelled: " + truth + ". ";
    if (found.value <= 0) {
      return outcome + "Between these two alone, " + truth + " would win by " + number(-found.value)
        + ": other classes decided.";
    }
    const { open, errors, classes: { length } } = head, error = errors && length === 2 ? errors[row] : undefined;
    const between = outcome + "Between the two, " + predicted + " wins by " + withError(found.value, error)
      + (open && open[row] ? ": open, other training photos might decide otherwise. " : ". ");
    if (!found.parts) {
      return between + "With " + atlas.data.about.method + ", the component maps do not add up to it, so none are shown.";
    }
    const tipped = tipping(found);
    return between + (tipped ? "Without " + listed(tipped) + " it would be " + truth + "."
      : "No component tipped it: where they start, before any of them counts, " + predicted + " already wins.");
  }

  /** Returns the tiles of the image, of the decision and of its parts, all on one scale. */
  async function parts() {
    const here = classes(), note = of("mistake-note"), key = of("mistake-key");
    if (of("mistake-panel").hidden) return [];
    const { row, predicted, truth } = here;
    const [found, picture, maps] = await Promise.all([explained(here), atlas.data.pictureOf(row), atlas.data.mapsOf(row)]);
    if (atlas.view.current.row !== row || atlas.view.current.headData !== here.head) return []; // another is on its way
    const plain = tile(atlas.maps.canvases(picture, { map: null }, SIZE, "image " + atlas.panels.titleOf(row)), ["The image"]);
    note.textContent = why(found, here);
    key.replaceChildren();
    if (!found.parts) return [plain];
    const order = [...found.parts.keys()].sort((a, b) => Math.abs(found.parts[b]) - Math.abs(found.parts[a]));
    const shown = order.slice(0, order.length > STRONGEST + 1 ? STRONGEST : order.length), others = order.slice(shown.length);
    const drawn = [order, ...shown.map((b) => [b]), ...(others.length ? [others] : [])].map((components) => ({
      components,
      amount: components.reduce((total, b) => total + found.parts[b], 0),
      map: atlas.explanation.partMap(found, row, maps, components),
    }));
    const top = drawn.reduce((most, { map }) => map.reduce((far, value) => Math.max(far, Math.abs(value)), most), 0);
    const even = Math.abs(found.baselineValue) < 1e-6 * Math.abs(found.value);
    const start = even ? "0, where the two are even," : number(found.baselineValue) + ", where they start,";
    key.append("Red favours " + predicted + ", blue favours " + truth + ", on one scale: ",
      atlas.maps.colourBar(top, found.logScale), atlas.data.about.addsUp ? ", what one place adds. " : ". ",
      "The parts go from " + start + " to " + number(found.value) + ".",
      atlas.data.remainder ? " Their numbers include what is not on the maps." : "");
    const tiles = drawn.map(({ components, amount, map }, k) => {
      const name = k === 0 ? "All together" : components.length > 1 ? components.length + " others" : "Component " + (components[0] + 1) + atlas.panels.unstable(components[0]);
      const value = (amount > 0 ? "+" : "") + number(amount), speaks = amount < 0 ? truth : predicted;
      const line = element("span", { className: amount < 0 ? "line blue" : "line red" }, value + ", for " + speaks);
      const act = k && components.length === 1 ? () => atlas.view.set({ component: components[0] }) : null;
      const what = name + ": " + value + ", for " + speaks;
      const sure = k === 0 ? found.sure : components.length === 1 ? atlas.panels.sureOf(components[0]) : null;
      const canvases = atlas.maps.canvases(picture, { map, divisor: top, sure }, SIZE, what);
      const sign = element("span", { className: "sign" }, k > 1 ? "+" : k ? "=" : "");
      return element("span", { className: "part" }, sign, tile(canvases, [name, line], what + ": show its two ends", act));
    });
    return [plain, ...tiles];
  }

  async function neighbours(which) {
    const here = classes();
    if (of("mistake-panel").hidden) return [];
    of("near-" + which + "-title").textContent = "Nearest images labelled " + here[which];
    const { labels, about } = atlas.data, label = about.labels.indexOf(here[which]);
    return atlas.neighbours.tiles(atlas.neighbours.nearest(here.row, (other) => labels[other] === label, NEAREST));
  }

  function offer() {
    const here = classes(), button = of("why"), { why: open } = atlas.view.current;
    button.hidden = !here;
    of("mistake-panel").hidden = !here || !open;
    if (!here) return;
    button.textContent = "Why not " + here.truth + "?";
    button.setAttribute("aria-expanded", String(open));
    of("mistake-title").textContent = "Why " + here.predicted + ", and not " + here.truth + "?";
    of("near-note").textContent = atlas.neighbours.note();
  }

  /** Makes the view of a mistake follow the image. */
  function setUp() {
    const { current, on, set } = atlas.view, names = ["row", "headData", "why"];
    on(names, offer);
    on([...names, "style", "opacity"], filling(of("mistake"), parts));
    for (const which of ["predicted", "truth"]) on(names, filling(of("near-" + which), () => neighbours(which)));
    of("why").addEventListener("click", () => {
      set({ why: !current.why });
      requestAnimationFrame(() => of("mistake-panel").scrollIntoView());
    });
  }

  atlas.mistake = { classes, explained, setUp, tipping };
})((window.atlas = window.atlas || {}));
