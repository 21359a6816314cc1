/* LoRA in training: its forward pass, and the gradients of A, B and the inputs.
 *
 * The rows of a pass belong to tenants, each with its own A and B on projections that share an input. With
 * u = scale · x · Aᵀ kept from the forward pass, g the gradient of the outputs and v = scale · g · B:
 *
 *     out += u · Bᵀ        grad_B += gᵀ · u        grad_A += vᵀ · x        grad_x += v · A
 *
 * Every number is computed by one task, in an order that depends only on the rows of its tenant: results do not depend
 * on the other tenants or on the number of threads.
 */
#ifndef TINKEX_LORA_TRAIN_H
#define TINKEX_LORA_TRAIN_H

#include "core.h"
#include "panel.h"
#include "pool.h"

/* Panels that stay in the L1 cache together, and the rows that are multiplied with them at a time. */
enum { GROUP = 4, SPAN = GROUP * PANEL, STRIP = 4 * TILE_ROWS };

/* What one task computes: a tenant, a part and, by the kind of task, a block of rows and a block of columns. */
typedef struct {
    const tinkex_tenant *tenant;
    int part;
    int64_t block, column;
} lora_tile;

static inline int64_t shrunk_stride(const tinkex_lora_pass *p) { return p->num_parts * p->max_rank; }

static inline float *shrunk_row(const tinkex_lora_pass *p, float *shrunk, int64_t row, int part) {
    return shrunk + row * shrunk_stride(p) + part * p->max_rank;
}

static int64_t max_tenant_rows(const tinkex_lora_pass *p) {
    int64_t max = 0;
    for (int64_t t = 0; t < p->num_tenants; t++) max = max_i64(max, p->tenants[t].num_rows);
    return max;
}

static int64_t max_outputs(const tinkex_lora_pass *p) {
    int64_t max = 0;
    for (int64_t part = 0; part < p->num_parts; part++) max = max_i64(max, p->outputs[part]);
    return max;
}

/* Tasks that split `columns` into blocks of `width`. Every tenant has the same number, some with nothing to do. */
static inline long num_lora_tiles(const tinkex_lora_pass *p, int64_t blocks, int64_t columns, int64_t width) {
    return (long)(p->num_tenants * p->num_parts * blocks * ceil_div(columns, width));
}

static inline lora_tile lora_tile_of(const tinkex_lora_pass *p, long task, int64_t blocks, int64_t columns,
                                     int64_t width) {
    const int64_t across = ceil_div(columns, width);
    lora_tile tile;
    tile.column = task % across * width;
    task /= across;
    tile.part = (int)(task % p->num_parts);
    task /= p->num_parts;
    tile.block = task % blocks * ROW_BLOCK;
    tile.tenant = &p->tenants[task / blocks];
    return tile;
}

/* panel[k][i] = from[k][i] for i < columns, and 0 for the others. */
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
static void transpose_block(const float *from, int64_t stride, int64_t depth, int64_t columns, float *to) {
    const int64_t whole_depth = depth / TRANSPOSE * TRANSPOSE, whole_columns = columns / TRANSPOSE * TRANSPOSE;
    for (int64_t k = 0; k < whole_depth; k += TRANSPOSE)
        for (int64_t i = 0; i < whole_columns; i += TRANSPOSE)
            transpose_square(from + k * stride + i, stride, to + i * CHUNK + k, CHUNK);
    for (int64_t i = 0; i < columns; i++)
        for (int64_t k = i < whole_columns ? whole_depth : 0; k < depth; k++) to[i * CHUNK + k] = from[k * stride + i];
}

/* to[·][0…columns) += x · panel for up to ROW_BLOCK rows. */
static void add_rows(int64_t rows, const float *x, int64_t x_stride, const float *panel, int64_t depth, int64_t columns,
                     float *to, int64_t to_stride) {
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
            add_rows(min_i64(STRIP, rows - row), x + row * x_stride, x_stride, panels + c * CHUNK, depth,
                     min_i64(PANEL, columns - c), to + row * to_stride + c, to_stride);
}

static void write_shrunk(const tinkex_lora_pass *p, const lora_tile *tile, int64_t rows, int64_t ranks,
                         const float *sums, float *shrunk) {
    const float scale = (float)tile->tenant->scale;
    for (int64_t row = 0; row < rows; row++) {
        float *to = shrunk_row(p, shrunk, tile->tenant->first_row + tile->block + row, tile->part) + tile->column;
        for (int64_t r = 0; r < ranks; r++) to[r] = scale * sums[row * PANEL + r];
    }
}

static int64_t row_blocks(const tinkex_lora_pass *p) { return ceil_div(max_tenant_rows(p), ROW_BLOCK); }

