// Sample tokens in one pass over the logits, for greedy and temperature rows together.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "mask.h"
#include "noise.h"
#include "parallel.h"
#include "scalar.h"

namespace {

constexpr int64_t CHUNK = 512;      // scores that are computed before the best is searched
constexpr int64_t NO_TOKEN = -1;    // of a row from which no token can be drawn
constexpr int64_t PIECE = 1 << 14;  // tokens that a thread takes at a time

// Find the first largest of `count` scores, if larger than `best`; `first` is the id of scores[0].
// `best` becomes, and stays, NaN if some scores are NaN, or several are infinite.
inline void take_best(const float* scores, int64_t count, int64_t first, float& best, int64_t& id) {
    float top = -INFINITY;
    int is_nan = 0;
#pragma omp simd reduction(max : top) reduction(| : is_nan)
    for (int64_t i = 0; i < count; i++) {
        top = scores[i] > top ? scores[i] : top;
        is_nan |= scores[i] != scores[i];
    }
    if (top == INFINITY)
        is_nan |= best == INFINITY || std::count(scores, scores + count, INFINITY) > 1;
    if (is_nan) best = NAN;
    if (!(top > best)) return;
    best = top;
    id = first + (std::find(scores, scores + count, top) - scores);
}

// Draw a token for each row. If `temperatures` is null, all rows are greedy. `best` and `ids`
// [rows, pieces] are scratch. With `bitmaps`, only the rows with the numbers `chosen` [rows] are
// drawn, from their allowed tokens.
template <typename T>
void sample(const T* logits, int64_t stride, const float* temperatures, const int64_t* keys,
            const int64_t* chosen, const int32_t* bitmaps, int64_t bitmaps_stride, int64_t* out,
            float* best, int64_t* ids, int64_t rows, int64_t vocab_size, int64_t threads) {
    const int64_t pieces = (vocab_size + PIECE - 1) / PIECE;
    for_each(rows * pieces, threads, [&](int64_t i) {
        const int64_t index = i / pieces, start = i % pieces * PIECE;
        const int64_t row = bitmaps ? chosen[index] : index;
        if (row < 0) return;
        const int64_t end = std::min(start + PIECE, vocab_size);
        const T* from = logits + row * stride;
        const float temperature = temperatures ? temperatures[row] : 0.0f;
        const uint32_t low = temperatures ? uint32_t(keys[row]) : 0;
        const uint32_t high = temperatures ? uint32_t(uint64_t(keys[row]) >> 32) : 0;
        best[i] = -INFINITY;
        ids[i] = start;
        float scores[CHUNK];
        for (int64_t first = start; first < end; first += CHUNK) {
            const int64_t count = std::min(CHUNK, end - first);
            const int32_t* words = bitmaps ? bitmaps + index * bitmaps_stride + first / WORD : nullptr;
            if (words && !allows_any(words, count)) continue;
            for (int64_t j = 0; j < count; j++) scores[j] = widen(from[first + j]);
            if (words) forbid(scores, words, count);
            if (temperature > 0) {
#pragma omp simd
                for (int64_t j = 0; j < count; j++)
                    scores[j] -= temperature * log_exponential(low, high, uint32_t(first + j));
            }
            take_best(scores, count, first, best[i], ids[i]);
        }
    });
    for (int64_t row = 0; row < rows; row++) {
        const int64_t to = bitmaps ? chosen[row] : row;
        if (to < 0) continue;
        float top = -INFINITY;
        out[to] = NO_TOKEN;
        for (int64_t i = row * pieces; i < (row + 1) * pieces; i++) {
            if (std::isnan(best[i]) || (best[i] == INFINITY && top == INFINITY)) {
                out[to] = NO_TOKEN;
                break;
            }
            if (best[i] > top) {
                top = best[i];
                out[to] = ids[i];
            }
        }
    }
}

}  // namespace
