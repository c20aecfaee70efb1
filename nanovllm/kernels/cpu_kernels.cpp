// The CPU's kernels. cpu_kernels.py compiles and calls them; their twins in plain PyTorch define
// what they compute.
//
// T is the type of the tensors, float or bf16. All is computed in float32, and rounded where the
// twin rounds. What a row gets hangs on nothing but the row: not on the batch, nor on how many
// threads there are. Letters: H query heads, KVH key heads, G = H / KVH, D head dimension.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

struct bf16 {
    uint16_t bits;
};

template <typename To, typename From>
inline To bit_cast(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof(to));
    return to;
}

inline float widen(float x) { return x; }
inline float widen(bf16 x) { return bit_cast<float>(uint32_t(x.bits) << 16); }

template <typename T>
T narrow(float x);
template <>
inline float narrow<float>(float x) { return x; }
template <>
inline bf16 narrow<bf16>(float x) {  // to the nearest, ties to even
    uint32_t bits = bit_cast<uint32_t>(x);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return bf16{uint16_t(x != x ? 0x7fc0 : rounded)};
}

template <typename T>
inline float round_to(float x) { return widen(narrow<T>(x)); }

// Call work(0) .. work(count - 1), on one thread if that is all, and in PyTorch's pool if not.
template <typename Work>
inline void share_out(int64_t count, int64_t threads, const Work& work) {
    if (threads <= 1 || count <= 1) {
        for (int64_t i = 0; i < count; i++) work(i);
        return;
    }
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (int64_t i = 0; i < count; i++) work(i);
}

// The same for rows, in as many pieces as there are threads. Waking these takes microseconds, and
// where others use the cores milliseconds: a few elements are sooner done alone.
constexpr int64_t FEW_ELEMENTS = 1 << 15;

template <typename Work>
inline void share_out_rows(int64_t rows, int64_t size, int64_t threads, const Work& work) {
    const int64_t pieces = rows * size <= FEW_ELEMENTS ? 1 : std::min(rows, threads);
    share_out(pieces, threads, [&](int64_t piece) {
        const int64_t end = (piece + 1) * rows / pieces;
        for (int64_t row = piece * rows / pieces; row < end; row++) work(row);
    });
}

// 2^x for x up to 128, within 2^-23 of the true one. 0 below -126.5, infinite from 127.5 on.
inline float exp2_of(float x) {
    constexpr float SHIFT = 0x1.8p23f;  // adding it rounds to an integer, in the low bits
    x = x < -127.0f ? -127.0f : x;
    float shifted = x + SHIFT;
    float rest = x - (shifted - SHIFT);
    int32_t exponent = bit_cast<int32_t>(shifted) - bit_cast<int32_t>(SHIFT);
    float power = 1.52527338e-5f;  // the exponential's series in rest * log(2)
    power = power * rest + 1.54035304e-4f;
    power = power * rest + 1.33335581e-3f;
    power = power * rest + 9.61812911e-3f;
    power = power * rest + 5.55041087e-2f;
    power = power * rest + 2.40226507e-1f;
    power = power * rest + 6.93147181e-1f;
    power = power * rest + 1.0f;
    return power * bit_cast<float>((exponent + 127) << 23);
}

constexpr float LOG2E = 1.44269504f;

// Norms, activation, rotation

template <typename T>
inline float norm_scale(const T* x, int64_t size, float eps) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < size; i++) sum += widen(x[i]) * widen(x[i]);
    return 1.0f / std::sqrt(sum / float(size) + eps);
}

template <typename T>
inline void scale_by(const T* x, float scale, const T* weight, int64_t size, T* out) {
#pragma omp simd
    for (int64_t i = 0; i < size; i++) out[i] = narrow<T>(widen(x[i]) * scale * widen(weight[i]));
}

// Norms of x [rows, size]; with a residual, of the sum, which goes to `total`.
template <typename T>
void rms_norm(const T* x, int64_t x_stride, const T* residual, int64_t residual_stride,
              const T* weight, T* out, T* total, int64_t rows, int64_t size, float eps,
              int64_t threads) {
    share_out_rows(rows, size, threads, [&](int64_t row) {
        const T* in = x + row * x_stride;
        if (residual) {
            const T* other = residual + row * residual_stride;
            T* sum = total + row * size;
#pragma omp simd
            for (int64_t i = 0; i < size; i++) sum[i] = narrow<T>(widen(in[i]) + widen(other[i]));
            in = sum;
        }
        scale_by(in, norm_scale(in, size, eps), weight, size, out + row * size);
    });
}

