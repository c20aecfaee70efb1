// Attention of all tasks of a step. A row is a query of one head. A sequence's rows with the same
// key head are computed together, so that keys are read once for all of them. softmax.h has the order
// of sums.

#pragma once

#include <algorithm>
#include <cstdint>

#include "few_queries.h"
#include "parallel.h"
#include "tile.h"

namespace {

// The state of few rows or of a tile. A slot for one has no memory for columns that a tile of the
// layer does not have.
union AnyState {
    State few;
    TileState tile;
};

// The inputs that all tasks share. Sequence s has the queries q_ends[s] .. q_ends[s + 1] - 1, which
// are the last of its k_lens[s] tokens. Its rows are numbered query by query, G rows each. SHARED:
// values are the first numbers of the keys.
template <typename T, typename K, bool SHARED>
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
    const int32_t* tasks;   // [num_tasks, 5]: sequence, first row, first key, end key, slot or -1
    const int32_t* merges;  // [num_merges, 4]: sequence, first row, first slot, end slot
    char* partial;          // [slots, KVH, slot_bytes]: states to be merged
    int64_t num_tasks, num_merges, q_stride, k_stride, v_stride, table_stride, block_size;
    int64_t q_heads, kv_heads, head_dim, value_dim, window, threads, slot_bytes;
    int64_t part_keys;  // a multiple of KEYS
    float scale;
    float soft_cap;      // on the scores; 0: no cap
    const float* sinks;  // [H]; null: no sinks

    int64_t group() const { return q_heads / kv_heads; }
    int64_t num_queries(int64_t seq) const { return q_ends[seq + 1] - q_ends[seq]; }
    int64_t num_rows(int64_t seq) const { return num_queries(seq) * group(); }

    static_assert(!SHARED || TILE >= FEW, "a task of few rows must fit into one tile");

    // Sequences of few rows need no tile. A tile converts shared keys to float32 once, not anew for
    // every four rows and for each product.
    bool is_few(int64_t seq) const {
        return num_rows(seq) <= (SHARED ? 4 : FEW) && head_dim % 16 == 0;
    }

    AnyState& slot_state(int64_t slot, int64_t kv_head) const {
        return *(AnyState*)(partial + (slot * kv_heads + kv_head) * slot_bytes);
    }

    // The query of a row.
    const T* query(int64_t seq, int64_t row, int64_t kv_head) const {
        return q + (q_ends[seq] + row / group()) * q_stride
            + (kv_head * group() + row % group()) * head_dim;
    }

    // The output of a row.
    T* output(int64_t seq, int64_t row, int64_t kv_head) const {
        const int64_t head = kv_head * group() + row % group();
        return out + ((q_ends[seq] + row / group()) * q_heads + head) * value_dim;
    }

    // The numbers of a value, and those after them that complete a vector or a block.
    int64_t value_columns(int64_t step) const { return (value_dim + step - 1) / step * step; }

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

    // The factor of a row's sums: zero without keys.
    float share(float total, float top, int64_t row, int64_t kv_head) const {
        if (sinks) total += exp2_of(std::min(sink(row, kv_head) - top, 128.0f));
        return total != 0 ? 1 / total : 0;
    }

    void write(const State& state, int64_t seq, int64_t kv_head) const {
        for (int64_t r = 0; r < num_rows(seq); r++) {
            const float factor = share(state.total[r], state.top[r], r, kv_head) * load_factor<K>;
            T* to = output(seq, r, kv_head);
            for (int64_t d = 0; d < value_dim; d++) to[d] = narrow<T>(state.sums[r][d] * factor);
        }
    }

    void write(const TileState& state, int64_t seq, int64_t first, int64_t kv_head) const {
        const int64_t rows = std::min<int64_t>(TILE, num_rows(seq) - first);
        for (int64_t r = 0; r < rows; r++) {
            const float factor =
                share(state.total[r], state.top[r], first + r, kv_head) * load_factor<K>;
            T* to = output(seq, first + r, kv_head);
            for (int64_t d = 0; d < value_dim; d++) to[d] = narrow<T>(state.sums[d][r] * factor);
        }
    }

