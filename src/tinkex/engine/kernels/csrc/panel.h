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

/* How far ahead of the arithmetic weights are fetched, in inputs. */
enum { AHEAD = 2 * CHUNK };

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
#if defined(TINKEX_WIDE)
        TILE_CASE(7) TILE_CASE(8) TILE_CASE(9) TILE_CASE(10) TILE_CASE(11) TILE_CASE(12)
#endif
    }
#undef TILE_CASE
}

/* A block of a matrix that will be needed soon, fetched line by line while something else is computed. */
typedef struct {
    const float *line;
    int64_t stride, left, per_row, left_in_row;
} upcoming;

static inline upcoming upcoming_block(const float *start, int64_t stride, int64_t num_rows, int64_t width) {
    const int64_t per_row = width / LINE_FLOATS;
    return (upcoming){start, stride, num_rows * per_row, per_row, per_row};
}

static inline void fetch(upcoming *next, int64_t count) {
    for (count = smaller(count, next->left), next->left -= count; count > 0; count--) {
        __builtin_prefetch(next->line, 0, 2);
        next->line += LINE_FLOATS;
        if (--next->left_in_row == 0) {
            next->line += next->stride - next->per_row * LINE_FLOATS;
            next->left_in_row = next->per_row;
        }
    }
}

/* Memory that will be needed later: pieces, fetched in the order they were noted, evenly over the chunks of products. */
enum { MOST_PIECES = 64 };
typedef struct {
    int64_t chunks; /* that are still to come */
    int64_t num_pieces, piece, left; /* left: lines of all pieces */
    struct {
        const char *line;
        int64_t lines;
    } pieces[MOST_PIECES];
} errands;

static inline void note_errand(errands *list, const float *from, int64_t count) {
    if (list->num_pieces == MOST_PIECES || count <= 0) return;
    const int64_t lines = num_parts(count, LINE_FLOATS);
    list->pieces[list->num_pieces].line = (const char *)from;
    list->pieces[list->num_pieces++].lines = lines;
    list->left += lines;
}

/* How many lines to fetch during the next chunk. */
static inline int64_t errands_due(errands *list) {
    if (list == NULL || list->left == 0) return 0;
    return num_parts(list->left, larger(1, list->chunks--));
}

static inline void run_errands(errands *list, int64_t count) {
    count = smaller(count, list->left);
    list->left -= count;
    while (count > 0) {
        const int64_t lines = smaller(count, list->pieces[list->piece].lines);
        const char *line = list->pieces[list->piece].line;
        for (const char *end = line + lines * LINE; line < end; line += LINE) __builtin_prefetch(line, 0, 2);
        list->pieces[list->piece].line = line;
        list->pieces[list->piece].lines -= lines;
        if (list->pieces[list->piece].lines == 0) list->piece++;
        count -= lines;
    }
}

/* The product of any number of rows, cut into tiles of nearly equal size; meanwhile fetches `next`, if given, and
 * `num_errands` lines of `list`. */
static inline void rows_times_panel(int64_t rows, const float *x, int64_t x_stride, const float *panel,
                                    int64_t panel_stride, int64_t depth, float *sums, int64_t sums_stride,
                                    upcoming *next, errands *list, int64_t num_errands) {
    const int64_t tiles = num_parts(rows, TILE_ROWS);
    const int64_t share = next == NULL ? 0 : num_parts(next->left, tiles);
    const int64_t errand_share = num_parts(num_errands, tiles);
    int64_t done = 0;
    for (int64_t t = 0; t < tiles; t++) {
        const int64_t end = (t + 1) * rows / tiles;
        if (share > 0) fetch(next, share);
        if (errand_share > 0) run_errands(list, errand_share);
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
                               int64_t weight_stride, int64_t outputs, int64_t inputs, float *sums, int more,
                               errands *list) {
    _Alignas(64) float panel[CHUNK * PANEL];
    for (int64_t k = 0; k < inputs; k += CHUNK) {
        const int64_t width = smaller(CHUNK, inputs - k), ahead = k + AHEAD;
        upcoming next = {0};
        if (ahead < inputs)
            next = upcoming_block(weight + ahead, weight_stride, outputs, smaller(width, inputs - ahead));
        else if (more)
            next = upcoming_block(weight + outputs * weight_stride + ahead - rounded_up(inputs, CHUNK), weight_stride,
                                  outputs, width);
        turn_panel(weight + k, weight_stride, outputs, width, panel);
        rows_times_panel(rows, x + k, x_stride, panel, PANEL, width, sums, PANEL, &next, list,
                         errands_due(list));
    }
}

#endif
