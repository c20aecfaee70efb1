// Share consecutive work among threads, so that each of them reads memory in order.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "parallel.h"

namespace {

// Call work(first, last) for runs that together are 0 to count - 1. Runs become shorter towards the
// end, so that all threads end together.
template <typename Work>
inline void for_each_run(int64_t count, int64_t threads, const Work& work) {
    if (threads <= 1) return work(0, count);
    thread_local std::vector<int64_t> starts;  // kept for the next call
    starts.clear();
    for (int64_t at = 0; at < count; at += std::max<int64_t>(1, (count - at) / (2 * threads)))
        starts.push_back(at);
    const int64_t* first = starts.data();
    const int64_t runs = int64_t(starts.size());
    for_each(runs, threads, [=, &work](int64_t run) {
        work(first[run], run + 1 < runs ? first[run + 1] : count);
    });
}

}  // namespace
