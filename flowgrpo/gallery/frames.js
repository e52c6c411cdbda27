
// The picture of a sample: its thumbnail, or with `file` the image itself. A video plays.
function picture(row, cell, file = null, controls = false) {
  const alt = `${sourceName(cell.set)}, seed ${row.seed}: ${row.prompt}`;
  if (videoOf(cell)) return film(cell, alt, controls);
  const source = file && !store.thumbs ? store.site.runs[cell.set.run].base + file : thumbOf(cell);
  if (!source) return el("span", { class: "absent" }, "no image");
  const image = el("img", { loading: "lazy", decoding: "async", alt, draggable: "false" });
  image.addEventListener("load", () => image.classList.toggle("pixels", image.naturalWidth <= 160));
  image.addEventListener("error", () => {
    const thumb = thumbOf(cell);
    if (file && thumb && image.getAttribute("src") !== thumb) image.src = thumb;
    else image.replaceWith(el("span", { class: "absent" }, "the image file is missing"));
  });
  image.src = source;
  return image;
}

// The pictures of a prompt: small, or with `whole` as large as they were saved. Null if the prompt has none.
function promptPictures(row, whole = false) {
  if (!row.pictures.length) return null;
  const several = row.pictures.length > 1;
  return el("div", { class: whole ? "given whole" : "given" }, ...row.pictures.map(({ run, name, thumb }, at) => {
    const small = thumbNamed(thumb);
    const source = whole && !store.thumbs ? store.site.runs[run].base + name : small;
    if (!source) return el("span", { class: "absent" }, "the picture of the prompt is missing");
    const image = el("img", { loading: "lazy", decoding: "async", draggable: "false", src: source,
      alt: `Picture ${several ? `${at + 1} ` : ""}of the prompt`, title: "A picture of the prompt" });
    image.addEventListener("load", () => image.classList.toggle("pixels", image.naturalWidth <= 160));
    image.addEventListener("error", () => {
      if (small && image.getAttribute("src") !== small) image.src = small;
      else image.replaceWith(el("span", { class: "absent" }, "the picture of the prompt is missing"));
    });
    return image;
  }));
}

// The video of a sample. If it cannot be played, its first frame is shown.
function film(cell, alt, controls) {
  const poster = thumbOf(cell);
  const video = player(videoOf(cell), poster, alt, controls, () => (poster
    ? el("img", { alt, src: poster, draggable: "false" })
    : el("span", { class: "absent" }, "the video file is missing")));
  if (poster) {
    const first = new Image();
    first.addEventListener("load", () => video.classList.toggle("pixels", first.naturalWidth <= 160));
    first.src = poster;
  }
  watched.observe(video);
  return video;
}

function caption(cell, scored = true) {
  const score = scored && store.site.rewards.length ? el("span", {}, number(scoreOf(cell, rewardIndex()))) : null;
  return el("figcaption", {}, el("span", {}, sourceName(cell.set)), score);
}

// A player of the sound of a sample, whose picture shows the spectrum; null if the sample has none. One sound plays at a
// time.
function heard(row, cell) {
  const source = soundOf(cell);
  if (!source) return null;
  const audio = el("audio", { controls: true, preload: "none", src: source,
    "aria-label": `Sound. ${sourceName(cell.set)}, seed ${row.seed}: ${row.prompt}` });
  audio.addEventListener("play", () => {
    for (const other of document.querySelectorAll("audio")) if (other !== audio) other.pause();
  });
  audio.addEventListener("error", () => audio.replaceWith(el("span", { class: "absent" }, "the sound file is missing")));
  return audio;
}

// The frame of a picture. A picture of a spectrum is three times as wide as it is high.
const frameOf = (cell) => (cell.set.sounds?.[cell.at] ? "frame wide" : "frame");

