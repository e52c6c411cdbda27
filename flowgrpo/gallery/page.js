
const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const PAGE = 60;
const SAME = 1e-6; // as in build.py
const LAST = data.checkpoints.length - 1;
const ITEM = data.text ? "completion" : "image";
const state = {
  query: "", reward: 0, sort: "gain", outcome: "all", view: "side", before: 0, after: LAST, page: 0,
  columns: data.columns.map(() => ""),
};
let shown = [];

const moment = (index) => (data.checkpoints[index] === 0 ? "base" : `iteration ${data.checkpoints[index]}`);
const comparing = () => state.before !== state.after;
const direction = (gain) => (gain === null || Math.abs(gain) <= SAME ? "same" : gain > 0 ? "gained" : "lost");

function gainOf(pair, reward) {
  const [a, b] = [pair.shots[state.before].rewards[reward], pair.shots[state.after].rewards[reward]];
  return a === null || b === null ? null : b - a;
}

function drawHead() {
  document.title = `${data.name} · flowgrpo gallery`;
  byId("name").textContent = data.name;
  const facts = data.facts.map(([key, value]) => `${key} ${value}`);
  if (data.iterations.length) facts.push(plural(data.iterations[data.iterations.length - 1], "iteration"));
  facts.push(plural(new Set(data.pairs.map((pair) => `${pair.id} ${pair.prompt}`)).size, "held-out prompt"));
  facts.push(plural(data.pairs.reduce((sum, pair) => sum + pair.shots.filter(Boolean).length, 0), ITEM));
  if (data.skipped) facts.push(`${plural(data.skipped, "unreadable line")} of the logs left out`);
  byId("facts").append(...facts.map((fact) => el("span", {}, fact)));
  byId("config").textContent = data.config;
}

function balance(row) {
  const same = row.pairs - row.gained - row.lost;
  const text = `${row.gained} gained, ${same} unchanged, ${row.lost} lost`;
  const bar = el("span", { class: "balance", role: "img", "aria-label": text, title: text });
  for (const [kind, count] of [["gained", row.gained], ["same", same], ["lost", row.lost]]) {
    if (!count) continue;
    const part = el("span", { class: kind });
    part.style.flexGrow = count;
    bar.append(part);
  }
  return el("td", { class: "wide" }, bar, el("span", { class: "muted small" }, text));
}

function drawSummary() {
  if (!LAST) {
    byId("summary").append(el("p", { class: "muted" },
      "One evaluation so far. Build the page again after the next to see what training changed."));
    return;
  }
  const whole = data.summary.some((row) => row.whole);
  const heads = ["Reward", moment(0), moment(LAST), "Gain", `${ITEM} by ${ITEM}`, whole ? "Whole evaluation" : null];
  const head = heads.filter(Boolean).map((text) => el("th", { scope: "col" }, text));
  const rows = data.summary.map((row) => {
    const gain = row.after - row.before;
    const error = row.error === null ? null : el("span", { class: "muted small" }, ` ± ${number(row.error)}`);
    const all = row.whole ? `${number(row.whole[0])} → ${number(row.whole[1])}` : "–";
    return el("tr", {},
      el("th", { scope: "row" }, row.reward, el("span", { class: "muted small block" }, plural(row.prompts, "prompt"))),
      el("td", { class: "figure" }, number(row.before)),
      el("td", { class: "figure" }, number(row.after)),
      el("td", { class: "figure" }, el("span", { class: direction(gain) }, signed(gain)), error),
      balance(row),
      whole ? el("td", {}, all) : null);
  });
  byId("summary").append(
    el("div", { class: "scroll", tabindex: 0, role: "region", "aria-labelledby": "summary-title" },
      el("table", { class: "summary" }, el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...rows))),
    el("p", { class: "muted small" },
      `Means over the ${ITEM}s below, paired by prompt and seed; ± is one standard error over prompts.`,
      whole ? ` The whole evaluation may cover more ${ITEM}s than were saved.` : ""));
}

function drawCurves() {
  if (!data.series.length) {
    byId("curves").append(el("p", { class: "muted" }, "The run has no metrics.jsonl."));
    byId("more-curves").remove();
    return;
  }
  const charts = metricCharts(data.iterations, data.series);
  byId("curves").append(...charts.main());
  const more = byId("more-curves");
  if (!charts.others) more.remove();
  else more.addEventListener("toggle", () => more.querySelector("div").append(...charts.rest()), { once: true });
}

