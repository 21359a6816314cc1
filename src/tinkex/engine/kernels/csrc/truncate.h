/* Draws from a truncated distribution: top-k, then the nucleus, the fewest tokens that hold top-p of the remaining
 * mass.
 *
 * Weights are positive, so their bits sort in the same order. A histogram over the leading bits finds the tokens that
 * can be among them, and only those are sorted.
 */
#ifndef TINKEX_TRUNCATE_H
#define TINKEX_TRUNCATE_H

#include <stdlib.h>

#include "simd.h"

/* A bin is the exponent of a weight and five more bits. A weight is at most 1. */
enum { BIN_SHIFT = 18, NUM_BINS = (0x3F800000 >> BIN_SHIFT) + 1 };

typedef struct {
    float weight;
    int32_t token;
} candidate;

typedef struct {
    double mass[NUM_BINS];
    int64_t count[NUM_BINS];
    candidate candidates[]; /* room for the whole vocabulary */
} truncation_scratch;

static inline int64_t truncation_bytes(int64_t vocab) {
    return round_up((int64_t)sizeof(truncation_scratch) + vocab * (int64_t)sizeof(candidate), 64);
}

static inline int32_t bin_of(float weight) {
    int32_t bits;
    memcpy(&bits, &weight, sizeof bits);
    return (int32_t)min_i64(max_i64(bits, 0) >> BIN_SHIFT, NUM_BINS - 1);
}

/* By descending weight, then by token. */
static int by_weight(const void *a, const void *b) {
    const candidate *one = a, *other = b;
    if (one->weight != other->weight) return one->weight < other->weight ? 1 : -1;
    return one->token < other->token ? -1 : 1;
}

/* Collects, in order, the tokens of every bin that top-k or top-p can reach; returns their number. */
static int64_t collect(const float *weights, int64_t vocab, int64_t top_k, double nucleus,
                       truncation_scratch *scratch) {
    memset(scratch, 0, sizeof *scratch);
    for (int64_t i = 0; i < vocab; i++) {
        const int32_t bin = bin_of(weights[i]);
        scratch->mass[bin] += (double)weights[i];
        scratch->count[bin]++;
    }
    int32_t lowest = NUM_BINS - 1;
    double mass = scratch->mass[lowest];
    int64_t count = scratch->count[lowest];
    while (lowest > 0 && (top_k > 0 ? count < top_k : mass < nucleus)) {
        lowest--;
        mass += scratch->mass[lowest];
        count += scratch->count[lowest];
    }
    int64_t found = 0;
    for (int64_t i = 0; i < vocab; i++)
        if (bin_of(weights[i]) >= lowest) scratch->candidates[found++] = (candidate){weights[i], (int32_t)i};
    qsort(scratch->candidates, (size_t)found, sizeof(candidate), by_weight);
    return found;
}

/* A token of the truncated distribution; top_k ≤ 0 and top_p = 1 truncate nothing. */
static int64_t draw_truncated(const float *weights, int64_t vocab, double total, int64_t top_k, double top_p,
                              double uniform, truncation_scratch *scratch) {
    int64_t num = collect(weights, vocab, top_k, top_p * total, scratch);
    const candidate *candidates = scratch->candidates;
    if (top_k > 0) {
        num = min_i64(num, top_k);
        total = 0;
        for (int64_t i = 0; i < num; i++) total += (double)candidates[i].weight;
    }
    double kept = 0;
    int64_t num_kept = 0;
    while (num_kept < num && kept < top_p * total) kept += (double)candidates[num_kept++].weight;
    const double target = uniform * kept;
    double before = 0;
    int64_t chosen = 0;
    for (int64_t i = 0; i < num_kept && candidates[i].weight > 0; i++) {
        chosen = i;
        before += (double)candidates[i].weight;
        if (before > target) break;
    }
    return candidates[chosen].token;
}

#endif
