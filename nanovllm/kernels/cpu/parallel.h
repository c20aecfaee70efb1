// Share work among threads: those of a pool that all libraries use, or PyTorch's.

#pragma once

#include <algorithm>
#include <cstdint>

extern "C" {
typedef void Call(const void* work, int64_t index);
typedef void Run(int64_t count, int64_t threads, Call* call, const void* work);
// The function of pool.h, if Python has set it; else PyTorch's OpenMP threads do the work.
Run* shared_run = nullptr;
}

namespace {

// Call work(0) .. work(count - 1), each on one of the threads.
template <typename Work>
inline void for_each(int64_t count, int64_t threads, const Work& work) {
    if (threads <= 1 || count <= 1) {
        for (int64_t i = 0; i < count; i++) work(i);
    } else if (shared_run) {
        Call* call = [](const void* w, int64_t index) { (*(const Work*)w)(index); };
        shared_run(count, threads, call, &work);
    } else {
#pragma omp parallel for num_threads(threads) schedule(dynamic)
        for (int64_t i = 0; i < count; i++) work(i);
    }
}

// Call work(row) for all rows, with a contiguous piece of them for each thread. Waking a thread
// takes microseconds, or milliseconds on a busy machine: few elements are faster on one thread.
constexpr int64_t FEW_ELEMENTS = 1 << 15;

template <typename Work>
inline void for_each_row(int64_t rows, int64_t size, int64_t threads, const Work& work) {
    const int64_t pieces = rows * size <= FEW_ELEMENTS ? 1 : std::min(rows, threads);
    for_each(pieces, threads, [&](int64_t piece) {
        const int64_t end = (piece + 1) * rows / pieces;
        for (int64_t row = piece * rows / pieces; row < end; row++) work(row);
    });
}

}  // namespace