template <typename T>
void silu_and_mul(const T* x, int64_t x_stride, T* out, int64_t rows, int64_t size,
                  int64_t threads) {
    share_out_rows(rows, size, threads, [&](int64_t row) {
        const T* gate = x + row * x_stride;
        const T* up = gate + size;
        T* to = out + row * size;
#pragma omp simd
        for (int64_t i = 0; i < size; i++) {
            float g = widen(gate[i]);
            // Twice the half: `exp2_of` ends at 2^127.5, and float32 at 2^128.
            float e = 2 * exp2_of(std::min(-g * LOG2E - 1, 128.0f));
            to[i] = narrow<T>(round_to<T>(g / (1.0f + e)) * widen(up[i]));
        }
    });
}

// One head: the norm, where there is a weight, then the pairs (i, i + half) rotated; what stands
// behind them is not.
template <typename T>
inline void norm_and_rotate(const T* x, const T* weight, float eps, const float* cos,
                            const float* sin, int64_t half, int64_t head_dim, T* out) {
    const float scale = weight ? norm_scale(x, head_dim, eps) : 1.0f;
#pragma omp simd
    for (int64_t i = 0; i < half; i++) {
        float x1 = widen(x[i]), x2 = widen(x[half + i]);
        if (weight) {
            x1 = round_to<T>(x1 * scale * widen(weight[i]));
            x2 = round_to<T>(x2 * scale * widen(weight[half + i]));
        }
        out[i] = narrow<T>(x1 * cos[i] - x2 * sin[i]);
        out[half + i] = narrow<T>(x2 * cos[i] + x1 * sin[i]);
    }
    for (int64_t i = 2 * half; i < head_dim; i++)
        out[i] = weight ? narrow<T>(widen(x[i]) * scale * widen(weight[i])) : x[i];
}

// qkv [tokens, heads, D]: the last 2 * kv_heads of the heads are keys and values.
template <typename T>
void norm_rope_store(const T* qkv, int64_t qkv_stride, const float* cos, const float* sin,
                     int64_t rope_stride, const T* q_weight, const T* k_weight, float eps, T* q,
                     T* k, T* k_cache, T* v_cache, const int64_t* slots, int64_t tokens,
                     int64_t q_heads, int64_t kv_heads, int64_t head_dim, int64_t half,
                     int64_t threads) {
    const int64_t q_size = q_heads * head_dim, kv_size = kv_heads * head_dim;
    share_out_rows(tokens, q_size + 2 * kv_size, threads, [&](int64_t token) {
        const T* in = qkv + token * qkv_stride;
        const float* c = cos + token * rope_stride;
        const float* s = sin + token * rope_stride;
        T* keys = k + token * kv_size;
        for (int64_t at = 0; at < q_size; at += head_dim)
            norm_and_rotate(in + at, q_weight, eps, c, s, half, head_dim, q + token * q_size + at);
        for (int64_t at = 0; at < kv_size; at += head_dim)
            norm_and_rotate(in + q_size + at, k_weight, eps, c, s, half, head_dim, keys + at);
        if (!k_cache || slots[token] < 0) return;
        const int64_t to = slots[token] * kv_size;
        std::memcpy(k_cache + to, keys, kv_size * sizeof(T));
        std::memcpy(v_cache + to, in + q_size + kv_size, kv_size * sizeof(T));
    });
}

// Attention. A row is a query of one head; rows of a sequence whose heads share their keys are
// taken together, so that these are read once for all of them.

