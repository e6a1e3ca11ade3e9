// XLA calls for decoding on CPU: products with a few positions, gated layers, attention, softmax,
// and Gumbel noise.
//
// The order of summation is the same for any number of positions, threads and masked keys, so a
// position's result does not depend on the positions next to it, to the last bit. A verify pass
// therefore sees exactly the logits that decoding token by token would have seen.
//
// All arrays are row-major, and float32 except kernels, which may be int8.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

// ---- Vectors ----------------------------------------------------------------------------

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

// ---- Threads ----------------------------------------------------------------------------

inline void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb");  // `yield` takes no time on most CPUs: helpers would sleep too soon.
#endif
}

// Work that is handed out in chunks, so that no one waits for a late thread.
struct Job {
  const std::function<void(int64_t, int64_t)> chunk;
  const int64_t items, size, helpers;
  std::atomic<int64_t> next{0};

  void Help() {
    for (int64_t begin; (begin = next.fetch_add(size)) < items;) {
      chunk(begin, std::min(begin + size, items));
    }
  }
};

// Threads that wait actively for the next job before they sleep. A decoding step is about fifty
// products of a few microseconds each; waking a thread takes longer than most of them.
class Helpers {
 public:
  void Run(Job& job) {
    std::unique_lock<std::mutex> mine(busy_, std::try_to_lock);
    if (!mine) return job.Help();  // The threads help another caller.
    for (auto i = static_cast<int64_t>(helpers_.size()); i < job.helpers; ++i) {
      helpers_.push_back(std::make_unique<Helper>());
      std::thread([this, i, self = helpers_.back().get()] { Serve(i, *self); }).detach();
    }
    job_ = &job;
    ++round_;
    for (int64_t i = 0; i < job.helpers; ++i) {
      if (!helpers_[i]->asleep) continue;
      const std::lock_guard<std::mutex> lock(helpers_[i]->mutex);
      helpers_[i]->asleep = false;
      helpers_[i]->wake.notify_one();
    }
    job.Help();
    // Threads that come now find no job; this waits for those that came before.
    job_ = nullptr;
    while (active_) Pause();
  }

 private:
  struct Helper {
    std::mutex mutex;
    std::condition_variable wake;
    std::atomic<bool> asleep{false};
  };

  // Times a helper looks for another round before it sleeps; about a tenth of a millisecond.
  static constexpr int kLooks = 4000;

  void Serve(int64_t index, Helper& self) {
    int64_t seen = 0;
    for (int looks = 0;; ++looks) {
      if (round_ == seen) {
        if (looks < kLooks) {
          Pause();
          continue;
        }
        std::unique_lock<std::mutex> lock(self.mutex);
        self.asleep = true;
        if (round_ == seen) {  // Otherwise a round began before this sleep was known.
          self.wake.wait(lock, [&] { return !self.asleep; });
          looks = 0;
        }
        self.asleep = false;
      }
      seen = round_;
      ++active_;
      if (Job* job = job_; job && index < job->helpers) {
        job->Help();
        looks = 0;
      }
      --active_;
    }
  }

  std::mutex busy_;
  std::vector<std::unique_ptr<Helper>> helpers_;
  std::atomic<Job*> job_{nullptr};
  std::atomic<int64_t> round_{0}, active_{0};
};

Helpers& helpers = *new Helpers;  // Never destroyed, because threads may outlive everything else.

constexpr int64_t kWorthAThread = 1 << 14;  // Floats read while another thread notices its work.

// Runs work(begin, end) over [0, items), where each item reads `floats`.
template <typename Work>
void Parallel(const ffi::ThreadPool& pool, int64_t items, int64_t floats, const Work& work) {
  const int64_t worth = 1 + items * floats / kWorthAThread;
  const int64_t threads = std::min({pool.num_threads(), worth, items});
  const std::function<void(int64_t, int64_t)> chunk = std::cref(work);
  if (threads <= 1) return chunk(0, items);
  Job job{chunk, items, std::max<int64_t>(1, items / (2 * threads)), threads - 1};
  helpers.Run(job);
}

// ---- The product ------------------------------------------------------------------------
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
// Without always_inline, compilers stop inlining it when the rest of this file grows.
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

