// The tokens of a sample as wrapped rows of one height. Rows are laid out once; only those in sight are elements, so that a long
// trajectory scrolls as a short one does.

import { el, visibleText } from "./dom.js";
import { t } from "./words.js";

const ROW = 30;
const MOST_LETTERS = 48;
const ORIGINS = ["prompt", "model", "environment"];

export class Strip {
  // given: { sample, text(i), colour(sample, i), title(i), choose(i) }
  constructor(given) {
    this.given = given;
    this.chosen = -1;
    this.rows = [];
    this.shown = new Map();
    this.space = el("div", { class: "strip-space", role: "presentation" });
    this.box = el("div", { class: "strip", tabindex: "0", role: "listbox", "aria-label": t("Tokens"), onkeydown: (event) => this.key(event) }, this.space);
    this.box.addEventListener("scroll", () => this.later(), { passive: true });
    this.space.addEventListener("click", (event) => {
      const place = event.target.closest("[data-token]")?.dataset.token;
      if (place !== undefined) given.choose(Number(place));
    });
    this.watch = new ResizeObserver(() => this.layOut());
    this.watch.observe(this.box);
  }

  label(i) {
    const text = this.given.text(i);
    const whole = text === null ? `#${this.given.sample.tokens[i]}` : visibleText(text.slice(0, 400));
    return whole.length > MOST_LETTERS ? `${whole.slice(0, MOST_LETTERS)}…` : whole || "∅";
  }

  layOut() {
    const width = this.box.clientWidth - 20;
    if (width <= 0 || (width === this.width && this.rows.length)) return;
    this.width = width;
    const pen = document.createElement("canvas").getContext("2d");
    pen.font = getComputedStyle(this.box).font;
    const known = new Map();
    const rows = [];
    let start = 0;
    let used = 0;
    this.labels = new Array(this.given.sample.n);
    for (let i = 0; i < this.given.sample.n; i++) {
      const label = (this.labels[i] = this.label(i));
      let size = known.get(label);
      if (size === undefined) known.set(label, (size = Math.min(pen.measureText(label).width + 9, width)));
      if (used + size > width && i > start) {
        rows.push([start, i]);
        [start, used] = [i, 0];
      }
      used += size;
      if (this.given.text(i)?.endsWith("\n")) {
        rows.push([start, i + 1]);
        [start, used] = [i + 1, 0];
      }
    }
    if (start < this.given.sample.n) rows.push([start, this.given.sample.n]);
    this.rows = rows;
    this.space.style.setProperty("height", `${rows.length * ROW}px`);
    this.box.style.setProperty("height", `${rows.length * ROW + 20}px`);
    this.redraw();
  }

  redraw() {
    for (const row of this.shown.values()) row.remove();
    this.shown.clear();
    this.draw();
  }

  later() {
    if (this.waiting) return;
    this.waiting = requestAnimationFrame(() => {
      this.waiting = 0;
      this.draw();
    });
  }

  draw() {
    const first = Math.max(0, Math.floor(this.box.scrollTop / ROW) - 6);
    const end = Math.min(this.rows.length, Math.ceil((this.box.scrollTop + this.box.clientHeight) / ROW) + 6);
    for (const [place, row] of this.shown) {
      if (place < first || place >= end) {
        row.remove();
        this.shown.delete(place);
      }
    }
    const fresh = document.createDocumentFragment();
    for (let place = first; place < end; place++) {
      if (this.shown.has(place)) continue;
      const row = this.row(place);
      this.shown.set(place, row);
      fresh.append(row);
    }
    this.space.append(fresh);
  }

  row(place) {
    const row = document.createElement("div");
    row.className = "strip-row";
    row.setAttribute("role", "presentation");
    row.style.transform = `translateY(${place * ROW}px)`;
    const [start, end] = this.rows[place];
    for (let i = start; i < end; i++) row.append(this.token(i));
    return row;
  }

  token(i) {
    const { sample } = this.given;
    const token = document.createElement("span");
    token.className = `token ${ORIGINS[sample.origin[i]] ?? "unknown"}${i === this.chosen ? " chosen" : ""}`;
    token.dataset.token = i;
    token.id = `token-${i}`;
    token.textContent = this.labels[i];
    token.title = this.given.title(i);
    token.setAttribute("role", "option");
    token.setAttribute("aria-selected", i === this.chosen);
    token.setAttribute("aria-posinset", i + 1);
    token.setAttribute("aria-setsize", sample.n);
    const colour = this.given.colour(sample, i);
    if (colour) token.style.backgroundColor = colour;
    return token;
  }

  rowOf(i) {
    let [low, high] = [0, this.rows.length - 1];
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.rows[middle][0] <= i) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  mark(i, scroll = true) {
    this.chosen = i;
    this.layOut();
    if (scroll && i >= 0 && this.rows.length) {
      const top = this.rowOf(i) * ROW;
      if (top < this.box.scrollTop || top + ROW > this.box.scrollTop + this.box.clientHeight) {
        this.box.scrollTop = Math.max(0, top - this.box.clientHeight / 3);
      }
    }
    this.redraw();
    if (i >= 0) this.box.setAttribute("aria-activedescendant", `token-${i}`);
  }

  key(event) {
    const at = Math.max(this.chosen, 0);
    const row = this.rows.length ? this.rowOf(at) : 0;
    const beside = (other) => (this.rows[other] ? Math.min(this.rows[other][0] + at - this.rows[row][0], this.rows[other][1] - 1) : at);
    const moves = {
      ArrowRight: () => at + 1,
      ArrowLeft: () => at - 1,
      ArrowDown: () => beside(row + 1),
      ArrowUp: () => beside(row - 1),
      PageDown: () => beside(Math.min(row + 10, this.rows.length - 1)),
      PageUp: () => beside(Math.max(row - 10, 0)),
      Home: () => 0,
      End: () => this.given.sample.n - 1,
    };
    if (!moves[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    const target = this.chosen < 0 ? 0 : moves[event.key]();
    if (target >= 0 && target < this.given.sample.n) this.given.choose(target);
  }
}
