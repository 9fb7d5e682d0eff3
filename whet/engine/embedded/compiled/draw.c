/* Draws tokens from logits: the cumulative sum of exp((logit - greatest) / temperature), inverted at `noise` times the whole.

   The chances are float32 and their sums, of a few hundred each, are added up in float64, always in the same order. Built by compiled.py and
   called by native.py. */

#include "vectors.h"

#define CHUNK (16 * W) /* chances that are summed at a time */

struct draw {
    int64_t num, vocab;
    const float *logits;       /* [num, vocab] */
    const double *temperature; /* [num], above 0 */
    const double *noise;       /* [num], from 0 up to 1 */
    double *sums;              /* [vocab / CHUNK, rounded up]: scratch */
    int64_t *tokens;           /* [num]; -1 where a row's logits are not finite */
    double *logprobs;          /* [num], natural */
};

/* The vector at `from`, of which `count` floats are there; -inf stands for the others. */
INLINE vec some(const float *from, long count) {
    if (count >= W) return load(from);
    vec x = all(-INFINITY);
    for (long i = 0; i < count; i++) x[i] = from[i];
    return x;
}

/* The greatest of a row; NaN if it or any other is not a number. */
static float greatest(const float *row, long num) {
    vec most = all(-INFINITY);
    ivec odd = {0};
    for (long i = 0; i < num; i += W) {
        vec x = some(row + i, num - i);
        odd |= x != x;
        most = where(x > most, x, most);
    }
    for (int i = 0; i < W; i++) {
        if (odd[i]) return NAN;
        if (most[i] > most[0]) most[0] = most[i];
    }
    return most[0];
}

/* Chances relative to the most likely token's; 0 where float32 has no normal number for them. */
INLINE vec chances(const float *from, long count, float most, float temperature) {
    vec x = (some(from, count) - most) / temperature;
    return where(x < -87.0f, all(0), exp_of(x));
}

/* The first token of a chunk at which the sum exceeds `point`; the last that has a chance, where rounding leaves none. */
static long find(const float *row, long count, float most, float temperature, double point) {
    double sum = 0;
    long last = 0;
    for (long i = 0; i < count; i += W) {
        vec each = chances(row + i, count - i, most, temperature);
        for (long j = 0; j < W && i + j < count; j++) {
            if (each[j] > 0) last = i + j;
            sum += each[j];
            if (sum > point) return i + j;
        }
    }
    return last;
}

static long draw_one(const struct draw *d, const float *row, float most, float temperature, double noise, double *logprob) {
    long chunks = (d->vocab + CHUNK - 1) / CHUNK, chosen = 0;
    double whole = 0, before = 0;
    for (long c = 0; c < chunks; c++) {
        vec sum = {0};
        long end = (c + 1) * CHUNK < d->vocab ? (c + 1) * CHUNK : d->vocab;
        for (long i = c * CHUNK; i < end; i += W) sum += chances(row + i, end - i, most, temperature);
        whole += d->sums[c] = total(sum);
    }
    double point = noise * whole, sum = 0;
    for (long c = 0; c < chunks; c++) {
        if (d->sums[c] > 0) chosen = c, before = sum;
        sum += d->sums[c];
        if (sum > point) break;
    }
    long first = chosen * CHUNK, left = d->vocab - first;
    long token = first + find(row + first, left < CHUNK ? left : CHUNK, most, temperature, point - before);
    *logprob = (double)((row[token] - most) / temperature) - log(whole);
    return token;
}

void draw_tokens(const struct draw *d) {
    for (long m = 0; m < d->num; m++) {
        const float *row = d->logits + m * d->vocab;
        float most = greatest(row, d->vocab);
        d->tokens[m] = isfinite(most) ? draw_one(d, row, most, (float)d->temperature[m], d->noise[m], d->logprobs + m) : -1;
    }
}

int draw_chunk(void) { return CHUNK; }
