
// The view of one prompt and seed, with everything that is known about its samples.
function rowOf(key) {
  const [run, pair, iteration] = key.split(".").map(Number);
  if (!store.pairs[run]?.pairs[pair]) return null;
  if (iteration === undefined) return evaluationRows().find((row) => row.where[run] === pair) ?? null;
  const where = [];
  where[run] = pair;
  return { ...described(run, pair), key, where, iteration };
}

function openPicture(key, back = true) {
  const pictures = state.open ? history.state ?? 0 : 0;
  state.open = key;
  remember(back, back ? pictures + 1 : history.state);
  guarded(drawPicture());
}

const promptText = (row) => (row.prompt.trim() ? row.prompt : "(empty prompt)");

function closePicture() {
  if (!state.open) return;
  const at = cards.shown.findIndex(([row]) => row.key === state.open);
  state.open = "";
  // The places of opened pictures in the browser's history are taken back.
  if (history.state) history.go(-history.state);
  else remember();
  const dialog = byId("picture");
  if (dialog.open) dialog.close();
  const title = at < 0 ? null : byId("pairs").querySelector(`[data-at="${at}"]`);
  if (title && state.page === "pictures") title.focus();
  if (store.stale) guarded(redraw());
}

// All samples of a row: one from each evaluation of each run, or a single sample of a training iteration.
async function shotsOf(row) {
  const infos = store.site.sets.filter((info) => row.where[info.run] !== undefined
    && (row.iteration === undefined ? info.phase === "eval" : info.phase === "train" && info.iteration === row.iteration));
  const sets = await Promise.all(infos.map((info) => loadSet(info.file)));
  return sets.map((set) => cellOf({ where: row.where }, set)).filter(Boolean);
}

async function drawPicture() {
  const row = rowOf(state.open);
  if (!row) return closePicture();
  const key = state.open;
  const cells = await shotsOf(row);
  const details = await Promise.all(cells.map(detailsOf));
  if (state.open !== key || !cells.length) return undefined;
  const chosen = row.iteration === undefined ? [state.a, state.b] : [];
  const at = chosen.map((source) => cells.findIndex((cell) => sourceKey(cell.set) === source)).filter((index) => index >= 0);
  const ends = [...new Set(at.length ? at : [cells.length - 1])];
  const last = cells[ends[ends.length - 1]];
  const own = details[ends[ends.length - 1]];
  const neighbours = await groupOf(row, last);
  if (state.open !== key) return undefined;
  const about = store.site.columns.map((name, index) => [name, row.columns[index]]).filter(([, value]) => value !== null);
  about.push(["prompt", row.id], ["seed", row.seed]);
  const body = store.site.text
    ? el("div", { class: ends.length === 1 ? "frames one" : "frames" }, ...ends.map((index, place) =>
      passage(cells[index], place, ends.map((end) => details[end]), 20000, null, true)))
    : pictures(row, ends.map((index) => cells[index]), ends.map((index) => details[index].image));
  const parts = ends.length ? partRows(ends.map((index) => details[index])) : [];
  const dialog = byId("picture");
  const pressed = dialog.open ? document.activeElement?.textContent : null;
  dialog.replaceChildren(...[
    pictureBar(row),
    el("h2", { id: "picture-title" }, promptText(row)),
    row.messages.length ? section("Conversation", turnsOf(row.messages, 6000)) : null,
    promptPictures(row, true),
    el("dl", { class: "columns" }, ...about.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)])),
    el("div", { class: "large" }, body),
    section("Rewards", scoreTable(ends.length > 1 ? cells[ends[0]] : null, last, parts)),
    section("Your note", noteField(row, true)),
    section("Notes", ...noteLines(ends.map((index) => cells[index]), ends.map((index) => details[index]), true)),
    cells.length > 1 ? section("Through training", historyChart(cells), strip(row, cells, details)) : null,
    neighbours.length > 1 ? section(`The ${neighbours.length} samples of this prompt`, groupStrip(neighbours)) : null,
    treeSection(neighbours),
    section("Make it again", remakeLines(row, last, own)),
  ].filter(Boolean));
  if (!dialog.open) dialog.showModal();
  dialog.scrollTop = 0;
  const places = [...dialog.querySelectorAll(".bar button:enabled")];
  const steps = places.filter((place) => ["Previous", "Next"].includes(place.textContent));
  const again = ["Previous", "Next"].includes(pressed) ? steps.find((place) => place.textContent === pressed) ?? steps[0] : null;
  (again ?? dialog.querySelector(".close")).focus();
  return undefined;
}

