// Products with a few positions, and gated layers.
//
//   y[l, o] = first(bias[o] + sum_i kernel[i, o] norm(x)[l, i])     x [L, I], y [L, O]
//
// A product takes as long as reading the kernel from memory, if that is read once, front to back.
// The kernel is therefore stored as panels [O / 32, I, 32]: a panel's 32 outputs for up to 8
// positions stay in registers while it streams past, and no sum runs across a register.
//
// An int8 kernel has a scale for each output. Its numbers are widened as they are read, and sums are
// scaled at the end. Alternatively each position of x is also rounded to int8, with its own scale:
// whole numbers are then summed, which is fast and exact. Instructions multiply four inputs at a
// time, so such panels are [O / 32, I / 4, 32, 4], padded with zeros.
//
// The panels of a gated layer's two kernels alternate, and
//
//   y[l, o] = first(sum_i kernel_0[i, o] norm(x)[l, i]) second(sum_i kernel_1[i, o] norm(x)[l, i])

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "threads.h"
#include "vectors.h"
#include "xla/ffi/api/ffi.h"

namespace {

constexpr int kPanel = 32;
constexpr int64_t kAhead = 8192;  // Bytes by which a panel is prefetched, as memory is slow.
constexpr int64_t kAtATime = 1 << 18;  // Floats of x that stay in a cache for all panels.

inline void Prefetch(const void* panel, int bytes = 128) {
  const char* ahead = static_cast<const char*>(panel) + kAhead;
  for (int i = 0; i < bytes; i += 64) __builtin_prefetch(ahead + i);
}

// Vectors of a panel's 32 outputs that are summed together, by number of positions. A sum waits about
// four cycles for its last addition: ARM's short vectors need many sums, and it has 32 registers.
constexpr int Vectors(int positions) {
#if defined(__aarch64__)
  return positions <= 2 ? 8 : positions <= 6 ? 4 : 2;
#else
  return 2;
#endif
}

// The first vectors of a panel's outputs for kPositions positions, with every sum in a register.
// Without always_inline, compilers stop inlining it when the code around it grows.
template <int kPositions, typename Weight, int... kVectors>
__attribute__((always_inline)) inline void Tile(const Weight* panel, const float* x, int64_t inputs,
                                                float* y, std::integer_sequence<int, kVectors...>) {
  Vector sums[kPositions][sizeof...(kVectors)] = {};
  for (int64_t i = 0; i < inputs; ++i, panel += kPanel) {
    Prefetch(panel, kPanel * sizeof(Weight));
    Vector weights[] = {Read(panel + kVectors * kLanes)...};
#if defined(__x86_64__)
    asm("" : "+v"(weights[0]), "+v"(weights[1]));  // Prevents loading them again for each position.
#endif
    for (int l = 0; l < kPositions; ++l) {
      const Vector v = All(x[l * inputs + i]);
      ((sums[l][kVectors] += weights[kVectors] * v), ...);
    }
  }
  for (int l = 0; l < kPositions; ++l) {
    (Store(y + l * kPanel + kVectors * kLanes, sums[l][kVectors]), ...);
  }
}

// Positions rounded for int8 kernels: numbers from -127 to 127, four inputs side by side, with their
// scales. x86 multiplies unsigned bytes by signed ones, so there 128 is added to each number and
// subtracted again from the sums.
#if defined(__AVX512VNNI__)
constexpr int kShift = 128;
#else
constexpr int kShift = 0;
#endif

struct Rounded {
  int64_t width;  // Inputs, padded to a multiple of 4.
  std::vector<uint8_t> values;
  std::vector<float> scales;

