// Compare: one prompt at two steps or in two runs, and where trainer and engine differ most.

import { COLOURS, drawCurves } from "./charts.js";
import { cut, el, fill, number, short, visible } from "./dom.js";
import { address, getJSON, getPack } from "./net.js";
import { textOfBytes } from "./pack.js";
import { callsOf, readTrajectory } from "./trajectory.js";
import { t } from "./words.js";

const MOST_WORDS = 2500;

export async function compareView(main, app, state, change) {
  if (!state.trajectory) return void (await worst(main, state, change));
  const left = { run: state.run, rollout: state.rollout, trajectory: state.trajectory, group: state.group };
  const { trajectories: same, broken } = await getJSON("same", left);
  const key = (one) => [one.run, one.rollout_id ?? one.rollout, one.trajectory].join("\n");
  const others = same.filter((one) => key(one) !== key({ ...left, rollout_id: left.rollout }));
  const chosen = state.run2 ? { run: state.run2, rollout: state.rollout2, trajectory: state.trajectory2, group: state.group2 } : null;
  const picker = el(
    "select",
    { id: "other", "aria-label": t("compare with"), onchange: () => {
      const one = others[picker.value];
      change({ ...state, run2: one.run, rollout2: one.rollout_id, trajectory2: one.trajectory, group2: one.group }, true);
    } },
    chosen ? null : el("option", { selected: true, disabled: true }, t("choose one …")),
    others.map((one, i) => el("option", { value: i, selected: chosen && key(one) === key({ ...chosen, rollout_id: chosen.rollout }) }, `${one.run} · ${t("rollout")} ${one.rollout_id} · ${cut(one.trajectory, 120)} · ${number(one.reward, 4)}`)),
  );
  const head = [el("h1", {}, t("Compare")), el("p", { class: "note" }, t("Other trajectories of the same prompt in these runs: {0}.", others.length)), broken.length ? el("p", { class: "note failed" }, t("The files of {0} runs cannot be read: {1}", broken.length, broken.slice(0, 20).join(", "))) : null];
  if (!others.length) return void fill(main, head, el("p", { class: "state" }, t("This prompt was played once. Name a second run on the command line, or wait for its next epoch.")));
  const body = el("div");
  fill(main, head, el("div", { class: "bar" }, el("label", {}, t("compare with"), " ", picker)), body);
  if (!chosen) return void fill(body, el("p", { class: "state" }, t("Choose the other trajectory above.")));
  const [a, b] = (await Promise.all([getPack("trajectory", left), getPack("trajectory", chosen)])).map(readTrajectory);
  const drift = el("div", { class: "plot" });
  fill(body, el("div", { class: "sides" }, side(a, left), side(b, chosen)), difference(a, b), el("h2", {}, t("Drift of log-probs")), driftWords(a, b), drift);
  return driftChart(drift, a, b);
}

function side({ head }, given) {
  const fact = head.samples[0];
  const facts = [[t("run"), head.run], [t("rollout"), head.rollout], [t("reward"), number(fact.reward, 5)], [t("outcome"), t(cut(fact.outcome))], [t("turns"), head.turns.length], [t("mean |Â|"), short(head.mean_abs_advantage)]];
  return el("section", { class: "card" }, el("h2", {}, el("a", { href: address("trajectory", given) }, visible(cut(fact.trajectory, 300)))), el("dl", { class: "facts" }, facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, visible(String(value)))))));
}

const replyOf = ({ head }) => head.turns.map((turn) => [turn.reasoning_content, turn.content, turn.tool_calls && callsOf(turn.tool_calls)].filter(Boolean).join("\n")).join("\n\n");
const wordsIn = (text) => text.match(/[\u3400-\u9fff]|[^\s\u3400-\u9fff]+|\s+/gu) ?? [];

function difference(a, b) {
  const [left, right] = [wordsIn(replyOf(a)), wordsIn(replyOf(b))];
  const title = el("h2", {}, t("Replies"));
  if (left.length > MOST_WORDS || right.length > MOST_WORDS) return el("section", {}, title, el("p", { class: "note" }, t("The replies are too long to be compared word by word.")));
  const parts = diff(left, right).map(([kind, text]) => el(kind === "same" ? "span" : kind === "gone" ? "del" : "ins", {}, visible(text)));
  return el("section", {}, title, el("p", { class: "note" }, el("del", {}, t("only in the first")), " ", el("ins", {}, t("only in the second"))), el("div", { class: "text diff" }, parts));
}

// The shortest way from one list of words to the other: ["same" | "gone" | "new", text].
export function diff(left, right) {
  const [n, m] = [left.length, right.length];
  const table = Array.from({ length: n + 1 }, () => new Uint16Array(m + 1));
  for (let i = n - 1; i >= 0; i--) for (let j = m - 1; j >= 0; j--) table[i][j] = left[i] === right[j] ? table[i + 1][j + 1] + 1 : Math.max(table[i + 1][j], table[i][j + 1]);
  const out = [];
  const put = (kind, text) => (out.length && out[out.length - 1][0] === kind ? (out[out.length - 1][1] += text) : out.push([kind, text]));
  let [i, j] = [0, 0];
  while (i < n || j < m) {
    if (i < n && j < m && left[i] === right[j]) put("same", left[i++]), j++;
    else if (j >= m || (i < n && table[i + 1][j] >= table[i][j + 1])) put("gone", left[i++]);
    else put("new", right[j++]);
  }
  return out;
}

