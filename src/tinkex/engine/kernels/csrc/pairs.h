/* Low-rank pairs in training: what they add on the way forward, and all their gradients on the way back.
 *
 * The rows of a pass belong to tenants, each with pairs of its own on projections that share an input. With
 * u = scale · x · Aᵀ kept from the way forward, g the gradient of the outputs and v = scale · g · B:
 *
 *     out += u · Bᵀ        grad_B += gᵀ · u        grad_A += vᵀ · x        grad_x += v · A
 *
 * Every number is computed by one task, in an order that depends on its own tenant's rows alone: neither the other
 * tenants nor the number of threads change a bit of it.
 */
#ifndef TINKEX_PAIRS_H
#define TINKEX_PAIRS_H

#include "core.h"
#include "panel.h"
#include "pool.h"

/* Panels that are kept in the first-level cache together, and the rows that go through them at a time. */
enum { GROUP = 4, SPAN = GROUP * PANEL, STRIP = 4 * TILE_ROWS };

/* Where one task works: a tenant, one of its pairs and, by the kind of task, a block of rows and of columns. */
typedef struct {
    const tinkex_tenant *tenant;
    int part;
    int64_t block, column;
} pair_place;

static inline int64_t narrow_stride(const tinkex_pairs *p) { return p->num_parts * p->max_rank; }

static inline float *narrow_at(const tinkex_pairs *p, float *narrow, int64_t row, int part) {
    return narrow + row * narrow_stride(p) + part * p->max_rank;
}

static int64_t most_rows(const tinkex_pairs *p) {
    int64_t most = 0;
    for (int64_t t = 0; t < p->num_tenants; t++) most = larger(most, p->tenants[t].num_rows);
    return most;
}

static int64_t most_outputs(const tinkex_pairs *p) {
    int64_t most = 0;
    for (int64_t part = 0; part < p->num_parts; part++) most = larger(most, p->outputs[part]);
    return most;
}

/* Tasks of a kind that has `columns` of `width` each: all tenants have as many, and some of them nothing to do. */
static inline long num_places(const tinkex_pairs *p, int64_t blocks, int64_t columns, int64_t width) {
    return (long)(p->num_tenants * p->num_parts * blocks * num_parts(columns, width));
}

static inline pair_place place_of(const tinkex_pairs *p, long task, int64_t blocks, int64_t columns, int64_t width) {
    const int64_t across = num_parts(columns, width);
    pair_place place;
    place.column = task % across * width;
    task /= across;
    place.part = (int)(task % p->num_parts);
    task /= p->num_parts;
    place.block = task % blocks * ROW_BLOCK;
    place.tenant = &p->tenants[task / blocks];
    return place;
}

/* panel[k][i] = from[k][i] for i < columns, and 0 behind. */
static void copy_panel(const float *from, int64_t stride, int64_t depth, int64_t columns, float *panel) {
    for (int64_t k = 0; k < depth; k++) {
        if (columns == PANEL) {
            for (int v = 0; v < PANEL_VECTORS; v++)
                vec_store(panel + k * PANEL + v * LANES, vec_load(from + k * stride + v * LANES));
        } else {
            for (int64_t i = 0; i < PANEL; i++) panel[k * PANEL + i] = i < columns ? from[k * stride + i] : 0.0f;
        }
    }
}

/* to[i][k] = from[k][i] for k < depth ≤ CHUNK and i < columns ≤ CHUNK; rows of `to` are CHUNK apart. */
static void turn_block(const float *from, int64_t stride, int64_t depth, int64_t columns, float *to) {
    const int64_t whole_depth = depth / TURN * TURN, whole_columns = columns / TURN * TURN;
    for (int64_t k = 0; k < whole_depth; k += TURN)
        for (int64_t i = 0; i < whole_columns; i += TURN)
            turn_square(from + k * stride + i, stride, to + i * CHUNK + k, CHUNK);
    for (int64_t i = 0; i < columns; i++)
        for (int64_t k = i < whole_columns ? whole_depth : 0; k < depth; k++) to[i * CHUNK + k] = from[k * stride + i];
}

