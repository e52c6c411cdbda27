"use strict";

// Text reaches the document only as text nodes and attribute values; nothing here parses markup.
function fill(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function number(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e5)) return value.toExponential(2).replace("-", "−");
  const digits = size >= 100 ? 1 : size >= 10 ? 2 : 3;
  return value.toFixed(digits).replace("-", "−");
}

function signed(value) {
  return (value > 0 ? "+" : "") + number(value);
}

function plural(count, word) {
  return `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;
}

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
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k += 1) found.push(k * step);
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
  if (high === low) {
    const pad = Math.abs(high) * 0.1 || 1;
    return [low - pad, high + pad];
  }
  const pad = (high - low) * 0.06;
  return [low - pad, high + pad];
}

// A straight line fitted to about a fifteenth of the curve around each iteration, since single iterations are mostly
// sampling noise: away from the ends it is the plain mean, and at the ends it neither lags nor jumps.
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

function axes(xs, low, high, px, py) {
  const { width, height, left, right, bottom } = CHART;
  const group = svg("g", { class: "axes" });
  const rows = ticks(low, high, 3);
  for (const value of rows.found) {
    group.append(
      svg("line", { x1: left, x2: width - right, y1: py(value), y2: py(value) }),
      svg("text", { x: left - 7, y: py(value) + 3.5, "text-anchor": "end" }, tickLabel(value, rows.step)),
    );
  }
  const last = xs[xs.length - 1];
  for (const value of xs.length > 1 ? ticks(xs[0], last, 4).found.filter(Number.isInteger) : xs) {
    group.append(svg("text", { x: px(value), y: height - bottom + 16, "text-anchor": "middle" }, String(value)));
  }
  return group;
}

function curves(series, xs, px, py) {
  const group = svg("g");
  for (const { values, held } of series) {
    if (held) {
      const at = values.map((value, index) => index).filter((index) => values[index] !== null);
      const line = path(at.map((index) => xs[index]), at.map((index) => values[index]), px, py);
      group.append(svg("path", { class: "held", d: line }));
      for (const index of at) {
        group.append(svg("circle", { class: "held", cx: px(xs[index]), cy: py(values[index]), r: 3 }));
      }
    } else {
      const mean = smooth(values);
      if (mean !== values) group.append(svg("path", { class: "raw", d: path(xs, values, px, py) }));
      group.append(svg("path", { class: "trained", d: path(xs, mean, px, py) }));
    }
  }
  return group;
}

// series: [{label, values, held}], values aligned with xs, null where there is none.
function chart(title, xs, series) {
  const { width, height, left, right, top, bottom } = CHART;
  const [low, high] = range(series.flatMap((one) => one.values));
  const span = xs[xs.length - 1] - xs[0] || 1;
  const px = (x) => left + (xs.length > 1 ? (x - xs[0]) / span : 0.5) * (width - left - right);
  const py = (y) => top + (1 - (y - low) / (high - low)) * (height - top - bottom);
  const cursor = svg("line", { class: "cursor", y1: top, y2: height - bottom, hidden: true });
  const drawing = svg(
    "svg",
    { viewBox: `0 0 ${width} ${height}`, role: "img", tabindex: 0, "aria-label": describe(title, series) },
    axes(xs, low, high, px, py),
    curves(series, xs, px, py),
    cursor,
  );
  const readout = el("span", { class: "readout" });
  const legend = series.map((one) => el("span", { class: one.held ? "key held" : "key trained" }, one.label));
  const rest = series.length > 1 ? legend : [];
  const caption = el("figcaption", {}, el("strong", {}, title), ...rest, readout);
  follow(drawing, cursor, readout, xs, series, px);
  return el("figure", { class: "chart" }, caption, drawing);
}

function describe(title, series) {
  const words = series.map(({ label, values }) => {
    const known = values.filter((value) => value !== null);
    return `${label}: ${number(known[0])} to ${number(known[known.length - 1])} over ${known.length} values`;
  });
  return `${title}. ${words.join("; ")}. Arrow keys read single values.`;
}

// Pointer and arrow keys choose an iteration; its values stand beside the title.
function follow(drawing, cursor, readout, xs, series, px) {
  const known = xs.map((x, index) => index).filter((index) => series.some((one) => one.values[index] !== null));
  let at = -1;
  const show = (place) => {
    at = place;
    cursor.toggleAttribute("hidden", at < 0);
    readout.textContent = "";
    if (at < 0) return;
    const index = known[at];
    const values = series.map((one) => one.values[index]).filter((value) => value !== null);
    readout.textContent = `${values.map(number).join(" · ")} at ${xs[index]}`;
    cursor.setAttribute("x1", px(xs[index]));
    cursor.setAttribute("x2", px(xs[index]));
  };
  drawing.addEventListener("pointermove", (event) => {
    const box = drawing.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * CHART.width;
    let best = 0;
    known.forEach((index, place) => {
      if (Math.abs(px(xs[index]) - x) < Math.abs(px(xs[known[best]]) - x)) best = place;
    });
    show(best);
  });
  drawing.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    show(Math.min(known.length - 1, Math.max(0, at + step)));
  });
  for (const leaving of ["pointerleave", "blur"]) drawing.addEventListener(leaving, () => show(-1));
}

// Charts of the main metrics, and of all others, from [{key, values}].
function metricCharts(xs, all) {
  const find = (key) => all.find((one) => one.key === key);
  const names = new Set(all.filter((one) => /^(reward|eval)\//.test(one.key)).map((one) => one.key.replace(/^\w+\//, "")));
  const ordered = [...names].sort((a, b) => (b === "total") - (a === "total"));
  const main = ordered.map((name) => {
    const train = find(`reward/${name}`);
    const held = find(`eval/${name}`);
    const series = [];
    if (train) series.push({ label: "training", values: train.values, held: false });
    if (held) series.push({ label: "held-out", values: held.values, held: true });
    return { title: train ? `reward/${name}` : `eval/${name}`, series };
  });
  const rest = [];
  for (const { key, values } of all) {
    if (/^(reward|eval)\//.test(key)) continue;
    // A ratio that should be exactly 1 is read by how far it is from it.
    const near = key.startsWith("ratio") && values.every((value) => value === null || Math.abs(value - 1) < 1e-3);
    const shown = near ? values.map((value) => (value === null ? null : value - 1)) : values;
    const one = { title: near ? `${key} − 1` : key, series: [{ label: key, values: shown, held: false }] };
    (/^(ratio\b|clip_share|kl\b|grad_norm|(length|truncated|entropy|sampler_gap)$)/.test(key) ? main : rest).push(one);
  }
  const draw = (list) => list.map(({ title, series }) => chart(title, xs, series));
  return { main: () => draw(main), rest: () => draw(rest), others: rest.length };
}