function sideBySide(row, cells, files, open) {
  const figures = cells.map((cell, at) => {
    if (!cell) return el("figure", {}, el("span", { class: "frame" }, el("span", { class: "absent" }, "not sampled")));
    // The prompt opens the same view, so the images need no tab stop.
    const frame = videoOf(cell) ? el("span", { class: "frame moving" }, picture(row, cell, files[at], true))
      : open ? button(picture(row, cell, files[at]), open, { class: frameOf(cell), tabindex: -1 })
      : el("span", { class: frameOf(cell) }, picture(row, cell, files[at]));
    return el("figure", {}, frame, heard(row, cell), caption(cell, cells.length > 2)); // with two cells, the table below gives the scores
  });
  return el("div", { class: cells.length === 1 ? "frames one" : cells.length > 2 ? "frames many" : "frames" }, ...figures);
}

// The later image over the earlier one, uncovered by a slider.
function slider(row, [before, after], files) {
  const [under, over] = [picture(row, before, files[0]), picture(row, after, files[1])];
  inStep(over, under);
  const top = el("span", { class: "over" }, over);
  const edge = el("span", { class: "edge" });
  const frame = el("span", { class: `${frameOf(after)} stack` }, under, top, edge);
  const range = el("input", { type: "range", min: 0, max: 100, value: 50, step: 1,
    "aria-label": `Share of ${sourceName(before.set)} that is shown` });
  const move = () => {
    top.style.clipPath = `inset(0 0 0 ${range.value}%)`;
    edge.style.left = `${range.value}%`;
    range.setAttribute("aria-valuetext", `${range.value} % ${sourceName(before.set)}`);
  };
  const drag = (event) => {
    if (event.type === "pointermove" && !event.buttons && event.pointerType !== "mouse") return;
    const box = frame.getBoundingClientRect();
    range.value = Math.round(((event.clientX - box.left) / box.width) * 100);
    move();
  };
  range.addEventListener("input", move);
  frame.addEventListener("pointermove", drag);
  frame.addEventListener("pointerdown", drag);
  move();
  const ends = el("span", { class: "ends" }, el("span", {}, sourceName(before.set)), el("span", {}, sourceName(after.set)));
  return el("div", { class: "frames one" }, el("figure", {}, frame, range, ends, heard(row, before), heard(row, after)));
}

// Shows the two images in turn at the same place: by pointer, by click, or all at once (key B, or the Blink button).
function blinker(row, [before, after], files) {
  const label = el("figcaption", {});
  const [under, over] = [picture(row, before, files[0]), picture(row, after, files[1])];
  inStep(over, under);
  const frame = el("button", { type: "button", class: `${frameOf(after)} stack blink` }, under, el("span", { class: "over" }, over));
  let [held, back] = [false, false];
  frame.flip = (to) => {
    back = to;
    frame.classList.toggle("back", back);
    const shown = sourceName((back ? before : after).set);
    frame.setAttribute("aria-label", `Showing ${shown}; press to switch`);
    frame.setAttribute("aria-pressed", String(back));
    label.textContent = `${shown} · ${number(scoreOf(back ? before : after, rewardIndex()))}`;
  };
  frame.addEventListener("pointerenter", (event) => event.pointerType === "mouse" && frame.flip(!held));
  frame.addEventListener("pointerleave", () => frame.flip(held));
  frame.addEventListener("click", () => {
    held = !held;
    frame.flip(held);
  });
  frame.flip(false);
  return el("div", { class: "frames one" }, el("figure", {}, frame, label, heard(row, before), heard(row, after)));
}

let blinking = null;
let turned = false;

function flipAll() {
  turned = !turned;
  for (const frame of document.querySelectorAll(".blink")) frame.flip(turned);
}

function blinkAll(on) {
  clearInterval(blinking);
  blinking = on ? setInterval(flipAll, 900) : null;
}

// The pictures of a row in the chosen way of comparing.
function pictures(row, cells, files = [], open = null) {
  const [first, last] = [cells[0], cells[cells.length - 1]];
  const two = first && last && first !== last && thumbOf(first) && thumbOf(last);
  if (state.view === "slider" && two) return slider(row, [first, last], [files[0], files[cells.length - 1]]);
  if (state.view === "blink" && two) return blinker(row, [first, last], [files[0], files[cells.length - 1]]);
  return sideBySide(row, cells, files, open);
}

