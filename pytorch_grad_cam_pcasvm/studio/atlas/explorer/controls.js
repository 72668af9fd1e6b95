// Controls: what is explained, how maps are drawn, and which images are shown.
(function (atlas) {
  "use strict";

  const { element } = atlas.maps;
  const of = (id) => document.getElementById(id);

  /** Fills a select with [value, text] pairs. */
  function fill(select, options) {
    select.replaceChildren(...options.map(([value, text]) => element("option", { value: String(value) }, text)));
  }

  /** Ties a select to a part of the view; numbers and null are written as texts. */
  function tie(id, name = id, read = (text) => text) {
    const select = of(id);
    select.addEventListener("change", () => atlas.view.set({ [name]: read(select.value) }));
    atlas.view.on([name], () => { select.value = String(atlas.view.current[name]); });
  }

  const position = (text) => (text === "null" ? null : text === "second" ? text : Number(text));

  function fillClasses() {
    const { current, groupsOf } = atlas.view, head = current.headData, classes = (head && head.classes) || [];
    const named = classes.map((name, k) => [k, name]);
    const normal = head && head.normal !== null ? "anything but " + classes[head.normal] : "the predicted class";
    fill(of("category"), [["null", classes.length ? normal : "the value"], ...named]);
    const others = classes.length > 2 ? [["second", "the runner-up"]] : [];
    fill(of("versus"), [["null", classes.length > 2 ? "all others" : "the other"], ...others, ...named]);
    fill(of("class"), [["null", "all"], ...groupsOf(current).map((name, k) => [k, name])]);
    for (const id of ["category", "versus"]) {
      of(id).value = String(current[id]);
      of(id).parentElement.hidden = !classes.length || (id === "versus" && classes.length < 3);
    }
    of("class").value = String(current.class);
    of("class").parentElement.hidden = !groupsOf(current).length;
    of("judged").parentElement.hidden = !(head && (head.correct || head.open));
    of("judged").querySelector("[value=open]").hidden = !(head && head.open);
    of("range").hidden = !head;
  }

  function fillColours() {
    const { about } = atlas.data, head = atlas.view.current.headData;
    const classes = about.labels ? "class" : head && head.classes ? "predicted class" : "none";
    const options = [["class", atlas.data.numbers ? "label" : classes]];
    if (about.labels && head && head.classes) options.push(["prediction", "predicted class"]);
    if (head) options.push(["decision", "explained value"]);
    if (head && head.correct) options.push(["error", head.open ? "right, open or wrong" : "right or wrong"]);
    fill(of("colour"), options);
    of("colour").value = atlas.view.current.colour;
  }

  /** Loads the head that was chosen, whose classes may be others. */
  async function chooseHead() {
    const { about } = atlas.data, { current, set } = atlas.view;
    if (!about.heads.length) return;
    const data = await atlas.data.head(current.head), count = (data.classes || []).length;
    const kept = (name) => (typeof current[name] === "number" && current[name] >= count ? null : current[name]);
    set({ headData: data, category: kept("category"), versus: kept("versus") });
  }

  function limits() {
    const { current, set } = atlas.view;
    for (const id of ["low", "high"]) {
      of(id).addEventListener("change", () => {
        const number = parseFloat(of(id).value);
        set({ [id]: Number.isFinite(number) ? number : null });
      });
      atlas.view.on([id], () => { of(id).value = current[id] === null ? "" : current[id]; });
    }
    of("reset").addEventListener("click", () => set({ class: null, judged: "all", low: null, high: null }));
    atlas.view.on(["class", "judged", "low", "high", "headData"], () => {
      const { about } = atlas.data;
      of("count").textContent = atlas.view.selected().length + " of " + atlas.data.units(about.rows);
      if (!current.headData) return;
      const all = current.headData.margins.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)],
        [Infinity, -Infinity]);
      of("low").placeholder = atlas.maps.number(all[0]);
      of("high").placeholder = atlas.maps.number(all[1]);
    });
  }

  function texts() {
    const { about } = atlas.data, count = about.components;
    const title = "Atlas of " + (about.dataset || atlas.data.units(about.rows));
    of("scatter-title").textContent = "All " + atlas.data.units();
    of("filters-title").textContent = "Show only these " + atlas.data.units();
    document.title = title;
    of("title").textContent = title;
    const classes = about.labels ? about.labels.length + " classes, " : "";
    const from = about.backbone ? " of " + about.backbone : "";
    const images = about.dataset ? atlas.data.units(about.rows) + ", " : "";
    of("summary").textContent = images + classes + count + (count === 1 ? " component" : " components")
      + ", explained by " + about.method + " at layer " + about.target_layer + from
      + ", maps " + about.height + " × " + about.width;
    of("help-method").textContent = about.addsUp
      ? "These maps add up: each sums to the number minus the one that it starts at, and the bars, the slope times the change, "
        + "sum to the decision minus what that starts at."
      : "These maps are gradients: they show the effect of a very small change. The bars, g p, do not add up to "
        + "the decision unless the SVM is linear; deep inside a class, an RBF SVM’s gradient says little. "
        + "Contributions (ContributionCAM) add up.";
    of("help-sure").textContent = about.sure
      ? "The head was fitted again and again on other samples of its training photos. Pale and hatched is where its refits disagree about "
        + "the sign. ± is one standard error. A decision within two of them from where it turns is open, neither right nor wrong: its map "
        + "may still be sure, of evidence for both sides. A component is not stable if the refits have no component like it."
      : "This atlas does not say: its model has no refits, which fit makes of 8 photos a class or more.";
    of("made").textContent = "Made by pytorch_grad_cam_pcasvm ("
      + Object.entries(about.versions).map(([name, version]) => name + " " + version).join(", ")
      + "). This page works offline and contacts no server.";
  }

  /** Ties all controls to the view. */
  function setUp() {
    const { about } = atlas.data, numbers = Array.from({ length: about.components }, (_, b) => [b, String(b + 1)]);
    texts();
    for (const id of ["x", "y", "component"]) {
      fill(of(id), numbers);
      tie(id, id, Number);
    }
    fill(of("head"), about.heads.map((head, k) => [k, head.name]));
    of("decision-controls").hidden = !about.heads.length;
    of("head").parentElement.hidden = about.heads.length < 2;
    fill(of("means-by"), about.means.map((by) => [by, by === "label" ? "class" : "predicted class"]));
    if (!about.heads.length || !about.linear) of("scale").querySelector("[value=parts]").remove();
    if (about.opposite) of("style").querySelector("[value=signed]").remove();
    tie("head", "head", Number);
    tie("category", "category", position);
    tie("versus", "versus", position);
    atlas.view.on(["category"], () => {
      const { current, set } = atlas.view, normal = current.headData ? current.headData.normal : null;
      if (normal === null) return;
      // A class is not against itself, and without a class it is any against the normal one.
      if (current.category === normal && current.versus === normal) set({ versus: null });
      else if (current.category === null && current.versus === null) set({ versus: normal });
    });
    tie("class", "class", position);
    tie("means-by", "by");
    for (const id of ["style", "scale", "colour", "judged"]) tie(id);
    of("opacity").addEventListener("input", () => atlas.view.set({ opacity: Number(of("opacity").value) }));
    of("math").addEventListener("change", () => {
      atlas.view.set({ math: of("math").checked });
      atlas.view.remember("math", of("math").checked);
    });
    atlas.view.on(["math"], () => {
      of("math").checked = atlas.view.current.math;
      document.body.classList.toggle("mathematics", atlas.view.current.math);
    });
    atlas.view.on(["opacity"], () => { of("opacity").value = atlas.view.current.opacity; });
    atlas.view.on(["headData"], fillClasses);
    atlas.view.on(["headData"], fillColours);
    atlas.view.on(["head"], () => chooseHead().catch(atlas.report));
    limits();
  }

  atlas.controls = { setUp };
})((window.atlas = window.atlas || {}));
