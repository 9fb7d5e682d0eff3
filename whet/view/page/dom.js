// Elements of the page. Text from a run becomes text nodes alone, with what would hide or move letters shown as an escape.

const HIDDEN = new RegExp(
  "[\\u0000-\\u0008\\u000b-\\u001f\\u007f-\\u009f\\u00ad\\u034f\\u061c\\u115f\\u1160\\u17b4\\u17b5\\u180b-\\u180f\\u200b-\\u200f\\u2028-\\u202e" +
    "\\u2060-\\u206f\\u3164\\ufe00-\\ufe0e\\ufeff\\uffa0\\ufff0-\\ufffc\\u{e0000}-\\u{e0fff}\\u{d800}-\\u{dfff}]",
  "gu",
);

// An element: el("p", { class: "x", onclick: f }, "text", node, null, [nodes]).
export function el(tag, attributes = {}, ...children) {
  const made = tag === "svg" || SVG_TAGS.has(tag) ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, each] of Object.entries(value)) made.style.setProperty(key, each);
    else if (name === "value") made.value = value;
    else if (SPOKEN.has(name)) made.setAttribute(name, shown(String(value)));
    else made.setAttribute(name, value === true ? "" : String(value));
  }
  add(made, children);
  return made;
}

const SPOKEN = new Set(["title", "aria-label", "placeholder"]);
const SVG_TAGS = new Set(["line", "rect", "circle", "path", "g", "text"]);

function add(parent, children) {
  for (const child of children) {
    if (Array.isArray(child)) add(parent, child);
    else if (child !== null && child !== undefined && child !== false) parent.append(child instanceof Node ? child : shown(String(child)));
  }
}

export function fill(parent, ...children) {
  parent.replaceChildren();
  add(parent, children);
  return parent;
}

// A text with what would hide or move letters as escapes: no text reaches the page without them.
export const shown = (text) => text.replace(HIDDEN, escapeOf);

// Nodes of a text of others. With `inline`, line breaks and tabs are escapes, too.
export function visible(text, inline = false) {
  const nodes = [];
  const pattern = inline ? new RegExp(`${HIDDEN.source}|[\\n\\t]`, "gu") : HIDDEN;
  let from = 0;
  for (const found of text.matchAll(pattern)) {
    if (found.index > from) nodes.push(text.slice(from, found.index));
    nodes.push(el("span", { class: "escape" }, escapeOf(found[0])));
    from = found.index + found[0].length;
  }
  if (from < text.length) nodes.push(text.slice(from));
  return nodes;
}

// A text of others as one line of plain text, for attributes and tests.
export function visibleText(text) {
  return text.replace(new RegExp(`${HIDDEN.source}|[\\n\\t]`, "gu"), escapeOf);
}

function escapeOf(letter) {
  const named = { "\n": "\\n", "\t": "\\t", "\r": "\\r", "\u001b": "\\x1b" }[letter];
  if (named) return named;
  const code = letter.codePointAt(0);
  if (code < 256) return "\\x" + code.toString(16).padStart(2, "0");
  return code < 65536 ? "\\u" + code.toString(16).padStart(4, "0") : "\\u{" + code.toString(16) + "}";
}

// A text that may be long: its beginning, and a button for the rest.
export function longText(text, limit, more) {
  if (text.length <= limit) return el("span", {}, visible(text));
  const place = el("span", {}, visible(text.slice(0, limit)), "… ");
  const button = el("button", { type: "button", class: "quiet", onclick: () => fill(place, visible(text)) }, more(text.length - limit));
  place.append(button);
  return place;
}

// A text in a line or a cell: the beginning of a long one.
export const cut = (text, limit = 80) => (text?.length > limit ? `${text.slice(0, limit)}…` : text);

// A number as the page writes it: seven digits that count, without a needless tail.
export function number(value, digits = 7) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  if (value === 0) return "0";
  const size = Math.abs(value);
  let text = size >= 1e7 || size < 1e-4 ? value.toExponential(Math.max(digits - 1, 1)) : value.toPrecision(digits);
  if (text.includes("e")) text = text.replace(/\.?0+e/, "e");
  else if (text.includes(".")) text = text.replace(/\.?0+$/, "");
  return text.replace("-", "−").replace("e-", "e−").replace("e+", "e");
}

// Four digits, and 0 for what float64 leaves of a difference of equal numbers.
export const short = (value) => number(value !== null && Math.abs(value) < 1e-14 ? 0 : value, 4);