// ---- Attention --------------------------------------------------------------------------
//
//   y[b, l, n] = sum_k softmax_k(scale query[b, l, n] . keys[b, n, k] + bias[b, n, l, k])
//                      values[b, n, k]
//
// N / K neighbouring heads of queries share a head of keys and values.

constexpr float kMasked = -1e9f;  // Keys whose bias lies below this are masked.
constexpr int kMixed = kLanes == 4 ? 8 : 4;  // Vectors of values that are summed together.

// Turns a query's scores [0, count), of which `peak` is the greatest, into weights, and returns their
// final factor. There is room after them for whole vectors; `none` tells whether one of them is NaN.
inline float Weigh(float* scores, int64_t count, float peak, bool none) {
  std::fill(scores + count, scores + (count + kLanes - 1) / kLanes * kLanes, -INFINITY);
  Vector sums = {};
  for (int64_t t = 0; t < count; t += kLanes) {
    const Vector w = Exp(Load(scores + t) - peak);
    sums += w;
    Store(scores + t, w);
  }
  return none ? NAN : 1.0f / Sum(sums);
}

struct Attention {
  const float *query, *keys, *values, *bias;
  float scale, cap;                              // Scores s become cap tanh(s / cap); 0 is no cap.
  float* y;
  int64_t length, heads, shared, seen, size;     // L, N, N / K, T, H.
  int64_t stride;                                // From one position's queries to the next.
  int64_t bias_batch, bias_heads, bias_queries;  // Strides of the bias; 0 where it is shared.

  // Computes all `batch` rows, with tiles of queries.
  void Many(const ffi::ThreadPool& pool, int64_t batch) const;

  // Heads [begin, end), numbered through all rows.
  void operator()(int64_t begin, int64_t end) const {
    std::vector<float> weights((seen + kLanes - 1) / kLanes * kLanes);
    for (int64_t at = begin; at < end; ++at) {
      const int64_t b = at / heads, n = at % heads;
      for (int64_t l = 0; l < length; ++l) {
        const int64_t position = b * length + l;
        const float* shift = bias + b * bias_batch + n * bias_heads + l * bias_queries;
        float* out = y + (position * heads + n) * size;
        // The first query also prefetches the next head's keys and values.
        const int64_t further = l == 0 ? seen * size : 0, from = at / shared * seen * size;
        Query(query + position * stride + n * size, keys + from, values + from, further, shift,
              weights.data(), out);
      }
    }
  }

  void Query(const float* q, const float* k, const float* v, int64_t further, const float* shift,
             float* weights, float* out) const {
    int64_t count = seen;  // Keys after the last unmasked one are not read.
    while (count > 0 && shift[count - 1] < kMasked) --count;
    int64_t first = 0;  // Keys before a window are not read either.
    while (first < count && shift[first] < kMasked) ++first;
    if (count == 0) count = seen;
    k += first * size, v += first * size, shift += first, count -= first;
    float peak = -INFINITY;
    bool none = false;
    for (int64_t t = 0; t < count; ++t) {
      const float* key = k + t * size;
      for (int64_t h = 0; h < size; h += 16) __builtin_prefetch(key + further + h);
      const auto product = [&](auto load, int64_t h) { return load(q + h) * load(key + h); };
      float score = scale * SumOf(size, product);
      if (cap > 0) score = cap * std::tanh(score / cap);
      weights[t] = score + shift[t];
      peak = std::max(peak, weights[t]);
      none |= std::isnan(weights[t]);
    }
    const float factor = Weigh(weights, count, peak, none);
    int64_t h = 0;
    for (; h + kMixed * kLanes <= size; h += kMixed * kLanes) {
      Mix<kMixed>(weights, v + h, count, further, factor, out + h);
    }
    for (; h + kLanes <= size; h += kLanes) Mix<1>(weights, v + h, count, further, factor, out + h);
    for (; h < size; ++h) {
      float sum = 0.0f;
      for (int64_t t = 0; t < count; ++t) sum += weights[t] * v[t * size + h];
      out[h] = sum * factor;
    }
  }

