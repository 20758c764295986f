// See engine.h. A pass goes layer by layer and within a layer phase by phase; each phase is some
// tasks that write to different places and read only what earlier phases wrote. What a task holds
// is chosen by the machine and the batch and changes no bit: rows never meet before attention, and
// there keys are taken in tiles and segments at fixed positions.
#define _GNU_SOURCE
#include "engine.h"
#include "angles.h"
#include "threads.h"

#include <stdlib.h>
#include <string.h>

#define QUERY_ROWS 48    // rows that share a pass over keys: about so many
#define PRODUCT_ROWS 64  // rows of one task of a product
#define TASK_WORK 2000000 // multiplications of one task, about a tenth of a millisecond

// Some queries of one span and one KV head, and the segments of keys that they see.
typedef struct {
    int32_t span, head, first, tokens; // the span's tokens from `first` on
    int32_t segments;
    int32_t partial; // its first partial result, where segments are tasks of their own; or -1
} Tile;

typedef struct {
    int32_t tile, segment; // -1: all of them
} AttentionTask;

struct Engine {
    Model model;
    const Kernels *kernels;
    Threads *threads;
    int capacity; // tokens that the buffers hold
    float *hidden, *change, *query, *key, *value, *cosines, *sines;
    Rows input, attended, gated; // of products: [capacity, hidden], [.., heads * head_dim], [.., intermediate]
    float **scratch;             // of each thread
    int64_t scratch_floats;
    // What one pass is about.
    uint8_t *pool;
    const int32_t *tokens;
    const Span *spans;
    int count, total;
    int32_t *row_span, *row_position, *first_row; // [total], [total], [count]
    Tile *tiles;
    AttentionTask *attention;
    int num_tiles, num_attention, num_partials;
    int tiles_room, attention_room, spans_room;
    float *partials;
    int64_t partials_room;
    int layer, wanted;
    int32_t *wanted_rows;
    float *logits;
};

static int64_t block_bytes(const Model *m)
{
    return (int64_t)m->layers * m->kv_heads * 2 * m->head_dim * m->block_size * (m->kv_type == KV_FLOAT32 ? 4 : 2);
}

static int shared_heads(const Model *m)
{
    return m->heads / m->kv_heads;
}

static int tile_tokens(const Model *m)
{
    int tokens = QUERY_ROWS / shared_heads(m) / 4 * 4;
    return tokens < 1 ? 1 : tokens;
}

// -- memory ------------------------------------------------------------------------------------

// At least `size` bytes for `*place`, whose content is lost. What there is too little of goes first.
static int reserve(void *place, int64_t size)
{
    void **memory = place;
    free(*memory);
    *memory = NULL;
    return posix_memalign(memory, 64, (size_t)(size > 0 ? size : 64)) == 0;
}

static int reserve_rows(Rows *rows, int count, int columns, int group)
{
    int64_t groups = group ? columns / group : 0;
    rows->columns = columns;
    rows->group = group;
    return reserve(&rows->values, (int64_t)count * columns * sizeof(float)) &&
           reserve(&rows->bytes, group ? (int64_t)count * columns : 0) &&
           reserve(&rows->scales, count * groups * sizeof(float)) &&
           reserve(&rows->offsets, count * groups * sizeof(float)) &&
           reserve(&rows->sums, count * groups * sizeof(int32_t));
}

static int reserve_tokens(Engine *e, int tokens)
{
    const Model *m = &e->model;
    if (tokens <= e->capacity)
        return 1;
    e->capacity = 0;
    int64_t floats = (int64_t)tokens * sizeof(float);
    int64_t query = floats * m->heads * m->head_dim, key = floats * m->kv_heads * m->head_dim;
    if (!reserve(&e->hidden, floats * m->hidden) || !reserve(&e->change, floats * m->hidden) ||
        !reserve(&e->query, query) || !reserve(&e->key, key) || !reserve(&e->value, key) ||
        !reserve(&e->cosines, floats * m->rope_pairs) || !reserve(&e->sines, floats * m->rope_pairs) ||
        !reserve(&e->row_span, floats) || !reserve(&e->row_position, floats) || !reserve(&e->wanted_rows, floats) ||
        !reserve_rows(&e->input, tokens, m->hidden, m->group) ||
        !reserve_rows(&e->attended, tokens, m->heads * m->head_dim, m->group) ||
        !reserve_rows(&e->gated, tokens, m->intermediate, m->group))
        return 0;
    e->capacity = tokens;
    return 1;
}

