// Attention of some rows over a range of keys, as they lie in the pool.
//
// Keys are taken in tiles of 64 at fixed positions, so that a row's result depends on its position
// alone. Within a block keys lie transposed, [head_dim, block_size], values [block_size, head_dim]:
// a lane is a key while scores are computed, and a dimension while values are summed. The running
// maximum and weight are those of Milakov and Gimelshein, "Online normalizer calculation for
// softmax" (2018). Few rows read the pool itself; many first make floats of a tile, once.

#define SUB 16 // keys of a vector
#define DIRECT_ROWS 8

INLINE V load_kv(int type, const uint8_t *p, int64_t at)
{
    if (type == KV_FLOAT32)
        return v_load((const float *)p + at);
    if (type == KV_BFLOAT16)
        return v_load_bf16((const uint16_t *)p + at);
    return v_load_f16((const uint16_t *)p + at);
}

INLINE int kv_bytes(int type)
{
    return type == KV_FLOAT32 ? 4 : 2;
}

// A tile of keys and values: for each 16 of them where they begin.
typedef struct {
    const uint8_t *keys[TILE_KEYS / SUB], *values[TILE_KEYS / SUB];
    int64_t key_stride; // values from one dimension to the next
} Tile;

static const uint8_t *block_at(const Attention *a, int position)
{
    return a->pool + a->blocks[position / a->block_size] * a->block_bytes;
}

SPECIALISED Tile tile_in_pool(const Attention *a, int type, int first, int last)
{
    Tile tile = {.key_stride = a->block_size};
    for (int sub = 0; sub < TILE_KEYS / SUB; sub++) {
        // Behind the last key there may be no block: whatever is read there is not used.
        int position = first + sub * SUB < last ? first + sub * SUB : first;
        const uint8_t *block = block_at(a, position);
        int slot = position % a->block_size;
        tile.keys[sub] = block + a->keys_offset + slot * kv_bytes(type);
        tile.values[sub] = block + a->values_offset + (int64_t)slot * a->head_dim * kv_bytes(type);
    }
    return tile;
}

INLINE float load_one(int type, const uint8_t *p, int64_t at)
{
    float lanes[LANES];
    uint8_t padded[4 * LANES] = {0};
    memcpy(padded, p + at * kv_bytes(type), kv_bytes(type));
    v_store(lanes, load_kv(type, padded, 0));
    return lanes[0];
}

// Makes floats of the tile's keys and values: keys [head_dim, 64], values [64, head_dim].
SPECIALISED Tile tile_in_scratch(const Attention *a, int type, int first, int last)
{
    const int dim = a->head_dim;
    float *keys = a->scratch, *values = a->scratch + TILE_KEYS * dim;
    Tile tile = {.key_stride = TILE_KEYS};
    for (int sub = 0; sub < TILE_KEYS / SUB; sub++) {
        tile.keys[sub] = (const uint8_t *)(keys + sub * SUB);
        tile.values[sub] = (const uint8_t *)(values + (int64_t)sub * SUB * dim);
    }
    const int step = a->block_size < SUB ? a->block_size : SUB;
    for (int key = first; key < last; key += step) {
        const uint8_t *block = block_at(a, key);
        const int slot = key % a->block_size, at = key - first;
        if (step == SUB) {
            for (int d = 0; d < dim; d++)
                v_store(keys + d * TILE_KEYS + at, load_kv(type, block + a->keys_offset, (int64_t)d * a->block_size + slot));
        } else {
            for (int d = 0; d < dim; d++)
                for (int i = 0; i < step; i++)
                    keys[d * TILE_KEYS + at + i] =
                        load_one(type, block + a->keys_offset, (int64_t)d * a->block_size + slot + i);
        }
        for (int i = 0; i < step; i++)
            for (int d = 0; d < dim; d += LANES)
                v_store(values + (int64_t)(at + i) * dim + d,
                        load_kv(type, block + a->values_offset, (int64_t)(slot + i) * dim + d));
    }
    return tile;
}

