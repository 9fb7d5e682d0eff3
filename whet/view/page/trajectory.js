// A trajectory: the conversation as a person reads it, and its tokens under it.

import { cut, el, fill, longText, number, short, visible } from "./dom.js";
import { creditOf, there } from "./maths.js";
import { Pieces } from "./pack.js";
import { QUANTITIES, quantitiesOf, scaleOf, wordsOf } from "./scales.js";
import { Strip } from "./strip.js";
import { tokenPanel } from "./token.js";
import { both, t } from "./words.js";

const LONG_TEXT = 12000;
const PARTS_SHOWN = 12;

// A trajectory from its pack: per sample an object with its columns, its length and its place among all tokens.
export function readTrajectory({ head, columns }) {
  const samples = head.samples.map(() => ({ n: 0, offset: 0 }));
  for (const [name, values] of Object.entries(columns)) {
    const found = /^(\d+):(.+)$/.exec(name);
    if (found) samples[found[1]][found[2]] = values;
  }
  let offset = 0;
  for (const sample of samples) {
    Object.assign(sample, { n: sample.tokens?.length ?? 0, offset });
    sample.origin ??= new Int8Array(sample.n).fill(-1);
    offset += sample.n;
  }
  return { head, samples, pieces: new Pieces(columns) };
}

// The turns of each sample: where their context and their sampled tokens are.
export function turnsOf({ head, samples }) {
  const out = [];
  let [sample, at] = [0, 0];
  head.turns.forEach((turn, number) => {
    if (turn.restart && number > 0) [sample, at] = [sample + 1, 0];
    const context = at;
    const start = at + turn.num_context;
    at = start + turn.num_tokens;
    if (samples[sample] && at <= samples[sample].n) out.push({ number, turn, sample, context, start, end: at });
  });
  return out;
}

// The view. state: { sample, token, colour, view, use }; change(state) keeps it in the address. actions: nodes for the title's line.
export function trajectoryView(trajectory, credit, state, change, actions = []) {
  const { head } = trajectory;
  const credits = creditOf(trajectory, credit);
  const turns = turnsOf(trajectory);
  const place = Math.min(Number(state.sample ?? 0), trajectory.samples.length - 1);
  const sample = trajectory.samples[place];
  const quantities = quantitiesOf(trajectory.samples);
  let colour = quantities.includes(state.colour) ? state.colour : quantities[0];
  const panel = el("section", { class: "panel", "aria-label": t("token") });
  const context = { trajectory, credit, credits, place, use: state.use === "last" ? "last" : "first", go: (i) => choose(i), setUse: (use) => ((context.use = use), change({ ...state, use }), showToken()) };
  let scale = scaleOf(colour, trajectory.samples);
  const strip = new Strip({
    sample,
    text: (i) => trajectory.pieces.text(sample.offset + i),
    colour: (s, i) => scale.colour(s, i),
    title: (i) => `#${i}  ${wordsOf(colour, scale, sample, i)}`,
    choose: (i) => choose(i),
  });
  const body = el("div", { class: "tokens-body" });
  const legend = el("div", { class: "legend" });

  function showToken() {
    const i = state.token === undefined ? -1 : Number(state.token);
    const known = i >= 0 && i < sample.n;
    fill(panel, known ? tokenPanel(context, i) : el("p", { class: "state" }, t("Choose a token, with a click or with the arrow keys.")));
    return known ? i : -1;
  }

  function choose(i) {
    state = { ...state, token: String(i) };
    change(state);
    strip.mark(showToken());
  }

  function showColour(name) {
    colour = name;
    scale = scaleOf(name, trajectory.samples);
    fill(legend, legendOf(name, scale));
    strip.redraw();
  }

  function showBody() {
    const steps = state.view === "steps";
    fill(body, steps ? stepView(trajectory, credits, turns.filter((each) => each.sample === place), jump) : [el("div", { class: "token-columns" }, strip.box, panel)]);
    for (const button of switches.querySelectorAll("button")) button.setAttribute("aria-pressed", String((button.dataset.view === "steps") === steps));
    picker.disabled = steps;
    legend.hidden = steps;
    if (!steps) strip.mark(showToken());
  }

  function jump(i) {
    state = { ...state, view: undefined };
    showBody();
    choose(i);
    strip.box.focus({ preventScroll: true });
    strip.box.scrollIntoView({ block: "center" });
  }

  const option = (name) => el("option", { value: name, selected: name === colour }, t(QUANTITIES[name][0]));
  const picker = el("select", { "aria-label": t("colour"), id: "colour", onchange: () => (change((state = { ...state, colour: picker.value })), showColour(picker.value)) }, quantities.map(option));
  const viewButton = (name, words) => el("button", { type: "button", class: "choice", "data-view": name, onclick: () => (change((state = { ...state, view: name === "steps" ? "steps" : undefined })), showBody()) }, t(words));
  const switches = el("div", { class: "choices", role: "group", "aria-label": t("view") }, viewButton("tokens", "tokens"), viewButton("steps", "steps"));
  const picks = trajectory.samples.length > 1 ? el("select", { "aria-label": t("sample"), onchange: (event) => change({ ...state, sample: event.target.value, token: undefined }, true) }, trajectory.samples.map((_, k) => el("option", { value: k, selected: k === place }, t("sample {0}", k)))) : null;
  const bar = el("div", { class: "bar" }, el("label", {}, t("colour"), " ", picker), switches, picks, legend);
  const empty = el("p", { class: "state" }, t("Its tokens were not recorded (observe.records.trajectories)."));
  showColour(colour);
  if (sample.n) showBody();
  const title = el("h2", { class: "below-top" }, t("Tokens"));
  const page = el("article", { class: "trajectory" }, titleOf(trajectory, actions), lessonWords(head), conversation(trajectory, turns, place, jump), title, sample.n ? [bar, body] : empty);
  page.ready = () => {
    if (!sample.n) return;
    strip.mark(showToken());
    if (state.token !== undefined) title.scrollIntoView({ block: "start" });
  };
  return page;
}

