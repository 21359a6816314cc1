/* The functions that the shared library exports. */
#include <stddef.h>
#include <string.h>

#include "core.h"
#include "variant.h"

#define EXPORT __attribute__((visibility("default")))

#if defined(TINKEX_X86)
#include <cpuid.h>

/* Compilers differ in whether __builtin_cpu_supports takes "f16c". A virtual machine can hide it and keep AVX2. */
static int has_f16c(void) {
    unsigned eax, ebx, ecx, edx;
    return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C) != 0;
}
#endif

/* The variants this processor and its operating system can run, the fastest first. Each needs all the instruction sets
 * that its flags in build.py let the compiler use. */
static int supported(const tinkex_variant **variants) {
    int count = 0;
#if defined(TINKEX_X86)
    __builtin_cpu_init();
    const int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
    if (avx2 && __builtin_cpu_supports("avx512f")) variants[count++] = &tinkex_avx512;
    if (avx2) variants[count++] = &tinkex_avx2;
#endif
    variants[count++] = &tinkex_portable;
    return count;
}

/* A hash of the sources: Python rejects a library that was built from others. */
EXPORT const char *tinkex_core_sources(void);
const char *tinkex_core_sources(void) { return TINKEX_SOURCES; }

/* The variant of a name, the fastest if the name is empty; NULL if this processor cannot run it. */
EXPORT const tinkex_variant *tinkex_core_variant(const char *name);
const tinkex_variant *tinkex_core_variant(const char *name) {
    const tinkex_variant *variants[3];
    const int count = supported(variants);
    for (int i = 0; i < count; i++)
        if (name[0] == '\0' || strcmp(variants[i]->name, name) == 0) return variants[i];
    return NULL;
}

EXPORT const char *tinkex_core_name(const tinkex_variant *variant);
const char *tinkex_core_name(const tinkex_variant *variant) { return variant->name; }

EXPORT int tinkex_core_forward(const tinkex_variant *variant, const tinkex_model *model, const tinkex_pass *pass,
                               int num_threads);
int tinkex_core_forward(const tinkex_variant *variant, const tinkex_model *model, const tinkex_pass *pass,
                        int num_threads) {
    return variant->forward(model, pass, num_threads);
}

EXPORT int tinkex_core_head(const tinkex_variant *variant, const tinkex_model *model, const tinkex_head *head,
                            int num_threads);
int tinkex_core_head(const tinkex_variant *variant, const tinkex_model *model, const tinkex_head *head,
                     int num_threads) {
    return variant->head(model, head, num_threads);
}

EXPORT int tinkex_core_draw(const tinkex_variant *variant, const tinkex_draw *draw, int num_threads);
int tinkex_core_draw(const tinkex_variant *variant, const tinkex_draw *draw, int num_threads) {
    return variant->draw(draw, num_threads);
}

/* Bytes a matrix takes in a format; 0 for a format that does not support its size. */
EXPORT int64_t tinkex_core_packed_bytes(const tinkex_variant *variant, int64_t format, int64_t outputs, int64_t inputs);
int64_t tinkex_core_packed_bytes(const tinkex_variant *variant, int64_t format, int64_t outputs, int64_t inputs) {
    return variant->packed_bytes(format, outputs, inputs);
}

/* Packs a matrix for this variant; TINKEX_NOT_EXACT if unpacking would not give back the same numbers. */
EXPORT int tinkex_core_pack(const tinkex_variant *variant, const float *from, int64_t outputs, int64_t inputs,
                            int64_t format, void *to, int num_threads);
int tinkex_core_pack(const tinkex_variant *variant, const float *from, int64_t outputs, int64_t inputs, int64_t format,
                     void *to, int num_threads) {
    return variant->pack(from, outputs, inputs, format, to, num_threads);
}

/* LoRA in a training pass, forward or backward, on the threads of `team`. */
EXPORT int tinkex_core_lora(const tinkex_variant *variant, const tinkex_lora_pass *lora, int backward, tinkex_team team,
                            int num_threads);
int tinkex_core_lora(const tinkex_variant *variant, const tinkex_lora_pass *lora, int backward, tinkex_team team,
                     int num_threads) {
    return variant->lora(lora, backward, team, num_threads);
}
