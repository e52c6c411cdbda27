
// Values of a metric of a run, with their places on the chosen axis. An evaluation comes before its iteration's work.
function metricOf(run, curves, key) {
  const { iterations, series } = curves.metrics;
  const found = series.find(([name]) => name === key);
  return found ? { run, xs: places(curves, key.startsWith("eval/")), values: found[1], iterations } : null;
}

function places(curves, before) {
  const { iterations, series } = curves.metrics;
  if (state.axis === "iteration") return iterations;
  const counted = series.filter(([name]) => (state.axis === "time" ? name.startsWith("time/") : name === state.axis));
  let sum = 0;
  return iterations.map((_, at) => {
    const here = counted.reduce((total, [, values]) => total + (values[at] ?? 0), 0);
    sum += here;
    return before ? sum - here : sum;
  });
}

async function peek(label, cells, reward) {
  const turn = (peek.turn = (peek.turn ?? 0) + 1);
  const rows = cells.slice(0, 8).map((cell) => [{ ...described(cell.set.run, cell.set.pairs[cell.at]) }, cell]);
  const details = store.site.text ? await Promise.all(rows.map(([, cell]) => detailsOf(cell))) : [];
  if (turn !== peek.turn) return;
  const close = button("Close", () => { byId("peek").hidden = true; }, { class: "quiet", title: "Close (Esc)" });
  const head = el("div", { class: "bar" }, el("p", { class: "muted small" }, label), close);
  byId("peek").replaceChildren(head, el("div", { class: "peek" }, ...rows.map(([row, cell], at) => {
    const key = `${cell.set.run}.${cell.set.pairs[cell.at]}${cell.set.phase === "train" ? `.${cell.set.iteration}` : ""}`;
    const inside = store.site.text ? (details[at].completion ?? "").slice(0, 160) : picture(row, cell);
    return el("figure", {}, button(inside, () => openPicture(key), { class: "frame", "aria-label": row.prompt }),
      el("figcaption", {}, number(scoreOf(cell, reward))));
  })));
  byId("peek").hidden = !rows.length;
}

// The samples at or before a point of a curve.
async function peekAt(one, at, name) {
  const iteration = one.iterations[at];
  const info = setsOf(one.dots ? "eval" : "train").filter((set) => set.run === one.run && set.iteration <= iteration).pop();
  if (!info) return;
  const set = await loadSet(info.file);
  const kind = one.dots ? "held-out" : "training";
  const reward = store.site.rewards.indexOf(name);
  await peek(`${kind} samples, ${sourceName(info)}`, set.pairs.map((_, index) => ({ set, at: index })), reward < 0 ? rewardIndex() : reward);
}

// A curve that does not move, such as a ratio that is 1 by construction, is said in words.
function still(title, series) {
  const known = series.flatMap((one) => one.values).filter((value) => value !== null);
  if (!known.length) return null;
  const [low, high] = [Math.min(...known), Math.max(...known)];
  if (high - low > 1e-9 * Math.max(Math.abs(high), Math.abs(low))) return null;
  return el("span", { "data-count": known.length }, `${title} ${number(high)}`);
}