// What a task of attention or of the gates needs: two partial results and what `attend` wants, or
// a piece of gates and of ups.
static int64_t scratch_floats(const Model *m)
{
    int rows = tile_tokens(m) * shared_heads(m);
    int64_t attention = 2 * (int64_t)rows * (m->head_dim + 2) + attend_scratch(rows, m->head_dim);
    int64_t panels = (TASK_WORK / (LANES * (int64_t)m->hidden) + 8) * LANES;
    int64_t gates = 2 * panels * PRODUCT_ROWS;
    return attention > gates ? attention : gates;
}

static Partial partial_at(float *memory, int rows)
{
    return (Partial){.largest = memory, .weight = memory + rows, .values = memory + 2 * rows};
}

// -- tasks over rows ---------------------------------------------------------------------------

typedef void RowStep(Engine *, int row);

typedef struct {
    Engine *engine;
    RowStep *step;
    int rows, chunk;
} RowPhase;

static void row_task(void *context, int task, int thread)
{
    RowPhase *phase = context;
    int end = (task + 1) * phase->chunk < phase->rows ? (task + 1) * phase->chunk : phase->rows;
    (void)thread;
    for (int row = task * phase->chunk; row < end; row++)
        phase->step(phase->engine, row);
}

static void each_row(Engine *e, RowStep *step, int rows)
{
    // A few rows take less time than to wake anyone.
    int tasks = rows <= 4 ? 1 : 4 * threads_count(e->threads);
    RowPhase phase = {e, step, rows, (rows + tasks - 1) / tasks};
    threads_run(e->threads, row_task, &phase, (rows + phase.chunk - 1) / phase.chunk);
}

static void embed_row(Engine *e, int row)
{
    const Model *m = &e->model;
    e->kernels->embed(&m->embedding, e->tokens[row], e->hidden + (int64_t)row * m->hidden);
    angles(e->row_position[row], m->frequencies, m->rope_pairs, m->rope_scale,
           e->cosines + (int64_t)row * m->rope_pairs, e->sines + (int64_t)row * m->rope_pairs);
}

static void quantise_row(const Engine *e, Rows *rows, int row)
{
    if (rows->group)
        e->kernels->quantise(rows, row, 0, rows->columns);
}

static void normalise_row(Engine *e, const float *weight, int from, int to)
{
    const Model *m = &e->model;
    e->kernels->normalise(e->hidden + (int64_t)from * m->hidden, weight, m->epsilon, m->hidden,
                          e->input.values + (int64_t)to * m->hidden);
    quantise_row(e, &e->input, to);
}

static void add_change(Engine *e, int row)
{
    const Model *m = &e->model;
    e->kernels->add(e->change + (int64_t)row * m->hidden, m->hidden, e->hidden + (int64_t)row * m->hidden);
}

static void attention_input(Engine *e, int row)
{
    if (e->layer > 0)
        add_change(e, row);
    normalise_row(e, e->model.layer[e->layer].attention_norm, row, row);
}

static void mlp_input(Engine *e, int row)
{
    add_change(e, row);
    normalise_row(e, e->model.layer[e->layer].mlp_norm, row, row);
}

static void head_input(Engine *e, int wanted)
{
    add_change(e, e->wanted_rows[wanted]);
    normalise_row(e, e->model.final_norm, e->wanted_rows[wanted], wanted);
}

static void attended_row(Engine *e, int row)
{
    quantise_row(e, &e->attended, row);
}

static void rotate_heads(Engine *e, float *heads, int count, const float *norm, int row, float scale)
{
    const Model *m = &e->model;
    const int64_t angle = (int64_t)row * m->rope_pairs;
    for (int head = 0; head < count; head++, heads += m->head_dim) {
        if (norm != NULL)
            e->kernels->normalise(heads, norm, m->epsilon, m->head_dim, heads);
        e->kernels->rotate(heads, e->cosines + angle, e->sines + angle, m->rope_pairs, scale, m->head_dim);
    }
}

