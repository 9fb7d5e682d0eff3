// One token: the formula with its numbers, recorded and computed again side by side.

import { cut, el, longText, number, short, visible } from "./dom.js";
import { CLIP, compares, klOf, lossOf, singleStep, there, weightOf } from "./maths.js";
import { t } from "./words.js";

const CLOSE = 1e-5;
const TERMS_SHOWN = 6;
const ORIGIN_WORDS = ["prompt", "model", "environment"];

// Rows of numbers: name, formula, recorded, recomputed.
class Numbers {
  constructor() {
    this.body = el("tbody");
    const heads = ["quantity", "formula", "recorded", "recomputed"].map((name) => el("th", { scope: "col" }, t(name)));
    this.table = el("div", { class: "scroll" }, el("table", { class: "numbers formulas" }, el("thead", {}, el("tr", {}, heads, el("th", { scope: "col" }, ""))), this.body));
  }

  row(key, name, formula, recorded, again) {
    const both = there(recorded) && there(again);
    const equal = both && Math.abs(recorded - again) <= CLOSE * Math.max(1, Math.abs(recorded));
    const mark = both ? el("span", { class: equal ? "equal" : "differs", title: t(equal ? "equal within 1e-5" : "they differ") }, equal ? "✓" : "≠") : "";
    const cell = (kind, value) => el("td", { class: "figure", "data-kind": kind, title: there(value) ? String(value) : null }, number(value));
    this.body.append(
      el("tr", { "data-quantity": key }, el("th", { scope: "row" }, name), el("td", { class: "formula" }, formula), cell("recorded", recorded), cell("recomputed", again), el("td", {}, mark)),
    );
  }
}

// The panel of token i of a sample. context: { trajectory, credit, credits, place (of the sample), go(i), use, setUse }
export function tokenPanel(context, i) {
  const { trajectory, place } = context;
  const sample = trajectory.samples[place];
  const { head } = trajectory;
  const parts = [heading(context, sample, i)];
  if (sample.origin[i] !== 1 && (!sample.first_weights || Number.isNaN(sample.first_weights[i]))) parts.push(untrained(context, sample, i));
  else if (!sample.first_weights || Number.isNaN(sample.first_weights[i])) parts.push(leftOut(head, sample, i));
  else parts.push(credit(context, sample, i), loss(context, sample, i), otherEstimator(context, sample, i));
  parts.push(everything(sample, i));
  return el("div", { class: "token-panel", "data-place": i }, parts);
}

function section(title, ...children) {
  return el("section", {}, el("h3", {}, title), children);
}

// The proof of a version's weights in a short phrase; "–" where it is not known.
function proofWords(proofs, version) {
  const proof = proofs?.[version];
  if (!proof) return "–";
  const parts = [];
  if (proof.arrival) parts.push(t("arrival compared"));
  if (proof.memory_share > 0) parts.push(proof.memory_share >= 1 ? t("memory compared") : t("{0}% of memory compared", Math.floor(1000 * proof.memory_share) / 10));
  if (there(proof.probe_nats)) parts.push(t("probe within {0} nats", short(proof.probe_nats)));
  return parts.join(", ") || t("no proof");
}

function heading({ trajectory, place, go }, sample, i) {
  const { head } = trajectory;
  const text = trajectory.pieces.text(sample.offset + i);
  const facts = [
    [t("place"), `${i} / ${sample.n}`],
    [t("id"), sample.tokens[i]],
    [t("written by"), t(ORIGIN_WORDS[sample.origin[i]] ?? "unknown")],
    [t("policy version"), sample.versions && sample.versions[i] >= 0 ? sample.versions[i] : "–"],
    [t("proof of its weights"), proofWords(head.samples[place]?.proofs, sample.versions?.[i])],
    [t("sampled with"), sample.origin[i] === 1 && there(sample.logprobs?.[i]) ? `log π = ${short(sample.logprobs[i])}, π = ${short(Math.exp(sample.logprobs[i]))}` : "–"],
  ];
  const turn = (by, words, sign) => el("button", { type: "button", class: "step", "aria-label": words, title: words, disabled: i + by < 0 || i + by >= sample.n, onclick: () => go(i + by) }, sign);
  return el(
    "div",
    { class: "token-head" },
    el("div", { class: "token-name" }, turn(-1, t("the token before"), "‹"), el("code", {}, text === null ? `#${sample.tokens[i]}` : longText(text, 600, (n) => t("{0} more letters", n))), turn(1, t("the next token"), "›")),
    el("dl", { class: "facts" }, facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, String(value))))),
    place > 0 ? el("p", { class: "note" }, t("Sample {0} of this trajectory: its history was rewritten.", place)) : null,
  );
}