/* to[·][0…columns) += x · panel for up to ROW_BLOCK rows. */
static void add_rows(int64_t rows, const float *x, int64_t x_stride, const float *panel, int64_t depth,
                     int64_t columns, float *to, int64_t to_stride) {
    if (columns == PANEL) {
        rows_times_panel(rows, x, x_stride, panel, PANEL, depth, to, to_stride, NULL, NULL, 0);
        return;
    }
    _Alignas(64) float sums[ROW_BLOCK * PANEL];
    memset(sums, 0, (size_t)(rows * PANEL) * sizeof(float));
    rows_times_panel(rows, x, x_stride, panel, PANEL, depth, sums, PANEL, NULL, NULL, 0);
    for (int64_t row = 0; row < rows; row++)
        for (int64_t i = 0; i < columns; i++) to[row * to_stride + i] += sums[row * PANEL + i];
}

/* to[·][0…columns) += x · panels for columns ≤ SPAN, whose panels are CHUNK · PANEL apart. */
static void add_span(int64_t rows, const float *x, int64_t x_stride, const float *panels, int64_t depth,
                     int64_t columns, float *to, int64_t to_stride) {
    for (int64_t row = 0; row < rows; row += STRIP)
        for (int64_t c = 0; c < columns; c += PANEL)
            add_rows(smaller(STRIP, rows - row), x + row * x_stride, x_stride, panels + c * CHUNK, depth,
                     smaller(PANEL, columns - c), to + row * to_stride + c, to_stride);
}

static void write_narrow(const tinkex_pairs *p, const pair_place *place, int64_t rows, int64_t ranks, const float *sums,
                         float *narrow) {
    const float scale = (float)place->tenant->scale;
    for (int64_t row = 0; row < rows; row++) {
        float *to = narrow_at(p, narrow, place->tenant->first_row + place->block + row, place->part) + place->column;
        for (int64_t r = 0; r < ranks; r++) to[r] = scale * sums[row * PANEL + r];
    }
}

static int64_t row_blocks(const tinkex_pairs *p) { return num_parts(most_rows(p), ROW_BLOCK); }

/* u = scale · x · Aᵀ of a panel of ranks and a block of rows. */
static void narrow_task(const void *context, long task, int worker) {
    const tinkex_pairs *p = context;
    (void)worker;
    const pair_place place = place_of(p, task, row_blocks(p), p->max_rank, PANEL);
    const tinkex_tenant *tenant = place.tenant;
    const float *a = tenant->a[place.part];
    if (a == NULL || place.column >= tenant->rank || place.block >= tenant->num_rows) return;
    const int64_t rows = smaller(ROW_BLOCK, tenant->num_rows - place.block);
    const int64_t ranks = smaller(PANEL, tenant->rank - place.column);
    _Alignas(64) float sums[ROW_BLOCK * PANEL];
    memset(sums, 0, (size_t)(rows * PANEL) * sizeof(float));
    add_product(rows, p->x + (tenant->first_row + place.block) * p->x_stride, p->x_stride, a + place.column * p->inputs,
                p->inputs, ranks, p->inputs, sums, 0, NULL);
    write_narrow(p, &place, rows, ranks, sums, p->narrow);
}

