/* Weights in the smallest format that is exact for their fp32 numbers, unpacked in registers during the product.
 *
 * Many checkpoints have fewer bits than fp32: they were rounded to 16 bits, or quantized in blocks of 32 inputs that
 * share a scale. Such a matrix is stored in that format, which takes a fraction of the memory traffic. Unpacking is
 * exact: the product of a half and a small integer fits fp32, and the one sum rounds as it did when the weight was
 * dequantized. pack.h rejects matrices for which it is not.
 *
 * Outputs are stored in panels of PANEL, and the inputs of a panel in blocks of BLOCK:
 *   FP16, BF16  u16[BLOCK][PANEL]; the last block can be shorter
 *   Q8          half scale[PANEL], i8[BLOCK][PANEL]: scale · code
 *   TRANSPOSED  float[BLOCK][PANEL]; the last block can be shorter. Only for LoRA
 *   Q4          half scale[PANEL], half low[PANEL], u32[BLOCK / 8][PANEL] with eight codes each: low + scale · code
 */
#ifndef TINKEX_PACKED_H
#define TINKEX_PACKED_H

#include "core.h"
#include "panel.h"

#if defined(__F16C__)
#include <immintrin.h>
#endif

enum { BLOCK = 32, CODES = 8, HALVES = PANEL * (int)sizeof(uint16_t) };

typedef uint16_t half_vec __attribute__((vector_size(LANES * sizeof(uint16_t)), aligned(1), may_alias));
typedef int8_t byte_vec __attribute__((vector_size(LANES), aligned(1), may_alias));
typedef uint32_t uvec __attribute__((vector_size(LANES * sizeof(int32_t))));
typedef uvec unaligned_uvec __attribute__((aligned(1), may_alias));

static inline int64_t block_bytes(int64_t format, int64_t inputs) {
    switch (format) {
        case FORMAT_Q4: return 2 * HALVES + BLOCK / CODES * PANEL * (int64_t)sizeof(uint32_t);
        case FORMAT_Q8: return HALVES + BLOCK * PANEL;
        case FORMAT_TRANSPOSED: return inputs * PANEL * (int64_t)sizeof(float);
        default: return inputs * HALVES;
    }
}

static inline int64_t panel_bytes(int64_t format, int64_t inputs) {
    return inputs / BLOCK * block_bytes(format, BLOCK) + (inputs % BLOCK ? block_bytes(format, inputs % BLOCK) : 0);
}

/* Converts halves to floats; all of them are finite. */
static inline vec vec_halves(const char *from) {
#if defined(__AVX512F__)
    return (vec)_mm512_cvtph_ps(_mm256_loadu_si256((const void *)from));
#elif defined(__F16C__) && !defined(TINKEX_WIDE)
    return (vec)_mm256_cvtph_ps(_mm_loadu_si128((const void *)from));
#else
    const ivec bits = __builtin_convertvector(*(const half_vec *)from, ivec), magnitude = bits & 0x7fff;
    const vec usual = (vec)((magnitude << 13) + (112 << 23));
    const vec tiny = __builtin_convertvector(magnitude, vec) * vec_splat(0x1p-24f);
    return (vec)((ivec)vec_select(magnitude < 0x400, tiny, usual) | (bits & 0x8000) << 16);
#endif
}

/* Q4 codes are masked in place, not shifted: a nibble i counts 16^i, so it is multiplied with scale · 16^-i. */
enum { NIBBLES = 4 };

/* The scales and offsets of a block. */
typedef struct {
    vec scale[NIBBLES][PANEL_VECTORS], low[PANEL_VECTORS];
} block_head;

static inline __attribute__((always_inline)) block_head head_of(const int format, const char *block) {
    block_head head = {0};
    for (int v = 0; v < PANEL_VECTORS; v++) {
        if (format == FORMAT_Q4 || format == FORMAT_Q8) head.scale[0][v] = vec_halves(block + v * LANES * 2);
        if (format != FORMAT_Q4) continue;
        head.low[v] = vec_halves(block + HALVES + v * LANES * 2);
        for (int nibble = 1; nibble < NIBBLES; nibble++)
            head.scale[nibble][v] = head.scale[nibble - 1][v] * vec_splat(0x1p-4f);
    }
    return head;
}

/* The weights of input k of a block for one vector of outputs. */
static inline __attribute__((always_inline)) vec weights_at(const int format, const char *block, const block_head *head,
                                                            int64_t k, int v) {
    if (format == FORMAT_Q4) {
        const char *codes = block + 2 * HALVES + (k / CODES * PANEL + v * LANES) * (int64_t)sizeof(uint32_t);
        const int nibble = (int)(k % NIBBLES);
        const uvec word = *(const unaligned_uvec *)codes >> (k % CODES < NIBBLES ? 0 : 16);
        const ivec code = (ivec)(word & 15u << 4 * nibble);
        return __builtin_convertvector(code, vec) * head->scale[nibble][v] + head->low[v];
    }
    if (format == FORMAT_Q8) {
        const char *codes = block + HALVES + k * PANEL + v * LANES;
#if defined(__AVX2__) && !defined(TINKEX_WIDE)
        const ivec code = (ivec)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)codes));
#else
        const ivec code = __builtin_convertvector(*(const byte_vec *)codes, ivec);
#endif
        return __builtin_convertvector(code, vec) * head->scale[0][v];
    }
    const char *bits = block + k * HALVES + v * LANES * 2;
    if (format == FORMAT_FP16) return vec_halves(bits);
#if defined(__AVX2__) && !defined(TINKEX_WIDE)
    return (vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)bits)), 16);
#else
    return (vec)(__builtin_convertvector(*(const half_vec *)bits, ivec) << 16);
