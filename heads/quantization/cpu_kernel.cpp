// Products of few rows with microscaling weights on x86 processors with AVX2, FMA and F16C.
//
// A weight is decoded in registers, a block of 32 at a time, and multiplied at once, so that memory is read as the
// packed codes alone. Sums are float32. A 4-bit element is looked up by a byte shuffle (the two bytes of its bfloat16);
// a 6- or 8-bit one is shifted into the bits of a float16, which the processor widens, subnormal numbers included. What
// the float16 is too small by, a power of two, is multiplied to the finished sums.
//
// Decoding leaves the 32 elements in an order that is handy for the instructions. So the rows of x are brought into
// that order once in each call; `Order` finds it by decoding blocks with one element that is not zero.
//
// Layout: heads/quantization/codec.py. Its `unpack` and a product are the plain reference of all this.
// N rows of x, I inputs, O outputs, G = I / 32 blocks of a row
#include <immintrin.h>
#include <omp.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#define SIMD __attribute__((target("avx2,fma,f16c")))
#define INLINE_SIMD SIMD inline __attribute__((always_inline))

namespace {

constexpr int BLOCK = 32;
constexpr int ROWS = 8;  // of x that one decoded block is multiplied with

struct Block {
  __m256 part[4];
};

// 16 float16 numbers each
INLINE_SIMD Block widen(__m256i first, __m256i second) {
  return {{_mm256_cvtph_ps(_mm256_castsi256_si128(first)), _mm256_cvtph_ps(_mm256_extracti128_si256(first, 1)),
           _mm256_cvtph_ps(_mm256_castsi256_si128(second)), _mm256_cvtph_ps(_mm256_extracti128_si256(second, 1))}};
}

struct E2M1 {
  static constexpr int BITS = 4, ONE = 0x2, FACTOR = 0;
  static INLINE_SIMD Block decode(const uint8_t* codes) {
    // the bfloat16 of 0, 0.5, 1, 1.5, 2, 3, 4, 6 and of their negatives
    const __m256i high = _mm256_broadcastsi128_si256(_mm_setr_epi8(
        0x00, 0x3F, 0x3F, 0x3F, 0x40, 0x40, 0x40, 0x40, -0x80, -0x41, -0x41, -0x41, -0x40, -0x40, -0x40, -0x40));
    const __m256i low = _mm256_broadcastsi128_si256(_mm_setr_epi8(
        0x00, 0x00, -0x80, -0x40, 0x00, 0x40, -0x80, -0x40, 0x00, 0x00, -0x80, -0x40, 0x00, 0x40, -0x80, -0x40));
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
    const __m256i nibbles =
        _mm256_and_si256(_mm256_set_m128i(_mm_srli_epi16(bytes, 4), bytes), _mm256_set1_epi8(0x0F));
    const __m256i tops = _mm256_shuffle_epi8(high, nibbles), ends = _mm256_shuffle_epi8(low, nibbles);
    const __m256i a = _mm256_unpacklo_epi8(ends, tops), b = _mm256_unpackhi_epi8(ends, tops);
    const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xFFFF0000));
    return {{_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)), _mm256_castsi256_ps(_mm256_and_si256(a, upper)),
             _mm256_castsi256_ps(_mm256_slli_epi32(b, 16)), _mm256_castsi256_ps(_mm256_and_si256(b, upper))}};
  }
};

// Four 6-bit codes in three bytes become two pairs of 16 bits, then two float16 for each pair
template <int EXPONENT_BITS>
struct Six {
  static constexpr int BITS = 6, ONE = EXPONENT_BITS == 2 ? 0x08 : 0x0C, FACTOR = EXPONENT_BITS == 2 ? 14 : 12;
  static constexpr int SHIFT = 5 - EXPONENT_BITS;  // from a 6-bit code at the top to the exponent of a float16
  static INLINE_SIMD Block decode(const uint8_t* codes) {
    const __m256i bytes = _mm256_set_m128i(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + 8)),
                                           _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
    const __m256i places = _mm256_setr_epi8(0, 1, 1, 2, 3, 4, 4, 5, 6, 7, 7, 8, 9, 10, 10, 11,  //
                                            4, 5, 5, 6, 7, 8, 8, 9, 10, 11, 11, 12, 13, 14, 14, 15);
    // both codes of a pair at the top: bits 4 to 9 and 10 to 15
    const __m256i pairs =
        _mm256_mullo_epi16(_mm256_shuffle_epi8(bytes, places), _mm256_set1_epi32(0x00010010));
    const __m256i kept = _mm256_set1_epi16(static_cast<short>(0x8000 | (0x7C00 >> SHIFT)));
    const __m256i first = _mm256_srai_epi16(_mm256_slli_epi16(pairs, 6), SHIFT);
    const __m256i second = _mm256_srai_epi16(pairs, SHIFT);
    return widen(_mm256_and_si256(first, kept), _mm256_and_si256(second, kept));
  }
};