  template <int kVectors>
  void Mix(const float* weights, const float* v, int64_t count, int64_t further, float factor,
           float* out) const {
    Vector sums[kVectors] = {};
    for (int64_t t = 0; t < count; ++t, v += size) {
      const Vector w = All(weights[t]);
      for (int j = 0; j < kVectors * kLanes; j += 16) __builtin_prefetch(v + further + j);
      for (int j = 0; j < kVectors; ++j) sums[j] += w * Load(v + j * kLanes);
    }
    for (int j = 0; j < kVectors; ++j) Store(out + j * kLanes, sums[j] * factor);
  }
};

// Attention of many queries: scores and results are products of tiles of queries with panels of keys
// and values, like products with kernels. No more than one tile's scores are ever in memory.
struct Tiled {
  const float* query;
  int64_t stride;                    // From one position's queries to the next.
  const float *from_keys, *from_values;
  int64_t of_row, of_head, of_place;  // Strides of rows, heads and positions.
  float scale, cap;
  float* y;                                 // [B, L, N, H]
  int64_t length, heads, shared, places, size;  // L, N, N / K, T, H.
  std::vector<int64_t> counts;              // For each row, keys up to the last unmasked one.
  std::vector<float> keys, values;          // Panels of each head: [T / 32, H, 32], [H / 32, T, 32].

  static constexpr int kTile = 8;
  static constexpr int64_t kBlock = 64;  // Queries of a head that a thread takes at a time.

  int64_t Rows() const { return (places + kPanel - 1) / kPanel * kPanel; }
  int64_t Columns() const { return (size + kPanel - 1) / kPanel * kPanel; }
  int64_t Blocks() const { return (length + kBlock - 1) / kBlock; }

  // Lays out heads of keys [begin, end), numbered through all rows, as panels.
  void Pack(int64_t begin, int64_t end) {
    const int64_t rows = Rows(), columns = Columns(), of_keys = heads / shared;
    for (int64_t at = begin; at < end; ++at) {
      const int64_t b = at / of_keys, offset = b * of_row + at % of_keys * of_head;
      float *k = keys.data() + at * rows * size, *v = values.data() + at * rows * columns;
      for (int64_t t = 0; t < counts[b]; ++t) {
        const float *key = from_keys + offset + t * of_place;
        const float *value = from_values + offset + t * of_place;
        float* to = k + t / kPanel * size * kPanel + t % kPanel;
        for (int64_t h = 0; h < size; ++h) {
          to[h * kPanel] = key[h];
          v[(h / kPanel * rows + t) * kPanel + h % kPanel] = value[h];
        }
      }
    }
  }

  // Attends with blocks of queries [begin, end), numbered through all heads. The bias gives the keys
  // that a query sees, `Range` as [first, last), and adds itself to their scores, `Add`.
  template <typename Bias>
  void Attend(const Bias& bias, int64_t begin, int64_t end) const {
    std::vector<float> queries(kTile * size), scores(kTile * Rows());
    for (int64_t at = begin; at < end; ++at) {
      const int64_t first = at % Blocks() * kBlock, last = std::min(first + kBlock, length);
      for (int64_t l = first; l < last; l += kTile) {
        const int positions = std::min<int64_t>(kTile, last - l);
        Queries(bias, at / Blocks(), l, positions, queries.data(), scores.data());
      }
    }
  }

