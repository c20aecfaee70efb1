// The state spaces of Mamba 2. A head's state S [P, N] changes with each token, by its input x [P],
// its B and C [N], and the time step dt:
//
//     S <- exp(-rate * dt) * S + (dt * x) B;  out = S C + skip * x
//
// One pass over the state does both for a token. The sum for a row has LANES parts (the products n
// with the same n % LANES), each in the order of n. Then halves of the parts are added until one is
// left.

#pragma once

#include "state_rows.h"

namespace {

constexpr int SOME_ROWS = 4;  // that are computed together

// Lanes of two vectors: of both, those whose numbers differ in the bit HALF, and the ones to add.
template <int HALF>
struct Pairs {
    alignas(CACHE_LINE) int32_t own[LANES] = {}, other[LANES] = {};

    constexpr Pairs() {
        for (int i = 0; i < LANES; i++) {
            own[i] = i & HALF ? LANES + i : i;
            other[i] = own[i] ^ HALF;
        }
    }
};

// The sums of the lanes of 2 * HALF vectors, as `sum_of` has them, with a third of its work.
template <int HALF = LANES / 2>
inline Vec sums_of(Vec* x) {
    static constexpr Pairs<HALF> pairs;
    const IntVec own = *(const IntVec*)pairs.own, other = *(const IntVec*)pairs.other;
    for (int i = 0; i < HALF; i++)
        x[i] = __builtin_shuffle(x[i], x[i + HALF], own) +
               __builtin_shuffle(x[i], x[i + HALF], other);
    if constexpr (HALF > 1) return sums_of<HALF / 2>(x);
    return x[0];
}

// Rows of a state, and the distance between them.
template <typename S>
struct Rows {
    S* first;
    int64_t stride;

    S* at(int64_t row) const { return first + row * stride; }
};

// Change R rows from row p on, by the inputs x; returns the vectors whose lanes add up to S C.
template <int R>
inline void change_rows(int64_t p, Rows<const float> from, Rows<float> to, int64_t size, float g,
                        const float* x, const float* b, const float* c, Vec* sums) {
    Vec sum[R] = {}, inputs[R];
    for (int r = 0; r < R; r++) inputs[r] = all_lanes(x[p + r]);
    const float* old = from.at(p);
    float* changed = to.at(p);
    for (int64_t n = 0; n < size; n += LANES, old += LANES, changed += LANES) {
        const Vec in = load(b + n), out = load(c + n);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            const Vec state = add_product(load(old + r * from.stride) * g, in, inputs[r]);
            vec(changed + r * to.stride) = state;
            sum[r] = add_product(sum[r], state, out);
        }
    }
    std::copy_n(sum, R, sums);
}

template <typename T>
struct SpaceLayer {
    const T *xbc, *dt;
    int64_t xbc_stride, dt_stride;
    const float *log_rate, *bias, *skip;
    float low, high;
    T* out;
    Slots<float> slots;
    StateRows rows;
    int64_t groups, heads, dim, size;  // G, H, P, N
};

// One head of one sequence, and the rows [first, end) of its state.
template <typename T>
class SpaceHead {
public:
    SpaceHead(const SpaceLayer<T>& layer, int64_t sequence, int64_t head, int64_t first,
              int64_t end)
        : layer(layer), head(head), first(first), count(end - first),
          padded(round_up(layer.size, LANES)), stride(padded + LANES), start(layer.rows.start(sequence)),
          length(layer.rows.start(sequence + 1) - start),
          slots{layer.slots.states + (head * layer.dim + first) * layer.size, layer.slots.stride},
          before(slots.at(layer.rows.before[sequence])), rate(std::exp(layer.log_rate[head])) {
        const int64_t dims = round_up(count, LANES);
        b = scratch(2 * padded + 2 * dims + count * stride);
        c = b + padded, x = c + padded, read = x + dims, state = read + dims;
    }

    // Rows of N numbers that are not whole vectors are padded, in `state`.
    void run() {
        const bool is_whole = padded == layer.size;
        const Rows<float> here{state, stride};
        if (!is_whole) {
            std::fill_n(state, count * stride, 0.0f);
            copy_rows(before, layer.size, state, stride, count, layer.size);
        }
        Rows<const float> from{is_whole ? before : state, is_whole ? layer.size : stride};
        for (int64_t token = 0; token < length; token++) {
            float* kept = slots.at(layer.rows.after[start + token]);
            const Rows<float> to = is_whole && kept ? Rows<float>{kept, layer.size} : here;
            change(start + token, from, to);
            if (!is_whole && kept) copy_rows(state, stride, kept, layer.size, count, layer.size);
            from = {to.first, to.stride};
        }
    }

private:
    void change(int64_t row, Rows<const float> from, Rows<float> to) {
        const T* in = layer.xbc + row * layer.xbc_stride;
        const T* group = in + layer.heads * layer.dim;
        group += head / (layer.heads / layer.groups) * layer.size;
        widen_all(group, layer.size, b, padded);
        widen_all(group + layer.groups * layer.size, layer.size, c, padded);
        const float given = widen(layer.dt[row * layer.dt_stride + head]) + layer.bias[head];
        const float time = std::min(std::max(softplus(given), layer.low), layer.high);
        const float g = std::exp(-rate * time);
        in += head * layer.dim + first;
        if (row + ROWS_AHEAD < start + length) fetch(in + ROWS_AHEAD * layer.xbc_stride, count);
        for (int64_t p = 0; p < count; p++) x[p] = widen(in[p]) * time;
        int64_t p = 0;
        for (; p + LANES <= count; p += LANES) {
            Vec sums[LANES];
            for (int r = 0; r < LANES; r += SOME_ROWS)
                change_rows<SOME_ROWS>(p + r, from, to, padded, g, x, b, c, sums + r);
            vec(read + p) = sums_of(sums);
        }
        for (; p < count; p++) {
            Vec sum;
            change_rows<1>(p, from, to, padded, g, x, b, c, &sum);
            read[p] = sum_of(sum);
        }
        T* out = layer.out + (row * layer.heads + head) * layer.dim + first;
        const float skip = layer.skip[head];
        for (int64_t p = 0; p < count; p++) out[p] = narrow<T>(read[p] + skip * widen(in[p]));
    }

    const SpaceLayer<T>& layer;
    const int64_t head, first, count, padded;
    const int64_t stride;  // of rows in `state`: no multiple of 4096 bytes is between some of them
    const int64_t start, length;
    const Slots<float> slots;  // of this head's rows from `first` on
    float* const before;
    const float rate;
    float *b, *c;      // [padded]
    float *x, *read;   // of each row, the input times dt, and S C
    float* state;
};

template <typename T>
void state_space(const T* xbc, int64_t xbc_stride, const T* dt, int64_t dt_stride,
                 const float* log_rate, const float* bias, const float* skip, float low, float high,
                 T* out, float* states, int64_t slot_stride, const int64_t* before,
                 const int64_t* after, const int64_t* ends, int64_t count, int64_t num_queries,
                 int64_t groups, int64_t heads, int64_t dim, int64_t size, int64_t threads) {
    const SpaceLayer<T> layer{
        xbc, dt, xbc_stride, dt_stride, log_rate, bias, skip, low, high, out,
        {states, slot_stride}, {before, after, ends, count, num_queries},
        groups, heads, dim, size};
    for_each_head(layer.rows, heads, dim, LANES, dim * size, threads,
                  [&](int64_t sequence, int64_t head, int64_t first, int64_t end) {
                      SpaceHead<T>(layer, sequence, head, first, end).run();
                  });
}

}  // namespace
