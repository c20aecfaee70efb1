// What AMX, Intel's unit for products of small matrices, needs before it multiplies.

#pragma once

#include <cstdint>

#include "vector.h"

#if defined(__AMX_TILE__) && defined(__linux__)
#define HAS_REGISTERS
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace {

constexpr int REGISTER_ROWS = 16, REGISTER_BYTES = 64;  // of each row

// The shapes of registers 0 to 3 (sums), 4 and 5 (rows), 6 and 7 (weights). `bytes` of each row are
// multiplied at a time, and a row of weights has those of four bytes.
struct alignas(CACHE_LINE) Registers {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};

    constexpr explicit Registers(int64_t num_rows, int bytes = REGISTER_BYTES) {
        for (int i = 0; i < 8; i++) row_bytes[i] = REGISTER_BYTES, rows[i] = uint8_t(num_rows);
        for (int i = 4; i < 6; i++) row_bytes[i] = uint16_t(bytes);
        for (int i = 6; i < 8; i++) rows[i] = uint8_t(bytes / 4);
    }
};

// gcc 12 believes that `_tile_loadconfig` reads 8 bytes, and may remove the stores of the others.
inline void configure(const Registers& shapes) { __asm__ volatile("ldtilecfg %0" ::"m"(shapes)); }

// Whether there is such a unit. The system enables it for a process that asks for it.
inline bool has_amx() {
    constexpr int ASK = 0x1023, TILE_DATA = 18;
    static const bool has = syscall(SYS_arch_prctl, ASK, TILE_DATA) == 0;
    return has;
}

}  // namespace

#endif
