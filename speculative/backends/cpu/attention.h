// Attention.
//
//   y[b, l, n] = sum_k softmax_k(scale query[b, l, n] . keys[b, n, k] + bias[b, n, l, k])
//                      values[b, n, k]
//
// N / K neighbouring heads of queries share a head of keys and values.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "product.h"
#include "threads.h"
#include "vectors.h"
#include "xla/ffi/api/ffi.h"

namespace {

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

}  // namespace
