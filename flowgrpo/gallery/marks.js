
// Favourites and notes of the person who looks. They are kept in this browser, under the identity of each run, and can
// be saved to a file and read back. A mark belongs to a prompt, a seed and a phase, not to a place in a gallery.
const MARKS = "flowgrpo-marks ";
const NONE = { star: false, note: "", time: "" };
const LARGEST_MARKS = 2e7; // bytes of a file of marks
const marks = { runs: new Map(), names: [], chosen: new Set(), lost: false };

const cleanMark = (mark) => ({ star: mark?.star === true, note: typeof mark?.note === "string" ? mark.note : "",
  time: typeof mark?.time === "string" ? mark.time : "" });

// The marks under an identity, by name; an entry that is none of ours is left out.
function storedMarks(id) {
  try {
    const found = JSON.parse(localStorage.getItem(MARKS + id) ?? "[]");
    return new Map(found.filter(([name]) => typeof name === "string").map(([name, mark]) => [name, cleanMark(mark)]));
  } catch {
    return null;
  }
}

function readMarks() {
  for (const { id } of store.site.runs) marks.runs.set(id, storedMarks(id) ?? marks.runs.get(id) ?? new Map());
  marks.names = store.pairs.map((file) => {
    const seen = new Map();
    return file.pairs.map(([prompt, seed, phase]) => {
      const place = JSON.stringify([phase, file.prompts[prompt], seed]);
      seen.set(place, (seen.get(place) ?? -1) + 1);
      return [phase, file.prompts[prompt], seed, seen.get(place)];
    });
  });
}

// [identity, name] of a row in each run that has it.
function placesOf(row) {
  const iteration = row.only?.iteration ?? row.iteration ?? null;
  return row.where.map((pair, run) => [store.site.runs[run].id, JSON.stringify([...marks.names[run][pair], iteration])])
    .filter(Boolean);
}

function markOf(row) {
  for (const [id, name] of placesOf(row)) {
    const mark = marks.runs.get(id)?.get(name);
    if (mark) return mark;
  }
  return NONE;
}

const isMine = (row) => (state.mine === "starred" ? markOf(row).star : markOf(row).note !== "");

// Writes one mark. What another tab has written in the meantime is read first, so that nothing of it is lost.
function writeMark(id, name, mark) {
  const own = storedMarks(id) ?? marks.runs.get(id) ?? new Map();
  if (mark.star || mark.note) own.set(name, mark);
  else own.delete(name);
  marks.runs.set(id, own);
  try {
    localStorage.setItem(MARKS + id, JSON.stringify([...own]));
  } catch {
    marks.lost = true;
  }
}

function setMark(row, change) {
  const mark = { ...markOf(row), ...change, time: new Date().toISOString() };
  for (const [id, name] of placesOf(row)) writeMark(id, name, mark);
  refreshMarks();
}

function refreshMarks() {
  for (const node of document.querySelectorAll("[data-mark]")) node.refresh();
  drawMarkTools();
}

// A node that draws itself again whenever a mark or a choice has changed.
function marked(node, refresh) {
  node.dataset.mark = "";
  node.refresh = refresh;
  refresh();
  return node;
}

function starButton(row) {
  const node = button("", () => setMark(row, { star: !markOf(row).star }), { class: "star", "aria-label": `Favourite: ${row.prompt}`, title: "Favourite" });
  return marked(node, () => {
    const { star } = markOf(row);
    node.textContent = star ? "★" : "☆";
    node.setAttribute("aria-pressed", String(star));
  });
}

function pickBox(row) {
  const input = el("input", { type: "checkbox", class: "pick", "aria-label": `Choose: ${row.prompt}`, title: "Choose" });
  input.addEventListener("change", () => {
    if (input.checked) marks.chosen.add(row.key);
    else marks.chosen.delete(row.key);
    drawChosen();
  });
  return marked(input, () => { input.checked = marks.chosen.has(row.key); });
}

