// Linear layers with plain bfloat16 weights in pairs.

#pragma once

#include <vector>

#include "pair_amx.h"
#include "pair_vectors.h"
#include "row_amx.h"
#include "tiled_linear.h"

namespace {

#if !defined(PAIRS_BY_AMX) && !defined(PAIRS_BY_VECTORS)

inline int64_t rows_of_pass(const PairProduct&, int64_t rows) { return rows; }
inline size_t scratch_of_pass(const PairProduct&, int64_t) { return 0; }
inline void multiply_pass(const PairProduct&, void*, int64_t) {}

#endif

// Copy the inputs to their places, with zeros at places that have no input.
inline void place_inputs(const PairProduct& p, const int32_t* order, bf16* to, int64_t threads) {
    for_each_row(p.rows, p.inputs(), threads, [&](int64_t row) {
        for (int64_t i = 0; i < p.inputs(); i++)
            to[row * p.inputs() + i] = order[i] < 0 ? bf16{0} : p.x[row * p.stride + order[i]];
    });
}

// out [rows, outputs] = x @ weight.T + bias. Memory that is kept: two times the rows of a pass.
inline void pair_linear(const Matrix* weight, const bf16* x, int64_t stride, const bf16* bias,
                        bf16* out, int64_t all_rows, int64_t threads) {
    if (!all_rows) return;
    thread_local std::vector<char> scratch;  // kept for the next call
    const PairProduct whole = {(const Unit*)weight->codes, weight->blocks, weight->outputs, bias};
    const int64_t most = rows_of_pass(whole, all_rows);
    const size_t pass = scratch_of_pass(whole, most);
    const size_t placed = weight->order ? most * whole.inputs() * sizeof(bf16) : 0;
    if (scratch.size() < pass + placed + CACHE_LINE) scratch.resize(pass + placed + CACHE_LINE);
    char* aligned = (char*)((uintptr_t(scratch.data()) + CACHE_LINE - 1) & -CACHE_LINE);
    for (int64_t first = 0; first < all_rows; first += most) {
        PairProduct p = whole;
        p.x = x + first * stride, p.stride = stride;
        p.rows = std::min(most, all_rows - first), p.out = out + first * p.outputs;
        if (weight->order) {
            bf16* to = (bf16*)(aligned + pass);
            place_inputs(p, weight->order, to, threads);
            p.x = to, p.stride = p.inputs();
        }
        multiply_pass(p, aligned, threads);
    }
}

// The product of any weight that `Matrix` describes; for AMX, only of bfloat16.
template <typename T>
void any_linear(const Matrix* weight, const T* x, int64_t stride, const T* bias, T* out,
                int64_t rows, int64_t threads) {
    if constexpr (sizeof(T) == sizeof(bf16)) {
        if (weight->kind == PAIRS) return pair_linear(weight, x, stride, bias, out, rows, threads);
        if (weight->kind == ROWS_OF_TABLE)
            return row_linear((const bf16*)weight->codes, weight->outputs, weight->depth, x, stride,
                              bias, out, rows, threads);
    }
    tiled_linear(weight, x, stride, bias, out, rows, threads);
}

// out [count, rows, outputs] of x: a product for each head. The inputs of a head are `distance`
// after those of the head before.
template <typename T>
void heads_linear(const Matrix* const* heads, int64_t count, const T* x, int64_t stride,
                  int64_t distance, T* out, int64_t rows, int64_t threads) {
    for_each(count, threads, [&](int64_t head) {
        T* to = out + head * rows * heads[head]->outputs;
        any_linear<T>(heads[head], x + head * distance, stride, nullptr, to, rows, 1);
    });
}

}  // namespace
