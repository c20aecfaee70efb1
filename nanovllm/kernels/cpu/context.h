// Read the keys and values of one sequence and head, in the cache or in a step's own tensors.

#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "vector.h"

namespace {

// The addresses of KEYS keys and values, and of the next KEYS to prefetch. The first and the last key
// are repeated to fill them. For codes, also the places of their scales.
template <typename T>
struct Near {
    const T *keys[2 * KEYS], *values[2 * KEYS];
    int64_t scales[2 * KEYS];
};

template <typename T>
constexpr bool is_codes = std::is_same<T, e4m3>::value;

// A factor for queries, and for sums of values: it undoes the factor of values read by `load`.
template <typename T>
constexpr float load_factor = is_codes<T> ? CODE_FACTOR : 1.0f;

// Prefetch the row KEYS after `row`: rows are too far apart for the hardware to predict.
template <typename T>
inline void fetch_next(const T* const* row, int64_t d) {
    if (d * sizeof(T) % CACHE_LINE == 0) __builtin_prefetch(row[KEYS] + d);
}

// A sequence's keys and values of one head: in the blocks of a table, or in consecutive rows.
template <typename T>
struct Context {
    const T *keys, *values;
    int64_t key_stride, value_stride;
    const int32_t* table;  // null: token i is row i
    int64_t block_size;
    const bf16 *key_scales, *value_scales;  // for codes: of this head, in the first block
    int64_t scale_stride;                   // from a block to the next

    // Write the addresses of KEYS tokens from `start` on to the second half of `near`: of those in
    // [first, end), and of the nearest of these for the others.
    void find(Near<T>& near, int64_t start, int64_t first, int64_t end) const {
        const T **k = near.keys + KEYS, **v = near.values + KEYS;
        int64_t* scales = near.scales + KEYS;
        int64_t block = std::max(start, first) / block_size;
        int64_t offset = std::max(start, first) % block_size;
        for (int j = 0; j < KEYS; j++) {
            const int64_t token =
                table ? table[block] * block_size + offset : std::max(start + j, first);
            k[j] = keys + token * key_stride;
            v[j] = values + token * value_stride;
            if constexpr (is_codes<T>) {
                scales[j] = table[block] * scale_stride + offset;
                if (j == 0 || offset == 0) {
                    __builtin_prefetch(key_scales + scales[j]);
                    __builtin_prefetch(value_scales + scales[j]);
                }
            }
            if (start + j + 1 >= end) {
                std::fill(k + j, k + KEYS, k[j]);
                std::fill(v + j, v + KEYS, v[j]);
                if constexpr (is_codes<T>) std::fill(scales + j, scales + KEYS, scales[j]);
                return;
            }
            if (start + j >= first && ++offset == block_size) block++, offset = 0;
        }
    }

    // Read the scales of the first KEYS keys and values, times `factor`.
    void read_scales(const Near<T>& near, float factor, float* k, float* v) const {
        for (int first = 0; first < KEYS; first += LANES) {
            const int64_t* at = near.scales + first;
            if (block_size % LANES == 0 && at[LANES - 1] - at[0] == LANES - 1) {  // all in one block
                vec(k + first) = load(key_scales + at[0]) * factor;
                vec(v + first) = load(value_scales + at[0]) * factor;
                continue;
            }
            for (int j = 0; j < LANES; j++) {
                k[first + j] = widen(key_scales[at[j]]) * factor;
                v[first + j] = widen(value_scales[at[j]]) * factor;
            }
        }
    }

    // Call work(near, start, count) for the keys [first, end), in groups of KEYS that start at
    // multiples of KEYS. Keys of the first group before `first` are in no row's sight.
    template <typename Work>
    void go_through(int64_t first, int64_t end, const Work& work) const {
        if (first == end) return;
        Near<T> near;
        find(near, first / KEYS * KEYS, first, end);
        for (int64_t start = first / KEYS * KEYS; start < end; start += KEYS) {
            const int64_t next = std::min(start + KEYS, end);
            std::copy(near.keys + KEYS, near.keys + 2 * KEYS, near.keys);
            std::copy(near.values + KEYS, near.values + 2 * KEYS, near.values);
            if constexpr (is_codes<T>)
                std::copy(near.scales + KEYS, near.scales + 2 * KEYS, near.scales);
            find(near, std::min(next, end - 1), first, end);
            work(near, start, int(next - start));
        }
    }
};

}  // namespace
