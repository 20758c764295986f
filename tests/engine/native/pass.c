// A small model with weights made of numbers, run in several ways: prints a hash of all logits and
// KV, or says what differs. Two machines that print the same compute the same.
#include "engine.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { HIDDEN = 128, HEADS = 4, KV_HEADS = 2, DIM = 32, MLP = 192, WORDS = 256, LAYERS = 2, BLOCK = 16 };
enum { TOKENS = 150, BLOCKS = 12 };

static uint32_t state;

static uint32_t next_number(void)
{
    state = state * 1664525u + 1013904223u;
    return state >> 8;
}

static void *filled(size_t size, int kind)
{
    uint8_t *bytes = aligned_alloc(64, (size + 63) / 64 * 64);
    for (size_t i = 0; i + 4 <= size; i += 4) {
        float value = (float)(next_number() % 2000) / 1000.0f - 1.0f;
        uint32_t bits = next_number();
        if (kind == 0)
            ((float *)bytes)[i / 4] = value;
        else
            ((uint32_t *)bytes)[i / 4] = bits;
    }
    return bytes;
}

static Matrix matrix(int format, int rows, int columns)
{
    Matrix made = {.format = format, .panels = rows / LANES, .columns = columns};
    int64_t panel = panel_bytes(format, columns);
    uint8_t *data = filled(panel * made.panels, format == FORMAT_FLOAT32 ? 0 : 1);
    if (format != FORMAT_FLOAT32) // scales (and minima) of about a hundredth
        for (int64_t at = 0; at < panel * made.panels; at += unit_bytes(format))
            for (int i = 0; i < (format == FORMAT_Q4_1 ? 2 : 1) * LANES; i++)
                ((uint16_t *)(data + at))[i] = (uint16_t)(0x2000 + next_number() % 256);
    made.data = data;
    return made;
}

static uint64_t hash(uint64_t value, const void *data, size_t size)
{
    for (size_t i = 0; i < size; i++)
        value = (value ^ ((const uint8_t *)data)[i]) * 0x100000001b3u;
    return value;
}

static uint64_t run(const Model *model, int threads, int chunk)
{
    Place place = {.threads = threads, .own = threads};
    Engine *engine = kvferry_open(model, NULL, &place);
    int64_t block = (int64_t)LAYERS * KV_HEADS * 2 * DIM * BLOCK * (model->kv_type == KV_FLOAT32 ? 4 : 2);
    uint8_t *pool = aligned_alloc(64, (size_t)block * BLOCKS);
    memset(pool, 0, (size_t)block * BLOCKS);
    int32_t tokens[TOKENS], table[BLOCKS];
    float logits[WORDS];
    for (int i = 0; i < TOKENS; i++)
        tokens[i] = i * 37 % WORDS;
    for (int i = 0; i < BLOCKS; i++)
        table[i] = BLOCKS - 1 - i;
    for (int start = 0; start < TOKENS; start += chunk) {
        int count = TOKENS - start < chunk ? TOKENS - start : chunk;
        Span span = {table, start, count, start + count == TOKENS};
        if (kvferry_forward(engine, pool, tokens + start, &span, 1, NULL, logits) != DONE)
            exit(2);
    }
    kvferry_close(engine);
    uint64_t found = hash(hash(0xcbf29ce484222325u, logits, sizeof logits), pool, (size_t)block * BLOCKS);
    free(pool);
    return found;
}

int main(void)
{
    static const int formats[] = {FORMAT_FLOAT32, FORMAT_Q8_0, FORMAT_Q4_0, FORMAT_Q4_1};
    for (int f = 0; f < 4; f++) {
        const int format = formats[f];
        state = 7 + f;
        Layer layers[LAYERS];
        for (int i = 0; i < LAYERS; i++)
            layers[i] = (Layer){
                .attention_norm = filled(4 * HIDDEN, 0),
                .mlp_norm = filled(4 * HIDDEN, 0),
                .query_norm = f == 0 ? filled(4 * DIM, 0) : NULL,
                .key_norm = f == 0 ? filled(4 * DIM, 0) : NULL,
                .query = matrix(format, HEADS * DIM, HIDDEN),
                .key = matrix(format, KV_HEADS * DIM, HIDDEN),
                .value = matrix(format, KV_HEADS * DIM, HIDDEN),
                .output = matrix(format, HIDDEN, HEADS * DIM),
                .gate = matrix(format, MLP, HIDDEN),
                .up = matrix(format, MLP, HIDDEN),
                .down = matrix(format, HIDDEN, MLP),
            };
        float frequencies[DIM / 2];
        for (int i = 0; i < DIM / 2; i++)
            frequencies[i] = 1.0f / (float)(1 + i * i);
        Model model = {
            .layers = LAYERS, .hidden = HIDDEN, .heads = HEADS, .kv_heads = KV_HEADS, .head_dim = DIM,
            .intermediate = MLP, .vocabulary = WORDS, .group = group_of(format), .rope_pairs = DIM / 2,
            .epsilon = 1e-5f, .query_scale = 0.17677669f, .rope_scale = 1.0f, .block_size = BLOCK,
            .kv_type = f % 2 == 0 ? KV_FLOAT32 : KV_FLOAT16, .frequencies = frequencies,
            .final_norm = filled(4 * HIDDEN, 0), .layer = layers, .embedding = matrix(format, WORDS, HIDDEN),
        };
        model.head = model.embedding;
        uint64_t first = run(&model, 1, TOKENS);
        printf("%d %016llx\n", format, (unsigned long long)first);
        if (run(&model, 1, 17) != first || run(&model, 2, 64) != first || run(&model, 3, TOKENS) != first) {
            printf("chunks or threads change a bit\n");
            return 1;
        }
    }
    return 0;
}
