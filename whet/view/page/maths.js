// The formulas again, in float64, from recorded columns alone. docs/algorithms.md has each of them with its source.

export const CLIP = ["none", "high", "low", "dual", "covariance", "sequence", "rejected", "too_old", "unusable", "masked", "skipped"];
const COMPARING = new Set(["grpo", "dr_grpo", "gspo", "cispo", "sapo", "gmpo", "rloo", "opo", "gpg", "maxrl", "grpo_passk", "reinforce_plus_plus_baseline"]);
const EPS = 1e-6;

const KNOWN = new Set([...COMPARING, "ppo", "reinforce_plus_plus", "remax"]);

export const compares = (name) => COMPARING.has(name);
export const isOwn = (name) => name?.includes(":") ?? false;
export const there = (value) => value !== undefined && value !== null && !Number.isNaN(value);
const orZero = (column, i) => (column && !Number.isNaN(column[i]) ? column[i] : 0);

// Scores of a group's valid trajectories, with their mean and standard deviation (n - 1).
export function groupOf(siblings) {
  const members = siblings.filter((one) => one.valid && !one.baseline && one.reward !== null);
  const scores = members.map((one) => one.reward + one.added);
  const n = scores.length;
  const mean = scores.reduce((a, b) => a + b, 0) / Math.max(n, 1);
  const std = Math.sqrt(scores.reduce((a, b) => a + (b - mean) ** 2, 0) / Math.max(n - 1, 1));
  return { members, scores, n, mean, std };
}

// The advantage of a trajectory from its group, before whitening. null: not computed here.
export function comparedAdvantage(name, algo, group, trajectory, credit) {
  const place = group.members.findIndex((one) => one.trajectory === trajectory);
  if (place < 0 || group.n < 2) return 0;
  const score = group.scores[place];
  if (name === "rloo") return ((score - group.mean) * group.n) / (group.n - 1);
  if (name === "maxrl") return group.mean > EPS ? (score - group.mean) / group.mean : 0;
  if (name === "opo") {
    const total = group.members.reduce((sum, one) => sum + one.trained, 0);
    const away = group.members.reduce((sum, one, i) => sum + one.trained * (group.scores[i] - group.mean), 0);
    return score - (total > 0 ? group.mean + away / total : 0);
  }
  if (name === "grpo_passk") {
    const order = [...group.scores.keys()].sort((a, b) => group.scores[b] - group.scores[a]);
    if (order[0] !== place) return 0;
    return (score - group.scores[order[1]]) / (algo.normalize_std ? group.std + EPS : 1);
  }
  if (name === "gpg") return credit && !credit.head.too_long && gpgScale(credit) !== null ? gpgScale(credit) * (score - group.mean) : null;
  const normal = name !== "reinforce_plus_plus_baseline" && algo.normalize_std !== false && name !== "dr_grpo";
  return normal || (name === "dr_grpo" && algo.normalize_std) ? (score - group.mean) / (group.std + EPS) : score - group.mean;
}

// null: a trajectory that has no sibling left counts here as well, and the records do not tell it from a failed one.
function gpgScale(credit) {
  const all = trajectoriesOf(credit);
  if (!credit.head.whole || all.some((one) => !one.valid)) return null;
  const scores = all.map((one) => one.score);
  return scores.length / Math.max(scores.filter((score) => score !== 0).length, 1);
}