static void rotate_and_store(Engine *e, int row)
{
    const Model *m = &e->model;
    const Layer *layer = &m->layer[e->layer];
    const int query = m->heads * m->head_dim, key = m->kv_heads * m->head_dim;
    float *queries = e->query + (int64_t)row * query;
    float *keys = e->key + (int64_t)row * key, *values = e->value + (int64_t)row * key;
    if (layer->query.bias != NULL)
        e->kernels->add(layer->query.bias, query, queries);
    if (layer->key.bias != NULL)
        e->kernels->add(layer->key.bias, key, keys);
    if (layer->value.bias != NULL)
        e->kernels->add(layer->value.bias, key, values);
    rotate_heads(e, queries, m->heads, layer->query_norm, row, m->query_scale);
    rotate_heads(e, keys, m->kv_heads, layer->key_norm, row, 1.0f);
    const int position = e->row_position[row], slot = position % m->block_size;
    const int64_t whole = block_bytes(m), half = whole / m->layers / m->kv_heads / 2;
    uint8_t *block = e->pool + e->spans[e->row_span[row]].blocks[position / m->block_size] * whole;
    for (int head = 0; head < m->kv_heads; head++) {
        uint8_t *place = block + ((int64_t)e->layer * m->kv_heads + head) * 2 * half;
        e->kernels->store_kv(keys + head * m->head_dim, values + head * m->head_dim, m->head_dim, m->block_size, slot,
                             m->kv_type, place, place + half);
    }
}

// -- products ----------------------------------------------------------------------------------

typedef struct {
    Engine *engine;
    const Matrix *matrix[3];
    float *out[3];
    int stride[3], first_task[4]; // of each matrix, and the number of tasks in all
    int matrices, panels, row_chunk, row_chunks; // `panels`: of one task
    const Rows *rows;
    int count; // rows
} ProductPhase;

// Splits `panels` of `columns` with `rows` rows: enough tasks for all threads, but none too short.
static void split(ProductPhase *phase, int panels, int columns, int rows)
{
    int threads = threads_count(phase->engine->threads);
    phase->count = rows;
    phase->row_chunk = rows < PRODUCT_ROWS ? rows : PRODUCT_ROWS;
    phase->row_chunks = (rows + phase->row_chunk - 1) / phase->row_chunk;
    int64_t most = TASK_WORK / ((int64_t)phase->row_chunk * LANES * columns);
    int64_t even = threads == 1 ? panels : (int64_t)panels * phase->row_chunks / (4 * threads);
    int64_t chosen = (even < most || threads == 1) && even > 0 ? even : most;
    phase->panels = chosen < 4 ? 4 : (int)(chosen / 4 * 4);
    if (phase->panels > TASK_WORK / ((int64_t)LANES * columns) + 4)
        phase->panels = (int)(TASK_WORK / ((int64_t)LANES * columns) / 4 * 4 + 4);
    while ((int64_t)((panels + phase->panels - 1) / phase->panels + 3) * phase->row_chunks > MOST_TASKS)
        phase->row_chunk *= 2, phase->row_chunks = (rows + phase->row_chunk - 1) / phase->row_chunk;
}

static void product_task(void *context, int task, int thread)
{
    ProductPhase *phase = context;
    int which = 0;
    (void)thread;
    while (task >= phase->first_task[which + 1])
        which++;
    task -= phase->first_task[which];
    const Matrix *matrix = phase->matrix[which];
    int panel = task / phase->row_chunks * phase->panels, row = task % phase->row_chunks * phase->row_chunk;
    int panels = matrix->panels - panel < phase->panels ? matrix->panels - panel : phase->panels;
    int rows = phase->count - row < phase->row_chunk ? phase->count - row : phase->row_chunk;
    phase->engine->kernels->multiply(matrix, panel, panels, phase->rows, row, rows,
                                     phase->out[which] + (int64_t)row * phase->stride[which] + panel * LANES,
                                     phase->stride[which]);
}

static void run_products(ProductPhase *phase, int rows)
{
    int panels = 0;
    for (int i = 0; i < phase->matrices; i++) {
        panels += phase->matrix[i]->panels;
        phase->stride[i] = phase->matrix[i]->panels * LANES;
    }
    split(phase, panels, phase->rows->columns, rows);
    for (int i = 0; i < phase->matrices; i++) {
        int tasks = (phase->matrix[i]->panels + phase->panels - 1) / phase->panels * phase->row_chunks;
        phase->first_task[i + 1] = phase->first_task[i] + tasks;
    }
    threads_run(phase->engine->threads, product_task, phase, phase->first_task[phase->matrices]);
}

