// The gated delta rule. A head's memory S [Dk, Dv] changes with each token, by its key k, value v,
// query q and gates g (forget) and beta (learn):
//
//     change = beta * (v - g * (k S));  out = g * (q S) + (q k) * change;  S <- g * S + k change
//
// If each channel of keys forgets by itself (CHANNELS), g is a vector, which multiplies the rows of
// S, or k and q before their products with S:
//
//     change = beta * (v - (g k) S);  out = (g q) S + (q k) * change;  S <- diag(g) S + k change
//
// One pass over the memory updates it by a token, and multiplies it by the next token's key and
// query. Each product k S or q S adds up the rows of S from the first to the last, for each column
// alone. So all columns of a group of COLUMNS go through the tokens while they stay in the L1
// cache. Keys, queries and gates are computed for SOME_TOKENS at a time.

#pragma once

#include "silu_and_mul.h"
#include "state_rows.h"

namespace {

constexpr int WIDE = 4;  // vectors of columns that are computed together
constexpr int64_t COLUMNS = WIDE * LANES;
constexpr int64_t SOME_TOKENS = 32;
constexpr float UNIT_EPS = 1e-6f;  // added to a squared length

// What a pass does with each row of the memory.
enum class Pass { UPDATE = 1, READ = 2, BOTH = 3 };

// The columns of a memory: where they are, and the distance between rows.
template <typename S>
struct Columns {
    S* first;
    int64_t stride;
};

// Write g * from + key * change to `to`, and add its products with next_key and query; or only one
// of both.
template <bool CHANNELS, int V, Pass PASS>
inline void go_over(Columns<const float> from, Columns<float> to, int64_t rows, const float* forget,
                    const float* key, const float* change, const float* next_key,
                    const float* query, float* known, float* read) {
    constexpr bool UPDATES = int(PASS) & int(Pass::UPDATE), READS = int(PASS) & int(Pass::READ);
    const float all = forget[0];
    Vec changes[V], knowns[V] = {}, reads[V] = {};
    if (UPDATES)
        for (int v = 0; v < V; v++) changes[v] = load(change + v * LANES);
    for (int64_t row = 0; row < rows; row++) {
        // As vectors, because the compiler would read them again after each store.
        Vec k, next, q;
        if (UPDATES) k = all_lanes(key[row]);
        if (READS) next = all_lanes(next_key[row]), q = all_lanes(query[row]);
        const float g = CHANNELS ? forget[row] : all;
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) {
            Vec memory = load(from.first + row * from.stride + v * LANES);
            if (UPDATES) {
                memory = add_product(memory * g, changes[v], k);
                vec(to.first + row * to.stride + v * LANES) = memory;
            }
            if (READS) {
                knowns[v] = add_product(knowns[v], memory, next);
                reads[v] = add_product(reads[v], memory, q);
            }
        }
    }
    if (READS)
        for (int v = 0; v < V; v++)
            vec(known + v * LANES) = knowns[v], vec(read + v * LANES) = reads[v];
}

template <typename T>
struct DeltaLayer {
    const T *qkv, *a, *b;
    int64_t qkv_stride, a_stride, b_stride;
    const float *log_rate, *bias;
    float limit;  // the most that is learnt; of CHANNELS, the lowest logarithm of g, or 0
    T* out;
    Slots<float> slots;
    StateRows rows;
    int64_t key_heads, heads, key_size, value_size;
};

// One head of one sequence, and the columns [first, end) of its memory.
template <typename T, bool CHANNELS>
class DeltaHead {
public:
    DeltaHead(const DeltaLayer<T>& layer, int64_t sequence, int64_t head, int64_t first,
              int64_t end)
        : layer(layer), head(head), first(first), end(end),
          padded(round_up(layer.key_size, LANES)), start(layer.rows.start(sequence)),
          length(layer.rows.start(sequence + 1) - start),
          slots{layer.slots.states + head * layer.key_size * layer.value_size, layer.slots.stride},
          before(slots.at(layer.rows.before[sequence])), rate(std::exp(layer.log_rate[head])) {
        const int64_t vectors = (std::min(length, SOME_TOKENS) + 1) * padded;
        const int64_t columns = round_up(end - first, LANES);
        keys = scratch((CHANNELS ? 4 : 2) * vectors + (layer.key_size + 1) * columns);
        queries = keys + vectors;
        next_keys = CHANNELS ? queries + vectors : keys;
        channels = CHANNELS ? next_keys + vectors : nullptr;
        changes = (CHANNELS ? channels : queries) + vectors;
        memory = changes + columns;
    }

