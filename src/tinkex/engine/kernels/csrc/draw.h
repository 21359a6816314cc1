/* From logits to a drawn token and its logprob, row by row. */
#ifndef TINKEX_DRAW_H
#define TINKEX_DRAW_H

#include <math.h>

#include "core.h"
#include "pool.h"
#include "simd.h"
#include "truncate.h"

/* Probability mass is summed per block of the vocabulary: a draw finds the block first, then the token in it. */
enum { MAX_BLOCKS = 1024, MIN_BLOCK = 256 };

static inline vec logits_at(const float *logits, int64_t at, int64_t size) {
    if (at + LANES <= size) return vec_load(logits + at);
    float lanes[LANES];
    for (int i = 0; i < LANES; i++) lanes[i] = at + i < size ? logits[at + i] : -INFINITY;
    return vec_load(lanes);
}

/* mass = exp((logit − max logit) / temperature). Subtracting before the division keeps the bits of likely tokens. */
typedef struct {
    vec max_logit, temperature;
} scaling;

static inline vec masses_at(const float *logits, int64_t at, int64_t size, scaling scale) {
    return vec_exp((logits_at(logits, at, size) - scale.max_logit) / scale.temperature);
}

static int64_t first_at_least(const float *values, int64_t size, float level) {
    for (int64_t i = 0; i < size; i++)
        if (values[i] >= level) return i;
    return 0;
}

/* The token at which the cumulative mass exceeds `target`; never a token without mass. */
static int64_t find_token(const float *logits, int64_t vocab, scaling scale, const double *mass, int64_t block,
                          double target) {
    const int64_t blocks = ceil_div(vocab, block);
    int64_t chosen = 0;
    double before = 0;
    for (int64_t b = 0, found = 0; b < blocks && !found; b++) {
        if (!(mass[b] > 0)) continue;
        if (chosen != b && mass[chosen] > 0) before += mass[chosen];
        chosen = b;
        found = before + mass[b] > target;
    }
    int64_t token = min_i64(chosen * block, vocab - 1);
    for (int64_t at = chosen * block; at < min_i64((chosen + 1) * block, vocab); at += LANES) {
        float weights[LANES];
        vec_store(weights, masses_at(logits, at, vocab, scale));
        for (int i = 0; i < LANES && at + i < vocab; i++) {
            if (!(weights[i] > 0)) continue;
            token = at + i;
            before += weights[i];
            if (before > target) return token;
        }
    }
    return token;
}

typedef struct {
    const tinkex_draw *rows;
    char *scratch; /* of all workers */
} drawing;

static inline int64_t drawing_bytes(int64_t vocab) {
    return truncation_bytes(vocab) + round_up((vocab + LANES) * (int64_t)sizeof(float), 64);
}

static int64_t draw_truncated_row(const drawing *d, int64_t row, scaling scale, double total, int worker) {
    const tinkex_draw *draw = d->rows;
    const int64_t vocab = draw->vocab;
    const float *logits = draw->logits + row * vocab;
    char *scratch = d->scratch + worker * drawing_bytes(vocab);
    float *weights = (float *)(void *)(scratch + truncation_bytes(vocab));
    for (int64_t at = 0; at < vocab; at += LANES) vec_store(weights + at, masses_at(logits, at, vocab, scale));
    return draw_truncated(weights, vocab, total, draw->top_ks[row], draw->top_ps[row], draw->uniforms[row],
                          (truncation_scratch *)(void *)scratch);
}

static void draw_task(const void *context, long row, int worker) {
    const drawing *d = context;
    const tinkex_draw *draw = d->rows;
    const int64_t vocab = draw->vocab;
    const float *logits = draw->logits + row * vocab;
    const int greedy = draw->temperatures[row] == 0.0f;
    const int truncated = draw->top_ks[row] > 0 || draw->top_ps[row] < 1.0;
    const float divisor = greedy ? 1.0f : draw->temperatures[row];

    vec highest = logits_at(logits, 0, vocab);
    for (int64_t at = LANES; at < vocab; at += LANES) highest = vec_max(logits_at(logits, at, vocab), highest);
    const float max_logit = vec_reduce_max(highest);
    const scaling scale = {vec_splat(max_logit), vec_splat(divisor)};

    double mass[MAX_BLOCKS], total = 0;
    const int64_t block = round_up(max_i64(MIN_BLOCK, ceil_div(vocab, MAX_BLOCKS)), LANES);
    for (int64_t b = 0; b * block < vocab; b++) {
        vec sum = {0};
        for (int64_t at = b * block; at < min_i64((b + 1) * block, vocab); at += LANES)
            sum += masses_at(logits, at, vocab, scale);
        mass[b] = vec_reduce_sum(sum);
        total += mass[b];
    }
    int64_t token;
    if (greedy || !isfinite(total)) /* a row that is not finite has no valid token */
        token = first_at_least(logits, vocab, max_logit);
    else if (truncated)
        token = draw_truncated_row(d, row, scale, total, worker);
    else
        token = find_token(logits, vocab, scale, mass, block, draw->uniforms[row] * total);
    draw->tokens[row] = token;
    draw->log_normalizers[row] = (float)log(total);
    draw->logprobs[row] = (logits[token] - max_logit) / divisor - draw->log_normalizers[row];
}

static void draw_job(tinkex_thread *thread, void *context) {
    tinkex_parallel_for(thread, ((const drawing *)context)->rows->num_rows, draw_task, context);
}

static int run_draw(const tinkex_draw *draw, int num_threads) {
    char *scratch = aligned_alloc(64, (size_t)(num_threads * drawing_bytes(draw->vocab)));
    if (scratch == NULL) return TINKEX_NO_MEMORY;
    drawing d = {draw, scratch};
    const int result = tinkex_run(draw_job, &d, 1, num_threads);
    free(scratch);
    return result;
}

#endif