static void product(Engine *e, const Matrix *matrix, const Rows *rows, float *out, int count)
{
    ProductPhase phase = {.engine = e, .matrix = {matrix}, .out = {out}, .matrices = 1, .rows = rows};
    run_products(&phase, count);
}

static void gate_task(void *context, int task, int thread)
{
    ProductPhase *phase = context;
    Engine *e = phase->engine;
    const int all = phase->matrix[0]->panels;
    int panel = task / phase->row_chunks * phase->panels, row = task % phase->row_chunks * phase->row_chunk;
    int panels = all - panel < phase->panels ? all - panel : phase->panels, columns = panels * LANES;
    int end = phase->count - row < phase->row_chunk ? phase->count : row + phase->row_chunk;
    float *gates = e->scratch[thread], *ups = gates + (int64_t)PRODUCT_ROWS * columns;
    for (; row < end; row += PRODUCT_ROWS) {
        int rows = end - row < PRODUCT_ROWS ? end - row : PRODUCT_ROWS;
        e->kernels->multiply(phase->matrix[0], panel, panels, phase->rows, row, rows, gates, columns);
        e->kernels->multiply(phase->matrix[1], panel, panels, phase->rows, row, rows, ups, columns);
        for (int r = 0; r < rows; r++) {
            float *out = e->gated.values + (int64_t)(row + r) * e->gated.columns + panel * LANES;
            e->kernels->gate(gates + r * columns, ups + r * columns, columns, out);
            if (e->gated.group)
                e->kernels->quantise(&e->gated, row + r, panel * LANES, columns);
        }
    }
}

// Gate and up products and what becomes of both, quantised: a task has whole groups of columns.
static void gates(Engine *e, const Layer *layer)
{
    ProductPhase phase = {.engine = e, .matrix = {&layer->gate, &layer->up}, .matrices = 2, .rows = &e->input};
    int panels = layer->gate.panels;
    split(&phase, panels, 2 * e->model.hidden, e->total);
    threads_run(e->threads, gate_task, &phase, (panels + phase.panels - 1) / phase.panels * phase.row_chunks);
}

// -- attention ---------------------------------------------------------------------------------

static int segments_before(int position)
{
    return (position + SEGMENT_KEYS - 1) / SEGMENT_KEYS;
}

static Attention attention_of(const Engine *e, const Tile *tile, float *scratch)
{
    const Model *m = &e->model;
    const Span *span = &e->spans[tile->span];
    const int64_t whole = block_bytes(m), half = whole / m->layers / m->kv_heads / 2;
    const int64_t place = ((int64_t)e->layer * m->kv_heads + tile->head) * 2 * half;
    const int64_t row = e->first_row[tile->span] + tile->first;
    return (Attention){
        .query = e->query + (row * m->heads + tile->head * shared_heads(m)) * m->head_dim,
        .query_stride = (int64_t)m->heads * m->head_dim,
        .heads = shared_heads(m),
        .head_dim = m->head_dim,
        .tokens = tile->tokens,
        .start = span->start + tile->first,
        .pool = e->pool,
        .blocks = span->blocks,
        .block_bytes = whole,
        .keys_offset = place,
        .values_offset = place + half,
        .block_size = m->block_size,
        .kv_type = m->kv_type,
        .scratch = scratch,
    };
}

static int tile_rows(const Engine *e, const Tile *tile)
{
    return tile->tokens * shared_heads(&e->model);
}

static int64_t partial_floats(const Engine *e, int rows)
{
    return (int64_t)rows * (e->model.head_dim + 2);
}

static Partial partial_of(const Engine *e, const Tile *tile, int segment)
{
    int rows = tile_rows(e, tile);
    int64_t most = partial_floats(e, tile_tokens(&e->model) * shared_heads(&e->model));
    return partial_at(e->partials + (tile->partial + segment) * most, rows);
}

static void write_attended(Engine *e, const Tile *tile, const Partial *total)
{
    const Model *m = &e->model;
    const int shared = shared_heads(m);
    const int64_t first = e->first_row[tile->span] + tile->first;
    for (int row = 0; row < tile_rows(e, tile); row++) {
        int64_t at = (first + row / shared) * m->heads + tile->head * shared + row % shared;
        e->kernels->divide(total, row, m->head_dim, e->attended.values + at * m->head_dim);
    }
}