#ifdef __AVX512F__
constexpr int LANES = 16;
constexpr int BLOCK = 8;  // rows of a product whose sums stay in registers
#else
constexpr int LANES = 8;
constexpr int BLOCK = 4;
#endif
constexpr int KEYS = 32;  // keys that are gone through together: in float32 they fit the L1 cache
constexpr int FEW = 16;   // rows up to here go through the keys as they lie in memory
constexpr int TILE = 2 * LANES;  // rows of a tile, where there are more
constexpr int MAX_HEAD_DIM = 256;
constexpr int CACHE_LINE = 64;
constexpr float NOTHING = -1e30f;  // the highest score of no keys: to subtract it gives no NaN

typedef float Vec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t IntVec __attribute__((vector_size(LANES * 4)));
typedef uint16_t HalfVec __attribute__((vector_size(LANES * 2), aligned(2), may_alias));

inline Vec& vec(float* x) { return *(Vec*)x; }
inline Vec load(const float* x) { return *(const Vec*)x; }
inline Vec load(const bf16* x) {
    return (Vec)(__builtin_convertvector(*(const HalfVec*)x, IntVec) << 16);
}

inline float sum_of(Vec x) {
    IntVec lanes;
    for (int i = 0; i < LANES; i++) lanes[i] = i;
    for (int half = LANES / 2; half; half /= 2) x += __builtin_shuffle(x, lanes ^ half);
    return x[0];
}

// KEYS keys and values, and as many that come next. Those behind the last repeat it.
template <typename T>
struct Near {
    const T *keys[2 * KEYS], *values[2 * KEYS];
};

// Whoever is at `row` asks for what comes next: rows are too far apart for the hardware to guess.
template <typename T>
inline void fetch_next(const T* const* row, int64_t d) {
    if (d * sizeof(T) % CACHE_LINE == 0) __builtin_prefetch(row[KEYS] + d);
}

// A sequence's keys and values of one head: in the blocks of a table, or one by one.
template <typename T>
struct Context {
    const T *keys, *values;
    int64_t key_stride, value_stride;
    const int32_t* table;  // null: token i is row i
    int64_t block_size;

    // Where KEYS tokens from `start` on are.
    void find(const T** k, const T** v, int64_t start, int64_t end) const {
        int64_t block = start / block_size, offset = start % block_size;
        for (int j = 0; j < KEYS; j++) {
            const int64_t token = table ? table[block] * block_size + offset : start + j;
            k[j] = keys + token * key_stride;
            v[j] = values + token * value_stride;
            if (start + j + 1 < end && ++offset == block_size) block++, offset = 0;
            if (start + j + 1 >= end) {
                std::fill(k + j, k + KEYS, k[j]);
                std::fill(v + j, v + KEYS, v[j]);
                return;
            }
        }
    }

    // Call work(near, start, count) for KEYS keys after the other of [first, end). They are cut at
    // multiples of KEYS, wherever the first one is: a row's sums do not hang on that.
    template <typename Work>
    void go_through(int64_t first, int64_t end, const Work& work) const {
        if (first == end) return;
        Near<T> near;
        find(near.keys + KEYS, near.values + KEYS, first, end);
        for (int64_t start = first, next; start < end; start = next) {
            next = std::min(start / KEYS * KEYS + KEYS, end);
            std::copy(near.keys + KEYS, near.keys + 2 * KEYS, near.keys);
            std::copy(near.values + KEYS, near.values + 2 * KEYS, near.values);
            find(near.keys + KEYS, near.values + KEYS, std::min(next, end - 1), end);
            work(near, start, int(next - start));
        }
    }
};

// A few rows' softmax, as far as it has come: the sums of weights and of weighted values, in units
// of 2^top. It begins with no keys; states of other keys can be added.
struct alignas(CACHE_LINE) State {
    float top[FEW], total[FEW];
    float sums[FEW][MAX_HEAD_DIM];

    void clear(int64_t head_dim) {
        for (int r = 0; r < FEW; r++) {
            top[r] = NOTHING;
            total[r] = 0;
            std::fill(sums[r], sums[r] + head_dim, 0.0f);
        }
    }

    void add(const State& other, int64_t rows, int64_t head_dim) {
        for (int64_t r = 0; r < rows; r++) {
            const float highest = std::max(top[r], other.top[r]);
            const float shrink = exp2_of(top[r] - highest);
            const float grow = exp2_of(other.top[r] - highest);
            top[r] = highest;
            total[r] = total[r] * shrink + other.total[r] * grow;
            for (int64_t d = 0; d < head_dim; d++)
                sums[r][d] = sums[r][d] * shrink + other.sums[r][d] * grow;
        }
    }
};

