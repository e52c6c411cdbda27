"use strict";

const byId = (id) => document.getElementById(id);
const SAME = 1e-6; // gains up to this size count as no change, as in run_figures.py

// Text reaches the document only as text nodes and attribute values; nothing here parses markup.
function fill(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function button(text, action, attributes = {}) {
  const node = el("button", { type: "button", ...attributes }, text);
  node.addEventListener("click", action);
  return node;
}

function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e5)) return value.toExponential(2).replace("-", "−");
  const digits = size >= 100 ? 1 : size >= 10 ? 2 : 3;
  return value.toFixed(digits).replace("-", "−");
}

function signed(value) {
  return (value > 0 ? "+" : "") + number(value);
}

function plural(count, word) {
  return `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;
}

function direction(gain) {
  return gain === null || Math.abs(gain) <= SAME ? "same" : gain > 0 ? "gained" : "lost";
}

function mean(values) {
  return values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;
}
