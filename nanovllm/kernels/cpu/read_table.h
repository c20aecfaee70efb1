// Read a decode step's inputs from the device table.

#pragma once

#include <algorithm>
#include <cstdint>

#include "noise.h"

namespace {

// `longs` [5, rows] are row numbers, tokens, positions, slots and keys.
void read_table(const int64_t* tokens, const int64_t* seeds, int32_t* lengths,
                const float* temperatures, const int32_t* batch, const int32_t* tables,
                int64_t* longs, int32_t* context_lens, int32_t* out_tables, float* out_temperatures,
                int64_t rows, int64_t max_blocks, int64_t width, int64_t block_size) {
    for (int64_t i = 0; i < rows; i++) {
        const int64_t row = batch[i], length = lengths[row];
        const bool used = length >= 0;
        const int64_t position = used ? length : 0, block = position / block_size;
        const int32_t* table = tables + row * max_blocks;
        const int64_t num_blocks = used ? block + 1 : 0;
        longs[i] = row;
        longs[rows + i] = used ? std::max(tokens[row], int64_t(0)) : 0;
        longs[2 * rows + i] = position;
        longs[3 * rows + i] = used ? table[block] * block_size + position % block_size : -1;
        longs[4 * rows + i] = noise_key(uint64_t(seeds[row]), uint64_t(length + 1));
        context_lens[i] = int32_t(length + 1);
        out_temperatures[i] = temperatures[row];
        if (used) lengths[row]++;
        std::copy(table, table + num_blocks, out_tables + i * width);
        std::fill(out_tables + i * width + num_blocks, out_tables + (i + 1) * width, 0);
    }
}

}  // namespace
