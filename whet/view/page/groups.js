// Groups: the siblings of each prompt side by side; over a whole run, sorted and filtered; and a search in all texts.

import { cut, el, fill, number, short, visible } from "./dom.js";
import { address, getJSON } from "./net.js";
import { t } from "./words.js";

const SORTS = { __proto__: null, rollout: "newest", best: "best", worst: "worst", spread: "largest spread", longest: "longest", changed: "changed most" };
const FILTERS = { __proto__: null, all: "all groups", mixed: "mixed rewards", zero_variance: "zero variance", errors: "with errors", dropped: "dropped" };
const PAGE = 100;
const FAILED = (one) => !["completed", "truncated"].includes(one.outcome);

export async function groupsView(main, app, state, change) {
  const run = state.run;
  const rollouts = await getJSON("rollouts", { run });
  if (!rollouts.length) return void fill(main, el("h1", {}, t("Groups")), el("p", { class: "state" }, t("Nothing is recorded yet. The first rollout's records come when it is trained on.")));
  const all = state.rollout === "all";
  const rollout = all ? null : state.rollout !== undefined && rollouts.includes(Number(state.rollout)) ? Number(state.rollout) : rollouts[rollouts.length - 1];
  const place = rollouts.indexOf(rollout);
  const go = (value) => change({ ...state, rollout: value, group: undefined, start: undefined }, true);
  const step = (by, words, sign) => el("button", { type: "button", class: "step", id: by < 0 ? "before" : "after", "aria-label": words, title: words, disabled: all || !(place + by in rollouts), onclick: () => go(String(rollouts[place + by])) }, sign);
  const picker = el("select", { "aria-label": t("rollout"), id: "rollout", onchange: () => go(picker.value) }, el("option", { value: "all", selected: all }, t("all rollouts")), [...rollouts].reverse().slice(0, 2000).map((each) => el("option", { value: each, selected: each === rollout }, `${t("rollout")} ${each}`)));
  const choice = (name, words, table) => el("select", { "aria-label": words, id: name, onchange: (event) => change({ ...state, [name]: event.target.value, start: undefined }, true) }, Object.entries(table).map(([key, each]) => el("option", { value: key, selected: key === (state[name] ?? Object.keys(table)[0]) }, t(each))));
  const search = el("input", { type: "search", value: state.text ?? "", placeholder: t("search all texts"), "aria-label": t("search all texts"), id: "search" });
  const form = el("form", { class: "search", onsubmit: (event) => (event.preventDefault(), change({ ...state, text: search.value || undefined }, true)) }, search, el("button", { type: "submit" }, t("search")));
  const bar = el("div", { class: "bar" }, step(-1, t("the rollout before"), "‹"), picker, step(1, t("the next rollout"), "›"), choice("sort", t("order"), SORTS), choice("filter", t("filter"), FILTERS), form);
  const body = el("div", {}, el("p", { class: "state" }, t("Reading …")));
  fill(main, el("h1", {}, t("Groups")), bar, body);
  if (state.text) await found(body, run, state);
  else if (all) await whole(body, run, state, change);
  else await one(body, run, rollout, state);
}

async function one(body, run, rollout, state) {
  const given = await getJSON("rollout", { run, rollout });
  const groups = new Map();
  for (const each of given.trajectories) {
    if (!groups.has(each.group)) groups.set(each.group, []);
    groups.get(each.group).push(each);
  }
  const sort = SORTS[state.sort] ? state.sort : "rollout";
  const rows = [...groups].map(([group, members]) => summary(group, members));
  const changes = state.sort === "changed" ? await changesOf(run, rollout) : null;
  const keys = { rollout: (g) => g.group, best: (g) => -g.mean, worst: (g) => g.mean, spread: (g) => -g.std, longest: (g) => -g.longest, changed: (g) => -Math.abs(changes?.get(g.group) ?? 0) };
  const filters = { all: () => true, mixed: (g) => g.std > 1e-6, zero_variance: (g) => g.size > 1 && g.std <= 1e-6, errors: (g) => g.failed > 0, dropped: (g) => g.dropped };
  const kept = rows.filter(filters[FILTERS[state.filter] ? state.filter : "all"]).sort((a, b) => keys[sort](a) - keys[sort](b));
  const share = given.trajectories.reduce((sum, each) => sum + (each.share ?? 0), 0);
  const count = el("p", { class: "note" }, t("{0} of {1} groups, {2} trajectories", kept.length, rows.length, given.trajectories.length), given.whole ? "" : ` · ${t("the records of this rollout are gone, its index is left")}`);
  const items = kept.slice(0, 200).map((group) => card(run, rollout, group, given, share, changes?.get(group.group), String(group.group) === state.group));
  const unchanged = changes && kept.length && kept.every((group) => (changes.get(group.group) ?? null) === null) ? el("p", { class: "note" }, t("No row of data of this rollout was played before, so no change is known.")) : null;
  fill(body, count, unchanged, items.length ? items : el("p", { class: "state" }, t("No group of this rollout is like this.")));
  if (kept.length > 200) body.append(el("p", { class: "note" }, t("The first 200 are shown.")));
  body.querySelector(".group.asked")?.scrollIntoView({ block: "center" });
}