// A link to another token of this sample.
function tokenLink(context, sample, i) {
  const text = context.trajectory.pieces.text(sample.offset + i);
  return el("button", { type: "button", class: "link", onclick: () => context.go(i) }, `${i} `, text === null ? `#${sample.tokens[i]}` : el("code", {}, visible(text.slice(0, 24), true)));
}

function untrained(context, sample, i) {
  const { credits } = context;
  const at = sample.offset + i;
  let before = at - 1;
  while (before >= 0 && !credits.step[before]) before--;
  const after = credits.next[at];
  const inside = (j) => j >= sample.offset && j < sample.offset + sample.n;
  const environment = sample.origin[i] === 2;
  const out = [
    el("p", {}, t(environment ? "The environment wrote this token: no policy sampled it, so there is no probability of it to push. It has no ratio, no advantage and no share of the loss." : "This token is part of the prompt. It is read, and never trained.")),
  ];
  if (environment && credits.step[at]) {
    out.push(el("p", {}, t("With credit_over = all it is a time step: it has a TD error of its own, below.")));
    const table = new Numbers();
    table.row("delta", "δ", "r + γV′ − V", sample.td_errors?.[i], credits.delta[at]);
    out.push(table.table);
  } else if (environment) {
    out.push(el("p", {}, t("It is no time step: value, return and advantage pass over it, undiscounted. Time goes from the last action before it to the next one after it.")));
    const steps = el("p", { class: "hop" }, before >= 0 && inside(before) ? tokenLink(context, sample, before - sample.offset) : t("no action before"), " → ", after >= 0 && inside(after) ? tokenLink(context, sample, after - sample.offset) : t("nothing follows: V′ = 0"));
    out.push(steps);
    if (before >= 0 && sample.values && after >= 0 && inside(after) && inside(before)) {
      out.push(el("p", {}, t("So V′ in the TD error of token {0} is the value of token {1}: {2}.", before - sample.offset, after - sample.offset, short(sample.values[after - sample.offset]))));
    }
  }
  return section(t("Why it does not train"), out);
}

const LEFT_OUT = {
  6: "Off-policy correction rejected it.",
  7: "A policy over the staleness bound sampled it.",
  8: "Its sample teaches nothing: the trajectory failed, or has no valid sibling to be compared with.",
  9: "The loss mask left it out.",
};

function leftOut(head, sample, i) {
  const fact = head.samples[0];
  const words = fact.dropped ? t("Its group was dropped ({0}), so nothing of it trains.", cut(fact.dropped)) : fact.baseline ? t("This is the greedy trajectory that its group is compared with. It is never trained on.") : t(LEFT_OUT[sample.first_clip?.[i]] ?? "The model sampled it, and no optimizer step used it.");
  return section(t("Why it does not train"), el("p", {}, words));
}

