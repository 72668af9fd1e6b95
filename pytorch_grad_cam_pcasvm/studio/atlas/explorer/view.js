// The view: all that was chosen, kept in the address of the page, and who is told when it changes.
(function (atlas) {
  "use strict";

  const DEFAULTS = {
    x: 0, y: 1, colour: "class", head: 0, category: null, versus: null, style: "signed", scale: "own", opacity: 50,
    row: 0, component: 0, class: null, judged: "all", low: null, high: null, by: null, why: false, math: false,
  };
  const CHOICES = {
    colour: ["class", "prediction", "decision", "error"],
    style: ["signed", "split"],
    scale: ["own", "one", "parts"],
    judged: ["all", "right", "wrong", "open"],
  };

  const view = { ...DEFAULTS };
  const listeners = [];

  /** Calls fn after a change of one of the names, and once at the start. */
  function on(names, fn) {
    listeners.push({ names, fn });
  }

  let pending = null;

  /** Changes what is shown; the page follows before it is drawn the next time. */
  function set(changes) {
    if (!pending) {
      pending = new Set();
      requestAnimationFrame(tell);
    }
    for (const [name, value] of Object.entries(changes)) {
      if (view[name] === value) continue;
      view[name] = value;
      pending.add(name);
    }
  }

  function tell() {
    const changed = pending;
    pending = null;
    if (!changed.size) return;
    for (const { names, fn } of listeners) if (names.some((name) => changed.has(name))) fn();
    const hash = written();
    // Not as a new page of the history: moving a slider would fill it.
    if (hash !== location.hash.slice(1)) history.replaceState(null, "", "#" + hash);
  }

  const start = () => listeners.forEach(({ fn }) => fn());

  /** Returns the position of the class that is an absence among those of a head; null: there is none. */
  function normalOf(head) {
    const { about } = atlas.data;
    return about.heads[head] ? about.heads[head].normal : null;
  }

  function written() {
    const words = new URLSearchParams(), usual = { ...DEFAULTS, versus: normalOf(view.head) };
    for (const name of Object.keys(DEFAULTS)) if (view[name] !== usual[name]) words.set(name, view[name]);
    return words.toString();
  }

  /** Keeps a choice in this browser, for all atlases; where it keeps nothing, the address alone has it. */
  function remember(name, value) {
    try {
      localStorage.setItem("explorer-" + name, String(value));
    } catch { /* it is not allowed */ }
  }

  function remembered(name) {
    try {
      return localStorage.getItem("explorer-" + name) === "true";
    } catch {
      return false;
    }
  }

  function integer(text, limit, otherwise) {
    const number = Number(text);
    return text !== null && text !== "" && Number.isInteger(number) && number >= 0 && number < limit ? number : otherwise;
  }

  /** Returns the view of an address, and what does not fit this atlas as it is by default. */
  function parsed(hash) {
    const words = new URLSearchParams(hash.replace(/^#/, ""));
    const { about } = atlas.data, found = { ...DEFAULTS, y: Math.min(1, about.components - 1) };
    const limits = { x: about.components, y: about.components, component: about.components, row: about.rows, opacity: 101 };
    for (const [name, limit] of Object.entries(limits)) found[name] = integer(words.get(name), limit, found[name]);
    for (const [name, choices] of Object.entries(CHOICES)) {
      if (choices.includes(words.get(name))) found[name] = words.get(name);
    }
    found.why = words.get("why") === "true";
    found.math = words.has("math") ? words.get("math") === "true" : remembered("math");
    found.head = integer(words.get("head"), about.heads.length, 0);
    const classes = (about.heads[found.head] && about.heads[found.head].classes) || [];
    found.category = integer(words.get("category"), classes.length, null);
    const versus = words.get("versus"), usual = versus === "null" ? null : normalOf(found.head);
    found.versus = versus === "second" ? "second" : integer(versus, classes.length, usual);
    found.class = integer(words.get("class"), groupsOf(found).length, null);
    for (const name of ["low", "high"]) {
      const number = parseFloat(words.get(name));
      if (Number.isFinite(number)) found[name] = number;
    }
    if (about.means.includes(words.get("by"))) found.by = words.get("by");
    return found;
  }

  /** Returns the names that images are grouped by: their labels, or without labels their predictions. */
  function groupsOf(chosen) {
    const { about } = atlas.data;
    return about.labels || (about.heads[chosen.head] && about.heads[chosen.head].classes) || [];
  }

  /** Returns the position of a row's class among groupsOf, or -1. */
  function groupOf(row) {
    const { about, labels } = atlas.data;
    if (about.labels) return labels[row];
    return view.headData && view.headData.predictions ? view.headData.predictions[row] : -1;
  }

  /** Returns whether the decision for a row is "open", "right" or "wrong"; "" where nothing tells. */
  function judgementOf({ open, correct }, row) {
    if (open && open[row]) return "open";
    return correct ? (correct[row] ? "right" : "wrong") : "";
  }

  let selection = null;

  /** Returns the rows that pass the filters, in order. */
  function selected() {
    if (selection) return selection;
    const { about } = atlas.data, head = view.headData, found = [];
    const judged = head && (head.correct || head.open) && view.judged !== "all" ? view.judged : null;
    for (let row = 0; row < about.rows; row++) {
      if (view.class !== null && groupOf(row) !== view.class) continue;
      if (judged !== null && judgementOf(head, row) !== judged) continue;
      if (head && view.low !== null && head.margins[row] < view.low) continue;
      if (head && view.high !== null && head.margins[row] > view.high) continue;
      found.push(row);
    }
    selection = found;
    return found;
  }

  on(["class", "judged", "low", "high", "headData"], () => { selection = null; });

  /** Returns words, or the symbols of the documentation if the reader wants to see the mathematics. */
  const said = (words, symbols) => (view.math ? symbols : words);

  atlas.view = { DEFAULTS, current: view, groupOf, groupsOf, judgementOf, on, parsed, remember, said, selected, set, start };
})((window.atlas = window.atlas || {}));
