/* The entry points of the core for one instruction set. */
#ifndef TINKEX_VARIANT_H
#define TINKEX_VARIANT_H

#include "core.h"
#include "pool.h"

typedef struct {
    const char *name;
    int (*forward)(const tinkex_model *model, const tinkex_pass *pass, int num_threads);
    int (*head)(const tinkex_model *model, const tinkex_head *head, int num_threads);
    int (*draw)(const tinkex_draw *draw, int num_threads);
    int64_t (*packed_bytes)(int64_t format, int64_t outputs, int64_t inputs);
    int (*pack)(const float *from, int64_t outputs, int64_t inputs, int64_t format, void *to, int num_threads);
    int (*lora)(const tinkex_lora_pass *lora, int backward, tinkex_team team, int num_threads);
} tinkex_variant;

extern const tinkex_variant tinkex_avx512, tinkex_avx2, tinkex_portable;

#endif
