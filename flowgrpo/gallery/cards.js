
const PAGE = 60;
const cards = { shown: [], written: null, shows: 0 };

// The sets that a card shows; the first and the last are compared.
async function chosenSets() {
  if (state.phase === "train") {
    const sets = setsOf("train").filter((info) => !state.at || sourceKey(info) === state.at);
    return { all: await Promise.all(sets.map((info) => loadSet(info.file))) };
  }
  const [earlier, later] = [sourceOf(state.a, "eval"), sourceOf(state.b, "eval")];
  const evaluated = setsOf("eval");
  let infos = earlier === later ? [later] : [earlier, later];
  if (state.view === "training") infos = evaluated.filter((info) => info.run === later.run);
  if (state.view === "runs") {
    // Each run is shown at the later set's iteration, or at the run's last evaluation before that iteration.
    const at = (run) => evaluated.filter((info) => info.run === run && info.iteration <= later.iteration).pop();
    infos = [earlier, ...store.site.runs.map((_, run) => at(run)).filter((info) => info && info !== earlier)];
  }
  const [a, b, ...sets] = await Promise.all([earlier, later, ...infos].map((info) => loadSet(info.file)));
  return { earlier: a, later: b, sets };
}

// Notes and completions are in separate files, which are read for the first search.
async function writtenTexts(ends) {
  const cells = ends.flatMap(([, before, after]) => [before, after]).filter(Boolean);
  return new Map(await Promise.all(cells.map(async (cell) => {
    const details = await detailsOf(cell);
    return [place(cell), [details.completion ?? "", ...details.notes.map(([, note]) => note)].join("\n")];
  })));
}

async function showCards() {
  const turn = (cards.shows += 1);
  const chosen = await chosenSets();
  const rows = state.phase === "train" ? trainingRows(chosen.all) : evaluationRows();
  let found = arranged(rows, chosen.earlier, chosen.later);
  if (state.q.trim()) {
    const written = store.site.text || store.site.noted ? await writtenTexts(found) : null;
    found = matching(found, state.q, written);
  }
  if (turn !== cards.shows) return;
  cards.shown = found;
  cards.sets = chosen.sets;
  drawChosen();
  await drawCards(turn);
}

const place = (cell) => `${cell.set.name} ${cell.at}`;

function cellsOf([row, , after]) {
  return state.phase === "train" ? [after] : cards.sets.map((set) => cellOf(row, set));
}

function scoreTable(before, after, parts = []) {
  const comparing = before && after && before.set !== after.set;
  const rows = store.site.rewards.map((name, reward) => {
    const [a, b] = [scoreOf(before, reward), scoreOf(after, reward)];
    if ((!comparing || a === null) && b === null) return null;
    const gain = comparing ? gainOf(before, after, reward) : null;
    const change = gain === null ? "" : direction(gain) === "same" ? "=" : signed(gain);
    return el("tr", { class: name === state.reward ? "chosen" : null }, el("th", { scope: "row" }, name),
      ...(comparing ? [[number(a), "before"], [number(b), "after"]] : [[number(b), null]]).map(([text, title]) => el("td", { title }, text)),
      comparing ? el("td", { class: direction(gain), title: "change" }, change) : null);
  });
  return el("table", { class: "scores" }, el("tbody", {}, ...rows.filter(Boolean), ...parts));
}

function noteLines(cells, details, whole) {
  return cells.flatMap((cell, at) => (details[at]?.notes ?? []).map(([reward, note]) =>
    el("p", { class: whole ? "note whole" : "note", title: whole ? null : note },
      el("span", {}, `${sourceName(cell.set)}, ${store.site.rewards[reward]}: `), el("bdi", {}, note))));
}

function card(end, details, at) {
  const [row, before, after] = end;
  const cells = cellsOf(end);
  const open = () => openPicture(row.key);
  const title = button(promptText(row), open, { class: "prompt", "data-at": at });
  const named = store.site.columns.map((name, index) => [name, row.columns[index]]).filter(([, value]) => value && plainWord(value));
  const about = [...named.map(([name, value]) => `${name} ${value}`), `seed ${row.seed}`];
  if (row.only) about.push(sourceName(row.only));
  const kind = row.only ? "same" : direction(gainOf(before, after, rewardIndex()));
  const passages = () => el("div", { class: cells.length === 1 ? "frames one" : "frames" },
    ...cells.map((cell, at) => passage(cell, at, details, 400, open)));
  const head = el("div", { class: "head" }, pickBox(row), el("h3", {}, title), starButton(row),
    row.messages.length ? turnsOf(row.messages, 400) : null, promptPictures(row));
  return el("article", { class: `pair ${kind}` }, head,
    details ? passages() : pictures(row, cells, [], open), scoreTable(before, after), noteField(row),
    el("p", { class: "about muted small" }, ...about.map((text) => el("span", {}, text))));
}

// Pictures are shown before their notes are read. Completions are in the same files as the notes.
async function drawCards(turn) {
  const pages = Math.max(1, Math.ceil(cards.shown.length / PAGE));
  const page = Math.min(pages, Math.max(1, Number.parseInt(state.p, 10) || 1));
  state.p = String(page);
  const start = (page - 1) * PAGE;
  const part = cards.shown.slice(start, start + PAGE);
  const { text, noted } = store.site;
  byId("pairs").classList.toggle("wide", state.phase === "eval" && cards.sets.length > 2);
  byId("pairs").classList.toggle("moving", store.site.video);
  let nodes = text ? [] : part.map((end, at) => card(end, null, start + at));
  if (!text) byId("pairs").replaceChildren(...nodes);
  countCards(start, part.length, pages, page);
  if (!text && !noted) return;
  const details = await Promise.all(part.map((end) =>
    Promise.all(cellsOf(end).map((cell) => (cell ? detailsOf(cell) : null)))));
  if (turn !== cards.shows) return;
  if (text) {
    nodes = part.map((end, at) => card(end, details[at], start + at));
    byId("pairs").replaceChildren(...nodes);
  }
  part.forEach((end, at) => {
    const cells = cellsOf(end);
    const ends = [...new Set([0, cells.length - 1])].filter((index) => cells[index]);
    const notes = noteLines(ends.map((index) => cells[index]), ends.map((index) => details[at][index]), false);
    if (notes.length) nodes[at].querySelector(".scores").after(el("div", { class: "notes" }, ...notes));
  });
}

function countCards(start, length, pages, page) {
  const total = cards.shown.length;
  const kind = state.phase === "train" || state.a === state.b ? itemWord() : "pair";
  byId("count").textContent = total
    ? `${plural(total, kind)}${pages > 1 ? `, showing ${start + 1} to ${start + length}` : ""}`
    : "Nothing matches. Shorten the search or remove a filter.";
  const turn = (text, step) => button(text, () => turnPage(step), { disabled: page + step < 1 || page + step > pages });
  byId("pages").replaceChildren(...(pages > 1
    ? [turn("Previous", -1), el("span", {}, `Page ${page} of ${pages}`), turn("Next", 1)] : []));
}

function turnPage(step) {
  const pages = Math.max(1, Math.ceil(cards.shown.length / PAGE));
  const page = Math.min(pages, Math.max(1, Number(state.p) + step));
  if (String(page) === state.p) return;
  state.p = String(page);
  remember();
  drawCards((cards.shows += 1));
  byId("view-pictures").scrollIntoView();
}
