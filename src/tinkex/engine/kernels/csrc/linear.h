/* Linear layers with each row's own low-rank part: out = x · Wᵀ + bias + scale · (x · Aᵀ) · Bᵀ. */
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
    float *out; /* column 0 of the first row; NULL for those that are gated */
    int projection; /* its place in the tables of pairs, counted from the layer's first */
} linear_part;

enum linear_end { END_STORE, END_ADD, END_GATE };

typedef struct linear {
    int64_t num_rows, inputs;
    const float *x;
    int64_t x_stride, out_stride;
    enum linear_end end; /* END_GATE: silu(part 0) · part 1, both of one size, into the out of part 0 */
    int num_parts;
    linear_part parts[MAX_PARTS];
    /* The low-rank part. */
    const tinkex_segment *segments;
    int64_t num_segments, max_rank;
    int64_t first_pair; /* of the layer, in every segment's table */
    float *squeezed;    /* (rows, parts · max_rank): scale · x · Aᵀ */
    const struct linear *next; /* the one that is run after this; NULL if there is none */
} linear;

static inline const tinkex_pair *pair_of(const linear *l, const tinkex_segment *segment, int part) {
    if (segment->pairs == NULL) return NULL;
    const tinkex_pair *pair = &segment->pairs[l->first_pair + l->parts[part].projection];
    return pair->a == NULL ? NULL : pair;
}

static inline float *squeezed_of(const linear *l, int64_t row, int part) {
    return l->squeezed + row * MAX_PARTS * l->max_rank + part * l->max_rank;
}

static inline void clear(float *sums, int64_t count) { memset(sums, 0, (size_t)count * sizeof(float)); }

/* sums (rows, PANEL) += x (rows, inputs) · weightᵀ for up to PANEL rows of half a pair, of which `first` is the first. */
static inline void add_half(const tinkex_pair *pair, int64_t rows, const float *x, int64_t x_stride, const float *half,
                            int64_t first, int64_t outputs, int64_t inputs, float *sums) {
    if (pair->turned)
        rows_times_panel(rows, x, x_stride, half + first * inputs, PANEL, inputs, sums, PANEL, NULL, NULL, 0);
    else
        add_product(rows, x, x_stride, half + first * inputs, inputs, outputs, inputs, sums, 0, NULL);
}

/* scale · x · Aᵀ of one segment, part, panel of ranks and block of rows. */
static void squeeze_task(const void *context, long task, int worker) {
    const linear *l = context;
    (void)worker;
    const int64_t rank_panels = num_parts(l->max_rank, PANEL);
    const int64_t first_rank = task % rank_panels * PANEL;
    task /= rank_panels;
    const int part = (int)(task % l->num_parts);
    task /= l->num_parts;
    const tinkex_segment *segment = &l->segments[task % l->num_segments];
    const int64_t block = task / l->num_segments * ROW_BLOCK;
    const tinkex_pair *pair = pair_of(l, segment, part);
    if (pair == NULL || first_rank >= segment->rank || block >= segment->num_rows) return;

    const int64_t rows = smaller(ROW_BLOCK, segment->num_rows - block), first = segment->first_row + block;
    const int64_t ranks = smaller(PANEL, segment->rank - first_rank);
    _Alignas(64) float sums[ROW_BLOCK * PANEL];
    clear(sums, rows * PANEL);
    add_half(pair, rows, l->x + first * l->x_stride, l->x_stride, pair->a, first_rank, ranks, l->inputs, sums);
    const float scale = (float)segment->scale;
    for (int64_t row = 0; row < rows; row++)
        for (int64_t r = 0; r < ranks; r++)
            squeezed_of(l, first + row, part)[first_rank + r] = scale * sums[row * PANEL + r];
}

/* The halves B of one panel are needed right after its product with the weights. */
static void note_pairs(const linear *l, int part, int64_t output, int64_t block, int64_t rows, errands *list) {
    for (int64_t s = 0; s < l->num_segments; s++) {
        const tinkex_segment *segment = &l->segments[s];
        if (segment->first_row >= block + rows || segment->first_row + segment->num_rows <= block) continue;
        const tinkex_pair *pair = pair_of(l, segment, part);
        if (pair != NULL)
            note_errand(list, pair->b + output * segment->rank,
                        smaller(PANEL, l->parts[part].outputs - output) * segment->rank);
    }
}

