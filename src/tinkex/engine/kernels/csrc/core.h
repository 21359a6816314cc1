/* The structures that Python passes to the compiled core: weights in torch's memory, and the rows of one pass.
 *
 * All numbers are computed in fp32. A matrix has one row per output, as torch stores the weight of a linear layer, or
 * is packed into fewer bits where that is exact. layout.py mirrors the layout of these structures.
 */
#ifndef TINKEX_CORE_H
#define TINKEX_CORE_H

#include <stdint.h>

enum { TINKEX_OK = 0, TINKEX_NO_MEMORY = 1, TINKEX_NOT_EXACT = 2 };

/* The projections of a layer, in the order of an adapter's table. */
enum { PROJ_Q, PROJ_K, PROJ_V, PROJ_O, PROJ_GATE, PROJ_UP, PROJ_DOWN, PROJ_PER_LAYER };

/* Storage formats of a matrix; packed.h defines all but the first. */
enum { FORMAT_FP32, FORMAT_FP16, FORMAT_BF16, FORMAT_Q8, FORMAT_Q4, FORMAT_TRANSPOSED };

typedef struct {
    const void *data;
    int64_t format;
} tinkex_matrix;

typedef struct {
    tinkex_matrix weights[PROJ_PER_LAYER];
    const float *biases[PROJ_PER_LAYER]; /* NULL where the model family has none, as for q_norm and k_norm */
    const float *input_norm;
    const float *mlp_norm;
    const float *q_norm;
    const float *k_norm;
    int64_t window; /* positions a query attends to, its own included; 0 means all before it */
} tinkex_layer;

typedef struct {
    int64_t num_layers, hidden, inner, heads, kv_heads, head_dim, vocab;
    double norm_eps;
    const float *embedding;
    const float *final_norm;
    tinkex_matrix unembedding;
    const tinkex_layer *layers;
} tinkex_model;

/* LoRA of one projection: A is (rank, inputs), B is (outputs, rank); both NULL where there is none. If `transposed`,
 * both are stored in FORMAT_TRANSPOSED. */
typedef struct {
    const float *a;
    const float *b;
    int64_t transposed;
} tinkex_lora;

/* Consecutive rows that share an adapter. */
typedef struct {
    int64_t first_row, num_rows, rank;
    double scale;
    const tinkex_lora *loras; /* PROJ_PER_LAYER per layer, then one for the unembedding */
} tinkex_segment;

/* Keys and values of consecutive positions, from `start` up to the start of the next extent. */
typedef struct {
    float *keys;   /* layer 0, head 0, the first position; positions are head_dim apart */
    int64_t start; /* a multiple of 64 */
    int64_t layer_stride, value_offset, head_stride;
} tinkex_extent;

/* Consecutive rows that continue one sequence, and the extents of its keys and values. Several sequences can share the
 * first extents. The last extent has room for the new rows. */
typedef struct {
    int64_t first_row, num_rows;
    int64_t position; /* of the first row */
    const tinkex_extent *extents;
    int64_t num_extents;
} tinkex_sequence;

typedef struct {
    int64_t num_rows, num_sequences, num_segments;
    const int32_t *tokens;
    const float *cosines; /* (rows, head_dim / 2) */
    const float *sines;
    const tinkex_sequence *sequences;
    const tinkex_segment *segments;
    float *hidden; /* out: (rows, hidden), after the final norm */
} tinkex_pass;

/* Hidden states to project on the vocabulary. */
typedef struct {
    int64_t num_rows, num_segments;
    const float *hidden;
    const tinkex_segment *segments;
    float *logits; /* out: (rows, vocab) */
} tinkex_head;

/* Projections that can share an input. */
enum { MAX_PARTS = 3 };

/* The rows of one tenant in a training pass, and its LoRA by part; NULL where there is none or none is trained. */
typedef struct {
    int64_t first_row, num_rows, rank;
    double scale;
    const float *a[MAX_PARTS]; /* (rank, inputs) */
    const float *b[MAX_PARTS]; /* (outputs, rank) */
    float *grad_a[MAX_PARTS];  /* added to, as grad_b is; no two tenants share them */
    float *grad_b[MAX_PARTS];
} tinkex_tenant;

/* LoRA of projections that share an input, in a training pass. */
typedef struct {
    int64_t inputs, num_parts, num_tenants, max_rank;
    int64_t first_column[MAX_PARTS], outputs[MAX_PARTS]; /* the columns of a part in a row of fused outputs */
    const tinkex_tenant *tenants;
    const float *x;
    int64_t x_stride;
    float
        *shrunk; /* (rows, parts · max_rank): scale · x · Aᵀ, written by the forward pass, read by the backward pass */
    /* Forward pass only. */
    float *out; /* added to */
    int64_t out_stride;
    /* Backward pass only. */
    const float *grad_out;
    int64_t grad_out_stride;
    float *shrunk_grad; /* scratch of the size of shrunk */
    float *grad_x;      /* added to; NULL if not needed */
    int64_t grad_x_stride;
} tinkex_lora_pass;

/* Rows to draw a token from. */
typedef struct {
    int64_t num_rows, vocab;
    const float *logits;
    const float *temperatures; /* 0 is greedy, with logprobs at temperature 1 */
    const int64_t *top_ks;     /* below 1: all */
    const double *top_ps;      /* 1: all */
    const double *uniforms;
    int64_t *tokens;        /* out */
    float *logprobs;        /* out: of the drawn token */
    float *log_normalizers; /* out: log Σ exp((logit − max logit) / temperature) */
} tinkex_draw;

#endif
