// The page: its addresses, its header, its keys.

import { compareView } from "./compare.js";
import { el, fill, shown, visible } from "./dom.js";
import { groupsView } from "./groups.js";
import { address, getJSON, getPack } from "./net.js";
import { runsView } from "./runs.js";
import { readTrajectory, trajectoryView } from "./trajectory.js";
import { both, languageNow, setLanguage, t } from "./words.js";

const main = document.getElementById("main");
const VIEWS = { __proto__: null, runs: runsView, groups: groupsView, trajectory: showTrajectory, compare: compareView, lessons: lessonsView };
const app = { runs: [], said, show };
let leave = null;
let turn = 0;

// The view and the state that an address means.
function read() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  return { view: VIEWS[path] ? path : app.runs.some((run) => run.lesson?.title) ? "lessons" : "runs", state: Object.fromEntries(new URLSearchParams(query ?? "")) };
}

// Keeps a view's state in the address; `again` shows the view again, as a new place in the browser's history.
const changer = (view) => (state, again = false) => {
  const target = address(view, state);
  if (again) location.hash = target;
  else history.replaceState(history.state, "", target);
};

async function show() {
  const mine = ++turn;
  const focused = document.activeElement === document.body ? null : document.activeElement;
  const back = arrive();
  leave?.();
  leave = null;
  const { view, state } = read();
  if (!state.run && view !== "runs") state.run = app.runs.find((run) => run.rollouts && !run.evaluation)?.name ?? app.runs.find((run) => run.rollouts)?.name;
  header(view, state);
  document.title = `${t(TITLES[view])} – whet`;
  const place = el("div", { class: `view ${view}` }, el("p", { class: "state" }, t("Reading …")));
  fill(main, place);
  try {
    const after = await VIEWS[view](place, app, state, changer(view));
    if (mine === turn) leave = after ?? null;
    else after?.();
    said(null);
    if (mine === turn) settle(focused, back);
  } catch (error) {
    if (mine === turn) fill(place, el("p", { class: "state failed", role: "alert" }, t("This cannot be shown:"), " ", visible(String(error.message))));
    if (error.constructor.name !== "Refused") console.error(error);
  }
}

// How far each place in the browser's history was scrolled.
const scrolled = new Map();
let here = 0;

// Notes how far the place that is left was scrolled; returns how far the new one was when it was left, if it was there before.
function arrive() {
  scrolled.set(here, scrollY);
  here = history.state?.place ?? scrolled.size;
  history.replaceState({ place: here }, "");
  return scrolled.get(here);
}

// The keyboard goes on where it was, or at the beginning of the new view.
function settle(focused, back) {
  if (focused && !focused.isConnected) (document.getElementById(focused.id || "main") ?? main).focus({ preventScroll: true });
  if (back !== undefined) scrollTo(0, back);
}

const TITLES = { runs: "Runs", groups: "Groups", trajectory: "Trajectory", compare: "Compare", lessons: "Lessons" };

function header(view, state) {
  const lessons = app.runs.some((run) => run.lesson?.title);
  const keep = { run: state.run && !state.run.includes("\n") ? state.run : undefined };
  const tabs = [lessons ? ["lessons", {}] : null, ["runs", {}], ["groups", { ...keep, rollout: state.rollout }], view === "trajectory" ? ["trajectory", state] : null, ["compare", keep]];
  const links = tabs.filter(Boolean).map(([name, given]) => el("a", { href: address(name, given), id: `to-${name}`, "aria-current": name === view ? "page" : null }, t(TITLES[name])));
  const recorded = app.runs.filter((run) => run.rollouts);
  const picker = view !== "runs" && view !== "lessons" && recorded.length > 1 ? el("select", { "aria-label": t("run"), id: "run", onchange: () => (location.hash = address(view === "trajectory" ? "groups" : view, { run: picker.value })) }, recorded.map((run) => el("option", { value: run.name, selected: run.name === state.run }, run.name))) : null;
  const theme = el("button", { type: "button", class: "icon", id: "theme", title: t("light or dark"), "aria-label": t("light or dark"), onclick: flip }, "◐");
  const other = languageNow() === "en" ? "中文" : "English";
  const language = el("button", { type: "button", class: "icon", id: "language", lang: languageNow() === "en" ? "zh-CN" : "en", onclick: () => speak(languageNow() === "en" ? "zh" : "en") }, other);
  const keys = el("button", { type: "button", class: "icon", id: "keys", title: t("keys"), "aria-label": t("keys"), onclick: help }, "?");
  fill(document.getElementById("top"), el("a", { class: "brand", href: address("runs") }, "whet"), el("nav", { "aria-label": t("views") }, links), picker, el("span", { class: "grow" }), language, theme, keys, el("p", { id: "said", role: "status", hidden: true }));
  document.getElementById("skip").textContent = t("Skip to content");
}

// A line under the header; null: none.
function said(words) {
  const place = document.getElementById("said");
  if (!place) return;
  place.hidden = !words;
  place.textContent = shown(words ?? "");
}

function speak(language) {
  setLanguage(language);
  remember("language", language);
  show();
}

