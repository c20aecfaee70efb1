// Products of weights in blocks and bfloat16 inputs: the fastest instructions for each number of
// rows. An output is the same, bit for bit, for any number of rows.

#pragma once

#include <cstdint>

#include "block_amx.h"
#include "block_integers.h"

namespace {

// out [rows, outputs] = x @ weight.T + bias.
void block_rounded(const Blocks* weight, const bf16* x, int64_t stride, const bf16* bias,
                   bf16* out, int64_t rows, int64_t threads) {
    with_kind(weight->kind, [&](auto kind) {
        using K = decltype(kind);
#ifdef BLOCKS_BY_AMX
        if (rows >= FEW_FOR_AMX && has_amx()) {
            auto* multiply = rows <= 8 ? block_amx<K, 8> : block_amx<K, 16>;
            return multiply(*weight, x, stride, bias, out, rows, threads);
        }
#endif
        block_integers<K>(*weight, x, stride, bias, out, rows, threads);
    });
}

}  // namespace
