/* Packs an fp32 matrix into one of the formats of packed.h, if unpacking gives back every number exactly. */
#ifndef TINKEX_PACK_H
#define TINKEX_PACK_H

#include <math.h>
#include <stdatomic.h>

#include "packed.h"
#include "pool.h"

static const float MAX_HALF = 65504.0f;

/* The nearest half of a number whose magnitude is at most MAX_HALF. */
static inline uint16_t nearest_half(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    const uint32_t sign = bits >> 16 & 0x8000;
    bits &= 0x7fffffff;
    if (bits < 113u << 23) { /* below the smallest normal half */
        const float steps = fabsf(value) * 0x1p24f;
        uint32_t whole = (uint32_t)steps;
        const float rest = steps - (float)whole;
        whole += rest > 0.5f || (rest == 0.5f && whole & 1);
        return (uint16_t)(sign | whole);
    }
    bits += 0xfff + (bits >> 13 & 1);
    return (uint16_t)(sign | (bits - (112u << 23)) >> 13);
}

static inline float half_value(uint16_t half) {
    const uint32_t magnitude = half & 0x7fff;
    uint32_t bits = (magnitude << 13) + (112u << 23);
    float value;
    memcpy(&value, &bits, sizeof value);
    if (magnitude < 0x400) value = (float)magnitude * 0x1p-24f;
    return half & 0x8000 ? -value : value;
}

/* Encodes a block as low + scale · code with codes 0…top; 0 if that is not exact. */
static int encode_q4(const float *from, float low, float scale, float top, uint8_t *codes) {
    int mismatch = 0;
    for (int k = 0; k < BLOCK; k++) {
        float code = scale != 0.0f ? (from[k] - low) / scale + 0.5f : 0.0f;
        code = code > 0.0f ? code : 0.0f;
        code = code < top ? code : top;
        codes[k] = (uint8_t)code;
        mismatch |= !((float)codes[k] * scale + low == from[k]);
    }
    return !mismatch;
}

/* One block of 4-bit codes. One end of the range is code 0, the other usually 15. Returns 0 if no encoding is exact. */
static int pack_q4(const float *from, uint16_t *scale, uint16_t *low, uint8_t *codes) {
    float lowest = from[0], highest = from[0];
    for (int k = 1; k < BLOCK; k++) {
        lowest = from[k] < lowest ? from[k] : lowest;
        highest = from[k] > highest ? from[k] : highest;
    }
    if (!(fabsf(lowest) <= MAX_HALF && fabsf(highest) <= MAX_HALF)) return 0;
    for (int top = 15; top > 0; top--)
        for (int down = 0; down < 2; down++) {
            const float begin = down ? highest : lowest, end = down ? lowest : highest;
            const float step = (end - begin) / (float)top;
            if (fabsf(step) > MAX_HALF) continue;
            *low = nearest_half(begin);
            *scale = nearest_half(step);
            if (half_value(*low) == begin && encode_q4(from, begin, half_value(*scale), (float)top, codes)) return 1;
        }
    return 0;
}

/* One block of 8-bit codes. The largest magnitude usually is code ±127. Returns 0 if no encoding is exact. */
static int pack_q8(const float *from, uint16_t *scale, int8_t *codes) {
    float highest = 0.0f;
    for (int k = 0; k < BLOCK; k++) highest = fabsf(from[k]) > highest ? fabsf(from[k]) : highest;
    if (!(highest <= MAX_HALF)) return 0;
    for (int top = 127; top > 0; top--) {
        *scale = nearest_half(highest / (float)top);
        const float unit = half_value(*scale);
        if (unit * (float)top != highest) continue;
        int mismatch = 0;
        for (int k = 0; k < BLOCK; k++) {
            float code = unit != 0.0f ? from[k] / unit : 0.0f;
            code += code < 0.0f ? -0.5f : 0.5f;
            code = code > -127.5f ? code : -127.5f;
            code = code < 127.5f ? code : 127.5f;
            codes[k] = (int8_t)code;
            mismatch |= !((float)codes[k] * unit == from[k]);
        }
        if (!mismatch) return 1;
    }
    return 0;
}

