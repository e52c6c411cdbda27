
const BREAK = /\r\n|[\n-\r\u0085\u2028\u2029]/g;
// Splits text into words, and never splits an emoji. Browsers before 2024 lack it; then no difference is marked.
const segmenter = Intl.Segmenter ? new Intl.Segmenter("en", { granularity: "word" }) : null;
const LONGEST = 20000; // a text with more characters is not compared
const LARGEST = 250000; // limit of the product of the numbers of words that differ: some milliseconds for each card

function wordsOf(text) {
  const found = [];
  for (const { segment } of segmenter.segment(text)) {
    if (found.length && !segment.trim()) found[found.length - 1] += segment;
    else found.push(segment);
  }
  return found;
}

// For each word of a and of b, whether it belongs to their longest common subsequence.
function common(a, b) {
  let start = 0;
  while (start < a.length && start < b.length && a[start] === b[start]) start += 1;
  let end = 0;
  while (end < Math.min(a.length, b.length) - start && a[a.length - 1 - end] === b[b.length - 1 - end]) end += 1;
  const [rows, columns] = [a.length - start - end, b.length - start - end];
  if (rows * columns > LARGEST) return null;
  const longest = Array.from({ length: rows + 1 }, () => new Uint16Array(columns + 1));
  for (let i = rows - 1; i >= 0; i -= 1) {
    for (let j = columns - 1; j >= 0; j -= 1) {
      longest[i][j] = a[start + i] === b[start + j] ? longest[i + 1][j + 1] + 1
        : Math.max(longest[i + 1][j], longest[i][j + 1]);
    }
  }
  const inside = (size) => (_, at) => at < start || at >= size - end;
  const [inA, inB] = [a.map(inside(a.length)), b.map(inside(b.length))];
  for (let i = 0, j = 0; i < rows && j < columns;) {
    if (a[start + i] === b[start + j]) {
      inA[start + i] = inB[start + j] = true;
      i += 1;
      j += 1;
    } else if (longest[i + 1][j] >= longest[i][j + 1]) i += 1;
    else j += 1;
  }
  return [inA, inB];
}

// Each text as pieces [part, differs]; null if the texts are equal, too long, or share less than half of their words,
// because marks on most words would not help a reader.
function difference(before, after) {
  if (!segmenter || before === after || Math.max(before.length, after.length) > LONGEST) return null;
  const words = [before, after].map(wordsOf);
  const numbers = new Map(); // numbers are compared faster than words; white space after a word does not count
  const shared = common(...words.map((list) => list.map((word) => {
    const known = word.trimEnd();
    if (!numbers.has(known)) numbers.set(known, numbers.size);
    return numbers.get(known);
  })));
  if (!shared) return null;
  const kept = shared[0].filter(Boolean).length;
  if (4 * kept < words[0].length + words[1].length) return null;
  return words.map((list, side) => {
    const pieces = [];
    list.forEach((word, at) => {
      const last = pieces[pieces.length - 1];
      if (last && last[1] !== shared[side][at]) last[0] += word;
      else pieces.push([word, !shared[side][at]]);
    });
    return pieces;
  });
}

// The nodes of the pieces between two positions in their text.
function nodesOf(pieces, from, to) {
  let at = 0;
  return pieces.flatMap(([text, differs]) => {
    const part = text.slice(Math.max(0, from - at), Math.max(0, to - at));
    at += text.length;
    const marked = differs ? part.trimEnd() : "";
    return [marked && el("mark", {}, marked), part.slice(marked.length)].filter(Boolean);
  });
}

// Start and end of the middle part of a text that is to be folded, or null if the text fits into `room` characters.
function middleOf(text, room) {
  const lines = room / 50;
  const breaks = (part) => [...part.matchAll(BREAK)].map((match) => match.index + match[0].length);
  // The cut is between words if a word ends nearby, and never inside a character of two code units.
  const between = (at) => {
    const gap = text.slice(Math.max(0, at - 30), at).search(/\s\S*$/);
    if (gap >= 0) return Math.max(0, at - 30) + gap + 1;
    return /[\udc00-\udfff]/.test(text[at] ?? "") ? at - 1 : at;
  };
  const head = Math.min(room, text.length);
  const from = breaks(text.slice(0, head))[lines - 1] ?? between(head);
  const tail = Math.max(from, text.length - room / 2);
  const ends = breaks(text.slice(tail));
  const to = Math.max(from, ends.length > lines / 2 ? tail + ends[ends.length - 1 - lines / 2] : between(tail));
  const small = to - from < room / 2 && breaks(text.slice(from, to)).length < lines;
  return small ? null : [from, to];
}

// A text whose middle is hidden until a click. The end stays visible, because answers are at the end.
function folded(pieces, room) {
  const text = pieces.map(([part]) => part).join("");
  if (!text.trim()) return el("div", { class: "words absent" }, text ? "only white space" : "empty");
  const middle = middleOf(text, room);
  if (!middle) return el("div", { class: "words" }, ...nodesOf(pieces, 0, text.length));
  const [from, to] = middle;
  const rest = el("span", { hidden: true }, ...nodesOf(pieces, from, to));
  const more = plural([...text.slice(from, to)].length, "more character");
  const button = el("button", { type: "button", class: "fold", "aria-expanded": "false" }, more);
  button.addEventListener("click", () => {
    rest.hidden = !rest.hidden;
    button.setAttribute("aria-expanded", String(!rest.hidden));
    button.textContent = rest.hidden ? more : "Show less";
  });
  return el("div", { class: "words" }, ...nodesOf(pieces, 0, from), button, rest, ...nodesOf(pieces, to, text.length));
}

// The messages of a conversation, [role, content] each, with their roles. U+FFFC stands for a picture in a message.
function turnsOf(messages, room) {
  return el("div", { class: "turns" }, ...messages.map(([role, content]) => {
    const words = folded([[content.replaceAll("\ufffc", "<image>"), false]], room);
    words.dir = "auto";
    return el("div", { class: "turn" }, el("span", { class: "role" }, role), words);
  }));
}