function flip() {
  const dark = document.documentElement.dataset.theme ? document.documentElement.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = dark ? "light" : "dark";
  remember("theme", document.documentElement.dataset.theme);
  show();
}

// Browsers may refuse to store anything; the page then begins as the system is set.
function remember(name, value) {
  try {
    localStorage.setItem(`whet-${name}`, value);
  } catch {
    // nothing is kept
  }
}

function recall(name) {
  try {
    return localStorage.getItem(`whet-${name}`);
  } catch {
    return null;
  }
}

function help() {
  const keys = [["1 – 4", "the views, from left to right"], ["← → ↑ ↓", "the token before, after, above, below"], ["Home End", "the first and the last token"], ["c", "the next colour of tokens"], ["s", "tokens or steps"], ["/", "search"], ["l", "English or Chinese"], ["d", "light or dark"], ["?", "this list"]];
  const dialog = el("dialog", { class: "help", "aria-label": t("Keys"), onclose: () => dialog.remove() }, el("h2", {}, t("Keys")), el("dl", {}, keys.map(([key, words]) => el("div", {}, el("dt", {}, el("kbd", {}, key)), el("dd", {}, t(words))))), el("form", { method: "dialog" }, el("button", {}, t("close"))));
  document.body.append(dialog);
  dialog.showModal();
}

async function showTrajectory(place, _app, state, change) {
  if (!state.trajectory) return void fill(place, el("h1", {}, t("Trajectory")), el("p", { class: "state" }, t("Choose one under Groups.")));
  const asked = { run: state.run, rollout: state.rollout, trajectory: state.trajectory, group: state.group };
  const pack = await getPack("trajectory", asked);
  const trajectory = readTrajectory(pack);
  const algo = pack.head.config.algo ?? {};
  const credit = pack.head.samples[0].order !== null && (algo.whiten || algo.name) ? await getPack("credit", { run: state.run, rollout: state.rollout }) : null;
  const compare = el("a", { class: "button", href: address("compare", asked) }, t("Compare"));
  const file = el("a", { class: "button", id: "export", download: "", href: `api/export?${new URLSearchParams({ ...clean(asked), language: languageNow() })}` }, t("Export"));
  const group = el("a", { class: "button", href: address("groups", { run: state.run, rollout: state.rollout, group: pack.head.group }) }, t("Its group"));
  const page = trajectoryView(trajectory, credit, state, change, [group, compare, file]);
  fill(place, page);
  page.ready();
}

const clean = (given) => Object.fromEntries(Object.entries(given).filter(([, value]) => value !== undefined));

async function lessonsView(place) {
  const lessons = app.runs.filter((run) => run.lesson?.title);
  const items = lessons.map((run) => {
    const { lesson } = run;
    const links = (lesson.stops ?? []).map((stop) => el("li", {}, el("a", { href: address("trajectory", { run: run.name, ...stop.at }) }, both(stop.words))));
    return el("section", { class: "card lesson" }, el("h2", {}, both(lesson.title)), lesson.text.map((words) => el("p", {}, both(words))), el("ul", { class: "stops" }, links), el("p", {}, el("a", { href: address("groups", { run: run.name, rollout: 0 }) }, t("All its trajectories"))));
  });
  fill(place, el("h1", {}, t("Lessons")), el("p", { class: "note" }, t("Conversations, log-probs, the critic's values and the rewards (or a judge's grades) are made up; every other number was computed by whet's own rubric, credit, loss and records when this page was started.")), items);
}

const KEYS = { l: () => speak(languageNow() === "en" ? "zh" : "en"), d: flip, "?": help };

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, textarea, select, dialog")) return;
  const tabs = document.querySelectorAll("#top nav a");
  if (/^[1-9]$/.test(event.key) && tabs[event.key - 1]) location.hash = tabs[event.key - 1].getAttribute("href");
  else if (event.key === "/") document.querySelector("input[type=search]")?.focus();
  else if (event.key === "s") document.querySelector(".choices button[data-view][aria-pressed=false]")?.click();
  else if (event.key === "c") nextColour();
  else if (KEYS[event.key]) KEYS[event.key]();
  else return;
  event.preventDefault();
});

function nextColour() {
  const picker = document.getElementById("colour");
  if (!picker || picker.disabled) return;
  picker.selectedIndex = (picker.selectedIndex + 1) % picker.options.length;
  picker.dispatchEvent(new Event("change"));
}

async function start() {
  document.documentElement.dataset.theme = recall("theme") ?? "";
  if (!document.documentElement.dataset.theme) delete document.documentElement.dataset.theme;
  setLanguage(recall("language") ?? (navigator.language.startsWith("zh") ? "zh" : "en"));
  try {
    app.runs = await getJSON("runs");
  } catch (error) {
    fill(main, el("p", { class: "state failed", role: "alert" }, visible(error.message)));
    return;
  }
  history.scrollRestoration = "manual";
  addEventListener("hashchange", show);
  document.getElementById("skip").addEventListener("click", (event) => (event.preventDefault(), main.focus()));
  await show();
}

start();