function rewardCharts(all, unit) {
  const keys = [...new Set(all.flatMap((curves) => curves.metrics.series.map(([key]) => key)))];
  const named = [...new Set(keys.filter((key) => /^(reward|eval)\//.test(key)).map((key) => key.replace(/^\w+\//, "")))];
  const draw = (title, parts) => {
    const series = parts.filter(Boolean).filter((one) => one.values.some((value) => value !== null));
    return series.length ? chart(title, series, { whole: state.axis !== "time", unit, seen: (one, at) => guarded(peekAt(one, at, title)) }) : null;
  };
  const label = (run, kind) => (store.site.runs.length > 1 ? `${runName(run)}, ${kind}` : kind);
  // With a single reward of weight 1, the total is this reward once more.
  const alike = (a, b) => a && b && a.values.every((value, at) => value === b.values[at]);
  const trained = keys.filter((key) => key.startsWith("reward/") && key !== "reward/total");
  const repeats = (name) => name === "total" && trained.length === 1 && !keys.includes("eval/total")
    && all.every((curves, run) => alike(metricOf(run, curves, "reward/total"), metricOf(run, curves, trained[0])));
  const main = named.filter((name) => !repeats(name)).sort((a, b) => (b === "total") - (a === "total")).map((name) => draw(name, all.flatMap((curves, run) => {
    const [train, held] = [metricOf(run, curves, `reward/${name}`), metricOf(run, curves, `eval/${name}`)];
    return [train && { ...train, label: label(run, "training") }, held && { ...held, dots: true, label: label(run, "held-out") }];
  })));
  const others = keys.filter((key) => !/^(reward|eval|time)\//.test(key)).map((key) => {
    const parts = all.map((curves, run) => metricOf(run, curves, key));
    // For a ratio that should be exactly 1, the distance from 1 is shown.
    const near = key === "ratio/mean" && parts.every((one) => !one || one.values.every((value) => value === null || Math.abs(value - 1) < 1e-3));
    const shown = parts.map((one, run) => one && { ...one, label: runName(run),
      values: near ? one.values.map((value) => (value === null ? null : value - 1)) : one.values });
    const drawn = shown.filter((one) => one?.values.some((value) => value !== null));
    const constant = still(near ? `${key} − 1` : key, drawn);
    return [/^(ratio\b|preferred$|clip_share|approx_kl|kl\b|grad_norm|(length|truncated|entropy|sampler_gap)$)/.test(key),
      constant ?? draw(near ? `${key} − 1` : key, shown)];
  });
  return { main: main.filter(Boolean), learning: others.filter(([first]) => first).map(([, one]) => one).filter(Boolean),
    rest: others.filter(([first]) => !first).map(([, one]) => one).filter(Boolean) };
}

async function distributionCharts() {
  const [earlier, later] = [sourceOf(state.a, "eval"), sourceOf(state.b, "eval")];
  if (!earlier || !later) return [];
  const sets = await Promise.all([...new Set([earlier, later])].map((info) => loadSet(info.file)));
  return store.site.rewards.map((name, reward) => {
    const series = sets.map((set, at) => ({ label: sourceName(set), colour: at ? "c0" : "c1",
      values: set.rewards[reward].filter((value) => value !== null) })).filter((one) => one.values.length);
    if (!series.length) return null;
    const last = sets[sets.length - 1];
    const inside = (holds) => last.pairs.map((_, at) => ({ set: last, at })).filter((cell) => {
      const value = scoreOf(cell, reward);
      return value !== null && holds(value);
    });
    return histogram(`${name}, share of samples`, series, {
      seen: (where, holds) => guarded(peek(`${sourceName(last)}, ${name} ${where}`, inside(holds), reward)),
      pick: (from, to) => {
        Object.assign(state, { page: "pictures", phase: "eval", reward: name, min: from.toPrecision(6), max: to.toPrecision(6), p: "1" });
        remember(true);
        guarded(showPage());
      },
    });
  }).filter(Boolean);
}

function diversityCharts(all) {
  const phases = ["train", "eval"];
  const draw = (title, value) => {
    const series = all.flatMap((curves, run) => phases.map((phase) => {
      const own = curves.groups.filter((group) => group.phase === phase && value(group) !== null);
      const kind = phase === "eval" ? "held-out" : "training";
      return { run, dots: phase === "eval" || store.site.runs.length === 1, colour: store.site.runs.length > 1 ? undefined : phase === "eval" ? "held" : "trained", iterations: own.map((group) => group.iteration),
        label: store.site.runs.length > 1 ? `${runName(run)}, ${kind}` : kind, xs: own.map((group) => group.iteration), values: own.map(value) };
    })).filter((one) => one.values.length);
    return series.length ? still(title, series) ?? chart(title, series, {}) : null;
  };
  const looks = store.site.text ? "share of distinct completions" : "how far images differ";
  return [draw(looks, (group) => group.looks),
    ...store.site.rewards.map((name, at) => draw(`${name}, standard deviation`, (group) => group.spread[at] ?? null))].filter(Boolean);
}

// Statistics by trained step: for one run, the mean of each third of the training; for several runs, one mean each.
function stepCharts(all) {
  // Older runs recorded only the log-ratio: half its mean square is the mean of r − 1 − log r to second order.
  const square = (found) => ("log_ratio_var" in found ? 0.5 * (found.log_ratio_var + (found.log_ratio_mean ?? 0) ** 2) : null);
  const measures = [["mean ratio − 1", (found) => ("ratio_mean" in found ? found.ratio_mean - 1 : null)],
    ["clip share", (found) => found.clip_share ?? null], ["KL, mean of r − 1 − log r", (found) => found.approx_kl ?? square(found)],
    ["mean log-ratio", (found) => found.log_ratio_mean ?? null], ["spread of the log-ratio", (found) =>
      ("log_ratio_var" in found ? Math.sqrt(Math.max(0, found.log_ratio_var)) : null)]];
  const parts = all.flatMap((curves, run) => {
    const entries = curves.steps.map(([iteration, step, values]) => [iteration, step, Object.fromEntries(values)]);
    if (!entries.length) return [];
    if (all.length > 1) return [{ run, label: runName(run), entries }];
    const last = Math.max(...entries.map(([iteration]) => iteration)) + 1;
    const third = (iteration) => Math.min(2, Math.floor((3 * iteration) / last));
    return ["first third", "second third", "last third"].map((label, at) =>
      ({ run, label, colour: `c${at}`, entries: entries.filter(([iteration]) => third(iteration) === at) }));
  }).filter((part) => part.entries.length);
  return measures.map(([title, measure]) => {
    const series = parts.map(({ run, label, colour, entries }) => {
      const xs = [...new Set(entries.map(([, step]) => step))].sort((a, b) => a - b);
      const values = xs.map((step) => mean(entries.filter(([, other]) => other === step).map(([, , found]) => measure(found)).filter((value) => value !== null)));
      return { run, label, colour, xs, values, dots: true };
    }).filter((one) => one.values.some((value) => value !== null));
    return series.length ? still(title, series) ?? chart(title, series, {}) : null;
  }).filter(Boolean);
}

function timeTable(all) {
  const rows = all.map((curves, run) => {
    const parts = curves.metrics.series.filter(([key]) => key.startsWith("time/"))
      .map(([key, values]) => [key.slice(5), values.reduce((sum, value) => sum + (value ?? 0), 0)]).filter(([, sum]) => sum > 0);
    const total = parts.reduce((sum, [, seconds]) => sum + seconds, 0);
    if (!total) return null;
    const words = parts.map(([name, seconds]) => `${name} ${Math.round((100 * seconds) / total)} %`);
    const bar = el("span", { class: "balance tall", role: "img", "aria-label": words.join(", ") }, ...parts.map(([, seconds], at) => {
      const part = el("span", { class: `fill c${at % COLOURS}` });
      part.style.flexGrow = seconds;
      return part;
    }));
    return el("div", { class: "time" }, el("p", {}, el("bdi", {}, runName(run)), `: ${duration(total)}`), bar,
      el("p", { class: "muted small keys" }, ...words.map((text, at) => el("span", { class: `key c${at % COLOURS}` }, text))));
  });
  return rows.filter(Boolean);
}

function duration(seconds) {
  if (seconds < 120) return `${seconds.toFixed(0)} s`;
  return seconds < 7200 ? `${(seconds / 60).toFixed(1)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

function axisChoice(all) {
  const has = (test) => all.every((curves) => curves.metrics.series.some(([key]) => test(key)));
  const options = [["iteration", "iterations"], has((key) => key.startsWith("time/")) && ["time", "seconds"],
    has((key) => key === "evaluations") && ["evaluations", "calls of the denoiser"], has((key) => key === "tokens") && ["tokens", "tokens"]];
  const known = options.filter(Boolean);
  if (known.length < 2) return null;
  const input = el("select", {}, ...known.map(([value, text]) => el("option", { value, selected: value === state.axis }, text)));
  input.addEventListener("change", () => {
    state.axis = input.value;
    remember();
    guarded(showResults());
  });
  return el("form", { class: "controls plain" }, el("label", {}, el("span", {}, "Along"), input));
}

function block(title, children, open = true) {
  if (!children.length) return null;
  const words = children.filter((child) => child.tagName === "SPAN");
  const [single, constant] = [words.filter((word) => word.dataset.count === "1"), words.filter((word) => word.dataset.count !== "1")];
  const inner = el("div", {}, el("div", { class: "charts" }, ...children.filter((child) => child.tagName !== "SPAN")),
    ...[["Without change: ", constant], ["One value so far: ", single]].filter(([, found]) => found.length)
      .map(([text, found]) => el("p", { class: "muted small still" }, text, ...found)));
  return open ? el("section", {}, el("h2", {}, title), inner)
    : el("details", { class: "more" }, el("summary", {}, title), inner);
}

async function showResults() {
  const all = await Promise.all(store.site.runs.map((run) => readData(`${run.key}-curves`)));
  const unit = { time: " s", evaluations: " calls", tokens: " tokens" }[state.axis] ?? "";
  const charts = rewardCharts(all, unit);
  const times = timeTable(all);
  byId("view-results").replaceChildren(...[
    summaries(), axisChoice(all), block("Rewards", charts.main),
    block(`Rewards, ${sourceName(sourceOf(state.a, "eval") ?? setsOf("train")[0])} and ${sourceName(sourceOf(state.b, "eval") ?? setsOf("train")[0])}`, await distributionCharts()),
    block("Within the samples of a prompt", diversityCharts(all)),
    block("Learning", charts.learning), block(store.site.text ? "By place in the completion" : "By denoising step", stepCharts(all)),
    times.length ? el("section", {}, el("h2", {}, "Where time went"), ...times) : null,
    block("Other metrics", charts.rest, false),
  ].filter(Boolean));
}
