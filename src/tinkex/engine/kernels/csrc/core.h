/* What Python hands to the compiled core: weights where torch keeps them, and the rows of one pass.
 *
 * All numbers are computed in fp32. A matrix is one row per output, as torch stores the weight of a linear layer, or
 * packed into fewer bits where that loses none of them.
 * The layout of these structures is mirrored in layout.py.
 */
#ifndef TINKEX_CORE_H
#define TINKEX_CORE_H

#include <stdint.h>

enum { TINKEX_OK = 0, TINKEX_NO_MEMORY = 1, TINKEX_NOT_EXACT = 2 };

/* The projections an adapter can reach in a layer, in the order of its table of pairs. */
enum { PROJ_Q, PROJ_K, PROJ_V, PROJ_O, PROJ_GATE, PROJ_UP, PROJ_DOWN, PROJ_PER_LAYER };

/* How the numbers of a matrix are stored; all but the first as packed.h says. */
enum { STORED_FP32, STORED_FP16, STORED_BF16, STORED_Q8, STORED_Q4, STORED_TURNED };

typedef struct {
    const void *data;
    int64_t format;
} tinkex_matrix;

typedef struct {
    tinkex_matrix weights[PROJ_PER_LAYER];
    const float *biases[PROJ_PER_LAYER]; /* NULL where the family has none; so for q_norm and k_norm */
    const float *input_norm;
    const float *mlp_norm;
    const float *q_norm;
    const float *k_norm;
    int64_t window; /* positions a query sees, its own included; 0 means all before it */
} tinkex_layer;

typedef struct {
    int64_t num_layers, hidden, inner, heads, kv_heads, head_dim, vocab;
    double norm_eps;
    const float *embedding;
    const float *final_norm;
    tinkex_matrix unembedding;
    const tinkex_layer *layers;
} tinkex_model;

/* One projection's low-rank pair: A is (rank, inputs), B is (outputs, rank); both NULL where there is none. If they are
 * turned, both are stored that way, as packed.h says. */
typedef struct {
    const float *a;
    const float *b;
    int64_t turned;
} tinkex_pair;

/* Neighbouring rows that share an adapter. */
typedef struct {
    int64_t first_row, num_rows, rank;
    double scale;
    const tinkex_pair *pairs; /* PROJ_PER_LAYER per layer, then one for the unembedding */
} tinkex_segment;

/* Keys and values of neighbouring positions, from `start` on to where the next stretch begins. */
typedef struct {
    float *keys;   /* layer 0, head 0, the first position; positions are head_dim apart */
    int64_t start; /* a multiple of 64 */
    int64_t layer_stride, value_offset, head_stride;
} tinkex_stretch;

/* Neighbouring rows that continue one sequence, and where its keys and values lie: stretch by stretch, of which the
 * first ones may belong to several sequences. The new rows fit behind the start of the last. */
typedef struct {
    int64_t first_row, num_rows;
    int64_t position; /* of the first row */
    const tinkex_stretch *stretches;
    int64_t num_stretches;
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

/* Hidden states whose logits are wanted. */
typedef struct {
    int64_t num_rows, num_segments;
    const float *hidden;
    const tinkex_segment *segments;
    float *logits; /* out: (rows, vocab) */
} tinkex_head;

/* Projections that can share an input. */
enum { MAX_PARTS = 3 };

/* Rows of a training pass and the pairs that are theirs; by part, NULL where there is none or none is trained. */
typedef struct {
    int64_t first_row, num_rows, rank;
    double scale;
    const float *a[MAX_PARTS]; /* (rank, inputs) */
    const float *b[MAX_PARTS]; /* (outputs, rank) */
    float *grad_a[MAX_PARTS];  /* added to, as grad_b is; no two tenants share them */
    float *grad_b[MAX_PARTS];
} tinkex_tenant;

/* The pairs of projections that share an input, and a pass through them. */
typedef struct {
    int64_t inputs, num_parts, num_tenants, max_rank;
    int64_t first_column[MAX_PARTS], outputs[MAX_PARTS]; /* where a part's outputs lie in a row of all of them */
    const tinkex_tenant *tenants;
    const float *x;
    int64_t x_stride;
    float *narrow; /* (rows, parts · max_rank): scale · x · Aᵀ, written on the way forward and read on the way back */
    /* Forward alone. */
    float *out; /* added to */
    int64_t out_stride;
    /* Backward alone. */
    const float *grad_out;
    int64_t grad_out_stride;
    float *narrow_grad; /* room for as much as narrow */
    float *grad_x;      /* added to; NULL if it is not wanted */
    int64_t grad_x_stride;
} tinkex_pairs;

/* Rows to draw a token from. */
typedef struct {
    int64_t num_rows, vocab;
    const float *logits;
    const float *temperatures; /* 0 takes the likeliest token, and reports at temperature 1 */
    const int64_t *top_ks; /* below 1: all */
    const double *top_ps;  /* 1: all */
    const double *uniforms;
    int64_t *tokens;       /* out */
    float *logprobs;       /* out: of the drawn token */
    float *log_normalizers; /* out: log Σ exp((logit − largest logit) / temperature) */
} tinkex_draw;

#endif
