/* Vectors of floats, as long as the processor's: those of GCC and clang. */

#include <math.h>
#include <stdint.h>

#if defined(__AVX512F__)
#define W 16 /* floats in a vector */
#elif defined(__AVX__)
#define W 8
#else
#define W 4
#endif
#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * W)));
typedef int32_t ivec __attribute__((vector_size(4 * W)));
typedef float loose __attribute__((vector_size(4 * W), aligned(4), may_alias));

/* Have x in a register: a compiler that reads it from memory for every use makes a product twice as slow. */
#if defined(__AVX512F__)
#define HOLD(x) __asm__("" : "+v"(x))
#elif defined(__x86_64__)
#define HOLD(x) __asm__("" : "+x"(x))
#elif defined(__aarch64__)
#define HOLD(x) __asm__("" : "+w"(x))
#else
#define HOLD(x)
#endif

INLINE vec load(const float *from) { return *(const loose *)from; }
INLINE void store(float *to, vec x) { *(loose *)to = x; }
INLINE vec all(float x) { return x - (vec){0}; }
INLINE vec where(ivec mask, vec yes, vec no) { return (vec)(((ivec)yes & mask) | ((ivec)no & ~mask)); }

/* Lane i of the result is half a sum of a (i without the bit `step`) or of b (with it); after log2(W) levels each lane is a vector's whole sum. */
#if W == 16
#define PICK(a, b, x) __builtin_shufflevector(a, b, x(0), x(1), x(2), x(3), x(4), x(5), x(6), x(7), x(8), x(9), x(10), x(11), x(12), x(13), x(14), x(15))
#elif W == 8
#define PICK(a, b, x) __builtin_shufflevector(a, b, x(0), x(1), x(2), x(3), x(4), x(5), x(6), x(7))
#else
#define PICK(a, b, x) __builtin_shufflevector(a, b, x(0), x(1), x(2), x(3))
#endif
#define LOW(step, i) ((i) & (step) ? W + (i) - (step) : (i))
#define HIGH(step, i) ((i) & (step) ? W + (i) : (i) + (step))
#define LOW1(i) LOW(1, i)
#define HIGH1(i) HIGH(1, i)
#define LOW2(i) LOW(2, i)
#define HIGH2(i) HIGH(2, i)
#define LOW4(i) LOW(4, i)
#define HIGH4(i) HIGH(4, i)
#define LOW8(i) LOW(8, i)
#define HIGH8(i) HIGH(8, i)
#define LEVEL(step)                                                                                                     \
    for (int i = 0; i < W / (2 * step); i++) x[i] = PICK(x[2 * i], x[2 * i + 1], LOW##step) + PICK(x[2 * i], x[2 * i + 1], HIGH##step);

/* The sums of W vectors, one per lane. */
INLINE vec sums(vec *x) {
    LEVEL(1)
    LEVEL(2)
#if W >= 8
    LEVEL(4)
#endif
#if W >= 16
    LEVEL(8)
#endif
    return x[0];
}

/* e^x for x <= 88; relative error below 2e-7. */
INLINE vec exp_of(vec x) {
    x = where(x < -87.0f, all(-87.0f), x);
    vec shifted = x * 1.44269504f + 12582912.0f; /* the nearest integer is in its low bits */
    vec n = shifted - 12582912.0f;
    vec r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    vec p = all(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return (vec)((ivec)p + ((ivec)shifted << 23));
}

INLINE vec silu(vec x) {
    vec bounded = where(x < -87.0f, all(-87.0f), x);
    return x / (1.0f + exp_of(-where(bounded > 87.0f, all(87.0f), bounded)));
}

/* The sum of a vector. */
INLINE float total(vec x) {
    vec each[W];
    for (int i = 0; i < W; i++) each[i] = x;
    return sums(each)[0];
}