function credit(context, sample, i) {
  const { trajectory, credits } = context;
  const algo = trajectory.head.config.algo ?? {};
  const at = sample.offset + i;
  const table = new Numbers();
  const parts = [];
  if (there(sample.kl_rewards?.[i]) && algo.kl_reward?.coef > 0) {
    const old = there(sample.old_logprobs?.[i]) ? sample.old_logprobs[i] : sample[algo.old_logprobs === "rollout" ? "logprobs" : "train_logprobs"]?.[i];
    const kl = there(old) && there(sample.ref_logprobs?.[i]) ? klOf(algo.kl_reward.estimator, old - sample.ref_logprobs[i]) : NaN;
    const adapts = there(algo.kl_reward.target);
    table.row("kl_reward", t("KL's part of the reward"), algo.kl_reward.estimator === "k1" ? "−β (log π − log π_ref)" : `−β ${algo.kl_reward.estimator}(log π − log π_ref)`, sample.kl_rewards[i], adapts ? NaN : -algo.kl_reward.coef * kl);
    if (adapts) parts.push(el("p", { class: "note" }, t("β follows a target of the KL, so it is another one in each rollout. From this token's own numbers it was {0}; the run's metric reward_kl/coef has it.", kl ? short(-sample.kl_rewards[i] / kl) : "–")));
  }
  if (algo.name === "ppo" && sample.values) parts.push(...gae(context, sample, i, table));
  else if (compares(algo.name)) parts.push(...group(context, table));
  else if (algo.name === "reinforce_plus_plus" || algo.name === "remax") {
    table.row("return", "G", algo.credit_over === "turns" ? t("r + γG′ within the turn") : "r + γG′", NaN, credits.returns[at]);
    if (algo.credit_over === "turns") parts.push(el("p", {}, t("Each turn is credited by itself: only the last one sees the trajectory's reward.")));
    if (algo.name === "remax") parts.push(el("p", {}, t("The score of the greedy trajectory is subtracted from the return.")));
  } else if (algo.name === "otb") {
    table.row("return", "G", "r + G′", NaN, credits.returns[at]);
    const baseline = there(sample.advantages?.[i]) && !credits.whitens ? short(credits.returns[at] - sample.advantages[i]) : "–";
    parts.push(el("p", {}, t("From the return G a baseline of this step of the group is subtracted. It weighs the siblings by squared probabilities over the whole vocabulary, which are not recorded, so it is not computed again: by the recorded advantage it was {0}.", baseline)));
  } else parts.push(el("p", {}, t("The credit of {0} is not computed again on this page; its recorded numbers stand below.", algo.name ?? t("this algorithm"))));
  if (credits.whitens) {
    const { whitening } = credits;
    const words = whitening
      ? t("Whitened over the {0} trained tokens of the rollout: mean {1}, variance {2}.", whitening.count, short(whitening.mean), short(whitening.variance))
      : context.credit?.head.too_long
        ? t("It is whitened over the rollout, whose {0} tokens are too many to be computed again here.", context.credit.head.tokens)
        : t("It is whitened over the rollout, which is not at hand here.");
    parts.push(el("p", { class: "note" }, words));
  }
  if (compares(algo.name) && credits.compared === null) parts.push(el("p", { class: "note" }, t("Its factor α counts trajectories of the whole rollout, which are not all at hand here.")));
  const formula = credits.whitens ? "(A − mean) / √(var + 1e-8)" : CREDIT_FORMULAS[algo.name] ? t(CREDIT_FORMULAS[algo.name]) : compares(algo.name) ? groupFormula(algo) : "–";
  table.row("advantage", "Â", formula, sample.advantages?.[i], credits.final[at]);
  return section(t("Credit"), parts, table.table, sameForAll(algo));
}

const CREDIT_FORMULAS = { __proto__: null, ppo: "Σ (γλ)ˡ δ", reinforce_plus_plus: "G", remax: "G − r of the greedy reply", otb: "G − baseline of the step" };

function sameForAll(algo) {
  if (!compares(algo.name)) return null;
  return el("p", { class: "note" }, t("Every token of this reply has the same advantage: the group compares whole replies, and nothing says which token earned the reward. PPO's critic would: it has a value before each token."));
}

function gae({ trajectory, credits, go }, sample, i, table) {
  const algo = trajectory.head.config.algo;
  const at = sample.offset + i;
  const next = credits.next[at];
  const ahead = next < 0 ? credits.beyond : credits.chain.values[next];
  const V = sample.values[i];
  const [r, gamma, lam] = [credits.rewards[at], algo.gamma, algo.lam];
  const line = el("p", { class: "line" }, "δ = r + γV′ − V = ", term(short(r), "r"), " + ", term(short(gamma), "γ"), " · ", term(short(ahead), "V′"), " − ", term(short(V), "V"), " = ", el("strong", {}, short(credits.delta[at])));
  table.row("delta", "δ", "r + γV′ − V", sample.td_errors?.[i], credits.delta[at]);
  const after = next < 0 ? (credits.beyond ? t("V′ is the critic's estimate after the last token: the trajectory was cut.") : t("Nothing follows, so V′ = 0.")) : t("V′ is the value of token {0}, the next time step.", next - sample.offset);
  const paid = at === credits.paid ? t("The trajectory's reward is paid on this token, its last action.") : t("The trajectory's reward is paid on its last action; here r holds only rewards of this token.");
  const terms = sumTerms(credits, sample, at, gamma * lam);
  table.row("raw", t("A before whitening"), "Σ (γλ)ˡ δ", there(sample.returns?.[i]) ? sample.returns[i] - V : NaN, credits.advantage[at]);
  table.row("return", t("return"), "A + V", sample.returns?.[i], credits.advantage[at] + V);
  return [line, el("p", { class: "note" }, after, " ", paid), sumView(terms, gamma, lam, credits.advantage[at], go)];
}

