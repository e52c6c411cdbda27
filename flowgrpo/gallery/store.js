
// A page opened from disk may not fetch files, so data come as scripts that call this function with a name and JSON.
const waiting = new Map();
window.flowgrpoGallery = (name, text) => {
  const found = waiting.get(name);
  if (found) found(JSON.parse(text));
};

const store = { site: null, digests: new Map(), files: new Map(), sets: new Map(), pairs: [] };

function readScript(name, version) {
  const embedded = byId(`data-${name}`);
  if (embedded) return Promise.resolve(JSON.parse(embedded.textContent));
  return new Promise((resolve, reject) => {
    const tag = el("script", { src: `data/${encodeURIComponent(name)}.js?${version}` });
    const done = (settle) => (value) => {
      waiting.delete(name);
      tag.remove();
      settle(value);
    };
    waiting.set(name, done(resolve));
    tag.addEventListener("error", () => done(reject)(
      new Error(`data/${name}.js cannot be read. Keep all files of the gallery's folder together, or build the gallery again. `
        + "If the page comes from Jupyter, open one file instead: flowgrpo gallery RUN --single gallery.html")));
    document.head.append(tag);
  });
}

// A data file. It is read again only when its content has changed.
function readData(name) {
  const digest = store.digests.get(name);
  const known = store.files.get(name);
  if (known && known.digest === digest) return known.promise;
  const promise = readScript(name, digest);
  store.files.set(name, { digest, promise });
  promise.catch(() => store.files.delete(name));
  return promise;
}

// Takes over a newer list of files, and keeps the data of files that did not change.
async function adopt(site) {
  store.site = site;
  store.digests = new Map(site.files);
  for (const [name, set] of store.sets) if (store.digests.get(name) !== set.digest) store.sets.delete(name);
  store.pairs = await Promise.all(site.runs.map((run) => readData(`${run.key}-pairs`)));
  store.rows = null;
  readMarks();
}

// Scores and thumbnails of one evaluation, or of the training samples of one iteration.
async function loadSet(name) {
  if (store.sets.has(name)) return store.sets.get(name);
  const digest = store.digests.get(name);
  const data = await readData(name);
  const set = { ...data, name, digest, at: new Map(data.pairs.map((pair, at) => [pair, at])) };
  store.sets.set(name, set);
  return set;
}

const setsOf = (phase) => store.site.sets.filter((set) => set.phase === phase);
// The rewards of a phase's samples; training and evaluation may have different rewards.
const rewardsOf = (phase) => store.site.rewards.filter((_, at) => setsOf(phase).some((set) => set.scored.includes(at)));
const runName = (run) => {
  const { name, folder } = store.site.runs[run];
  return store.site.runs.filter((other) => other.name === name).length > 1 ? `${name} (${folder})` : name;
};

function moment(info) {
  return info.phase === "eval" && info.iteration === 0 ? "base" : `iteration ${info.iteration}`;
}

function sourceName(info) {
  return store.site.runs.length > 1 ? `${runName(info.run)}, ${moment(info)}` : moment(info);
}

// The prompts and seeds of all runs. Runs are matched by the prompt's text, pictures and conversation, because its
// number depends on the file.
function evaluationRows() {
  if (store.rows) return store.rows;
  const rows = new Map();
  store.pairs.forEach((file, run) => {
    const seen = new Map();
    file.pairs.forEach(([prompt, seed, phase], pair) => {
      if (phase) return;
      const place = JSON.stringify([file.prompts[prompt], file.pictures[prompt].map(([name]) => name), file.messages[prompt], seed]);
      const rank = seen.get(place) ?? 0;
      seen.set(place, rank + 1);
      const key = `${place} ${rank}`;
      if (!rows.has(key)) rows.set(key, { ...described(run, pair), key: `${run}.${pair}`, where: [] });
      rows.get(key).where[run] = pair;
    });
  });
  store.rows = [...rows.values()];
  return store.rows;
}

function described(run, pair) {
  const file = store.pairs[run];
  const [prompt, seed] = file.pairs[pair];
  const pictures = file.pictures[prompt].map(([name, thumb]) => ({ run, name, thumb }));
  return { prompt: file.prompts[prompt], messages: file.messages[prompt], pictures, id: file.ids[prompt], seed, columns: file.columns[prompt],
    typed: file.typed[prompt] };
}

// The training samples of the loaded sets, one row for each sample.
function trainingRows(sets) {
  return sets.flatMap((set) => set.pairs.filter((pair) => store.pairs[set.run].pairs[pair]).map((pair) => {
    const where = [];
    where[set.run] = pair;
    return { ...described(set.run, pair), key: `${set.run}.${pair}.${set.iteration}`, where, only: set };
  }));
}

// The sample of a row in a set, or null.
function cellOf(row, set) {
  const at = set && (!row.only || row.only === set) ? set.at.get(row.where[set.run]) : undefined;
  return at === undefined ? null : { set, at };
}

const scoreOf = (cell, reward) => (cell ? cell.set.rewards[reward]?.[cell.at] ?? null : null);

function gainOf(before, after, reward) {
  const [a, b] = [scoreOf(before, reward), scoreOf(after, reward)];
  return a === null || b === null ? null : b - a;
}

const thumbOf = (cell) => thumbNamed(cell.set.thumbs[cell.at]);

function thumbNamed(name) {
  if (!name) return null;
  if (store.thumbs) return `data:image/webp;base64,${store.thumbs.get(name)}`;
  return `thumbs/${name.slice(0, 2)}/${name.slice(2)}.webp`;
}

const videoOf = (cell) => clipNamed(cell.set.videos?.[cell.at]);

// The address of the sound of a sample; null if there is none. A gallery of one file may leave sounds out.
function soundOf(cell) {
  const name = cell.set.sounds?.[cell.at];
  if (!name) return null;
  if (!store.thumbs) return store.site.runs[cell.set.run].base + name;
  const content = store.sounds.get(`${cell.set.run}/${name}`);
  return content ? `data:audio/wav;base64,${content}` : null;
}

function clipNamed(name) {
  if (!name) return null;
  if (store.clips) return `data:video/webm;base64,${store.clips.get(name)}`;
  return `videos/${name.slice(0, 2)}/${name.slice(2)}.webm`;
}

// Sub-scores, notes, text and image file of a sample.
async function detailsOf(cell) {
  const part = Math.floor(cell.at / store.site.more);
  const file = await readData(`${cell.set.name}-${part}`);
  return file.details[cell.at - part * store.site.more] ?? { parts: [], notes: [] };
}
