// Inputs of products with weights of 8 bits that have one scale for each output: bfloat16 rows that
// are rounded to integers of 14 bits, as those of block_rounded.h, for each 256 inputs.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "add_product.h"
#include "block_rounded.h"

namespace {

constexpr int CHUNK = 64;             // inputs that are multiplied at a time
constexpr int SPAN = 256;             // inputs that are rounded together
constexpr int CHUNKS = SPAN / CHUNK;  // of a span
constexpr int LOW_BITS = 7;           // of the second part of an integer

// Rounded rows, in groups of `size` rows. The rows after the last one are zero.
struct RoundedBytes {
    const int8_t* parts;  // [groups, chunks, PARTS, size, CHUNK]
    const float* scales;  // [groups, spans, size]
    const int32_t* sums;  // [groups, spans, size]
    int64_t chunks, size;

    int64_t spans() const { return (chunks + CHUNKS - 1) / CHUNKS; }
};

// Round a span of a row; returns its scale. The parts of a chunk are `apart` bytes apart.
inline float round_span(const bf16* x, int64_t chunks, int8_t* to, int64_t apart, int32_t* sum) {
    typedef int8_t Narrow __attribute__((vector_size(LANES)));
    IntVec largest = {}, total = {};
    for (int64_t i = 0; i < chunks * CHUNK; i += LANES) {
        const IntVec size = (IntVec)load(x + i) & 0x7fffffff;
        largest = largest > size ? largest : size;
    }
    int32_t most = 0;
    for (int i = 0; i < LANES; i++) most = std::max(most, largest[i]);
    const Range<12> range(most >> 16);
    for (int64_t c = 0; c < chunks; c++, to += PARTS * apart)
        for (int i = 0; i < CHUNK; i += LANES) {
            constexpr float SHIFT = 0x1.8p23f;  // adding it rounds to an integer, in the low bits
            const Vec shifted = load(x + c * CHUNK + i) * range.factor + SHIFT;
            const IntVec integers = (IntVec)shifted - bit_cast<int32_t>(SHIFT);
            const IntVec first = (integers + (1 << (LOW_BITS - 1))) >> LOW_BITS;
            const Narrow high = __builtin_convertvector(first, Narrow);
            const Narrow low = __builtin_convertvector(integers - (first << LOW_BITS), Narrow);
            std::memcpy(to + i, &high, LANES);
            std::memcpy(to + apart + i, &low, LANES);
            total += integers;
        }
    *sum = 0;
    for (int i = 0; i < LANES; i++) *sum += total[i];
    return range.scale;
}

// Round rows [rows, inputs], in groups of `size`. The memory stays valid until this thread's next
// call.
inline RoundedBytes round_bytes(const bf16* x, int64_t stride, int64_t rows, int64_t inputs,
                                int64_t size, int64_t threads) {
    thread_local std::vector<uint8_t> scratch;  // kept for the next call
    const int64_t chunks = inputs / CHUNK, padded = (rows + size - 1) / size * size;
    const int64_t spans = (chunks + CHUNKS - 1) / CHUNKS, apart = size * CHUNK;
    const size_t needed = padded * (chunks * PARTS * CHUNK + spans * 8) + CACHE_LINE;
    if (scratch.size() < needed) scratch.resize(needed);
    int8_t* parts = (int8_t*)((uintptr_t(scratch.data()) + CACHE_LINE - 1) & -CACHE_LINE);
    float* scales = (float*)(parts + padded * chunks * PARTS * CHUNK);
    int32_t* sums = (int32_t*)(scales + padded * spans);
    for_each_row(padded, inputs, threads, [&](int64_t row) {
        const int64_t group = row / size, r = row % size;
        for (int64_t s = 0; s < spans; s++) {
            const int64_t first = s * CHUNKS, count = std::min<int64_t>(CHUNKS, chunks - first);
            const int64_t at = (group * spans + s) * size + r;
            int8_t* to = parts + (group * chunks + first) * PARTS * apart + r * CHUNK;
            if (row < rows) {
                const bf16* from = x + row * stride + first * CHUNK;
                scales[at] = round_span(from, count, to, apart, sums + at);
            } else {
                for (int64_t c = 0; c < count * PARTS; c++) std::memset(to + c * apart, 0, CHUNK);
                scales[at] = 0, sums[at] = 0;
            }
        }
    });
    return {parts, scales, sums, chunks, size};
}

}  // namespace