  template <typename Bias>
  void Queries(const Bias& bias, int64_t head, int64_t first, int positions, float* q,
               float* scores) const {
    const int64_t b = head / heads, n = head % heads, width = heads * size, rows = Rows();
    float* out = y + ((b * length + first) * heads + n) * size;
    int64_t begin = rows, count = 0;
    std::pair<int64_t, int64_t> ranges[kTile];
    for (int l = 0; l < positions; ++l) {
      ranges[l] = bias.Range(b, n, first + l, counts[b]);
      if (ranges[l].first == ranges[l].second) continue;
      begin = std::min(begin, ranges[l].first / kPanel * kPanel);
      count = std::max(count, ranges[l].second);
    }
    std::fill_n(q, kTile * size, 0.0f);
    for (int l = 0; l < positions; ++l) {
      const float* from = query + (b * length + first + l) * stride + n * size;
      for (int64_t h = 0; h < size; ++h) q[l * size + h] = scale * from[h];
    }
    constexpr std::make_integer_sequence<int, Vectors(kTile)> vectors;
    constexpr int kStep = Vectors(kTile) * kLanes;
    float tile[kTile][kPanel];
    const int64_t seen = std::max<int64_t>(0, (count + kPanel - 1) / kPanel * kPanel - begin);
    const float* k = keys.data() + (head / shared * rows + begin) * size;
    for (int64_t t = 0; t < seen; t += kPanel, k += size * kPanel) {
      for (int o = 0; o < kPanel; o += kStep) Tile<kTile>(k + o, q, size, tile[0] + o, vectors);
      for (int l = 0; l < kTile; ++l) std::copy_n(tile[l], kPanel, scores + l * seen + t);
    }
    float factors[kTile] = {};
    for (int l = 0; l < positions; ++l) {
      const auto [low, high] = ranges[l];
      float *row = scores + l * seen, peak = -INFINITY;
      if (low == high) {  // Padding keeps 0.
        std::fill_n(row, seen, 0.0f);
        continue;
      }
      if (cap > 0) {
        for (int64_t t = low - begin; t < high - begin; ++t) row[t] = cap * std::tanh(row[t] / cap);
      }
      bias.Add(b, n, first + l, low, high, row + low - begin);
      bool none = false;
      for (int64_t t = low - begin; t < high - begin; ++t) {
        none |= std::isnan(row[t]);
        peak = std::max(peak, row[t]);
      }
      std::fill_n(row, low - begin, -INFINITY);
      factors[l] = Weigh(row, high - begin, peak, none);
      std::fill(row + high - begin, row + seen, 0.0f);
    }
    for (int64_t l = positions; l < kTile; ++l) std::fill_n(scores + l * seen, seen, 0.0f);
    const float* v = values.data() + head / shared * rows * Columns() + begin * kPanel;
    for (int64_t h = 0; h < size; h += kPanel, v += rows * kPanel) {
      for (int o = 0; o < kPanel; o += kStep) Tile<kTile>(v + o, scores, seen, tile[0] + o, vectors);
      for (int64_t l = 0; l < positions; ++l) {
        const float* sums = tile[l];
        for (int64_t i = 0; i < std::min<int64_t>(kPanel, size - h); ++i) {
          out[l * width + h + i] = sums[i] * factors[l];
        }
      }
    }
  }

  // Lays out the keys and values, then attends with all queries.
  template <typename Bias>
  void Run(const ffi::ThreadPool& pool, int64_t batch, const Bias& bias) {
    const int64_t of_keys = batch * heads / shared;
    keys.resize(of_keys * Rows() * size);
    values.resize(of_keys * Rows() * Columns());
    const auto pack = [&](int64_t begin, int64_t end) { Pack(begin, end); };
    Parallel(pool, of_keys, 2 * places * size, pack);
    const auto attend = [&](int64_t begin, int64_t end) { Attend(bias, begin, end); };
    Parallel(pool, batch * heads * Blocks(), 2 * kBlock * places * size, attend);
  }
};

// The bias of whole texts by distance of keys, and their masks.
struct ByDistance {
  const float *table, *mask;  // [N or 1, 2 L - 1], [B, L].
  int64_t length, distances;  // L, and the floats from one head's table to the next.

  std::pair<int64_t, int64_t> Range(int64_t, int64_t, int64_t l, int64_t count) const {
    return {0, l < count ? count : 0};
  }
  void Add(int64_t b, int64_t n, int64_t l, int64_t low, int64_t high, float* row) const {
    const float* bias = table + n * distances + length - 1 - l;
    for (int64_t t = low; t < high; ++t) row[t - low] += bias[t] + mask[b * length + t];
  }
};

// The bias of each query and key; keys masked at either end are left out.
struct EachBias {
  const float* bias;
  int64_t of_row, of_head, of_query;  // Strides; 0 where it is shared.
  bool skips = false;  // Whether queries that see no key are padding, which keeps 0.

