// Runs: the curves of all metrics, several runs over each other, live; where the time went; what failed.

import { COLOURS, drawCurves, zoomOf } from "./charts.js";
import { cut, el, fill, longText, short, shown, visible } from "./dom.js";
import { address, getJSON, getPack } from "./net.js";
import { timeline, waits } from "./times.js";
import { both, t } from "./words.js";

const FIRST = ["reward/total", "policy/loss", "policy/entropy", "policy/kl_ref", "policy/clip_fraction", "response/tokens/mean", "mismatch/logprob_mean", "critic/explained_variance", "time/step_s"];
const EVERY_MS = 3000;
const UNITS = [[/_s$/, "s"], [/_gib$/, "GiB"], [/^tokens_per_second\//, "tokens/s"], [/^tflop\//, "TFLOP"], [/tflop_per_device_s/, "TFLOP/s"], [/entropy|kl|logprob_|nats/, "nats"], [/tokens/, "tokens"], [/bytes/, "bytes"]];

// The metrics of a run, kept as columns that grow.
class Metrics {
  constructor(name) {
    this.name = name;
    this.clear();
  }

  clear() {
    this.next = 0;
    this.rows = 0;
    this.columns = new Map();
  }

  async update() {
    const { head, columns } = await getPack("metrics", { run: this.name, start: this.next });
    if (head.restarted) this.clear();
    this.next = head.next;
    head.names.forEach((name, k) => {
      if (!this.columns.has(name)) this.columns.set(name, new Array(this.rows).fill(NaN));
      const column = this.columns.get(name);
      for (const value of columns[k]) column.push(value);
    });
    this.rows += head.rows;
    for (const column of this.columns.values()) while (column.length < this.rows) column.push(NaN);
    return head.rows > 0 || head.restarted;
  }

  // Steps and values where the metric has a number.
  curve(name) {
    const steps = this.columns.get("step") ?? [];
    const column = this.columns.get(name) ?? [];
    const [x, y] = [[], []];
    column.forEach((value, i) => {
      if (!Number.isNaN(value)) {
        x.push(steps[i] ?? i);
        y.push(value);
      }
    });
    return { x, y };
  }
}

export async function runsView(main, app, state, change) {
  const runs = (app.runs = await getJSON("runs"));
  const wanted = state.run ? state.run.split("\n") : runs.filter((run) => run.metrics && !run.evaluation).slice(0, COLOURS.length).map((run) => run.name);
  let chosen = runs.filter((run) => wanted.includes(run.name));
  const metrics = chosen.filter((run) => run.metrics).map((run) => new Metrics(run.name));
  const keep = (more, again) => change((state = { ...state, ...more }), again);
  const choose = (names) => keep({ run: names.join("\n") || undefined }, true);
  const chips = (all) => all.map((run) => runChip(run, chosen, choose));
  let smooth = Number(state.smooth ?? 0);
  let text = state.metric ?? "";
  const charts = el("div", { class: "charts" });
  const phases = el("section", {});
  const search = el("input", { type: "search", placeholder: t("filter metrics"), "aria-label": t("filter metrics"), value: text, oninput: () => ((text = search.value), keep({ metric: text || undefined }), draw()) });
  const slider = el("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: smooth, "aria-label": t("smoothing"), oninput: () => ((smooth = Number(slider.value)), keep({ smooth: smooth || undefined }), refresh()) });
  const bar = el("div", { class: "bar" }, search, el("label", {}, t("smoothing"), " ", slider), el("span", { class: "note" }, t("drag to zoom, double click for all")));
  const waited = new Map();
  const drawn = new Set();
  const opened = new Map();
  let laid = null;

  const watch = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting && !entry.target.chart) drawOne(entry.target);
  }, { rootMargin: "200px" });

  // Draws a card's curves, or draws them again with what was zoomed to.
  function drawOne(card) {
    const zoom = card.chart && zoomOf(card.chart);
    card.chart?.destroy();
    const series = card.curves().filter((one) => one.x.length).map((one) => ({ ...one, smooth }));
    const place = card.querySelector(".plot");
    place.replaceChildren();
    const last = card.querySelector(".last");
    last.classList.toggle("many", series.length > 3);
    const say = (values, x) => fill(last, x === undefined ? null : el("span", { class: "unit" }, `${t("step")} ${short(x)}`), series.map((one, k) => el("b", { style: { color: COLOURS[one.colour % COLOURS.length] } }, short(values[k]))));
    const ends = series.map((one) => one.y[one.y.length - 1]);
    card.chart = drawCurves(place, series, { label: t("step"), told: (found) => (found ? say(found.values, found.x) : say(ends)) });
    if (zoom) card.chart.setScale("x", zoom);
    drawn.add(card);
    place.setAttribute("aria-label", shown(series.map(spoken).join("; ")));
    say(ends);
  }

  function names() {
    const all = [...new Set(metrics.flatMap((one) => [...one.columns.keys()]))].filter((name) => name !== "step" && name !== "time");
    const first = FIRST.filter((name) => all.includes(name));
    const rest = all.filter((name) => !first.includes(name)).sort();
    return [...first, ...rest].filter((name) => name.toLowerCase().includes(text.toLowerCase()));
  }

  // Sections of cards; `refresh` keeps them as long as the metrics have the same names, with what is open, focused and zoomed.
  function draw() {
    for (const card of drawn) card.chart.destroy();
    drawn.clear();
    watch.disconnect();
    const found = names();
    laid = found.join("\n");
    const sections = new Map();
    for (const name of found) {
      const section = FIRST.includes(name) && !text ? t("at a glance") : name.split("/")[0];
      if (!sections.has(section)) sections.set(section, []);
      sections.get(section).push(name);
    }
    const parts = text ? [] : metrics.map((one) => componentsOf(one, metrics.length > 1)).filter(Boolean);
    fill(charts, [...sections].map(([section, members], k) => {
      const cards = members.map((name) => metricCard(name, metrics));
      if (k === 0) cards.splice(1, 0, ...parts);
      const grid = el("div", { class: "grid" }, cards);
      const open = Boolean(text) || (opened.get(section) ?? k === 0);
      const observe = () => cards.forEach((card) => watch.observe(card));
      const toggled = ({ target }) => {
        if (!text) opened.set(section, target.open);
        if (target.open) observe();
      };
      return el("details", { class: "section", open, ontoggle: toggled }, el("summary", {}, visible(section, true), " ", el("span", { class: "count" }, members.length)), grid);
    }));
    if (!found.length) fill(charts, el("p", { class: "state" }, t(text ? "No metric has this in its name." : "No metrics yet. The first line comes with the first step.")));
    drawTimes();
  }

  const drawTimes = () => fill(phases, metrics.map((one) => [timeline(one), waits(one.name, waited.get(one.name))]));

  function refresh() {
    if (names().join("\n") !== laid) return draw();
    for (const card of [...drawn]) {
      if (card.getClientRects().length) {
        drawOne(card);
      } else {
        card.chart.destroy();
        card.chart = null;
        drawn.delete(card);
      }
    }
    drawTimes();
  }

  const legend = el("div", { class: "run-list" }, chips(runs));
  const errors = el("div", {}, await failures(chosen));
  let listed = JSON.stringify(runs);
  fill(main, el("h1", {}, t("Runs")), legend, metrics.length ? [bar, charts, el("h2", {}, t("Where the time went")), phases] : el("p", { class: "state" }, t("These runs have no metrics. Their records are under Groups.")), errors);
  const update = async () => {
    const changed = await Promise.all(metrics.map((one) => one.update()));
    await Promise.all(metrics.filter((_, k) => changed[k]).map(async ({ name }) => waited.set(name, await getJSON("waits", { run: name }))));
    return changed.some(Boolean);
  };
  await update();
  draw();

  // Runs that began, went on, failed or ended since. The first metrics show the view again.
  async function look() {
    const now = await getJSON("runs");
    if (JSON.stringify(now) === listed) return;
    listed = JSON.stringify(now);
    app.runs = now;
    if (!metrics.length && now.some((run) => run.metrics && (!state.run || wanted.includes(run.name)))) return app.show();
    chosen = now.filter((run) => chosen.some((one) => one.name === run.name));
    fill(legend, chips(now));
    fill(errors, await failures(chosen));
  }

  let timer = setTimeout(watchOn, EVERY_MS);
  async function watchOn() {
    const began = performance.now();
    try {
      if (!document.hidden && (await update()) && main.isConnected) refresh();
      if (!document.hidden && main.isConnected) await look();
      app.said(null);
    } catch (error) {
      app.said(error.message);
    }
    if (main.isConnected) timer = setTimeout(watchOn, Math.max(EVERY_MS, 10 * (performance.now() - began)));
  }
  let width = charts.clientWidth;
  const resized = new ResizeObserver(() => {
    if (Math.abs(charts.clientWidth - width) > 20) {
      width = charts.clientWidth;
      refresh();
    }
  });
  resized.observe(charts);
  return () => {
    clearTimeout(timer);
    watch.disconnect();
    resized.disconnect();
    for (const card of drawn) card.chart.destroy();
  };
}