function select(label, options, key, index) {
  const value = index === undefined ? state[key] : state[key][index];
  const input = el("select", {}, ...options.map(([option, text]) =>
    el("option", { value: option, selected: String(option) === String(value) }, text)));
  input.addEventListener("change", () => {
    const chosen = typeof value === "number" ? Number(input.value) : input.value;
    if (index === undefined) state[key] = chosen;
    else state[key][index] = chosen;
    update();
  });
  return el("label", {}, el("span", {}, label), input);
}

function drawControls() {
  const places = data.text ? "prompt, completion or notes" : "prompt or notes";
  const search = el("input", { type: "search", placeholder: places, autocomplete: "off" });
  search.addEventListener("input", () => {
    state.query = search.value;
    update();
  });
  const parts = [el("label", { class: "grow" }, el("span", {}, "Search"), search)];
  data.columns.forEach((name, index) => {
    const values = [...new Set(data.pairs.map((pair) => pair.columns[index]).filter((value) => value !== null))];
    if (values.length < 2 || values.length > 60) return;
    const options = values.sort().map((value) => [value, value]);
    parts.push(select(name, [["", "all"], ...options], "columns", index));
  });
  if (data.rewards.length > 1) parts.push(select("Reward", data.rewards.map((name, at) => [at, name]), "reward"));
  if (LAST) {
    parts.push(select("Show", [["all", "all pairs"], ["gained", "gained"], ["lost", "lost"], ["same", "unchanged"],
      ...(data.rewards.length > 1 ? [["split", "one reward up, another down"]] : [])], "outcome"));
  }
  parts.push(select("Sort", [["gain", "largest gain"], ["loss", "largest loss"], ["high", "highest after"],
    ["low", "lowest after"], ["start", "highest before"], ["split", "most disagreement"], ["file", "order of the file"],
  ].filter(([key]) => (LAST || !["gain", "loss", "start", "split"].includes(key))
    && (data.rewards.length > 1 || key !== "split")), "sort"));
  if (LAST > 1) {
    const options = data.checkpoints.map((_, index) => [index, moment(index)]);
    parts.push(select("Before", options, "before"), select("After", options, "after"));
  }
  if (LAST && !data.text) parts.push(select("View", [["side", "side by side"], ["blink", "blink"]], "view"));
  byId("controls").append(...parts);
  if (data.text && LAST) {
    byId("count").after(el("p", { class: "muted small" },
      "Where two completions share most of their words, those that differ are ", el("mark", {}, "marked"), "."));
  }
  byId("controls").addEventListener("submit", (event) => event.preventDefault());
}

// How far rewards pull apart, each in units of its own spread, so that scales compare. Zero when they agree.
function disagreements(pairs) {
  const spreads = data.rewards.map((_, reward) => {
    const gains = pairs.map((pair) => gainOf(pair, reward)).filter((gain) => gain !== null);
    return Math.sqrt(gains.reduce((sum, gain) => sum + gain * gain, 0) / (gains.length || 1)) || 1;
  });
  return new Map(pairs.map((pair) => {
    const gains = data.rewards.map((_, reward) => gainOf(pair, reward)).filter((gain) => gain !== null);
    const split = gains.some((gain) => gain > SAME) && gains.some((gain) => gain < -SAME);
    const scaled = data.rewards.map((_, reward) => gainOf(pair, reward) / spreads[reward]);
    return [pair, split ? Math.max(...scaled) - Math.min(...scaled) : 0];
  }));
}

function order(pairs, split) {
  const score = {
    gain: (pair) => gainOf(pair, state.reward),
    loss: (pair) => { const gain = gainOf(pair, state.reward); return gain === null ? null : -gain; },
    high: (pair) => pair.shots[state.after].rewards[state.reward],
    low: (pair) => { const value = pair.shots[state.after].rewards[state.reward]; return value === null ? null : -value; },
    start: (pair) => pair.shots[state.before].rewards[state.reward],
    split: (pair) => split.get(pair),
  }[state.sort];
  if (!score) return pairs;
  const keyed = pairs.map((pair) => [score(pair) ?? -Infinity, pair]);
  return keyed.sort((a, b) => (b[0] > a[0]) - (b[0] < a[0])).map(([, pair]) => pair);
}

