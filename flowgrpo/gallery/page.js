
function fault(error) {
  byId("fault").hidden = false;
  byId("fault").textContent = error.message;
}

const guarded = (promise) => promise.catch(fault);

const itemWord = () => (store.site.text ? "completion" : store.site.video ? "video" : store.site.sound ? "sound" : "image");

function drawHead() {
  const { runs, sets } = store.site;
  const names = runs.map((_, run) => runName(run));
  document.title = `${names.join(", ")} · flowgrpo gallery`;
  byId("name").textContent = names.join(" · ");
  const facts = runs.flatMap((run) => run.facts.map(([key, value]) => `${key} ${value}`));
  facts.push(plural(sets.reduce((sum, set) => sum + set.count, 0), itemWord()));
  const last = Math.max(...sets.map((set) => set.iteration));
  facts.push(`to iteration ${last}`);
  facts.push(...runs.filter((run) => run.done && run.done[0] < run.done[1]).map((run) => `${run.done[0]} of ${run.done[1]} iterations done`));
  const skipped = runs.reduce((sum, run) => sum + run.skipped, 0);
  if (skipped) facts.push(`${plural(skipped, "unreadable line")} of the logs left out`);
  const unreadable = runs.reduce((sum, run) => sum + run.unreadable, 0);
  if (unreadable) facts.push(plural(unreadable, "unreadable image"));
  byId("facts").replaceChildren(...[...new Set(facts)].map((fact) => el("span", {}, fact)));
  byId("recipe").replaceChildren(el("summary", {}, runs.length > 1 ? "Recipes" : "Recipe"),
    ...runs.flatMap((run, at) => [runs.length > 1 ? el("h2", {}, names[at]) : null, el("pre", { tabindex: 0 }, run.config)].filter(Boolean)));
}

function balance(row) {
  const same = row.pairs - row.gained - row.lost;
  const text = `${row.gained} gained, ${same} unchanged, ${row.lost} lost`;
  const bar = el("span", { class: "balance", role: "img", "aria-label": text });
  for (const [kind, count] of [["gained", row.gained], ["same", same], ["lost", row.lost]]) {
    if (!count) continue;
    const part = el("span", { class: `fill ${kind}` });
    part.style.flexGrow = count;
    bar.append(part);
  }
  return el("td", { class: "wide" }, bar, el("span", { class: "muted small" }, text));
}

// Which weights a run has left, if they are not those of its last evaluation.
function leftBy(run, at, several) {
  const { result } = run.remake;
  const evaluated = store.site.sets.filter((set) => set.run === at && set.phase === "eval").map((set) => set.iteration);
  if (result === null || !evaluated.length || result === Math.max(...evaluated)) return null;
  return el("p", { class: "muted small" }, `${several ? `${runName(at)}: t` : "T"}he weights that the run left are those of `
    + `${moment({ phase: "eval", iteration: result })}, its best evaluation.`);
}

// How training changed the held-out rewards of each run.
function summaries() {
  const item = itemWord();
  const found = store.site.runs.flatMap((run, at) => run.summary.map((row) => [at, row]));
  const evaluated = setsOf("eval").map((info) => info.iteration);
  if (!found.length || Math.max(...evaluated) === Math.min(...evaluated)) {
    return el("p", { class: "muted" }, "One evaluation so far. After the next one this page shows what training changed.");
  }
  const whole = found.some(([, row]) => row.whole);
  const several = store.site.runs.length > 1;
  const heads = ["Reward", "first", "last", "Gain", `${item} by ${item}`, whole ? "Whole evaluation" : null];
  const rows = found.map(([run, row]) => {
    const gain = row.after - row.before;
    const error = row.error === null ? null : el("span", { class: "muted small" }, ` ± ${number(row.error)}`);
    const about = [several ? runName(run) : null, plural(row.prompts, "prompt")].filter(Boolean).join(", ");
    return el("tr", {}, el("th", { scope: "row" }, row.reward, el("span", { class: "muted small block" }, about)),
      el("td", { class: "figure" }, number(row.before)), el("td", { class: "figure" }, number(row.after)),
      el("td", { class: "figure" }, el("span", { class: direction(gain) }, signed(gain)), error), balance(row),
      whole ? el("td", {}, row.whole ? `${number(row.whole[0])} → ${number(row.whole[1])}` : "–") : null);
  });
  return el("section", {}, el("h2", { id: "summary-title" }, "Held-out rewards"),
    el("div", { class: "scroll", tabindex: 0, role: "region", "aria-labelledby": "summary-title" },
      el("table", { class: "summary" }, el("thead", {}, el("tr", {}, ...heads.filter(Boolean).map((text) => el("th", { scope: "col" }, text)))),
        el("tbody", {}, ...rows))),
    ...store.site.runs.map((run, at) => leftBy(run, at, several)).filter(Boolean),
    el("p", { class: "muted small" }, `From the first to the last evaluation, paired by prompt and seed; ± is one standard error over prompts.`,
      whole ? ` The whole evaluation may cover more ${item}s than were saved.` : ""));
}

