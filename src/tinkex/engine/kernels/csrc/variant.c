/* Compiled once per kind of processor; VARIANT is its name, and the compiler's flags are its instructions. */
#include "variant.h"

#include "draw.h"
#include "forward.h"
#include "pack.h"
#include "pairs.h"

#define JOIN_NAMES(a, b) a##b
#define JOIN(a, b) JOIN_NAMES(a, b)
#define TEXT_OF(a) #a
#define TEXT(a) TEXT_OF(a)

const tinkex_variant JOIN(tinkex_, VARIANT) = {TEXT(VARIANT), run_forward, run_head, run_draw,
                                                packed_bytes,  run_pack,    run_pairs};
