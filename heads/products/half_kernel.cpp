// Products of few rows with 16-bit weights on x86 processors that have AVX2, FMA and F16C, but do not multiply 16 bits.
//
// A weight is widened to float32 in registers, 16 numbers at a time, and multiplied at once with up to four rows of x,
// so that memory is read as 16 bits and each weight is widened once for them. Sums are float32 and rounded once.
//
// A bfloat16 is the upper half of a float32. So of 16 weights those at even places are shifted up and those at odd
// places are masked, which is cheaper than to widen them in order; the rows of x are laid out in the same order. They
// lie together by their groups of four rows, so that a tile reads them from front to back.
//
// The plain reference is torch.nn.functional.linear (half.py).
// N rows of x, I inputs, O outputs
#include <immintrin.h>

#include <cstdint>
#include <cstring>
#include <vector>

#define SIMD __attribute__((target("avx2,fma,f16c")))
#define INLINE_SIMD SIMD inline __attribute__((always_inline))

namespace {

constexpr int WIDTH = 16;  // weights that are widened at once
constexpr int ROWS = 4;    // of x that a tile multiplies
constexpr int OUTPUTS = 3, OUTPUTS_OF_ONE_ROW = 8;  // of a tile: their sums fill the 16 registers, or keep memory busy

struct alignas(64) Line {  // of the cache, so that no load reads two
  float number[WIDTH];
};

struct BFloat16 {
  static constexpr int place(int i) { return i % 2 * 8 + i / 2; }  // of number i of 16: even ones stand first
  static INLINE_SIMD __m256 first(__m256i w) { return _mm256_castsi256_ps(_mm256_slli_epi32(w, 16)); }
  static INLINE_SIMD __m256 second(__m256i w) {
    return _mm256_castsi256_ps(_mm256_and_si256(w, _mm256_set1_epi32(static_cast<int>(0xFFFF0000))));
  }
  static INLINE_SIMD float widen(uint16_t bits) {
    const uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float number;
    std::memcpy(&number, &wide, sizeof number);
    return number;
  }
  static INLINE_SIMD uint16_t narrow(float number) {  // to nearest, ties to even
    uint32_t bits;
    std::memcpy(&bits, &number, sizeof bits);
    if (number != number) return 0x7FC0;
    return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
  }
};

struct Float16 {
  static constexpr int place(int i) { return i; }
  static INLINE_SIMD __m256 first(__m256i w) { return _mm256_cvtph_ps(_mm256_castsi256_si128(w)); }
  static INLINE_SIMD __m256 second(__m256i w) { return _mm256_cvtph_ps(_mm256_extracti128_si256(w, 1)); }
  static INLINE_SIMD float widen(uint16_t bits) { return _cvtsh_ss(bits); }
  static INLINE_SIMD uint16_t narrow(float number) { return _cvtss_sh(number, _MM_FROUND_TO_NEAREST_INT); }
};

INLINE_SIMD float sum_of(__m256 v) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}

// Adds the products of 8 widened weights of each output with 8 numbers of each row
template <int R, int O>
INLINE_SIMD void multiply_add(const __m256 (&w)[O], const float* x, __m256 (&total)[O][R]) {
  for (int r = 0; r < R; ++r) {
    const __m256 numbers = _mm256_load_ps(x + r * WIDTH);
    for (int o = 0; o < O; ++o) total[o][r] = _mm256_fmadd_ps(w[o], numbers, total[o][r]);
  }
}

// The same with 16 weights of each output, the outputs' `apart` from each other; fetches the next O outputs' meanwhile
template <class F, int R, int O>
INLINE_SIMD void widen_and_add(const uint16_t* weight, int64_t apart, const float* x, __m256 (&total)[O][R]) {
  __m256i w[O];
  __m256 wide[O];
  for (int o = 0; o < O; ++o) w[o] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(weight + o * apart));
  if (R > 1)  // a processor looks ahead no further than a page, and a row of 2,048 weights fills one
    for (int o = 0; o < O; ++o) _mm_prefetch(reinterpret_cast<const char*>(weight + (o + O) * apart), _MM_HINT_T0);
  for (int o = 0; o < O; ++o) wide[o] = F::first(w[o]);  // all before the rows: 12 sums leave few registers
  multiply_add<R, O>(wide, x, total);
  for (int o = 0; o < O; ++o) wide[o] = F::second(w[o]);
  multiply_add<R, O>(wide, x + 8, total);
}

