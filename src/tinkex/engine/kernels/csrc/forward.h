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
    attention attention; /* `layer` is set per layer */
    int64_t num_blocks, max_rank, num_segments;
    /* (rows, ·) each */
    float *x, *normed, *qkv, *attn_out, *inner, *shrunk;
} forward;

/* The parameters of a phase that works row by row. */
typedef struct {
    const forward *f;
    int64_t layer;
    const float *norm;
    float *out;
} row_phase;

enum { ROWS_PER_TASK = 4 };

static void embed_task(const void *context, long task, int worker) {
    const forward *f = context;
    (void)worker;
    const int64_t hidden = f->model->hidden;
    for (int64_t row = task * ROWS_PER_TASK; row < min_i64((task + 1) * ROWS_PER_TASK, f->pass->num_rows); row++)
        memcpy(f->x + row * hidden, f->model->embedding + f->pass->tokens[row] * hidden,
               (size_t)hidden * sizeof(float));
}

static void norm_task(const void *context, long task, int worker) {
    const row_phase *phase = context;
    const forward *f = phase->f;
    (void)worker;
    const int64_t hidden = f->model->hidden;
    for (int64_t row = task * ROWS_PER_TASK; row < min_i64((task + 1) * ROWS_PER_TASK, f->pass->num_rows); row++)
        rms_norm(f->x + row * hidden, phase->norm, hidden, f->model->norm_eps, phase->out + row * hidden);
}

/* Normalizes and rotates the heads of the rows of one block, and writes their keys and values into the KV cache. */
static void heads_task(const void *context, long task, int worker) {
    const row_phase *phase = context;
    const forward *f = phase->f;
    (void)worker;
    const tinkex_model *model = f->model;
    const tinkex_layer *layer = &model->layers[phase->layer];
    const attention_block *block = &f->attention.blocks[task];
    const tinkex_extent *last = &block->sequence->extents[block->sequence->num_extents - 1];
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
            float *to = last->keys + phase->layer * last->layer_stride + h * last->head_stride +
                        (block->position + i - last->start) * d;
            memcpy(to, key + h * d, (size_t)d * sizeof(float));
            memcpy(to + last->value_offset, value + h * d, (size_t)d * sizeof(float));
        }
    }
}

static linear make_linear(const forward *f, int64_t layer, const float *x, int64_t inputs, enum linear_end end) {
    return (linear){
        .num_rows = f->pass->num_rows,
        .inputs = inputs,
        .x = x,
        .x_stride = inputs,
        .end = end,
        .segments = f->pass->segments,
        .num_segments = f->num_segments,
        .max_rank = f->max_rank,
        .first_lora = layer * PROJ_PER_LAYER,
        .shrunk = f->shrunk,
    };
}

static linear_part make_part(const tinkex_layer *layer, int projection, int64_t outputs, float *out) {
    return (linear_part){&layer->weights[projection], layer->biases[projection], outputs, out, projection};
}

enum { PHASES_PER_LAYER = 12, OTHER_PHASES = 2 };

static linear make_qkv(const forward *f, int64_t number) {
    const tinkex_model *model = f->model;
    const tinkex_layer *layer = &model->layers[number];
    const int64_t q_size = model->heads * model->head_dim, kv_size = model->kv_heads * model->head_dim;
    linear qkv = make_linear(f, number, f->normed, model->hidden, END_STORE);
    qkv.out_stride = f->attention.qkv_stride;
    qkv.num_parts = 3;
    qkv.parts[0] = make_part(layer, PROJ_Q, q_size, f->qkv);
    qkv.parts[1] = make_part(layer, PROJ_K, kv_size, f->qkv + q_size);
    qkv.parts[2] = make_part(layer, PROJ_V, kv_size, f->qkv + q_size + kv_size);
    return qkv;
}

/* A projection that is added to the residual stream. */
static linear make_residual_linear(const forward *f, int64_t number, int projection, const float *x, int64_t inputs) {
    linear l = make_linear(f, number, x, inputs, END_ADD);
    l.out_stride = f->model->hidden;
    l.num_parts = 1;
    l.parts[0] = make_part(&f->model->layers[number], projection, f->model->hidden, f->x);
    return l;
}

