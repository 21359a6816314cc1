/* A pass of packed rows through all layers, and from hidden states to logits. */
#ifndef TINKEX_FORWARD_H
#define TINKEX_FORWARD_H

#include <stdlib.h>

#include "attention.h"
#include "core.h"
#include "linear.h"
#include "pool.h"
#include "rows.h"

typedef struct {
    const tinkex_model *model;
    const tinkex_pass *pass;
    attention attention; /* all of it but the layer */
    int64_t num_blocks, max_rank, num_segments;
    /* (rows, ·) each */
    float *x, *normed, *qkv, *mixed, *inner, *squeezed;
} forward;

/* What a row's task needs to know about where it is. */
typedef struct {
    const forward *f;
    int64_t layer;
    const float *norm;
    float *out;
} row_stage;

enum { ROWS_PER_TASK = 4 };

static void embed_task(const void *context, long task, int worker) {
    const forward *f = context;
    (void)worker;
    const int64_t hidden = f->model->hidden;
    for (int64_t row = task * ROWS_PER_TASK; row < smaller((task + 1) * ROWS_PER_TASK, f->pass->num_rows); row++)
        memcpy(f->x + row * hidden, f->model->embedding + f->pass->tokens[row] * hidden,
               (size_t)hidden * sizeof(float));
}

static void norm_task(const void *context, long task, int worker) {
    const row_stage *stage = context;
    const forward *f = stage->f;
    (void)worker;
    const int64_t hidden = f->model->hidden;
    for (int64_t row = task * ROWS_PER_TASK; row < smaller((task + 1) * ROWS_PER_TASK, f->pass->num_rows); row++)
        rms_norm(f->x + row * hidden, stage->norm, hidden, f->model->norm_eps, stage->out + row * hidden);
}

/* Norms and rotates the heads of the rows of one block, and puts their keys and values into the cache. */
static void heads_task(const void *context, long task, int worker) {
    const row_stage *stage = context;
    const forward *f = stage->f;
    (void)worker;
    const tinkex_model *model = f->model;
    const tinkex_layer *layer = &model->layers[stage->layer];
    const attention_block *block = &f->attention.blocks[task];
    const tinkex_stretch *last = &block->sequence->stretches[block->sequence->num_stretches - 1];
    const int64_t d = model->head_dim;
    for (int64_t i = 0; i < block->num_rows; i++) {
        const int64_t row = block->first_row + i;
        float *heads = f->qkv + row * f->attention.qkv_stride;
        const float *cosines = f->pass->cosines + row * d / 2, *sines = f->pass->sines + row * d / 2;
        for (int64_t h = 0; h < model->heads + model->kv_heads; h++) {
            const float *norm = h < model->heads ? layer->q_norm : layer->k_norm;
            if (norm != NULL) rms_norm(heads + h * d, norm, d, model->norm_eps, heads + h * d);
            rotate_head(heads + h * d, cosines, sines, d / 2);
        }
        const float *key = heads + model->heads * d, *value = key + model->kv_heads * d;
        for (int64_t h = 0; h < model->kv_heads; h++) {
            float *to = last->keys + stage->layer * last->layer_stride + h * last->head_stride +
                        (block->position + i - last->start) * d;
            memcpy(to, key + h * d, (size_t)d * sizeof(float));
            memcpy(to + last->value_offset, value + h * d, (size_t)d * sizeof(float));
        }
    }
}

static linear linear_of(const forward *f, int64_t layer, const float *x, int64_t inputs, enum linear_end end) {
    return (linear){
        .num_rows = f->pass->num_rows,
        .inputs = inputs,
        .x = x,
        .x_stride = inputs,
        .end = end,
        .segments = f->pass->segments,
        .num_segments = f->num_segments,
        .max_rank = f->max_rank,
        .first_pair = layer * PROJ_PER_LAYER,
        .squeezed = f->squeezed,
    };
}

static linear_part part_of(const tinkex_layer *layer, int projection, int64_t outputs, float *out) {
    return (linear_part){&layer->weights[projection], layer->biases[projection], outputs, out, projection};
}

enum { PHASES_PER_LAYER = 12, OTHER_PHASES = 2 };