static void attention_task(void *context, int task, int thread)
{
    Engine *e = context;
    const AttentionTask *own = &e->attention[task];
    const Tile *tile = &e->tiles[own->tile];
    const int rows = tile_rows(e, tile);
    float *memory = e->scratch[thread];
    Attention attention = attention_of(e, tile, memory + 2 * partial_floats(e, rows));
    if (own->segment >= 0) {
        Partial part = partial_of(e, tile, own->segment);
        int first = own->segment * SEGMENT_KEYS;
        e->kernels->attend(&attention, first, first + SEGMENT_KEYS, &part);
        return;
    }
    Partial total = partial_at(memory, rows), part = partial_at(memory + partial_floats(e, rows), rows);
    for (int segment = 0; segment < tile->segments; segment++) {
        int first = segment * SEGMENT_KEYS;
        e->kernels->attend(&attention, first, first + SEGMENT_KEYS, segment == 0 ? &total : &part);
        if (segment > 0)
            e->kernels->join(&total, &part, rows, e->model.head_dim);
    }
    write_attended(e, tile, &total);
}

static void join_task(void *context, int task, int thread)
{
    Engine *e = context;
    const Tile *tile = &e->tiles[task];
    (void)thread;
    if (tile->partial < 0)
        return;
    Partial total = partial_of(e, tile, 0);
    for (int segment = 1; segment < tile->segments; segment++) {
        Partial part = partial_of(e, tile, segment);
        e->kernels->join(&total, &part, tile_rows(e, tile), e->model.head_dim);
    }
    write_attended(e, tile, &total);
}

static void attend_all(Engine *e)
{
    threads_run(e->threads, attention_task, e, e->num_attention);
    if (e->num_partials > 0)
        threads_run(e->threads, join_task, e, e->num_tiles);
}

// -- the plan of a pass ------------------------------------------------------------------------

static int plan_rows(Engine *e)
{
    int row = 0;
    e->wanted = 0;
    for (int s = 0; s < e->count; s++) {
        e->first_row[s] = row;
        for (int t = 0; t < e->spans[s].tokens; t++, row++) {
            e->row_span[row] = s;
            e->row_position[row] = e->spans[s].start + t;
        }
        if (e->spans[s].wants_logits)
            e->wanted_rows[e->wanted++] = row - 1;
    }
    return 1;
}

// Counts, or where there is room for them writes, the tiles and their tasks. Long ones come first.
static void lay_tiles(Engine *e, int splits, int write)
{
    const Model *m = &e->model;
    const int most = tile_tokens(m);
    e->num_tiles = e->num_attention = e->num_partials = 0;
    for (int s = 0; s < e->count; s++) {
        const Span *span = &e->spans[s];
        for (int first = (span->tokens - 1) / most * most; first >= 0; first -= most) {
            for (int head = 0; head < m->kv_heads; head++) {
                int tokens = span->tokens - first < most ? span->tokens - first : most;
                int segments = segments_before(span->start + first + tokens);
                int apart = splits && segments > 1;
                if (write)
                    e->tiles[e->num_tiles] = (Tile){s, head, first, tokens, segments, apart ? e->num_partials : -1};
                for (int segment = 0; segment < (apart ? segments : 1); segment++, e->num_attention++)
                    if (write)
                        e->attention[e->num_attention] = (AttentionTask){e->num_tiles, apart ? segment : -1};
                e->num_partials += apart ? segments : 0;
                e->num_tiles++;
            }
        }
    }
}

static int plan_attention(Engine *e)
{
    lay_tiles(e, 0, 0);
    const int splits = threads_count(e->threads) > 1 && e->num_tiles < 8 * threads_count(e->threads);
    lay_tiles(e, splits, 0);
    if (e->num_attention > MOST_TASKS)
        return 0;
    if (e->num_tiles > e->tiles_room) {
        e->tiles_room = 0;
        if (!reserve(&e->tiles, e->num_tiles * sizeof(Tile)))
            return 0;
        e->tiles_room = e->num_tiles;
    }
    if (e->num_attention > e->attention_room) {
        e->attention_room = 0;
        if (!reserve(&e->attention, e->num_attention * sizeof(AttentionTask)))
            return 0;
        e->attention_room = e->num_attention;
    }
    int64_t floats = e->num_partials * partial_floats(e, tile_tokens(&e->model) * shared_heads(&e->model));
    if (floats > e->partials_room) {
        e->partials_room = 0;
        if (!reserve(&e->partials, floats * sizeof(float)))
            return 0;
        e->partials_room = floats;
    }
    lay_tiles(e, splits, 1);
    return 1;
}