  const float* At(int64_t b, int64_t n, int64_t l) const {
    return bias + b * of_row + n * of_head + l * of_query;
  }
  std::pair<int64_t, int64_t> Range(int64_t b, int64_t n, int64_t l, int64_t count) const {
    const float* row = At(b, n, l);
    int64_t low = 0, high = count;
    while (high > 0 && row[high - 1] < kMasked) --high;
    while (low < high && row[low] < kMasked) ++low;
    if (high == 0 && !skips) high = count;
    return {low, high};
  }
  void Add(int64_t b, int64_t n, int64_t l, int64_t low, int64_t high, float* row) const {
    const float* from = At(b, n, l);
    for (int64_t t = low; t < high; ++t) row[t - low] += from[t];
  }
};

void Attention::Many(const ffi::ThreadPool& pool, int64_t batch) const {
  const int64_t of_head = seen * size;
  Tiled tiled{query, stride, keys, values, heads / shared * of_head, of_head, size, scale, cap, y,
              length, heads, shared, seen, size, {}, {}, {}};
  const EachBias each{bias, bias_batch, bias_heads, bias_queries, true};
  for (int64_t b = 0; b < batch; ++b) {
    int64_t count = 0;  // Keys up to the last one that any query sees.
    for (int64_t l = 0; l < length && count < seen; ++l) {
      count = std::max(count, each.Range(b, 0, l, seen).second);
    }
    tiled.counts.push_back(bias_heads ? seen : count);
  }
  tiled.Run(pool, batch, each);
}

constexpr int64_t kMany = 24;  // Queries from which panels of keys and values pay off.

// The attention of heads that lie side by side in rows of `stride` floats.
Attention Attending(const float* query, int64_t stride, Rank4 keys, Rank4 values, Rank4 bias,
                    float scale, float cap, Rank4 y) {
  const auto q = y.dimensions(), b = bias.dimensions();
  const int64_t seen = keys.dimensions()[2];
  return {query, keys.typed_data(), values.typed_data(), bias.typed_data(), scale, cap,
          y.typed_data(), q[1], q[2], q[2] / keys.dimensions()[1], seen, q[3], stride,
          b[0] > 1 ? b[1] * b[2] * seen : 0, b[1] > 1 ? b[2] * seen : 0, b[2] > 1 ? seen : 0};
}

// query [B, L, N, H]; keys and values [B, K, T, H]; bias [B or 1, N or 1, L or 1, T].
ffi::Error Attend(ffi::ThreadPool pool, Rank4 query, Rank4 keys, Rank4 values, Rank4 bias,
                  ffi::Result<Rank4> y, float scale, float cap) {
  const auto q = query.dimensions();
  const Attention each = Attending(query.typed_data(), q[2] * q[3], keys, values, bias, scale, cap, *y);
  if (q[1] >= kMany) {
    each.Many(pool, q[0]);
  } else {
    Parallel(pool, q[0] * q[2], 2 * q[1] * keys.dimensions()[2] * q[3], each);
  }
  return ffi::Error::Success();
}

// Prepares the queries and keys of a position for their products: each head is normed over its root
// mean square, then rotated, feature i together with feature i + H / 2.
struct Placing {
  const float *norms, *turns;  // [2, H] of queries and keys; [2, B or 1, L, H / 2]; or null.
  float epsilon;
  int64_t batch, length, size;  // B or 1, L, H.

  bool Any() const { return norms || turns; }

  // Prepares a head of queries (0) or keys (1), at position l of row b.
  void operator()(const float* from, int number, int64_t b, int64_t l, float* to) const {
    std::vector<float> normed;
    if (norms) {
      normed = Normed(from, norms + number * size, false, epsilon, 1, size);
      from = normed.data();
    }
    const int64_t half = size / 2;
    const float* cos = turns + ((batch > 1 ? b : 0) * length + l) * half;
    const float* sin = cos + batch * length * half;
    for (int64_t i = 0; turns && i < half; ++i) {
      to[i] = from[i] * cos[i] - from[half + i] * sin[i];
      to[half + i] = from[half + i] * cos[i] + from[i] * sin[i];
    }
    if (!turns) std::copy_n(from, size, to);
  }
};

