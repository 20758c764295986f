// Products of packed weights with rows, and single rows of the weights.
//
// A tile is some rows times some panels. Its sums lie in registers, one lane for each row of the
// weights: no lane is ever added to another, so the order of a sum is that of the columns.

#define TILE_ROWS 4

INLINE V load_weights(int format, const uint8_t *p)
{
    return format == FORMAT_FLOAT32 ? v_load((const float *)p) : v_load_bf16((const uint16_t *)p);
}

SPECIALISED void tile_of_floats(int format, int rows, int panels, const uint8_t *weights, int64_t panel, const Rows *x,
                           int row, float *out, int64_t stride)
{
    V sums[TILE_ROWS][TILE_PANELS];
    const float *values[TILE_ROWS];
    UNROLL for (int r = 0; r < rows; r++) {
        values[r] = x->values + (int64_t)(row + r) * x->columns;
        UNROLL for (int p = 0; p < panels; p++) sums[r][p] = v_set(0);
    }
    for (int column = 0; column < x->columns; column++, weights += unit_bytes(format)) {
        V loaded[TILE_PANELS];
        UNROLL for (int p = 0; p < panels; p++) loaded[p] = load_weights(format, weights + p * panel);
        UNROLL for (int r = 0; r < rows; r++) {
            V value = v_set(values[r][column]);
            UNROLL for (int p = 0; p < panels; p++) sums[r][p] = v_fma(loaded[p], value, sums[r][p]);
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int p = 0; p < panels; p++) v_store(out + r * stride + p * LANES, sums[r][p]);
}

SPECIALISED void tile_of_bytes(int format, int rows, int panels, const uint8_t *weights, int64_t panel, const Rows *x,
                          int row, float *out, int64_t stride)
{
    const int group = group_of(format), groups = x->columns / group;
    const int scale_bytes = 2 * LANES;
    const int offset = format == FORMAT_Q4_0 ? 8 : format == FORMAT_Q4_1 ? 0 : WEIGHT_OFFSET;
    const int four_bits = format == FORMAT_Q4_0 || format == FORMAT_Q4_1;
    V sums[TILE_ROWS][TILE_PANELS];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int p = 0; p < panels; p++) sums[r][p] = v_set(0);
    for (int g = 0; g < groups; g++, weights += unit_bytes(format)) {
        I dots[TILE_ROWS][TILE_PANELS];
        Pairs pairs[TILE_ROWS][TILE_PANELS];
        const int8_t *bytes[TILE_ROWS];
        const uint8_t *first = weights + scale_bytes + (format == FORMAT_Q4_1 ? scale_bytes : 0);
        UNROLL for (int r = 0; r < rows; r++) {
            int64_t at = (int64_t)(row + r) * groups + g;
            bytes[r] = x->bytes + at * group;
            I start = i_set(-offset * x->sums[at]);
            UNROLL for (int p = 0; p < panels; p++) dots[r][p] = start;
            UNROLL for (int p = 0; p < panels; p++) pairs[r][p] = pairs_none();
        }
        if (four_bits) {
            for (int k = 0; k < group / 8; k++) {
                UNROLL for (int p = 0; p < panels; p++) {
                    Bytes both = bytes_load(first + p * panel + 4 * LANES * k);
                    Bytes low = bytes_low(both), high = bytes_high(both);
                    UNROLL for (int r = 0; r < rows; r++) {
                        pairs[r][p] = dot_u4(pairs[r][p], low, bytes_of_four(bytes[r] + 4 * k));
                        pairs[r][p] = dot_u4(pairs[r][p], high, bytes_of_four(bytes[r] + group / 2 + 4 * k));
                    }
                }
            }
            UNROLL for (int r = 0; r < rows; r++)
                UNROLL for (int p = 0; p < panels; p++) dots[r][p] = pairs_add(dots[r][p], pairs[r][p]);
        } else {
            for (int k = 0; k < group / 4; k++) {
                Bytes loaded[TILE_PANELS];
                UNROLL for (int p = 0; p < panels; p++) loaded[p] = bytes_load(first + p * panel + 4 * LANES * k);
                UNROLL for (int r = 0; r < rows; r++) {
                    Bytes four = bytes_of_four(bytes[r] + 4 * k);
                    UNROLL for (int p = 0; p < panels; p++) dots[r][p] = dot_u8(dots[r][p], loaded[p], four);
                }
            }
        }
        UNROLL for (int p = 0; p < panels; p++) {
            const uint8_t *at = weights + p * panel;
            V scale = v_load_f16((const uint16_t *)at);
            UNROLL for (int r = 0; r < rows; r++) {
                int64_t own = (int64_t)(row + r) * groups + g;
                V factor = v_mul(scale, v_set(x->scales[own]));
                sums[r][p] = v_fma(v_from_i(dots[r][p]), factor, sums[r][p]);
                if (format == FORMAT_Q4_1) {
                    V least = v_load_f16((const uint16_t *)(at + scale_bytes));
                    sums[r][p] = v_fma(least, v_set(x->offsets[own]), sums[r][p]);
                }
            }
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int p = 0; p < panels; p++) v_store(out + r * stride + p * LANES, sums[r][p]);
}

// `count` panels, some at a time, whose format and rows the compiler knows.
SPECIALISED void multiply_rows(int format, int rows, const Matrix *matrix, int panel, int count, const Rows *x, int row,
                          float *out, int64_t stride)
{
    const int64_t bytes = panel_bytes(format, matrix->columns);
    const uint8_t *weights = matrix->data + panel * bytes;
    for (int done = 0; done < count; done += VECTORS(rows), weights += VECTORS(rows) * bytes) {
        if (format >= FORMAT_Q8_0)
            tile_of_bytes(format, rows, VECTORS(rows), weights, bytes, x, row, out + done * LANES, stride);
        else
            tile_of_floats(format, rows, VECTORS(rows), weights, bytes, x, row, out + done * LANES, stride);
    }
}

#define MULTIPLY(format)                                                                                               \
    static void multiply_##format(const Matrix *matrix, int panel, int count, const Rows *x, int row, int rows,        \
                                  float *out, int64_t stride)                                                          \
    {                                                                                                                  \
        if (rows == 1)                                                                                                 \
            multiply_rows(format, 1, matrix, panel, count, x, row, out, stride);                                       \
        else if (rows == 2)                                                                                            \
            multiply_rows(format, 2, matrix, panel, count, x, row, out, stride);                                       \
        else                                                                                                           \
            multiply_rows(format, TILE_ROWS, matrix, panel, count, x, row, out, stride);                               \
    }

