// A convolution over the last W tokens, with a filter for each channel.
//
// A thread takes some channels at a time, for all tokens of all sequences. A result adds up the
// bias and the products of its W inputs, the oldest first.

#pragma once

#include "silu_and_mul.h"
#include "state_rows.h"

namespace {

constexpr int MOST_TAPS = 8;
constexpr int64_t SOME_CHANNELS = 256;

template <typename T>
struct ConvLayer {
    const T* x;
    int64_t x_stride;
    const T *weight, *bias;
    T* out;
    Slots<T> slots;
    StateRows rows;
    int64_t num_channels;
    bool silu;
};

// Some channels of one token, from its W inputs.
template <typename T, int W, bool SILU>
inline void filter(const T* const* inputs, const float (*weights)[SOME_CHANNELS],
                   const float* biases, int64_t count, T* out) {
    const T* in[W];
    std::copy_n(inputs, W, in);
#pragma omp simd
    for (int64_t i = 0; i < count; i++) {
        float sum = biases[i];
        for (int tap = 0; tap < W; tap++) sum += widen(in[tap][i]) * weights[tap][i];
        out[i] = narrow<T>(SILU ? sum / sigmoid_divisor(sum) : sum);
    }
}

template <typename T, int W>
inline void filter_channels(const ConvLayer<T>& layer, int64_t first, int64_t count) {
    alignas(CACHE_LINE) float weights[W][SOME_CHANNELS], biases[SOME_CHANNELS] = {};
    alignas(CACHE_LINE) T history[W - 1][SOME_CHANNELS];
    const T* weight = layer.weight + first * W;
    for (int64_t i = 0; i < count; i++)
        for (int tap = 0; tap < W; tap++) weights[tap][i] = widen(weight[i * W + tap]);
    if (layer.bias) widen_all(layer.bias + first, count, biases, count);
    const int64_t size = layer.num_channels;
    for (int64_t i = 0; i < layer.rows.count; i++) {
        const int64_t start = layer.rows.start(i), end = layer.rows.start(i + 1);
        copy_rows(layer.slots.at(layer.rows.before[i]) + first, size, history[0], SOME_CHANNELS,
                  W - 1, count);
        const T* inputs[W];
        for (int64_t row = start; row < end; row++) {
            for (int tap = 0; tap < W; tap++) {
                const int64_t token = row - start + tap - (W - 1);
                inputs[tap] = token < 0 ? history[token + W - 1]
                                        : layer.x + (start + token) * layer.x_stride + first;
            }
            if (row + ROWS_AHEAD < end)
                fetch(layer.x + (row + ROWS_AHEAD) * layer.x_stride + first, count);
            T* out = layer.out + row * size + first;
            if (layer.silu)
                filter<T, W, true>(inputs, weights, biases, count, out);
            else
                filter<T, W, false>(inputs, weights, biases, count, out);
            if (T* kept = layer.slots.at(layer.rows.after[row]))
                for (int tap = 1; tap < W; tap++)
                    std::copy_n(inputs[tap], count, kept + (tap - 1) * size + first);
        }
    }
}

// Call filter_channels<T, taps>, one of those for W and fewer taps.
template <typename T, int W = MOST_TAPS>
inline void filter_channels_by(int64_t taps, const ConvLayer<T>& layer, int64_t first,
                               int64_t count) {
    if (taps == W) return filter_channels<T, W>(layer, first, count);
    if constexpr (W > 2) filter_channels_by<T, W - 1>(taps, layer, first, count);
}

template <typename T>
void causal_conv(const T* x, int64_t x_stride, const T* weight, const T* bias, T* out, T* states,
                 int64_t slot_stride, const int64_t* before, const int64_t* after,
                 const int64_t* ends, int64_t count, int64_t num_queries, int64_t num_channels,
                 int64_t taps, int64_t silu, int64_t threads) {
    const ConvLayer<T> layer{
        x, x_stride, weight, bias, out, {states, slot_stride},
        {before, after, ends, count, num_queries}, num_channels, silu != 0};
    const int64_t elements = layer.rows.start(count) * num_channels * taps;
    const int64_t groups = (num_channels + SOME_CHANNELS - 1) / SOME_CHANNELS;
    for_each(groups, elements <= FEW_ELEMENTS ? 1 : threads, [&](int64_t group) {
        const int64_t first = group * SOME_CHANNELS;
        filter_channels_by<T>(taps, layer, first, std::min(SOME_CHANNELS, num_channels - first));
    });
}

}  // namespace
