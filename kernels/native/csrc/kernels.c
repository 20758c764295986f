// Compiled once for each instruction set, each time under the name that KERNELS says.
#include "simd.h"

#include "rows.h"
#include "product.h"
#include "attention.h"

#define TEXT_OF(name) #name
#define NAME_OF(name) TEXT_OF(name)
#define TABLE_OF(name) kernels_##name
#define TABLE(name) TABLE_OF(name)

const Kernels TABLE(KERNELS) = {
    .name = NAME_OF(KERNELS),
    .normalise = normalise,
    .quantise = quantise,
    .multiply = multiply,
    .embed = embed,
    .add = add,
    .gate = gate,
    .rotate = rotate,
    .store_kv = store_kv,
    .attend = attend,
    .join = join,
    .divide = divide,
};