/* out += u · Bᵀ of a span of outputs and a block of rows. */
static void widen_task(const void *context, long task, int worker) {
    const tinkex_pairs *p = context;
    (void)worker;
    const pair_place place = place_of(p, task, row_blocks(p), most_outputs(p), SPAN);
    const tinkex_tenant *tenant = place.tenant;
    const float *b = tenant->b[place.part];
    const int64_t outputs = p->outputs[place.part];
    if (b == NULL || place.column >= outputs || place.block >= tenant->num_rows) return;
    const int64_t rows = smaller(ROW_BLOCK, tenant->num_rows - place.block), first = tenant->first_row + place.block;
    const int64_t columns = smaller(SPAN, outputs - place.column);
    _Alignas(64) float panels[GROUP * CHUNK * PANEL];
    for (int64_t rank = 0; rank < tenant->rank; rank += CHUNK) {
        const int64_t depth = smaller(CHUNK, tenant->rank - rank);
        for (int64_t c = 0; c < columns; c += PANEL)
            turn_panel(b + (place.column + c) * tenant->rank + rank, tenant->rank, smaller(PANEL, columns - c), depth,
                       panels + c * CHUNK);
        add_span(rows, narrow_at(p, p->narrow, first, place.part) + rank, narrow_stride(p), panels, depth, columns,
                 p->out + first * p->out_stride + p->first_column[place.part] + place.column, p->out_stride);
    }
}

/* v = scale · g · B of a panel of ranks and a block of rows. */
static void narrow_grad_task(const void *context, long task, int worker) {
    const tinkex_pairs *p = context;
    (void)worker;
    const pair_place place = place_of(p, task, row_blocks(p), p->max_rank, PANEL);
    const tinkex_tenant *tenant = place.tenant;
    const float *b = tenant->b[place.part];
    if (b == NULL || place.column >= tenant->rank || place.block >= tenant->num_rows) return;
    const int64_t rows = smaller(ROW_BLOCK, tenant->num_rows - place.block);
    const int64_t ranks = smaller(PANEL, tenant->rank - place.column), outputs = p->outputs[place.part];
    const float *grad =
        p->grad_out + (tenant->first_row + place.block) * p->grad_out_stride + p->first_column[place.part];
    _Alignas(64) float sums[ROW_BLOCK * PANEL], panel[CHUNK * PANEL];
    memset(sums, 0, (size_t)(rows * PANEL) * sizeof(float));
    for (int64_t o = 0; o < outputs; o += CHUNK) {
        const int64_t depth = smaller(CHUNK, outputs - o);
        copy_panel(b + o * tenant->rank + place.column, tenant->rank, depth, ranks, panel);
        rows_times_panel(rows, grad + o, p->grad_out_stride, panel, PANEL, depth, sums, PANEL, NULL, NULL, 0);
    }
    write_narrow(p, &place, rows, ranks, sums, p->narrow_grad);
}

/* grad_B += gᵀ · u of a chunk of outputs. */
static void grad_b_task(const void *context, long task, int worker) {
    const tinkex_pairs *p = context;
    (void)worker;
    const pair_place place = place_of(p, task, 1, most_outputs(p), CHUNK);
    const tinkex_tenant *tenant = place.tenant;
    float *grad_b = tenant->grad_b[place.part];
    const int64_t outputs = p->outputs[place.part];
    if (grad_b == NULL || place.column >= outputs) return;
    const int64_t columns = smaller(CHUNK, outputs - place.column);
    _Alignas(64) float turned[CHUNK * CHUNK], panel[CHUNK * PANEL];
    for (int64_t n = 0; n < tenant->num_rows; n += CHUNK) {
        const int64_t depth = smaller(CHUNK, tenant->num_rows - n), row = tenant->first_row + n;
        turn_block(p->grad_out + row * p->grad_out_stride + p->first_column[place.part] + place.column,
                   p->grad_out_stride, depth, columns, turned);
        for (int64_t rank = 0; rank < tenant->rank; rank += PANEL) {
            const int64_t ranks = smaller(PANEL, tenant->rank - rank);
            copy_panel(narrow_at(p, p->narrow, row, place.part) + rank, narrow_stride(p), depth, ranks, panel);
            add_rows(columns, turned, CHUNK, panel, depth, ranks, grad_b + place.column * tenant->rank + rank,
                     tenant->rank);
        }
    }
}

