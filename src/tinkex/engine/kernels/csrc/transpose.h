/* Transposes rows of a matrix into the columns of a panel. */
#ifndef TINKEX_TRANSPOSE_H
#define TINKEX_TRANSPOSE_H

#include "simd.h"

#if defined(__AVX2__)
#include <immintrin.h>

/* to[k][i] = rows[i][k] for eight inputs of eight rows, in registers; `to` and its rows are aligned to vectors. */
static inline void transpose_square(const float *rows, int64_t stride, float *to, int64_t to_stride) {
    __m256 a[8], b[8];
    /* Rows i and i + 4 in one register, so that the last step does not cross 128-bit lanes. */
    for (int i = 0; i < 4; i++) {
        a[i] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(rows + i * stride)),
                                    _mm_loadu_ps(rows + (i + 4) * stride), 1);
        a[i + 4] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(rows + i * stride + 4)),
                                        _mm_loadu_ps(rows + (i + 4) * stride + 4), 1);
    }
    for (int half = 0; half < 8; half += 4) {
        b[half] = _mm256_unpacklo_ps(a[half], a[half + 1]);
        b[half + 1] = _mm256_unpackhi_ps(a[half], a[half + 1]);
        b[half + 2] = _mm256_unpacklo_ps(a[half + 2], a[half + 3]);
        b[half + 3] = _mm256_unpackhi_ps(a[half + 2], a[half + 3]);
        _mm256_store_ps(to + (half + 0) * to_stride, _mm256_shuffle_ps(b[half], b[half + 2], 0x44));
        _mm256_store_ps(to + (half + 1) * to_stride, _mm256_shuffle_ps(b[half], b[half + 2], 0xEE));
        _mm256_store_ps(to + (half + 2) * to_stride, _mm256_shuffle_ps(b[half + 1], b[half + 3], 0x44));
        _mm256_store_ps(to + (half + 3) * to_stride, _mm256_shuffle_ps(b[half + 1], b[half + 3], 0xEE));
    }
}
enum { TRANSPOSE = 8 };
#else
static inline void transpose_square(const float *rows, int64_t stride, float *to, int64_t to_stride) {
    for (int k = 0; k < 4; k++)
        for (int i = 0; i < 4; i++) to[k * to_stride + i] = rows[i * stride + k];
}
enum { TRANSPOSE = 4 };
#endif

/* panel[k][i] = rows[i][k] for k < width; where there are fewer than PANEL rows, the other columns are 0. */
static inline __attribute__((always_inline)) void transpose_panel(const float *rows, int64_t stride, int64_t num_rows,
                                                                  int64_t width, float *panel) {
    const int64_t whole_rows = num_rows / TRANSPOSE * TRANSPOSE, whole_width = width / TRANSPOSE * TRANSPOSE;
    for (int64_t k = 0; k < whole_width; k += TRANSPOSE)
        for (int64_t i = 0; i < whole_rows; i += TRANSPOSE)
            transpose_square(rows + i * stride + k, stride, panel + k * PANEL + i, PANEL);
    if (whole_rows == PANEL && whole_width == width) return;
    for (int64_t k = 0; k < width; k++) {
        const int64_t first = k < whole_width ? whole_rows : 0;
        for (int64_t i = first; i < PANEL; i++) panel[k * PANEL + i] = i < num_rows ? rows[i * stride + k] : 0.0f;
    }
}

#endif
