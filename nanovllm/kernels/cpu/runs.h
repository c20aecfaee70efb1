// Share consecutive work among threads, so that each of them reads memory in order.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "parallel.h"

namespace {

// Call work(first, last) for runs that together are 0 to count - 1. Each thread takes the next run
// when it is done. Runs become shorter towards the end, so that all threads end together.
template <typename Work>
inline void for_each_run(int64_t count, int64_t threads, const Work& work) {
    if (threads <= 1) return work(0, count);
    std::atomic<int64_t> next{0};
    for_each(std::min(count, threads), threads, [&](int64_t) {
        for (int64_t first = next.load(std::memory_order_relaxed); first < count;) {
            const int64_t last = first + std::max<int64_t>(1, (count - first) / (2 * threads));
            if (!next.compare_exchange_weak(first, last, std::memory_order_relaxed)) continue;
            work(first, last);
            first = next.load(std::memory_order_relaxed);
        }
    });
}

}  // namespace