struct E4M3 {
  static constexpr int BITS = 8, ONE = 0x38, FACTOR = 8;
  static INLINE_SIMD __m256i half(__m256i byte_at_top) {
    const __m256i number = _mm256_and_si256(_mm256_srai_epi16(byte_at_top, 1), _mm256_set1_epi16(short(0xBF80)));
    const __m256i all_ones = _mm256_set1_epi16(0x3F80);  // NaN
    const __m256i nan = _mm256_cmpeq_epi16(_mm256_and_si256(number, all_ones), all_ones);
    return _mm256_or_si256(number, _mm256_and_si256(nan, _mm256_set1_epi16(0x7E00)));
  }
  static INLINE_SIMD Block decode(const uint8_t* codes) {
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes)), zero = _mm256_setzero_si256();
    return widen(half(_mm256_unpacklo_epi8(zero, bytes)), half(_mm256_unpackhi_epi8(zero, bytes)));
  }
};

struct E5M2 {  // the upper byte of a float16
  static constexpr int BITS = 8, ONE = 0x3C, FACTOR = 0;
  static INLINE_SIMD Block decode(const uint8_t* codes) {
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes)), zero = _mm256_setzero_si256();
    return widen(_mm256_unpacklo_epi8(zero, bytes), _mm256_unpackhi_epi8(zero, bytes));
  }
};

struct Int8 {
  static constexpr int BITS = 8, ONE = 0x40, FACTOR = -6;
  static INLINE_SIMD Block decode(const uint8_t* codes) {
    Block block;
    for (int i = 0; i < 4; ++i)
      block.part[i] = _mm256_cvtepi32_ps(
          _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + 8 * i))));
    return block;
  }
};

inline float scale_of(uint8_t code) {  // 2 ** (code - 127); the smallest is subnormal, 255 is NaN
  const uint32_t bits = code == 255 ? 0x7FC00000u : code ? static_cast<uint32_t>(code) << 23 : 0x00400000u;
  float scale;
  std::memcpy(&scale, &bits, sizeof scale);
  return scale;
}

struct Scales {
  float of[256];
  Scales() {
    for (int code = 0; code < 256; ++code) of[code] = scale_of(static_cast<uint8_t>(code));
  }
};
const Scales SCALES;

// Which element stands at each place of a decoded block
template <class F>
struct Order {
  int element[BLOCK];
  SIMD Order() {
    for (int i = 0; i < BLOCK; ++i) {
      uint8_t codes[BLOCK] = {0};
      for (int bit = 0; bit < F::BITS; ++bit) {
        const int at = i * F::BITS + bit;
        codes[at / 8] |= static_cast<uint8_t>(((F::ONE >> bit) & 1) << (at % 8));
      }
      float decoded[BLOCK];
      const Block block = F::decode(codes);
      for (int part = 0; part < 4; ++part) _mm256_storeu_ps(decoded + 8 * part, block.part[part]);
      for (int place = 0; place < BLOCK; ++place)
        if (decoded[place] != 0) element[place] = i;
    }
  }
};

template <class F>
void reorder(const float* x, float* ordered, int64_t rows, int64_t inputs) {
  static const Order<F> order;
  const int64_t blocks = rows * inputs / BLOCK;
#pragma omp parallel for schedule(static) if (blocks > 4096)
  for (int64_t b = 0; b < blocks; ++b)
    for (int place = 0; place < BLOCK; ++place) ordered[b * BLOCK + place] = x[b * BLOCK + order.element[place]];
}

INLINE_SIMD float sum_of(__m256 v) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}

// One output of R rows
template <class F, int R>
INLINE_SIMD void dot(const uint8_t* codes, const uint8_t* scales, const float* x, int64_t inputs, float* out) {
  __m256 total[R];
  for (int r = 0; r < R; ++r) total[r] = _mm256_setzero_ps();
  for (int64_t g = 0; g < inputs / BLOCK; ++g) {
    Block w = F::decode(codes + g * (F::BITS * BLOCK / 8));
    const __m256 scale = _mm256_broadcast_ss(SCALES.of + scales[g]);
    const float* at = x + g * BLOCK;
    if (R <= 2) {  // scaling the sums is cheaper than scaling the weights
      for (int r = 0; r < R; ++r) {
        __m256 sum = _mm256_mul_ps(w.part[0], _mm256_loadu_ps(at + r * inputs));
        for (int i = 1; i < 4; ++i) sum = _mm256_fmadd_ps(w.part[i], _mm256_loadu_ps(at + r * inputs + 8 * i), sum);
        total[r] = _mm256_fmadd_ps(sum, scale, total[r]);
      }
    } else {
      for (int i = 0; i < 4; ++i) {
        const __m256 part = _mm256_mul_ps(w.part[i], scale);
        for (int r = 0; r < R; ++r)
          total[r] = _mm256_fmadd_ps(part, _mm256_loadu_ps(at + r * inputs + 8 * i), total[r]);
      }
    }
  }
  for (int r = 0; r < R; ++r) out[r] = sum_of(total[r]);
}