/* grad_A += vᵀ · x of a span of inputs. */
static void grad_a_task(const void *context, long task, int worker) {
    const tinkex_pairs *p = context;
    (void)worker;
    const pair_place place = place_of(p, task, 1, p->inputs, SPAN);
    const tinkex_tenant *tenant = place.tenant;
    float *grad_a = tenant->grad_a[place.part];
    if (grad_a == NULL) return;
    const int64_t columns = smaller(SPAN, p->inputs - place.column);
    _Alignas(64) float turned[CHUNK * CHUNK], panels[GROUP * CHUNK * PANEL];
    for (int64_t n = 0; n < tenant->num_rows; n += CHUNK) {
        const int64_t depth = smaller(CHUNK, tenant->num_rows - n), row = tenant->first_row + n;
        for (int64_t c = 0; c < columns; c += PANEL)
            copy_panel(p->x + row * p->x_stride + place.column + c, p->x_stride, depth, smaller(PANEL, columns - c),
                       panels + c * CHUNK);
        for (int64_t rank = 0; rank < tenant->rank; rank += CHUNK) {
            const int64_t ranks = smaller(CHUNK, tenant->rank - rank);
            turn_block(narrow_at(p, p->narrow_grad, row, place.part) + rank, narrow_stride(p), depth, ranks, turned);
            add_span(ranks, turned, CHUNK, panels, depth, columns, grad_a + rank * p->inputs + place.column, p->inputs);
        }
    }
}

/* grad_x += v · A of a span of inputs and a block of rows, all parts in their order. */
static void grad_x_task(const void *context, long task, int worker) {
    const tinkex_pairs *p = context;
    (void)worker;
    const int64_t across = num_parts(p->inputs, SPAN), blocks = row_blocks(p);
    const int64_t column = task % across * SPAN, block = task / across % blocks * ROW_BLOCK;
    const tinkex_tenant *tenant = &p->tenants[task / across / blocks];
    if (block >= tenant->num_rows) return;
    const int64_t rows = smaller(ROW_BLOCK, tenant->num_rows - block), first = tenant->first_row + block;
    const int64_t columns = smaller(SPAN, p->inputs - column);
    _Alignas(64) float panels[GROUP * CHUNK * PANEL];
    for (int part = 0; part < p->num_parts; part++) {
        const float *a = tenant->a[part];
        for (int64_t rank = 0; a != NULL && rank < tenant->rank; rank += CHUNK) {
            const int64_t depth = smaller(CHUNK, tenant->rank - rank);
            for (int64_t c = 0; c < columns; c += PANEL)
                copy_panel(a + rank * p->inputs + column + c, p->inputs, depth, smaller(PANEL, columns - c),
                           panels + c * CHUNK);
            add_span(rows, narrow_at(p, p->narrow_grad, first, part) + rank, narrow_stride(p), panels, depth, columns,
                     p->grad_x + first * p->grad_x_stride + column, p->grad_x_stride);
        }
    }
}

static void pairs_forward_job(tinkex_walk *walk, void *context) {
    const tinkex_pairs *p = context;
    tinkex_share(walk, num_places(p, row_blocks(p), p->max_rank, PANEL), narrow_task, p);
    tinkex_share(walk, num_places(p, row_blocks(p), most_outputs(p), SPAN), widen_task, p);
}

static void pairs_backward_job(tinkex_walk *walk, void *context) {
    const tinkex_pairs *p = context;
    tinkex_share(walk, num_places(p, row_blocks(p), p->max_rank, PANEL), narrow_grad_task, p);
    tinkex_share(walk, num_places(p, 1, most_outputs(p), CHUNK), grad_b_task, p);
    tinkex_share(walk, num_places(p, 1, p->inputs, SPAN), grad_a_task, p);
    if (p->grad_x != NULL)
        tinkex_share(walk, (long)(p->num_tenants * row_blocks(p) * num_parts(p->inputs, SPAN)), grad_x_task, p);
}

static int run_pairs(const tinkex_pairs *pairs, int backward, tinkex_team team, int num_threads) {
    tinkex_pairs own = *pairs;
    const tinkex_job job = backward ? pairs_backward_job : pairs_forward_job;
    return tinkex_run_in_team(team, job, &own, 4, num_threads);
}

#endif