async function showPage() {
  for (const page of ["pictures", "results"]) {
    byId(`view-${page}`).hidden = state.page !== page;
    byId(`to-${page}`).toggleAttribute("aria-current", state.page === page);
    if (state.page === page) byId(`to-${page}`).setAttribute("aria-current", "page");
  }
  byId("peek").hidden = true;
  document.body.classList.toggle("text", store.site.text);
  byId("to-pictures").textContent = store.site.text ? "Completions" : store.site.sound ? "Sounds" : "Pictures";
  if (state.page === "pictures") {
    drawControls();
    drawMarkTools();
    await showCards();
  } else await showResults();
  if (state.open) await drawPicture();
  else if (byId("picture").open) byId("picture").close();
}

function go(page) {
  state.page = page;
  remember(true);
  guarded(showPage());
}

// While a run goes on, its page asks for the list of files every few seconds, and draws again what has changed.
async function live() {
  let failures = 0;
  while (store.site.live && failures < 20) {
    byId("live").hidden = false;
    await new Promise((resolve) => { setTimeout(resolve, 4000); });
    try {
      const next = await readScript("site", Date.now());
      failures = 0;
      if (JSON.stringify(next.files) === JSON.stringify(store.site.files) && next.live) continue;
      const newest = state.b === defaults().b;
      await adopt(next);
      if (newest) state.b = defaults().b;
      drawHead();
      await redraw();
    } catch {
      failures += 1; // a file may be missing for the moment in which it is replaced
    }
  }
  byId("live").hidden = true;
}

// Draws the page again, but leaves an open picture alone and keeps the cursor in the search field.
async function redraw() {
  const typed = document.activeElement?.id === "search";
  store.stale = byId("picture").open; // until it is closed
  if (store.stale) return;
  await showPage();
  if (typed) byId("search").focus();
}

function theme(next) {
  if (next === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = next;
  byId("theme").textContent = { auto: "Theme: auto", light: "Theme: light", dark: "Theme: dark" }[next];
  try { localStorage.setItem("flowgrpo-theme", next); } catch { /* some browsers store nothing for a page from disk */ }
}

function chosenTheme() {
  try {
    const kept = localStorage.getItem("flowgrpo-theme");
    return ["auto", "light", "dark"].includes(kept) ? kept : "auto";
  } catch {
    return "auto";
  }
}

function keys(event) {
  const inside = event.target.closest?.("input, select, textarea, svg");
  if (event.ctrlKey || event.metaKey || event.altKey || (inside && event.key !== "Escape")) return;
  if (byId("picture").open) {
    const at = cards.shown.findIndex(([row]) => row.key === state.open);
    const next = cards.shown[at + ({ ArrowLeft: -1, ArrowRight: 1 }[event.key] ?? NaN)];
    if (at >= 0 && next) openPicture(next[0].key, false);
    else if (event.key === "b") flipAll();
    return;
  }
  if (event.key === "Escape") byId("peek").hidden = true;
  if (state.page !== "pictures") return;
  const titles = [...document.querySelectorAll("#pairs .prompt")];
  const here = titles.indexOf(document.activeElement);
  if (event.key === "/") byId("search").focus();
  else if (event.key === "j") titles[Math.min(titles.length - 1, here + 1)]?.focus();
  else if (event.key === "k") titles[Math.max(0, here - 1)]?.focus();
  else if (event.key === "n") turnPage(1);
  else if (event.key === "p") turnPage(-1);
  else if (event.key === "b") flipAll();
  else if (here >= 0 && event.key === "f") titles[here].closest(".pair").querySelector(".star").click();
  else if (here >= 0 && event.key === "x") titles[here].closest(".pair").querySelector(".pick").click();
  else return;
  event.preventDefault();
}

async function begin() {
  const site = await readScript("site", Date.now());
  if (byId("data-thumbs")) {
    const { images, videos, sounds } = await readScript("thumbs", "");
    [store.thumbs, store.clips, store.sounds] = [new Map(images), new Map(videos), new Map(sounds)];
  }
  await adopt(site);
  readAddress();
  drawHead();
  byId("loading").remove();
  await showPage();
  document.documentElement.dataset.ready = "yes";
  guarded(live());
}

theme(chosenTheme());
byId("theme").addEventListener("click", () => theme({ auto: "light", light: "dark", dark: "auto" }[chosenTheme()]));
for (const page of ["pictures", "results"]) {
  byId(`to-${page}`).addEventListener("click", (event) => {
    event.preventDefault();
    go(page);
  });
}
window.addEventListener("storage", () => {
  readMarks();
  refreshMarks();
});
byId("controls").addEventListener("submit", (event) => event.preventDefault());
byId("picture").addEventListener("click", (event) => event.target === byId("picture") && closePicture());
byId("picture").addEventListener("close", () => closePicture());
document.addEventListener("keydown", keys);
const moved = () => {
  const shown = store.site && address();
  if (!shown || shown === location.hash) return;
  readAddress();
  if (address() !== shown) guarded(showPage());
};
// What sticks to the top must not hide a card that gets the focus.
new ResizeObserver(() => document.documentElement.style.setProperty("--bar", `${byId("controls").offsetHeight + 14}px`))
  .observe(byId("controls"));
window.addEventListener("hashchange", moved);
window.addEventListener("popstate", moved);
guarded(begin());
