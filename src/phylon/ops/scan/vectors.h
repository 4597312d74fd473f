// Vectors of 8 or 16 fp32 numbers, by the extensions of GCC and Clang, and rows of fp32 or bf16 tensors.

#pragma once

#include <cstdint>
#include <cstring>
#include <vector>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace phylon {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#else
constexpr int LANES = 8;
#endif
constexpr int GROUP = 128 / LANES;  // blocks of LANES channels that one task works on

typedef float Vec __attribute__((vector_size(4 * LANES)));
typedef int32_t Int __attribute__((vector_size(4 * LANES)));
typedef uint16_t Half __attribute__((vector_size(2 * LANES)));

inline Vec all(float value) { return Vec{} + value; }

// 2^z to 1.5e-7 relative; exactly 1 at 0; 0, infinite and NaN where they should be.
inline Vec exp2(Vec z) {
  // The bounds make 0 and infinity. Beyond them the remainder of a z that is itself a product would be no remainder.
#if defined(__AVX512F__)
  z = (Vec)_mm512_max_ps(_mm512_set1_ps(-160.0f), (__m512)z);  // of two operands it gives the second if one is NaN
  z = (Vec)_mm512_min_ps(_mm512_set1_ps(160.0f), (__m512)z);
#else
  const Vec low = all(-127.0f), high = all(128.0f);
  z = low > z ? low : z;
  z = high < z ? high : z;
#endif
  const Vec magic = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Vec shifted = z + magic, whole = shifted - magic, r = z - whole;
  Vec p = all(0.0013264727f);
  p = p * r + 0.0096715130f;
  p = p * r + 0.055507336f;
  p = p * r + 0.24022242f;
  p = p * r + 0.69314700f;
  p = p * r + 1.0f;
#if defined(__AVX512F__)
  return (Vec)_mm512_scalef_ps((__m512)p, (__m512)whole);
#else
  return p * (Vec)(((Int)shifted + 127) << 23);  // the low bits of `shifted` are those of the integer
#endif
}

// A tensor (B, T, width) of fp32 or bf16 whose last dimension is contiguous; strides count numbers.
struct Tensor {
  void *data;
  int64_t row, step, half;
};

inline float widened(uint16_t bits) {
  const uint32_t wide = uint32_t(bits) << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}

inline float widened(float value) { return value; }

inline uint16_t rounded(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if (value != value) return 0x7fc0;
  return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline Vec read(const float *from) {
  Vec out;
  std::memcpy(&out, from, sizeof out);
  return out;
}

inline Vec read(const uint16_t *from) {
  Half bits;
  std::memcpy(&bits, from, sizeof bits);
  return (Vec)(__builtin_convertvector(bits, Int) << 16);
}

inline void load(const void *data, bool half, int64_t at, int count, float *out) {
  if (half) {
    const uint16_t *in = (const uint16_t *)data + at;
    if (count == LANES) {
      const Vec wide = read(in);
      std::memcpy(out, &wide, sizeof wide);
    } else {
      for (int i = 0; i < count; i++) out[i] = widened(in[i]);
    }
  } else {
    const float *in = (const float *)data + at;
    count == LANES ? std::memcpy(out, in, 4 * LANES) : std::memcpy(out, in, 4 * count);
  }
}

inline void store(void *data, bool half, int64_t at, int count, const float *in) {
  if (half) {
    uint16_t *out = (uint16_t *)data + at;
    if (count == LANES) {
      const Int bits = *(const Int *)in, nan = *(const Vec *)in != *(const Vec *)in;
      const Int near = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
      const Half half = __builtin_convertvector(nan ? (Int{} + 0x7fc0) : near, Half);
      std::memcpy(out, &half, sizeof half);
    } else {
      for (int i = 0; i < count; i++) out[i] = rounded(in[i]);
    }
  } else {
    float *out = (float *)data + at;
    count == LANES ? std::memcpy(out, in, 4 * LANES) : std::memcpy(out, in, 4 * count);
  }
}

inline void load_row(const Tensor &t, int64_t row, int64_t step, int64_t first, int count, float *out) {
  load(t.data, t.half, row * t.row + step * t.step + first, count, out);
}

inline void store_row(const Tensor &t, int64_t row, int64_t step, int64_t first, int count, const float *in) {
  store(t.data, t.half, row * t.row + step * t.step + first, count, in);
}

// Dense numbers of fp32 or bf16.
struct Numbers {
  void *data;
  int64_t half;
  explicit operator bool() const { return data; }
  float operator[](int64_t i) const {
    return half ? widened(((const uint16_t *)data)[i]) : ((const float *)data)[i];
  }
  Vec load(int64_t at, int count) const {
    Vec out{};
    phylon::load(data, half, at, count, (float *)&out);
    return out;
  }
  void store(int64_t at, int count, Vec value) const { phylon::store(data, half, at, count, (const float *)&value); }
};

// Memory of a thread that calls keep for later ones.
struct Scratch {
  std::vector<Vec> memory;
  Vec *next = nullptr;
  void reserve(size_t vectors) {
    if (memory.size() < vectors) memory.resize(vectors);
    next = memory.data();
  }
  Vec *take(size_t vectors) {
    Vec *taken = next;
    next += vectors;
    return taken;
  }
};
inline thread_local Scratch scratch;

}  // namespace phylon
