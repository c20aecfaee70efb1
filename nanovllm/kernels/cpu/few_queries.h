// Attention of a sequence of at most FEW rows: a row's scores are in the lanes of vectors.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __AVX2__
#include <immintrin.h>
#endif

#include "add_product.h"
#include "context.h"
#include "scalar.h"
#include "softmax.h"
#include "vector.h"

namespace {

// The unfinished softmax of a few rows: the sums of weights and of weighted values, in units of
// 2^top. After `clear` it has no keys; `add` adds the state of other keys.
struct alignas(CACHE_LINE) State {
    float top[FEW], total[FEW];
    float sums[FEW][MAX_HEAD_DIM];

    void clear(int64_t head_dim) {
        for (int r = 0; r < FEW; r++) {
            top[r] = NO_SCORE;
            total[r] = 0;
            std::fill(sums[r], sums[r] + head_dim, 0.0f);
        }
    }

    void add(const State& other, int64_t head_dim, int64_t rows = FEW) {
        alignas(CACHE_LINE) float shrink[FEW], grow[FEW];
        join<FEW>(top, total, other.top, other.total, shrink, grow);
        for (int64_t r = 0; r < rows; r++)
            for (int64_t d = 0; d < head_dim; d += LANES)
                vec(sums[r] + d) = add_product(load(sums[r] + d) * shrink[r],
                                               load(other.sums[r] + d), all_lanes(grow[r]));
    }
};

// Number i of each word, as `load` returns it.
template <typename T>
inline Vec number_of(IntVec words, int i) {
    if constexpr (is_codes<T>) return (Vec)(words << (24 - 8 * i) >> (24 - CODE_SHIFT) & CODE_BITS);
    if constexpr (sizeof(T) == 2) return (Vec)(i ? words & -0x10000 : words << 16);
    return (Vec)words;
}

// Four words of each of LANES / 4 keys: those of keys[0], keys[4], ...
template <typename T>
inline IntVec words_of(const T* const* keys, int64_t d) {
#if defined(__AVX512F__)
    const auto words = [&](int i) { return _mm_loadu_si128((const __m128i*)(keys[4 * i] + d)); };
    __m512i all = _mm512_castsi128_si512(words(0));
    all = _mm512_inserti32x4(all, words(1), 1);
    all = _mm512_inserti32x4(all, words(2), 2);
    return (IntVec)_mm512_inserti32x4(all, words(3), 3);
#elif defined(__AVX2__)
    const auto words = [&](int i) { return _mm_loadu_si128((const __m128i*)(keys[4 * i] + d)); };
    return (IntVec)_mm256_inserti128_si256(_mm256_castsi128_si256(words(0)), words(1), 1);
#else
    IntVec all;
    for (int i = 0; i < LANES; i += 4) std::memcpy((int32_t*)&all + i, keys[i] + d, 16);
    return all;
#endif
}

// Lanes of two vectors: those that exchange the rows and columns HALF apart of blocks.
template <int HALF>
struct Exchange {
    alignas(CACHE_LINE) int32_t low[LANES] = {}, high[LANES] = {};

    constexpr Exchange() {
        for (int i = 0; i < LANES; i++) {
            low[i] = i & HALF ? LANES + i - HALF : i;
            high[i] = i & HALF ? LANES + i : i + HALF;
        }
    }
};

// From words of LANES keys as `words_of` returns them, for keys + 0 .. keys + 3: one word of all keys
// in each vector, in the order of the words and of the keys.
inline void exchange(IntVec* words) {
    static constexpr Exchange<2> far;
    static constexpr Exchange<1> near;
    IntVec x[4];
    for (int i = 0; i < 2; i++) {
        x[i] = __builtin_shuffle(words[i], words[i + 2], *(const IntVec*)far.low);
        x[i + 2] = __builtin_shuffle(words[i], words[i + 2], *(const IntVec*)far.high);
    }
    for (int i = 0; i < 4; i += 2) {
        words[i] = __builtin_shuffle(x[i], x[i + 1], *(const IntVec*)near.low);
        words[i + 1] = __builtin_shuffle(x[i], x[i + 1], *(const IntVec*)near.high);
    }
}

// Prefetches the next keys line by line. This order is easier for memory than the one in which
// `dots` reads keys.
template <typename T>
struct Lines {
    const T* const* key;
    int64_t head_dim, d = 0;