  Rounded(const float* x, int64_t rows, int64_t inputs)
      : width((inputs + 3) / 4 * 4), values(rows * width, kShift), scales(rows) {
    for (int64_t l = 0; l < rows; ++l) {
      const float* from = x + l * inputs;
      float peak = 0.0f, finite = 0.0f;
      for (int64_t i = 0; i < inputs; ++i) {
        peak = std::max(peak, std::abs(from[i]));
        finite += from[i] * 0.0f;  // 0, or NaN if an input is NaN or infinite.
      }
      scales[l] = peak / 127.0f + finite;
      const float factor = peak > 0.0f && finite == 0.0f ? 127.0f / peak : 0.0f;
      uint8_t* to = values.data() + l * width;
      for (int64_t i = 0; i < inputs && factor > 0.0f; ++i) {
        to[i] = static_cast<uint8_t>(static_cast<int>(std::rint(from[i] * factor)) + kShift);
      }
    }
  }
};

// The sums of a panel's outputs for kPositions positions of `width` inputs.
template <int kPositions>
__attribute__((always_inline)) inline void Tile(const int8_t* panel, const uint8_t* x,
                                                int64_t width, int32_t (*sums)[kPanel]) {
#if defined(__AVX512VNNI__)
  // A sum waits about five cycles for its last addition; few positions therefore use several sums.
  constexpr int kSums = kPositions == 1 ? 4 : kPositions == 2 ? 2 : 1;
  __m512i parts[kSums][kPositions][2] = {};
  const auto add = [&](int64_t i, int part) __attribute__((always_inline)) {
    const int8_t* weights = panel + i * kPanel;
    Prefetch(weights);
    const __m512i low = _mm512_loadu_si512(weights), high = _mm512_loadu_si512(weights + 64);
    for (int l = 0; l < kPositions; ++l) {
      int32_t four;
      std::memcpy(&four, x + l * width + i, sizeof(four));
      const __m512i v = _mm512_set1_epi32(four);
      parts[part][l][0] = _mm512_dpbusd_epi32(parts[part][l][0], v, low);
      parts[part][l][1] = _mm512_dpbusd_epi32(parts[part][l][1], v, high);
    }
  };
  int64_t i = 0;
  for (; i + 4 * kSums <= width; i += 4 * kSums) {
    for (int part = 0; part < kSums; ++part) add(i + 4 * part, part);
  }
  for (; i < width; i += 4) add(i, 0);
  for (int l = 0; l < kPositions; ++l) {
    for (int half = 0; half < 2; ++half) {
      __m512i sum = parts[0][l][half];
      for (int part = 1; part < kSums; ++part) sum = _mm512_add_epi32(sum, parts[part][l][half]);
      _mm512_storeu_si512(sums[l] + 16 * half, sum);
    }
  }
#elif defined(__AVX2__)
  for (int l = 0; l < kPositions; ++l) {
    __m256i parts[8] = {};  // For four outputs each: sums over two inputs and over the other two.
    for (int64_t i = 0; i < width; i += 4) {
      const int8_t* weights = panel + i * kPanel;
      Prefetch(weights);
      int32_t four;
      std::memcpy(&four, x + l * width + i, sizeof(four));
      const __m256i v = _mm256_cvtepi8_epi16(_mm_set1_epi32(four));
      for (int part = 0; part < 8; ++part) {
        const auto* from = reinterpret_cast<const __m128i*>(weights + 16 * part);
        const __m256i w = _mm256_cvtepi8_epi16(_mm_loadu_si128(from));
        parts[part] = _mm256_add_epi32(parts[part], _mm256_madd_epi16(w, v));
      }
    }
    for (int part = 0; part < 8; ++part) {
      int32_t pairs[8];
      std::memcpy(pairs, &parts[part], sizeof(pairs));
      for (int o = 0; o < 4; ++o) sums[l][4 * part + o] = pairs[2 * o] + pairs[2 * o + 1];
    }
  }
#elif defined(__ARM_FEATURE_DOTPROD)
  for (int l = 0; l < kPositions; ++l) {
    int32x4_t parts[8] = {};
    for (int64_t i = 0; i < width; i += 4) {
      const int8_t* weights = panel + i * kPanel;
      Prefetch(weights);
      int32_t four;
      std::memcpy(&four, x + l * width + i, sizeof(four));
      const int8x16_t v = vreinterpretq_s8_s32(vdupq_n_s32(four));
      for (int part = 0; part < 8; ++part) {
        parts[part] = vdotq_s32(parts[part], vld1q_s8(weights + 16 * part), v);
      }
    }
    for (int part = 0; part < 8; ++part) vst1q_s32(sums[l] + 4 * part, parts[part]);
  }
#else
  for (int l = 0; l < kPositions; ++l) {
    std::fill(sums[l], sums[l] + kPanel, 0);
    for (int64_t i = 0; i < width; ++i) {
      const int v = static_cast<int8_t>(x[l * width + i]);
      const int8_t* weights = panel + (i - i % 4) * kPanel + i % 4;
      for (int o = 0; o < kPanel; ++o) sums[l][o] += v * weights[4 * o];
    }
  }
#endif
}

// Activations of feed-forward layers, all of which keep 0, as padding requires; the order is that of
// `ACTIVATIONS` in types.py.
enum class Activation : int64_t { kGelu, kSilu, kRelu, kLinear };

// SiLU is x / (1 + exp(-x)). GELU, with its tanh written as 2 / (1 + exp(-2z)) - 1, is the same with
// another exponent.
inline Vector Activated(Activation activation, Vector x) {
  if (activation == Activation::kLinear) return x;
  if (activation == Activation::kRelu) return (x > Vector{}) | (x != x) ? x : Vector{};
  const Vector gelu = x * (x * x * 0.0713548162f + 1.59576912f);
  const Vector z = activation == Activation::kSilu ? x : gelu;
  const Vector e = Exp(reinterpret_cast<Vector>(reinterpret_cast<Whole>(z) | INT32_MIN));
  return x * (x > Vector{} ? All(1.0f) : e) / (e + 1.0f);
}

// A kernel, and the array for its products.
template <typename Weight>
struct Kernel {
  const Weight* panels;
  const float* scales;  // With int8: those of outputs and, if x is rounded, their kernels' sums.
  float* y;
};

// Products of positions with kernels of the same sizes. Each y is [L, O] or, for the positions of
// sources [B, S], in the layout that attention reads, [B, N, S, H].
template <typename Weight, bool kRounded>
struct Products {
  std::vector<Kernel<Weight>> kernels;
  const float* x;
  const Rounded& rounded;              // Used in place of x, if it is rounded.
  const float *bias, *add;             // Null where there is nothing to add.
  const std::vector<int64_t>& places;  // Where in y each position's outputs begin.
  int64_t inputs, outputs, panels;     // Panels of y: half of a gated layer's panels.
  int64_t size, stride;                // H, and the floats between two heads' outputs.
  bool gated;
  Activation activations[2];  // The second one is for gated layers.

