
// This page knows only the side of each sample. Only the server knows which set a sample is from.

const CHOICES = [
  ["left", "Left", "←", ["arrowleft"]],
  ["tie", "Tie", "t", ["t"]],
  ["right", "Right", "→", ["arrowright"]],
  ["skip", "Skip", "s", ["s"]],
];
const state = { at: null, progress: null, ready: false, results: false, turn: 0 };

async function ask(address, body = null) {
  const options = body === null ? {}
    : { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) };
  let [response, data] = [null, null];
  try {
    response = await fetch(address, options);
    data = await response.json();
  } catch {
    throw new Error("The command that serves this page has ended. Start it again with the same file to go on.");
  }
  if (!response.ok) throw new Error(data.error);
  return data;
}

function fault(error) {
  byId("fault").textContent = error === null ? "" : error.message;
  byId("fault").hidden = error === null;
}

// Only one request at a time: an action while another waits for its answer comes from a key that was pressed too soon.
function act(action) {
  return async (...words) => {
    const turn = (state.turn += 1);
    state.ready = false;
    enable();
    try {
      fault(null);
      await action(turn, ...words);
    } catch (error) {
      fault(error);
      if (turn === state.turn && state.at !== null) state.ready = true;
    }
    enable();
  };
}

function enable() {
  for (const node of document.querySelectorAll("[data-choice]")) {
    node.disabled = !state.ready || (node.dataset.needs === "both" && byId("sides").dataset.missing === "yes");
  }
  byId("back").disabled = !state.ready || state.at === 0;
}

// The image of a side once it is loaded, or a message if it cannot be shown.
async function picture(address, side) {
  return await loaded(address, `${side} picture`) ?? lost("image");
}

// An image once it is loaded, or null if it cannot be shown.
async function loaded(address, alt) {
  const image = el("img", { alt, draggable: "false" });
  image.src = address;
  try {
    await image.decode();
  } catch {
    return null;
  }
  image.classList.toggle("pixels", image.naturalWidth <= 160);
  return image;
}

// The video of a side once its first frame is there. It is fetched whole, so that it can start again without a request.
async function film(address, side) {
  try {
    const answer = await fetch(address);
    if (!answer.ok) throw new Error("the server has no video");
    const source = URL.createObjectURL(await answer.blob());
    const video = player(source, null, `${side} video`, false, () => lost("video"));
    await new Promise((done, fail) => {
      video.addEventListener("loadeddata", done);
      video.addEventListener("error", fail);
      video.preload = "auto";
    });
    for (const event of ["play", "pause"]) video.addEventListener(event, showMotion);
    return video;
  } catch {
    return lost("video");
  }
}

function lost(kind) {
  byId("sides").dataset.missing = "yes";
  return el("span", { class: "absent" }, `the ${kind} cannot be shown; skip this pair`);
}

const films = () => [...byId("sides").querySelectorAll("video")];

function showMotion() {
  byId("motion").hidden = films().length === 0;
  byId("motion").firstChild.data = films().every((video) => video.paused) ? "Play" : "Pause";
}

// Starts the two videos of a pair together, each from its beginning, or stops both.
function toggleMotion() {
  const shown = films();
  const still = shown.every((video) => video.paused);
  for (const video of shown) {
    if (still) video.play().catch(() => null);
    else video.pause();
  }
}

function showSides(figures) {
  for (const video of films()) {
    watched.unobserve(video);
    URL.revokeObjectURL(video.src);
  }
  byId("sides").replaceChildren(...figures);
  const shown = films();
  if (shown.length === 2) inStep(...shown);
  for (const video of shown) watched.observe(video);
  showMotion();
}

async function figure(pair, side, name) {
  const chosen = pair.choice === side ? "chosen" : null;
  if (pair[side].completion !== undefined) {
    const text = folded([[pair[side].completion, false]], 6000);
    text.dir = "auto";
    const made = await Promise.all(pair[side].rendered.map((address) => loaded(address, `An image of the ${name.toLowerCase()} completion`)));
    const images = made.map((image) => image ?? el("span", { class: "absent" }, "the image cannot be shown"));
    return el("figure", { class: chosen, "aria-label": name }, el("figcaption", {}, name), text,
      images.length ? el("div", { class: "made whole" }, ...images) : null);
  }
  const shown = pair[side].video ? await film(pair[side].video, name) : await picture(pair[side].picture, name);
  const frame = button("", () => choose(side), { class: "frame", tabindex: -1, "data-choice": side, "data-needs": "both" });
  frame.append(shown);
  return el("figure", { class: chosen }, frame);
}

const show = act(showNumber);

async function showNumber(turn, number) {
  const pair = await ask(`pairs/${number}`);
  byId("sides").dataset.missing = "no";
  const figures = await Promise.all([figure(pair, "left", "Left"), figure(pair, "right", "Right")]);
  const given = await Promise.all(pair.pictures.map((address) => loaded(address, "Picture of the prompt")));
  if (turn !== state.turn) return;
  state.at = number;
  document.body.classList.toggle("text", pair.left.completion !== undefined);
  const talk = pair.messages.length > 0;
  byId("prompt").textContent = pair.prompt;
  byId("prompt").hidden = talk;
  byId("turns").hidden = !talk;
  byId("turns").replaceChildren(...(talk ? [turnsOf(pair.messages, 800)] : []));
  byId("given").hidden = !given.length;
  byId("given").replaceChildren(...given.map((image) => image ?? el("span", { class: "absent" }, "the picture of the prompt cannot be shown")));
  showSides(figures);
  for (const node of byId("choices").querySelectorAll("[data-choice]")) {
    node.setAttribute("aria-pressed", String(node.dataset.choice === pair.choice));
  }
  byId("ballot").hidden = false;
  byId("results").hidden = true;
  state.results = false;
  count();
  state.ready = true;
  // A screen reader reads the new prompt. If the focus stayed on a button, the space bar would choose again.
  byId(talk ? "turns" : "prompt").focus({ preventScroll: true });
  byId("turns").scrollTop = byId("turns").scrollHeight; // the last message is the one that is answered
  if (state.at + 1 < state.progress.total && pair.left.completion === undefined) {
    for (const side of ["left", "right"]) {
      // The next sample may be a video where this one is a picture, if the runs differ; then it is fetched later.
      if (pair[side].video) fetch(`videos/${state.at + 1}/${side}`).then((answer) => answer.blob()).catch(() => null);
      else new Image().src = `pictures/${state.at + 1}/${side}`;
    }
  }
}

