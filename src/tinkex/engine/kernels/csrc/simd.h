/* Vectors of the width this file is compiled for, in the compiler's own vector types.
 *
 * The same source is compiled for AVX-512, for AVX2 with FMA, and for the baseline of the architecture (SSE2 on x86-64,
 * NEON on arm64). A product added to a sum becomes one fused instruction where the processor has one.
 */
#ifndef TINKEX_SIMD_H
#define TINKEX_SIMD_H

#include <stdint.h>
#include <string.h>

/* Vectors of 16 lanes; tests define TINKEX_WIDE to emulate them on other processors. */
#if defined(__AVX512F__) && !defined(TINKEX_WIDE)
#define TINKEX_WIDE
#endif

#if defined(TINKEX_WIDE)
enum { LANES = 16, PANEL_VECTORS = 2, TILE_ROWS = 12 };
#elif defined(__AVX2__)
enum { LANES = 8, PANEL_VECTORS = 2, TILE_ROWS = 6 };
#else
enum { LANES = 4, PANEL_VECTORS = 2, TILE_ROWS = 6 };
#endif

/* Outputs that are computed together. */
enum { PANEL = LANES * PANEL_VECTORS };

typedef float vec __attribute__((vector_size(LANES * sizeof(float))));
typedef int32_t ivec __attribute__((vector_size(LANES * sizeof(int32_t))));

/* A vector at any address. */
typedef vec unaligned_vec __attribute__((aligned(sizeof(float)), may_alias));

static inline vec vec_load(const float *from) { return *(const unaligned_vec *)from; }

static inline void vec_store(float *to, vec value) { *(unaligned_vec *)to = value; }

static inline vec vec_splat(float value) { return value - (vec){0}; }

/* mask ? yes : no, lane by lane; a comparison's mask has all bits of a lane set or none. */
static inline vec vec_select(ivec mask, vec yes, vec no) { return (vec)(((ivec)yes & mask) | ((ivec)no & ~mask)); }

static inline vec vec_max(vec a, vec b) { return vec_select(a > b, a, b); }

/* Adds the lanes pairwise, in the same order for every caller. */
static inline float vec_reduce_sum(vec value) {
    float lanes[LANES];
    vec_store(lanes, value);
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    return lanes[0];
}

static inline float vec_reduce_max(vec value) {
    float lanes[LANES], largest;
    vec_store(lanes, value);
    largest = lanes[0];
    for (int i = 1; i < LANES; i++) largest = lanes[i] > largest ? lanes[i] : largest;
    return largest;
}

/* e to the power of each lane, to about one unit in the last place; 0 below -87.3, NaN stays NaN. */
static inline vec vec_exp(vec x) {
    const vec lowest = vec_splat(-87.33654f), highest = vec_splat(88.37626f);
    const ivec vanishes = x < lowest;
    x = vec_select(x > highest, highest, vec_select(vanishes, lowest, x));
    /* Adding 1.5 · 2^23 leaves the nearest integer in the last bits of the sum. */
    const vec shift = vec_splat(12582912.0f);
    const vec shifted = x * vec_splat(1.44269504f) + shift;
    const vec whole = shifted - shift;
    /* ln 2 in two parts, so that the remainder keeps all its bits. */
    vec rest = x - whole * vec_splat(0.693359375f);
    rest = rest - whole * vec_splat(-2.12194440e-4f);
    vec power = vec_splat(1.9875691500e-4f);
    power = power * rest + vec_splat(1.3981999507e-3f);
    power = power * rest + vec_splat(8.3334519073e-3f);
    power = power * rest + vec_splat(4.1665795894e-2f);
    power = power * rest + vec_splat(1.6666665459e-1f);
    power = power * rest + vec_splat(5.0000001201e-1f);
    power = power * (rest * rest) + rest + vec_splat(1.0f);
    const ivec exponent = (ivec)shifted - (ivec)shift;
    const vec scale = (vec)((exponent + 127) << 23);
    return vec_select(vanishes, vec_splat(0.0f), power * scale);
}

static inline int64_t min_i64(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t max_i64(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t round_up(int64_t a, int64_t unit) { return (a + unit - 1) / unit * unit; }
static inline int64_t ceil_div(int64_t a, int64_t unit) { return (a + unit - 1) / unit; }

#endif