// The scores of `count` rows with the 64 keys of a tile.
SPECIALISED void score(int type, int count, const float *const *query, const Tile *tile, int dim, float *scores)
{
    const int vectors = VECTORS(count);
    for (int first = 0; first < TILE_KEYS / SUB; first += vectors) {
        V sums[MOST_ROWS][TILE_KEYS / SUB];
        UNROLL for (int r = 0; r < count; r++)
            UNROLL for (int v = 0; v < vectors; v++) sums[r][v] = v_set(0);
        for (int d = 0; d < dim; d++) {
            V keys[TILE_KEYS / SUB];
            UNROLL for (int v = 0; v < vectors; v++)
                keys[v] = load_kv(type, tile->keys[first + v], d * tile->key_stride);
            UNROLL for (int r = 0; r < count; r++) {
                V value = v_set(query[r][d]);
                UNROLL for (int v = 0; v < vectors; v++) sums[r][v] = v_fma(keys[v], value, sums[r][v]);
            }
        }
        UNROLL for (int r = 0; r < count; r++)
            UNROLL for (int v = 0; v < vectors; v++)
                v_store(scores + r * TILE_KEYS + (first + v) * SUB, sums[r][v]);
    }
}

// Makes weights of a row's scores, of which the first `keys` count; returns what earlier sums are
// to be multiplied with.
SPECIALISED float weigh(float *scores, int keys, float *largest, float *weight)
{
    V rows[TILE_KEYS / SUB];
    V most = v_set(-INFINITY), sum = v_set(0);
    UNROLL for (int sub = 0; sub < TILE_KEYS / SUB; sub++) {
        int valid = keys - sub * SUB;
        rows[sub] = v_first(valid < 0 ? 0 : valid > SUB ? SUB : valid, v_load(scores + sub * SUB), v_set(-INFINITY));
        most = v_max(rows[sub], most);
    }
    float before = *largest, now = v_largest(most);
    now = now > before ? now : before;
    UNROLL for (int sub = 0; sub < TILE_KEYS / SUB; sub++) {
        rows[sub] = v_exp(v_sub(rows[sub], v_set(now)));
        v_store(scores + sub * SUB, rows[sub]);
        sum = v_add(sum, rows[sub]);
    }
    float scale = exp_of(before - now);
    *largest = now;
    *weight = fmaf(*weight, scale, v_sum(sum));
    return scale;
}

// values = values * scale + the weighted values of the first `keys` of a tile, `vectors` at once.
SPECIALISED void sum_values(int type, int count, int vectors, const Tile *tile, int keys, const float *weights,
                       const float *scales, int dim, int first, float *const *values)
{
    V sums[MOST_ROWS][4];
    UNROLL for (int r = 0; r < count; r++)
        UNROLL for (int v = 0; v < vectors; v++)
            sums[r][v] = v_mul(v_load(values[r] + first + v * LANES), v_set(scales[r]));
    for (int sub = 0; sub * SUB < keys; sub++) {
        const uint8_t *at = tile->values[sub] + first * kv_bytes(type);
        const int count_here = keys - sub * SUB < SUB ? keys - sub * SUB : SUB;
        for (int i = 0; i < count_here; i++, at += dim * kv_bytes(type), weights++) {
            V loaded[4];
            UNROLL for (int v = 0; v < vectors; v++) loaded[v] = load_kv(type, at, v * LANES);
            UNROLL for (int r = 0; r < count; r++) {
                V weight = v_set(weights[r * TILE_KEYS]);
                UNROLL for (int v = 0; v < vectors; v++) sums[r][v] = v_fma(loaded[v], weight, sums[r][v]);
            }
        }
    }
    UNROLL for (int r = 0; r < count; r++)
        UNROLL for (int v = 0; v < vectors; v++) v_store(values[r] + first + v * LANES, sums[r][v]);
}