    void run() {
        for (int64_t token = 0; token < length; token += SOME_TOKENS) {
            const int64_t some = std::min(SOME_TOKENS, length - token);
            for (int64_t i = 0; i < some; i++) prepare(token + i, i + 1);
            int64_t column = first;
            for (; column + COLUMNS <= end; column += COLUMNS) go<WIDE>(column, token, some);
            for (; column < end; column += LANES) go<1>(column, token, some);
            std::copy_n(keys + some * padded, padded, keys);
            if (CHANNELS) std::copy_n(channels + some * padded, padded, channels);
            forget[0] = forget[some];
        }
    }

private:
    const T* query_at(int64_t row) const {
        return layer.qkv + row * layer.qkv_stride +
               head / (layer.heads / layer.key_heads) * layer.key_size;
    }
    const T* value_at(int64_t row) const {
        return layer.qkv + row * layer.qkv_stride + 2 * layer.key_heads * layer.key_size +
               head * layer.value_size;
    }

    void fetch_inputs(int64_t token) const {
        const int64_t row = start + token;
        const T* query = query_at(row);
        fetch(query, layer.key_size);
        fetch(query + layer.key_heads * layer.key_size, layer.key_size);
        fetch(value_at(row) + first, end - first);
    }

    // Compute the key, the query and the gates of a token, at place i. Place 0 has those of the
    // token before the first one of `some`.
    void prepare(int64_t token, int64_t i) {
        const int64_t size = layer.key_size, row = start + token;
        const T* q = query_at(row);
        float *key = keys + i * padded, *query = queries + i * padded;
        unit(q, 1 / std::sqrt(float(size)), query);
        unit(q + layer.key_heads * size, 1, key);
        products[i] = dot(key, query);
        if (CHANNELS) {
            forget[i] = 1;
            forget_channels(row, i);
        } else {
            const float a = widen(layer.a[row * layer.a_stride + head]) + layer.bias[head];
            forget[i] = std::exp(-rate * softplus(a));
        }
        const float most = CHANNELS ? 1 : layer.limit;
        learn[i] = most / (1 + std::exp(-widen(layer.b[row * layer.b_stride + head])));
    }

    // Compute what each channel forgets, and multiply the key and the query by it.
    void forget_channels(int64_t row, int64_t i) {
        const int64_t size = layer.key_size;
        const T* a = layer.a + row * layer.a_stride + head * size;
        const float *bias = layer.bias + head * size, *key = keys + i * padded;
        float *query = queries + i * padded, *next = next_keys + i * padded;
        float* g = channels + i * padded;
        const float limit = layer.limit, rate = this->rate;
#pragma omp simd
        for (int64_t j = 0; j < size; j++) {
            const float x = widen(a[j]) + bias[j];
            const float log = limit < 0 ? limit / sigmoid_divisor(rate * x) : -rate * softplus_of(x);
            g[j] = exp2_of(log * LOG2E);
            next[j] = key[j] * g[j];
            query[j] *= g[j];
        }
    }

    // Write x with the length `length`, and zeros after it.
    void unit(const T* x, float length, float* to) const {
        widen_all(x, layer.key_size, to, padded);
        const float factor = length / std::sqrt(dot(to, to) + UNIT_EPS);
        for (int64_t j = 0; j < padded; j += LANES) vec(to + j) *= factor;
    }

    float dot(const float* x, const float* y) const {
        Vec sum = {};
        for (int64_t j = 0; j < padded; j += LANES)
            sum = add_product(sum, load(x + j), load(y + j));
        return sum_of(sum);
    }

