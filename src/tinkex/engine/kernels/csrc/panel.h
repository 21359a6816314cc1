/* Products of rows with a panel of PANEL outputs: the inner loop of every matrix product.
 *
 * A weight matrix has one row per output. PANEL of its rows are transposed, CHUNK inputs at a time, into a buffer that
 * stays in the L1 cache and that all rows of the pass use: the weights are read once per pass, from torch's memory, and
 * there is no second copy of the model.
 *
 * Each output is the sum of its chunks of CHUNK inputs, in order, and each chunk is a chain of multiply-adds. The
 * result is batch-invariant: it does not depend on how many rows share a pass, or on how they are split into tiles.
 * Rounding errors grow with the length of a chunk and the number of chunks, not with the number of inputs.
 */
#ifndef TINKEX_PANEL_H
#define TINKEX_PANEL_H

#include "simd.h"
#include "transpose.h"

enum { CHUNK = 64 };

/* How far ahead of the arithmetic weights are prefetched, in inputs. */
enum { PREFETCH_DISTANCE = 2 * CHUNK };

/* Rows of one task. */
enum { ROW_BLOCK = 128 };

enum { LINE = 64, LINE_FLOATS = LINE / sizeof(float) };

/* sums[i][·] += Σ_k x[i][k] · panel[k][·] for `rows` rows, a constant once inlined. */
static inline __attribute__((always_inline)) void tile(const int rows, const float *x, int64_t x_stride,
                                                       const float *panel, int64_t panel_stride, int64_t depth,
                                                       float *sums, int64_t sums_stride) {
    for (int64_t start = 0; start < depth; start += CHUNK) {
        const int64_t end = min_i64(start + CHUNK, depth);
        vec sum[TILE_ROWS][PANEL_VECTORS];
        for (int i = 0; i < rows; i++)
            for (int v = 0; v < PANEL_VECTORS; v++) sum[i][v] = vec_splat(0.0f);
        for (int64_t k = start; k < end; k++) {
            vec column[PANEL_VECTORS];
            for (int v = 0; v < PANEL_VECTORS; v++) column[v] = vec_load(panel + k * panel_stride + v * LANES);
            for (int i = 0; i < rows; i++) {
                const vec factor = vec_splat(x[i * x_stride + k]);
                for (int v = 0; v < PANEL_VECTORS; v++) sum[i][v] += factor * column[v];
            }
        }
        for (int i = 0; i < rows; i++)
            for (int v = 0; v < PANEL_VECTORS; v++) {
                float *to = sums + i * sums_stride + v * LANES;
                vec_store(to, vec_load(to) + sum[i][v]);
            }
    }
}

static void tile_of(int rows, const float *x, int64_t x_stride, const float *panel, int64_t panel_stride, int64_t depth,
                    float *sums, int64_t sums_stride) {
#define TILE_CASE(n) \
    case n: tile(n, x, x_stride, panel, panel_stride, depth, sums, sums_stride); break;
    switch (rows) {
        TILE_CASE(1)
        TILE_CASE(2) TILE_CASE(3) TILE_CASE(4) TILE_CASE(5) TILE_CASE(6)
#if defined(TINKEX_WIDE)
            TILE_CASE(7) TILE_CASE(8) TILE_CASE(9) TILE_CASE(10) TILE_CASE(11) TILE_CASE(12)
#endif
    }
#undef TILE_CASE
}

/* A block of a matrix that is needed soon: its cache lines are prefetched during the current product. */
typedef struct {
    const float *line;
    int64_t stride, left, per_row, left_in_row;
} prefetch_block;

static inline prefetch_block prefetch_block_of(const float *start, int64_t stride, int64_t num_rows, int64_t width) {
    const int64_t per_row = width / LINE_FLOATS;
    return (prefetch_block){start, stride, num_rows * per_row, per_row, per_row};
}

static inline void prefetch_lines(prefetch_block *next, int64_t count) {
    for (count = min_i64(count, next->left), next->left -= count; count > 0; count--) {
        __builtin_prefetch(next->line, 0, 2);
        next->line += LINE_FLOATS;
        if (--next->left_in_row == 0) {
            next->line += next->stride - next->per_row * LINE_FLOATS;
            next->left_in_row = next->per_row;
        }
    }
}