const compared = new WeakMap(); // details of the later completion → details of the earlier one, and the pieces of both

// The images that rewards made of a completion; once, if several rewards share them. Without `open`, a click on an
// image makes it large.
function renderedImages(cell, rendered, open = null, whole = false) {
  const lists = new Map();
  for (const [reward, images] of rendered ?? []) {
    const key = JSON.stringify(images);
    if (lists.has(key)) lists.get(key).rewards.push(reward);
    else lists.set(key, { rewards: [reward], images });
  }
  if (!lists.size) return null;
  return el("div", { class: whole ? "made whole" : "made" }, ...[...lists.values()].map(({ rewards, images }) => {
    const label = rewards.join(", ");
    const shown = images.map(([name, thumb, video], at) => {
      const alt = `${images.length > 1 ? `Image ${at + 1}` : "Image"} that ${label} made of the completion, ${sourceName(cell.set)}`;
      const media = renderedOne(cell, name, thumb, video, alt, !open);
      if (!media || media.tagName === "VIDEO") return media ?? el("span", { class: "absent" }, "the image file is missing");
      const frame = button(media, open ?? (() => frame.setAttribute("aria-pressed", String(frame.classList.toggle("large")))),
        { class: "render", title: label, "aria-pressed": open ? null : "false" });
      return frame;
    });
    if (!images.length) shown.push(el("span", { class: "absent" }, "A server made the images, and sent the scores alone"));
    return el("figure", {}, el("div", { class: "row" }, ...shown), rendered.length > 1 ? el("figcaption", {}, label) : null);
  }));
}

// One of these images: its thumbnail, or with `file` the image itself; or its video. Null if there is none.
function renderedOne(cell, name, thumb, video, alt, file) {
  const small = thumbNamed(thumb);
  const clip = clipNamed(video);
  const source = file && name && !store.thumbs ? store.site.runs[cell.set.run].base + name : small;
  if (!source) return null;
  const still = () => el("img", { loading: "lazy", decoding: "async", draggable: "false", alt, src: small ?? source });
  if (clip) {
    const moving = player(clip, small, alt, file, still);
    watched.observe(moving);
    return moving;
  }
  const image = still();
  image.addEventListener("load", () => image.classList.toggle("pixels", image.naturalWidth <= 160));
  image.addEventListener("error", () => {
    if (small && image.getAttribute("src") !== small) image.src = small;
    else image.replaceWith(el("span", { class: "absent" }, "the image file is missing"));
  });
  image.src = source;
  return image;
}

// Heading and text of one completion, and the images that rewards made of it. In the last of several completions,
// differences from the first are marked. With `open`, it is a part of a card.
function passage(cell, at, details, room, open = null, whole = false) {
  const [own, first, last] = [details[at], details[0], details[details.length - 1]];
  if (!cell || !own) return el("figure", {}, el("div", { class: "words absent" }, "not sampled"));
  if (first && last && first !== last && compared.get(last)?.first !== first) {
    compared.set(last, { first, pieces: difference(first.completion, last.completion) });
  }
  const side = own === first ? 0 : own === last ? 1 : -1;
  const pieces = (first !== last && compared.get(last)?.pieces?.[side]) || [[own.completion, false]];
  const same = own === last && first && first !== last && own.completion === first.completion;
  const length = same ? "same text" : plural([...own.completion].length, "character");
  return el("figure", {}, el("figcaption", {}, el("span", {}, sourceName(cell.set)), el("span", {}, length)),
    folded(pieces, room), unmasking(own.steps), renderedImages(cell, own.rendered, open, whole));
}

// What a masked model had written after each step, behind a click; masks are shown as _.
function unmasking(steps) {
  if (!steps?.length) return null;
  return el("details", { class: "unmasking" }, el("summary", {}, `Unmasked in ${plural(steps.length, "step")}`),
    el("ol", {}, ...steps.map((text) => el("li", {}, el("bdi", {}, text)))));
}
