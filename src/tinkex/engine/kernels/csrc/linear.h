/* Linear layers with LoRA per row: out = x · Wᵀ + bias + scale · (x · Aᵀ) · Bᵀ. */
#ifndef TINKEX_LINEAR_H
#define TINKEX_LINEAR_H

#include "core.h"
#include "packed.h"
#include "pool.h"

/* One of the projections that read the same input. */
typedef struct {
    const tinkex_matrix *weight; /* (outputs, inputs) */
    const float *bias;
    int64_t outputs;
    float *out;     /* column 0 of the first row; NULL for those that are gated */
    int projection; /* its index in an adapter's table, from the layer's first */
} linear_part;

enum linear_end { END_STORE, END_ADD, END_GATE };

typedef struct linear {
    int64_t num_rows, inputs;
    const float *x;
    int64_t x_stride, out_stride;
    enum linear_end end; /* END_GATE: silu(part 0) · part 1, both of one size, into the out of part 0 */
    int num_parts;
    linear_part parts[MAX_PARTS];
    /* LoRA. */
    const tinkex_segment *segments;
    int64_t num_segments, max_rank;
    int64_t first_lora;        /* index of the layer's first in an adapter's table */
    float *shrunk;             /* (rows, parts · max_rank): scale · x · Aᵀ */
    const struct linear *next; /* the linear layer that runs next; NULL if there is none */
} linear;

static inline const tinkex_lora *lora_of(const linear *l, const tinkex_segment *segment, int part) {
    if (segment->loras == NULL) return NULL;
    const tinkex_lora *lora = &segment->loras[l->first_lora + l->parts[part].projection];
    return lora->a == NULL ? NULL : lora;
}

static inline float *shrunk_of(const linear *l, int64_t row, int part) {
    return l->shrunk + row * MAX_PARTS * l->max_rank + part * l->max_rank;
}

static inline void clear(float *sums, int64_t count) { memset(sums, 0, (size_t)count * sizeof(float)); }

/* sums (rows, PANEL) += x (rows, inputs) · weightᵀ for the rows `first…first + outputs` ≤ PANEL of an A or B. */
static inline void add_lora_product(const tinkex_lora *lora, int64_t rows, const float *x, int64_t x_stride,
                                    const float *matrix, int64_t first, int64_t outputs, int64_t inputs, float *sums) {
    if (lora->transposed)
        rows_times_panel(rows, x, x_stride, matrix + first * inputs, PANEL, inputs, sums, PANEL, NULL, NULL, 0);
    else
        add_product(rows, x, x_stride, matrix + first * inputs, inputs, outputs, inputs, sums, 0, NULL);
}

/* LoRA shrink: scale · x · Aᵀ of one segment, part, panel of ranks and block of rows. */
static void shrink_task(const void *context, long task, int worker) {
    const linear *l = context;
    (void)worker;
    const int64_t rank_panels = ceil_div(l->max_rank, PANEL);
    const int64_t first_rank = task % rank_panels * PANEL;
    task /= rank_panels;
    const int part = (int)(task % l->num_parts);
    task /= l->num_parts;
    const tinkex_segment *segment = &l->segments[task % l->num_segments];
    const int64_t block = task / l->num_segments * ROW_BLOCK;
    const tinkex_lora *lora = lora_of(l, segment, part);
    if (lora == NULL || first_rank >= segment->rank || block >= segment->num_rows) return;

    const int64_t rows = min_i64(ROW_BLOCK, segment->num_rows - block), first = segment->first_row + block;
    const int64_t ranks = min_i64(PANEL, segment->rank - first_rank);
    _Alignas(64) float sums[ROW_BLOCK * PANEL];
    clear(sums, rows * PANEL);
    add_lora_product(lora, rows, l->x + first * l->x_stride, l->x_stride, lora->a, first_rank, ranks, l->inputs, sums);
    const float scale = (float)segment->scale;
    for (int64_t row = 0; row < rows; row++)
        for (int64_t r = 0; r < ranks; r++)
            shrunk_of(l, first + row, part)[first_rank + r] = scale * sums[row * PANEL + r];
}

/* Queues the rows of B that are needed right after the product of a panel with the weights. */
static void prefetch_lora_b(const linear *l, int part, int64_t output, int64_t block, int64_t rows,
                            prefetch_queue *queue) {
    for (int64_t s = 0; s < l->num_segments; s++) {
        const tinkex_segment *segment = &l->segments[s];
        if (segment->first_row >= block + rows || segment->first_row + segment->num_rows <= block) continue;
        const tinkex_lora *lora = lora_of(l, segment, part);
        if (lora != NULL)
            prefetch_queue_add(queue, lora->b + output * segment->rank,
                               min_i64(PANEL, l->parts[part].outputs - output) * segment->rank);
    }
}