/* Ranges of memory that are needed later, prefetched in order and evenly over the chunks of a product. */
enum { MAX_PREFETCH_RANGES = 64 };
typedef struct {
    int64_t chunks;                  /* of the product, still to compute */
    int64_t num_ranges, range, left; /* left: cache lines of all ranges */
    struct {
        const char *line;
        int64_t lines;
    } ranges[MAX_PREFETCH_RANGES];
} prefetch_queue;

static inline void prefetch_queue_add(prefetch_queue *queue, const float *from, int64_t count) {
    if (queue->num_ranges == MAX_PREFETCH_RANGES || count <= 0) return;
    const int64_t lines = ceil_div(count, LINE_FLOATS);
    queue->ranges[queue->num_ranges].line = (const char *)from;
    queue->ranges[queue->num_ranges++].lines = lines;
    queue->left += lines;
}

/* How many lines to prefetch during the next chunk. */
static inline int64_t prefetch_queue_due(prefetch_queue *queue) {
    if (queue == NULL || queue->left == 0) return 0;
    return ceil_div(queue->left, max_i64(1, queue->chunks--));
}

static inline void prefetch_queue_run(prefetch_queue *queue, int64_t count) {
    count = min_i64(count, queue->left);
    queue->left -= count;
    while (count > 0) {
        const int64_t lines = min_i64(count, queue->ranges[queue->range].lines);
        const char *line = queue->ranges[queue->range].line;
        for (const char *end = line + lines * LINE; line < end; line += LINE) __builtin_prefetch(line, 0, 2);
        queue->ranges[queue->range].line = line;
        queue->ranges[queue->range].lines -= lines;
        if (queue->ranges[queue->range].lines == 0) queue->range++;
        count -= lines;
    }
}

/* The product of any number of rows, in tiles of nearly equal size. Meanwhile prefetches `next`, if given, and
 * `queue_lines` lines of `queue`. */
static inline void rows_times_panel(int64_t rows, const float *x, int64_t x_stride, const float *panel,
                                    int64_t panel_stride, int64_t depth, float *sums, int64_t sums_stride,
                                    prefetch_block *next, prefetch_queue *queue, int64_t queue_lines) {
    const int64_t tiles = ceil_div(rows, TILE_ROWS);
    const int64_t share = next == NULL ? 0 : ceil_div(next->left, tiles);
    const int64_t queue_share = ceil_div(queue_lines, tiles);
    int64_t done = 0;
    for (int64_t t = 0; t < tiles; t++) {
        const int64_t end = (t + 1) * rows / tiles;
        if (share > 0) prefetch_lines(next, share);
        if (queue_share > 0) prefetch_queue_run(queue, queue_share);
        tile_of((int)(end - done), x + done * x_stride, x_stride, panel, panel_stride, depth, sums + done * sums_stride,
                sums_stride);
        done = end;
    }
}

/* sums (rows, PANEL) += x (rows, inputs) · weightᵀ, for `outputs` ≤ PANEL rows of a weight matrix.
 *
 * With `more`, the same thread needs the rows that follow in memory next.
 */
static inline void add_product(int64_t rows, const float *x, int64_t x_stride, const float *weight,
                               int64_t weight_stride, int64_t outputs, int64_t inputs, float *sums, int more,
                               prefetch_queue *queue) {
    _Alignas(64) float panel[CHUNK * PANEL];
    for (int64_t k = 0; k < inputs; k += CHUNK) {
        const int64_t width = min_i64(CHUNK, inputs - k), ahead = k + PREFETCH_DISTANCE;
        prefetch_block next = {0};
        if (ahead < inputs)
            next = prefetch_block_of(weight + ahead, weight_stride, outputs, min_i64(width, inputs - ahead));
        else if (more)
            next = prefetch_block_of(weight + outputs * weight_stride + ahead - round_up(inputs, CHUNK), weight_stride,
                                     outputs, width);
        transpose_panel(weight + k, weight_stride, outputs, width, panel);
        rows_times_panel(rows, x + k, x_stride, panel, PANEL, width, sums, PANEL, &next, queue,
                         prefetch_queue_due(queue));
    }
}

#endif