// Rewards, TD errors, returns and advantages along a chain of tokens, whose time steps are `step`.
// A token that is no step passes on what follows it.
export function chainCredit(chain, algo) {
  const { n, step, trains, values } = chain;
  const gamma = algo.gamma ?? 1;
  const lam = algo.lam ?? 1;
  const rewards = new Float64Array(n);
  const next = new Int32Array(n).fill(-1);
  const delta = new Float64Array(n).fill(NaN);
  const advantage = new Float64Array(n).fill(NaN);
  const returns = new Float64Array(n).fill(NaN);
  const paid = lastWhere(n, algo.reward_at === "last_token" ? step : trains);
  for (let i = 0; i < n; i++) rewards[i] = orZero(chain.tokenRewards, i) + orZero(chain.klRewards, i) + (i === paid ? chain.reward : 0);
  let following = -1;
  for (let i = n - 1; i >= 0; i--) {
    next[i] = following;
    if (algo.credit_over === "turns") returns[i] = rewards[i] + (trains[i + 1] ? gamma * returns[i + 1] : 0);
    if (!step[i] || algo.credit_over === "turns") continue;
    const after = following < 0 ? null : following;
    returns[i] = rewards[i] + gamma * (after === null ? 0 : returns[after]);
    if (values) {
      const ahead = after === null ? chain.beyond : values[after];
      delta[i] = rewards[i] + gamma * ahead - values[i];
      advantage[i] = delta[i] + (after === null ? 0 : gamma * lam * advantage[after]);
    }
    following = i;
  }
  return { rewards, next, delta, advantage, returns, paid };
}

// Time steps where environment tokens are steps, too: in a sample whose history was rewritten, from its first trained token on.
// bounds: start, end and place in the trajectory of each sample.
function allSteps(origin, trains, bounds) {
  const step = new Int8Array(origin.length);
  for (const [start, end, order] of bounds) {
    let begun = order === 0;
    for (let i = start; i < end; i++) {
      begun ||= trains[i] === 1;
      if (begun && origin[i] !== 0) step[i] = 1;
    }
  }
  return step;
}

function lastWhere(n, mask) {
  for (let i = n - 1; i >= 0; i--) if (mask[i]) return i;
  return -1;
}

// The trajectories of a rollout's credit pack, each with its chain.
export function trajectoriesOf(credit) {
  if (credit.trajectories) return credit.trajectories;
  const { columns } = credit;
  const found = new Map();
  let start = 0;
  for (let row = 0; row < columns.length.length; row++) {
    const key = columns.group[row] + ":" + columns.trajectory[row];
    if (!found.has(key)) found.set(key, []);
    found.get(key).push({ row, start, end: start + columns.length[row], order: columns.order[row] });
    start += columns.length[row];
  }
  credit.trajectories = [...found.values()].map((rows) => {
    rows.sort((a, b) => a.order - b.order);
    const last = rows[rows.length - 1].row;
    const joined = (column) => (column ? joinSlices(rows.map((each) => column.subarray(each.start, each.end))) : null);
    const chain = {
      step: joined(columns.step),
      trains: joined(columns.trains),
      values: joined(columns.values),
      tokenRewards: joined(columns.token_rewards),
      klRewards: joined(columns.kl_rewards),
      old: joined(columns.old_logprobs),
      teacher: joined(columns.teacher_logprobs),
      origin: joined(columns.origin),
      reward: columns.reward[last],
      beyondIfCut: columns.truncated[last] && columns.value_after ? columns.value_after[last] : 0,
    };
    chain.n = chain.step.length;
    let at = 0;
    chain.bounds = rows.map((each) => [at, (at += each.end - each.start), each.order]);
    let added = 0;
    for (let i = 0; i < chain.n; i++) added += orZero(chain.tokenRewards, i) + orZero(chain.klRewards, i);
    return { group: columns.group[last], valid: columns.valid[last] === 1, chain, score: chain.reward + added };
  });
  return credit.trajectories;
}

function joinSlices(slices) {
  if (slices.length === 1) return slices[0];
  const out = new slices[0].constructor(slices.reduce((sum, each) => sum + each.length, 0));
  let at = 0;
  for (const each of slices) {
    out.set(each, at);
    at += each.length;
  }
  return out;
}