// Writes the keys and values of new positions, which follow their queries in projected
// [B, L, (N + 2 K) * H], into the caches [B, K, T, H], which are results in place, at starts [B]; then
// attends like `Attend`. `norms` and `turns` may be empty.
ffi::Error AttendSelf(ffi::ThreadPool pool, Rank3 projected, Rank4 bias, Starts starts, Rank2 norms,
                      Rank4 turns, ffi::RemainingArgs, ffi::Result<Rank4> y,
                      ffi::Result<Rank4> keys, ffi::Result<Rank4> values, float scale, float cap,
                      float epsilon) {
  const auto q = y->dimensions(), k = keys->dimensions();
  const int64_t length = q[1], heads = q[2], size = q[3], shared = heads / k[1], seen = k[2];
  const int64_t width = heads * size, others = k[1] * size, row = width + 2 * others;
  const Placing placing{norms.element_count() ? norms.typed_data() : nullptr,
                        turns.element_count() ? turns.typed_data() : nullptr, epsilon,
                        turns.dimensions()[1], length, size};
  // Not in place, because `projected` may be read again.
  std::vector<float> placed(placing.Any() ? q[0] * length * width : 0);
  const float* from = placing.Any() ? placed.data() : projected.typed_data();
  const Attention attention = Attending(from, placing.Any() ? width : row, *keys, *values, bias,
                                        scale, cap, *y);
  // Enters heads of keys [begin, end), numbered through all rows, and prepares their query heads.
  const auto enter = [&](int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end; ++at) {
      const int64_t b = at / k[1], n = at % k[1];
      // As in XLA, a start too near the end is shifted back.
      const int64_t start = std::clamp<int64_t>(starts.typed_data()[b], 0, seen - length);
      for (int64_t l = 0; l < length; ++l) {
        const float* position = projected.typed_data() + (b * length + l) * row;
        const float* key = position + width + n * size;
        const int64_t to = (at * seen + start + l) * size;
        std::memcpy(values->typed_data() + to, key + others, size * sizeof(float));
        if (!placing.Any()) {
          std::memcpy(keys->typed_data() + to, key, size * sizeof(float));
          continue;
        }
        placing(key, 1, b, l, keys->typed_data() + to);
        for (int64_t m = n * shared; m < (n + 1) * shared; ++m) {
          float* query = placed.data() + (b * length + l) * width + m * size;
          placing(position + m * size, 0, b, l, query);
        }
      }
    }
  };
  if (length >= kMany) {
    Parallel(pool, q[0] * k[1], 4 * (2 + shared) * length * size, enter);
    attention.Many(pool, q[0]);
    return ffi::Error::Success();
  }
  if (shared == 1) {  // The threads do both in one pass.
    Parallel(pool, q[0] * heads, 2 * length * seen * size, [&](int64_t begin, int64_t end) {
      enter(begin, end);
      attention(begin, end);
    });
    return ffi::Error::Success();
  }
  Parallel(pool, q[0] * k[1], 4 * (2 + shared) * length * size, enter);
  Parallel(pool, q[0] * heads, 2 * length * seen * size, attention);
  return ffi::Error::Success();
}

// Attention among all positions of texts, as in encoders:
//
//   y[b, l, n] = sum_k softmax_k(scale query[b, l, n] . key[b, k, n] + by_distance[n, k - l + L - 1]
//                                + mask[b, k]) value[b, k, n]
//
// projected [B, L, 3 * N * H], by_distance [N or 1, 2 L - 1] and mask [B or 1, 1, 1, L] give
// y [B, L, N, H], which is 0 for padding, after the last key that is not masked.
ffi::Error AttendWhole(ffi::ThreadPool pool, Rank3 projected, Rank2 by_distance, Rank4 mask,
                       ffi::Result<Rank4> y, float scale) {
  const auto q = y->dimensions();
  const int64_t batch = q[0], length = q[1], heads = q[2], size = q[3], width = heads * size;
  const int64_t distances = by_distance.dimensions()[0] > 1 ? 2 * length - 1 : 0;
  const float* from = projected.typed_data();
  const ByDistance bias{by_distance.typed_data(), mask.typed_data(), length, distances};
  Tiled texts{from, 3 * width, from + width, from + 2 * width, length * 3 * width, size, 3 * width,
              scale, 0.0f, y->typed_data(), length, heads, 1, length, size, {}, {}, {}};
  for (int64_t b = 0; b < batch; ++b) {
    int64_t count = length;
    while (count > 0 && bias.mask[b * length + count - 1] < kMasked) --count;
    texts.counts.push_back(count);
  }
  texts.Run(pool, batch, bias);
  return ffi::Error::Success();
}