function titleOf({ head, samples }, actions) {
  const fact = head.samples[0];
  const count = samples.reduce((sum, each) => sum + each.n, 0);
  const facts = [
    [t("reward"), number(fact.reward, 5)],
    [t("outcome"), t(cut(fact.outcome))],
    [t("rollout"), head.rollout],
    [t("group"), head.group],
    [t("tokens"), count],
    [t("turns"), head.turns.length],
    [t("mean |Â|"), short(head.mean_abs_advantage)],
    [t("algorithm"), cut(String(head.config.algo?.name ?? "–"), 120)],
  ];
  if (fact.dropped) facts.push([t("dropped"), cut(fact.dropped)]);
  if (fact.stop) facts.push([t("stopped by"), cut(fact.stop, 300)]);
  const components = Object.entries(fact.reward_components ?? {}).filter(() => Object.keys(fact.reward_components).length > 1 || fact.reward_detail);
  return el(
    "header",
    { class: "title" },
    el("div", { class: "title-line" }, el("h1", {}, visible(cut(fact.trajectory, 300))), el("div", { class: "actions" }, actions)),
    el("dl", { class: "facts" }, facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, visible(String(value)))))),
    components.length ? el("p", { class: "note" }, t("reward"), ": ", written(components.slice(0, PARTS_SHOWN))) : null,
    components.length > PARTS_SHOWN ? el("details", { class: "note" }, el("summary", {}, t("{0} more parts", components.length - PARTS_SHOWN)), written(components.slice(PARTS_SHOWN))) : null,
    fact.reward_detail ? el("p", { class: "note" }, longText(fact.reward_detail, 2000, (n) => t("{0} more letters", n))) : null,
    fact.error ? el("details", { class: "error" }, el("summary", {}, visible(cut(`${fact.error.kind}: ${fact.error.message ?? ""}`, 600))), el("pre", {}, longText(fact.error.traceback ?? "", LONG_TEXT, (n) => t("{0} more letters", n)))) : null,
  );
}

const written = (components) => components.map(([name, value], k) => [k ? " · " : "", visible(cut(name), true), " ", number(value, 5)]);

