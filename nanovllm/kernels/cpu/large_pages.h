// Memory in large pages, which is read faster in order: the processor prefetches within pages.

#pragma once

#include <cstdint>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace {

constexpr int64_t LEAST_LARGE = 1 << 20;  // bytes; smaller memory has few pages
constexpr uintptr_t SMALL_PAGE = 1 << 12, LARGE_PAGE = 1 << 21;

// Ask the system for large pages for memory that will be written.
void prefer_large_pages(void* from, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    if (bytes < LEAST_LARGE) return;
    const uintptr_t start = uintptr_t(from) & -SMALL_PAGE;
    madvise((void*)start, (uintptr_t(from) + bytes - start + SMALL_PAGE - 1) & -SMALL_PAGE,
            MADV_HUGEPAGE);
#endif
}

// Move memory that was written into large pages, if the system can: it may have been used before,
// in small pages. Its contents and addresses stay.
void collapse_pages(void* from, int64_t bytes) {
#if defined(__linux__)
    constexpr int COLLAPSE = 25;  // MADV_COLLAPSE, since Linux 6.1; older systems return an error
    if (bytes < LEAST_LARGE) return;
    const uintptr_t end = uintptr_t(from) + bytes;
    for (uintptr_t at = uintptr_t(from) & -LARGE_PAGE; at < end; at += LARGE_PAGE)
        madvise((void*)at, LARGE_PAGE, COLLAPSE);
#endif
}

}  // namespace
