
function tickLabel(value, step) {
  if (Math.abs(value) < step / 2) return "0";
  const long = step < 1e-3 || Math.abs(value) >= 1e5;
  const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  return (long ? value.toExponential(step < Math.abs(value) / 2 ? 1 : 0) : value.toFixed(digits)).replace("-", "−");
}

function ticks(low, high, about) {
  const raw = (high - low) / about;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= raw * 0.75);
  const found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9 && found.length < 50; k += 1) found.push(k * step);
  return { step, found };
}

function range(values) {
  let low = Infinity;
  let high = -Infinity;
  for (const value of values) {
    if (value === null) continue;
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  // Values that differ only by rounding count as equal.
  if (high - low <= 1e-9 * Math.max(Math.abs(high), Math.abs(low))) {
    const pad = Math.abs(high) * 0.1 || 1;
    return [low - pad, high + pad];
  }
  const pad = (high - low) * 0.06;
  return [low - pad, high + pad];
}

// Smooths a curve, since single iterations are mostly sampling noise: at each iteration, a straight line is fitted to
// about a fifteenth of the curve. Away from the ends this is the plain mean; at the ends it neither lags nor jumps.
function smooth(values) {
  const reach = Math.floor(values.length / 30);
  if (reach < 1) return values;
  return values.map((value, middle) => {
    if (value === null) return null;
    let [count, sum, sumX, sumXX, sumXY] = [0, 0, 0, 0, 0];
    for (let at = Math.max(0, middle - reach); at <= Math.min(values.length - 1, middle + reach); at += 1) {
      const [x, y] = [at - middle, values[at]];
      if (y === null) continue;
      count += 1;
      sum += y;
      sumX += x;
      sumXX += x * x;
      sumXY += x * y;
    }
    const spread = count * sumXX - sumX * sumX;
    const slope = spread ? (count * sumXY - sumX * sum) / spread : 0;
    return (sum - slope * sumX) / count;
  });
}

function path(xs, values, px, py) {
  let text = "";
  let pen = "M";
  values.forEach((value, at) => {
    if (value === null) pen = "M";
    else {
      text += `${pen}${px(xs[at]).toFixed(1)} ${py(value).toFixed(1)}`;
      pen = "L";
    }
  });
  return text;
}

const CHART = { width: 360, height: 178, left: 48, right: 12, top: 8, bottom: 24 };
const COLOURS = 6;

// Colour of a series. With one run, training and held-out have different colours; with several runs, the runs have.
const lineClass = (one) => `${one.colour ?? (store.site.runs.length > 1 ? `c${one.run % COLOURS}` : one.dots ? "held" : "trained")}`;

// Scales from data to the drawing. xs and ys hold the values of all series.
function scales(xs, ys) {
  const { width, height, left, right, top, bottom } = CHART;
  const [low, high] = range(ys);
  const [first, last] = [Math.min(...xs), Math.max(...xs)];
  const px = (x) => left + (last > first ? (x - first) / (last - first) : 0.5) * (width - left - right);
  const py = (y) => top + (1 - (y - low) / (high - low)) * (height - top - bottom);
  return { low, high, first, last, px, py };
}

// `named` has the labels of the horizontal axis, by place; by default there are round numbers.
function axes({ low, high, first, last, px, py }, whole, named = null) {
  const { width, height, left, right, bottom } = CHART;
  const group = svg("g", { class: "axes" });
  const rows = ticks(low, high, 3);
  for (const value of rows.found) {
    group.append(
      svg("line", { x1: left, x2: width - right, y1: py(value), y2: py(value) }),
      svg("text", { x: left - 7, y: py(value) + 3.5, "text-anchor": "end" }, tickLabel(value, rows.step)),
    );
  }
  for (const [value, text] of named ?? []) {
    group.append(svg("text", { x: px(value), y: height - bottom + 16, "text-anchor": "middle" }, text));
  }
  if (named) return group;
  const columns = last > first ? ticks(first, last, 4) : { found: [first], step: 1 };
  for (const value of columns.found.filter((found) => !whole || Number.isInteger(found))) {
    group.append(svg("text", { x: px(value), y: height - bottom + 16, "text-anchor": "middle" },
      tickLabel(value, whole ? Math.max(1, columns.step) : columns.step)));
  }
  return group;
}

function curve(one, { px, py }) {
  const known = one.values.map((value, at) => at).filter((at) => one.values[at] !== null);
  const line = (values, list) => path(list.map((at) => one.xs[at]), list.map((at) => values[at]), px, py);
  const kind = lineClass(one);
  if (one.dots) {
    return [svg("path", { class: `${kind} thin`, d: line(one.values, known) }),
      ...known.map((at) => svg("circle", { class: kind, cx: px(one.xs[at]), cy: py(one.values[at]), r: 3 }))];
  }
  const smoothed = smooth(one.values);
  const every = one.values.map((_, at) => at);
  const raw = smoothed === one.values ? [] : [svg("path", { class: `${kind} raw`, d: line(one.values, every) })];
  // A value between two gaps has no line.
  const single = known.filter((at) => [at - 1, at + 1].every((next) => (one.values[next] ?? null) === null));
  const dots = single.map((at) => svg("circle", { class: kind, cx: px(one.xs[at]), cy: py(one.values[at]), r: known.length === 1 ? 3 : 2 }));
  return [...raw, svg("path", { class: kind, d: line(smoothed, every) }), ...dots];
}

// series: [{label, run, xs, values, dots, colour}]; a missing value is null. `seen` is called with the chosen point.
function chart(title, series, { whole = true, unit = "", seen = null }) {
  const scale = scales(series.flatMap((one) => one.xs), series.flatMap((one) => one.values));
  const cursor = svg("line", { class: "cursor", y1: CHART.top, y2: CHART.height - CHART.bottom, hidden: true });
  const drawing = svg("svg", { viewBox: `0 0 ${CHART.width} ${CHART.height}`, role: "img", tabindex: 0,
    "aria-label": describe(title, series) }, axes(scale, whole), ...series.flatMap((one) => curve(one, scale)), cursor);
  const readout = el("span", { class: "readout" });
  const legend = series.length > 1 ? series.map((one) => el("span", { class: `key ${lineClass(one)}${one.dots ? " dotted" : ""}` }, one.label)) : [];
  follow(drawing, cursor, readout, series, scale, unit, seen);
  return el("figure", { class: "chart" }, el("figcaption", {}, el("strong", {}, title), ...legend, readout), drawing);
}

function describe(title, series) {
  const words = series.map(({ label, values }) => {
    const known = values.filter((value) => value !== null);
    return `${label}: ${number(known[0])} to ${number(known[known.length - 1])} over ${known.length} values`;
  });
  return `${title}. ${words.join("; ")}. Arrow keys read single values.`;
}

function nearest(values, wanted) {
  let best = 0;
  values.forEach((value, at) => {
    if (Math.abs(value - wanted) < Math.abs(values[best] - wanted)) best = at;
  });
  return best;
}

// Pointer and arrow keys choose a place; the values there are shown beside the title.
function follow(drawing, cursor, readout, series, { px }, unit, seen) {
  const points = series.map((one) => one.xs.map((x, at) => [x, at]).filter(([, at]) => one.values[at] !== null));
  const known = [...new Set(points.flat().map(([x]) => x))].sort((a, b) => a - b);
  if (!known.length) return;
  let at = -1;
  const show = (to) => {
    if (to === at) return;
    at = to;
    cursor.toggleAttribute("hidden", at < 0);
    readout.textContent = "";
    if (at < 0) return;
    const x = known[at];
    const here = series.map((one, index) => [one, points[index].find(([other]) => other === x)]).filter(([, point]) => point);
    readout.textContent = `${here.map(([one, [, place]]) => number(one.values[place])).join(" · ")} at ${x >= 1000 || Number.isInteger(x) ? Math.round(x).toLocaleString("en") : number(x)}${unit}`;
    cursor.setAttribute("x1", px(x));
    cursor.setAttribute("x2", px(x));
    if (seen && here.length) seen(here[here.length - 1][0], here[here.length - 1][1][1]);
  };
  drawing.addEventListener("pointermove", (event) => {
    const box = drawing.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * CHART.width;
    show(nearest(known.map(px), x));
  });
  drawing.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    event.stopPropagation();
    show(Math.min(known.length - 1, Math.max(0, at + step)));
  });
  for (const leaving of ["pointerleave", "blur"]) drawing.addEventListener(leaving, () => show(-1));
}

