// Sampling: one pass over the logits, for greedy and temperature rows together.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "noise.h"
#include "parallel.h"
#include "scalar.h"

namespace {

constexpr int64_t CHUNK = 512;      // scores that are computed before their best is taken
constexpr int64_t PIECE = 1 << 14;  // tokens that a thread takes together

// The first best of `count` scores, if it is better than `best`; `first` is the id of scores[0].
inline void take_best(const float* scores, int64_t count, int64_t first, float& best, int64_t& id) {
    float top = -INFINITY;
#pragma omp simd reduction(max : top)
    for (int64_t i = 0; i < count; i++) top = scores[i] > top ? scores[i] : top;
    if (!(top > best)) return;
    best = top;
    id = first + (std::find(scores, scores + count, top) - scores);
}

// Bit i % 32 of word i / 32: whether token i may be drawn.
inline bool is_set(const uint32_t* words, int64_t i) { return words[i >> 5] >> (i & 31) & 1; }

// Whether any of `count` tokens may be drawn; `first` is a multiple of 32.
inline bool any_set(const uint32_t* words, int64_t first, int64_t count) {
    for (int64_t i = first >> 5; i < (first + count + 31) >> 5; i++)
        if (words[i]) return true;
    return false;
}

// `temperatures` may be null: all rows are greedy. So may `masks`: all tokens may be drawn. `best`
// and `ids` [rows, pieces] are scratch.
template <typename T>
void sample(const T* logits, int64_t stride, const float* temperatures, const int64_t* keys,
            const uint32_t* masks, int64_t mask_stride, int64_t* out, float* best, int64_t* ids, int64_t rows, int64_t vocab_size,
            int64_t threads) {
    const int64_t pieces = (vocab_size + PIECE - 1) / PIECE;
    for_each(rows * pieces, threads, [&](int64_t i) {
        const int64_t row = i / pieces, start = i % pieces * PIECE;
        const int64_t end = std::min(start + PIECE, vocab_size);
        const T* from = logits + row * stride;
        const float temperature = temperatures ? temperatures[row] : 0.0f;
        const uint32_t low = temperatures ? uint32_t(keys[row]) : 0;
        const uint32_t high = temperatures ? uint32_t(uint64_t(keys[row]) >> 32) : 0;
        const uint32_t* words = masks ? masks + row * mask_stride : nullptr;
        best[i] = -INFINITY;
        ids[i] = start;
        float scores[CHUNK];
        for (int64_t first = start; first < end; first += CHUNK) {
            const int64_t count = std::min(CHUNK, end - first);
            if (words && !any_set(words, first, count)) continue;
            for (int64_t j = 0; j < count; j++) scores[j] = widen(from[first + j]);
            if (temperature > 0) {
#pragma omp simd
                for (int64_t j = 0; j < count; j++)
                    scores[j] -= temperature * log_exponential(low, high, uint32_t(first + j));
            }
            if (words)
                for (int64_t j = 0; j < count; j++)
                    if (!is_set(words, first + j)) scores[j] = -INFINITY;
            take_best(scores, count, first, best[i], ids[i]);
        }
    });
    for (int64_t row = 0; row < rows; row++) {
        const int64_t at = row * pieces;
        out[row] = ids[at + (std::max_element(best + at, best + at + pieces) - (best + at))];
    }
}

template <typename T>
void mask(T* logits, int64_t stride, const uint32_t* masks, int64_t mask_stride, int64_t rows,
          int64_t vocab_size, int64_t threads) {
    for_each(rows, threads, [&](int64_t row) {
        const uint32_t* words = masks + row * mask_stride;
        for (int64_t i = 0; i < vocab_size; i++)
            if (!is_set(words, i)) logits[row * stride + i] = T(-INFINITY);
    });
}

}  // namespace