#endif
}

/* sums[i][·] += Σ_k x[i][k] · weights[k][·] for a few rows, without a buffer between. Computes `chunks` chunks in
 * parallel, each summed as tile() does: one chain of sums alone would be bound by the latency of an addition. */
static inline __attribute__((always_inline)) void packed_tile(const int format, const int rows, const int chunks,
                                                              const float *x, int64_t x_stride, const char *data,
                                                              float *sums) {
    enum { MAX_CHUNKS = 2, MAX_ROWS = 4, BLOCKS = CHUNK / BLOCK };
    const int64_t bytes = block_bytes(format, BLOCK);
    vec sum[MAX_CHUNKS][MAX_ROWS][PANEL_VECTORS];
    for (int c = 0; c < chunks; c++)
        for (int i = 0; i < rows; i++)
            for (int v = 0; v < PANEL_VECTORS; v++) sum[c][i][v] = vec_splat(0.0f);
    for (int b = 0; b < BLOCKS; b++) {
        block_head head[MAX_CHUNKS];
        for (int c = 0; c < chunks; c++) head[c] = head_of(format, data + (c * BLOCKS + b) * bytes);
        for (int64_t group = 0; group < BLOCK; group += CODES)
#pragma GCC unroll 2
            for (int c = 0; c < chunks; c++) {
                const char *block = data + (c * BLOCKS + b) * bytes;
                const float *at = x + c * CHUNK + b * BLOCK + group;
#pragma GCC unroll 8
                for (int j = 0; j < CODES; j++) {
                    vec column[PANEL_VECTORS];
                    for (int v = 0; v < PANEL_VECTORS; v++)
                        column[v] = weights_at(format, block, &head[c], group + j, v);
                    for (int i = 0; i < rows; i++)
                        for (int v = 0; v < PANEL_VECTORS; v++)
                            sum[c][i][v] += vec_splat(at[i * x_stride + j]) * column[v];
                }
            }
    }
    for (int c = 0; c < chunks; c++)
        for (int i = 0; i < rows; i++)
            for (int v = 0; v < PANEL_VECTORS; v++) {
                float *to = sums + i * PANEL + v * LANES;
                vec_store(to, vec_load(to) + sum[c][i][v]);
            }
}

/* panel[k][·] = weights of input k, for `width` inputs from the start of a block. */
static inline __attribute__((always_inline)) void unpack(const int format, const char *data, int64_t width,
                                                         float *panel) {
    for (int64_t start = 0; start < width; start += BLOCK) {
        const int64_t inputs = min_i64(BLOCK, width - start);
        const block_head head = head_of(format, data);
        int64_t k = 0;
        for (; k + CODES <= inputs; k += CODES)
#pragma GCC unroll 8
            for (int j = 0; j < CODES; j++)
                for (int v = 0; v < PANEL_VECTORS; v++)
                    vec_store(panel + (start + k + j) * PANEL + v * LANES, weights_at(format, data, &head, k + j, v));
        for (; k < inputs; k++)
            for (int v = 0; v < PANEL_VECTORS; v++)
                vec_store(panel + (start + k) * PANEL + v * LANES, weights_at(format, data, &head, k, v));
        data += block_bytes(format, inputs);
    }
}

/* Few rows are multiplied while the weights are unpacked; more rows share a buffer with an unpacked panel. */
static inline __attribute__((always_inline)) void packed_product(const int format, int64_t rows, const float *x,
                                                                 int64_t x_stride, const char *data, int64_t inputs,
                                                                 float *sums, prefetch_queue *queue) {
    _Alignas(64) float panel[CHUNK * PANEL];
    const int64_t bytes = panel_bytes(format, CHUNK);
    int64_t k = 0;
#define STEPS(n, chunks)                                                              \
    for (; k + chunks * CHUNK <= inputs; k += chunks * CHUNK, data += chunks * bytes) \
        packed_tile(format, n, chunks, x + k, x_stride, data, sums);
    switch (rows) {
        case 1: STEPS(1, 2) STEPS(1, 1) break;
        case 2: STEPS(2, 1) break;
        case 3: STEPS(3, 1) break;
        case 4: STEPS(4, 1) break;
    }
#undef STEPS
    for (; k < inputs; k += CHUNK, data += bytes) {
        const int64_t width = min_i64(CHUNK, inputs - k);
        unpack(format, data, width, panel);
        rows_times_panel(rows, x + k, x_stride, panel, PANEL, width, sums, PANEL, NULL, queue,
                         prefetch_queue_due(queue));
    }
}

/* sums (rows, PANEL) += x (rows, inputs) · weightᵀ for the panel of a matrix that starts at `output`. */
static void add_panel_product(int64_t rows, const float *x, int64_t x_stride, const tinkex_matrix *weight,
                              int64_t output, int64_t outputs, int64_t inputs, float *sums, int more,
                              prefetch_queue *queue) {
    const char *panel = (const char *)weight->data + output / PANEL * panel_bytes(weight->format, inputs);
    switch (weight->format) {
        case FORMAT_FP16: packed_product(FORMAT_FP16, rows, x, x_stride, panel, inputs, sums, queue); break;
        case FORMAT_BF16: packed_product(FORMAT_BF16, rows, x, x_stride, panel, inputs, sums, queue); break;
        case FORMAT_Q8: packed_product(FORMAT_Q8, rows, x, x_stride, panel, inputs, sums, queue); break;
        case FORMAT_Q4: packed_product(FORMAT_Q4, rows, x, x_stride, panel, inputs, sums, queue); break;
        default:
            add_product(rows, x, x_stride, (const float *)weight->data + output * inputs, inputs, outputs, inputs, sums,
                        more, queue);
    }
}

#endif