// Mean and variance (n - 1) of the advantages before whitening, over the trained tokens of the rollout. null: not known here.
export function whiteningOf(credit, algo) {
  if (!credit || credit.head.too_long || !credit.head.whole || !KNOWN.has(algo.name) || algo.name === "remax") return null;
  const groups = new Map();
  const all = trajectoriesOf(credit);
  for (const [place, one] of all.entries()) {
    if (!groups.has(one.group)) groups.set(one.group, []);
    const trained = one.chain.trains.reduce((a, b) => a + b, 0);
    groups.get(one.group).push({ trajectory: place, valid: one.valid, baseline: false, reward: one.score, added: 0, trained });
  }
  const raw = [];
  for (const [place, one] of all.entries()) {
    const { chain } = one;
    const each = compares(algo.name) ? comparedAdvantage(algo.name, algo, groupOf(groups.get(one.group)), place, credit) : null;
    if (each === null && compares(algo.name)) return null;
    const found = each === null ? chainCredit({ ...chain, step: stepsOf(chain, algo), beyond: algo.bootstrap_truncated ? chain.beyondIfCut : 0 }, algo) : null;
    const column = algo.name === "ppo" ? found?.advantage : found?.returns;
    for (let i = 0; i < chain.n; i++) if (chain.trains[i]) raw.push(distil(each ?? column[i], chain.old, chain.teacher, i, algo));
  }
  if (!raw.length) return null;
  const mean = raw.reduce((a, b) => a + b, 0) / raw.length;
  const variance = raw.reduce((a, b) => a + (b - mean) ** 2, 0) / Math.max(raw.length - 1, 1);
  return { mean, variance, count: raw.length };
}

// Time steps of a chain: PPO's are those that have a TD error.
function stepsOf(chain, algo) {
  if (algo.name === "ppo") return chain.step;
  return algo.credit_over === "all" ? allSteps(chain.origin, chain.trains, chain.bounds) : chain.trains;
}

function distil(advantage, old, teacher, i, algo) {
  return algo.distill_coef > 0 && old && teacher ? advantage - algo.distill_coef * (old[i] - teacher[i]) : advantage;
}

// The credit of a trajectory: per sample, what each token gets, again from the columns. `whole` is null where it is not computed here.
export function creditOf(trajectory, credit) {
  const { head, samples } = trajectory;
  const algo = head.config.algo ?? {};
  const fact = head.samples[0];
  const joined = (name) => (samples.some((each) => each[name]) ? joinColumns(samples, name) : null);
  const weights = joined("first_weights");
  const total = samples.reduce((sum, each) => sum + each.n, 0);
  const trains = new Int8Array(total);
  if (weights) for (let i = 0; i < total; i++) trains[i] = Number.isNaN(weights[i]) ? 0 : 1;
  const errors = joined("td_errors");
  const timed = errors ? Int8Array.from(errors, (value) => (Number.isNaN(value) ? 0 : 1)) : trains;
  const bounds = samples.map((each, place) => [each.offset, each.offset + each.n, head.samples[place].order ?? place]);
  const step = stepsOf({ step: timed, trains, origin: joined("origin"), bounds }, algo);
  const last = head.samples[head.samples.length - 1];
  const beyond = algo.bootstrap_truncated && fact.outcome === "truncated" ? last.value_after ?? 0 : 0;
  const chain = { n: total, step, trains, values: joined("values"), tokenRewards: joined("token_rewards"), klRewards: joined("kl_rewards"), beyond };
  const found = chainCredit({ ...chain, reward: fact.reward ?? 0 }, algo);
  const group = groupOf(head.siblings);
  const whitens = Boolean(algo.whiten);
  const whitening = whitens ? whiteningOf(credit, algo) : null;
  const raw = new Float64Array(total).fill(NaN);
  const final = new Float64Array(total).fill(NaN);
  const compared = compares(algo.name) ? comparedAdvantage(algo.name, algo, group, fact.trajectory, credit) : null;
  const old = joined("old_logprobs");
  const teacher = joined("teacher_logprobs");
  for (let i = 0; i < total; i++) {
    if (!trains[i]) continue;
    let value = NaN;
    if (compares(algo.name)) value = compared ?? NaN;
    else if (algo.name === "ppo") value = found.advantage[i];
    else if (algo.name === "reinforce_plus_plus") value = found.returns[i];
    else if (algo.name === "remax") value = remax(head, found.returns[i]);
    raw[i] = value;
    value = distil(value, old, teacher, i, algo);
    final[i] = !whitens ? value : whitening ? (value - whitening.mean) / Math.sqrt(whitening.variance + 1e-8) : NaN;
  }
  return { ...found, chain, beyond, group, compared, whitens, whitening, raw, final, trains, step };
}