typedef struct {
    const float *from; /* (outputs, inputs) */
    int64_t format, outputs, inputs;
    char *to;
    atomic_int *failed;
} packing;

/* Packs the numbers of one output in one block; 0 if that is not exact. */
static int pack_block(int64_t format, const float *from, int64_t inputs, int64_t lane, char *block) {
    uint16_t half, low;
    uint8_t codes[BLOCK];
    int8_t signed_codes[BLOCK];
    switch (format) {
        case FORMAT_Q4:
            if (!pack_q4(from, &half, &low, codes)) return 0;
            memcpy(block + lane * 2, &half, 2);
            memcpy(block + HALVES + lane * 2, &low, 2);
            for (int group = 0; group < BLOCK / CODES; group++) {
                uint32_t word = 0;
                for (int j = 0; j < CODES; j++) word |= (uint32_t)codes[group * CODES + j] << (4 * j);
                memcpy(block + 2 * HALVES + (group * PANEL + lane) * 4, &word, 4);
            }
            return 1;
        case FORMAT_Q8:
            if (!pack_q8(from, &half, signed_codes)) return 0;
            memcpy(block + lane * 2, &half, 2);
            for (int k = 0; k < BLOCK; k++) block[HALVES + k * PANEL + lane] = (char)signed_codes[k];
            return 1;
        default:
            for (int64_t k = 0; k < inputs; k++) {
                uint32_t bits;
                memcpy(&bits, from + k, 4);
                if (format == FORMAT_FP16 && !(fabsf(from[k]) <= MAX_HALF)) return 0;
                half = format == FORMAT_FP16 ? nearest_half(from[k]) : (uint16_t)(bits >> 16);
                if (format == FORMAT_FP16 ? half_value(half) != from[k] : bits & 0xffff) return 0;
                memcpy(block + k * HALVES + lane * 2, &half, 2);
            }
            return 1;
    }
}

static void pack_task(const void *context, long panel, int worker) {
    const packing *p = context;
    (void)worker;
    const int64_t bytes = panel_bytes(p->format, p->inputs), first = panel * PANEL;
    char *block = p->to + panel * bytes;
    if (p->format == FORMAT_TRANSPOSED) {
        transpose_panel(p->from + first * p->inputs, p->inputs, min_i64(PANEL, p->outputs - first), p->inputs,
                        (float *)block);
        return;
    }
    memset(block, 0, (size_t)bytes); /* zeros for the outputs that pad the last panel */
    for (int64_t k = 0; k < p->inputs; k += BLOCK) {
        const int64_t inputs = min_i64(BLOCK, p->inputs - k);
        for (int64_t lane = 0; lane < min_i64(PANEL, p->outputs - first); lane++) {
            if (atomic_load_explicit(p->failed, memory_order_relaxed)) return;
            if (!pack_block(p->format, p->from + (first + lane) * p->inputs + k, inputs, lane, block))
                atomic_store_explicit(p->failed, 1, memory_order_relaxed);
        }
        block += block_bytes(p->format, inputs);
    }
}

static void pack_job(tinkex_thread *thread, void *context) {
    tinkex_parallel_for(thread, ceil_div(((const packing *)context)->outputs, PANEL), pack_task, context);
}

/* Bytes a matrix takes in a format; 0 for a format that does not support its size. */
static int64_t packed_bytes(int64_t format, int64_t outputs, int64_t inputs) {
    if ((format == FORMAT_Q4 || format == FORMAT_Q8) && inputs % BLOCK) return 0;
    return ceil_div(outputs, PANEL) * panel_bytes(format, inputs);
}

static int run_pack(const float *from, int64_t outputs, int64_t inputs, int64_t format, void *to, int num_threads) {
    atomic_int failed = 0;
    packing p = {from, format, outputs, inputs, to, &failed};
    const int result = tinkex_run(pack_job, &p, 1, num_threads);
    if (result != TINKEX_OK) return result;
    return atomic_load(&failed) ? TINKEX_NOT_EXACT : TINKEX_OK;
}

#endif