// scores[r][j] = q[r] . keys[j] for R rows and four keys; D is a multiple of LANES.
template <int R, typename T>
inline void dots(const float (*q)[MAX_HEAD_DIM], const T* const* keys, int64_t head_dim,
                 float (*scores)[KEYS]) {
    Vec sums[R][4] = {};
    for (int64_t d = 0; d < head_dim; d += LANES)
        for (int j = 0; j < 4; j++) {
            const Vec key = load(keys[j] + d);
            fetch_next(keys + j, d);
            for (int r = 0; r < R; r++) sums[r][j] += load(q[r] + d) * key;
        }
    for (int r = 0; r < R; r++)
        for (int j = 0; j < 4; j++) scores[r][j] = sum_of(sums[r][j]);
}

// sums[r] = sums[r] * shrink[r] + weights[r] @ values, for R rows and V vectors from `d` on.
template <int R, int V, typename T>
inline void weigh(float (*sums)[MAX_HEAD_DIM], const float* shrink, const float (*weights)[KEYS],
                  const T* const* values, int count, int64_t d) {
    Vec held[R][V];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) held[r][v] = load(sums[r] + d + v * LANES) * shrink[r];
    for (int j = 0; j < count; j++)
        for (int v = 0; v < V; v++) {
            const Vec value = load(values[j] + d + v * LANES);
            fetch_next(values + j, d + v * LANES);
            for (int r = 0; r < R; r++) held[r][v] += weights[r][j] * value;
        }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) vec(sums[r] + d + v * LANES) = held[r][v];
}

// Fold the keys first .. end - 1 into the state of a few rows, R at a time. q is scaled by log2(e)
// too; row r sees the `window` keys before limits[r].
template <int R, typename T>
void attend_few(State& state, const float (*q)[MAX_HEAD_DIM], const int32_t* limits, int64_t window,
                int64_t rows, const Context<T>& context, int64_t head_dim, int64_t first,
                int64_t end) {
    float scores[FEW][KEYS], shrink[FEW];
    context.go_through(first, end, [&](const Near<T>& near, int64_t start, int count) {
        for (int64_t r = 0; r < rows; r += R) {
            for (int j = 0; j < count; j += 4)
                dots<R>(q + r, near.keys + j, head_dim, (float (*)[KEYS])(scores[r] + j));
            for (int64_t i = r; i < r + R; i++) {
                const int seen = int(std::clamp<int64_t>(limits[i] - start, 0, count));
                const int hidden = int(std::clamp<int64_t>(limits[i] - window - start, 0, count));
                float* row = scores[i];
                float top = state.top[i], total = 0;
                std::fill(row, row + hidden, -INFINITY);
                std::fill(row + seen, row + KEYS, -INFINITY);
#pragma omp simd reduction(max : top)
                for (int j = 0; j < KEYS; j++) top = row[j] > top ? row[j] : top;
#pragma omp simd reduction(+ : total)
                for (int j = 0; j < KEYS; j++) {
                    row[j] = exp2_of(row[j] - top);
                    total += row[j];
                }
                shrink[i] = exp2_of(state.top[i] - top);
                state.top[i] = top;
                state.total[i] = state.total[i] * shrink[i] + total;
            }
            int64_t d = 0;
            for (; d + 4 * LANES <= head_dim; d += 4 * LANES)
                weigh<R, 4>(state.sums + r, shrink + r, scores + r, near.values, count, d);
            for (; d < head_dim; d += LANES)
                weigh<R, 1>(state.sums + r, shrink + r, scores + r, near.values, count, d);
        }
    });
}