function remax(head, returns) {
  const greedy = head.siblings.find((one) => one.baseline && one.reward !== null);
  return greedy ? returns - (greedy.reward + greedy.added) : NaN;
}

function joinColumns(samples, name) {
  const out = new Float64Array(samples.reduce((sum, each) => sum + each.n, 0)).fill(NaN);
  let at = 0;
  for (const each of samples) {
    if (each[name]) out.set(each[name], at);
    at += each.n;
  }
  return out;
}

// The loss of one token in one optimizer step, again: ratio, both branches, terms. `use` is first or last.
export function lossOf(sample, i, use, algo) {
  const column = (name) => sample[`${use}_${name}`];
  const weight = column("weights")?.[i];
  const code = column("clip")?.[i];
  if (!there(weight)) return null;
  if (code === 10) return { skipped: true, weight, loss: 0 };
  if (isOwn(algo.name) || isOwn(algo.loss?.name)) return { weight, name: isOwn(algo.name) ? algo.name : algo.loss.name, unknown: true };
  const logprobs = column("logprobs");
  const old = sample.old_logprobs;
  if (!logprobs || !old || !sample.advantages || !there(logprobs[i]) || !there(old[i])) return null;
  const name = algo.loss?.name ?? "clip";
  const trained = trainedOf(sample, use);
  const token = logprobs[i] - old[i];
  const mean = (f) => trained.reduce((sum, j) => sum + f(j), 0) / trained.length;
  const A = sample.advantages[i];
  const low = 1 - algo.clip_low;
  const high = 1 + algo.clip_high;
  const out = { weight, A, name, low, high, token, logRatio: token, sequence: false, code };
  const hold = (value, a, b) => Math.min(Math.max(value, a), b);
  if (name === "clip" || name === "sequence" || name === "clip_cov") {
    out.sequence = name === "sequence";
    out.logRatio = out.sequence ? mean((j) => logprobs[j] - old[j]) : token;
    out.ratio = Math.exp(out.logRatio);
    out.bounded = hold(out.ratio, low, high);
    out.plain = -out.ratio * A;
    out.clipped = -out.bounded * A;
    out.term = Math.max(out.plain, out.clipped);
    out.branch = out.clipped > out.plain ? "clipped" : "plain";
    if (algo.clip_dual && name !== "clip_cov" && A < 0 && out.term > -algo.clip_dual * A) {
      out.term = -algo.clip_dual * A;
      out.branch = "dual";
    }
    if (code === 4) [out.term, out.branch] = [0, "covariance"];
    out.push = out.branch === "plain" ? out.ratio * A : 0;
  } else if (name === "cispo") {
    out.ratio = Math.exp(token);
    out.bounded = hold(out.ratio, low, high);
    out.term = -out.bounded * A * logprobs[i];
    out.branch = out.bounded === out.ratio ? "plain" : "weight";
    out.push = out.bounded * A;
  } else if (name === "sapo") {
    out.ratio = Math.exp(token);
    const tau = A > 0 ? algo.loss.tau_positive : algo.loss.tau_negative;
    const gate = 1 / (1 + Math.exp(-tau * (out.ratio - 1)));
    out.term = (-4 / tau) * gate * A;
    out.branch = "gate";
    out.push = 4 * gate * (1 - gate) * out.ratio * A;
  } else if (name === "reinforce") {
    out.ratio = Math.exp(token);
    out.term = -A * logprobs[i];
    out.branch = "plain";
    out.push = A;
  } else if (name === "geometric_mean") {
    const held = (j) => {
      const each = logprobs[j] - old[j];
      const a = sample.advantages[j];
      return a > 0 ? Math.min(each, algo.clip_high) : a < 0 ? Math.max(each, -algo.clip_low) : 0;
    };
    out.sequence = true;
    out.low = Math.exp(-algo.clip_low);
    out.high = Math.exp(algo.clip_high);
    out.ratio = Math.exp(mean(held));
    out.term = -mean((j) => sample.advantages[j]) * out.ratio;
    const free = (A > 0 && token <= algo.clip_high) || (A < 0 && token >= -algo.clip_low);
    out.branch = free ? "plain" : "clipped";
    out.push = free ? -out.term : 0;
  } else if (name === "kl_cov") {
    out.ratio = Math.exp(token);
    out.term = -out.ratio * A + (code === 4 ? algo.loss.covariance_kl_coef * Math.abs(token) : 0);
    out.branch = code === 4 ? "covariance" : "plain";
    out.push = out.ratio * A - (code === 4 ? algo.loss.covariance_kl_coef * Math.sign(token) : 0);
  } else return { weight, name, unknown: true };
  finishLoss(out, sample, i, use, algo);
  return out;
}

