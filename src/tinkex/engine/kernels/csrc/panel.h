/* Products of a few rows with a panel of PANEL outputs: the one inner loop that all matrices go through.
 *
 * A weight matrix has one row per output. PANEL of its rows are turned into columns in a buffer that stays in the
 * first-level cache, piece by piece, and used by all rows at once: the weights are read from memory once per pass,
 * where torch keeps them, and there is no second copy of the model.
 *
 * Each output is the sum of its chunks of CHUNK inputs, in their order, and each chunk a chain of fused
 * multiply-adds. How many rows share a pass, and how they are cut into tiles and pieces, changes no bit of any of
 * them; and rounding errors grow with the length of a chunk and the number of chunks, not with all inputs.
 */
#ifndef TINKEX_PANEL_H
#define TINKEX_PANEL_H

#include "simd.h"
#include "transpose.h"

enum { CHUNK = 64 };

/* Inputs that are turned at a time when there is much to compute: about half of the first-level cache. */
enum { DEPTH = PANEL >= 32 ? 3 * CHUNK : 5 * CHUNK };

/* Up to so many rows, a pass waits for memory: short pieces then keep the loads and the arithmetic mixed. */
enum { FEW_ROWS = 2 * TILE_ROWS };

/* Rows whose sums are kept at a time. */
enum { ROW_BLOCK = 128 };

enum { LINE = 64, LINE_FLOATS = LINE / sizeof(float) };

/* sums[i][·] += Σ_k x[i][k] · panel[k][·] for `rows` rows, a constant where this is inlined. */
static inline __attribute__((always_inline)) void tile(const int rows, const float *x, int64_t x_stride,
                                                       const float *panel, int64_t panel_stride, int64_t depth,
                                                       float *sums, int64_t sums_stride) {
    for (int64_t start = 0; start < depth; start += CHUNK) {
        const int64_t end = smaller(start + CHUNK, depth);
        vec sum[TILE_ROWS][PANEL_VECTORS];
        for (int i = 0; i < rows; i++)
            for (int v = 0; v < PANEL_VECTORS; v++) sum[i][v] = vec_all(0.0f);
        for (int64_t k = start; k < end; k++) {
            vec column[PANEL_VECTORS];
            for (int v = 0; v < PANEL_VECTORS; v++) column[v] = vec_load(panel + k * panel_stride + v * LANES);
            for (int i = 0; i < rows; i++) {
                const vec factor = vec_all(x[i * x_stride + k]);
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

static void tile_of(int rows, const float *x, int64_t x_stride, const float *panel, int64_t panel_stride,
                    int64_t depth, float *sums, int64_t sums_stride) {
#define TILE_CASE(n) \
    case n: tile(n, x, x_stride, panel, panel_stride, depth, sums, sums_stride); break;
    switch (rows) {
        TILE_CASE(1) TILE_CASE(2) TILE_CASE(3) TILE_CASE(4) TILE_CASE(5) TILE_CASE(6)
#if defined(__AVX512F__)
        TILE_CASE(7) TILE_CASE(8) TILE_CASE(9) TILE_CASE(10) TILE_CASE(11) TILE_CASE(12)
#endif
    }
#undef TILE_CASE
}

/* Rows of a matrix that will be needed soon; NULL where nothing is known. */
typedef struct {
    const float *start;
    int64_t stride, num_rows, lines_per_row;
} upcoming;

/* Fetches the lines from `first` up to `end`, counted row by row. */
static inline void fetch(const upcoming *next, int64_t first, int64_t end) {
    int64_t row = first / next->lines_per_row, line = first % next->lines_per_row;
    for (; first < end; first++) {
        __builtin_prefetch(next->start + row * next->stride + line * LINE_FLOATS, 0, 2);
        if (++line == next->lines_per_row) line = 0, row++;
    }
}

/* The product of any number of rows, cut into tiles of nearly equal size; fetches `next` meanwhile. */
static inline void rows_times_panel(int64_t rows, const float *x, int64_t x_stride, const float *panel,
                                    int64_t panel_stride, int64_t depth, float *sums, int64_t sums_stride,
                                    const upcoming *next) {
    const int64_t tiles = num_parts(rows, TILE_ROWS);
    const int64_t lines = next == NULL || next->start == NULL ? 0 : next->num_rows * next->lines_per_row;
    int64_t done = 0;
    for (int64_t t = 0; t < tiles; t++) {
        const int64_t end = (t + 1) * rows / tiles;
        if (lines > 0) fetch(next, t * lines / tiles, (t + 1) * lines / tiles);
        tile_of((int)(end - done), x + done * x_stride, x_stride, panel, panel_stride, depth, sums + done * sums_stride,
                sums_stride);
        done = end;
    }
}

/* sums (rows, PANEL) += x (rows, inputs) · weightᵀ, for `outputs` ≤ PANEL rows of a weight matrix.
 *
 * With `more` the rows that follow in memory are needed next by the same thread.
 */
static inline void add_product(int64_t rows, const float *x, int64_t x_stride, const float *weight,
                               int64_t weight_stride, int64_t outputs, int64_t inputs, float *sums, int more) {
    _Alignas(64) float panel[DEPTH * PANEL];
    const int few = rows <= FEW_ROWS;
    const int64_t depth = few ? CHUNK : DEPTH, ahead = few ? 2 * CHUNK : DEPTH;
    for (int64_t k = 0; k < inputs; k += depth) {
        const int64_t width = smaller(depth, inputs - k);
        upcoming next = {NULL, weight_stride, outputs, 0};
        if (k + ahead < inputs) {
            next.start = weight + k + ahead;
            next.lines_per_row = smaller(width, inputs - k - ahead) / LINE_FLOATS;
        } else if (more) {
            next.start = weight + outputs * weight_stride + k + ahead - rounded_up(inputs, depth);
            next.lines_per_row = width / LINE_FLOATS;
        }
        if (next.lines_per_row == 0) next.start = NULL;
        if (few) {
            turn_panel(weight + k, weight_stride, outputs, width, panel, next.start);
            rows_times_panel(rows, x + k, x_stride, panel, PANEL, width, sums, PANEL, NULL);
        } else {
            turn_panel(weight + k, weight_stride, outputs, width, panel, NULL);
            rows_times_panel(rows, x + k, x_stride, panel, PANEL, width, sums, PANEL, &next);
        }
    }
}

#endif
