// The machine: decision values behind the components, their gradients, and their secants from a baseline.
(function (atlas) {
  "use strict";

  // exp(-30): below this, terms are divided by their size, whose logarithm is kept (as in head/kernels.py).
  const REPRESENTABLE = -30;
  const ROUNDING = 8 * 2 ** -23; // how exactly a network in single precision knows a point

  const logSech = (z) => Math.LN2 - Math.abs(z) - Math.log1p(Math.exp(-2 * Math.abs(z)));

  function dot(a, aStart, b, bStart, count) {
    let total = 0;
    for (let j = 0; j < count; j++) total += a[aStart + j] * b[bStart + j];
    return total;
  }

  // Every kernel has three methods, for one support vector (which starts at `at` in `points`) and a place x:
  // value; slope and secant: a factor and its logarithm, {factor, exponent}, of what the vector pulls with. An inner
  // product's gradient is this times the vector; that of RBF is this times (vector - place), where the place of a secant
  // lies between baseline and x, at the part `along` of the way.
  const KERNELS = {
    linear: () => ({
      ofProduct: true,
      value: (z) => z,
      slope: () => ({ factor: 1, exponent: 0 }),
      secant: () => ({ factor: 1, exponent: 0 }),
    }),

    polynomial: ({ gamma, degree, coef0 }) => ({
      ofProduct: true,
      value: (product) => (gamma * product + coef0) ** degree,
      slope: (product) => ({
        factor: degree ? degree * gamma * (gamma * product + coef0) ** (degree - 1) : 0, exponent: 0,
      }),
      secant: (product, product0) => ({
        factor: gamma * powerQuotient(gamma * product + coef0, gamma * product0 + coef0, degree), exponent: 0,
      }),
    }),

    sigmoid: ({ gamma, coef0 }) => ({
      ofProduct: true,
      value: (product) => Math.tanh(gamma * product + coef0),
      slope: (product) => ({ factor: gamma, exponent: 2 * logSech(gamma * product + coef0) }),
      secant: (product, product0) => {
        // sinh(u) / (u cosh z cosh z0), by parts that do not overflow.
        const u = Math.abs(gamma * (product - product0));
        const mean = u > 0 ? -Math.expm1(-2 * u) / (2 * u) : 1;
        const ends = logSech(gamma * product + coef0) + logSech(gamma * product0 + coef0);
        return { factor: gamma, exponent: u + Math.log(mean) + ends };
      },
    }),

    rbf: ({ gamma }) => ({ ofProduct: false, gamma }),
  };

  /** Returns (z^degree - z0^degree) / (z - z0), the slope where the two are equal; nothing cancels. */
  function powerQuotient(z, z0, degree) {
    if (Number.isInteger(degree)) {
      let total = 0;
      for (let power = 0; power < degree; power++) total = total * z + z0 ** power;
      return total;
    }
    const larger = Math.max(z, z0), smaller = Math.min(z, z0);
    if (larger === smaller) return degree * larger ** (degree - 1);
    const step = (smaller - larger) / larger;
    return larger ** (degree - 1) * Math.expm1(degree * Math.log1p(step)) / step;
  }

  // Gauss-Legendre nodes and weights on [0, 1], 12 of them.
  const NODES = [
    0.1252334085114689, 0.3678314989981802, 0.5873179542866175, 0.7699026741943047, 0.9041172563704749, 0.9815606342467193,
  ].flatMap((node) => [(1 - node) / 2, (1 + node) / 2]);
  const WEIGHTS = [
    0.2491470458134028, 0.2334925365383548, 0.2031674267230659, 0.1600783285433462, 0.1069393259953184, 0.0471753363865118,
  ].flatMap((weight) => [weight / 2, weight / 2]);
  const PIECES = 8;
  const FADED = 45; // exp(-45) is nothing beside the largest value on the line

  /**
   * Returns the mean of an RBF kernel on the line from baseline to x, as a logarithm, and where on the line, from 0 to 1,
   * its weight has its centre. Only the part of the line where the kernel has not faded is integrated.
   */
  function alongLine(gamma, points, at, x0, step) {
    const count = step.length;
    let along = 0, length = 0;
    for (let j = 0; j < count; j++) {
      along += (points[at + j] - x0[j]) * step[j];
      length += step[j] * step[j];
    }
    const nearest = length > 0 ? Math.min(Math.max(along / length, 0), 1) : 0;
    let squared = 0;
    for (let j = 0; j < count; j++) squared += (points[at + j] - x0[j] - nearest * step[j]) ** 2;
    // From there the exponent grows by slope t + curve t^2.
    const slope = 2 * gamma * Math.abs(along - nearest * length), curve = gamma * length;
    const reach = 2 * FADED / (slope + Math.sqrt(slope * slope + 4 * FADED * curve));
    const begin = Math.max(0, nearest - reach), end = Math.min(1, nearest + reach);
    let zeroth = 0, first = 0;
    for (let piece = 0; piece < PIECES; piece++) {
      const width = (end - begin) / PIECES, from = begin + piece * width;
      for (let n = 0; n < NODES.length; n++) {
        const t = from + NODES[n] * width, away = Math.abs(t - nearest);
        const term = WEIGHTS[n] * width * Math.exp(-away * (slope + curve * away));
        zeroth += term;
        first += term * t;
      }
    }
    return { logMean: Math.log(zeroth) - gamma * squared, along: first / zeroth };
  }

  /** Decodes the machines of a head. */
  function read(data) {
    const values = (array) => atlas.data.unpacked(array).values;
    const machines = data.machines.map((machine) => {
      if (machine.kind === "linear") {
        return { ...machine, weight: atlas.data.unpacked(machine.weight), bias: values(machine.bias) };
      }
      const affine = machine.affine && {
        matrix: atlas.data.unpacked(machine.affine.matrix), offset: values(machine.affine.offset),
      };
      const points = atlas.data.unpacked(machine.points);
      return {
        ...machine,
        affine,
        kernel: KERNELS[machine.kernel.name](machine.kernel),
        points: points.values,
        count: points.shape[0],
        width: points.shape[1],
        dual: values(machine.dual),
        intercept: values(machine.intercept),
        rows: values(machine.rows),
        training: values(machine.training),
      };
    });
    const { starts } = data, points = (array) => array && atlas.data.unpacked(array);
    return { ...data, machines, starts: starts && { margins: points(starts.margins), pairs: points(starts.pairs) } };
  }

  /** Returns what a machine gets: the components, or these through its affine stages. */
  function inputOf(machine, p) {
    if (!machine.affine) return p;
    const { matrix, offset } = machine.affine;
    return offset.map((value, d) => value + dot(matrix.values, d * p.length, p, 0, p.length));
  }

  /** Returns the argument of the kernel for support vector i: an inner product, or a squared distance. */
  function argumentOf(machine, i, x) {
    const { points, width } = machine, at = i * width;
    if (machine.kernel.ofProduct) return dot(points, at, x, 0, width);
    let squared = 0;
    for (let j = 0; j < width; j++) squared += (points[at + j] - x[j]) ** 2;
    return squared;
  }

  function kernelValue(machine, i, x) {
    const argument = argumentOf(machine, i, x);
    return machine.kernel.ofProduct ? machine.kernel.value(argument) : Math.exp(-machine.kernel.gamma * argument);
  }

  /** Calls visit(i, decision, coefficient) for every support vector and every decision that it takes part in. */
  function eachCoefficient(machine, visit) {
    let i = 0;
    for (const group of machine.groups) {
      for (const stop = i + group.count; i < stop; i++) {
        group.decisions.forEach((decision, r) => visit(i, decision, machine.dual[r * machine.count + i]));
      }
    }
  }

  /** Returns the decision values, length P, at the components p. */
  function decisions(whole, p) {
    const found = new Float64Array(whole.outputs);
    for (const machine of whole.machines) {
      if (machine.kind === "linear") {
        const { shape, values } = machine.weight;
        for (let d = 0; d < shape[0]; d++) {
          found[machine.first + d] = machine.bias[d] + dot(values, d * shape[1], p, 0, shape[1]);
        }
        continue;
      }
      found.set(machine.intercept, machine.first);
      const x = inputOf(machine, p);
      const values = Float64Array.from({ length: machine.count }, (_, i) => kernelValue(machine, i, x));
      eachCoefficient(machine, (i, decision, coefficient) => {
        found[machine.first + decision] += coefficient * values[i];
      });
    }
    return found;
  }

  /** Returns the position of a pair of classes, first < second, among all pairs of so many. */
  const pairOf = (first, second, count) => first * count - (first * (first + 1)) / 2 + second - first - 1;

  /** Returns the components where a class's margin, or its decision against another, is 0; null if unknown. */
  function startOf(whole, category, versus) {
    if (!whole.starts) return null;
    const { margins, pairs } = whole.starts, alone = versus === null || versus === undefined || versus === category;
    const points = alone ? margins : pairs;
    if (!points) return null;
    const count = points.shape[1], ends = [category, versus];
    const at = alone ? category : pairOf(Math.min(...ends), Math.max(...ends), margins.shape[0]);
    const found = points.values.subarray(at * count, (at + 1) * count);
    return found.every(Number.isFinite) ? found : null;
  }

  /** Returns the factors of all decision values in a class's margin, or in its decision against another; or null. */
  function seedOf(whole, category, versus) {
    const seed = new Float64Array(whole.outputs);
    if (versus === null || versus === undefined) {
      for (const [position, factor] of whole.margins[category]) seed[position] = factor;
      return seed;
    }
    if (category === versus) return seed;
    if (!whole.pairs) return null;
    const count = whole.margins.length, first = Math.min(category, versus), second = Math.max(category, versus);
    const pair = whole.pairs[pairOf(first, second, count)];
    for (const [position, factor] of pair) seed[position] = category < versus ? factor : -factor;
    return seed;
  }

  /** Returns the coefficient of every support vector for a seed. */
  function coefficientsOf(machine, seed) {
    const found = new Float64Array(machine.count);
    eachCoefficient(machine, (i, decision, coefficient) => {
      found[i] += seed[machine.first + decision] * coefficient;
    });
    return found;
  }

  /** Returns terms * exp(exponents), divided by their size where all would underflow, and the logarithm of that. */
  function timesExp(terms, exponents) {
    let largest = -Infinity, size = 0;
    terms.forEach((term, i) => {
      if (term === 0) return;
      largest = Math.max(largest, exponents[i]);
      size = Math.max(size, Math.abs(term));
    });
    largest += Math.log(size);
    const logScale = largest < REPRESENTABLE && largest > -Infinity ? largest : 0;
    return { scaled: terms.map((term, i) => (term === 0 ? 0 : term * Math.exp(exponents[i] - logScale))), logScale };
  }

  /** Returns the gradient of a kernel SVM by its input, or with x0 the secant from there, and its logarithm. */
  function kernelGradient(machine, seed, x, x0) {
    const { kernel, points, count, width } = machine;
    const terms = coefficientsOf(machine, seed), exponents = new Float64Array(count), along = new Float64Array(count);
    const step = x0 && x.map((value, j) => value - x0[j]);
    for (let i = 0; i < count; i++) {
      if (terms[i] === 0) continue;
      if (kernel.ofProduct) {
        const argument = argumentOf(machine, i, x);
        const pull = x0 ? kernel.secant(argument, argumentOf(machine, i, x0)) : kernel.slope(argument);
        terms[i] *= pull.factor;
        exponents[i] = pull.exponent;
      } else {
        terms[i] *= 2 * kernel.gamma;
        if (x0) {
          const line = alongLine(kernel.gamma, points, i * width, x0, step);
          exponents[i] = line.logMean;
          along[i] = line.along;
        } else {
          exponents[i] = -kernel.gamma * argumentOf(machine, i, x);
        }
      }
    }
    const { scaled, logScale } = timesExp(terms, exponents);
    const gradient = new Float64Array(width), sizes = new Float64Array(width);
    for (let i = 0; i < count; i++) {
      if (scaled[i] === 0) continue;
      for (let j = 0; j < width; j++) {
        const point = points[i * width + j];
        const place = kernel.ofProduct ? 0 : x0 ? x0[j] + along[i] * step[j] : x[j];
        gradient[j] += scaled[i] * (point - place);
        sizes[j] += Math.abs(scaled[i]) * (Math.abs(point) + Math.abs(x[j]));
      }
    }
    // On a support vector of a narrow kernel all that is left is the rounding of its distance, and no direction.
    if (!kernel.ofProduct && !x0 && gradient.every((value, j) => Math.abs(value) <= ROUNDING * sizes[j])) gradient.fill(0);
    return { gradient, logScale };
  }

  function pulledThrough(affine, gradient, count) {
    if (!affine) return gradient;
    const found = new Float64Array(count);
    gradient.forEach((value, d) => {
      for (let j = 0; j < count; j++) found[j] += value * affine.matrix.values[d * count + j];
    });
    return found;
  }

  /**
   * Returns the gradient of sum(seed * decisions) by the components at p; with p0 the secant from there, whose product
   * with p - p0 is the difference of the values. It is divided by exp(logScale).
   */
  function gradient(whole, seed, p, p0) {
    const parts = whole.machines.map((machine) => {
      if (machine.kind === "linear") {
        const { shape, values } = machine.weight, found = new Float64Array(p.length);
        for (let d = 0; d < shape[0]; d++) {
          for (let j = 0; j < p.length; j++) found[j] += seed[machine.first + d] * values[d * p.length + j];
        }
        return { gradient: found, logScale: 0 };
      }
      const of = kernelGradient(machine, seed, inputOf(machine, p), p0 && inputOf(machine, p0));
      return { gradient: pulledThrough(machine.affine, of.gradient, p.length), logScale: of.logScale };
    }).filter((part) => part.gradient.some((value) => value !== 0));
    if (!parts.length) return { gradient: new Float64Array(p.length), logScale: 0 };
    const logScale = Math.max(...parts.map((part) => part.logScale)), total = new Float64Array(p.length);
    for (const part of parts) {
      const factor = Math.exp(part.logScale - logScale);
      part.gradient.forEach((value, j) => { total[j] += factor * value; });
    }
    return { gradient: total, logScale };
  }

  /** Returns every support vector's part alpha_i c_i K in sum(seed * decisions), strongest first; and the rest of it. */
  function vectorParts(whole, seed, p) {
    const parts = [];
    let intercept = 0;
    for (const machine of whole.machines.filter((each) => each.kind === "kernel")) {
      machine.intercept.forEach((value, d) => { intercept += seed[machine.first + d] * value; });
      const x = inputOf(machine, p);
      coefficientsOf(machine, seed).forEach((coefficient, i) => {
        if (coefficient === 0) return;
        const part = coefficient * kernelValue(machine, i, x);
        parts.push({ part, row: machine.rows[i], training: machine.training[i] });
      });
    }
    parts.sort((a, b) => Math.abs(b.part) - Math.abs(a.part));
    return { parts, intercept };
  }

  atlas.machine = { read, decisions, seedOf, startOf, gradient, vectorParts };
})((window.atlas = window.atlas || {}));