function finishLoss(out, sample, i, use, algo) {
  const correction = sample[`${use}_correction`]?.[i];
  out.policy = out.term;
  if (there(correction)) {
    out.correction = correction;
    out.policy *= correction;
    out.push *= correction;
  }
  if (out.code === 5) [out.policy, out.push, out.branch] = [0, 0, "sequence_mask"];
  out.total = out.policy;
  if (algo.entropy_coef > 0) {
    out.entropy = -algo.entropy_coef * (sample[`${use}_entropy`]?.[i] ?? NaN);
    out.total += out.entropy;
  }
  const reference = sample.ref_logprobs?.[i];
  if (there(reference)) {
    out.kl = klOf(algo.kl_estimator, sample[`${use}_logprobs`][i] - reference) * (algo.kl_unbiased ? Math.exp(out.token) : 1);
    if (algo.kl_coef > 0) {
      out.klTerm = algo.kl_coef * out.kl;
      out.total += out.klTerm;
    }
  }
  out.loss = out.weight * out.total;
  out.push *= out.weight;
}

// Estimators of KL(policy || reference), d being log p - log q.
export function klOf(estimator, d) {
  const k3 = Math.expm1(-d) + d;
  return { k1: d, k2: (d * d) / 2, k3, low_var: Math.min(Math.max(k3, -10), 10), abs: Math.abs(d) }[estimator] ?? NaN;
}

function trainedOf(sample, use) {
  const key = `trained_${use}`;
  if (!sample[key]) {
    const weights = sample[`${use}_weights`];
    const found = [];
    for (let i = 0; i < sample.n; i++) if (!Number.isNaN(weights[i])) found.push(i);
    sample[key] = found;
  }
  return sample[key];
}

export const singleStep = (batch) => !there(batch.samples_per_step) && !(batch.steps_per_rollout > 1);

// The weight of a token in the loss where the rollout fed a single optimizer step; null where it cannot be known from here.
export function weightOf(trajectory, sample, credit) {
  const { algo = {}, batch = {}, max_tokens: limit } = trajectory.head.config;
  if (!singleStep(batch) || !credit || credit.head.too_long || !credit.head.whole || !sample.first_weights) return null;
  const all = trajectoriesOf(credit);
  const count = (chain) => chain.trains.reduce((a, b) => a + b, 0);
  const sum = (chains) => chains.reduce((total, one) => total + count(one.chain), 0);
  const own = trajectory.samples.reduce((total, each) => total + (each.first_weights ? trainedOf(each, "first").length : 0), 0);
  const valid = all.filter((one) => one.valid).length;
  const sequences = all.reduce((total, one) => total + one.chain.bounds.filter(([start, end]) => one.chain.trains.subarray(start, end).some(Boolean)).length, 0);
  const { group } = trajectory.head;
  if (algo.reducer === "token_mean") return 1 / sum(all);
  if (algo.reducer === "sample_mean") return 1 / own / valid;
  if (algo.reducer === "group_mean") return 1 / sum(all.filter((one) => one.group === group)) / new Set(all.filter((one) => one.valid).map((one) => one.group)).size;
  if (algo.reducer === "token_sum_mean") return 1 / valid;
  if (algo.reducer === "sequence_mean") return 1 / trainedOf(sample, "first").length / sequences;
  if (algo.reducer === "sequence_sum") return 1 / sequences;
  if (algo.reducer === "constant_length") return 1 / (algo.reducer_scale ?? limit) / valid;
  if (algo.reducer === "constant") return 1 / (algo.reducer_scale ?? limit);
  return null;
}