function metricCard(name, metrics) {
  const unit = UNITS.find(([pattern]) => pattern.test(name))?.[1];
  const plot = el("div", { class: "plot", role: "img" });
  const card = el("figure", { class: "card chart", "data-metric": name }, el("figcaption", {}, el("span", { class: "name" }, visible(cut(name, 120), true)), unit ? el("span", { class: "unit" }, unit) : null, el("span", { class: "last" })), plot);
  card.curves = () => metrics.map((one, k) => ({ name: one.name, colour: k, ...one.curve(name) }));
  return card;
}

// A curve in words, for those who hear the page.
function spoken({ name, x, y }) {
  const finite = y.filter(Number.isFinite);
  const end = finite.length - 1;
  if (end < 0) return `${name}: –`;
  const [low, high] = finite.reduce(([a, b], value) => [Math.min(a, value), Math.max(b, value)], [Infinity, -Infinity]);
  return t("{0}: {1} first, {2} last, between {3} and {4}, steps {5} to {6}", name, short(finite[0]), short(finite[end]), short(low), short(high), x[0], x[x.length - 1]);
}

// The named parts of a run's reward in one chart; null where it has one part alone.
function componentsOf(metrics, several) {
  const all = [...metrics.columns.keys()].filter((name) => name.startsWith("reward/") && name !== "reward/total");
  if (all.length < 2) return null;
  const names = all.slice(0, COLOURS.length);
  const key = names.map((name, k) => el("span", { class: "swatch" }, el("i", { style: { background: COLOURS[k] } }), visible(cut(name.slice(7), 60), true)));
  if (all.length > names.length) key.push(el("span", { class: "note" }, t("{0} more have charts of their own", all.length - names.length)));
  const card = el("figure", { class: "card chart components" }, el("figcaption", {}, el("span", { class: "name" }, t("parts of the reward"), several ? [" · ", visible(metrics.name, true)] : null), el("span", { class: "last" })), el("div", { class: "plot", role: "img" }), el("div", { class: "legend" }, key));
  card.curves = () => names.map((name, k) => ({ name: name.slice(7), colour: k, ...metrics.curve(name) }));
  return card;
}

