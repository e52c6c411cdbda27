
// The form over the cards. Every choice goes into the state, and from there into the address.
function choose(label, options, key, index = null) {
  const value = index === null ? state[key] : state[key][index];
  const input = el("select", {}, ...options.map(([option, text]) =>
    el("option", { value: option, selected: String(option) === String(value) }, text)));
  input.addEventListener("change", () => {
    if (index === null) state[key] = input.value;
    else state[key][index] = input.value;
    changed(["phase", "view"].includes(key));
  });
  return el("label", {}, el("span", {}, label), input);
}

let typing = null;

function entry(label, key, attributes) {
  const input = el("input", { autocomplete: "off", value: state[key], ...attributes });
  input.addEventListener("input", () => {
    state[key] = input.value;
    clearTimeout(typing);
    typing = setTimeout(() => changed(false), 120);
  });
  return el("label", { class: attributes.type === "search" ? "grow" : "narrow" }, el("span", {}, label), input);
}

function changed(redraw) {
  settleReward();
  nameBounds();
  state.p = "1";
  remember();
  if (redraw) drawControls();
  guarded(showCards());
}

// Whether a value is short and for people to read, not a structure for a reward.
const plainWord = (value) => value.length <= 40 && !/^[[{]/.test(value);

function columnChoices() {
  return store.site.columns.map((name, index) => {
    const values = [...new Set(store.pairs.flatMap((file) => file.columns.map((row) => row[index])))].filter((value) => value !== null);
    if (!values.every(plainWord) || values.length < 2 || values.length > 60) return null;
    return choose(name, [["", "all"], ...values.sort(collator.compare).map((value) => [value, value])], "columns", index);
  });
}

function sortChoices() {
  const two = state.phase === "eval";
  const several = rewardsOf(state.phase).length > 1;
  return [
    two && ["gain", "largest gain"], two && ["loss", "largest loss"],
    two && several && ["cheating", "likely cheats"],
    ["high", two ? "highest after" : "highest"], ["low", two ? "lowest after" : "lowest"],
    two && ["start", "highest before"], ["prompt", "prompt"], ["seed", "seed"], !two && ["iteration", "iteration"],
    ...store.site.columns.map((name, at) => [`c.${at}`, `column ${name}`]), ["file", "order of the file"],
  ].filter(Boolean);
}

function drawControls() {
  const { text, runs } = store.site;
  const rewards = rewardsOf(state.phase);
  const two = state.phase === "eval";
  const phases = [["eval", "held-out"], ["train", "training"]].filter(([phase]) => setsOf(phase).length);
  const sources = setsOf(state.phase).map((info) => [sourceKey(info), sourceName(info)]);
  const seeds = [...new Set(store.pairs.flatMap((file) => file.pairs.filter(([, , trained]) => Boolean(trained) !== two).map(([, seed]) => seed)))];
  if (!seeds.includes(state.seed)) state.seed = "";
  const views = [["side", "side by side"], !text && ["slider", "slider"], !text && ["blink", "blink"],
    runs.length > 1 && ["runs", "every run"], setsOf("eval").length > 2 && ["training", "through training"]].filter(Boolean);
  const places = text ? "prompt, completion or notes" : "prompt or notes";
  byId("controls").replaceChildren(...[
    entry("Search", "q", { type: "search", placeholder: places, id: "search" }),
    phases.length > 1 ? choose("Samples", phases, "phase") : null,
    two && sources.length > 1 ? choose("Before", sources, "a") : null,
    two && sources.length > 1 ? choose("After", sources, "b") : null,
    !two && sources.length > 1 ? choose("Iteration", [["", "all"], ...sources], "at") : null,
    two && views.length > 1 && sources.length > 1 ? choose("View", views, "view") : null,
    two && state.view === "blink" ? blinkButton() : null,
    rewards.length > 1 ? choose("Reward", rewards.map((name) => [name, name]), "reward") : null,
    two && rewards.length > 1 ? choose("Guard", [["", "any other"], ...rewards.map((name) => [name, name])], "guard") : null,
    choose("Sort", sortChoices(), "sort"),
    two && sources.length > 1 ? choose("Show", [["all", "all pairs"], ["gained", "gained"], ["lost", "lost"], ["same", "unchanged"],
      ...(rewards.length > 1 ? [["cheating", "gained while a guard fell"]] : [])], "show") : null,
    ...columnChoices(),
    seeds.length > 1 && seeds.length <= 200 ? choose("Seed", [["", "all"], ...seeds.sort(collator.compare).map((seed) => [seed, seed])], "seed") : null,
    choose("Mine", [["", "all"], ["starred", "favourites"], ["noted", "with my note"]], "mine"),
    rewards.length ? entry("", "min", { inputmode: "decimal", placeholder: "lowest", "data-bound": "from" }) : null,
    rewards.length ? entry("", "max", { inputmode: "decimal", placeholder: "highest", "data-bound": "to" }) : null,
  ].filter(Boolean));
  nameBounds();
}

// The two fields that bound a score say which score it is: the score of the samples that "After" names.
function nameBounds() {
  for (const input of document.querySelectorAll("#controls [data-bound]")) {
    const label = input.closest("label");
    const text = `${state.reward} ${input.dataset.bound}`;
    label.querySelector("span").textContent = text;
    label.title = `${input.dataset.bound === "from" ? "Only samples with at least this score" : "Only samples with at most this score"}: ${state.reward}`;
  }
}

function blinkButton() {
  const toggle = button(blinking ? "Stop" : "Blink", () => {
    blinkAll(!blinking);
    toggle.textContent = blinking ? "Stop" : "Blink";
  });
  return el("div", { class: "field" }, el("span", {}, "All at once"), toggle);
}