function section(title, ...children) {
  const kept = children.filter(Boolean);
  return kept.length ? el("section", {}, el("h3", {}, title), ...kept) : null;
}

function pictureBar(row) {
  const at = cards.shown.findIndex(([other]) => other.key === row.key);
  const step = (text, to) => button(text, () => openPicture(cards.shown[to][0].key, false), { disabled: at < 0 || !cards.shown[to] });
  const link = el("a", { href: address() }, "Link to this view");
  return el("div", { class: "bar" }, step("Previous", at - 1), step("Next", at + 1), starButton(row), link,
    button("Close", closePicture, { class: "close" }));
}

function partRows(details) {
  const known = [...new Set(details.flatMap((found) => found.parts.map(([name]) => name)))];
  return known.map((name) => {
    const values = details.map((found) => found.parts.find(([other]) => other === name)?.[1] ?? null);
    const gain = values.length > 1 && !values.includes(null) ? values[values.length - 1] - values[0] : null;
    return el("tr", { class: "part" }, el("th", { scope: "row" }, name), ...values.map((value) => el("td", {}, number(value))),
      values.length > 1 ? el("td", { class: direction(gain) }, gain === null || direction(gain) === "same" ? "" : signed(gain)) : null);
  });
}

function historyChart(cells) {
  const runs = [...new Set(cells.map((cell) => cell.set.run))];
  const series = runs.map((run) => {
    const own = cells.filter((cell) => cell.set.run === run);
    return { label: runName(run), run, dots: true, xs: own.map((cell) => cell.set.iteration),
      values: own.map((cell) => scoreOf(cell, rewardIndex())) };
  }).filter((one) => one.values.some((value) => value !== null));
  return series.length && store.site.rewards.length ? chart(`${state.reward} by iteration`, series, {}) : null;
}

function strip(row, cells, details) {
  return el("div", { class: "strip" }, ...cells.map((cell, at) => (store.site.text
    ? passage(cell, 0, [details[at]], 2000)
    : el("figure", {}, el("span", { class: videoOf(cell) ? "frame moving" : frameOf(cell) }, picture(row, cell, null, true)), heard(row, cell), caption(cell)))));
}

// The samples of the same prompt in the same evaluation or iteration: [row, cell, details], best first.
async function groupOf(row, cell) {
  const file = store.pairs[cell.set.run];
  const prompt = file.pairs[cell.set.pairs[cell.at]][0];
  const found = cell.set.pairs.map((pair, at) => [pair, at]).filter(([pair]) => file.pairs[pair]?.[0] === prompt).slice(0, 200);
  const group = await Promise.all(found.map(async ([pair, at]) => {
    const other = { set: cell.set, at };
    const where = [];
    where[cell.set.run] = pair;
    const key = row.iteration === undefined ? `${cell.set.run}.${pair}` : `${cell.set.run}.${pair}.${row.iteration}`;
    const same = pair === cell.set.pairs[cell.at];
    return { row: { ...described(cell.set.run, pair), key, where }, cell: other, details: await detailsOf(other), same };
  }));
  return group.sort((a, b) => (scoreOf(b.cell, rewardIndex()) ?? -Infinity) - (scoreOf(a.cell, rewardIndex()) ?? -Infinity));
}

function groupStrip(group) {
  return el("div", { class: "strip" }, ...group.map((one) => {
    const label = el("figcaption", {}, el("span", {}, `seed ${one.row.seed}`), el("span", {}, number(scoreOf(one.cell, rewardIndex()))));
    if (store.site.text) {
      return el("figure", { class: one.same ? "own" : null }, label, folded([[one.details.completion ?? "", false]], 400),
        renderedImages(one.cell, one.details.rendered, () => openPicture(one.row.key)));
    }
    const frame = button(picture(one.row, one.cell), () => openPicture(one.row.key), { class: frameOf(one.cell), "aria-current": one.same || null });
    return el("figure", { class: one.same ? "own" : null }, frame, heard(one.row, one.cell), label);
  }));
}

const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

