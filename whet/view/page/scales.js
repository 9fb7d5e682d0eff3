// Quantities that tokens are coloured by, and their colours. Blue and orange differ for every common form of colour blindness.

import { CLIP, there } from "./maths.js";
import { short } from "./dom.js";
import { t } from "./words.js";

const difference = (a, b) => (s, i) => (s[a] && s[b] && there(s[a][i]) && there(s[b][i]) ? s[a][i] - s[b][i] : NaN);
const column = (name) => (s, i) => s[name]?.[i] ?? NaN;
const trainedAlone = (f) => (s, i) => (s.first_weights && Number.isNaN(s.first_weights[i]) ? NaN : f(s, i));
const sampledAlone = (f) => (s, i) => (s.origin[i] === 1 ? f(s, i) : NaN);

// name: [words, kind, value of a token, columns that it needs, middle of a diverging scale].
export const QUANTITIES = {
  advantage: ["advantage Â", "diverging", trainedAlone(column("advantages")), ["advantages"]],
  share: ["share of the loss", "diverging", column("first_losses"), ["first_losses"]],
  delta: ["TD error δ", "diverging", column("td_errors"), ["td_errors"]],
  value: ["value V", "sequential", column("values"), ["values"]],
  return: ["return G", "sequential", trainedAlone(column("returns")), ["returns"]],
  ratio: ["ratio ρ, first use", "diverging", column("first_ratio"), ["first_ratio"], 1],
  last_ratio: ["ratio ρ, last use", "diverging", column("last_ratio"), ["last_ratio"], 1],
  clip: ["clip", "clip", (s, i) => { const c = Math.max(s.last_clip?.[i] ?? -1, s.first_clip?.[i] ?? -1); return c < 0 ? NaN : c; }, ["first_clip"]],
  logprob: ["log-prob, sampled", "sequential", sampledAlone(column("logprobs")), ["logprobs"]],
  kl: ["log π − log π_ref", "diverging", difference("old_logprobs", "ref_logprobs"), ["ref_logprobs"]],
  mismatch: ["trainer − engine", "diverging", trainedAlone(difference("train_logprobs", "logprobs")), ["train_logprobs"]],
  entropy: ["entropy", "sequential", column("first_entropy"), ["first_entropy"]],
  rank: ["rank", "sequential", (s, i) => (s.first_ranks?.[i] > 0 ? Math.log10(s.first_ranks[i]) : NaN), ["first_ranks"]],
  version: ["policy version", "sequential", sampledAlone(column("versions")), ["versions"]],
  mask: ["trains", "mask", (s, i) => (s.first_weights ? (Number.isNaN(s.first_weights[i]) ? 0 : 1) : s.loss_mask[i]), ["loss_mask"]],
  none: ["no colour", "none", () => NaN, []],
};

export const quantitiesOf = (samples) =>
  Object.keys(QUANTITIES).filter((name) => QUANTITIES[name][3].every((needed) => samples.some((sample) => sample[needed])));

const BLUE = "33 113 181";
const ORANGE = "217 95 14";
const TEAL = "16 131 125";
const CLIPPED = { 1: ORANGE, 2: BLUE, 3: "117 66 160", 4: "150 120 20", 5: "120 120 120", 6: "120 120 120", 7: "120 120 120", 8: "120 120 120", 9: "120 120 120" };

// A scale over all samples: colour(sample, i) is a CSS colour or null; ends are its numbers.
export function scaleOf(name, samples) {
  const [, kind, value, , middle = 0] = QUANTITIES[name];
  if (kind === "none") return { kind, value, colour: () => null, ends: [] };
  if (kind === "mask") return { kind, value, colour: (s, i) => (value(s, i) === 1 ? `rgb(${TEAL} / .38)` : null), ends: [] };
  if (kind === "clip") {
    const colour = (s, i) => (CLIPPED[value(s, i)] ? `rgb(${CLIPPED[value(s, i)]} / .45)` : null);
    return { kind, value, colour, ends: [], names: (s, i) => CLIP[value(s, i)] };
  }
  const numbers = [];
  for (const sample of samples) {
    const every = Math.max(1, Math.floor(sample.n / 20000));
    for (let i = 0; i < sample.n; i += every) {
      const each = value(sample, i);
      if (Number.isFinite(each)) numbers.push(kind === "diverging" ? Math.abs(each - middle) : each);
    }
  }
  numbers.sort((a, b) => a - b);
  const at = (share) => numbers[Math.min(numbers.length - 1, Math.floor(share * numbers.length))] ?? 0;
  if (kind === "diverging") {
    const most = at(0.98) || at(1) || 1;
    const colour = (s, i) => {
      const size = (value(s, i) - middle) / most;
      if (Number.isNaN(size) || size === 0) return null;
      return `rgb(${size > 0 ? BLUE : ORANGE} / ${(0.06 + 0.5 * Math.min(Math.abs(size), 1)).toFixed(2)})`;
    };
    return { kind, value, colour, ends: [middle - most, middle, middle + most] };
  }
  const [low, high] = [at(0.02), at(0.98)];
  const wide = high > low ? high - low : 1;
  const colour = (s, i) => {
    const size = (value(s, i) - low) / wide;
    return Number.isNaN(size) ? null : `rgb(${TEAL} / ${(0.05 + 0.5 * Math.min(Math.max(size, 0), 1)).toFixed(2)})`;
  };
  return { kind, value, colour, ends: [low, high] };
}

// What a token's title says of the chosen quantity.
export function wordsOf(name, scale, sample, i) {
  if (name === "none") return "";
  const value = scale.value(sample, i);
  if (Number.isNaN(value)) return `${t(QUANTITIES[name][0])}: –`;
  const text = name === "clip" ? t(CLIP[value]) : name === "mask" ? t(value ? "yes" : "no") : name === "rank" ? String(sample.first_ranks[i]) : short(value);
  return `${t(QUANTITIES[name][0])}: ${text}`;
}