function summary(group, members) {
  const counted = members.filter((each) => each.reward !== null && !each.baseline);
  const rewards = counted.map((each) => each.reward);
  const mean = rewards.reduce((a, b) => a + b, 0) / Math.max(rewards.length, 1);
  const std = Math.sqrt(rewards.reduce((a, b) => a + (b - mean) ** 2, 0) / Math.max(rewards.length - 1, 1));
  return { group, members, mean, std, size: rewards.length, longest: Math.max(...members.map((each) => each.num_tokens ?? 0)), failed: members.filter(FAILED).length, dropped: members.some((each) => each.dropped !== null) };
}

async function changesOf(run, rollout) {
  let found;
  do found = await getJSON("groups", { run, sort: "changed", rollout, count: 500 });
  while (found.scanned < found.rollouts);
  const { rows } = found;
  return new Map(rows.group.map((group, i) => [group, rows.change[i]]));
}

function card(run, rollout, group, given, share, change, asked) {
  const prompt = given.prompts[group.group];
  const longest = Math.max(group.longest, 1);
  const rewards = group.members.map((each) => each.reward).filter((each) => each !== null);
  const [low, high] = [Math.min(...rewards, 0), Math.max(...rewards, 1e-9)];
  const rows = group.members.map((each) => {
    const link = address("trajectory", { run, rollout, trajectory: each.trajectory, group: group.group });
    const part = share && each.share !== null ? each.share / share : NaN;
    return el(
      "tr",
      { class: FAILED(each) ? "failed" : null },
      el("td", { class: "figure reward" }, el("a", { href: link }, number(each.reward, 4)), bar((each.reward - low) / (high - low), each.reward >= group.mean ? "up" : "down"), partsOf(each)),
      el("td", {}, t(cut(each.outcome, 40)), each.baseline ? ` · ${t("greedy")}` : "", each.error ? ` · ${cut(each.error)}` : ""),
      el("td", { class: "figure" }, each.num_tokens, bar((each.num_tokens ?? 0) / longest, "plain")),
      el("td", { class: "figure" }, short(each.mean_abs_advantage)),
      el("td", { class: "figure" }, Number.isNaN(part) ? "–" : `${(100 * part).toFixed(1)} %`),
      el("td", { class: "reply" }, el("a", { href: link }, each.text || each.message ? visible((each.text || each.message).slice(0, 160), true) : t("no text"))),
    );
  });
  const heads = ["reward", "outcome", "tokens", "mean |Â|", "share of the loss", "its last message"].map((name) => el("th", { scope: "col" }, t(name)));
  const { dropped, label, task_id } = group.members[0];
  const task = cut(task_id, 120);
  return el(
    "section",
    { class: `card group${asked ? " asked" : ""}`, "data-group": group.group },
    el("header", {}, el("h2", {}, visible(cut(prompt || task, 200), true)), el("p", { class: "note" }, visible(task, true), label ? ` · ${t("label")} ${cut(label)}` : "", " · ", t("mean {0}, std {1}", short(group.mean), short(group.std)), change !== undefined && change !== null ? ` · ${t("changed by {0}", short(change))}` : "", dropped ? ` · ${t("dropped")}: ${cut(dropped)}` : "")),
    el("div", { class: "scroll" }, el("table", { class: "siblings" }, el("thead", {}, el("tr", {}, heads)), el("tbody", {}, rows))),
  );
}

// The named parts of a reward, where it has several.
function partsOf({ reward_components: parts }) {
  const names = Object.entries(parts ?? {});
  if (names.length < 2) return null;
  const title = names.slice(0, 100).map(([name, value]) => `${cut(name)} ${number(value, 5)}`).join("\n");
  const words = names.slice(0, 4).map(([name, value]) => `${cut(name, 20)} ${number(value, 3)}`).join(" · ");
  return el("div", { class: "parts", title }, words, names.length > 4 ? " …" : "");
}

function bar(share, kind) {
  return el("span", { class: `meter ${kind}`, "aria-hidden": "true" }, el("i", { style: { width: `${Math.round(100 * Math.min(Math.max(share || 0, 0), 1))}%` } }));
}