function term(text, name) {
  return el("span", { class: "term", title: name }, text);
}

function sumTerms(credits, sample, at, factor) {
  const out = [];
  let weight = 1;
  for (let j = at; j >= 0; j = credits.next[j]) {
    out.push({ place: j - sample.offset, weight, delta: credits.delta[j], part: weight * credits.delta[j] });
    weight *= factor;
  }
  return out;
}

function sumView(terms, gamma, lam, total, go) {
  const body = el("tbody");
  const rows = (shown) =>
    shown.map((one, l) => el("tr", {}, el("td", { class: "figure" }, l), el("td", {}, el("button", { type: "button", class: "link", onclick: () => go(one.place) }, one.place)), el("td", { class: "figure" }, short(one.weight)), el("td", { class: "figure" }, short(one.delta)), el("td", { class: "figure" }, short(one.part))));
  body.append(...rows(terms.slice(0, TERMS_SHOWN)));
  const rest = terms.slice(TERMS_SHOWN);
  if (rest.length) {
    const sum = rest.reduce((a, one) => a + one.part, 0);
    const more = el("tr", {}, el("td", { colspan: 4 }, el("button", { type: "button", class: "quiet", onclick: () => body.replaceChildren(...rows(terms.slice(0, 500))) }, t("{0} later tokens", rest.length))), el("td", { class: "figure" }, short(sum)));
    body.append(more);
  }
  const heads = ["l", t("token"), "(γλ)ˡ", "δ", t("part")].map((name) => el("th", { scope: "col" }, name));
  const foot = el("tr", {}, el("th", { colspan: 4, scope: "row" }, `A = Σ (γλ)ˡ δ,  γ = ${short(gamma)}, λ = ${short(lam)}`), el("td", { class: "figure" }, short(total)));
  return el("div", { class: "scroll" }, el("table", { class: "sum" }, el("thead", {}, el("tr", {}, heads)), body, el("tfoot", {}, foot)));
}

function groupFormula(algo) {
  const plain = { rloo: "r − mean of the others", maxrl: "(r − mean) / mean", opo: "r − Σ len·r / Σ len", gpg: "α (r − mean)", grpo_passk: "(r₁ − r₂) / (std + 1e-6)", reinforce_plus_plus_baseline: "r − mean" }[algo.name];
  return plain ? t(plain) : algo.normalize_std ? t("(r − mean) / (std + 1e-6)") : t("r − mean");
}

function group({ trajectory, credits }, table) {
  const fact = trajectory.head.samples[0];
  const { group: found } = credits;
  const rows = found.members.map((one, k) => el("tr", { class: one.trajectory === fact.trajectory ? "own" : null }, el("td", {}, visible(cut(one.trajectory, 120))), el("td", { class: "figure" }, number(found.scores[k])), el("td", { class: "figure" }, short(found.scores[k] - found.mean))));
  table.row("mean", t("mean of the group"), `Σ r / ${found.n}`, fact.group_mean, found.mean);
  table.row("std", t("std of the group"), `√(Σ (r − mean)² / ${Math.max(found.n - 1, 1)})`, fact.group_std, found.std);
  if (found.n < 2) return [el("p", {}, t("The group has one valid trajectory: there is nothing to compare with, so it does not train."))];
  const heads = [t("sibling"), t("score r"), "r − mean"].map((name) => el("th", { scope: "col" }, name));
  return [el("div", { class: "scroll" }, el("table", { class: "sum" }, el("thead", {}, el("tr", {}, heads)), el("tbody", {}, rows)))];
}