static linear make_gate_up(const forward *f, int64_t number) {
    const tinkex_layer *layer = &f->model->layers[number];
    linear gate_up = make_linear(f, number, f->normed, f->model->hidden, END_GATE);
    gate_up.out_stride = f->model->inner;
    gate_up.num_parts = 2;
    gate_up.parts[0] = make_part(layer, PROJ_GATE, f->model->inner, f->inner);
    gate_up.parts[1] = make_part(layer, PROJ_UP, f->model->inner, NULL);
    return gate_up;
}

static void run_layer(tinkex_thread *thread, const forward *f, int64_t number) {
    const tinkex_model *model = f->model;
    const tinkex_layer *layer = &model->layers[number];
    const int64_t row_tasks = ceil_div(f->pass->num_rows, ROWS_PER_TASK);
    const int is_last = number + 1 == model->num_layers;
    linear qkv = make_qkv(f, number), gate_up = make_gate_up(f, number);
    linear output = make_residual_linear(f, number, PROJ_O, f->attn_out, model->heads * model->head_dim);
    linear down = make_residual_linear(f, number, PROJ_DOWN, f->inner, model->inner);
    const linear following = make_qkv(f, is_last ? number : number + 1);
    qkv.next = &output;
    output.next = &gate_up;
    gate_up.next = &down;
    down.next = is_last ? NULL : &following;

    const row_phase before_attention = {f, number, layer->input_norm, f->normed};
    tinkex_parallel_for(thread, row_tasks, norm_task, &before_attention);
    run_linear(thread, &qkv);
    tinkex_parallel_for(thread, f->num_blocks, heads_task, &before_attention);
    attention attend = f->attention;
    attend.layer = number;
    tinkex_parallel_for(thread, f->num_blocks * model->kv_heads, attention_task, &attend);
    run_linear(thread, &output);

    const row_phase before_mlp = {f, number, layer->mlp_norm, f->normed};
    tinkex_parallel_for(thread, row_tasks, norm_task, &before_mlp);
    run_linear(thread, &gate_up);
    run_linear(thread, &down);
}

static void forward_job(tinkex_thread *thread, void *context) {
    const forward *f = context;
    const int64_t row_tasks = ceil_div(f->pass->num_rows, ROWS_PER_TASK);
    tinkex_parallel_for(thread, row_tasks, embed_task, f);
    for (int64_t layer = 0; layer < f->model->num_layers; layer++) run_layer(thread, f, layer);
    const row_phase last = {f, 0, f->model->final_norm, f->pass->hidden};
    tinkex_parallel_for(thread, row_tasks, norm_task, &last);
}

/* The largest rank of any adapter; 0 if there is none, and then LoRA is skipped. */
static int64_t find_max_rank(const tinkex_segment *segments, int64_t num_segments) {
    int64_t rank = 0;
    for (int64_t s = 0; s < num_segments; s++)
        if (segments[s].loras != NULL) rank = max_i64(rank, segments[s].rank);
    return rank;
}

static int64_t count_blocks(const tinkex_pass *pass, int64_t rows_per_block) {
    int64_t blocks = 0;
    for (int64_t s = 0; s < pass->num_sequences; s++) blocks += ceil_div(pass->sequences[s].num_rows, rows_per_block);
    return blocks;
}

/* Splits the sequences into blocks; returns the length of the longest sequence. */
static int64_t split_blocks(const tinkex_pass *pass, int64_t rows_per_block, attention_block *blocks) {
    int64_t max_length = 0;
    for (int64_t s = 0; s < pass->num_sequences; s++) {
        const tinkex_sequence *sequence = &pass->sequences[s];
        max_length = max_i64(max_length, sequence->position + sequence->num_rows);
        for (int64_t done = 0; done < sequence->num_rows; done += rows_per_block)
            *blocks++ =
                (attention_block){sequence, sequence->first_row + done,
                                  min_i64(rows_per_block, sequence->num_rows - done), sequence->position + done};
    }
    return max_length;
}