async function whole(body, run, state, change) {
  const start = Math.max(Math.trunc(Number(state.start)) || 0, 0);
  const asked = { run, sort: SORTS[state.sort] ? state.sort : "rollout", filter: FILTERS[state.filter] ? state.filter : "all", start, count: PAGE };
  for (;;) {
    const found = await getJSON("groups", asked);
    if (!body.isConnected) return;
    page(body, run, state, change, start, found);
    if (found.scanned >= found.rollouts) return;
  }
}

function page(body, run, state, change, start, { total, rows, scanned, rollouts, broken }) {
  const heads = ["rollout", "task", "trajectories", "mean", "std", "best", "change", "longest", "failed"].map((name) => el("th", { scope: "col" }, t(name)));
  const lines = rows.rollout.map((rollout, i) =>
    el(
      "tr",
      { class: rows.failed[i] ? "failed" : null },
      el("td", { class: "figure" }, rollout),
      el("td", {}, el("a", { href: address("groups", { run, rollout, group: rows.group[i] }) }, visible(cut(rows.task[i] ?? `${rows.group[i]}`, 120), true)), rows.dropped[i] ? ` · ${t("dropped")}` : ""),
      [rows.played[i], rows.mean[i], rows.std[i], rows.best[i], rows.change[i], rows.longest[i], rows.failed[i]].map((value) => el("td", { class: "figure" }, number(value, 4))),
    ),
  );
  const turn = (to, words) => el("button", { type: "button", id: words, disabled: to < 0 || to >= total || to === start, onclick: () => change({ ...state, start: to || undefined }, true) }, t(words));
  fill(
    body,
    el("p", { class: "note" }, total ? t("groups {0} to {1} of {2}", start + 1, Math.min(start + PAGE, total), total) : "", scanned < rollouts ? ` · ${t("reading: the newest {0} of {1} rollouts", scanned, rollouts)}` : ""),
    state.sort === "changed" && scanned >= rollouts && lines.length && rows.change.every((change) => change === null) ? el("p", { class: "note" }, t("No row of data of this run was played twice, so no change is known.")) : null,
    broken.length ? el("p", { class: "note failed" }, brokenWords(broken)) : null,
    lines.length ? el("div", { class: "scroll" }, el("table", { class: "list" }, el("thead", {}, el("tr", {}, heads)), el("tbody", {}, lines))) : el("p", { class: "state" }, t("No group of this run is like this.")),
    total > PAGE ? el("div", { class: "bar" }, turn(Math.max(start - PAGE, 0), "back"), turn(start + PAGE, "on")) : null,
  );
}

const brokenWords = (rollouts) => t("The files of {0} rollouts cannot be read: {1}", rollouts.length, rollouts.slice(0, 20).join(", "));

async function found(body, run, state) {
  const list = el("tbody");
  const note = el("p", { class: "note", role: "status" });
  const unread = el("p", { class: "note failed" });
  const broken = [];
  const more = el("button", { type: "button", onclick: () => go() }, t("search on in older rollouts"));
  let before;
  let count = 0;
  async function go() {
    more.disabled = true;
    const answer = await getJSON("search", { run, text: state.text, before });
    before = answer.before;
    count += answer.hits.length;
    broken.push(...answer.broken);
    fill(unread, broken.length ? brokenWords(broken) : "");
    for (const hit of answer.hits) {
      const link = address("trajectory", { run, rollout: hit.rollout, trajectory: hit.trajectory, group: hit.group });
      list.append(el("tr", {}, el("td", { class: "figure" }, hit.rollout), el("td", { class: "figure" }, number(hit.reward, 4)), el("td", {}, t(cut(hit.outcome))), el("td", { class: "reply" }, el("a", { href: link }, marked(hit.text, state.text)))));
    }
    more.hidden = before === null;
    more.disabled = false;
    note.textContent = t(before === null ? "{0} found in all rollouts" : "{0} found down to rollout {1}", count, before);
  }
  const heads = ["rollout", "reward", "outcome", "text"].map((name) => el("th", { scope: "col" }, t(name)));
  fill(body, note, unread, el("div", { class: "scroll" }, el("table", { class: "list" }, el("thead", {}, el("tr", {}, heads)), list)), more);
  await go();
}

function marked(text, word) {
  const at = text.toLowerCase().indexOf(word.toLowerCase());
  if (at < 0) return visible(text, true);
  return [visible(text.slice(0, at), true), el("mark", {}, visible(text.slice(at, at + word.length), true)), visible(text.slice(at + word.length), true)];
}