    void run_few(const int32_t* task, int64_t kv_head) const {
        const int64_t seq = task[0], slot = task[4], rows = num_rows(seq);
        alignas(CACHE_LINE) float queries[FEW][MAX_HEAD_DIM];
        const int64_t columns = value_columns(LANES);
        int32_t limits[FEW];
        for (int64_t r = 0; r < FEW; r++) {  // rows after the last one repeat it
            const int64_t row = std::min(r, rows - 1);
            const T* from = query(seq, row, kv_head);
            limits[r] = limit(seq, row);
            const float factor = scale * LOG2E * load_factor<K>;
            for (int64_t d = 0; d < head_dim; d++) queries[r][d] = widen(from[d]) * factor;
        }
        State own;
        State& state = slot < 0 ? own : slot_state(slot, kv_head).few;
        const auto attend = rows <= 2 ? attend_few<2, K> : attend_few<4, K>;
        attend_parts(state, task[2], task[3], part_keys, columns,
                     [&](State& part, int64_t from, int64_t to) {
                         attend(part, queries, limits, window, rows, context(seq, kv_head), head_dim,
                                columns, from, to, soft_cap * LOG2E);
                     });
        if (slot < 0) write(state, seq, kv_head);
    }

    void run_tile(const int32_t* task, int64_t kv_head) const {
        const int64_t seq = task[0], first = task[1], slot = task[4];
        const int64_t rows = std::min<int64_t>(TILE, num_rows(seq) - first);
        alignas(CACHE_LINE) float queries[MAX_HEAD_DIM][TILE];
        int32_t limits[TILE];
        TileState own;
        TileState& state = slot < 0 ? own : slot_state(slot, kv_head).tile;
        const int64_t columns = value_columns(SHARED ? 2 * BLOCK : BLOCK);
        for (int64_t r = 0; r < TILE; r++) {
            const int64_t row = first + std::min(r, rows - 1);
            const T* from = query(seq, row, kv_head);
            limits[r] = limit(seq, row);
            const float factor = scale * LOG2E * load_factor<K>;
            for (int64_t d = 0; d < head_dim; d++) queries[d][r] = widen(from[d]) * factor;
        }
        const auto attend = SHARED && rows <= LANES ? attend_tile<K, SHARED, SHARED ? 1 : 2>
                                                    : attend_tile<K, SHARED, 2>;
        attend_parts(state, task[2], task[3], part_keys, columns,
                     [&](TileState& part, int64_t from, int64_t to) {
                         attend(part, queries, limits, window, context(seq, kv_head), head_dim,
                                columns, from, to, soft_cap * LOG2E);
                     });
        if (slot < 0) write(state, seq, first, kv_head);
    }

    // Merge the states of a sequence's few rows, or of a tile.
    void merge(const int32_t* part, int64_t kv_head) const {
        const int64_t seq = part[0], row = part[1];
        AnyState& state = slot_state(part[2], kv_head);
        for (int64_t slot = part[2] + 1; slot < part[3]; slot++) {
            const AnyState& other = slot_state(slot, kv_head);
            if (is_few(seq)) state.few.add(other.few, value_columns(LANES), num_rows(seq));
            else state.tile.add(other.tile, value_dim);
        }
        if (is_few(seq)) write(state.few, seq, kv_head);
        else write(state.tile, seq, row, kv_head);
    }
};

template <typename T, typename K = T, bool SHARED = false>
void attention(const Step<T, K, SHARED>& step) {
    for_each(step.num_tasks * step.kv_heads, step.threads, [&](int64_t i) {
        const int32_t* task = step.tasks + i / step.kv_heads * 5;
        step.is_few(task[0]) ? step.run_few(task, i % step.kv_heads) : step.run_tile(task, i % step.kv_heads);
    });
    for_each(step.num_merges * step.kv_heads, step.threads, [&](int64_t i) {
        step.merge(step.merges + i / step.kv_heads * 4, i % step.kv_heads);
    });
}

}  // namespace