/* u = scale · x · Aᵀ of a panel of ranks and a block of rows. */
static void shrink_forward_task(const void *context, long task, int worker) {
    const tinkex_lora_pass *p = context;
    (void)worker;
    const lora_tile tile = lora_tile_of(p, task, row_blocks(p), p->max_rank, PANEL);
    const tinkex_tenant *tenant = tile.tenant;
    const float *a = tenant->a[tile.part];
    if (a == NULL || tile.column >= tenant->rank || tile.block >= tenant->num_rows) return;
    const int64_t rows = min_i64(ROW_BLOCK, tenant->num_rows - tile.block);
    const int64_t ranks = min_i64(PANEL, tenant->rank - tile.column);
    _Alignas(64) float sums[ROW_BLOCK * PANEL];
    memset(sums, 0, (size_t)(rows * PANEL) * sizeof(float));
    add_product(rows, p->x + (tenant->first_row + tile.block) * p->x_stride, p->x_stride, a + tile.column * p->inputs,
                p->inputs, ranks, p->inputs, sums, 0, NULL);
    write_shrunk(p, &tile, rows, ranks, sums, p->shrunk);
}

/* out += u · Bᵀ of a span of outputs and a block of rows. */
static void expand_task(const void *context, long task, int worker) {
    const tinkex_lora_pass *p = context;
    (void)worker;
    const lora_tile tile = lora_tile_of(p, task, row_blocks(p), max_outputs(p), SPAN);
    const tinkex_tenant *tenant = tile.tenant;
    const float *b = tenant->b[tile.part];
    const int64_t outputs = p->outputs[tile.part];
    if (b == NULL || tile.column >= outputs || tile.block >= tenant->num_rows) return;
    const int64_t rows = min_i64(ROW_BLOCK, tenant->num_rows - tile.block), first = tenant->first_row + tile.block;
    const int64_t columns = min_i64(SPAN, outputs - tile.column);
    _Alignas(64) float panels[GROUP * CHUNK * PANEL];
    for (int64_t rank = 0; rank < tenant->rank; rank += CHUNK) {
        const int64_t depth = min_i64(CHUNK, tenant->rank - rank);
        for (int64_t c = 0; c < columns; c += PANEL)
            transpose_panel(b + (tile.column + c) * tenant->rank + rank, tenant->rank, min_i64(PANEL, columns - c),
                            depth, panels + c * CHUNK);
        add_span(rows, shrunk_row(p, p->shrunk, first, tile.part) + rank, shrunk_stride(p), panels, depth, columns,
                 p->out + first * p->out_stride + p->first_column[tile.part] + tile.column, p->out_stride);
    }
}

/* v = scale · g · B of a panel of ranks and a block of rows. */
static void shrink_backward_task(const void *context, long task, int worker) {
    const tinkex_lora_pass *p = context;
    (void)worker;
    const lora_tile tile = lora_tile_of(p, task, row_blocks(p), p->max_rank, PANEL);
    const tinkex_tenant *tenant = tile.tenant;
    const float *b = tenant->b[tile.part];
    if (b == NULL || tile.column >= tenant->rank || tile.block >= tenant->num_rows) return;
    const int64_t rows = min_i64(ROW_BLOCK, tenant->num_rows - tile.block);
    const int64_t ranks = min_i64(PANEL, tenant->rank - tile.column), outputs = p->outputs[tile.part];
    const float *grad =
        p->grad_out + (tenant->first_row + tile.block) * p->grad_out_stride + p->first_column[tile.part];
    _Alignas(64) float sums[ROW_BLOCK * PANEL], panel[CHUNK * PANEL];
    memset(sums, 0, (size_t)(rows * PANEL) * sizeof(float));
    for (int64_t o = 0; o < outputs; o += CHUNK) {
        const int64_t depth = min_i64(CHUNK, outputs - o);
        copy_panel(b + o * tenant->rank + tile.column, tenant->rank, depth, ranks, panel);
        rows_times_panel(rows, grad + o, p->grad_out_stride, panel, PANEL, depth, sums, PANEL, NULL, NULL, 0);
    }
    write_shrunk(p, &tile, rows, ranks, sums, p->shrunk_grad);
}

/* grad_B += gᵀ · u of a chunk of outputs. */
static void grad_b_task(const void *context, long task, int worker) {
    const tinkex_lora_pass *p = context;
    (void)worker;
    const lora_tile tile = lora_tile_of(p, task, 1, max_outputs(p), CHUNK);
    const tinkex_tenant *tenant = tile.tenant;
    float *grad_b = tenant->grad_b[tile.part];
    const int64_t outputs = p->outputs[tile.part];
    if (grad_b == NULL || tile.column >= outputs) return;
    const int64_t columns = min_i64(CHUNK, outputs - tile.column);
    _Alignas(64) float transposed[CHUNK * CHUNK], panel[CHUNK * PANEL];
    for (int64_t n = 0; n < tenant->num_rows; n += CHUNK) {
        const int64_t depth = min_i64(CHUNK, tenant->num_rows - n), row = tenant->first_row + n;
        transpose_block(p->grad_out + row * p->grad_out_stride + p->first_column[tile.part] + tile.column,
                        p->grad_out_stride, depth, columns, transposed);
        for (int64_t rank = 0; rank < tenant->rank; rank += PANEL) {
            const int64_t ranks = min_i64(PANEL, tenant->rank - rank);
            copy_panel(shrunk_row(p, p->shrunk, row, tile.part) + rank, shrunk_stride(p), depth, ranks, panel);
            add_rows(columns, transposed, CHUNK, panel, depth, ranks, grad_b + tile.column * tenant->rank + rank,
                     tenant->rank);
        }
    }
}

