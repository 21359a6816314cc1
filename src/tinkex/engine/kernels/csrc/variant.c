/* Compiled once per instruction set: VARIANT is its name, and the compiler's flags enable it. */
#include "variant.h"

#include "draw.h"
#include "forward.h"
#include "lora_train.h"
#include "pack.h"

#define CONCAT_NAMES(a, b) a##b
#define CONCAT(a, b) CONCAT_NAMES(a, b)
#define STRINGIFY_VALUE(a) #a
#define STRINGIFY(a) STRINGIFY_VALUE(a)

const tinkex_variant CONCAT(tinkex_, VARIANT) = {STRINGIFY(VARIANT), run_forward, run_head, run_draw,
                                                 packed_bytes,       run_pack,    run_lora};