template <class F, int R>
SIMD void outputs_of(const float* x, const uint8_t* codes, const uint8_t* scales, const float* bias, float* out,
                     int64_t inputs, int64_t outputs) {
  const int64_t width = inputs / 8 * F::BITS, groups = inputs / BLOCK;
  const float factor = std::ldexp(1.0f, F::FACTOR);
#pragma omp parallel for schedule(static) if (inputs * outputs > 65536)
  for (int64_t o = 0; o < outputs; ++o) {
    float sums[R];
    dot<F, R>(codes + o * width, scales + o * groups, x, inputs, sums);
    for (int r = 0; r < R; ++r) out[r * outputs + o] = sums[r] * factor + (bias ? bias[o] : 0.0f);
  }
}

// Rows of x in any number, `ROWS` at a time
template <class F>
void few_rows(const float* x, const uint8_t* codes, const uint8_t* scales, const float* bias, float* out,
              int64_t rows, int64_t inputs, int64_t outputs) {
  using Product = void (*)(const float*, const uint8_t*, const uint8_t*, const float*, float*, int64_t, int64_t);
  static const Product products[ROWS] = {outputs_of<F, 1>, outputs_of<F, 2>, outputs_of<F, 3>, outputs_of<F, 4>,
                                         outputs_of<F, 5>, outputs_of<F, 6>, outputs_of<F, 7>, outputs_of<F, 8>};
  std::vector<float> ordered(static_cast<size_t>(rows * inputs));
  reorder<F>(x, ordered.data(), rows, inputs);
  for (int64_t done = 0; done < rows; done += ROWS) {
    const int64_t count = rows - done < ROWS ? rows - done : ROWS;
    products[count - 1](ordered.data() + done * inputs, codes, scales, bias, out + done * outputs, inputs, outputs);
  }
}

// The weights of outputs first to last in the order of decoding, for a product with ordered rows
template <class F>
SIMD void decode_rows(const uint8_t* codes, const uint8_t* scales, float* out, int64_t inputs, int64_t outputs) {
  const int64_t blocks = outputs * inputs / BLOCK;
  const __m256 factor = _mm256_set1_ps(std::ldexp(1.0f, F::FACTOR));
#pragma omp parallel for schedule(static) if (blocks > 2048)
  for (int64_t b = 0; b < blocks; ++b) {
    const Block w = F::decode(codes + b * (F::BITS * BLOCK / 8));
    const __m256 scale = _mm256_broadcast_ss(SCALES.of + scales[b]);
    for (int i = 0; i < 4; ++i)
      _mm256_storeu_ps(out + b * BLOCK + 8 * i, _mm256_mul_ps(_mm256_mul_ps(w.part[i], factor), scale));
  }
}

}  // namespace

extern "C" {

int supported() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

#define FORMAT(name, type)                                                                                          \
  void mx_few_rows_##name(const float* x, const uint8_t* codes, const uint8_t* scales, const float* bias,           \
                          float* out, int64_t rows, int64_t inputs, int64_t outputs) {                              \
    few_rows<type>(x, codes, scales, bias, out, rows, inputs, outputs);                                             \
  }                                                                                                                 \
  void mx_reorder_##name(const float* x, float* ordered, int64_t rows, int64_t inputs) {                            \
    reorder<type>(x, ordered, rows, inputs);                                                                        \
  }                                                                                                                 \
  void mx_decode_##name(const uint8_t* codes, const uint8_t* scales, float* out, int64_t inputs, int64_t outputs) { \
    decode_rows<type>(codes, scales, out, inputs, outputs);                                                         \
  }

FORMAT(mxfp4_e2m1, E2M1)
FORMAT(mxfp6_e2m3, Six<2>)
FORMAT(mxfp6_e3m2, Six<3>)
FORMAT(mxfp8_e4m3, E4M3)
FORMAT(mxfp8_e5m2, E5M2)
FORMAT(mxint8, Int8)
}