/* grad_A += vᵀ · x of a span of inputs. */
static void grad_a_task(const void *context, long task, int worker) {
    const tinkex_lora_pass *p = context;
    (void)worker;
    const lora_tile tile = lora_tile_of(p, task, 1, p->inputs, SPAN);
    const tinkex_tenant *tenant = tile.tenant;
    float *grad_a = tenant->grad_a[tile.part];
    if (grad_a == NULL) return;
    const int64_t columns = min_i64(SPAN, p->inputs - tile.column);
    _Alignas(64) float transposed[CHUNK * CHUNK], panels[GROUP * CHUNK * PANEL];
    for (int64_t n = 0; n < tenant->num_rows; n += CHUNK) {
        const int64_t depth = min_i64(CHUNK, tenant->num_rows - n), row = tenant->first_row + n;
        for (int64_t c = 0; c < columns; c += PANEL)
            copy_panel(p->x + row * p->x_stride + tile.column + c, p->x_stride, depth, min_i64(PANEL, columns - c),
                       panels + c * CHUNK);
        for (int64_t rank = 0; rank < tenant->rank; rank += CHUNK) {
            const int64_t ranks = min_i64(CHUNK, tenant->rank - rank);
            transpose_block(shrunk_row(p, p->shrunk_grad, row, tile.part) + rank, shrunk_stride(p), depth, ranks,
                            transposed);
            add_span(ranks, transposed, CHUNK, panels, depth, columns, grad_a + rank * p->inputs + tile.column,
                     p->inputs);
        }
    }
}

/* grad_x += v · A of a span of inputs and a block of rows, all parts in their order. */
static void grad_x_task(const void *context, long task, int worker) {
    const tinkex_lora_pass *p = context;
    (void)worker;
    const int64_t across = ceil_div(p->inputs, SPAN), blocks = row_blocks(p);
    const int64_t column = task % across * SPAN, block = task / across % blocks * ROW_BLOCK;
    const tinkex_tenant *tenant = &p->tenants[task / across / blocks];
    if (block >= tenant->num_rows) return;
    const int64_t rows = min_i64(ROW_BLOCK, tenant->num_rows - block), first = tenant->first_row + block;
    const int64_t columns = min_i64(SPAN, p->inputs - column);
    _Alignas(64) float panels[GROUP * CHUNK * PANEL];
    for (int part = 0; part < p->num_parts; part++) {
        const float *a = tenant->a[part];
        for (int64_t rank = 0; a != NULL && rank < tenant->rank; rank += CHUNK) {
            const int64_t depth = min_i64(CHUNK, tenant->rank - rank);
            for (int64_t c = 0; c < columns; c += PANEL)
                copy_panel(a + rank * p->inputs + column + c, p->inputs, depth, min_i64(PANEL, columns - c),
                           panels + c * CHUNK);
            add_span(rows, shrunk_row(p, p->shrunk_grad, first, part) + rank, shrunk_stride(p), panels, depth, columns,
                     p->grad_x + first * p->grad_x_stride + column, p->grad_x_stride);
        }
    }
}

static void lora_forward_job(tinkex_thread *thread, void *context) {
    const tinkex_lora_pass *p = context;
    tinkex_parallel_for(thread, num_lora_tiles(p, row_blocks(p), p->max_rank, PANEL), shrink_forward_task, p);
    tinkex_parallel_for(thread, num_lora_tiles(p, row_blocks(p), max_outputs(p), SPAN), expand_task, p);
}

static void lora_backward_job(tinkex_thread *thread, void *context) {
    const tinkex_lora_pass *p = context;
    tinkex_parallel_for(thread, num_lora_tiles(p, row_blocks(p), p->max_rank, PANEL), shrink_backward_task, p);
    tinkex_parallel_for(thread, num_lora_tiles(p, 1, max_outputs(p), CHUNK), grad_b_task, p);
    tinkex_parallel_for(thread, num_lora_tiles(p, 1, p->inputs, SPAN), grad_a_task, p);
    if (p->grad_x != NULL)
        tinkex_parallel_for(thread, (long)(p->num_tenants * row_blocks(p) * ceil_div(p->inputs, SPAN)), grad_x_task, p);
}

static int run_lora(const tinkex_lora_pass *pass, int backward, tinkex_team team, int num_threads) {
    tinkex_lora_pass own = *pass;
    const tinkex_job job = backward ? lora_backward_job : lora_forward_job;
    return tinkex_run_in_team(team, job, &own, 4, num_threads);
}

#endif