// O outputs of R rows; x holds the rows' first 16 numbers, then their next, …, with zeros behind the last
template <class F, int R, int O>
INLINE_SIMD void tile(const uint16_t* weight, const float* x, const uint16_t* bias, uint16_t* out, int64_t inputs,
                      int64_t outputs) {
  __m256 total[O][R];
  for (int o = 0; o < O; ++o)
    for (int r = 0; r < R; ++r) total[o][r] = _mm256_setzero_ps();
  int64_t i = 0;
  for (; i + WIDTH <= inputs; i += WIDTH) widen_and_add<F, R, O>(weight + i, inputs, x + i * R, total);
  if (i < inputs) {
    uint16_t rest[O * WIDTH] = {0};
    for (int o = 0; o < O; ++o)
      std::memcpy(rest + o * WIDTH, weight + o * inputs + i, static_cast<size_t>(inputs - i) * sizeof *rest);
    widen_and_add<F, R, O>(rest, WIDTH, x + i * R, total);
  }
  for (int o = 0; o < O; ++o)
    for (int r = 0; r < R; ++r)
      out[r * outputs + o] = F::narrow(sum_of(total[o][r]) + (bias ? F::widen(bias[o]) : 0.0f));
}

// O outputs of all rows, in groups of ROWS rows and what is left
template <class F, int O>
INLINE_SIMD void outputs_of(const uint16_t* weight, const float* x, const uint16_t* bias, uint16_t* out, int64_t rows,
                            int64_t inputs, int64_t outputs) {
  const int64_t padded = (inputs + WIDTH - 1) / WIDTH * WIDTH;
  int64_t done = 0;
  for (; done + ROWS <= rows; done += ROWS)
    tile<F, ROWS, O>(weight, x + done * padded, bias, out + done * outputs, inputs, outputs);
  const float* left = x + done * padded;
  uint16_t* to = out + done * outputs;
  if (rows - done == 3) tile<F, 3, O>(weight, left, bias, to, inputs, outputs);
  if (rows - done == 2) tile<F, 2, O>(weight, left, bias, to, inputs, outputs);
  if (rows - done == 1) tile<F, 1, O>(weight, left, bias, to, inputs, outputs);
}

template <class F>
SIMD void ordered(const uint16_t* x, float* to, int64_t rows, int64_t inputs) {
  const int64_t padded = (inputs + WIDTH - 1) / WIDTH * WIDTH;
  for (int64_t n = 0; n < rows; ++n) {
    const int64_t group = n / ROWS * ROWS, together = rows - group < ROWS ? rows - group : ROWS;
    float* row = to + group * padded + (n - group) * WIDTH;
    for (int64_t i = 0; i < inputs; ++i)
      row[i / WIDTH * WIDTH * together + F::place(static_cast<int>(i % WIDTH))] = F::widen(x[n * inputs + i]);
  }
}

template <class F>
SIMD void product(const uint16_t* x, const uint16_t* weight, const uint16_t* bias, uint16_t* out, int64_t rows,
                  int64_t inputs, int64_t outputs) {
  const int64_t padded = (inputs + WIDTH - 1) / WIDTH * WIDTH, step = rows == 1 ? OUTPUTS_OF_ONE_ROW : OUTPUTS;
  std::vector<Line> lines(static_cast<size_t>(rows * padded / WIDTH));
  float* numbers = reinterpret_cast<float*>(lines.data());
  ordered<F>(x, numbers, rows, inputs);
#pragma omp parallel for schedule(static) if (inputs * outputs > 65536)
  for (int64_t first = 0; first < outputs; first += step) {
    const uint16_t *w = weight + first * inputs, *b = bias ? bias + first : nullptr;
    if (first + step > outputs)
      for (int64_t o = 0; o < outputs - first; ++o)
        outputs_of<F, 1>(w + o * inputs, numbers, b ? b + o : nullptr, out + first + o, rows, inputs, outputs);
    else if (rows == 1)
      tile<F, 1, OUTPUTS_OF_ONE_ROW>(w, numbers, b, out + first, inputs, outputs);
    else
      outputs_of<F, OUTPUTS>(w, numbers, b, out + first, rows, inputs, outputs);
  }
}

}  // namespace

extern "C" {

int supported() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

void multiply_bfloat16(const uint16_t* x, const uint16_t* weight, const uint16_t* bias, uint16_t* out, int64_t rows,
                       int64_t inputs, int64_t outputs) {
  product<BFloat16>(x, weight, bias, out, rows, inputs, outputs);
}

void multiply_float16(const uint16_t* x, const uint16_t* weight, const uint16_t* bias, uint16_t* out, int64_t rows,
                      int64_t inputs, int64_t outputs) {
  product<Float16>(x, weight, bias, out, rows, inputs, outputs);
}
}