function loss(context, sample, i) {
  const { trajectory, use } = context;
  const algo = trajectory.head.config.algo ?? {};
  const parts = [];
  if (sample.last_weights && there(sample.last_weights[i])) {
    const choice = (name, words) => el("button", { type: "button", class: "choice", "aria-pressed": String(use === name), onclick: () => context.setUse(name) }, t(words));
    parts.push(el("div", { class: "choices", role: "group", "aria-label": t("optimizer step") }, choice("first", "first epoch"), choice("last", "last epoch")));
  }
  const which = sample.last_weights && there(sample.last_weights[i]) ? use : "first";
  const found = lossOf(sample, i, which, algo);
  const recorded = (name) => sample[`${which}_${name}`]?.[i];
  if (found === null) return section(t("Loss"), parts, el("p", {}, t("The optimizer's log-probs of this token were not recorded.")));
  if (found.skipped) return section(t("Loss"), parts, el("p", {}, t("No pass computed it: all advantages of its sample are 0, so it has no gradient. Its weight stands in the denominator, and its share of the loss is 0.")));
  const table = new Numbers();
  if (found.unknown) {
    table.row("loss", t("share of the loss"), "w · term", recorded("losses"), NaN);
    return section(t("Loss"), parts, el("p", {}, t("The loss {0} is your own: its recorded numbers stand below.", found.name)), table.table);
  }
  table.row("ratio", "ρ", found.sequence ? t("exp(mean over the reply of log π − log π_old)") : "exp(log π − log π_old)", recorded("ratio"), found.ratio);
  if (["clip", "sequence", "cispo", "clip_cov", "geometric_mean"].includes(found.name)) parts.push(bounds(found));
  parts.push(branches(found));
  const weight = weightOf(trajectory, sample, context.credit);
  table.row("clip", t("clip code"), t(CLIP[recorded("clip")] ?? "–"), recorded("clip"), codeOf(found));
  table.row("term", t("policy term"), termFormula(found.name), NaN, found.term);
  if (there(found.correction)) table.row("correction", t("correction"), "π_train / π_rollout", found.correction, NaN);
  if (there(found.entropy)) table.row("entropy", t("entropy bonus"), "−coef · H", NaN, found.entropy);
  if (there(found.klTerm)) table.row("kl", t("KL to the reference"), "coef · KL", NaN, found.klTerm);
  table.row("weight", t("weight w"), t("1 / denominator of the step"), found.weight, weight ?? NaN);
  table.row("loss", t("share of the loss"), "w · Σ", recorded("losses"), found.loss);
  parts.push(table.table, push(found), el("p", { class: "note" }, weight === null ? t(singleStep(trajectory.head.config.batch ?? {}) ? "w = 1 / {0}. The whole rollout is not at hand here, so the denominator is recorded, not counted again." : "w = 1 / {0}. The rollout's steps share its samples, so the denominator is recorded, not counted again.", number(1 / found.weight, 6)) : t("w = 1 / {0}: {1}.", number(1 / found.weight, 6), t(REDUCERS[algo.reducer] ?? "the denominator of the step"))));
  return section(t("Loss"), parts);
}

const REDUCERS = {
  __proto__: null,
  token_mean: "the trained tokens of the step",
  sample_mean: "this trajectory's trained tokens × the valid trajectories of the step",
  token_sum_mean: "the valid trajectories of the step",
  group_mean: "its group's trained tokens × the groups of the step",
  sequence_mean: "this sample's trained tokens × the samples of the step",
  sequence_sum: "the samples of the step",
  constant_length: "the token limit × the valid trajectories of the step",
  constant: "a number of the settings",
};

function codeOf(found) {
  if (["covariance", "sequence_mask"].includes(found.branch)) return found.code;
  if (found.branch === "dual") return 3;
  if (found.name === "cispo") return found.branch === "plain" ? 0 : found.ratio > 1 ? 1 : 2;
  if (found.name === "geometric_mean") return found.token > Math.log(found.high) ? 1 : found.token < Math.log(found.low) ? 2 : 0;
  return found.branch === "clipped" ? (found.ratio > 1 ? 1 : 2) : 0;
}

function termFormula(name) {
  return { cispo: "−clip(ρ) A log π", sapo: "−(4/τ) σ(τ(ρ−1)) A", reinforce: "−A log π", geometric_mean: "−Ā ρ", kl_cov: "−ρA + c |log ρ|" }[name] ?? "max(−ρA, −clip(ρ)A)";
}