static linear qkv_of(const forward *f, int64_t number) {
    const tinkex_model *model = f->model;
    const tinkex_layer *layer = &model->layers[number];
    const int64_t q_size = model->heads * model->head_dim, kv_size = model->kv_heads * model->head_dim;
    linear qkv = linear_of(f, number, f->normed, model->hidden, END_STORE);
    qkv.out_stride = f->attention.qkv_stride;
    qkv.num_parts = 3;
    qkv.parts[0] = part_of(layer, PROJ_Q, q_size, f->qkv);
    qkv.parts[1] = part_of(layer, PROJ_K, kv_size, f->qkv + q_size);
    qkv.parts[2] = part_of(layer, PROJ_V, kv_size, f->qkv + q_size + kv_size);
    return qkv;
}

/* One whose outputs are added to the hidden states. */
static linear adding(const forward *f, int64_t number, int projection, const float *x, int64_t inputs) {
    linear l = linear_of(f, number, x, inputs, END_ADD);
    l.out_stride = f->model->hidden;
    l.num_parts = 1;
    l.parts[0] = part_of(&f->model->layers[number], projection, f->model->hidden, f->x);
    return l;
}

static linear gate_up_of(const forward *f, int64_t number) {
    const tinkex_layer *layer = &f->model->layers[number];
    linear gate_up = linear_of(f, number, f->normed, f->model->hidden, END_GATE);
    gate_up.out_stride = f->model->inner;
    gate_up.num_parts = 2;
    gate_up.parts[0] = part_of(layer, PROJ_GATE, f->model->inner, f->inner);
    gate_up.parts[1] = part_of(layer, PROJ_UP, f->model->inner, NULL);
    return gate_up;
}

static void run_layer(tinkex_walk *walk, const forward *f, int64_t number) {
    const tinkex_model *model = f->model;
    const tinkex_layer *layer = &model->layers[number];
    const int64_t row_tasks = num_parts(f->pass->num_rows, ROWS_PER_TASK);
    const int is_last = number + 1 == model->num_layers;
    linear qkv = qkv_of(f, number), gate_up = gate_up_of(f, number);
    linear output = adding(f, number, PROJ_O, f->mixed, model->heads * model->head_dim);
    linear down = adding(f, number, PROJ_DOWN, f->inner, model->inner);
    const linear following = qkv_of(f, is_last ? number : number + 1);
    qkv.next = &output;
    output.next = &gate_up;
    gate_up.next = &down;
    down.next = is_last ? NULL : &following;

    const row_stage before_attention = {f, number, layer->input_norm, f->normed};
    tinkex_share(walk, row_tasks, norm_task, &before_attention);
    run_linear(walk, &qkv);
    tinkex_share(walk, f->num_blocks, heads_task, &before_attention);
    attention attend = f->attention;
    attend.layer = number;
    tinkex_share(walk, f->num_blocks * model->kv_heads, attention_task, &attend);
    run_linear(walk, &output);

    const row_stage before_mlp = {f, number, layer->mlp_norm, f->normed};
    tinkex_share(walk, row_tasks, norm_task, &before_mlp);
    run_linear(walk, &gate_up);
    run_linear(walk, &down);
}

static void forward_job(tinkex_walk *walk, void *context) {
    const forward *f = context;
    const int64_t row_tasks = num_parts(f->pass->num_rows, ROWS_PER_TASK);
    tinkex_share(walk, row_tasks, embed_task, f);
    for (int64_t layer = 0; layer < f->model->num_layers; layer++) run_layer(walk, f, layer);
    const row_stage last = {f, 0, f->model->final_norm, f->pass->hidden};
    tinkex_share(walk, row_tasks, norm_task, &last);
}

/* The largest rank of any adapter; 0 if there is none, and then no low-rank part is computed. */
static int64_t largest_rank(const tinkex_segment *segments, int64_t num_segments) {
    int64_t rank = 0;
    for (int64_t s = 0; s < num_segments; s++)
        if (segments[s].pairs != NULL) rank = larger(rank, segments[s].rank);
    return rank;
}

static int64_t count_blocks(const tinkex_pass *pass, int64_t rows_per_block) {
    int64_t blocks = 0;
    for (int64_t s = 0; s < pass->num_sequences; s++) blocks += num_parts(pass->sequences[s].num_rows, rows_per_block);
    return blocks;
}

/* Cuts the sequences into blocks; returns the longest span of positions any of them sees. */
static int64_t cut_blocks(const tinkex_pass *pass, int64_t rows_per_block, attention_block *blocks) {
    int64_t longest = 0;
    for (int64_t s = 0; s < pass->num_sequences; s++) {
        const tinkex_sequence *sequence = &pass->sequences[s];
        longest = larger(longest, sequence->position + sequence->num_rows);
        for (int64_t done = 0; done < sequence->num_rows; done += rows_per_block)
            *blocks++ = (attention_block){sequence, sequence->first_row + done,
                                          smaller(rows_per_block, sequence->num_rows - done), sequence->position + done};
    }
    return longest;
}