// The path on this machine of a folder that a page from disk knows by a relative address; null for a page of a server.
function pathOf(place) {
  if (location.protocol !== "file:" || !place) return null;
  try {
    const path = decodeURIComponent(new URL(place, location.href).pathname).replace(/(.)\/$/, "$1");
    return /^\/[A-Za-z]:/.test(path) ? path.slice(1) : path;
  } catch {
    return null;
  }
}

// The files of the pictures of a prompt, as the recipe's directory sees them: the column has a path, or a list as JSON.
function picturePaths(row) {
  const value = row.pictures.length ? row.columns[store.site.columns.indexOf("image")] : null;
  if (!value) return [];
  let paths = [value];
  if (value.startsWith("[")) {
    try {
      paths = JSON.parse(value).map(String);
    } catch { /* a path that begins with a bracket */ }
  }
  return paths.map((path) => path.replace(/[\u0000-\u001f\u007f]+/g, " "));
}

// A command line for the same model; its run holds the arguments of the call. A shell must not get control characters.
function remakeLines(row, cell, details) {
  const run = store.site.runs[cell.set.run];
  const { model, steps, evaluation_steps: evaluated, settings, result } = run.remake;
  const evaluation = cell.set.phase === "eval";
  const trained = evaluation && cell.set.iteration > 0;
  const evaluations = store.site.sets.filter((set) => set.run === cell.set.run && set.phase === "eval");
  const final = (result ?? Math.max(...evaluations.map((set) => set.iteration))) === cell.set.iteration;
  const clean = row.prompt.replace(/[\u0000-\u001f\u007f]+/g, " ");
  const facts = [["run", `${run.folder}, ${moment(cell.set)}`], ["model", model],
    ["denoising steps", store.site.text ? null : evaluation ? evaluated : steps],
    ["seed of the noise", details.noise ?? null], ...settings].filter(([, value]) => value !== null && value !== undefined);
  const again = evaluation && details.noise;
  const options = `${trained ? "" : " --base"}${evaluation || !steps ? "" : ` --steps ${steps}`}${again ? ` --noise ${details.noise}` : ""}`;
  // Relative paths of a recipe start at the directory in which the run was started.
  const [place, start] = [pathOf(run.remake.place), pathOf(run.remake.start)];
  const folder = quoted(place ?? run.folder);
  const begin = place && start ? `cd ${quoted(start)} && ` : "";
  // Completions of an evaluation have its temperature, and other completions the temperature of the run.
  const [, temperature] = evaluation ? /temperature ([\d.e+-]+)/.exec(String(new Map(settings).get("evaluation"))) ?? [] : [];
  const asked = store.site.text ? `${trained ? "" : " --base"}${temperature ? ` --temperature ${temperature}` : ""}` : options;
  const shown = picturePaths(row).map((path) => ` --image ${quoted(path)}`).join("");
  // A command line has room for one line of text, and the messages of a conversation have roles.
  const filed = row.messages.length || clean !== row.prompt;
  const command = `${begin}flowgrpo sample --model ${folder}${asked}${filed ? " --file prompt.jsonl" : `${shown} -- ${quoted(clean)}`}`;
  const keep = filed ? button("Save the prompt", () => save("prompt.jsonl", promptLines([row]), "application/jsonl")) : null;
  const kept = filed ? " Save the prompt as a file first, into the directory in which the command runs." : "";
  const where = place ? "" : ` Run the command in the directory that holds ${run.folder}.`;
  const left = result === null ? "the final weights of the run" : `the weights that the run left, of iteration ${result}`;
  const weights = trained ? `${left}${final ? "" : ", not the weights of this evaluation"}` : "the model before training";
  const exact = again && (final || !trained) ? ` On the same kind of device it gives exactly this ${itemWord()}, if one process evaluated the run.`
    : ` To get exactly this ${itemWord()}, repeat the run: it follows from the recipe, its seed and the iteration.`;
  const remark = store.site.text ? `This samples the prompt with ${weights}. To get the same completion, repeat the run: it follows from the recipe, its seed and the iteration.`
    : `This samples the prompt with ${weights}, from ${again ? "the same" : "other"} noise.${exact}`;
  return el("div", {}, el("dl", { class: "columns" }, ...facts.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, String(value))])),
    keep,
    el("pre", { class: "command", tabindex: 0 }, command), el("p", { class: "muted small" }, remark + where + kept));
}