// ---- The softmax ------------------------------------------------------------------------

// The softmax of each row of x [..., V]; all NaN if a row has NaN or infinity, or only -infinity.
ffi::Error Softmax(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> y) {
  const int64_t size = x.dimensions().back(), rows = size ? x.element_count() / size : 0;
  // An exponential takes as long as reading some numbers.
  Parallel(pool, rows, 4 * size, [&](int64_t begin, int64_t end) {
    std::vector<float> weights((size + kLanes - 1) / kLanes * kLanes);
    for (int64_t r = begin; r < end; ++r) {
      const float* from = x.typed_data<float>() + r * size;
      std::copy(from, from + size, weights.begin());
      std::fill(weights.begin() + size, weights.end(), -INFINITY);
      Vector peaks = All(-INFINITY);
      Whole none = {};
      for (size_t i = 0; i < weights.size(); i += kLanes) {
        const Vector v = Load(weights.data() + i);
        peaks = v > peaks ? v : peaks;
        none |= v != v;
      }
      float peak = -INFINITY;
      bool any = false;
      for (int i = 0; i < kLanes; ++i) peak = std::max(peak, peaks[i]), any |= none[i] != 0;
      const float factor = Weigh(weights.data(), size, peak, any);
      float* to = y->typed_data<float>() + r * size;
      for (int64_t i = 0; i < size; ++i) to[i] = weights[i] * factor;
    }
  });
  return ffi::Error::Success();
}

// ---- Gumbel noise -----------------------------------------------------------------------

// The two words of Threefry-2x32-20 (Salmon et al., 2011) for a key and the counters (0, count).
inline std::pair<Bits, Bits> Threefry(uint32_t k0, uint32_t k1, Bits count) {
  constexpr int kTurns[2][4] = {{13, 15, 26, 6}, {17, 29, 16, 24}};
  const uint32_t keys[3] = {k0, k1, k0 ^ k1 ^ 0x1BD11BDA};
  Bits x = Bits{} + keys[0], y = count + keys[1];
  for (uint32_t i = 1; i <= 5; ++i) {
    for (const int turn : kTurns[(i - 1) % 2]) {
      x += y;
      y = ((y << turn) | (y >> (32 - turn))) ^ x;
    }
    x += keys[i % 3];
    y += keys[(i + 1) % 3] + i;
  }
  return {x, y};
}

// The noise of all tokens for each key; see `noise.py`.
ffi::Error Gumbel(ffi::ThreadPool pool, ffi::AnyBuffer keys, ffi::Result<ffi::AnyBuffer> y) {
  const int64_t size = y->dimensions().back(), rows = size ? y->element_count() / size : 0;
  const int64_t vectors = (size + kLanes - 1) / kLanes;
  // A token's noise takes as long as reading some twenty numbers.
  Parallel(pool, rows * vectors, 20 * kLanes, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = i / vectors, first = i % vectors * kLanes;
      const uint32_t* key = keys.typed_data<uint32_t>() + 2 * row;
      Bits tokens;
      for (int l = 0; l < kLanes; ++l) tokens[l] = static_cast<uint32_t>(first + l);
      const auto [a, b] = Threefry(key[0], key[1], tokens);
      const auto number = [](Bits bits) {
        return __builtin_convertvector(reinterpret_cast<Whole>(bits), Vector);
      };
      // Numbers near 1 are represented by their distance to 1, as exactly as numbers near 0.
      const Whole above = reinterpret_cast<Whole>(a) >> 31;
      const Bits top = a ^ reinterpret_cast<Bits>(above), next = b ^ reinterpret_cast<Bits>(above);
      const Vector high = number(top >> 8), low = number(((top & 0xFF) << 16) | (next >> 16));
      const Vector v = high * 0x1p-24f + (low + 0.5f) * 0x1p-48f;
      // -log(1 - v), where 1 - v is rounded (Kahan).
      const Vector rest = 1.0f - v, gone = 1.0f - rest;
      const Whole tiny = gone == Vector{};
      const Vector log = -Log(above ? v : rest);
      const Vector one = above ? log : tiny ? v : log * (v / (tiny ? All(1.0f) : gone));
      const Vector noise = -Log(one);
      const int64_t count = std::min<int64_t>(kLanes, size - first);
      std::memcpy(y->typed_data<float>() + row * size + first, &noise, count * sizeof(float));
    }
  });
  return ffi::Error::Success();
}