function update() {
  const words = state.query.toLowerCase().split(/\s+/).filter(Boolean);
  const sampled = data.pairs.filter((pair) => pair.shots[state.before] && pair.shots[state.after]);
  const split = disagreements(sampled);
  const found = sampled.filter((pair) => {
    if (state.columns.some((value, index) => value && pair.columns[index] !== value)) return false;
    if (state.outcome === "split" && !split.get(pair)) return false;
    const gain = gainOf(pair, state.reward);
    if (["gained", "lost", "same"].includes(state.outcome) && (gain === null || direction(gain) !== state.outcome)) return false;
    const written = [pair.shots[state.before], pair.shots[state.after]].flatMap((shot) =>
      [shot.completion ?? "", ...shot.notes.map(([, note]) => note)]);
    const text = [pair.prompt, ...written].join("\n").toLowerCase();
    return words.every((word) => text.includes(word));
  });
  shown = order(found, split);
  state.page = 0;
  drawPage();
}

function picture(pair, index) {
  const shot = pair.shots[index];
  if (!shot || !shot.image) return el("span", { class: "absent" }, "no image");
  const alt = `${moment(index)}, seed ${pair.seed}: ${pair.prompt}`;
  const image = el("img", { src: data.prefix + shot.image, loading: "lazy", decoding: "async", alt });
  image.addEventListener("load", () => image.classList.toggle("pixels", image.naturalWidth <= 256));
  return image;
}

const compared = new WeakMap(); // the later sample of a comparison → the earlier one, and the pieces of both texts

// Heading and text of one completion. The marks are those of the two chosen evaluations.
function passage(pair, index, room) {
  const [before, after, shot] = [state.before, state.after, index].map((at) => pair.shots[at]);
  if (compared.get(after)?.before !== before) {
    compared.set(after, { before, pieces: difference(before.completion, after.completion) });
  }
  const pieces = compared.get(after).pieces?.[[before, after].indexOf(shot)] ?? [[shot.completion, false]];
  const same = comparing() && shot === after && shot.completion === before.completion;
  const length = same ? "same text" : plural([...shot.completion].length, "character");
  return [el("figcaption", {}, el("span", {}, moment(index)), el("span", {}, length)), folded(pieces, room)];
}

function frames(pair) {
  const ends = comparing() ? [state.before, state.after] : [state.after];
  if (data.text) {
    const figures = ends.map((index) => el("figure", {}, ...passage(pair, index, 400)));
    return el("div", { class: comparing() ? "frames" : "frames one" }, ...figures);
  }
  if (state.view === "blink" && comparing()) {
    const label = el("figcaption", {});
    const button = el("button", { type: "button", class: "frame blink", "aria-pressed": "false" },
      ...ends.map((index) => picture(pair, index)));
    let held = false;
    const flip = (back) => {
      button.classList.toggle("back", back);
      button.setAttribute("aria-label", `Showing ${moment(back ? state.before : state.after)}; press to switch`);
      label.textContent = moment(back ? state.before : state.after);
    };
    button.addEventListener("pointerenter", (event) => event.pointerType === "mouse" && flip(!held));
    button.addEventListener("pointerleave", () => flip(held));
    button.addEventListener("click", () => {
      held = !held;
      button.setAttribute("aria-pressed", String(held));
      flip(held);
    });
    flip(false);
    return el("div", { class: "frames one" }, el("figure", {}, button, label));
  }
  const figures = ends.map((index) => {
    // The prompt opens the same view, so the images need no tab stop of their own.
    const button = el("button", { type: "button", class: "frame", tabindex: -1 }, picture(pair, index));
    button.addEventListener("click", () => openDetail(pair));
    return el("figure", {}, button, el("figcaption", {}, moment(index)));
  });
  return el("div", { class: comparing() ? "frames" : "frames one" }, ...figures);
}

function scores(pair) {
  const rows = data.rewards.map((name, reward) => {
    const [before, after] = [pair.shots[state.before].rewards[reward], pair.shots[state.after].rewards[reward]];
    if (before === null && after === null) return null;
    const gain = gainOf(pair, reward);
    const change = gain === null ? "" : direction(gain) === "same" ? "=" : signed(gain);
    const cells = comparing() ? [number(before), number(after)] : [number(after)];
    return el("tr", { class: reward === state.reward ? "chosen" : null }, el("th", { scope: "row" }, name),
      ...cells.map((text) => el("td", {}, text)),
      comparing() ? el("td", { class: direction(gain) }, change) : null);
  });
  return el("table", { class: "scores" }, el("tbody", {}, ...rows.filter(Boolean)));
}

