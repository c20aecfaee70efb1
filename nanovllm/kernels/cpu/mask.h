// Masks: bitmaps of the tokens that may be drawn.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "parallel.h"

namespace {

constexpr int64_t WORD = 32;             // tokens for which a word of a bitmap has bits
constexpr int64_t MASKED = 1 << 14;      // tokens that a thread takes at a time

// Whether one of `count` tokens may be drawn; `words` begin with the first token's bit.
inline bool allows_any(const int32_t* words, int64_t count) {
    const int64_t whole = count / WORD, rest = count % WORD;
    uint32_t bits = rest ? uint32_t(words[whole]) & ((1u << rest) - 1) : 0;
    for (int64_t i = 0; i < whole; i++) bits |= uint32_t(words[i]);
    return bits;
}

// Set those of `count` scores to minus infinity that belong to tokens that may not be drawn.
inline void forbid(float* scores, const int32_t* words, int64_t count) {
    for (int64_t first = 0; first < count; first += WORD) {
        const uint32_t word = uint32_t(words[first / WORD]);
        const int64_t size = std::min(WORD, count - first);
#pragma omp simd
        for (int64_t i = 0; i < size; i++)
            scores[first + i] = word >> i & 1 ? scores[first + i] : -INFINITY;
    }
}

void mask(float* logits, int64_t stride, const int32_t* bitmaps, int64_t bitmaps_stride,
          int64_t rows, int64_t vocab_size, int64_t threads) {
    const int64_t pieces = (vocab_size + MASKED - 1) / MASKED;
    for_each(rows * pieces, threads, [&](int64_t i) {
        const int64_t row = i / pieces, start = i % pieces * MASKED;
        const int64_t count = std::min(MASKED, vocab_size - start);
        forbid(logits + row * stride + start, bitmaps + row * bitmaps_stride + start / WORD, count);
    });
}

}  // namespace