    // Let `some` tokens from `token` on go through V vectors of columns.
    template <int V>
    void go(int64_t column, int64_t token, int64_t some) {
        const int64_t width = std::min<int64_t>(V * LANES, end - column), size = layer.key_size;
        const bool is_whole = width == V * LANES;
        const Columns<float> here{memory + (column - first) * size, V * LANES};
        float* change = changes + (column - first);
        // Where the columns are after a token, or before the first one.
        const auto place = [&](int64_t token) {
            float* kept = !is_whole ? nullptr : token < 0 ? before : after(token);
            return kept ? Columns<float>{kept + column, layer.value_size} : here;
        };
        const auto keep_part = [&](int64_t token) {
            if (float* kept = is_whole ? nullptr : after(token))
                copy_rows(here.first, LANES, kept + column, layer.value_size, size, width);
        };
        if (token == 0 && !is_whole) {
            std::fill_n(here.first, size * LANES, 0.0f);
            copy_rows(before + column, layer.value_size, here.first, LANES, size, width);
        }
        alignas(CACHE_LINE) float known[V * LANES], read[V * LANES];
        const auto pass = [&](auto kind, int64_t token, int64_t i) {
            constexpr Pass PASS = decltype(kind)::value;
            constexpr bool updates = PASS != Pass::READ;
            const auto from = place(token - 1 - updates), to = place(token - 1);
            const float* g = CHANNELS ? channels + (i - 1) * padded : forget + i - 1;
            go_over<CHANNELS, V, PASS>({from.first, from.stride}, to, size, g,
                                       keys + (i - 1) * padded, change, next_keys + i * padded,
                                       queries + i * padded, known, read);
            if (updates) keep_part(token - 1);
        };
        for (int64_t i = 1; i <= some; i++, token++) {
            if (column == first && token + SOME_TOKENS < length) fetch_inputs(token + SOME_TOKENS);
            if (token == 0)
                pass(std::integral_constant<Pass, Pass::READ>(), token, i);
            else
                pass(std::integral_constant<Pass, Pass::BOTH>(), token, i);
            answer(token, i, column, width, known, read, change);
        }
        if (token == length && after(token - 1))
            pass(std::integral_constant<Pass, Pass::UPDATE>(), token, some + 1);
    }

    // Write a token's change of the memory, and its outputs.
    void answer(int64_t token, int64_t i, int64_t column, int64_t width, const float* known,
                const float* read, float* change) const {
        const int64_t row = start + token;
        const T* value = value_at(row) + column;
        T* out = layer.out + (row * layer.heads + head) * layer.value_size + column;
        const float g = forget[i], beta = learn[i], product = products[i];
#pragma omp simd
        for (int64_t j = 0; j < width; j++) {
            change[j] = (widen(value[j]) - g * known[j]) * beta;
            out[j] = narrow<T>(g * read[j] + product * change[j]);
        }
        std::fill(change + width, change + round_up(width, LANES), 0.0f);
    }

    float* after(int64_t token) const { return slots.at(layer.rows.after[start + token]); }

    const DeltaLayer<T>& layer;
    const int64_t head, first, end, padded, start, length;
    const Slots<float> slots;  // of this head
    float* const before;
    const float rate;
    // [SOME_TOKENS + 1, padded]: Dk numbers, then zeros. With CHANNELS, queries and next_keys are
    // multiplied by g, which `channels` has.
    float *keys, *queries, *next_keys, *channels;
    float* changes;         // of the last token, for each column
    float* memory;          // of each group of columns, all rows
    float forget[SOME_TOKENS + 1], learn[SOME_TOKENS + 1], products[SOME_TOKENS + 1];
};

template <typename T, bool CHANNELS>
void any_delta(const T* qkv, int64_t qkv_stride, const T* a, int64_t a_stride, const T* b,
               int64_t b_stride, const float* log_rate, const float* bias, float limit, T* out,
               float* states, int64_t slot_stride, const int64_t* before, const int64_t* after,
               const int64_t* ends, int64_t count, int64_t num_queries, int64_t key_heads,
               int64_t heads, int64_t key_size, int64_t value_size, int64_t threads) {
    const DeltaLayer<T> layer{
        qkv, a, b, qkv_stride, a_stride, b_stride, log_rate, bias, limit, out,
        {states, slot_stride}, {before, after, ends, count, num_queries},
        key_heads, heads, key_size, value_size};
    for_each_head(layer.rows, heads, value_size, COLUMNS, key_size * value_size, threads,
                  [&](int64_t sequence, int64_t head, int64_t first, int64_t end) {
                      DeltaHead<T, CHANNELS>(layer, sequence, head, first, end).run();
                  });
}

}  // namespace
