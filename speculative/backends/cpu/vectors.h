// Vectors of the processor's width, and functions of them.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Vector __attribute__((vector_size(kLanes * sizeof(float))));
typedef int32_t Whole __attribute__((vector_size(kLanes * sizeof(int32_t))));
typedef uint32_t Bits __attribute__((vector_size(kLanes * sizeof(uint32_t))));

inline Vector Load(const float* from) {
  Vector v;
  std::memcpy(&v, from, sizeof(v));  // An unaligned load.
  return v;
}

// A kernel's numbers, as floats.
inline Vector Read(const float* from) { return Load(from); }

inline Vector Read(const int8_t* from) {
#if defined(__AVX512F__)
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return reinterpret_cast<Vector>(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)));
#elif defined(__AVX2__)
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
  return reinterpret_cast<Vector>(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)));
#else
  typedef int8_t Bytes __attribute__((vector_size(kLanes)));
  Bytes bytes;
  std::memcpy(&bytes, from, sizeof(bytes));
  return __builtin_convertvector(__builtin_convertvector(bytes, Whole), Vector);
#endif
}

inline void Store(float* to, Vector v) { std::memcpy(to, &v, sizeof(v)); }

// Compilers drop a subtraction of 0, but not an addition, which changes -0.
inline Vector All(float value) { return value - Vector{}; }

// The sum of the lanes, by a tree of halves.
inline float Sum(Vector v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps(reinterpret_cast<__m512>(v));  // A loop would go through memory.
#elif defined(__aarch64__)
  return vaddvq_f32(reinterpret_cast<float32x4_t>(v));
#else
  float lanes[kLanes];
  Store(lanes, v);
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
  return lanes[0];
#endif
}

// The sum of term(load, i) over i in [0, size), first by lane.
template <typename Term>
float SumOf(int64_t size, const Term& term) {
  Vector sums = {};
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) sums += term(Load, i);
  float sum = Sum(sums);
  for (; i < size; ++i) sum += term([](const float* from) { return *from; }, i);
  return sum;
}

// exp(x) for x <= 0, within 2 units in the last place; exactly 0 below -87.
inline Vector Exp(Vector x) {
  const Whole counts = x >= All(-87.0f);
  x = counts ? x : Vector{};
  // x = n ln 2 + r: adding the large number rounds to whole n.
  const Vector shifted = x * 1.44269504f + 12582912.0f;
  const Vector n = shifted - 12582912.0f;
  const Vector r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Vector p = All(1.9875691500e-4f);
  for (float next : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f,
                     5.0000001201e-1f}) {
    p = p * r + next;
  }
  p = p * (r * r) + r + 1.0f;
  // The exponent's bits take 2^n.
  const Whole power = (reinterpret_cast<Whole>(shifted) - 0x4B400000) << 23;
  return counts ? reinterpret_cast<Vector>(reinterpret_cast<Whole>(p) + power) : Vector{};
}

// log(x) for normal x > 0, within 2 units in the last place.
inline Vector Log(Vector x) {
  // x = 2^n m, with m from sqrt(1/2) to sqrt(2).
  const Whole bits = reinterpret_cast<Whole>(x) - 0x3F3504F3;
  const Vector n = __builtin_convertvector(bits >> 23, Vector);
  const Vector m = reinterpret_cast<Vector>((bits & 0x007FFFFF) + 0x3F3504F3) - 1.0f;
  Vector p = All(7.0376836292e-2f);
  for (float next : {-1.1514610310e-1f, 1.1676998740e-1f, -1.2420140846e-1f, 1.4249322787e-1f,
                     -1.6668057665e-1f, 2.0000714765e-1f, -2.4999993993e-1f, 3.3333331174e-1f}) {
    p = p * m + next;
  }
  const Vector square = m * m;
  return (p * m * square - n * 2.12194440e-4f - 0.5f * square) + m + n * 0.693359375f;
}

}  // namespace