// Places that both have: as long as every token before is the same, the two log-probs are of one distribution each.
function common(a, b) {
  const [left, right] = [a.samples[0], b.samples[0]];
  const places = [];
  for (let i = 0; i < Math.min(left.n, right.n) && left.tokens[i] === right.tokens[i]; i++) if (left.origin[i] === 1 && right.origin[i] === 1) places.push(i);
  return places;
}

function driftWords(a, b) {
  const places = common(a, b);
  const inside = ({ samples: [sample] }) => {
    const all = [];
    for (let i = 0; i < sample.n; i++) if (sample.first_weights && !Number.isNaN(sample.first_weights[i]) && sample.last_logprobs && !Number.isNaN(sample.last_logprobs[i])) all.push(sample.last_logprobs[i] - sample.logprobs[i]);
    return all.length ? t("mean {0}, largest {1} nats over {2} tokens", short(all.reduce((s, x) => s + x, 0) / all.length), short(all.reduce((s, x) => (Math.abs(x) > Math.abs(s) ? x : s), 0)), all.length) : t("used once, so there is no later log-prob");
  };
  return [
    el("p", {}, places.length ? t("The replies share {0} tokens from their beginning; there the two policies are compared below.", places.length) : t("The replies part at their first token, so no token has two comparable log-probs. The curves below are each one's own.")),
    el("ul", {}, el("li", {}, t("the first, from sampling to its last use: {0}", inside(a))), el("li", {}, t("the second, from sampling to its last use: {0}", inside(b)))),
  ];
}

function driftChart(place, a, b) {
  const places = common(a, b);
  const curve = ({ samples: [sample] }, name) => {
    const [x, y] = [[], []];
    const end = places.length ? places[places.length - 1] + 1 : sample.n;
    for (let i = Math.max(sample.origin.indexOf(1), 0); i < end; i++) x.push(i), y.push(sample.origin[i] === 1 ? sample.logprobs[i] : NaN);
    return { name, x, y };
  };
  const series = [curve(a, t("the first")), { ...curve(b, t("the second")), colour: 1 }].filter((one) => one.x.length);
  if (!series.length) return undefined;
  const names = series.map((one, k) => el("span", { class: "swatch" }, el("i", { style: { background: COLOURS[one.colour ?? k] } }), one.name));
  place.before(el("div", { class: "legend" }, el("span", { class: "note" }, t("sampled log-prob (nats) by place of the token")), names));
  const chart = drawCurves(place, series, { height: 200, sync: "drift", points: true });
  return () => chart.destroy();
}

async function worst(main, state, change) {
  const { run } = state;
  const rollouts = await getJSON("rollouts", { run });
  const rollout = state.rollout !== undefined ? Number(state.rollout) : rollouts[rollouts.length - 1];
  const title = [el("h1", {}, t("Compare")), el("p", { class: "note" }, t("Open a trajectory, and choose Compare there, to see it beside another one of its prompt. Here: the trained tokens on which trainer and engine differ most."))];
  if (rollout === undefined) return void fill(main, title, el("p", { class: "state" }, t("Nothing is recorded yet. The first rollout's records come when it is trained on.")));
  const picker = el("select", { id: "rollout", "aria-label": t("rollout"), onchange: () => change({ ...state, rollout: picker.value }, true) }, [...rollouts].reverse().slice(0, 2000).map((each) => el("option", { value: each, selected: each === rollout }, `${t("rollout")} ${each}`)));
  const found = await getJSON("worst", { run, rollout });
  const rows = found.worst.map((one) => {
    const link = address("trajectory", { run, rollout, trajectory: one.trajectory, group: one.group, sample: one.order || undefined, token: one.place, colour: "mismatch" });
    return el("tr", {}, el("td", {}, el("a", { href: link }, one.piece ? el("code", {}, visible(textOfBytes(new Uint8Array(one.piece)), true)) : `#${one.token}`)), [one.trained - one.sampled, one.sampled, one.trained, one.version, one.place].map((value) => el("td", { class: "figure" }, number(value, 5))), el("td", {}, visible(cut(one.trajectory, 120))));
  });
  const heads = ["token", "trainer − engine", "engine", "trainer", "policy version", "place", "trajectory"].map((name) => el("th", { scope: "col" }, t(name)));
  const empty = el("p", { class: "state" }, t(found.tokens ? "Trainer and engine agree on every token." : "The trainer's log-probs were not recorded in this rollout."));
  fill(main, title, el("div", { class: "bar" }, picker, el("span", { class: "note" }, t("{0} trained tokens, in nats", found.tokens))), rows.length ? el("div", { class: "scroll" }, el("table", { class: "list" }, el("thead", {}, el("tr", {}, heads)), el("tbody", {}, rows))) : empty);
}
