// A pool of threads that go to sleep soon when there is no work.
//
// OpenMP's threads spin for milliseconds while they wait. On a machine that does other work too,
// they keep cores from threads that have work, and a kernel of microseconds takes as long as the
// scheduler's time slice. These threads spin for about as long as the time between two kernels, and
// then sleep.
//
// The fields of a job need no lock. A thread reads them only after it has taken a call from `left`,
// with a compare-and-swap that checks the job's number. The next job is written only after all
// calls that were taken have returned.

#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <system_error>
#include <thread>

#include "parallel.h"

namespace {

constexpr std::chrono::microseconds SPIN(200);
constexpr int POLLS = 16;  // checks of the condition for each read of the clock

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

inline void sleep_while(std::atomic<uint32_t>& word, uint32_t value) {
    syscall(SYS_futex, (uint32_t*)&word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}
inline void wake_all(std::atomic<uint32_t>& word) {
    syscall(SYS_futex, (uint32_t*)&word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

// Spin until the condition holds; false if it does not within SPIN.
template <typename Condition>
inline bool spin_until(const Condition& condition) {
    const auto end = std::chrono::steady_clock::now() + SPIN;
    do {
        for (int i = 0; i < POLLS; i++) {
            if (condition()) return true;
            relax();
        }
    } while (std::chrono::steady_clock::now() < end);
    return false;
}

// Runs one job at a time: `count` calls; each thread takes the next calls that are left. The thread
// that starts a job takes part in it, so a job ends even if no other thread runs (a forked process
// has no other threads). A job that starts during another job runs only on its own thread.
class Pool {
public:
    void run(int64_t count, int64_t threads, Call* call, const void* work) {
        if (is_busy.exchange(true, std::memory_order_acquire)) {
            for (int64_t i = 0; i < count; i++) call(work, i);
            return;
        }
        while (size + 1 < threads && add_thread()) size++;
        this->call = call, this->work = work, this->count = count;
        helpers.store(std::min(threads, count) - 1, std::memory_order_relaxed);
        share.store(uint32_t(4 * threads), std::memory_order_relaxed);
        unfinished.store(uint32_t(count), std::memory_order_relaxed);
        const uint32_t job = jobs.load(std::memory_order_relaxed) + 1;
        left.store(uint64_t(job) << 32 | uint32_t(count), std::memory_order_release);
        jobs.store(job);
        if (sleepers.load() > 0) wake_all(jobs);
        take_part(job);
        finish();
        is_busy.store(false, std::memory_order_release);
    }

private:
    bool add_thread() {
        try {
            std::thread([this, id = size] { serve(id); }).detach();
            return true;
        } catch (const std::system_error&) {  // the system allows no more threads
            return false;
        }
    }

    // Take calls of the job until none is left. The job's fields are read only after a call was
    // taken: they do not change until all calls have returned.
    void take_part(uint32_t job) {
        uint64_t state = left.load(std::memory_order_acquire);
        while (state >> 32 == job && uint32_t(state) > 0) {
            // Take fewer calls at a time towards the end, so that all threads end together.
            const uint32_t some = 1 + (uint32_t(state) - 1) / share.load(std::memory_order_relaxed);
            if (!left.compare_exchange_weak(state, state - some, std::memory_order_acq_rel)) continue;
            const int64_t first = count - uint32_t(state);
            for (int64_t i = first; i < first + some; i++) call(work, i);
            if (unfinished.fetch_sub(some) == some && owner_sleeps.load()) wake_all(unfinished);
            state = left.load(std::memory_order_acquire);
        }
    }

    void finish() {
        const auto is_done = [this] { return unfinished.load() == 0; };
        if (spin_until(is_done)) return;
        owner_sleeps.store(true);
        while (const uint32_t some = unfinished.load()) sleep_while(unfinished, some);
        owner_sleeps.store(false);
    }

    void serve(int64_t id) {
        for (uint32_t seen = 0;;) {
            const auto has_next = [&] { return jobs.load() != seen; };
            if (!spin_until(has_next)) {
                sleepers++;
                while (jobs.load() == seen) sleep_while(jobs, seen);
                sleepers--;
            }
            seen = jobs.load();
            if (id < helpers.load(std::memory_order_relaxed)) take_part(seen);
        }
    }

    std::atomic<bool> is_busy{false};
    int64_t size = 0;
    Call* call;
    const void* work;
    int64_t count;
    std::atomic<int64_t> helpers{0};
    std::atomic<uint32_t> share{1};
    std::atomic<bool> owner_sleeps{false};
    alignas(64) std::atomic<uint32_t> jobs{0};  // the number of jobs that were started
    std::atomic<int> sleepers{0};
    alignas(64) std::atomic<uint64_t> left{0};  // the job's number, and how many calls are left
    alignas(64) std::atomic<uint32_t> unfinished{0};
};

// Never destroyed: its threads run until the process ends.
void run_in_pool(int64_t count, int64_t threads, Call* call, const void* work) {
    static Pool& pool = *new Pool;
    pool.run(count, threads, call, work);
}

}  // namespace