function lessonWords(head) {
  const lesson = head.lesson;
  if (!lesson?.title) return null;
  const own = lesson.trajectories?.[head.samples[0].trajectory];
  return el("section", { class: "lesson" }, el("h2", {}, both(lesson.title)), lesson.text.map((each) => el("p", {}, both(each))), own ? el("p", {}, both(own)) : null);
}

function conversation(trajectory, turns, place, jump) {
  const { head, pieces, samples } = trajectory;
  const messages = head.prompt.map((each) => message(each.role ?? t("prompt"), "prompt", each, null));
  head.turns.forEach((turn, k) => {
    const found = turns.find((each) => each.number === k);
    if (k > 0 && found && !turn.restart && turn.num_context > 0) {
      const at = samples[found.sample].offset;
      const text = pieces.join(at + found.context, at + found.start);
      const words = text === null ? t("{0} tokens; their texts need the run's tokenizer", turn.num_context) : text;
      const notes = head.notes.filter((note) => note.turn === k - 1 && note.tool).map((note) => cut(note.tool));
      messages.push(folded(notes.length ? `${t("reply of")} ${notes.join(", ")}` : t("the environment's reply"), words, t("{0} tokens", turn.num_context)));
    }
    if (turn.restart && k > 0) messages.push(el("p", { class: "note" }, t("The history was rewritten here: a new sample begins.")));
    const go = found && found.sample === place && turn.num_tokens > 0 ? () => jump(found.start) : null;
    messages.push(message(turn.role ?? "assistant", "model", turn, go));
  });
  return el("section", { class: "conversation", "aria-label": t("Conversation") }, el("h2", {}, t("Conversation")), messages);
}

function message(role, kind, given, go) {
  const sampled = kind === "model" ? t("{0} tokens", given.num_tokens) + (given.finish && given.finish !== "stop" ? `, ${t(given.finish)}` : "") : "";
  return el(
    "div",
    { class: `message ${kind}` },
    el("div", { class: "message-head" }, el("b", {}, visible(role)), el("span", {}, sampled), go ? el("button", { type: "button", class: "quiet", onclick: go }, t("its tokens")) : null),
    given.reasoning_content ? el("details", { class: "thinking" }, el("summary", {}, t("thinking")), el("div", { class: "text" }, longText(given.reasoning_content, LONG_TEXT, (n) => t("{0} more letters", n)))) : null,
    given.content ? el("div", { class: "text" }, longText(given.content, LONG_TEXT, (n) => t("{0} more letters", n))) : null,
    given.tool_calls ? folded(t("tool calls"), indented(given.tool_calls), "", callsOf(given.tool_calls)) : null,
  );
}

function folded(title, text, more, peek = text) {
  return el("details", { class: "message environment" }, el("summary", {}, el("b", {}, visible(title, true)), el("span", {}, more), el("span", { class: "peek" }, visible(peek.trim().slice(0, 90), true))), el("div", { class: "text" }, longText(text, LONG_TEXT, (n) => t("{0} more letters", n))));
}

// Names and arguments of calls, in a line.
export function callsOf(text) {
  try {
    return JSON.parse(text).map((call) => `${call.function.name} ${JSON.stringify(call.function.arguments)}`).join(" · ");
  } catch {
    return text;
  }
}