// The person's note: a text that turns into a field when it is pressed. `open` shows the field at once.
function noteField(row, open = false) {
  const place = el("div", { class: "my-note" });
  let last = null;
  const field = () => {
    const input = el("textarea", { rows: 2, maxlength: 20000, placeholder: "A note of your own", "aria-label": `Your note: ${row.prompt}` });
    input.value = markOf(row).note;
    const keep = () => input.value !== markOf(row).note && setMark(row, { note: input.value });
    input.addEventListener("input", keep);
    input.addEventListener("blur", () => {
      keep();
      if (open) return;
      last = null;
      place.refresh();
    });
    return input;
  };
  const edit = () => {
    const input = field();
    place.replaceChildren(input);
    input.focus();
  };
  return marked(place, () => {
    const { note } = markOf(row);
    if (place.querySelector("textarea") === document.activeElement && document.activeElement) return;
    if (note === last) return;
    last = note;
    if (open) place.replaceChildren(field());
    else place.replaceChildren(button(note || "Add a note", edit, { class: note ? "own-note" : "own-note empty", title: "Your note" }));
  });
}

// The rows that are chosen, in the order of the cards; a row that a filter hides stays chosen.
function chosenRows() {
  const shown = cards.shown.map(([row]) => row).filter((row) => marks.chosen.has(row.key));
  const there = new Set(shown.map((row) => row.key));
  const hidden = [...marks.chosen].filter((key) => !there.has(key)).map(rowOf).filter(Boolean);
  return [...shown, ...hidden];
}

function drawChosen() {
  const rows = chosenRows();
  const bar = byId("chosen");
  bar.hidden = !rows.length;
  if (!rows.length) return;
  const said = el("span", { class: "muted small", role: "status" });
  const starred = rows.every((row) => markOf(row).star);
  const hidden = rows.length - cards.shown.filter(([row]) => marks.chosen.has(row.key)).length;
  bar.replaceChildren(...[
    el("strong", {}, `${rows.length} chosen${hidden ? `, ${hidden} of them hidden by the filters` : ""}`),
    button(starred ? "No favourites any more" : "Make favourites", () => {
      for (const row of rows) setMark(row, { star: !starred });
      drawChosen();
    }),
    rows.some((row) => row.messages.length) ? null : button("Copy prompts", async () => { said.textContent = await copy([...new Set(rows.map((row) => row.prompt))]); }),
    button("Save as a prompt file", () => save("chosen.jsonl", promptLines(rows), "application/jsonl")),
    button("Choose none", () => {
      marks.chosen.clear();
      refreshMarks();
      drawChosen();
    }), said].filter(Boolean));
}

async function copy(prompts) {
  const text = prompts.map((prompt) => prompt.replace(/\s*[\r\n]+\s*/g, " ")).join("\n");
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const field = el("textarea", { class: "unseen" });
    field.value = text;
    document.body.append(field);
    field.select();
    const done = document.execCommand("copy");
    field.remove();
    if (!done) return "this browser does not let the page copy; save a prompt file instead";
  }
  return `${plural(prompts.length, "prompt")} copied, one a line`;
}

// Lines of a prompt file: the prompt with its columns, then what the person has said about it.
function promptLines(rows) {
  return rows.map((row) => {
    // A column that was no text is JSON already, and stays as it is: a large number would be rounded here.
    const entries = store.site.columns.map((name, at) => [name, row.columns[at], row.typed.includes(at)])
      .filter(([, value]) => value !== null).map(([name, value, typed]) => [name, typed ? value : JSON.stringify(value)]);
    const { star, note } = markOf(row);
    const prompt = row.messages.length ? row.messages.map(([role, content]) => ({ role, content })) : row.prompt;
    const own = Object.entries({ prompt, seed: row.seed, favourite: star, my_note: note });
    const line = new Map([...entries, ...own.map(([name, value]) => [name, JSON.stringify(value)])]);
    return `{${[...line].map(([name, value]) => `${JSON.stringify(name)}: ${value}`).join(", ")}}\n`;
  }).join("");
}

function save(name, text, type) {
  const address = URL.createObjectURL(new Blob([text], { type }));
  const link = el("a", { href: address, download: name, hidden: true });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(address), 60000);
}

