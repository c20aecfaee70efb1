// Attention of all tasks of a step. A row is a query of one head. A sequence's rows with the same
// key head are computed together, so that keys are read once for all of them.

#pragma once

#include <algorithm>
#include <cstdint>

#include "few_queries.h"
#include "parallel.h"
#include "tile.h"

namespace {

// The inputs that all tasks share. Sequence s has the queries q_ends[s] .. q_ends[s + 1] - 1, which
// are the last of its k_lens[s] tokens. Its rows are numbered query by query, G rows each.
template <typename T, typename K>
struct Step {
    const T* q;  // [tokens, H, D]
    const K* k;  // [tokens, KVH, D], or the cache
    const K* v;
    const bf16* k_scales;  // [blocks, KVH, block_size], if k has codes
    const bf16* v_scales;
    T* out;  // [tokens, H, D]
    const int32_t* q_ends;
    const int32_t* k_lens;
    const int32_t* tables;  // null: a sequence's keys are in the rows of its queries
    const int32_t* tasks;   // [num_tasks, 5]: sequence, first row, first key, end key, slot
    const int32_t* merges;  // [num_merges, 3]: sequence, first slot, end slot
    State* partial;         // [slots, KVH]: states to be merged
    int64_t num_tasks, num_merges, q_stride, k_stride, v_stride, table_stride, block_size;
    int64_t q_heads, kv_heads, head_dim, window, threads;
    float scale;
    float soft_cap;      // on the scores; 0: no cap
    const float* sinks;  // [H]; null: no sinks

    int64_t group() const { return q_heads / kv_heads; }
    int64_t num_queries(int64_t seq) const { return q_ends[seq + 1] - q_ends[seq]; }
    int64_t num_rows(int64_t seq) const { return num_queries(seq) * group(); }

    // The offset of a row in [tokens, H, D], for a stride of tokens.
    int64_t place(int64_t seq, int64_t row, int64_t kv_head, int64_t stride) const {
        return (q_ends[seq] + row / group()) * stride
            + (kv_head * group() + row % group()) * head_dim;
    }

    // The end of the keys that a row sees: the last one is the query's own.
    int32_t limit(int64_t seq, int64_t row) const {
        return int32_t(k_lens[seq] - num_queries(seq) + row / group() + 1);
    }

    // The sink of a row, with the factor log2(e) that scores have. It counts as a key without a value.
    float sink(int64_t row, int64_t kv_head) const {
        return sinks[kv_head * group() + row % group()] * LOG2E;
    }

    Context<K> context(int64_t seq, int64_t kv_head) const {
        const int64_t first = tables ? 0 : q_ends[seq], head = kv_head * head_dim;
        return {k + first * k_stride + head, v + first * v_stride + head, k_stride, v_stride,
                tables ? tables + seq * table_stride : nullptr, block_size,
                k_scales + kv_head * block_size, v_scales + kv_head * block_size,
                kv_heads * block_size};
    }

    void write(const State& state, int64_t seq, int64_t kv_head) const {
        for (int64_t r = 0; r < num_rows(seq); r++) {
            float total = state.total[r];
            if (sinks) total += exp2_of(std::min(sink(r, kv_head) - state.top[r], 128.0f));
            const float share = total != 0 ? load_factor<K> / total : 0;  // zeros without keys
            T* to = out + place(seq, r, kv_head, q_heads * head_dim);
            for (int64_t d = 0; d < head_dim; d++) to[d] = narrow<T>(state.sums[r][d] * share);
        }
    }

    void run_few(const int32_t* task, int64_t kv_head) const {
        const int64_t seq = task[0], slot = task[4], rows = num_rows(seq);
        alignas(CACHE_LINE) float queries[FEW][MAX_HEAD_DIM];
        int32_t limits[FEW];
        for (int64_t r = 0; r < FEW; r++) {  // rows after the last one repeat it
            const int64_t row = std::min(r, rows - 1);
            const T* from = q + place(seq, row, kv_head, q_stride);
            limits[r] = limit(seq, row);
            const float factor = scale * LOG2E * load_factor<K>;
            for (int64_t d = 0; d < head_dim; d++) queries[r][d] = widen(from[d]) * factor;
        }
        State own;
        State& state = slot < 0 ? own : partial[slot * kv_heads + kv_head];
        state.clear(head_dim);
        (rows <= 2 ? attend_few<2, K> : attend_few<4, K>)(
            state, queries, limits, window, rows, context(seq, kv_head), head_dim, task[2],
            task[3], soft_cap * LOG2E);
        if (slot < 0) write(state, seq, kv_head);
    }

    void run_tile(const int32_t* task, int64_t kv_head) const {
        const int64_t seq = task[0], first = task[1];
        const int64_t rows = std::min<int64_t>(TILE, num_rows(seq) - first);
        alignas(CACHE_LINE) float queries[MAX_HEAD_DIM][TILE], sums[MAX_HEAD_DIM][TILE];
        int32_t limits[TILE];
        float total[TILE] = {}, top[TILE];
        std::fill(top, top + TILE, NO_SCORE);
        std::fill(sums[0], sums[head_dim], 0.0f);
        for (int64_t r = 0; r < TILE; r++) {
            const int64_t row = first + std::min(r, rows - 1);
            const T* from = q + place(seq, row, kv_head, q_stride);
            limits[r] = limit(seq, row);
            if (sinks) {
                top[r] = sink(row, kv_head);
                total[r] = 1;
            }
            for (int64_t d = 0; d < head_dim; d++) queries[d][r] = widen(from[d]) * (scale * LOG2E);
        }
        attend_tile(sums, total, top, queries, limits, window, context(seq, kv_head), head_dim, task[2],
                    task[3], soft_cap * LOG2E);
        for (int64_t r = 0; r < rows; r++) {
            const float share = total[r] != 0 ? 1 / total[r] : 0;
            T* to = out + place(seq, first + r, kv_head, q_heads * head_dim);
            for (int64_t d = 0; d < head_dim; d++) to[d] = narrow<T>(sums[d][r] * share);
        }
    }
};

template <typename T, typename K = T>
void attention(const Step<T, K>& step) {
    for_each(step.num_tasks * step.kv_heads, step.threads, [&](int64_t i) {
        const int32_t* task = step.tasks + i / step.kv_heads * 5;
        const bool few = step.num_rows(task[0]) <= FEW && step.head_dim % LANES == 0;
        few ? step.run_few(task, i % step.kv_heads) : step.run_tile(task, i % step.kv_heads);
    });
    for_each(step.num_merges * step.kv_heads, step.threads, [&](int64_t i) {
        const int32_t* part = step.merges + i / step.kv_heads * 3;
        const int64_t kv_head = i % step.kv_heads;
        State& state = step.partial[part[1] * step.kv_heads + kv_head];
        for (int64_t slot = part[1] + 1; slot < part[2]; slot++)
            state.add(step.partial[slot * step.kv_heads + kv_head], step.num_rows(part[0]),
                      step.head_dim);
        step.write(state, part[0], kv_head);
    });
}

}  // namespace
