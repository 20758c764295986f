// Kernels over one row of values: norms, quantisation, gates, rope.

static void normalise(const float *x, const float *weight, float epsilon, int columns, float *out)
{
    V squares = v_set(0);
    for (int i = 0; i < columns; i += LANES) {
        V value = v_load(x + i);
        squares = v_fma(value, value, squares);
    }
    V scale = v_set(1.0f / sqrtf(v_sum(squares) / (float)columns + epsilon));
    for (int i = 0; i < columns; i += LANES)
        v_store(out + i, v_mul(v_load(weight + i), v_mul(v_load(x + i), scale)));
}

// Quantises `count` columns from `first` on, whole groups.
static void quantise(Rows *rows, int row, int first, int count)
{
    const int group = rows->group, groups = rows->columns / group;
    const float *x = rows->values + (int64_t)row * rows->columns;
    int8_t *bytes = rows->bytes + (int64_t)row * rows->columns;
    for (int g = first / group; g < (first + count) / group; g++) {
        V most = v_set(0);
        for (int i = g * group; i < (g + 1) * group; i += LANES)
            most = v_max(v_abs(v_load(x + i)), most);
        float largest = v_largest(most), scale = largest / 127.0f;
        V inverse = v_set(largest > 0x1p-100f ? 127.0f / largest : 0.0f);
        int32_t sum = 0;
        for (int i = g * group; i < (g + 1) * group; i += LANES) {
            V whole = v_round(v_mul(v_load(x + i), inverse));
            whole = v_max(v_min(whole, v_set(127)), v_set(-127));
            sum += v_store_i8(bytes + i, whole);
        }
        int64_t at = (int64_t)row * groups + g;
        rows->scales[at] = scale;
        rows->sums[at] = sum;
        rows->offsets[at] = scale * (float)sum;
    }
}

static void add(const float *x, int count, float *out)
{
    int i = 0;
    for (; i + LANES <= count; i += LANES)
        v_store(out + i, v_add(v_load(out + i), v_load(x + i)));
    for (; i < count; i++)
        out[i] += x[i];
}

static void gate(const float *gate, const float *up, int count, float *out)
{
    for (int i = 0; i < count; i += LANES) {
        V x = v_load(gate + i);
        V power = v_exp(v_min(v_sub(v_set(0), x), v_set(88)));
        v_store(out + i, v_mul(v_div(x, v_add(v_set(1), power)), v_load(up + i)));
    }
}

static void rotate(float *head, const float *cosines, const float *sines, int pairs, float scale, int head_dim)
{
    for (int i = 0; i < pairs; i += LANES) {
        V x = v_load(head + i), y = v_load(head + pairs + i);
        V cosine = v_load(cosines + i), sine = v_load(sines + i);
        v_store(head + i, v_fnma(y, sine, v_mul(x, cosine)));
        v_store(head + pairs + i, v_fma(x, sine, v_mul(y, cosine)));
    }
    if (scale != 1.0f)
        for (int i = 0; i < head_dim; i += LANES)
            v_store(head + i, v_mul(v_load(head + i), v_set(scale)));
}