SPECIALISED void score_rows(int type, int count, const Attention *a, const Tile *tile, int row, float *scores)
{
    const float *query[MOST_ROWS];
    UNROLL for (int r = 0; r < count; r++)
        query[r] = a->query + (row + r) / a->heads * a->query_stride + (row + r) % a->heads * a->head_dim;
    score(type, count, query, tile, a->head_dim, scores + row * TILE_KEYS);
}

SPECIALISED void sum_rows(int type, int count, const Attention *a, const Tile *tile, int row, int keys,
                          const float *scores, const float *scales, Partial *out)
{
    float *values[MOST_ROWS];
    UNROLL for (int r = 0; r < count; r++) values[r] = out->values + (int64_t)(row + r) * a->head_dim;
    const float *weights = scores + row * TILE_KEYS;
    int d = 0;
    for (; d + VECTORS(count) * LANES <= a->head_dim; d += VECTORS(count) * LANES)
        sum_values(type, count, VECTORS(count), tile, keys, weights, scales + row, a->head_dim, d, values);
    for (; d < a->head_dim; d += LANES)
        sum_values(type, count, 1, tile, keys, weights, scales + row, a->head_dim, d, values);
}

// How many keys of [first, last) a row sees.
INLINE int keys_of(const Attention *a, int row, int first, int last)
{
    int end = a->start + row / a->heads + 1;
    int keys = (end < last ? end : last) - first;
    return keys < 0 ? 0 : keys;
}

// All rows pass by the keys, and then by the values: each of them stays in the nearest cache.
SPECIALISED void attend_tile(int type, const Attention *a, const Tile *tile, int rows, int first, int last,
                             Partial *out, float *scores, float *scales)
{
    int row = 0;
    for (; row + MOST_ROWS <= rows; row += MOST_ROWS)
        score_rows(type, MOST_ROWS, a, tile, row, scores);
    for (; row + 2 <= rows; row += 2)
        score_rows(type, 2, a, tile, row, scores);
    if (row < rows)
        score_rows(type, 1, a, tile, row, scores);
    for (row = 0; row < rows; row++) {
        int keys = keys_of(a, row, first, last);
        float *own = scores + row * TILE_KEYS;
        if (keys > 0) {
            scales[row] = weigh(own, keys, out->largest + row, out->weight + row);
        } else {
            memset(own, 0, TILE_KEYS * sizeof *own);
            scales[row] = 1.0f;
        }
    }
    // What is behind a row's last key has weight 0: rows together take the keys of the last of them.
    for (row = 0; row + MOST_ROWS <= rows; row += MOST_ROWS)
        sum_rows(type, MOST_ROWS, a, tile, row, keys_of(a, row + MOST_ROWS - 1, first, last), scores, scales, out);
    for (; row + 2 <= rows; row += 2)
        sum_rows(type, 2, a, tile, row, keys_of(a, row + 1, first, last), scores, scales, out);
    if (row < rows)
        sum_rows(type, 1, a, tile, row, keys_of(a, row, first, last), scores, scales, out);
}

INLINE void prefetch(const Attention *a, int type, int first, int last)
{
    int64_t bytes = (int64_t)a->head_dim * a->block_size * kv_bytes(type);
    for (int key = first; key < last; key += a->block_size) {
        const uint8_t *block = block_at(a, key);
        for (int64_t at = 0; at < bytes; at += 64) {
            __builtin_prefetch(block + a->keys_offset + at);
            __builtin_prefetch(block + a->values_offset + at);
        }
    }
}