// c [rows, TILE] = a [rows, depth] @ b [depth, TILE], or c * shrink + a @ b. `rows` is a multiple
// of BLOCK; a's element (i, j) is at i * a_row + j * a_column.
template <bool ADD>
inline void multiply(float (*c)[TILE], const float* a, int64_t a_row, int64_t a_column,
                     const float (*b)[TILE], int rows, int depth, const float* shrink) {
    for (int row = 0; row < rows; row += BLOCK) {
        Vec sums[BLOCK][2];
        for (int i = 0; i < BLOCK; i++)
            for (int v = 0; v < 2; v++)
                sums[i][v] = ADD ? load(c[row + i] + v * LANES) * load(shrink + v * LANES) : Vec{};
        const float* from = a + row * a_row;
        for (int j = 0; j < depth; j++)
            for (int i = 0; i < BLOCK; i++)
                for (int v = 0; v < 2; v++)
                    sums[i][v] += from[i * a_row + j * a_column] * load(b[j] + v * LANES);
        for (int i = 0; i < BLOCK; i++)
            for (int v = 0; v < 2; v++) vec(c[row + i] + v * LANES) = sums[i][v];
    }
}

// Attention of a tile to the keys first .. end - 1, of which row r sees the `window` before
// limits[r]. A row is a lane, and no step looks across lanes. q [D, TILE] is scaled by log2(e) too;
// leaves the sums of weighted values [D, TILE] and of weights.
template <typename T>
void attend_tile(float (*sums)[TILE], float* total, const float (*q)[TILE], const int32_t* limits,
                 int64_t window, const Context<T>& context, int64_t head_dim, int64_t first,
                 int64_t end) {
    alignas(CACHE_LINE) float keys[KEYS * MAX_HEAD_DIM], values[KEYS * MAX_HEAD_DIM];
    alignas(CACHE_LINE) float scores[KEYS][TILE], shrink[TILE], top[TILE];
    std::fill(top, top + TILE, NOTHING);
    int32_t lows[TILE];
    for (int r = 0; r < TILE; r++) lows[r] = limits[r] - int32_t(window);
    const int32_t all_see = *std::min_element(limits, limits + TILE);
    const int32_t all_see_from = *std::max_element(lows, lows + TILE);
    context.go_through(first, end, [&](const Near<T>& near, int64_t start, int count) {
        const int padded = (count + BLOCK - 1) / BLOCK * BLOCK;
        for (int j = 0; j < padded; j++) {
            for (int64_t d = 0; d < head_dim; d += BLOCK) {
                fetch_next(near.keys + j, d);
                fetch_next(near.values + j, d);
            }
            for (int64_t d = 0; d < head_dim; d++) {
                keys[j * head_dim + d] = widen(near.keys[j][d]);
                values[j * head_dim + d] = widen(near.values[j][d]);
            }
        }
        multiply<false>(scores, keys, head_dim, 1, q, padded, int(head_dim), nullptr);
        if (start + count > all_see)
            for (int j = 0; j < count; j++)
                for (int r = 0; r < TILE; r++)
                    scores[j][r] = start + j < limits[r] ? scores[j][r] : -INFINITY;
        if (start < all_see_from)
            for (int j = 0; j < count; j++)
                for (int r = 0; r < TILE; r++)
                    scores[j][r] = start + j >= lows[r] ? scores[j][r] : -INFINITY;
        std::copy(top, top + TILE, shrink);
        for (int j = 0; j < count; j++)
            for (int r = 0; r < TILE; r++) top[r] = scores[j][r] > top[r] ? scores[j][r] : top[r];
        for (int r = 0; r < TILE; r++) {
            shrink[r] = exp2_of(shrink[r] - top[r]);
            total[r] *= shrink[r];
        }
        for (int j = 0; j < count; j++)
            for (int r = 0; r < TILE; r++) {
                scores[j][r] = exp2_of(scores[j][r] - top[r]);
                total[r] += scores[j][r];
            }
        multiply<true>(sums, values, 1, head_dim, scores, int(head_dim), count, shrink);
    });
}

// What all tasks share. Sequence s has the queries q_ends[s] .. q_ends[s + 1] - 1, the last of its
// k_lens[s] keys. Its rows are numbered query by query, G rows each.
template <typename T>
struct Step {
    const T* q;  // [tokens, H, D]
    const T* k;  // [tokens, KVH, D], or the cache
    const T* v;
    T* out;  // [tokens, H, D]
    const int32_t* q_ends;
    const int32_t* k_lens;
    const int32_t* tables;  // null: keys stand where queries do
    const int32_t* tasks;   // [num_tasks, 5]: sequence, first row, first key, end key, slot
    const int32_t* merges;  // [num_merges, 3]: sequence, first slot, end slot
    State* partial;         // [slots, KVH], of keys that others will be added to
    int64_t num_tasks, num_merges, q_stride, k_stride, v_stride, table_stride, block_size;
    int64_t q_heads, kv_heads, head_dim, window, threads;
    float scale;

