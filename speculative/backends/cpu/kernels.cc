// XLA calls for decoding on CPU: products with a few positions, gated layers, attention, softmax,
// and Gumbel noise.
//
// The order of summation is the same for any number of positions, threads and masked keys, so a
// position's result does not depend on the positions next to it, to the last bit. A verify pass
// therefore sees exactly the logits that decoding token by token would have seen.
//
// All arrays are row-major, and float32 except kernels, which may be int8.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <utility>
#include <vector>

#include "attention.h"
#include "product.h"
#include "threads.h"
#include "vectors.h"
#include "xla/ffi/api/ffi.h"

namespace {

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
