// Memory in large pages: it is read faster in order, as the processor prefetches within pages.

#pragma once

#include <cstdint>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace {

constexpr int64_t LEAST_LARGE = 1 << 20;  // bytes; smaller memory has few pages

// Ask the system for large pages for memory that was not written yet.
void prefer_large_pages(void* from, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    constexpr uintptr_t PAGE = 4096;
    if (bytes < LEAST_LARGE) return;
    const uintptr_t start = uintptr_t(from) & -PAGE;
    madvise((void*)start, (uintptr_t(from) + bytes - start + PAGE - 1) & -PAGE, MADV_HUGEPAGE);
#endif
}

}  // namespace
