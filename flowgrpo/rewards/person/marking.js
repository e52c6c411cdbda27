"use strict";

const POLL = 1000; // milliseconds between two questions whether the run asks about something
const SMALL = 160; // pictures up to this width show their pixels as squares
const KEYS = "1234567890";
const byId = (id) => document.getElementById(id);
const state = { call: 0, place: null, marks: [], ready: false, latest: null };

// Text reaches the document only as text nodes and attribute values; nothing here parses markup.
function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) if (value !== null) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

function button(text, key, action, kind = null) {
  const node = el("button", { type: "button", class: kind }, text, ...(key ? [el("kbd", {}, key)] : []));
  node.addEventListener("click", action);
  return node;
}

async function ask(address, body = null) {
  const options = body === null ? {}
    : { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) };
  let [response, data] = [null, null];
  try {
    response = await fetch(address, options);
    data = await response.json();
  } catch {
    throw new Error("The run has ended, or was interrupted. A run that goes on prints a new address; all marks are kept.");
  }
  if (!response.ok) throw new Error(data.error);
  return data;
}

function fault(error) {
  byId("fault").textContent = error === null ? "" : error.message;
  byId("fault").hidden = error === null;
}

async function picture(address, alt) {
  const image = el("img", { alt, src: address, draggable: "false" });
  try {
    await image.decode();
  } catch {
    return el("span", { class: "label" }, "this picture cannot be shown");
  }
  image.classList.toggle("pixels", image.naturalWidth <= SMALL);
  return image;
}

async function card(sample, place) {
  const name = `Sample ${place + 1}`;
  const mark = el("button", { type: "button", class: "mark", "aria-label": name });
  const label = el("span", { class: "label" });
  const node = el("div", { class: "sample" }, mark);
  mark.addEventListener("click", () => toggle(place));
  if (sample.text !== undefined) mark.append(el("pre", { dir: "auto" }, sample.text));
  else if (sample.kind.startsWith("audio/")) node.prepend(el("audio", { controls: "", src: sample.address }));
  else mark.append(await picture(sample.address, name));
  mark.append(label);
  return node;
}

function draw() {
  [...byId("samples").children].forEach((node, place) => {
    const good = state.marks[place] === 1;
    node.classList.toggle("good", good);
    node.querySelector(".mark").setAttribute("aria-pressed", String(good));
    node.querySelector(".label").textContent = `${place < KEYS.length ? KEYS[place] : place + 1} · ${good ? "good" : "not marked"}`;
  });
  for (const node of byId("actions").children) node.disabled = !state.ready;
  byId("back").disabled = !state.ready || !state.place;
}

function toggle(place) {
  if (!state.ready || place >= state.marks.length) return;
  state.marks[place] = 1 - state.marks[place];
  draw();
}

function all() {
  const value = state.marks.every((mark) => mark === 1) ? 0 : 1;
  state.marks = state.marks.map(() => value);
  draw();
}

async function show(call, place) {
  state.ready = false;
  const asked = await ask(`prompts/${call}/${place}`);
  const cards = await Promise.all(asked.samples.map(card));
  const given = await Promise.all(asked.given.map((address) => picture(address, "Picture of the prompt")));
  state.marks = asked.marks.length ? asked.marks : asked.samples.map(() => 0);
  [state.call, state.place] = [call, place];
  byId("prompt").textContent = asked.prompt;
  byId("given").replaceChildren(...given);
  byId("given").hidden = given.length === 0;
  byId("samples").classList.toggle("texts", asked.samples.some((sample) => sample.text !== undefined));
  byId("samples").replaceChildren(...cards);
  byId("asked").hidden = false;
  byId("idle").hidden = true;
  state.ready = true;
  draw();
  scrollTo(0, 0);
  byId("prompt").focus({ preventScroll: true }); // a screen reader reads the new prompt
}

async function follow(latest) {
  state.latest = latest;
  byId("question").textContent = latest.question;
  document.title = latest.next === null ? "flowgrpo marks" : `(${latest.total - latest.done}) flowgrpo marks`;
  byId("count").textContent = latest.next === null ? `${latest.marked} prompts are marked so far`
    : `${latest.done + 1} of ${latest.total} prompts`;
  byId("done").style.width = latest.total ? `${(100 * latest.done) / latest.total}%` : "0";
  if (latest.next === null) {
    byId("asked").hidden = true;
    byId("idle").hidden = false;
    byId("idle").textContent = "The run is at work. The next samples appear here by themselves.";
    state.place = null;
  } else if (state.place === null || latest.call !== state.call) {
    await show(latest.call, latest.next);
  }
  document.documentElement.dataset.ready = "yes";
}

async function send(marks) {
  if (!state.ready) return;
  state.ready = false;
  draw();
  try {
    const latest = await ask("marks", { call: state.call, number: state.place, marks });
    fault(null);
    state.place = null;
    await follow(latest);
  } catch (error) {
    fault(error);
    state.ready = true;
    draw();
  }
}

async function back() {
  if (!state.ready || !state.place) return;
  try {
    await show(state.call, state.place - 1);
  } catch (error) {
    fault(error);
  }
}

async function poll() {
  if (state.place === null || !state.ready) {
    try {
      await follow(await ask("state"));
      fault(null);
    } catch (error) {
      fault(error);
    }
  }
  setTimeout(poll, POLL);
}

addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest?.("audio")) return;
  const place = KEYS.indexOf(event.key);
  if (place >= 0) toggle(place);
  else if (event.key === "Enter") send(state.marks);
  else if (event.key === "a") all();
  else if (event.key === "s") send(null);
  else if (event.key === "b") back();
  else return;
  event.preventDefault();
});

byId("actions").append(
  button("Done", "Enter", () => send(state.marks), "main"),
  button("All or none", "a", all),
  button("Skip this prompt", "s", () => send(null)),
  button("Back", "b", back),
);
byId("actions").lastChild.id = "back";
poll();