MULTIPLY(FORMAT_FLOAT32)
MULTIPLY(FORMAT_BFLOAT16)
MULTIPLY(FORMAT_Q8_0)
MULTIPLY(FORMAT_Q4_0)
MULTIPLY(FORMAT_Q4_1)

typedef void Multiply(const Matrix *, int, int, const Rows *, int, int, float *, int64_t);

// Some panels at a time stay in the nearest cache while all rows pass by them.
static void multiply(const Matrix *matrix, int panel, int count, const Rows *x, int row, int rows, float *out,
                     int64_t stride)
{
    static Multiply *const of_format[] = {
        [FORMAT_FLOAT32] = multiply_FORMAT_FLOAT32, [FORMAT_BFLOAT16] = multiply_FORMAT_BFLOAT16,
        [FORMAT_Q8_0] = multiply_FORMAT_Q8_0,       [FORMAT_Q4_0] = multiply_FORMAT_Q4_0,
        [FORMAT_Q4_1] = multiply_FORMAT_Q4_1,
    };
    Multiply *const some = of_format[matrix->format];
    for (int done = 0; done < count; done += TILE_PANELS) {
        for (int r = 0, step; r < rows; r += step) {
            step = rows - r >= TILE_ROWS ? TILE_ROWS : rows - r >= 2 ? 2 : 1;
            some(matrix, panel + done, TILE_PANELS, x, row + r, step, out + r * stride + done * LANES, stride);
        }
    }
}

static void embed(const Matrix *matrix, int row, float *out)
{
    const int format = matrix->format, lane = row % LANES, group = group_of(format);
    const uint8_t *at = matrix->data + row / LANES * panel_bytes(format, matrix->columns);
    if (group == 0) {
        for (int column = 0; column < matrix->columns; column++, at += unit_bytes(format)) {
            float values[LANES];
            v_store(values, load_weights(format, at));
            out[column] = values[lane];
        }
        return;
    }
    for (int column = 0; column < matrix->columns; column++) {
        const uint8_t *unit = at + column / group * unit_bytes(format);
        const int within = column % group, scale_bytes = 2 * LANES;
        float scales[LANES], minima[LANES] = {0};
        v_store(scales, v_load_f16((const uint16_t *)unit));
        if (format == FORMAT_Q4_1)
            v_store(minima, v_load_f16((const uint16_t *)(unit + scale_bytes)));
        unit += scale_bytes + (format == FORMAT_Q4_1 ? scale_bytes : 0);
        int weight;
        if (format == FORMAT_Q8_0) {
            weight = unit[within / 4 * 4 * LANES + 4 * lane + within % 4] - 128;
        } else {
            const int half = within % (group / 2);
            weight = unit[half / 4 * 4 * LANES + 4 * lane + half % 4] >> (within < group / 2 ? 0 : 4) & 15;
            weight -= format == FORMAT_Q4_0 ? 8 : 0;
        }
        out[column] = fmaf((float)weight, scales[lane], minima[lane]);
    }
}