function indented(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

function legendOf(name, scale) {
  const origins = [["prompt", "prompt"], ["model", "model"], ["environment", "environment"]].map(([kind, words]) => el("span", { class: `token ${kind} sample` }, t(words)));
  const colours = { mask: [["trains-yes", "trains"]], clip: [["clip-high", "high"], ["clip-low", "low"], ["clip-dual", "dual"], ["clip-out", "left out"]] }[scale.kind];
  const swatches = colours?.map(([kind, words]) => el("span", { class: "swatch" }, el("i", { class: kind }), t(words)));
  const bar = scale.ends.length ? el("span", { class: `scale ${scale.kind}` }, el("span", {}, ends(name, scale)[0]), el("i", {}), el("span", {}, ends(name, scale)[1])) : null;
  return [el("span", { class: "origins" }, origins), swatches ?? bar];
}

function ends(name, scale) {
  const [low, high] = [scale.ends[0], scale.ends[scale.ends.length - 1]];
  return name === "rank" ? [short(10 ** low), short(10 ** high)] : [short(low), short(high)];
}

// A turn as one action, and what ties it to its tokens.
function stepView(trajectory, credits, turns, jump) {
  const { head, samples } = trajectory;
  const algo = head.config.algo ?? {};
  const rows = turns.filter((each) => each.end > each.start).map((each) => [stepRow(each), stepSums(each)]);

  function sums({ sample: k, start, end }) {
    const sample = samples[k];
    const add = (name) => sum(sample[name], start, end);
    const trained = [];
    for (let i = start; i < end; i++) if (credits.trains[sample.offset + i]) trained.push(i);
    const logRatio = trained.reduce((s, i) => s + (sample.first_logprobs && sample.old_logprobs ? sample.first_logprobs[i] - sample.old_logprobs[i] : NaN), 0);
    return { sample, trained, logprob: add("logprobs"), logRatio, loss: add("first_losses"), advantage: trained.length && sample.advantages ? trained.reduce((s, i) => s + sample.advantages[i], 0) / trained.length : NaN };
  }

  function stepRow(each) {
    const found = sums(each);
    const text = (each.turn.content || (each.turn.tool_calls ? callsOf(each.turn.tool_calls) : "")).slice(0, 120);
    const call = each.turn.tool_calls ? t("tool call") : t("reply");
    const cells = [each.end - each.start, found.logprob, Math.exp(found.logRatio), found.advantage, found.loss].map((value, k) => el("td", { class: "figure", "data-kind": ["tokens", "logprob", "ratio", "advantage", "loss"][k] }, number(value, 5)));
    return el("tr", { "data-step": each.number }, el("th", { scope: "row" }, `${each.number + 1} · ${call}`, el("div", { class: "peek" }, visible(text, true))), cells, el("td", {}, el("button", { type: "button", class: "quiet", onclick: () => jump(each.start) }, t("its tokens"))));
  }

  function stepSums(each) {
    const { trained, sample } = sums(each);
    if (sample.values && sample.td_errors && trained.length && algo.name === "ppo") return el("tr", { class: "ties" }, el("td", { colspan: 7 }, actionError(sample, trained)));
    return null;
  }

  function actionError(sample, trained) {
    const gamma = algo.gamma;
    const [first, last] = [trained[0], trained[trained.length - 1]];
    const next = credits.next[sample.offset + last];
    const ahead = next < 0 ? credits.beyond : credits.chain.values[next];
    let [rewards, errors, factor] = [0, 0, 1];
    for (const i of trained) {
      rewards += factor * credits.rewards[sample.offset + i];
      errors += factor * credits.delta[sample.offset + i];
      factor *= gamma;
    }
    const whole = rewards + factor * ahead - sample.values[first];
    return el(
      "p",
      {},
      el("span", { class: "line" }, `R + γⁿV′ − V = ${short(rewards)} + ${short(factor)} · ${short(ahead)} − ${short(sample.values[first])} = `, el("b", { "data-kind": "action" }, number(whole)), " = Σ γᵏ δ = ", el("b", { "data-kind": "tokens" }, number(errors))),
    );
  }

  const heads = ["action", "tokens", "log π", "ρ", "mean Â", "share of the loss", ""].map((name) => el("th", { scope: "col" }, name && t(name)));
  if (!rows.length) return el("p", { class: "state" }, t("The model took no step in this sample."));
  const tied = algo.name === "ppo" ? ["As one step of n tokens its TD error is R + γⁿV′ − V: its rewards, and the value of the next action's first token less that of its own. It is the discounted sum of its tokens' δ; both stand below it."] : [];
  const words = ["One row is one action: all that the model sampled before the environment answered.", "Its log π is the sum of its tokens', so its ratio is the product of theirs: ρ = exp(Σ (log π − log π_old)). Its share of the loss is the sum of theirs, too.", ...tied];
  return el("div", { class: "scroll" }, words.map((each) => el("p", { class: "note" }, t(each))), el("table", { class: "steps" }, el("thead", {}, el("tr", {}, heads)), el("tbody", {}, rows)));
}

function sum(column, start, end) {
  if (!column) return NaN;
  let total = 0;
  for (let i = start; i < end; i++) if (there(column[i])) total += column[i];
  return total;
}
