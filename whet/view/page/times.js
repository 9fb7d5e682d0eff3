// Where the time went: the trainer's phases step by step, and what trajectories waited for, rollout by rollout.

import { COLOURS } from "./charts.js";
import { cut, el, short, shown, visible } from "./dom.js";
import { t } from "./words.js";

const PHASE = /^time\/([^/]+)_s$/;
const NO_PHASES = ["time/step_s", "time/engine_busy_s", "time/compile_s"];
// Causes in the order in which they are stacked, each with its words. Others that a record names come behind them.
const CAUSES = { __proto__: null, decode: "engine: decoding", prefill: "engine: prefill", queue: "engine: queue", engine: "engine: the rest", env: "tools and environment", reward: "reward" };
const MOST_BARS = 120;
const MOST_PARTS = 2 * COLOURS.length - 1;
const [LEFT, HEIGHT] = [66, 150];
const MOST_WIDTH = 1300;

// Stacked bars. given: [{ x, values, title }], values in the order of `all`; the key has the share of each name. Names behind the first
// ones are a part together.
function stacked(title, unit, axis, all, given, words) {
  const names = all.length > MOST_PARTS + 1 ? [...all.slice(0, MOST_PARTS), null] : all;
  const rest = (values) => values.slice(MOST_PARTS).reduce((a, b) => a + b, 0);
  const bars = names === all ? given : given.map((bar) => ({ ...bar, values: [...bar.values.slice(0, MOST_PARTS), rest(bar.values)] }));
  const totals = names.map((_, k) => bars.reduce((sum, bar) => sum + bar.values[k], 0));
  const whole = totals.reduce((a, b) => a + b, 0) || 1;
  const most = Math.max(...bars.map((bar) => bar.values.reduce((a, b) => a + b, 0)), 1e-12);
  const room = Math.min(Math.max(innerWidth - 150, 200), MOST_WIDTH);
  const width = room / Math.max(bars.length, 12);
  const paint = (k) => ({ background: COLOURS[k % COLOURS.length], opacity: k >= COLOURS.length ? 0.5 : 1 });
  const columns = bars.map((bar, place) => {
    let y = HEIGHT + 10;
    const parts = names.map((_, k) => {
      const height = (HEIGHT * bar.values[k]) / most;
      y -= height;
      return el("rect", { x: LEFT + place * width, y, width: Math.max(width - (width > 4 ? 1 : 0), 0.5), height, fill: COLOURS[k % COLOURS.length], opacity: k >= COLOURS.length ? 0.5 : 1 });
    });
    return el("g", {}, svgTitle(bar.title), parts);
  });
  const end = LEFT + width * bars.length;
  const marks = [
    el("line", { x1: LEFT, x2: LEFT + room, y1: HEIGHT + 10, y2: HEIGHT + 10 }),
    el("text", { x: LEFT - 5, y: 14, "text-anchor": "end" }, `${short(most)} s`),
    el("text", { x: LEFT - 5, y: HEIGHT + 10, "text-anchor": "end" }, "0"),
    el("text", { x: LEFT, y: HEIGHT + 26 }, `${axis} ${bars[0].x}`),
    bars.length > 1 ? el("text", { x: Math.max(end, LEFT + 140), y: HEIGHT + 26, "text-anchor": "end" }, bars[bars.length - 1].x) : null,
  ];
  const key = names.map((name, k) => el("span", { class: "swatch" }, el("i", { style: paint(k) }), visible(name === null ? t("{0} others", all.length - MOST_PARTS) : cut(words(name), 60), true), ` ${((100 * totals[k]) / whole).toFixed(1)} %`));
  return [
    el("figcaption", {}, el("span", { class: "name" }, visible(title, true)), el("span", { class: "unit" }, unit)),
    el("svg", { viewBox: `0 0 ${LEFT + room + 10} ${HEIGHT + 32}`, role: "img", "aria-label": unit }, marks, columns),
    el("div", { class: "legend" }, key),
  ];
}

// Seconds of each of the trainer's phases, step by step. Its rollout phase is what it waited for trajectories.
export function timeline(metrics) {
  const columns = metrics.columns;
  const steps = columns.get("step") ?? [];
  const all = columns.get("time/step_s") ?? [];
  const rows = [...steps.keys()].filter((i) => all[i] > 0 && Number.isFinite(all[i])).slice(-MOST_BARS);
  const at = (name, i) => (columns.get(name)?.[i] > 0 && Number.isFinite(columns.get(name)[i]) ? columns.get(name)[i] : 0);
  const sum = (name) => rows.reduce((total, i) => total + at(name, i), 0);
  const names = [...columns.keys()].filter((name) => PHASE.test(name) && !NO_PHASES.includes(name) && sum(name) > 0).sort((a, b) => sum(b) - sum(a));
  if (!names.length || !rows.length) return null;
  const phase = (name) => name.match(PHASE)[1];
  const bars = rows.map((i) => ({ x: steps[i], values: names.map((name) => at(name, i)), title: [`${t("step")} ${steps[i]}: ${short(all[i])} s`, ...names.map((name) => `${t(phase(name))} ${short(at(name, i))} s`)].join("\n") }));
  const nested = [...columns.keys()].filter((name) => /^time\/.+\/.+_s$/.test(name));
  const [busy, played] = [sum("time/engine_busy_s"), sum("time/rollout_s")];
  const percent = (share) => (100 * Math.min(share, 1)).toFixed(1);
  return el(
    "figure",
    { class: "card timeline" },
    stacked(metrics.name, t("seconds of each step"), t("step"), names, bars, (name) => t(phase(name))),
    played > 0 ? el("p", { class: "note" }, t("The trainer waited for rollouts {0} % of the time.", percent(played / sum("time/step_s"))), " ", busy > 0 ? t("In that time the engine computed {0} %; the rest it waited for tools, rewards and the trainer.", percent(busy / played)) : "") : null,
    nested.length ? el("details", {}, el("summary", {}, t("inside the phases")), el("table", { class: "numbers" }, el("tbody", {}, nested.map((name) => el("tr", {}, el("th", { scope: "row" }, visible(cut(name.slice(5, -2), 120), true)), el("td", { class: "figure" }, `${short(sum(name))} s`)))))) : null,
  );
}

// Mean seconds of a trajectory by cause, rollout by rollout. found: the answer of `waits`.
export function waits(name, found) {
  if (!found?.length) return null;
  const there = new Set(found.flatMap((one) => Object.keys(one.seconds)));
  const names = [...Object.keys(CAUSES).filter((cause) => there.has(cause)), ...[...there].filter((cause) => !CAUSES[cause])];
  if (!names.length) return null;
  const words = (cause) => (cause === "engine" && !["decode", "prefill", "queue"].some((part) => there.has(part)) ? t("engine") : CAUSES[cause] ? t(CAUSES[cause]) : cause);
  const bars = found.map((one) => {
    const values = names.map((cause) => one.seconds[cause] ?? 0);
    const title = [`${t("rollout")} ${one.rollout}: ${t("{0} trajectories", one.trajectories)}`, ...names.map((cause, k) => `${words(cause)} ${short(values[k])} s`)].join("\n");
    return { x: one.rollout, values, title };
  });
  return el(
    "figure",
    { class: "card timeline waits" },
    stacked(`${name} · ${t("what trajectories waited for")}`, t("mean seconds of a trajectory"), t("rollout"), names, bars, words),
    el("p", { class: "note" }, t("Trajectories wait side by side, so these seconds do not add up to those of a step.")),
  );
}

function svgTitle(text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", "title");
  made.textContent = shown(text);
  return made;
}