    int64_t group() const { return q_heads / kv_heads; }
    int64_t num_queries(int64_t seq) const { return q_ends[seq + 1] - q_ends[seq]; }
    int64_t num_rows(int64_t seq) const { return num_queries(seq) * group(); }

    // Where a row stands in [tokens, H, D], for a stride of tokens.
    int64_t place(int64_t seq, int64_t row, int64_t kv_head, int64_t stride) const {
        return (q_ends[seq] + row / group()) * stride
            + (kv_head * group() + row % group()) * head_dim;
    }

    // A query's own key is the last that it sees.
    int32_t limit(int64_t seq, int64_t row) const {
        return int32_t(k_lens[seq] - num_queries(seq) + row / group() + 1);
    }

    Context<T> context(int64_t seq, int64_t kv_head) const {
        const int64_t first = tables ? 0 : q_ends[seq], head = kv_head * head_dim;
        return {k + first * k_stride + head, v + first * v_stride + head, k_stride, v_stride,
                tables ? tables + seq * table_stride : nullptr, block_size};
    }

    void write(const State& state, int64_t seq, int64_t kv_head) const {
        for (int64_t r = 0; r < num_rows(seq); r++) {
            const float share = state.total[r] != 0 ? 1 / state.total[r] : 0;  // no keys: zeros
            T* to = out + place(seq, r, kv_head, q_heads * head_dim);
            for (int64_t d = 0; d < head_dim; d++) to[d] = narrow<T>(state.sums[r][d] * share);
        }
    }

    void run_few(const int32_t* task, int64_t kv_head) const {
        const int64_t seq = task[0], slot = task[4], rows = num_rows(seq);
        alignas(CACHE_LINE) float queries[FEW][MAX_HEAD_DIM];
        int32_t limits[FEW];
        for (int64_t r = 0; r < FEW; r++) {  // those behind the last repeat it
            const int64_t row = std::min(r, rows - 1);
            const T* from = q + place(seq, row, kv_head, q_stride);
            limits[r] = limit(seq, row);
            for (int64_t d = 0; d < head_dim; d++) queries[r][d] = widen(from[d]) * (scale * LOG2E);
        }
        State own;
        State& state = slot < 0 ? own : partial[slot * kv_heads + kv_head];
        state.clear(head_dim);
        (rows <= 2 ? attend_few<2, T> : attend_few<4, T>)(
            state, queries, limits, window, rows, context(seq, kv_head), head_dim, task[2],
            task[3]);
        if (slot < 0) write(state, seq, kv_head);
    }

    void run_tile(const int32_t* task, int64_t kv_head) const {
        const int64_t seq = task[0], first = task[1];
        const int64_t rows = std::min<int64_t>(TILE, num_rows(seq) - first);
        alignas(CACHE_LINE) float queries[MAX_HEAD_DIM][TILE], sums[MAX_HEAD_DIM][TILE];
        int32_t limits[TILE];
        float total[TILE] = {};
        std::fill(sums[0], sums[head_dim], 0.0f);
        for (int64_t r = 0; r < TILE; r++) {
            const int64_t row = first + std::min(r, rows - 1);
            const T* from = q + place(seq, row, kv_head, q_stride);
            limits[r] = limit(seq, row);
            for (int64_t d = 0; d < head_dim; d++) queries[d][r] = widen(from[d]) * (scale * LOG2E);
        }
        attend_tile(sums, total, queries, limits, window, context(seq, kv_head), head_dim, task[2],
                    task[3]);
        for (int64_t r = 0; r < rows; r++) {
            const float share = total[r] != 0 ? 1 / total[r] : 0;
            T* to = out + place(seq, first + r, kv_head, q_heads * head_dim);
            for (int64_t d = 0; d < head_dim; d++) to[d] = narrow<T>(sums[d][r] * share);
        }
    }
};