// The ratio on a line with its bounds.
function bounds(found) {
  const [low, high] = [Math.max(found.low, 0), found.high];
  const wide = Math.max(high - low, 1e-6);
  const [from, to] = [Math.min(low - wide * 0.6, found.ratio - wide * 0.2), Math.max(high + wide * 0.6, found.ratio + wide * 0.2)];
  const x = (value) => 20 + (360 * (value - from)) / (to - from);
  const mark = (value, text, kind) => [el("line", { x1: x(value), x2: x(value), y1: 16, y2: 34, class: kind }), el("text", { x: x(value), y: 47, "text-anchor": "middle" }, text)];
  const words = t("ratio {0}, bounds {1} to {2}", short(found.ratio), short(low), short(high));
  return el(
    "svg",
    { viewBox: "0 0 400 52", class: "bounds", role: "img", "aria-label": words },
    el("line", { x1: 20, x2: 380, y1: 25, y2: 25, class: "axis" }),
    el("rect", { x: x(low), width: x(high) - x(low), y: 20, height: 10, class: "inside" }),
    mark(low, short(low), "edge"),
    mark(high, short(high), "edge"),
    el("circle", { cx: x(found.ratio), cy: 25, r: 5.5, class: "ratio" }),
    el("text", { x: x(found.ratio), y: 12, "text-anchor": "middle", class: "ratio" }, `ρ = ${short(found.ratio)}`),
  );
}

function branches(found) {
  if (!["clip", "sequence", "clip_cov"].includes(found.name)) {
    const words = { cispo: found.branch === "plain" ? "The weight ρ is within its bounds." : "The clip holds the weight, not the gradient: the token still learns.", sapo: "A soft gate closes as ρ leaves 1." }[found.name];
    return words ? el("p", {}, t(words)) : null;
  }
  const one = (name, formula, value) => el("li", { class: found.branch === name ? "active" : null }, el("span", { class: "formula" }, formula), " = ", el("b", {}, short(value)), found.branch === name ? el("em", {}, t("active")) : null);
  return el("ul", { class: "branches" }, one("plain", "−ρA", found.plain), one("clipped", "−clip(ρ)A", found.clipped), found.branch === "dual" ? one("dual", t("−c A, the dual clip"), found.term) : null, found.branch === "covariance" ? one("covariance", t("0, held back by its covariance"), 0) : null);
}

function push(found) {
  let words;
  if (found.A === 0) words = t("Its advantage is 0: the policy loss does not move its probability.");
  else if (!found.push) words = t("The clip is active: the policy loss does not move its probability any further.");
  else words = t(found.push > 0 ? "Pushed up: a step along the gradient raises log π by {0} for each unit of the learning rate (w · dterm/dlog π)." : "Pushed down: a step along the gradient lowers log π by {0} for each unit of the learning rate (w · dterm/dlog π).", short(Math.abs(found.push)));
  const kind = !found.push ? "still" : found.push > 0 ? "up" : "down";
  return el("p", { class: `push ${kind}`, "data-push": kind }, el("span", { "aria-hidden": "true" }, { up: "▲ ", down: "▼ ", still: "■ " }[kind]), words);
}

function otherEstimator({ trajectory, credits }, sample, i) {
  const algo = trajectory.head.config.algo ?? {};
  const { group: found } = credits;
  const at = sample.offset + i;
  if (!compares(algo.name)) {
    if (found.n < 2) return section(t("By the other estimator"), el("p", {}, t("GRPO compares siblings, and this prompt was played once: its advantage would be 0.")));
    const place = found.members.findIndex((one) => one.trajectory === trajectory.head.samples[0].trajectory);
    if (place < 0) return null;
    const value = (found.scores[place] - found.mean) / (found.std + 1e-6);
    return section(t("By the other estimator"), el("p", {}, t("GRPO would give this token, and every other one of the reply, ({0} − {1}) / ({2} + 1e-6) = {3}.", short(found.scores[place]), short(found.mean), short(found.std), short(value))));
  }
  const score = trajectory.head.samples[0].reward;
  return section(
    t("By the other estimator"),
    el("p", {}, t("PPO with γ = λ = 1 would give it the return that is still to come less a critic's value before it: {0} − V. This run has no critic, so V is not known; a critic that had learned only the group's mean would give {1}.", short(credits.returns[at] ?? score), short((credits.returns[at] ?? score) - found.mean))),
  );
}

function everything(sample, i) {
  const rows = Object.keys(sample)
    .filter((name) => ArrayBuffer.isView(sample[name]))
    .map((name) => el("tr", {}, el("th", { scope: "row" }, el("code", {}, name)), el("td", { class: "figure", title: String(sample[name][i]) }, missing(name, sample[name][i]) ? "–" : number(sample[name][i], 8))));
  return el("details", { class: "everything" }, el("summary", {}, t("Everything that is recorded of it")), el("table", { class: "numbers" }, el("tbody", {}, rows)));
}

const missing = (name, value) => Number.isNaN(value) || (value === -1 && /clip|ranks/.test(name));
