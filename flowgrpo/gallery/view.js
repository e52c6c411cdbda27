
// The state of the view. All of it is in the address, so that every view has a link.
const PLAIN = { page: "pictures", phase: "eval", view: "side", sort: "gain", show: "all", q: "", guard: "", seed: "",
  min: "", max: "", mine: "", p: "1", open: "", at: "", axis: "iteration" };
const state = { ...PLAIN, a: "", b: "", reward: "", columns: [] };

const sourceKey = (info) => `${info.run}.${info.iteration}`;

function sourceOf(key, phase) {
  return setsOf(phase).find((info) => sourceKey(info) === key);
}

function defaults() {
  const evaluated = setsOf("eval");
  const phase = evaluated.length ? "eval" : "train";
  const sets = setsOf(phase);
  const first = sets[0];
  const last = sets.filter((set) => set.run === (store.site.runs.length > 1 ? store.site.runs.length - 1 : 0)).pop() ?? first;
  return { phase, a: sourceKey(first), b: sourceKey(last), reward: rewardsOf(phase)[0] ?? "",
    sort: sourceKey(first) === sourceKey(last) || phase === "train" ? "high" : "gain" };
}

function readAddress() {
  const [, page, query] = /^#?\/?([a-z]*)\??(.*)$/s.exec(location.hash) ?? [];
  const given = new URLSearchParams(query ?? "");
  Object.assign(state, PLAIN, defaults());
  for (const key of ["phase", "view", "sort", "show", "q", "guard", "seed", "min", "max", "mine", "p", "open", "at", "axis", "a", "b", "reward"]) {
    if (given.has(key)) state[key] = given.get(key);
  }
  state.page = page === "results" ? "results" : "pictures";
  if (!setsOf(state.phase).length) state.phase = defaults().phase;
  settleReward();
  if (state.phase === "eval") {
    const plain = defaults();
    for (const end of ["a", "b"]) if (!sourceOf(state[end], "eval")) state[end] = plain[end];
  }
  state.columns = store.site.columns.map((name) => given.get(`c.${name}`) ?? "");
}

// Keeps the chosen reward if samples of the phase have it, and else takes their first reward.
function settleReward() {
  const known = rewardsOf(state.phase);
  if (!known.includes(state.reward)) state.reward = known[0] ?? "";
}

function address() {
  const plain = { ...PLAIN, ...defaults() };
  const query = new URLSearchParams();
  for (const [key, value] of Object.entries(state)) {
    if (key === "page" || key === "columns") continue;
    if (String(value) !== String(plain[key])) query.set(key, value);
  }
  state.columns.forEach((value, at) => value && query.set(`c.${store.site.columns[at]}`, value));
  const text = query.toString();
  return `#${state.page}${text ? `?${text}` : ""}`;
}

// Writes the view into the address. With `back`, the view gets a place in the browser's history. Each place holds how
// many places of opened pictures end with it.
function remember(back = false, pictures = back ? null : history.state) {
  const next = address();
  if (next === location.hash) return;
  history[back ? "pushState" : "replaceState"](pictures, "", next);
}