static int plan(Engine *e)
{
    e->total = 0;
    for (int s = 0; s < e->count; s++)
        e->total += e->spans[s].tokens;
    if (e->count > e->spans_room) {
        e->spans_room = 0;
        if (!reserve(&e->first_row, e->count * sizeof(int32_t)))
            return 0;
        e->spans_room = e->count;
    }
    return reserve_tokens(e, e->total) && plan_rows(e) && plan_attention(e);
}

// -- the interface -----------------------------------------------------------------------------

static void run_layer(Engine *e)
{
    const Layer *layer = &e->model.layer[e->layer];
    ProductPhase qkv = {
        .engine = e,
        .matrix = {&layer->query, &layer->key, &layer->value},
        .out = {e->query, e->key, e->value},
        .matrices = 3,
        .rows = &e->input,
    };
    each_row(e, attention_input, e->total);
    run_products(&qkv, e->total);
    each_row(e, rotate_and_store, e->total);
    attend_all(e);
    if (e->model.group)
        each_row(e, attended_row, e->total);
    product(e, &layer->output, &e->attended, e->change, e->total);
    each_row(e, mlp_input, e->total);
    gates(e, layer);
    product(e, &layer->down, &e->gated, e->change, e->total);
}

int kvferry_forward(Engine *e, uint8_t *pool, const int32_t *tokens, const Span *spans, int count,
                    BetweenLayers *between_layers, float *logits)
{
    e->pool = pool;
    e->tokens = tokens;
    e->spans = spans;
    e->count = count;
    if (!plan(e))
        return NO_MEMORY;
    each_row(e, embed_row, e->total);
    for (e->layer = 0; e->layer < e->model.layers; e->layer++) {
        run_layer(e);
        if (between_layers != NULL && between_layers() != 0)
            return STOPPED;
    }
    if (e->wanted > 0) {
        each_row(e, head_input, e->wanted);
        product(e, &e->model.head, &e->input, logits, e->wanted);
    }
    return DONE;
}

static void close_rows(Rows *rows)
{
    free(rows->values);
    free(rows->bytes);
    free(rows->scales);
    free(rows->offsets);
    free(rows->sums);
}

void kvferry_close(Engine *e)
{
    if (e == NULL)
        return;
    void *all[] = {e->hidden,     e->change,    e->query,        e->key,         e->value, e->cosines, e->sines,
                   e->row_span,   e->first_row, e->row_position, e->wanted_rows, e->tiles, e->attention, e->partials};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]);
    close_rows(&e->input);
    close_rows(&e->attended);
    close_rows(&e->gated);
    if (e->scratch != NULL)
        for (int i = 0; i < threads_count(e->threads); i++)
            free(e->scratch[i]);
    free(e->scratch);
    threads_close(e->threads);
    free(e);
}

Engine *kvferry_open(const Model *model, const char *isa, const Place *place)
{
    const Kernels *kernels = kernels_called(isa);
    Engine *e = calloc(1, sizeof *e);
    if (e == NULL || kernels == NULL) {
        free(e);
        return NULL;
    }
    e->model = *model;
    e->kernels = kernels;
    e->threads = threads_open(place);
    e->scratch = e->threads == NULL ? NULL : calloc(place->threads, sizeof *e->scratch);
    int ready = e->scratch != NULL;
    for (int i = 0; ready && i < place->threads; i++)
        ready = reserve(&e->scratch[i], scratch_floats(model) * sizeof(float));
    if (!ready) {
        kvferry_close(e);
        return NULL;
    }
    return e;
}

int kvferry_interface(void)
{
    return INTERFACE;
}

const char *kvferry_isa(const char *isa)
{
    const Kernels *kernels = kernels_called(isa);
    return kernels == NULL ? NULL : kernels->name;
}