SPECIALISED void attend_of_type(int type, const Attention *a, int first, int last, Partial *out)
{
    const int rows = a->tokens * a->heads, direct = rows <= DIRECT_ROWS && a->block_size >= SUB;
    float *scores = a->scratch + 2 * TILE_KEYS * a->head_dim, *scales = scores + rows * TILE_KEYS;
    for (int r = 0; r < rows; r++) {
        out->largest[r] = -INFINITY;
        out->weight[r] = 0;
        memset(out->values + (int64_t)r * a->head_dim, 0, a->head_dim * sizeof(float));
    }
    const int end = a->start + a->tokens < last ? a->start + a->tokens : last;
    for (int key = first; key < end; key += TILE_KEYS) {
        const int tile_end = key + TILE_KEYS < end ? key + TILE_KEYS : end;
        if (direct) {
            prefetch(a, type, tile_end, tile_end + TILE_KEYS < end ? tile_end + TILE_KEYS : end);
            Tile tile = tile_in_pool(a, type, key, tile_end);
            attend_tile(type, a, &tile, rows, key, tile_end, out, scores, scales);
        } else {
            Tile tile = tile_in_scratch(a, type, key, tile_end);
            attend_tile(KV_FLOAT32, a, &tile, rows, key, tile_end, out, scores, scales);
        }
    }
}

static void attend(const Attention *a, int first, int last, Partial *out)
{
    if (a->kv_type == KV_FLOAT32)
        attend_of_type(KV_FLOAT32, a, first, last, out);
    else if (a->kv_type == KV_BFLOAT16)
        attend_of_type(KV_BFLOAT16, a, first, last, out);
    else
        attend_of_type(KV_FLOAT16, a, first, last, out);
}

static void join(Partial *total, const Partial *part, int rows, int head_dim)
{
    for (int r = 0; r < rows; r++) {
        if (part->weight[r] == 0)
            continue;
        float most = total->largest[r] > part->largest[r] ? total->largest[r] : part->largest[r];
        float old = exp_of(total->largest[r] - most), new = exp_of(part->largest[r] - most);
        total->weight[r] = fmaf(total->weight[r], old, part->weight[r] * new);
        total->largest[r] = most;
        float *values = total->values + (int64_t)r * head_dim;
        const float *more = part->values + (int64_t)r * head_dim;
        for (int d = 0; d < head_dim; d += LANES)
            v_store(values + d, v_fma(v_load(values + d), v_set(old), v_mul(v_load(more + d), v_set(new))));
    }
}

static void divide(const Partial *total, int row, int head_dim, float *out)
{
    const float *values = total->values + (int64_t)row * head_dim;
    for (int d = 0; d < head_dim; d += LANES)
        v_store(out + d, v_div(v_load(values + d), v_set(total->weight[row])));
}

// Beyond the largest float16 a value would become infinite, and infinity times a weight of 0 no
// number: then a row would depend on its neighbours.
static V within(int kv_type, V x)
{
    return kv_type == KV_FLOAT16 ? v_max(v_min(x, v_set(65504.0f)), v_set(-65504.0f)) : x;
}

static void store_kv(const float *key, const float *value, int head_dim, int block_size, int slot, int kv_type,
                     uint8_t *keys, uint8_t *values)
{
    const int bytes = kv_bytes(kv_type);
    for (int d = 0; d < head_dim; d += LANES) {
        V parts[2] = {within(kv_type, v_load(key + d)), within(kv_type, v_load(value + d))};
        float wide[2][LANES];
        uint16_t narrow[2][LANES];
        for (int i = 0; i < 2; i++) {
            v_store(wide[i], parts[i]);
            if (kv_type == KV_BFLOAT16)
                v_store_bf16(narrow[i], parts[i]);
            else if (kv_type == KV_FLOAT16)
                v_store_f16(narrow[i], parts[i]);
        }
        const uint8_t *made[2] = {kv_type == KV_FLOAT32 ? (const uint8_t *)wide[0] : (const uint8_t *)narrow[0],
                                  kv_type == KV_FLOAT32 ? (const uint8_t *)wide[1] : (const uint8_t *)narrow[1]};
        for (int lane = 0; lane < LANES; lane++)
            memcpy(keys + ((int64_t)(d + lane) * block_size + slot) * bytes, made[0] + lane * bytes, bytes);
        memcpy(values + ((int64_t)slot * head_dim + d) * bytes, made[1], LANES * bytes);
    }
}