/* Queues one of `num_tasks` equal shares of the A matrices that the next linear layer starts with. */
static void prefetch_next_lora_a(const linear *next, int64_t task, int64_t num_tasks, prefetch_queue *queue) {
    int64_t total = 0, done = 0;
    for (int64_t s = 0; s < next->num_segments; s++)
        for (int part = 0; part < next->num_parts; part++)
            if (lora_of(next, &next->segments[s], part) != NULL) total += next->segments[s].rank * next->inputs;
    const int64_t start = task * total / num_tasks, end = (task + 1) * total / num_tasks;
    for (int64_t s = 0; s < next->num_segments && done < end; s++)
        for (int part = 0; part < next->num_parts && done < end; part++) {
            const tinkex_lora *lora = lora_of(next, &next->segments[s], part);
            if (lora == NULL) continue;
            const int64_t size = next->segments[s].rank * next->inputs;
            const int64_t from = max_i64(start - done, 0), to = min_i64(end - done, size);
            prefetch_queue_add(queue, lora->a + from, to - from);
            done += size;
        }
}

/* The sums of one panel of one part for a block of rows. */
static void panel_sums(const linear *l, int part, int64_t output, int64_t block, int64_t rows, float *sums, int more,
                       prefetch_queue *queue) {
    const linear_part *p = &l->parts[part];
    const int64_t outputs = min_i64(PANEL, p->outputs - output);
    clear(sums, rows * PANEL);
    add_panel_product(rows, l->x + block * l->x_stride, l->x_stride, p->weight, output, outputs, l->inputs, sums, more,
                      queue);
    for (int64_t s = 0; s < l->num_segments; s++) {
        const tinkex_segment *segment = &l->segments[s];
        const int64_t first = max_i64(segment->first_row, block);
        const int64_t end = min_i64(segment->first_row + segment->num_rows, block + rows);
        const tinkex_lora *lora = first < end ? lora_of(l, segment, part) : NULL;
        if (lora != NULL)
            add_lora_product(lora, end - first, shrunk_of(l, first, part), MAX_PARTS * l->max_rank, lora->b, output,
                             outputs, segment->rank, sums + (first - block) * PANEL);
    }
    if (p->bias != NULL)
        for (int64_t row = 0; row < rows; row++)
            for (int64_t i = 0; i < outputs; i++) sums[row * PANEL + i] += p->bias[output + i];
}

static inline vec silu(vec x) { return x / (vec_splat(1.0f) + vec_exp(-x)); }

static void write_panel(const linear *l, int part, int64_t output, int64_t block, int64_t rows, const float *sums) {
    const linear_part *p = &l->parts[part];
    const int64_t outputs = min_i64(PANEL, p->outputs - output);
    for (int64_t row = 0; row < rows; row++) {
        float *out = p->out + (block + row) * l->out_stride + output;
        const float *from = sums + row * PANEL;
        if (l->end == END_ADD)
            for (int64_t i = 0; i < outputs; i++) out[i] += from[i];
        else
            memcpy(out, from, (size_t)outputs * sizeof(float));
    }
}

static inline int64_t num_panels(const linear *l) {
    const int counted_parts = l->end == END_GATE ? 1 : l->num_parts;
    int64_t panels = 0;
    for (int part = 0; part < counted_parts; part++) panels += ceil_div(l->parts[part].outputs, PANEL);
    return panels;
}

/* One panel, counted over all parts; of both parts together where they are gated. */
static void linear_task(const void *context, long task, int worker) {
    const linear *l = context;
    (void)worker;
    _Alignas(64) float sums[ROW_BLOCK * PANEL], other[ROW_BLOCK * PANEL];
    /* All panels of a block of rows before the next block: its inputs stay in the second-level cache. */
    const int64_t panels = num_panels(l);
    const int64_t block = task / panels * ROW_BLOCK, rows = min_i64(ROW_BLOCK, l->num_rows - block);
    int64_t panel = task % panels;
    int part = 0;
    while (l->end != END_GATE && panel >= ceil_div(l->parts[part].outputs, PANEL))
        panel -= ceil_div(l->parts[part++].outputs, PANEL);
    const int64_t output = panel * PANEL;
    /* The same thread usually takes the next panel too. */
    const int more = output + 2 * PANEL <= l->parts[part].outputs;
    const int products = l->end == END_GATE ? 2 : 1;
    prefetch_queue queue;
    queue.num_ranges = queue.range = queue.left = 0;
    queue.chunks = products * ceil_div(l->inputs, CHUNK);
    for (int p = part; p < part + products; p++) prefetch_lora_b(l, p, output, block, rows, &queue);
    if (l->next != NULL) prefetch_next_lora_a(l->next, task, panels * ceil_div(l->num_rows, ROW_BLOCK), &queue);
    panel_sums(l, part, output, block, rows, sums, more, &queue);
    if (l->end == END_GATE) {
        panel_sums(l, 1, output, block, rows, other, more, &queue);
        for (int64_t i = 0; i < rows * PANEL; i += LANES)
            vec_store(sums + i, silu(vec_load(sums + i)) * vec_load(other + i));
    }
    write_panel(l, part, output, block, rows, sums);
}

/* Two phases: LoRA shrink, if any row has an adapter, and the rest. */
static void run_linear(tinkex_thread *thread, const linear *l) {
    const int64_t blocks = ceil_div(l->num_rows, ROW_BLOCK);
    if (l->num_segments > 0)
        tinkex_parallel_for(thread, l->num_segments * l->num_parts * ceil_div(l->max_rank, PANEL) * blocks, shrink_task,
                            l);
    tinkex_parallel_for(thread, num_panels(l) * blocks, linear_task, l);
}

#endif