    void fetch_one() {
        __builtin_prefetch(key[KEYS] + d);
        d += CACHE_LINE / sizeof(T);
        if (d >= head_dim) d = 0, key++;
    }
};

// scores[r][j] = q[r] . keys[j] for R rows and 2 * LANES keys.
template <int R, typename T>
inline void dots(const float (*q)[MAX_HEAD_DIM], const T* const* keys, int64_t head_dim,
                 float (*scores)[KEYS]) {
    constexpr int NUMBERS = 4 / sizeof(T), STEP = 4 * NUMBERS;  // of a word, of four words
    Lines<T> next{keys, head_dim};
    Vec sums[R][2] = {};
    for (int64_t d = 0; d < head_dim; d += STEP)
        for (int g = 0; g < 2; g++) {
            IntVec words[4];
            for (int v = 0; v < 4; v++) {
                words[v] = words_of(keys + g * LANES + v, d);
                if (v % (16 / LANES) == 0) next.fetch_one();
            }
            exchange(words);
#pragma GCC unroll 16
            for (int i = 0; i < STEP; i++) {
                const Vec numbers = number_of<T>(words[i / NUMBERS], i % NUMBERS);
                for (int r = 0; r < R; r++)
                    sums[r][g] = add_product(sums[r][g], all_lanes(q[r][d + i]), numbers);
            }
        }
    for (int r = 0; r < R; r++)
        for (int g = 0; g < 2; g++) vec(scores[r] + g * LANES) = sums[r][g];
}

// sums[r] = sums[r] * shrink[r] + weights[r] @ values, for R rows and V vectors from `d` on.
template <int R, int V, typename T>
inline void weigh(float (*sums)[MAX_HEAD_DIM], const float* shrink, const float (*weights)[KEYS],
                  const T* const* values, int count, int64_t d) {
    Vec held[R][V];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) held[r][v] = load(sums[r] + d + v * LANES) * shrink[r];
    for (int j = 0; j < count; j++)
        for (int v = 0; v < V; v++) {
            const Vec value = load(values[j] + d + v * LANES);
            fetch_next(values + j, d + v * LANES);
            for (int r = 0; r < R; r++)
                held[r][v] = add_product(held[r][v], all_lanes(weights[r][j]), value);
        }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) vec(sums[r] + d + v * LANES) = held[r][v];
}

// Add the keys first .. end - 1 to the state of a few rows, R at a time. Values have `value_dim`
// numbers, rounded up to a multiple of LANES. q includes the factors scale and log2(e); row r sees
// the `window` keys before limits[r]. Scores have a soft `cap`, unless it is 0.
template <int R, typename T>
void attend_few(State& state, const float (*q)[MAX_HEAD_DIM], const int32_t* limits, int64_t window,
                int64_t rows, const Context<T>& context, int64_t head_dim, int64_t value_dim,
                int64_t first, int64_t end, float cap) {
    alignas(CACHE_LINE) float scores[FEW][KEYS];
    float shrink[FEW], key_scales[KEYS], value_scales[KEYS];
    rows = (rows + R - 1) / R * R;
    context.go_through(first, end, [&](const Near<T>& near, int64_t start, int count) {
        if constexpr (is_codes<T>)
            context.read_scales(near, CODE_FACTOR, key_scales, value_scales);
        for (int64_t r = 0; r < rows; r += R)
            for (int j = 0; j < count; j += 2 * LANES)
                dots<R>(q + r, near.keys + j, head_dim, (float (*)[KEYS])(scores[r] + j));
        for (int64_t r = 0; r < rows; r++) {
            const int seen = int(std::clamp<int64_t>(limits[r] - start, 0, count));
            const int hidden = int(std::clamp<int64_t>(limits[r] - window - start, 0, count));
            float *row = scores[r], top = state.top[r];
            if constexpr (is_codes<T>)
                for (int j = 0; j < KEYS; j++) row[j] *= key_scales[j];
            if (cap != 0)
#pragma omp simd
                for (int j = 0; j < KEYS; j++) row[j] = capped(row[j], cap);
            std::fill(row, row + hidden, -INFINITY);
            std::fill(row + seen, row + KEYS, -INFINITY);
#pragma omp simd reduction(max : top)
            for (int j = 0; j < KEYS; j++) top = row[j] > top ? row[j] : top;
#pragma omp simd
            for (int j = 0; j < KEYS; j++) row[j] = exp2_of(row[j] - top);
            shrink[r] = exp2_of(state.top[r] - top);
            state.top[r] = top;
            state.total[r] = add_product(total_of(row), state.total[r], shrink[r]);
            if constexpr (is_codes<T>)
                for (int j = 0; j < KEYS; j++) row[j] *= value_scales[j];
        }
        for (int64_t r = 0; r < rows; r += R) {
            int64_t d = 0;
            for (; d + 4 * LANES <= value_dim; d += 4 * LANES)
                weigh<R, 4>(state.sums + r, shrink + r, scores + r, near.values, count, d);
            for (; d < value_dim; d += LANES)
                weigh<R, 1>(state.sums + r, shrink + r, scores + r, near.values, count, d);
        }
    });
}

}  // namespace
