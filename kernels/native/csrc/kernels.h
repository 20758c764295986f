// The kernels of one instruction set, as a table of functions, and the form of what they work on.
//
// Every kernel computes each of its rows alone and in an order that depends on nothing but the
// row's own length: that is why results do not depend on what else is in a batch.
#ifndef KVFERRY_KERNELS_H
#define KVFERRY_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#define LANES 16
#define TILE_PANELS 4 // panels of a product's tile
#define TILE_KEYS 64       // keys that attention weighs at once, at fixed absolute positions
#define SEGMENT_KEYS 1024  // keys that one task may take, at fixed absolute positions

// How weights lie in memory. A panel has 16 rows; panels follow each other, in a number that is a
// multiple of 4: what there is too much of is zero. Within a panel, column
// by column: the 16 values of one column (floats); or for every group of columns first its 16
// scales, then minima where there are any, then for every 4 columns 16 times 4 bytes. Where a byte
// has two weights, its low half belongs to the first half of the group's columns.
enum {
    FORMAT_FLOAT32,
    FORMAT_BFLOAT16,
    // Groups of 32, scales in float16.
    FORMAT_Q8_0, // weights from -128 to 127, plus 128
    FORMAT_Q4_0, // weights from -8 to 7, plus 8
    FORMAT_Q4_1, // minima in float16; weights from 0 to 15
};

enum { KV_FLOAT32, KV_BFLOAT16, KV_FLOAT16 };

typedef struct {
    const uint8_t *data;
    const float *bias; // one for each row, or null
    int32_t format, panels, columns;
} Matrix;

// The rows that a matrix is multiplied with, as floats and quantised in groups of `group` columns.
typedef struct {
    float *values;  // [rows, columns]
    int8_t *bytes;  // [rows, columns]
    float *scales;  // [rows, columns / group]
    float *offsets; // [rows, columns / group]: the scale times the sum of the bytes
    int32_t *sums;  // [rows, columns / group]: the sum of the bytes
    int32_t columns, group;
} Rows;

// What attention reads for consecutive queries of one sequence and the heads that share keys.
typedef struct {
    const float *query;   // of the first token's first head of those; scaled
    int64_t query_stride; // floats from token to token
    int32_t heads, head_dim, tokens, start; // `start`: the position of the first token
    const uint8_t *pool;
    const int32_t *blocks; // of the sequence
    int64_t block_bytes, keys_offset, values_offset; // bytes, the last two within a block
    int32_t block_size, kv_type;
    float *scratch; // see `attend_scratch`
} Attention;

// A weighted sum of values before it is divided, one for each row: token by token, head by head.
typedef struct {
    float *largest, *weight; // [rows]
    float *values;           // [rows, head_dim]
} Partial;

typedef struct {
    const char *name;
    // out = x / rms(x) * weight, for each of `count` rows of `columns` in place or not.
    void (*normalise)(const float *x, const float *weight, float epsilon, int columns, float *out);
    // `count` columns from `first` on, whole groups.
    void (*quantise)(Rows *rows, int row, int first, int count);
    // out[row][16 * panel ...] for `count` panels from `panel` on, whole tiles, and `rows` rows from
    // `row` on; `out` begins at the first of each, with `stride` floats from row to row.
    void (*multiply)(const Matrix *, int panel, int count, const Rows *, int row, int rows, float *out,
                     int64_t stride);
    void (*embed)(const Matrix *, int row, float *out);
    void (*add)(const float *x, int count, float *out);
    // out = silu(gate) * up
    void (*gate)(const float *gate, const float *up, int count, float *out);
    // Rotates the two halves of the first `2 * pairs` values of a head.
    void (*rotate)(float *head, const float *cosines, const float *sines, int pairs, float scale,
                   int head_dim);
    void (*store_kv)(const float *key, const float *value, int head_dim, int block_size, int slot,
                     int kv_type, uint8_t *keys, uint8_t *values);
    // The keys [first, min(last, own position + 1)) of each row. A row that has none of them gets
    // weight 0.
    void (*attend)(const Attention *, int first, int last, Partial *);
    // total = total and part, as if their keys had been weighed together, `rows` rows.
    void (*join)(Partial *total, const Partial *part, int rows, int head_dim);
    void (*divide)(const Partial *total, int row, int head_dim, float *out);
} Kernels;

// Columns that share a scale; 0 for floats.
static inline int group_of(int format)
{
    return format >= FORMAT_Q8_0 ? 32 : 0;
}

// Bytes of one column of a panel, or of a group of columns of it.
static inline int unit_bytes(int format)
{
    switch (format) {
    case FORMAT_FLOAT32:
        return 4 * LANES;
    case FORMAT_BFLOAT16:
        return 2 * LANES;
    case FORMAT_Q8_0:
        return (2 + 32) * LANES;
    case FORMAT_Q4_0:
        return (2 + 16) * LANES;
    default:
        return (4 + 16) * LANES;
    }
}

static inline int64_t panel_bytes(int format, int columns)
{
    int group = group_of(format);
    return (int64_t)unit_bytes(format) * (group ? columns / group : columns);
}

// Floats of scratch that one call of `attend` needs for so many rows.
static inline int64_t attend_scratch(int rows, int head_dim)
{
    return (int64_t)TILE_KEYS * (2 * head_dim + rows) + rows;
}

extern const Kernels kernels_avx512, kernels_avx2, kernels_portable;

// The fastest that this CPU runs, or the one called `isa`; null if it runs it not.
const Kernels *kernels_called(const char *isa);

#endif