template <typename T>
void attention(const Step<T>& step) {
    share_out(step.num_tasks * step.kv_heads, step.threads, [&](int64_t i) {
        const int32_t* task = step.tasks + i / step.kv_heads * 5;
        const bool few = step.num_rows(task[0]) <= FEW && step.head_dim % LANES == 0;
        few ? step.run_few(task, i % step.kv_heads) : step.run_tile(task, i % step.kv_heads);
    });
    share_out(step.num_merges * step.kv_heads, step.threads, [&](int64_t i) {
        const int32_t* part = step.merges + i / step.kv_heads * 3;
        const int64_t kv_head = i % step.kv_heads;
        State& state = step.partial[part[1] * step.kv_heads + kv_head];
        for (int64_t slot = part[1] + 1; slot < part[2]; slot++)
            state.add(step.partial[slot * step.kv_heads + kv_head], step.num_rows(part[0]),
                      step.head_dim);
        step.write(state, part[0], kv_head);
    });
}

// Sampling

// The natural logarithm of a positive, normal x, within 2e-7 of the true one or of its share.
inline float log_of(float x) {
    const int32_t bits = bit_cast<int32_t>(x) - 0x3f3504f3;  // sqrt(1/2): x = m * 2^e, m around 1
    const float e = float(bits >> 23);
    const float m = bit_cast<float>((bits & 0x7fffff) + 0x3f3504f3) - 1.0f;
    float series = 7.0376836292e-2f;  // Cephes' logf
    series = series * m - 1.1514610310e-1f;
    series = series * m + 1.1676998740e-1f;
    series = series * m - 1.2420140846e-1f;
    series = series * m + 1.4249322787e-1f;
    series = series * m - 1.6668057665e-1f;
    series = series * m + 2.0000714765e-1f;
    series = series * m - 2.4999993993e-1f;
    series = series * m + 3.3333331174e-1f;
    const float square = m * m;
    float log = series * m * square - 2.12194440e-4f * e - 0.5f * square;
    return m + log + 0.693359375f * e;
}

// The logarithm of an exponential number, as `plain.log_exponential` defines it.
inline float log_exponential(uint32_t low, uint32_t high, uint32_t id) {
    constexpr float SHRINK = 0x1p-31f * (1 - 0x1p-23f), SMALLEST = 0x1p-32f;
    uint32_t x = ((id * 0x9E3779B9u) ^ low) * 0x21F0AAADu;
    x = (x ^ uint32_t(int32_t(x) >> 15)) + high;
    x *= 0x735A2D97u;
    x ^= uint32_t(int32_t(x) >> 15);
    const float u = std::fabs(float(int32_t(x))) * SHRINK + SMALLEST;
    // -log1p(-u): by its series where 1 - u would round away what tells the small times apart.
    const float series =
        u * (1.0f + u * (1.0f / 2 + u * (1.0f / 3 + u * (1.0f / 4 + u * (1.0f / 5)))));
    return log_of(u < 1.0f / 16 ? series : -log_of(1.0f - u));
}

constexpr int64_t CHUNK = 512;     // scores of which only the best is looked at
constexpr int64_t PIECE = 1 << 14;  // tokens that a thread takes together

// The first best of `count` scores, if it is better than `best`; `first` is the id of scores[0].
inline void take_best(const float* scores, int64_t count, int64_t first, float& best, int64_t& id) {
    float top = -INFINITY;
#pragma omp simd reduction(max : top)
    for (int64_t i = 0; i < count; i++) top = scores[i] > top ? scores[i] : top;
    if (!(top > best)) return;
    best = top;
    id = first + (std::find(scores, scores + count, top) - scores);
}

