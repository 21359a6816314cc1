/* Grouped-query attention of new rows over the cached keys and values of their own sequence.
 *
 * A task is a block of consecutive rows of one sequence under one key/value head, so that the query heads that share
 * keys, and the rows of a prompt, use each key while it is in the processor's cache.
 *
 * Keys are grouped by their position in the sequence, never by where a block begins: a row gets the same bits
 * whether its prompt is computed in one pass, in chunks or token by token.
 */
#ifndef TINKEX_ATTENTION_H
#define TINKEX_ATTENTION_H

#include <math.h>

#include "core.h"
#include "panel.h"

/* Consecutive rows of one sequence. */
typedef struct {
    const tinkex_sequence *sequence;
    int64_t first_row, num_rows, position;
} attention_block;

typedef struct {
    const tinkex_model *model;
    const attention_block *blocks;
    int64_t layer, queries_per_block, max_span;
    const float *qkv; /* rotated */
    int64_t qkv_stride;
    float *attn_out; /* out: (rows, heads · head_dim) */
    float *scratch;
    int64_t scratch_size; /* floats of one worker */
} attention;

/* Rows · heads of one block. */
enum { BLOCK_QUERIES = 48 };

static inline int64_t block_rows(const tinkex_model *model) {
    return max_i64(1, BLOCK_QUERIES / (model->heads / model->kv_heads));
}

static inline int64_t attention_scratch(int64_t queries, int64_t max_span, int64_t head_dim) {
    const int64_t panel = max_i64(head_dim, CHUNK) * PANEL;
    return queries * (max_span + round_up(head_dim, PANEL) + PANEL + 1) + panel;
}

/* Replaces the scores of one query by exp(score − max), and by 0 outside `first…last`; returns the sum. */
static float softmax_weights(float *scores, int64_t first, int64_t last, int64_t span) {
    for (int64_t t = 0; t < first; t++) scores[t] = -INFINITY;
    for (int64_t t = last + 1; t < span; t++) scores[t] = -INFINITY;
    vec highest = vec_load(scores), sum = {0};
    for (int64_t t = LANES; t < span; t += LANES) highest = vec_max(vec_load(scores + t), highest);
    const vec shift = vec_splat(vec_reduce_max(highest));
    for (int64_t t = 0; t < span; t += LANES) {
        const vec weight = vec_exp(vec_load(scores + t) - shift);
        vec_store(scores + t, weight);
        sum += weight;
    }
    return vec_reduce_sum(sum);
}

/* sums (queries, PANEL) += weights · values[·][column…], also where the head has fewer than PANEL columns left. */
static void accumulate_values(int64_t queries, const float *weights, int64_t span, const float *values,
                              int64_t num_keys, int64_t head_dim, int64_t column, float *panel, float *sums) {
    if (column + PANEL <= head_dim) {
        rows_times_panel(queries, weights, span, values + column, head_dim, num_keys, sums, PANEL, NULL, NULL, 0);
        return;
    }
    for (int64_t start = 0; start < num_keys; start += CHUNK) {
        const int64_t depth = min_i64(CHUNK, num_keys - start);
        memset(panel, 0, (size_t)(depth * PANEL) * sizeof(float));
        for (int64_t t = 0; t < depth; t++)
            memcpy(panel + t * PANEL, values + (start + t) * head_dim + column,
                   (size_t)(head_dim - column) * sizeof(float));
        rows_times_panel(queries, weights + start, span, panel, PANEL, depth, sums, PANEL, NULL, NULL, 0);
    }
}

/* The keys and values of one head in one extent, within the positions `from…to`. */
typedef struct {
    const float *keys, *values;
    int64_t from, to; /* empty if from ≥ to */
} visible_keys;

static inline visible_keys visible_in_extent(const tinkex_sequence *sequence, int64_t number, int64_t layer,
                                             int64_t head, int64_t head_dim, int64_t from, int64_t to) {
    const tinkex_extent *s = &sequence->extents[number];
    if (number + 1 < sequence->num_extents) to = min_i64(to, s[1].start);
    from = max_i64(from, s->start);
    const float *keys = s->keys + layer * s->layer_stride + head * s->head_stride + (from - s->start) * head_dim;
    return (visible_keys){keys, keys + s->value_offset, from, to};
}

/* One block of rows under one key/value head. */
static void attention_task(const void *context, long task, int worker) {
    const attention *a = context;
    const tinkex_model *model = a->model;
    const attention_block *block = &a->blocks[task / model->kv_heads];
    const tinkex_sequence *sequence = block->sequence;
    const int64_t kv_head = task % model->kv_heads, group = model->heads / model->kv_heads;
    const int64_t d = model->head_dim, window = model->layers[a->layer].window;
    const int64_t seen_first = window > 0 ? max_i64(0, block->position - window + 1) : 0;
    const int64_t first = seen_first / CHUNK * CHUNK, end = block->position + block->num_rows;
    const int64_t span = round_up(end - first, PANEL), queries = block->num_rows * group;

    float *scores = a->scratch + worker * a->scratch_size;
    float *query = scores + a->queries_per_block * a->max_span;
    float *sums = query + a->queries_per_block * round_up(d, PANEL);
    float *panel = sums + a->queries_per_block * PANEL;
    float *totals = panel + max_i64(d, CHUNK) * PANEL;

    const float scale = 1.0f / sqrtf((float)d);
    for (int64_t row = 0; row < block->num_rows; row++) {
        const float *from = a->qkv + (block->first_row + row) * a->qkv_stride + kv_head * group * d;
        for (int64_t i = 0; i < group * d; i++) query[row * group * d + i] = from[i] * scale;
    }
    memset(scores, 0, (size_t)(queries * span) * sizeof(float));
    for (int64_t s = 0; s < sequence->num_extents; s++) {
        const visible_keys part = visible_in_extent(sequence, s, a->layer, kv_head, d, first, end);
        for (int64_t t = part.from; t < part.to; t += PANEL) {
            transpose_panel(part.keys + (t - part.from) * d, d, min_i64(PANEL, part.to - t), d, panel);
            rows_times_panel(queries, query, d, panel, PANEL, d, scores + t - first, span, NULL, NULL, 0);
        }
    }
    for (int64_t q = 0; q < queries; q++) {
        const int64_t position = block->position + q / group;
        const int64_t seen = window > 0 ? max_i64(0, position - window + 1) : 0;
        totals[q] = softmax_weights(scores + q * span, seen - first, position - first, span);
    }
    for (int64_t column = 0; column < d; column += PANEL) {
        const int64_t columns = min_i64(PANEL, d - column);
        memset(sums, 0, (size_t)(queries * PANEL) * sizeof(float));
        for (int64_t s = 0; s < sequence->num_extents; s++) {
            const visible_keys part = visible_in_extent(sequence, s, a->layer, kv_head, d, first, end);
            if (part.from < part.to)
                accumulate_values(queries, scores + part.from - first, span, part.values, part.to - part.from, d,
                                  column, panel, sums);
        }
        for (int64_t q = 0; q < queries; q++) {
            const int64_t row = block->first_row + q / group, head = kv_head * group + q % group;
            float *out = a->attn_out + row * model->heads * d + head * d + column;
            for (int64_t i = 0; i < columns; i++) out[i] = sums[q * PANEL + i] / totals[q];
        }
    }
}

#endif
