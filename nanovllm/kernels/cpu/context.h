// The keys and values of one sequence and head, wherever they are stored.

#pragma once

#include <algorithm>
#include <cstdint>

#include "vector.h"

namespace {

// Addresses of KEYS keys and values, then of the next KEYS. After the last key, it is repeated.
template <typename T>
struct Near {
    const T *keys[2 * KEYS], *values[2 * KEYS];
};

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

    // The addresses of KEYS tokens from `start` on.
    void find(const T** k, const T** v, int64_t start, int64_t end) const {
        int64_t block = start / block_size, offset = start % block_size;
        for (int j = 0; j < KEYS; j++) {
            const int64_t token = table ? table[block] * block_size + offset : start + j;
            k[j] = keys + token * key_stride;
            v[j] = values + token * value_stride;
            if (start + j + 1 < end && ++offset == block_size) block++, offset = 0;
            if (start + j + 1 >= end) {
                std::fill(k + j, k + KEYS, k[j]);
                std::fill(v + j, v + KEYS, v[j]);
                return;
            }
        }
    }

    // Call work(near, start, count) for the keys [first, end), up to KEYS at a time. They are
    // divided at multiples of KEYS, so that a row's sums do not depend on where the first one is.
    template <typename Work>
    void go_through(int64_t first, int64_t end, const Work& work) const {
        if (first == end) return;
        Near<T> near;
        find(near.keys + KEYS, near.values + KEYS, first, end);
        for (int64_t start = first, next; start < end; start = next) {
            next = std::min(start / KEYS * KEYS + KEYS, end);
            std::copy(near.keys + KEYS, near.keys + 2 * KEYS, near.keys);
            std::copy(near.values + KEYS, near.values + 2 * KEYS, near.values);
            find(near.keys + KEYS, near.values + KEYS, std::min(next, end - 1), end);
            work(near, start, int(next - start));
        }
    }
};

}  // namespace