/* Takes the next buffer, aligned to a cache line, from one allocation. */
static float *take_buffer(char **next, int64_t count, size_t size) {
    float *piece = (float *)(void *)*next;
    *next += round_up(count * (int64_t)size, LINE);
    return piece;
}

static int run_forward(const tinkex_model *model, const tinkex_pass *pass, int num_threads) {
    const int64_t rows = pass->num_rows, q_size = model->heads * model->head_dim;
    const int64_t qkv_size = q_size + 2 * model->kv_heads * model->head_dim;
    const int64_t rows_per_block = block_rows(model), group = model->heads / model->kv_heads;
    const int64_t num_blocks = count_blocks(pass, rows_per_block);
    const int64_t max_rank = find_max_rank(pass->segments, pass->num_segments);
    int64_t max_length = 0;
    for (int64_t s = 0; s < pass->num_sequences; s++)
        max_length = max_i64(max_length, pass->sequences[s].position + pass->sequences[s].num_rows);
    const int64_t max_span = round_up(max_length, PANEL) + CHUNK;
    const int64_t scratch = round_up(attention_scratch(rows_per_block * group, max_span, model->head_dim), 16);

    const int64_t floats[] = {
        rows * model->hidden, rows * model->hidden,        rows * qkv_size,       rows * q_size,
        rows * model->inner,  rows * MAX_PARTS * max_rank, num_threads * scratch,
    };
    enum { NUM_BUFFERS = sizeof floats / sizeof floats[0] };
    int64_t bytes = round_up(num_blocks * (int64_t)sizeof(attention_block), LINE);
    for (int i = 0; i < NUM_BUFFERS; i++) bytes += round_up(floats[i] * (int64_t)sizeof(float), LINE);
    char *workspace = aligned_alloc(LINE, (size_t)bytes), *next = workspace;
    if (workspace == NULL) return TINKEX_NO_MEMORY;
    float *buffer[NUM_BUFFERS];
    for (int i = 0; i < NUM_BUFFERS; i++) buffer[i] = take_buffer(&next, floats[i], sizeof(float));
    attention_block *blocks = (attention_block *)(void *)next;
    split_blocks(pass, rows_per_block, blocks);

    forward f = {
        .model = model,
        .pass = pass,
        .num_blocks = num_blocks,
        .max_rank = max_rank,
        .num_segments = max_rank > 0 ? pass->num_segments : 0,
        .x = buffer[0],
        .normed = buffer[1],
        .qkv = buffer[2],
        .attn_out = buffer[3],
        .inner = buffer[4],
        .shrunk = buffer[5],
        .attention = {.model = model,
                      .blocks = blocks,
                      .queries_per_block = rows_per_block * group,
                      .max_span = max_span,
                      .qkv = buffer[2],
                      .qkv_stride = qkv_size,
                      .attn_out = buffer[3],
                      .scratch = buffer[6],
                      .scratch_size = scratch},
    };
    const int phases = (int)model->num_layers * PHASES_PER_LAYER + OTHER_PHASES;
    const int result = tinkex_run(forward_job, &f, phases, num_threads);
    free(workspace);
    return result;
}

/* ---- From hidden states to logits. */

static void head_job(tinkex_thread *thread, void *context) { run_linear(thread, context); }

static int run_head(const tinkex_model *model, const tinkex_head *head, int num_threads) {
    const int64_t max_rank = find_max_rank(head->segments, head->num_segments);
    const int64_t shrunk = round_up(head->num_rows * MAX_PARTS * max_i64(1, max_rank) * (int64_t)sizeof(float), LINE);
    float *workspace = aligned_alloc(LINE, (size_t)shrunk);
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
        .first_lora = model->num_layers * PROJ_PER_LAYER,
        .shrunk = workspace,
    };
    const int result = tinkex_run(head_job, &l, 2, num_threads);
    free(workspace);
    return result;
}

#endif
