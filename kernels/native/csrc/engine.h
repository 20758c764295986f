// The C interface of the native engine: a model of the Llama kind over a paged pool of KV blocks.
//
// Integers and pointers only, so that any language calls it. Whoever calls has checked what it
// passes: sizes, token ids, block tables. One engine is used by one thread at a time.
#ifndef KVFERRY_ENGINE_H
#define KVFERRY_ENGINE_H

#include "kernels.h"

#define INTERFACE 3 // raised whenever anything here changes

typedef struct {
    const float *attention_norm, *mlp_norm; // [hidden]
    const float *query_norm, *key_norm;     // [head_dim] or null
    Matrix query, key, value, output, gate, up, down;
} Layer;

typedef struct {
    int32_t layers, hidden, heads, kv_heads, head_dim, intermediate, vocabulary;
    int32_t group;      // columns of quantised activations that share a scale: 32; 0: none are
    int32_t rope_pairs; // a multiple of 16
    float epsilon;
    float query_scale; // what scores are multiplied with
    float rope_scale;  // what cosines and sines are multiplied with
    int32_t block_size, kv_type;
    const float *frequencies; // [rope_pairs]
    const float *final_norm;   // [hidden]
    const Layer *layer;        // [layers]
    Matrix embedding, head;
} Model;

// Consecutive new tokens of one sequence.
typedef struct {
    const int32_t *blocks; // of the sequence, from its first position on
    int32_t start, tokens, wants_logits;
} Span;

// Where an engine computes. Its first thread is the one that calls.
typedef struct {
    int32_t threads, own;  // threads in all, and those that always compute: the others do while
                           // nobody else is busy
    const int32_t *cores;  // of each thread; or null: anywhere
    const volatile uint32_t *busy; // a line for each process that computes on this machine: not 0
                                   // while it does
    int32_t lines, line;   // how many there are, and which is its own
} Place;

#define BUSY_STRIDE 16 // words from one line to the next

typedef struct Engine Engine;
typedef int BetweenLayers(void);

enum { DONE, STOPPED, NO_MEMORY };

int kvferry_interface(void);
// The fastest table of kernels that this CPU has, or the one called `isa`; null if it has it not.
const char *kvferry_isa(const char *isa);
// What `model` and `place` point to must outlive the engine. Null if there is no memory, or no such
// isa.
Engine *kvferry_open(const Model *model, const char *isa, const Place *place);
void kvferry_close(Engine *);
// One pass over all tokens, span by span. Writes one row of `vocabulary` logits for each span that
// wants them. `between_layers` ends the pass if it returns anything but 0: STOPPED.
int kvferry_forward(Engine *, uint8_t *pool, const int32_t *tokens, const Span *spans, int count,
                    BetweenLayers *between_layers, float *logits);

#endif