// Temperatures may be null; `best` and `ids` [rows, pieces] are what the pieces give.
template <typename T>
void sample(const T* logits, int64_t stride, const float* temperatures, const int64_t* keys,
            int64_t* out, float* best, int64_t* ids, int64_t rows, int64_t vocab_size,
            int64_t threads) {
    const int64_t pieces = (vocab_size + PIECE - 1) / PIECE;
    share_out(rows * pieces, threads, [&](int64_t i) {
        const int64_t row = i / pieces, start = i % pieces * PIECE;
        const int64_t end = std::min(start + PIECE, vocab_size);
        const T* from = logits + row * stride;
        const float temperature = temperatures ? temperatures[row] : 0.0f;
        const uint32_t low = temperatures ? uint32_t(keys[row]) : 0;
        const uint32_t high = temperatures ? uint32_t(uint64_t(keys[row]) >> 32) : 0;
        best[i] = -INFINITY;
        ids[i] = start;
        float scores[CHUNK];
        for (int64_t first = start; first < end; first += CHUNK) {
            const int64_t count = std::min(CHUNK, end - first);
            for (int64_t j = 0; j < count; j++) scores[j] = widen(from[first + j]);
            if (temperature > 0) {
#pragma omp simd
                for (int64_t j = 0; j < count; j++)
                    scores[j] -= temperature * log_exponential(low, high, uint32_t(first + j));
            }
            take_best(scores, count, first, best[i], ids[i]);
        }
    });
    for (int64_t row = 0; row < rows; row++) {
        const int64_t at = row * pieces;
        out[row] = ids[at + (std::max_element(best + at, best + at + pieces) - (best + at))];
    }
}

inline uint64_t rotate_left(uint64_t x, int bits) { return x << bits | x >> (64 - bits); }

// XXH64 of eight bytes, less 2^63.
inline int64_t noise_key(uint64_t seed, uint64_t num_tokens) {
    constexpr uint64_t P1 = 0x9E3779B185EBCA87, P2 = 0xC2B2AE3D27D4EB4F, P3 = 0x165667B19E3779F9,
                       P4 = 0x85EBCA77C2B2AE63, P5 = 0x27D4EB2F165667C5;
    uint64_t x = seed + P5 + 8;
    x = rotate_left(x ^ rotate_left(num_tokens * P2, 31) * P1, 27) * P1 + P4;
    x = (x ^ x >> 33) * P2;
    x = (x ^ x >> 29) * P3;
    return int64_t(x ^ x >> 32 ^ uint64_t(1) << 63);
}

// `longs` are five arrays of `rows`: rows, tokens, positions, slots, keys.
void read_rows(const int64_t* tokens, const int64_t* seeds, int32_t* lengths,
               const float* temperatures, const int32_t* batch, const int32_t* tables,
               int64_t* longs, int32_t* context_lens, int32_t* out_tables, float* out_temperatures,
               int64_t rows, int64_t max_blocks, int64_t width, int64_t block_size) {
    for (int64_t i = 0; i < rows; i++) {
        const int64_t row = batch[i], length = lengths[row];
        const bool there = length >= 0;
        const int64_t position = there ? length : 0, block = position / block_size;
        const int32_t* table = tables + row * max_blocks;
        const int64_t num_blocks = there ? block + 1 : 0;
        longs[i] = row;
        longs[rows + i] = there ? tokens[row] : 0;
        longs[2 * rows + i] = position;
        longs[3 * rows + i] = there ? table[block] * block_size + position % block_size : -1;
        longs[4 * rows + i] = noise_key(uint64_t(seeds[row]), uint64_t(length + 1));
        context_lens[i] = int32_t(length + 1);
        out_temperatures[i] = temperatures[row];
        if (there) lengths[row]++;
        std::copy(table, table + num_blocks, out_tables + i * width);
        std::fill(out_tables + i * width + num_blocks, out_tables + (i + 1) * width, 0);
    }
}

}  // namespace

// What Python calls: the address of each function for each type.
#define EXPORT(kernel)                                \
    extern "C" {                                      \
    void* kernel##_float32 = (void*)&kernel<float>;   \
    void* kernel##_bfloat16 = (void*)&kernel<bf16>;   \
    }
EXPORT(rms_norm)
EXPORT(silu_and_mul)
EXPORT(norm_rope_store)
EXPORT(attention)
EXPORT(sample)

// And what has no types, and the sizes that it must know.
extern "C" {
void* read_rows_any = (void*)&read_rows;
int64_t lanes = LANES;
int64_t few_rows = FEW;
int64_t tile_rows = TILE;
int64_t state_bytes = sizeof(State);
int64_t piece = PIECE;
}