// ---- The read ---------------------------------------------------------------------------

// The sum of all numbers, which takes as long as reading them like panels.
ffi::Error Total(ffi::ThreadPool pool, Rank1 values, ffi::Result<Number> y) {
  constexpr int64_t kBlock = 4 * kLanes;
  const int64_t count = values.element_count(), blocks = count / kBlock;
  const float* from = values.typed_data();
  std::mutex mutex;
  float total = 0.0f;
  Parallel(pool, blocks, kBlock, [&](int64_t begin, int64_t end) {
    Vector sums[4] = {};
    for (int64_t b = begin; b < end; ++b) {
      const char* ahead = reinterpret_cast<const char*>(from + b * kBlock) + kAhead;
      for (int i = 0; i < kBlock * 4; i += 64) __builtin_prefetch(ahead + i);
      for (int i = 0; i < 4; ++i) sums[i] += Load(from + b * kBlock + i * kLanes);
    }
    const std::lock_guard<std::mutex> lock(mutex);
    total += Sum(sums[0] + sums[1] + sums[2] + sums[3]);
  });
  for (int64_t i = blocks * kBlock; i < count; ++i) total += from[i];
  *y->typed_data() = total;
  return ffi::Error::Success();
}

auto Bind() { return ffi::Ffi::Bind().Ctx<ffi::ThreadPool>(); }

auto BindProducts() {
  return Bind().Arg<ffi::AnyBuffer>().Arg<Rank1>().Arg<Rank1>().Arg<ffi::AnyBuffer>()
      .RemainingArgs().RemainingRets()
      .Attr<int64_t>("heads").Attr<int64_t>("source")
      .Attr<int64_t>("first").Attr<int64_t>("second").Attr<float>("epsilon");
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(speculative_product_float32, (Multiply<ffi::F32, false>),
                              BindProducts());
XLA_FFI_DEFINE_HANDLER_SYMBOL(speculative_product_int8, (Multiply<ffi::S8, false>),
                              BindProducts());
XLA_FFI_DEFINE_HANDLER_SYMBOL(speculative_product_int8_rounded, (Multiply<ffi::S8, true>),
                              BindProducts());
XLA_FFI_DEFINE_HANDLER_SYMBOL(speculative_attend, Attend,
                              Bind().Arg<Rank4>().Arg<Rank4>().Arg<Rank4>().Arg<Rank4>()
                                  .Ret<Rank4>().Attr<float>("scale").Attr<float>("cap"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(speculative_attend_self, AttendSelf,
                              Bind().Arg<Rank3>().Arg<Rank4>().Arg<Starts>().Arg<Rank2>()
                                  .Arg<Rank4>().RemainingArgs()
                                  .Ret<Rank4>().Ret<Rank4>().Ret<Rank4>()
                                  .Attr<float>("scale").Attr<float>("cap").Attr<float>("epsilon"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(speculative_attend_whole, AttendWhole,
                              Bind().Arg<Rank3>().Arg<Rank2>().Arg<Rank4>()
                                  .Ret<Rank4>().Attr<float>("scale"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(speculative_softmax, Softmax,
                              Bind().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(speculative_gumbel, Gumbel,
                              Bind().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(speculative_total, Total, Bind().Arg<Rank1>().Ret<Number>());