  // Panels [begin, end), numbered through all kernels.
  void operator()(int64_t begin, int64_t end) const {
    const int64_t positions = places.size(), most = std::max<int64_t>(8, kAtATime / inputs / 8 * 8);
    for (int64_t first = 0; first < positions; first += most) {
      const int64_t last = std::min(first + most, positions);
      for (int64_t p = begin; p < end; ++p) {
        const Kernel<Weight>& kernel = kernels[p / panels];
        for (int64_t l = first; l < last; l += 8) AtMost<8>(kernel, p % panels, l, last - l);
      }
    }
  }

  // Computes a panel for `positions`, or for the first kMost of them.
  template <int kMost>
  void AtMost(const Kernel<Weight>& kernel, int64_t p, int64_t l, int64_t positions) const {
    if (positions >= kMost) {
      return gated ? Panel<kMost, true>(kernel, p, l) : Panel<kMost, false>(kernel, p, l);
    }
    if constexpr (kMost > 1) AtMost<kMost - 1>(kernel, p, l, positions);
  }

  template <int kPositions, bool kGated>  // If inlined, sums would leave the registers.
  __attribute__((noinline)) void Panel(const Kernel<Weight>& kernel, int64_t p, int64_t l) const {
    const int64_t first = p * kPanel, count = std::min<int64_t>(kPanel, outputs - first);
    float sums[kPositions][kPanel], others[kPositions][kPanel];
    Sums<kPositions>(kernel, kGated ? 2 * p : p, l, sums);
    if (kGated) Sums<kPositions>(kernel, 2 * p + 1, l, others);
    const bool activated = kGated || activations[0] != Activation::kLinear;
    for (int k = 0; k < kPositions; ++k) {
      for (int64_t o = 0; bias && o < count; ++o) sums[k][o] += bias[first + o];
      for (int o = 0; activated && o < kPanel; o += kLanes) {
        const Vector v = Activated(activations[0], Load(sums[k] + o));
        Store(sums[k] + o, kGated ? v * Activated(activations[1], Load(others[k] + o)) : v);
      }
    }
    for (int64_t o = 0, end; o < count; o = end) {
      const int64_t n = (first + o) / size, h = (first + o) % size;
      end = std::min(count, o + size - h);
      for (int k = 0; k < kPositions; ++k) {
        const int64_t at = places[l + k] + n * stride + h;
        for (int64_t i = 0; add && i < end - o; ++i) sums[k][o + i] += add[at + i];
        std::copy(sums[k] + o, sums[k] + end, kernel.y + at);
      }
    }
  }