const FEW = 8;

// Counts in bins of equal width, or by value if there are few values. series: [{label, values, colour}]; `seen` is
// called with the bin in words and a test of values, and `pick` with the ends of the chosen bin.
function histogram(title, series, { seen, pick }) {
  const all = series.flatMap((one) => one.values);
  const distinct = [...new Set(all)].sort((a, b) => a - b);
  const exact = distinct.length <= FEW;
  const [low, high] = exact ? [0, distinct.length] : [distinct[0], distinct[distinct.length - 1]];
  const bins = exact ? distinct.length : 20;
  const size = (high - low) / bins;
  const binOf = (value) => (exact ? distinct.indexOf(value) : Math.min(bins - 1, Math.floor((value - low) / size)));
  const gap = exact ? Math.min(1, ...distinct.slice(1).map((value, at) => value - distinct[at])) : size;
  const counts = series.map((one) => {
    const found = new Array(bins).fill(0);
    for (const value of one.values) found[binOf(value)] += 1;
    return found.map((count) => count / one.values.length);
  });
  const scale = scales([low, low + bins * size], [0, ...counts.flat()]);
  const base = { ...scale, low: 0, py: (y) => CHART.top + (1 - y / (scale.high || 1)) * (CHART.height - CHART.top - CHART.bottom) };
  const readout = el("span", { class: "readout" });
  const bars = [];
  for (let bin = 0; bin < bins; bin += 1) {
    const [from, to] = [low + bin * size, low + (bin + 1) * size];
    const wide = base.px(to) - base.px(from);
    const edge = exact ? 0.12 * wide : 0; // single values stand apart
    const shares = counts.map((found) => `${(found[bin] * 100).toFixed(1)} %`).join(" → ");
    const where = exact ? number(distinct[bin]) : `${number(from)} to ${number(to)}`;
    const label = `${where}: ${shares}`;
    const group = svg("g", { class: "bin", tabindex: 0, role: "button", "aria-label": `${label}; press to see them` },
      svg("rect", { class: "reach", x: base.px(from), y: CHART.top, width: wide, height: CHART.height - CHART.top - CHART.bottom }),
      ...counts.map((found, at) => svg("rect", { class: series[at].colour, x: base.px(from) + edge + ((wide - 2 * edge) * at) / counts.length + 0.5,
        y: base.py(found[bin]), width: Math.max(0.5, (wide - 2 * edge) / counts.length - 1), height: base.py(0) - base.py(found[bin]) })));
    const show = () => {
      readout.textContent = label;
      seen(where, (value) => binOf(value) === bin);
    };
    group.addEventListener("pointerenter", show);
    group.addEventListener("focus", show);
    // Rounding must not lose the samples at the ends.
    const choice = () => pick((exact ? distinct[bin] : from) - gap * 1e-4, (exact ? distinct[bin] : to) + gap * 1e-4);
    group.addEventListener("click", choice);
    group.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      choice();
    });
    bars.push(group);
  }
  const drawing = svg("svg", { viewBox: `0 0 ${CHART.width} ${CHART.height}`, role: "group", "aria-label": title },
    axes(base, false, exact ? distinct.map((value, at) => [at + 0.5, number(value)]) : null), ...bars);
  const legend = series.map((one) => el("span", { class: `key ${one.colour}` }, one.label));
  return el("figure", { class: "chart" }, el("figcaption", {}, el("strong", {}, title), ...legend, readout), drawing);
}