/* One of `num_tasks` shares of the halves A that the next linear layer begins with. */
static void note_next(const linear *next, int64_t task, int64_t num_tasks, errands *list) {
    int64_t total = 0, done = 0;
    for (int64_t s = 0; s < next->num_segments; s++)
        for (int part = 0; part < next->num_parts; part++)
            if (pair_of(next, &next->segments[s], part) != NULL) total += next->segments[s].rank * next->inputs;
    const int64_t start = task * total / num_tasks, end = (task + 1) * total / num_tasks;
    for (int64_t s = 0; s < next->num_segments && done < end; s++)
        for (int part = 0; part < next->num_parts && done < end; part++) {
            const tinkex_pair *pair = pair_of(next, &next->segments[s], part);
            if (pair == NULL) continue;
            const int64_t size = next->segments[s].rank * next->inputs;
            const int64_t from = larger(start - done, 0), to = smaller(end - done, size);
            note_errand(list, pair->a + from, to - from);
            done += size;
        }
}

/* The sums of one panel of one part for a block of rows. */
static void panel_sums(const linear *l, int part, int64_t output, int64_t block, int64_t rows, float *sums, int more,
                       errands *list) {
    const linear_part *p = &l->parts[part];
    const int64_t outputs = smaller(PANEL, p->outputs - output);
    clear(sums, rows * PANEL);
    add_panel_product(rows, l->x + block * l->x_stride, l->x_stride, p->weight, output, outputs, l->inputs, sums, more,
                      list);
    for (int64_t s = 0; s < l->num_segments; s++) {
        const tinkex_segment *segment = &l->segments[s];
        const int64_t first = larger(segment->first_row, block);
        const int64_t end = smaller(segment->first_row + segment->num_rows, block + rows);
        const tinkex_pair *pair = first < end ? pair_of(l, segment, part) : NULL;
        if (pair != NULL)
            add_half(pair, end - first, squeezed_of(l, first, part), MAX_PARTS * l->max_rank, pair->b, output, outputs,
                     segment->rank, sums + (first - block) * PANEL);
    }
    if (p->bias != NULL)
        for (int64_t row = 0; row < rows; row++)
            for (int64_t i = 0; i < outputs; i++) sums[row * PANEL + i] += p->bias[output + i];
}

static inline vec silu(vec x) { return x / (vec_all(1.0f) + vec_exp(-x)); }

static void write_panel(const linear *l, int part, int64_t output, int64_t block, int64_t rows, const float *sums) {
    const linear_part *p = &l->parts[part];
    const int64_t outputs = smaller(PANEL, p->outputs - output);
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
    for (int part = 0; part < counted_parts; part++) panels += num_parts(l->parts[part].outputs, PANEL);
    return panels;
}

/* One panel, counted over all parts; of both parts at once where they are gated. */
static void linear_task(const void *context, long task, int worker) {
    const linear *l = context;
    (void)worker;
    _Alignas(64) float sums[ROW_BLOCK * PANEL], other[ROW_BLOCK * PANEL];
    /* All panels of a block of rows before the next block: its inputs stay in the second-level cache. */
    const int64_t panels = num_panels(l);
    const int64_t block = task / panels * ROW_BLOCK, rows = smaller(ROW_BLOCK, l->num_rows - block);
    int64_t panel = task % panels;
    int part = 0;
    while (l->end != END_GATE && panel >= num_parts(l->parts[part].outputs, PANEL))
        panel -= num_parts(l->parts[part++].outputs, PANEL);
    const int64_t output = panel * PANEL;
    /* The same thread usually takes the next panel too. */
    const int more = output + 2 * PANEL <= l->parts[part].outputs;
    const int products = l->end == END_GATE ? 2 : 1;
    errands list;
    list.num_pieces = list.piece = list.left = 0;
    list.chunks = products * num_parts(l->inputs, CHUNK);
    for (int p = part; p < part + products; p++) note_pairs(l, p, output, block, rows, &list);
    if (l->next != NULL) note_next(l->next, task, panels * num_parts(l->num_rows, ROW_BLOCK), &list);
    panel_sums(l, part, output, block, rows, sums, more, &list);
    if (l->end == END_GATE) {
        panel_sums(l, 1, output, block, rows, other, more, &list);
        for (int64_t i = 0; i < rows * PANEL; i += LANES)
            vec_store(sums + i, silu(vec_load(sums + i)) * vec_load(other + i));
    }
    write_panel(l, part, output, block, rows, sums);
}

/* Two phases: the low-rank squeeze, if any row has an adapter, and the rest. */
static void run_linear(tinkex_walk *walk, const linear *l) {
    const int64_t blocks = num_parts(l->num_rows, ROW_BLOCK);
    if (l->num_segments > 0)
        tinkex_share(walk, l->num_segments * l->num_parts * num_parts(l->max_rank, PANEL) * blocks, squeeze_task, l);
    tinkex_share(walk, num_panels(l) * blocks, linear_task, l);
}

#endif
