// The sequences of a step: their rows, and the slots with the states before and after these.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "add_product.h"
#include "parallel.h"
#include "scalar.h"
#include "vector.h"

namespace {

// Sequence i has the rows [start(i), start(i + 1)), and reads its states from slot before[i]. The
// states after a row go to the slot after[row], if that is not negative.
struct StateRows {
    const int64_t *before, *after;
    const int64_t* ends;  // null: each sequence has `num_queries` rows
    int64_t count, num_queries;

    int64_t start(int64_t i) const { return ends ? ends[i] : i * num_queries; }
};

// The states of one layer or head, in all slots.
template <typename S>
struct Slots {
    S* states;
    int64_t stride;  // from a slot to the next

    // Those in a slot; null if they are not kept.
    S* at(int64_t slot) const { return slot < 0 ? nullptr : states + slot * stride; }
};

// At least `size` floats from a cache line on. The thread's next call returns the same ones.
inline float* scratch(int64_t size) {
    thread_local std::vector<float> floats;  // kept for the next call
    constexpr int64_t LINE = CACHE_LINE / sizeof(float);
    if (int64_t(floats.size()) < size + LINE) floats.resize(size + LINE);
    return (float*)(((uintptr_t)floats.data() + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE);
}

inline int64_t round_up(int64_t size, int64_t step) { return (size + step - 1) / step * step; }

// Copy `rows` rows of `size` numbers.
template <typename From, typename To>
inline void copy_rows(const From* from, int64_t from_stride, To* to, int64_t to_stride,
                      int64_t rows, int64_t size) {
    for (int64_t row = 0; row < rows; row++)
        std::copy(from + row * from_stride, from + row * from_stride + size, to + row * to_stride);
}

// Widen `size` numbers; zeros fill `to` up to `padded`.
template <typename T>
inline void widen_all(const T* from, int64_t size, float* to, int64_t padded) {
#pragma omp simd
    for (int64_t i = 0; i < size; i++) to[i] = widen(from[i]);
    std::fill(to + size, to + padded, 0.0f);
}

constexpr int64_t ROWS_AHEAD = 4;  // that are read from memory while a row is computed

// Start to read `size` numbers. Rows are too far apart for the hardware to predict the next one.
template <typename T>
inline void fetch(const T* from, int64_t size) {
    for (int64_t i = 0; i < size; i += CACHE_LINE / sizeof(T)) __builtin_prefetch(from + i, 0, 2);
}

inline float softplus(float x) { return x > 20 ? x : std::log1p(std::exp(x)); }

// The same by `exp2_of` and `log_of`, for loops of vectors: also exact where exp(x) is small.
inline float softplus_of(float x) {
    const float power = exp2_of(std::min(x, 20.0f) * LOG2E), total = 1 + power;
    // The quotient corrects for the rounding of the total.
    const float exact = log_of(total) * (power / (total == 1 ? 1 : total - 1));
    return x > 20 ? x : total == 1 ? power : exact;
}

// Call work(sequence, head, first, end) for all heads of all sequences, on some threads. A head has
// `size` columns (or rows) that do not depend on each other. They are divided at multiples of
// `unit` if there are more threads than heads.
template <typename Work>
inline void for_each_head(const StateRows& rows, int64_t heads, int64_t size, int64_t unit,
                          int64_t head_elements, int64_t threads, const Work& work) {
    const int64_t all = rows.count * heads, units = (size + unit - 1) / unit;
    if (all == 0) return;
    const int64_t elements = rows.start(rows.count) * heads * head_elements;
    if (elements <= FEW_ELEMENTS) threads = 1;
    const int64_t parts = std::min(units, (threads + all - 1) / all);
    for_each(all * parts, threads, [&](int64_t i) {
        const int64_t head = i / parts, part = i % parts;
        const int64_t first = part * units / parts * unit, end = (part + 1) * units / parts * unit;
        work(head / heads, head % heads, first, std::min(end, size));
    });
}

}  // namespace
