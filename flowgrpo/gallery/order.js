
const rewardIndex = () => Math.max(0, store.site.rewards.indexOf(state.reward));
const guardIndex = () => store.site.rewards.indexOf(state.guard);

// The root mean square gain of each reward over these rows, to compare rewards of different scales.
function spreadsOf(ends) {
  return store.site.rewards.map((_, reward) => {
    const gains = ends.map(([before, after]) => gainOf(before, after, reward)).filter((gain) => gain !== null);
    return Math.sqrt(mean(gains.map((gain) => gain * gain)) ?? 0) || 1;
  });
}

// Sum of the reward's gain and the guard's fall, in units of their spreads; null unless one rose and the other fell.
function cheating(before, after, spreads) {
  const [chosen, guard] = [rewardIndex(), guardIndex()];
  const gain = gainOf(before, after, chosen);
  const falls = store.site.rewards.map((_, at) => (at === chosen || (guard >= 0 && at !== guard)
    ? null : gainOf(before, after, at))).map((fall, at) => (fall !== null && fall < -SAME ? -fall / spreads[at] : null));
  const fell = falls.filter((fall) => fall !== null);
  return gain === null || gain <= SAME || !fell.length ? null : gain / spreads[chosen] + Math.max(...fell);
}

const collator = new Intl.Collator(undefined, { numeric: true });

// [row, earlier cell, later cell] of the rows that pass the filters, in the chosen order.
function arranged(rows, earlier, later) {
  const ends = rows.map((row) => [row, cellOf(row, earlier), cellOf(row, row.only ?? later)])
    .filter(([row, before, after]) => after && (row.only || before));
  const spreads = spreadsOf(ends.map(([, before, after]) => [before, after]));
  const reward = rewardIndex();
  const [least, most] = [state.min, state.max].map((text) => (text.trim() === "" ? null : Number(text.replace(",", "."))));
  const kept = ends.filter(([row, before, after]) => {
    if (state.columns.some((value, at) => value && row.columns[at] !== value)) return false;
    if (state.seed && row.seed !== state.seed) return false;
    if (state.mine && !isMine(row)) return false;
    const [score, gain] = [scoreOf(after, reward), gainOf(before, after, reward)];
    if (least !== null && !(score >= least)) return false;
    if (most !== null && !(score !== null && score <= most)) return false;
    if (["gained", "lost", "same"].includes(state.show) && (gain === null || direction(gain) !== state.show)) return false;
    return state.show !== "cheating" || cheating(before, after, spreads) !== null;
  });
  return sorted(kept, spreads);
}

// The rows in which every word of the search occurs: in the prompt or its conversation, in the person's own note,
// or in the notes and completions (`written`).
function matching(ends, query, written) {
  const words = query.toLowerCase().split(/\s+/).filter(Boolean);
  return ends.filter(([row, before, after]) => {
    const texts = [before, after].filter(Boolean).map((cell) => written?.get(place(cell)) ?? "");
    const text = [row.prompt, ...row.messages.map(([, content]) => content), markOf(row).note, ...texts].join("\n").toLowerCase();
    return words.every((word) => text.includes(word));
  });
}

function sorted(ends, spreads) {
  const reward = rewardIndex();
  const minus = (value) => (value === null ? null : -value);
  const text = { prompt: (row) => row.prompt, seed: (row) => row.seed, iteration: (row) => String(row.only?.iteration ?? "") };
  const column = /^c\.(\d+)$/.exec(state.sort);
  const words = column ? (row) => row.columns[column[1]] ?? "" : text[state.sort];
  if (words) return ends.map((end) => [words(end[0]), end]).sort((a, b) => collator.compare(a[0], b[0])).map(([, end]) => end);
  const score = {
    gain: ([, before, after]) => gainOf(before, after, reward),
    loss: ([, before, after]) => minus(gainOf(before, after, reward)),
    high: ([, , after]) => scoreOf(after, reward),
    low: ([, , after]) => minus(scoreOf(after, reward)),
    start: ([, before]) => scoreOf(before, reward),
    cheating: ([, before, after]) => cheating(before, after, spreads),
  }[state.sort];
  if (!score) return ends;
  const keyed = ends.map((end) => [score(end) ?? -Infinity, end]);
  return keyed.sort((a, b) => (b[0] > a[0]) - (b[0] < a[0])).map(([, end]) => end);
}