/* One allocation handed out piece by piece, each on a cache line of its own. */
static float *carve(char **next, int64_t count, size_t size) {
    float *piece = (float *)(void *)*next;
    *next += rounded_up(count * (int64_t)size, LINE);
    return piece;
}

static int run_forward(const tinkex_model *model, const tinkex_pass *pass, int num_threads) {
    const int64_t rows = pass->num_rows, q_size = model->heads * model->head_dim;
    const int64_t qkv_size = q_size + 2 * model->kv_heads * model->head_dim;
    const int64_t rows_per_block = block_rows(model), group = model->heads / model->kv_heads;
    const int64_t num_blocks = count_blocks(pass, rows_per_block);
    const int64_t max_rank = largest_rank(pass->segments, pass->num_segments);
    int64_t longest = 0;
    for (int64_t s = 0; s < pass->num_sequences; s++)
        longest = larger(longest, pass->sequences[s].position + pass->sequences[s].num_rows);
    const int64_t max_span = rounded_up(longest, PANEL) + CHUNK;
    const int64_t scratch = rounded_up(attention_scratch(rows_per_block * group, max_span, model->head_dim), 16);

    const int64_t floats[] = {
        rows * model->hidden, rows * model->hidden, rows * qkv_size,
        rows * q_size,        rows * model->inner,  rows * MAX_PARTS * max_rank,
        num_threads * scratch,
    };
    enum { NUM_BUFFERS = sizeof floats / sizeof floats[0] };
    int64_t bytes = rounded_up(num_blocks * (int64_t)sizeof(attention_block), LINE);
    for (int i = 0; i < NUM_BUFFERS; i++) bytes += rounded_up(floats[i] * (int64_t)sizeof(float), LINE);
    char *workspace = aligned_alloc(LINE, (size_t)bytes), *next = workspace;
    if (workspace == NULL) return TINKEX_NO_MEMORY;
    float *buffer[NUM_BUFFERS];
    for (int i = 0; i < NUM_BUFFERS; i++) buffer[i] = carve(&next, floats[i], sizeof(float));
    attention_block *blocks = (attention_block *)(void *)next;
    cut_blocks(pass, rows_per_block, blocks);

    forward f = {
        .model = model,
        .pass = pass,
        .num_blocks = num_blocks,
        .max_rank = max_rank,
        .num_segments = max_rank > 0 ? pass->num_segments : 0,
        .x = buffer[0],
        .normed = buffer[1],
        .qkv = buffer[2],
        .mixed = buffer[3],
        .inner = buffer[4],
        .squeezed = buffer[5],
        .attention = {.model = model,
                      .blocks = blocks,
                      .queries_per_block = rows_per_block * group,
                      .max_span = max_span,
                      .qkv = buffer[2],
                      .qkv_stride = qkv_size,
                      .mixed = buffer[3],
                      .scratch = buffer[6],
                      .scratch_size = scratch},
    };
    const int phases = (int)model->num_layers * PHASES_PER_LAYER + OTHER_PHASES;
    const int result = tinkex_run(forward_job, &f, phases, num_threads);
    free(workspace);
    return result;
}

/* ---- hidden states to logits */

static void head_job(tinkex_walk *walk, void *context) { run_linear(walk, context); }

static int run_head(const tinkex_model *model, const tinkex_head *head, int num_threads) {
    const int64_t max_rank = largest_rank(head->segments, head->num_segments);
    const int64_t squeezed = rounded_up(head->num_rows * MAX_PARTS * larger(1, max_rank) * (int64_t)sizeof(float), LINE);
    float *workspace = aligned_alloc(LINE, (size_t)squeezed);
    if (workspace == NULL) return TINKEX_NO_MEMORY;
    linear l = {
        .num_rows = head->num_rows,
        .inputs = model->hidden,
        .x = head->hidden,
        .x_stride = model->hidden,
        .out_stride = model->vocab,
        .end = END_STORE,
        .num_parts = 1,
        .parts = {{&model->unembedding, NULL, model->vocab, head->logits, 0}},
        .segments = head->segments,
        .num_segments = max_rank > 0 ? head->num_segments : 0,
        .max_rank = max_rank,
        .first_pair = model->num_layers * PROJ_PER_LAYER,
        .squeezed = workspace,
    };
    const int result = tinkex_run(head_job, &l, 2, num_threads);
    free(workspace);
    return result;
}

#endif
