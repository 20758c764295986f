// Vectors of 16 floats, and the same arithmetic on them for every instruction set.
//
// Owns what one instruction set does differently. What it promises: every operation rounds as IEEE
// 754 says, a product and a sum are fused where `v_fma` stands and nowhere else, and lanes are
// summed in one fixed order. So all instruction sets give the same bits, and blocks that one
// machine computed are as good as those of another. It knows nothing of models.
#ifndef KVFERRY_SIMD_H
#define KVFERRY_SIMD_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "kernels.h"

#define INLINE static inline __attribute__((always_inline))
#define SPECIALISED INLINE // a copy for every way in which constants are passed

INLINE float bits_to_float(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE uint32_t float_to_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VNNI__)

#include <immintrin.h>

#define UNROLL _Pragma("GCC unroll 16")
#define WEIGHT_OFFSET 128 // what `dot_u8` wants subtracted: 8-bit weights are unsigned to it
#define VECTORS(rows) 4   // how many vectors times so many rows of sums fit into registers
#define MOST_ROWS 4       // of one vector, or as many as VECTORS says

typedef __m512 V;
typedef __m512i I;
typedef __m512i Bytes; // 16 rows of 4
typedef __m512i Pairs; // sums of products with 4-bit weights, of at most 32 columns

INLINE V v_set(float x) { return _mm512_set1_ps(x); }
INLINE V v_load(const float *p) { return _mm512_loadu_ps(p); }
INLINE void v_store(float *p, V x) { _mm512_storeu_ps(p, x); }
INLINE V v_add(V x, V y) { return _mm512_add_ps(x, y); }
INLINE V v_sub(V x, V y) { return _mm512_sub_ps(x, y); }
INLINE V v_mul(V x, V y) { return _mm512_mul_ps(x, y); }
INLINE V v_div(V x, V y) { return _mm512_div_ps(x, y); }
INLINE V v_fma(V x, V y, V z) { return _mm512_fmadd_ps(x, y, z); }
INLINE V v_fnma(V x, V y, V z) { return _mm512_fnmadd_ps(x, y, z); }
INLINE V v_max(V x, V y) { return _mm512_max_ps(x, y); }
INLINE V v_min(V x, V y) { return _mm512_min_ps(x, y); }
INLINE V v_abs(V x) { return _mm512_abs_ps(x); }
INLINE V v_round(V x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE V v_zero_below(V x, V limit, V y)
{
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, limit, _CMP_GE_OQ), y);
}
INLINE V v_first(int count, V x, V other)
{
    return _mm512_mask_mov_ps(other, (__mmask16)((1u << count) - 1), x);
}
INLINE V v_scale_exponent(V x, V power)
{
    I shift = _mm512_slli_epi32(_mm512_cvtps_epi32(power), 23);
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(x), shift));
}
INLINE float halves_sum(__m256 x)
{
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
INLINE float v_sum(V x)
{
    __m256 upper = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x), 1));
    return halves_sum(_mm256_add_ps(_mm512_castps512_ps256(x), upper));
}
INLINE float v_largest(V x) { return _mm512_reduce_max_ps(x); }
INLINE V v_load_bf16(const uint16_t *p)
{
    I wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
INLINE V v_load_f16(const uint16_t *p)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}
INLINE V v_load_i8(const int8_t *p)
{
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
INLINE void v_store_f16(uint16_t *p, V x)
{
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
// Whole numbers from -127 to 127 as bytes; returns their sum.
INLINE int32_t v_store_i8(int8_t *p, V x)
{
    I whole = _mm512_cvtps_epi32(x);
    _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8(whole));
    return _mm512_reduce_add_epi32(whole);
}
INLINE I i_set(int32_t x) { return _mm512_set1_epi32(x); }
INLINE V v_from_i(I x) { return _mm512_cvtepi32_ps(x); }
INLINE Bytes bytes_load(const uint8_t *p) { return _mm512_loadu_si512(p); }
INLINE Bytes bytes_low(Bytes x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
INLINE Bytes bytes_high(Bytes x) { return bytes_low(_mm512_srli_epi16(x, 4)); }
INLINE Bytes bytes_of_four(const int8_t *p)
{
    int32_t four;
    memcpy(&four, p, sizeof four);
    return _mm512_set1_epi32(four);
}
INLINE I dot_u8(I sum, Bytes weights, Bytes x) { return _mm512_dpbusd_epi32(sum, weights, x); }
INLINE Pairs dot_u4(Pairs sum, Bytes weights, Bytes x) { return _mm512_dpbusd_epi32(sum, weights, x); }
INLINE Pairs pairs_none(void) { return _mm512_setzero_si512(); }
INLINE I pairs_add(I sum, Pairs pairs) { return _mm512_add_epi32(sum, pairs); }

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

#include <immintrin.h>

#define UNROLL _Pragma("GCC unroll 16")
#define WEIGHT_OFFSET 0
#define VECTORS(rows) ((rows) == 1 ? 4 : (rows) == 2 ? 2 : 1)
#define MOST_ROWS 6

typedef struct {
    __m256 low, high;
} V;
typedef struct {
    __m256i low, high;
} I;
typedef I Bytes;
typedef I Pairs;

#define EACH(type, expression_low, expression_high) ((type){(expression_low), (expression_high)})

INLINE V v_set(float x) { return EACH(V, _mm256_set1_ps(x), _mm256_set1_ps(x)); }
INLINE V v_load(const float *p) { return EACH(V, _mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)); }
INLINE void v_store(float *p, V x)
{
    _mm256_storeu_ps(p, x.low);
    _mm256_storeu_ps(p + 8, x.high);
}
INLINE V v_add(V x, V y) { return EACH(V, _mm256_add_ps(x.low, y.low), _mm256_add_ps(x.high, y.high)); }
INLINE V v_sub(V x, V y) { return EACH(V, _mm256_sub_ps(x.low, y.low), _mm256_sub_ps(x.high, y.high)); }
INLINE V v_mul(V x, V y) { return EACH(V, _mm256_mul_ps(x.low, y.low), _mm256_mul_ps(x.high, y.high)); }
INLINE V v_div(V x, V y) { return EACH(V, _mm256_div_ps(x.low, y.low), _mm256_div_ps(x.high, y.high)); }
INLINE V v_fma(V x, V y, V z)
{
    return EACH(V, _mm256_fmadd_ps(x.low, y.low, z.low), _mm256_fmadd_ps(x.high, y.high, z.high));
}
INLINE V v_fnma(V x, V y, V z)
{
    return EACH(V, _mm256_fnmadd_ps(x.low, y.low, z.low), _mm256_fnmadd_ps(x.high, y.high, z.high));
}
INLINE V v_max(V x, V y) { return EACH(V, _mm256_max_ps(x.low, y.low), _mm256_max_ps(x.high, y.high)); }
INLINE V v_min(V x, V y) { return EACH(V, _mm256_min_ps(x.low, y.low), _mm256_min_ps(x.high, y.high)); }
INLINE V v_abs(V x)
{
    __m256 sign = _mm256_set1_ps(-0.0f);
    return EACH(V, _mm256_andnot_ps(sign, x.low), _mm256_andnot_ps(sign, x.high));
}
#define NEAREST (_MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)
INLINE V v_round(V x) { return EACH(V, _mm256_round_ps(x.low, NEAREST), _mm256_round_ps(x.high, NEAREST)); }
INLINE V v_zero_below(V x, V limit, V y)
{
    return EACH(V, _mm256_and_ps(_mm256_cmp_ps(x.low, limit.low, _CMP_GE_OQ), y.low),
                _mm256_and_ps(_mm256_cmp_ps(x.high, limit.high, _CMP_GE_OQ), y.high));
}
INLINE V v_first(int count, V x, V other)
{
    __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    __m256 low = _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(count), lane));
    __m256 high = _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(count - 8), lane));
    return EACH(V, _mm256_blendv_ps(other.low, x.low, low), _mm256_blendv_ps(other.high, x.high, high));
}
INLINE __m256 scale_exponent(__m256 x, __m256 power)
{
    __m256i shift = _mm256_slli_epi32(_mm256_cvtps_epi32(power), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x), shift));
}
INLINE V v_scale_exponent(V x, V power)
{
    return EACH(V, scale_exponent(x.low, power.low), scale_exponent(x.high, power.high));
}
INLINE float v_sum(V x)
{
    __m256 eight = _mm256_add_ps(x.low, x.high);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
INLINE float v_largest(V x)
{
    __m256 eight = _mm256_max_ps(x.low, x.high);
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
INLINE __m256 load_bf16(const uint16_t *p)
{
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
INLINE V v_load_bf16(const uint16_t *p) { return EACH(V, load_bf16(p), load_bf16(p + 8)); }
INLINE __m256 load_f16(const uint16_t *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
INLINE V v_load_f16(const uint16_t *p) { return EACH(V, load_f16(p), load_f16(p + 8)); }
INLINE __m256 load_i8(const int8_t *p)
{
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}
INLINE V v_load_i8(const int8_t *p) { return EACH(V, load_i8(p), load_i8(p + 8)); }
INLINE void v_store_f16(uint16_t *p, V x)
{
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(x.low, NEAREST));
    _mm_storeu_si128((__m128i *)(p + 8), _mm256_cvtps_ph(x.high, NEAREST));
}
INLINE int32_t v_store_i8(int8_t *p, V x)
{
    __m256i both = _mm256_packs_epi32(_mm256_cvtps_epi32(x.low), _mm256_cvtps_epi32(x.high));
    both = _mm256_permute4x64_epi64(both, 0xd8); // packing went lane by lane
    __m256i pairs = _mm256_madd_epi16(both, _mm256_set1_epi16(1));
    __m128i low = _mm256_castsi256_si128(both), high = _mm256_extracti128_si256(both, 1);
    _mm_storeu_si128((__m128i *)p, _mm_packs_epi16(low, high));
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
    __m128i two = _mm_add_epi32(four, _mm_unpackhi_epi64(four, four));
    return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 1)));
}
INLINE I i_set(int32_t x) { return EACH(I, _mm256_set1_epi32(x), _mm256_set1_epi32(x)); }
INLINE V v_from_i(I x) { return EACH(V, _mm256_cvtepi32_ps(x.low), _mm256_cvtepi32_ps(x.high)); }
INLINE Bytes bytes_load(const uint8_t *p)
{
    return EACH(Bytes, _mm256_loadu_si256((const __m256i *)p), _mm256_loadu_si256((const __m256i *)(p + 32)));
}
INLINE Bytes bytes_low(Bytes x)
{
    __m256i mask = _mm256_set1_epi8(15);
    return EACH(Bytes, _mm256_and_si256(x.low, mask), _mm256_and_si256(x.high, mask));
}
INLINE Bytes bytes_high(Bytes x)
{
    return bytes_low(EACH(Bytes, _mm256_srli_epi16(x.low, 4), _mm256_srli_epi16(x.high, 4)));
}
INLINE Bytes bytes_of_four(const int8_t *p)
{
    int32_t four;
    memcpy(&four, p, sizeof four);
    return i_set(four);
}
INLINE __m256i add_pairs(__m256i sum, __m256i pairs)
{
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
// `maddubs` saturates from 32,768 on. Two products of magnitudes of at most 128 and 127 stay below,
// so the sign of the weight goes to the other factor.
INLINE __m256i dot_u8_half(__m256i sum, __m256i weights, __m256i x)
{
    __m256i value = _mm256_xor_si256(weights, _mm256_set1_epi8(-128));
    return add_pairs(sum, _mm256_maddubs_epi16(_mm256_abs_epi8(value), _mm256_sign_epi8(x, value)));
}
INLINE I dot_u8(I sum, Bytes weights, Bytes x)
{
    return EACH(I, dot_u8_half(sum.low, weights.low, x.low), dot_u8_half(sum.high, weights.high, x.high));
}
// 16-bit sums hold the products of 32 columns: 8 times 2 * 15 * 127.
INLINE Pairs dot_u4(Pairs sum, Bytes weights, Bytes x)
{
    return EACH(Pairs, _mm256_add_epi16(sum.low, _mm256_maddubs_epi16(weights.low, x.low)),
                _mm256_add_epi16(sum.high, _mm256_maddubs_epi16(weights.high, x.high)));
}
INLINE Pairs pairs_none(void) { return i_set(0); }
INLINE I pairs_add(I sum, Pairs pairs) { return EACH(I, add_pairs(sum.low, pairs.low), add_pairs(sum.high, pairs.high)); }

#else // any machine; a compiler makes vectors of these loops where it can

#undef SPECIALISED
#define SPECIALISED static
#define UNROLL
#define WEIGHT_OFFSET 128
#define VECTORS(rows) 1
#define MOST_ROWS 4

typedef struct {
    float at[LANES];
} V;
typedef struct {
    int32_t at[LANES];
} I;
typedef I Pairs;
typedef struct {
    uint8_t at[4 * LANES];
} Bytes;

#define EACH_LANE(expression)                                                                      \
    V result;                                                                                      \
    for (int lane = 0; lane < LANES; lane++)                                                       \
        result.at[lane] = (expression);                                                            \
    return result

INLINE V v_set(float x) { EACH_LANE(x); }
INLINE V v_load(const float *p) { EACH_LANE(p[lane]); }
INLINE void v_store(float *p, V x) { memcpy(p, x.at, sizeof x.at); }
INLINE V v_add(V x, V y) { EACH_LANE(x.at[lane] + y.at[lane]); }
INLINE V v_sub(V x, V y) { EACH_LANE(x.at[lane] - y.at[lane]); }
INLINE V v_mul(V x, V y) { EACH_LANE(x.at[lane] * y.at[lane]); }
INLINE V v_div(V x, V y) { EACH_LANE(x.at[lane] / y.at[lane]); }
INLINE V v_fma(V x, V y, V z) { EACH_LANE(fmaf(x.at[lane], y.at[lane], z.at[lane])); }
INLINE V v_fnma(V x, V y, V z) { EACH_LANE(fmaf(-x.at[lane], y.at[lane], z.at[lane])); }
INLINE V v_max(V x, V y) { EACH_LANE(x.at[lane] > y.at[lane] ? x.at[lane] : y.at[lane]); }
INLINE V v_min(V x, V y) { EACH_LANE(x.at[lane] < y.at[lane] ? x.at[lane] : y.at[lane]); }
INLINE V v_abs(V x) { EACH_LANE(fabsf(x.at[lane])); }
// To nearest, ties to even, for magnitudes below 2**22.
INLINE V v_round(V x) { EACH_LANE(x.at[lane] + 12582912.0f - 12582912.0f); }
INLINE V v_zero_below(V x, V limit, V y) { EACH_LANE(x.at[lane] >= limit.at[lane] ? y.at[lane] : 0.0f); }
INLINE V v_first(int count, V x, V other) { EACH_LANE(lane < count ? x.at[lane] : other.at[lane]); }
INLINE V v_scale_exponent(V x, V power)
{
    EACH_LANE(bits_to_float(float_to_bits(x.at[lane]) + ((uint32_t)(int32_t)power.at[lane] << 23)));
}
INLINE float v_sum(V x)
{
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int lane = 0; lane < half; lane++)
            x.at[lane] += x.at[lane + half];
    return x.at[0];
}
INLINE float v_largest(V x)
{
    float most = x.at[0];
    for (int lane = 1; lane < LANES; lane++)
        most = most > x.at[lane] ? most : x.at[lane];
    return most;
}
INLINE V v_load_bf16(const uint16_t *p) { EACH_LANE(bits_to_float((uint32_t)p[lane] << 16)); }
INLINE float f16_to_float(uint16_t bits)
{
    uint32_t sign = (uint32_t)(bits & 0x8000) << 16, rest = bits & 0x7fff;
    if (rest >= 0x7c00) // infinite, or no number
        return bits_to_float(sign | 0x7f800000 | (rest & 0x3ff) << 13 | (rest > 0x7c00 ? 1u << 22 : 0));
    // As if it were a float with the exponent of a float16; one product mends that, exactly.
    return bits_to_float(sign | float_to_bits(bits_to_float(rest << 13) * 0x1p112f));
}
INLINE uint16_t float_to_f16(float value)
{
    uint32_t bits = float_to_bits(value), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
    if (rest > 0x7f800000)
        return (uint16_t)(sign | 0x7e00 | (rest >> 13 & 0x3ff));
    if (rest >= 0x477ff000) // rounds to 65,536 or more
        return (uint16_t)(sign | 0x7c00);
    if (rest < 0x38800000) // below the smallest normal one: adding 0.5 leaves its bits at the end
        return (uint16_t)(sign | (float_to_bits(bits_to_float(rest) + 0.5f) - 0x3f000000));
    return (uint16_t)(sign | (rest - 0x38000000 + 0xfff + (rest >> 13 & 1)) >> 13);
}
INLINE V v_load_f16(const uint16_t *p) { EACH_LANE(f16_to_float(p[lane])); }
INLINE V v_load_i8(const int8_t *p) { EACH_LANE((float)p[lane]); }
INLINE void v_store_f16(uint16_t *p, V x)
{
    for (int lane = 0; lane < LANES; lane++)
        p[lane] = float_to_f16(x.at[lane]);
}
INLINE int32_t v_store_i8(int8_t *p, V x)
{
    int32_t sum = 0;
    for (int lane = 0; lane < LANES; lane++) {
        p[lane] = (int8_t)x.at[lane];
        sum += p[lane];
    }
    return sum;
}
INLINE I i_set(int32_t x)
{
    I result;
    for (int lane = 0; lane < LANES; lane++)
        result.at[lane] = x;
    return result;
}
INLINE V v_from_i(I x) { EACH_LANE((float)x.at[lane]); }
INLINE Bytes bytes_load(const uint8_t *p)
{
    Bytes result;
    memcpy(result.at, p, sizeof result.at);
    return result;
}
INLINE Bytes bytes_low(Bytes x)
{
    for (int i = 0; i < 4 * LANES; i++)
        x.at[i] &= 15;
    return x;
}
INLINE Bytes bytes_high(Bytes x)
{
    for (int i = 0; i < 4 * LANES; i++)
        x.at[i] >>= 4;
    return x;
}
INLINE Bytes bytes_of_four(const int8_t *p)
{
    Bytes result;
    memcpy(result.at, p, 4);
    return result;
}
INLINE I dot_u8(I sum, Bytes weights, Bytes x)
{
    const int8_t *four = (const int8_t *)x.at;
    for (int lane = 0; lane < LANES; lane++)
        for (int i = 0; i < 4; i++)
            sum.at[lane] += weights.at[4 * lane + i] * four[i];
    return sum;
}
INLINE Pairs dot_u4(Pairs sum, Bytes weights, Bytes x) { return dot_u8(sum, weights, x); }
INLINE Pairs pairs_none(void) { return i_set(0); }
INLINE I pairs_add(I sum, Pairs pairs)
{
    for (int lane = 0; lane < LANES; lane++)
        sum.at[lane] += pairs.at[lane];
    return sum;
}

