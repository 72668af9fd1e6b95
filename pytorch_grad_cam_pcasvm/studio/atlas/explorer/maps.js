// Maps: how they are drawn over pictures, and the tiles that they stand in.
(function (atlas) {
  "use strict";

  const MINUS = "\u2212";

  /** Returns a number with few digits, times exp(logScale), also where no float is small enough. */
  function number(value, logScale = 0, digits = 3) {
    if (value === 0 || !Number.isFinite(value)) return String(value);
    const logarithm = (Math.log(Math.abs(value)) + logScale) / Math.LN10;
    const sign = value < 0 ? MINUS : "";
    if (logarithm >= 5 || logarithm < -4) {
      const exponent = Math.floor(logarithm);
      return sign + (10 ** (logarithm - exponent)).toFixed(1) + "e" + String(exponent).replace("-", MINUS);
    }
    return sign + String(parseFloat((10 ** logarithm).toPrecision(digits)));
  }

  /** Returns a value and its standard error, both to the place that the error leaves, as on sheets; undefined: there is none. */
  function withError(value, error) {
    if (!(error > 0 && error < 1e4)) return number(value);
    const digits = error.toExponential()[0] === "1" ? 2 : 1;
    const places = Math.max(0, digits - 1 - Number(error.toExponential(digits - 1).split("e")[1]));
    if (places > 4) return number(value) + " ± " + Number(error.toPrecision(2));
    const rounded = Number(value.toFixed(places)) + 0; // no -0
    return (rounded.toFixed(places) + " ± " + error.toFixed(places)).replace("-", MINUS);
  }

  /** Makes an element; text stays text, whatever is in it. */
  function element(tag, properties = {}, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(properties)) {
      if (name in made) made[name] = value;
      else made.setAttribute(name, value);
    }
    made.append(...children);
    return made;
  }

  /** Calls visit(pixel, value) for a map upsampled to a size, bilinear, half a pixel in from its border. */
  function upsampled(map, height, width, toHeight, toWidth, visit) {
    const places = (count, to) => Array.from({ length: to }, (_, k) => {
      const at = Math.min(Math.max(((k + 0.5) * count) / to - 0.5, 0), count - 1);
      const low = Math.min(Math.floor(at), Math.max(count - 2, 0));
      return { low, high: Math.min(low + 1, count - 1), part: at - low };
    });
    const across = places(width, toWidth);
    places(height, toHeight).forEach((down, y) => across.forEach(({ low, high, part }, x) => {
      const row = (line) => map[line * width + low] * (1 - part) + map[line * width + high] * part;
      visit(y * toWidth + x, row(down.low) * (1 - down.part) + row(down.high) * down.part);
    }));
  }

  const scratch = document.createElement("canvas");

  /**
   * Draws a map over a picture. Opacity 0: the picture alone; 50: both; 100: the map alone, on white.
   * sign: 0 both signs; 1 what raises; -1 what lowers. sure: where the sign of the map is; the rest is pale and hatched.
   */
  function paint(canvas, picture, map, divisor, sign, opacity, sure) {
    const { about } = atlas.data;
    const aspect = picture ? picture.width / picture.height : about.width / about.height;
    const longest = Math.round(Number(canvas.dataset.size) * Math.min(window.devicePixelRatio || 1, 2));
    canvas.width = Math.max(1, Math.round(aspect >= 1 ? longest : longest * aspect));
    canvas.height = Math.max(1, Math.round(aspect >= 1 ? longest / aspect : longest));
    canvas.style.aspectRatio = canvas.width + " / " + canvas.height;
    const { width, height } = canvas, context = canvas.getContext("2d");
    const strength = Math.min(1, opacity / 50), alone = picture ? Math.max(0, opacity / 50 - 1) : 1;
    context.fillStyle = "white";
    context.fillRect(0, 0, width, height);
    if (picture) {
      context.globalAlpha = Math.min(1, 2 - opacity / 50);
      context.drawImage(picture, 0, 0, width, height);
      if (map) { // grey and lighter, so that colours are those of the map
        context.globalAlpha = strength;
        context.globalCompositeOperation = "saturation";
        context.fillStyle = "hsl(0 0% 50%)";
        context.fillRect(0, 0, width, height);
        context.globalCompositeOperation = "source-over";
        context.globalAlpha = 0.35 * strength;
        context.fillStyle = "white";
        context.fillRect(0, 0, width, height);
      }
      context.globalAlpha = 1;
    }
    if (!map) return;
    const colours = new ImageData(width, height), { data } = colours;
    upsampled(map, about.height, about.width, height, width, (pixel, raw) => {
      let value = divisor > 0 ? raw / divisor : 0;
      if (sign) value = sign * Math.max(0, sign * value);
      if (sure) {
        const x = pixel % width, y = Math.floor(pixel / width);
        const cell = Math.floor((y * about.height) / height) * about.width + Math.floor((x * about.width) / width);
        if (!sure[cell]) value *= (((x + y) * 20) / Math.min(width, height)) % 1 < 1 / 3 ? 0.75 : 0.2;
      }
      const [red, green, blue] = atlas.palette.ofMap(value);
      data[4 * pixel] = red;
      data[4 * pixel + 1] = green;
      data[4 * pixel + 2] = blue;
      data[4 * pixel + 3] = 255 * strength * atlas.palette.opacityOf(value, alone);
    });
    scratch.width = width;
    scratch.height = height;
    scratch.getContext("2d").putImageData(colours, 0, 0);
    context.drawImage(scratch, 0, 0);
  }

  /** Returns the canvases of a map, one signed or two split: {map, opposite, divisor, sure} over a picture or null. */
  function canvases(picture, shown, size, alt) {
    const { style, opacity } = atlas.view.current;
    const two = shown.map && (style === "split" || shown.opposite);
    const one = (map, sign, what) => {
      const canvas = element("canvas", { role: "img", "aria-label": alt + what });
      canvas.dataset.size = two ? Math.round(0.75 * size) : size;
      canvas.style.width = canvas.dataset.size + "px";
      paint(canvas, picture, map, shown.divisor, sign, opacity, shown.sure);
      return canvas;
    };
    if (!shown.map) return [one(null, 0, "")];
    if (!two) return [one(shown.map, 0, ", signed map")];
    const lowers = shown.opposite ? shown.opposite.map((value) => -value) : shown.map;
    return [one(shown.map, 1, ", what raises it"), one(lowers, -1, ", what lowers it")];
  }

  /** Returns a bar of the colours of a map, with the numbers at its ends. */
  function colourBar(nu, logScale) {
    const bar = element("canvas", { role: "img", width: 120, height: 10, className: "colours" });
    bar.setAttribute("aria-label", "colours from blue, which lowers it, to red, which raises it");
    const context = bar.getContext("2d");
    for (let x = 0; x < 120; x++) {
      const value = (x - 59.5) / 59.5;
      context.globalAlpha = atlas.palette.opacityOf(value);
      context.fillStyle = "rgb(" + atlas.palette.ofMap(value).join(",") + ")";
      context.fillRect(x, 0, 1, 10);
    }
    const top = number(nu, logScale);
    return element("span", { className: "bar" }, MINUS + top, bar, top + atlas.view.said("", " (nu)"));
  }

  /** Returns what the darkest colour of a map stands for: what one place adds; other maps have no unit. */
  function darkest(nu, logScale = 0, symbols = "nu ") {
    if (nu === 0) return ["blank"];
    if (atlas.view.current.math) return [symbols + number(nu, logScale)];
    return atlas.data.about.addsUp ? ["darkest: " + number(nu, logScale) + " from one place"] : [];
  }

  /** Returns a text that breaks between the words of a file name, not within them. */
  function breakable(text) {
    return text.split(/(?<=[/_-])/).flatMap((part) => [document.createElement("wbr"), part]).slice(1);
  }

  /** Returns a tile: canvases with lines of text; a button if it has something to do. */
  function tile(pictures, lines, label, act) {
    const made = element(act ? "button" : "figure", { className: "tile" });
    if (act) {
      made.type = "button";
      made.setAttribute("aria-label", label);
      made.addEventListener("click", act);
      pictures.forEach((canvas) => canvas.setAttribute("aria-hidden", "true"));
    }
    made.append(element("span", { className: "pictures" }, ...pictures));
    for (const line of lines) made.append(line instanceof Node ? line : element("span", { className: "line" }, ...breakable(line)));
    return made;
  }

  /** Lets arrow keys move between the buttons of a row, of which Tab reaches one. */
  function arrows(container) {
    const buttons = () => [...container.querySelectorAll("button.tile")];
    buttons().forEach((button, k) => { button.tabIndex = k ? -1 : 0; });
    if (container.dataset.arrows) return;
    container.dataset.arrows = "yes";
    container.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      const all = buttons(), at = all.indexOf(document.activeElement);
      if (!step || at < 0) return;
      const to = all[Math.min(Math.max(at + step, 0), all.length - 1)];
      all[at].tabIndex = -1;
      to.tabIndex = 0;
      to.focus();
      event.preventDefault();
    });
  }

  /** Returns a function that fills a container with what make() gives, unless it is called anew before that is there. */
  function filling(container, make) {
    let latest = 0;
    return async function () {
      const mine = ++latest;
      try {
        const children = await make();
        if (mine !== latest) return;
        const focused = [...container.querySelectorAll("button.tile")].indexOf(document.activeElement);
        container.replaceChildren(...children);
        arrows(container);
        const again = container.querySelectorAll("button.tile")[focused];
        if (again) again.focus();
      } catch (error) {
        atlas.report(error);
      }
    };
  }

  atlas.maps = { canvases, colourBar, darkest, element, filling, number, tile, withError };
})((window.atlas = window.atlas || {}));