function marksFile() {
  const runs = store.site.runs.map(({ id, name, folder }) => ({ id, name, folder,
    marks: [...marks.runs.get(id)].map(([place, { star, note, time }]) => {
      const [phase, prompt, seed, sample, iteration] = JSON.parse(place);
      return { phase: phase ? "train" : "eval", prompt, seed, sample, iteration, favourite: star, note, time };
    }) }));
  return `${JSON.stringify({ flowgrpo: "marks", version: 1, runs }, null, 1)}\n`;
}

// Both marks in one: a favourite stays one, and two different notes are both kept, the newer one first.
function joined(a, b) {
  const [newer, older] = a.time >= b.time ? [a, b] : [b, a];
  const note = newer.note.includes(older.note) ? newer.note : older.note.includes(newer.note) ? older.note
    : `${newer.note}\n${older.note}`;
  return { star: a.star || b.star, note, time: newer.time };
}

// Adds the marks of a file to what is there. A run is known by its identity, else by its name.
function addMarks(text) {
  let file = null;
  try {
    file = JSON.parse(text);
  } catch { /* said below */ }
  if (file?.flowgrpo !== "marks" || !Array.isArray(file.runs)) {
    throw new Error("This is no file of favourites and notes. Choose a file that “Save to a file” has written.");
  }
  const counts = { added: 0, other: 0 };
  for (const run of file.runs) {
    if (typeof run?.id !== "string" || !Array.isArray(run.marks)) continue;
    const own = store.site.runs.find(({ id }) => id === run.id) ?? store.site.runs.find(({ name }) => name === run.name);
    const id = own?.id ?? run.id;
    const there = storedMarks(id) ?? marks.runs.get(id) ?? new Map();
    for (const mark of run.marks) {
      if (typeof mark?.prompt !== "string") continue;
      const place = [mark.phase === "train" ? 1 : 0, mark.prompt, String(mark.seed), mark.sample ?? 0, mark.iteration ?? null];
      const name = JSON.stringify(place);
      const found = cleanMark({ ...mark, star: mark.favourite });
      writeMark(id, name, joined(there.get(name) ?? NONE, found));
      counts[own ? "added" : "other"] += 1;
    }
  }
  refreshMarks();
  const other = counts.other ? `; ${plural(counts.other, "mark")} of other runs kept for their galleries` : "";
  return `${plural(counts.added, "mark")} read${other}`;
}

function fileInput() {
  const input = el("input", { type: "file", accept: ".json,application/json", class: "unseen", tabindex: -1, "aria-label": "File of favourites and notes" });
  input.addEventListener("change", () => guarded((async () => {
    const [file] = input.files;
    if (!file) return;
    if (file.size > LARGEST_MARKS) throw new Error(`${file.name} is too large for a file of favourites and notes.`);
    const said = addMarks(await file.text());
    if (state.mine) await showCards();
    byId("fault").hidden = true;
    byId("mark-tools").querySelector("[role=status]").textContent = said;
  })()));
  return input;
}

function drawMarkTools() {
  const all = store.site.runs.flatMap(({ id }) => [...marks.runs.get(id).values()]);
  const [stars, notes] = [all.filter(({ star }) => star).length, all.filter(({ note }) => note).length];
  const place = byId("mark-tools");
  const input = place.querySelector("input") ?? fileInput();
  const words = [stars && plural(stars, "favourite"), notes && plural(notes, "note")].filter(Boolean).join(", ");
  const said = marks.lost ? "this browser keeps nothing for this page: save your marks to a file" : words;
  place.replaceChildren(el("span", { class: marks.lost ? "lost small" : "muted small", role: "status" }, said),
    button("Choose all", () => {
      for (const [row] of cards.shown) marks.chosen.add(row.key);
      refreshMarks();
      drawChosen();
    }, { class: "quiet", title: "Choose every card that passes the filters" }),
    button("Save to a file", () => save("favourites-and-notes.json", marksFile(), "application/json"),
      { class: "quiet", disabled: !all.length, title: "Favourites and notes, as JSON" }),
    button("Read from a file", () => input.click(), { class: "quiet", title: "Adds favourites and notes of a file to yours" }), input);
}