function notes(pair) {
  const ends = comparing() ? [state.before, state.after] : [state.after];
  const lines = ends.flatMap((index) => pair.shots[index].notes.map(([reward, note]) =>
    el("p", { class: "note", title: note }, el("span", {}, `${moment(index)}, ${data.rewards[reward]}: `), note)));
  return lines.length ? el("div", { class: "notes" }, ...lines) : null;
}

function card(pair) {
  const title = el("button", { type: "button", class: "prompt" }, pair.prompt);
  title.addEventListener("click", () => openDetail(pair));
  const about = [...pair.columns.filter((value) => value && value.length <= 40), `seed ${pair.seed}`];
  const kind = comparing() ? direction(gainOf(pair, state.reward)) : "same";
  return el("article", { class: `pair ${kind}` }, el("h3", {}, title), frames(pair), scores(pair), notes(pair),
    el("p", { class: "about muted small" }, ...about.map((text) => el("span", {}, text))));
}

function drawPage() {
  const start = state.page * PAGE;
  const cards = shown.slice(start, start + PAGE).map(card);
  byId("pairs").replaceChildren(...cards);
  const end = start + cards.length;
  const kind = comparing() ? "pair" : ITEM;
  byId("count").textContent = shown.length
    ? `${plural(shown.length, kind)}${shown.length > PAGE ? `, showing ${start + 1} to ${end}` : ""}`
    : `No ${kind} matches. Clear the search or choose “all”.`;
  const turn = (text, step, possible) => {
    const button = el("button", { type: "button", disabled: !possible }, text);
    button.addEventListener("click", () => {
      state.page += step;
      drawPage();
      byId("pairs-section").scrollIntoView();
    });
    return button;
  };
  const pages = Math.ceil(shown.length / PAGE);
  byId("pages").replaceChildren(...(pages > 1 ? [turn("Previous", -1, state.page > 0),
    el("span", {}, `Page ${state.page + 1} of ${pages}`), turn("Next", 1, state.page < pages - 1)] : []));
}

function detailShot(pair, index) {
  const shot = pair.shots[index];
  const lines = data.rewards.map((name, reward) => [name, shot.rewards[reward]]).filter(([, value]) => value !== null);
  const rows = [...lines, ...shot.parts].map(([name, value], at) =>
    el("tr", { class: at >= lines.length ? "part" : null }, el("th", { scope: "row" }, name), el("td", {}, number(value))));
  const sample = data.text ? passage(pair, index, 20000)
    : [el("span", { class: "frame" }, picture(pair, index)), el("figcaption", {}, moment(index))];
  return el("figure", {}, ...sample,
    el("table", { class: "scores" }, el("tbody", {}, ...rows)),
    ...shot.notes.map(([reward, note]) => el("p", { class: "note whole" }, el("span", {}, `${data.rewards[reward]}: `), note)));
}

// One prompt and seed through every evaluation, with sub-scores and full notes.
function openDetail(pair) {
  const dialog = byId("detail");
  const sampled = data.checkpoints.map((_, index) => index).filter((index) => pair.shots[index]);
  const at = shown.indexOf(pair);
  const step = (text, to) => {
    const button = el("button", { type: "button", disabled: !shown[to] }, text);
    button.addEventListener("click", () => openDetail(shown[to]));
    return button;
  };
  const close = el("button", { type: "button" }, "Close");
  close.addEventListener("click", () => dialog.close());
  const about = data.columns.map((name, index) => [name, pair.columns[index]]).filter(([, value]) => value !== null);
  dialog.replaceChildren(
    el("div", { class: "bar" }, step("Previous", at - 1), step("Next", at + 1), close),
    el("h2", { id: "detail-title" }, pair.prompt),
    el("p", { class: "about muted small" },
      ...[...about.map(([name, value]) => `${name}: ${value}`), `prompt ${pair.id}`, `seed ${pair.seed}`].map((text) => el("span", {}, text))),
    el("div", { class: "strip" }, ...sampled.map((index) => detailShot(pair, index))));
  dialog.onkeydown = (event) => {
    const next = shown[at + ({ ArrowLeft: -1, ArrowRight: 1 }[event.key] ?? NaN)];
    if (next) openDetail(next);
  };
  if (!dialog.open) dialog.showModal();
  close.focus();
}

byId("detail").addEventListener("click", (event) => event.target === byId("detail") && byId("detail").close());
if (!LAST) state.sort = "high";
document.body.classList.toggle("text", data.text);
drawHead();
drawSummary();
drawCurves();
drawControls();
update();