  template <int kPositions>
  void Sums(const Kernel<Weight>& kernel, int64_t p, int64_t l, float (*sums)[kPanel]) const {
    if constexpr (!kRounded) {
      const Weight* panel = kernel.panels + p * inputs * kPanel;
      constexpr std::make_integer_sequence<int, Vectors(kPositions)> vectors;
      for (int o = 0; o < kPanel; o += vectors.size() * kLanes) {
        Tile<kPositions>(panel + o, x + l * inputs, inputs, sums[0] + o, vectors);
      }
      for (int k = 0; kernel.scales && k < kPositions; ++k) {
        for (int o = 0; o < kPanel; ++o) sums[k][o] *= kernel.scales[p * kPanel + o];
      }
    } else {
      const int64_t width = rounded.width;
      int32_t whole[kPositions][kPanel];
      Tile<kPositions>(kernel.panels + p * width * kPanel, rounded.values.data() + l * width, width,
                       whole);
      const float *scale = kernel.scales + 2 * p * kPanel, *sum = scale + kPanel;
      for (int k = 0; k < kPositions; ++k) {
        const float of_position = rounded.scales[l + k];
        for (int o = 0; o < kPanel; ++o) {
          const int32_t added = kShift * static_cast<int32_t>(sum[o]);
          sums[k][o] = static_cast<float>(whole[k][o] - added) * (of_position * scale[o]);
        }
      }
    }
  }
};

// Layer norms of rows [L, D]: T5's, over the root mean square, times a scale; or GPT's, over the
// standard deviation, times a scale, plus a shift, which is stored after the scales.
std::vector<float> Normed(const float* x, const float* scale, bool shifted, float epsilon,
                          int64_t rows, int64_t size) {
  std::vector<float> y(rows * size);
  for (int64_t l = 0; l < rows; ++l) {
    const float* from = x + l * size;
    const auto plain = [from](auto load, int64_t i) { return load(from + i); };
    const float mean = shifted ? SumOf(size, plain) / size : 0.0f;
    const auto square = [from, mean](auto load, int64_t i) {
      return (load(from + i) - mean) * (load(from + i) - mean);
    };
    const float factor = 1.0f / std::sqrt(SumOf(size, square) / size + epsilon);
    for (int64_t i = 0; i < size; ++i) {
      y[l * size + i] = (from[i] - mean) * factor * scale[i] + (shifted ? scale[size + i] : 0.0f);
    }
  }
  return y;
}

// Whether all numbers are 0, of either sign.
inline bool AllZero(const float* from, int64_t size) {
  uint32_t bits = 0;
  for (int64_t i = 0; i < size; ++i) {
    uint32_t number;
    std::memcpy(&number, from + i, sizeof(number));
    bits |= number << 1;
  }
  return bits == 0;
}

using Number = ffi::Buffer<ffi::F32, 0>;
using Rank1 = ffi::Buffer<ffi::F32, 1>;
using Rank2 = ffi::Buffer<ffi::F32, 2>;
using Rank3 = ffi::Buffer<ffi::F32, 3>;
using Rank4 = ffi::Buffer<ffi::F32, 4>;
using Starts = ffi::Buffer<ffi::S32, 1>;

// Products of x [..., I] with kernels of the same sizes, in one call, because some are small. A
// kernel consists of panels, followed for int8 by scales [panels, 32] of the outputs or, if x is
// rounded, [panels, 64]: those, and the sums of their kernels. `norm` is [I], [2 I] with shifts, or
// empty; `bias` [O] and `add`, which is added to y last, may be empty. Gated kernels have twice the
// panels of their y, which is [..., O], or [B, N, S, H] with `heads` N and a `source` of S.
template <ffi::DataType kType, bool kRounded>
ffi::Error Multiply(ffi::ThreadPool pool, ffi::AnyBuffer x, Rank1 norm, Rank1 bias,
                    ffi::AnyBuffer add, ffi::RemainingArgs given, ffi::RemainingRets ys,
                    int64_t heads, int64_t source, int64_t first, int64_t second, float epsilon) {
  using Weight = ffi::NativeType<kType>;
  constexpr bool kScaled = sizeof(Weight) < sizeof(float);
  const int64_t inputs = x.dimensions().back(), rows = x.element_count() / inputs;
  const bool shifted = norm.element_count() == static_cast<size_t>(2 * inputs);
  const float* from = x.typed_data<float>();
  // Rows of padding are all zero, and so are their products, which are skipped unless a bias or a
  // norm's shift changes 0.
  std::vector<int64_t> kept, zeros;
  for (int64_t l = 0; l < rows; ++l) {
    const bool keep = bias.element_count() || shifted || !AllZero(from + l * inputs, inputs);
    (keep ? kept : zeros).push_back(l);
  }
  const int64_t positions = kept.size();
  std::vector<float> filled, normed;
  if (positions < rows) {
    for (int64_t l : kept) filled.insert(filled.end(), from + l * inputs, from + (l + 1) * inputs);
    from = filled.data();
  }
  if (norm.element_count()) {
    normed = Normed(from, norm.typed_data(), shifted, epsilon, positions, inputs);
    from = normed.data();
  }
  const Rounded rounded(from, kRounded ? positions : 0, inputs);
  std::vector<Kernel<Weight>> kernels;
  for (size_t i = 0; i < ys.size(); ++i) {
    const float* scales = nullptr;
    if constexpr (kScaled) scales = given.get<Rank2>(2 * i + 1)->typed_data();
    kernels.push_back({given.get<ffi::Buffer<kType, 3>>((1 + kScaled) * i)->typed_data(), scales,
                       (*ys.get<ffi::AnyBuffer>(i))->typed_data<float>()});
  }
  const int64_t size = (*ys.get<ffi::AnyBuffer>(0))->dimensions().back();
  const int64_t outputs = heads * size, stride = source * size;
  const float* added = add.element_count() ? add.typed_data<float>() : nullptr;
  const auto place = [&](int64_t row) {
    return row / source * source * outputs + row % source * size;
  };
  Parallel(pool, zeros.size(), kernels.size() * outputs, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      for (const Kernel<Weight>& kernel : kernels) {
        for (int64_t n = 0; n < heads; ++n) {
          const int64_t at = place(zeros[i]) + n * stride;
          if (added) std::copy_n(added + at, size, kernel.y + at);
          if (!added) std::fill_n(kernel.y + at, size, 0.0f);
        }
      }
    }
  });
  std::vector<int64_t> places(positions);
  std::transform(kept.begin(), kept.end(), places.begin(), place);
  const auto panels = given.get<ffi::Buffer<kType, 3>>(0)->dimensions();
  const int64_t of_y = (outputs + kPanel - 1) / kPanel, each = panels[0] / of_y;
  const Products<Weight, kRounded> products{
      kernels, from, rounded, bias.element_count() ? bias.typed_data() : nullptr, added, places,
      inputs, outputs, of_y, size, stride, each == 2, {Activation{first}, Activation{second}}};
  const int64_t floats = each * panels[1] * panels[2] * sizeof(Weight) / sizeof(float);
  Parallel(pool, kernels.size() * of_y, floats, products);
  return ffi::Error::Success();
}

}  // namespace