function count() {
  const { total, voted, same } = state.progress;
  const equal = same ? `, ${same} more without a difference` : "";
  const place = state.results || state.at === null ? "" : `pair ${state.at + 1} · `;
  byId("count").textContent = `${place}${voted} of ${plural(total, "pair")} done${equal}`;
  byId("done").style.width = `${(100 * voted) / total}%`;
  byId("switch").hidden = state.results && state.progress.next === null;
  byId("switch").textContent = state.results ? "Go on voting" : "Results so far";
}

const choose = act(async (turn, choice) => {
  state.progress = await ask("votes", { pair: state.at, choice });
  await goOn(turn);
});

function goOn(turn) {
  return state.progress.next === null ? showResults(turn) : showNumber(turn, state.progress.next);
}

const HEADS = ["preferred in", "95 % interval", "ties", "skipped"];
const percent = (value) => `${Math.round(100 * value)} %`;

function resultCells(tally) {
  const decided = tally.wins + tally.losses;
  const votes = decided + tally.ties;
  const [low, high] = tally.interval;
  const range = el("span", { class: "range", "aria-hidden": "true" });
  if (decided) {
    const [span, point] = [el("span", { class: "span" }), el("span", { class: "point" })];
    span.style.left = `${100 * low}%`;
    span.style.width = `${100 * (high - low)}%`;
    point.style.left = `${100 * tally.rate}%`;
    range.append(span, point);
  }
  const cells = [
    [decided ? `${percent(tally.rate)} of ${decided}` : "–"],
    [decided ? `${percent(low)} to ${percent(high)}` : "–", range],
    [votes ? `${tally.ties} of ${votes} (${percent(tally.ties / votes)})` : "–"],
    [String(tally.skipped)],
  ];
  return cells.map((cell, at) => el("td", { "data-head": HEADS[at] }, ...cell));
}

function resultTable(report) {
  const rows = [];
  for (const one of report.comparisons) {
    const names = [one.second, el("span", { class: "block muted small" }, `against ${one.first}`)];
    rows.push(el("tr", { class: "whole" }, el("th", { scope: "row" }, ...names), ...resultCells(one)));
    for (const part of one.parts) {
      const name = el("th", { scope: "row" }, `${part.column}: ${part.value}`);
      rows.push(el("tr", { class: "part" }, name, ...resultCells(part)));
    }
  }
  rows.push(el("tr", { class: "whole" }, el("th", { scope: "row" }, "Left", el("span", { class: "block muted small" },
    "against right")), ...resultCells(report.position)));
  const heads = ["", ...HEADS].map((text) => el("th", { scope: "col" }, text));
  return el("table", { class: "results-table" }, el("thead", {}, el("tr", {}, ...heads)), el("tbody", {}, ...rows));
}

async function showResults(turn) {
  const report = await ask("report");
  if (turn !== state.turn) return;
  const ended = state.progress.next === null;
  const parts = [el("h2", { id: "results-title" }, ended ? "All pairs are done" : "Results so far")];
  if (ended) parts.push(el("p", { class: "muted" }, "Every choice is saved. You can close this page and end the command."));
  const { wins, losses, ties, skipped } = report.position;
  if (wins + losses + ties + skipped) parts.push(el("div", { class: "scroll" }, resultTable(report)));
  else parts.push(el("p", {}, "No votes yet."));
  parts.push(...report.notes.map((note) => el("p", { class: "muted small" }, `${note}.`)));
  if (ended) parts.push(button("Back to the last pair", () => show(state.at ?? state.progress.total - 1)));
  byId("results").replaceChildren(...parts);
  byId("results").hidden = false;
  byId("ballot").hidden = true;
  state.results = true;
  count();
}

const toggle = act((turn) => (state.results ? goOn(turn) : showResults(turn)));

function pressed(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.repeat || state.results || !state.ready) return;
  const key = event.key.toLowerCase();
  const choice = CHOICES.find(([, , , keys]) => keys.includes(key));
  const node = choice ? byId("choices").querySelector(`[data-choice="${choice[0]}"]`)
    : key === "b" || key === "backspace" ? byId("back") : key === "p" ? byId("motion") : null;
  if (!node || node.hidden) return;
  event.preventDefault();
  node.click();
}

const start = act(async (turn) => {
  state.progress = await ask("progress");
  await goOn(turn);
});

byId("choices").append(
  ...CHOICES.map(([choice, text, sign]) => button(text, () => choose(choice), { "data-choice": choice, disabled: true,
    "data-needs": choice === "skip" ? "none" : "both" })),
  button("Back", () => show(state.at - 1), { id: "back", disabled: true }),
  button("Pause", toggleMotion, { id: "motion", hidden: true }),
);
[...CHOICES.map(([, , sign]) => sign), "b", "p"].forEach((sign, at) => {
  byId("choices").children[at].append(" ", el("kbd", { "aria-hidden": "true" }, sign));
});
byId("switch").addEventListener("click", () => toggle());
document.addEventListener("keydown", pressed);
start();
