/* Operations on one row: RMS norm and rotary embedding. */
#ifndef TINKEX_ROWS_H
#define TINKEX_ROWS_H

#include <math.h>

#include "simd.h"

/* out = x / root-mean-square(x) · weight; out may be x. */
static void rms_norm(const float *x, const float *weight, int64_t size, double eps, float *out) {
    vec squares = {0};
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
        const vec value = vec_load(x + i);
        squares += value * value;
    }
    float sum = vec_reduce_sum(squares);
    for (; i < size; i++) sum += x[i] * x[i];
    const float scale = 1.0f / sqrtf(sum / (float)size + (float)eps);
    for (i = 0; i < size; i++) out[i] = x[i] * scale * weight[i];
}

/* Rotates one head in place: its first half is paired with its second half. */
static void rotate_head(float *head, const float *cosines, const float *sines, int64_t half) {
    for (int64_t i = 0; i < half; i++) {
        const float first = head[i], second = head[i + half];
        head[i] = first * cosines[i] - second * sines[i];
        head[i + half] = second * cosines[i] + first * sines[i];
    }
}

#endif