#endif

// bf16: the upper half of a float, to nearest, ties to even.
INLINE void v_store_bf16(uint16_t *p, V x)
{
    float values[LANES];
    v_store(values, x);
    for (int lane = 0; lane < LANES; lane++) {
        uint32_t bits = float_to_bits(values[lane]);
        if ((bits & 0x7fffffff) > 0x7f800000)
            p[lane] = (uint16_t)(bits >> 16 | 0x40);
        else
            p[lane] = (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }
}

// e to the x for x of at most 88, within 2 units in the last place; below -87 it is 0. The range is
// reduced by a multiple of ln 2 in two parts (Cody and Waite); the rest, of at most half of ln 2,
// goes into the Taylor series up to its seventh power.
INLINE V v_exp(V x)
{
    V least = v_set(-87.0f);
    V clipped = v_max(x, least);
    V power = v_round(v_mul(clipped, v_set(0x1.715476p+0f)));
    V rest = v_fnma(power, v_set(0x1.62e400p-1f), clipped);
    rest = v_fnma(power, v_set(0x1.7f7d1cp-20f), rest);
    V sum = v_set(0x1.a01a02p-13f);
    sum = v_fma(sum, rest, v_set(0x1.6c16c2p-10f));
    sum = v_fma(sum, rest, v_set(0x1.111112p-7f));
    sum = v_fma(sum, rest, v_set(0x1.555556p-5f));
    sum = v_fma(sum, rest, v_set(0x1.555556p-3f));
    sum = v_fma(sum, rest, v_set(0.5f));
    sum = v_fma(sum, rest, v_set(1.0f));
    sum = v_fma(sum, rest, v_set(1.0f));
    return v_zero_below(x, least, v_scale_exponent(sum, power));
}

INLINE float exp_of(float x)
{
    float values[LANES];
    v_store(values, v_exp(v_set(x)));
    return values[0];
}

#endif
