// Functions of numbers: conversions between float, bf16 and e4m3, exponentials and logarithms.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

struct bf16 {
    uint16_t bits;
};

struct e4m3 {
    uint8_t bits;
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
// Read as a float, a code's shifted bits have 2^-120 of its value, because the exponent's bias of
// floats is larger by 120. NaN becomes 480; the scales of heads with NaN are NaN.
constexpr int CODE_SHIFT = 20;
constexpr int32_t CODE_BITS = int32_t(0x87f00000);
inline float as_loaded(e4m3 x) {
    return bit_cast<float>(int32_t(uint32_t(int8_t(x.bits)) << CODE_SHIFT) & CODE_BITS);
}
inline float widen(e4m3 x) { return as_loaded(x) * 0x1p120f; }
// A number as `load` returns it.
template <typename T>
inline float as_loaded(T x) { return widen(x); }

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

// 2^x for x up to 128, with a relative error of at most 2^-23. 0 below -126.5, infinite from
// 127.5 on.
__attribute__((always_inline)) inline float exp2_of(float x) {
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

// cap * tanh(score / cap), with an absolute error of about cap * 2^-22. Scores and cap include the
// factor log2(e).
__attribute__((always_inline)) inline float capped(float score, float cap) {
    const float shrunk = exp2_of(std::fabs(score) * (-2 * LOG2E / cap));
    return std::copysign(cap * ((1 - shrunk) / (1 + shrunk)), score);
}

// The natural logarithm of a positive, normal x, with an absolute or relative error of 2e-7.
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

}  // namespace