function runChip(run, chosen, choose) {
  const place = chosen.filter((one) => one.metrics).findIndex((one) => one.name === run.name);
  const on = place >= 0;
  const toggle = () => choose((on ? chosen.filter((one) => one.name !== run.name) : [...chosen, run]).map((one) => one.name));
  const status = run.status ? t(cut(String(run.status), 40)) : run.evaluation ? t("evaluation") : run.lesson?.title ? null : t("running or killed");
  return el(
    "div",
    { class: "run" },
    run.metrics ? el("button", { type: "button", class: "dot", "aria-pressed": String(on), "aria-label": t("show {0}", run.name), onclick: toggle, style: { "--colour": on ? COLOURS[place] : "transparent" } }) : el("span", { class: "dot none" }),
    el("div", {}, run.rollouts ? el("a", { href: address("groups", { run: run.name }) }, visible(run.name)) : el("b", {}, visible(run.name)), el("div", { class: "note" }, [run.algorithm && cut(String(run.algorithm), 120), status, run.rollouts ? t("rollouts recorded: {0}", run.rollouts[2]) : t("no records")].filter(Boolean).join(" · "))),
    run.lesson?.title ? el("p", { class: "note" }, both(run.lesson.title)) : null,
  );
}

async function failures(runs) {
  const all = await Promise.all(runs.filter((run) => run.failures).map(async (run) => [run, await getJSON("failures", { run: run.name })]));
  const items = all.flatMap(([run, found]) => found.map((one) => el("details", { class: "error" }, el("summary", {}, el("b", {}, visible(cut(String(one.kind ?? ""), 120), true)), " ", visible(cut(String(one.message ?? ""), 300), true), el("span", { class: "note" }, ` ${run.name} · `, visible(cut(String(one.where ?? ""), 200), true))), el("pre", {}, longText(String(one.traceback ?? ""), 20_000, (n) => t("{0} more letters", n))))));
  return items.length ? el("section", {}, el("h2", {}, t("Errors")), el("p", { class: "note" }, t("The first of each kind and place, with its traceback.")), items) : null;
}
