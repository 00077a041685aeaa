/* Kernels of integer models, the functions of detspec/integer/spec.py by their names.

   Sums of integers are associative, so lanes, tiles and threads may add as is fastest, and nothing here decides a bit. Sums are
   of 64 bits where 32 could overflow. */

#if DTYPE == F32
#pragma GCC push_options
#pragma GCC optimize("O3")

#define LIMIT ((1 << 30) - 1)
#define LOST 10000
#define LOG2_E 23637
#define GELU_1 18860
#define GELU_3 13493
#define GELU_MOST (5 << 16)
#define FRACTION 16
#define CHUNK 1024 /* inputs whose products 32 bits can add up: 2^31 / (16383 * 127) */

#define LINE 16                 /* results that are made together */
#define ROW_BLOCK 64            /* rows that weights meet while they lie in the cache of a core */
#if defined(AMX)
#define BLOCK_BYTES (512 << 10) /* most bytes of weights that one item of work reads */
#else
#define BLOCK_BYTES (96 << 10)
#endif

/* A loop over a line. Without the pragma, gcc writes it out sixteen times and makes no vectors of it. */
#define OF_LINE _Pragma("GCC unroll 1") for (int i = 0; i < LINE; i++)

INLINE int64_t rounded_shift(int64_t x, int64_t r) { return (x + (((int64_t)1 << r) >> 1)) >> r; }

INLINE int bit_length(uint64_t x) { return x ? 64 - __builtin_clzll(x) : 0; }

/* x m / 2^r, rounded half up and cut. */
INLINE int32_t scaled_by(int64_t x, int64_t m, int64_t r) {
  const int64_t up = MIN(MAX(-r, 0), 15), down = MIN(MAX(r, 0), 47);
  return (int32_t)MIN(MAX(rounded_shift(x * m * ((int64_t)1 << up), down), -LIMIT), LIMIT);
}

/* y = `scaled_by` of LINE numbers. Vectors of 64 bits are slow, so a product is 2^16 high + low. A line where one might leave 31
   bits, or r is below 1, is rare, and is computed number by number. */
INLINE void scale_line(const int32_t *x, const int32_t *m, const int32_t *r, int32_t *y) {
  int32_t rare = 0;
  OF_LINE {
    const uint32_t of_low = (uint32_t)(x[i] & 0xffff) * (uint32_t)m[i];
    const int32_t high = (x[i] >> 16) * m[i] + (int32_t)(of_low >> 16), low = (int32_t)(of_low & 0xffff);
    const int32_t by = MIN(MAX(r[i], 1), 47), up = MAX(16 - by, 0), down = MAX(by - 16, 0);
    const int32_t of_high = (int32_t)((uint32_t)(high + (int32_t)((1u << down) >> 1)) << up) >> down;
    const int32_t found = of_high + ((low + ((1 << MIN(by, 16)) >> 1)) >> MIN(by, 31));
    rare |= (r[i] < 1) | ((int32_t)((uint32_t)high << (up + 1)) >> (up + 1) != high);
    y[i] = MIN(MAX(found, -LIMIT), LIMIT);
  }
  if (rare)
    for (int i = 0; i < LINE; i++) y[i] = scaled_by(x[i], m[i], r[i]);
}

/* Copies `num` numbers of a line; zeros follow. */
INLINE void load_line(const int32_t *from, int64_t num, int32_t *line) {
  if (num >= LINE) {
    memcpy(line, from, sizeof(int32_t) * LINE);
    return;
  }
  OF_LINE line[i] = i < num ? from[i] : 0;
}

INLINE void store_line(const int32_t *line, int64_t num, int32_t *to) {
  if (num >= LINE) memcpy(to, line, sizeof(int32_t) * LINE);
  else memcpy(to, line, sizeof(int32_t) * (size_t)num);
}

static int32_t largest_of(const int32_t *x, int64_t n) {
  int32_t largest = 0;
  for (int64_t i = 0; i < n; i++) largest = MAX(largest, x[i] < 0 ? -x[i] : x[i]);
  return largest;
}

/* `x` over 2^shift, of `bits` bits. */
INLINE int32_t narrowed(int32_t x, int shift, int bits) {
  const int32_t most = (1 << bits) - 1;
  return MIN(MAX((x + ((1 << shift) >> 1)) >> shift, -most), most);
}

/* Writes `values [n]` of `bits` bits; returns their shift, LOST where `x` has left its range. */
static int narrow(const int32_t *x, int64_t n, int bits, int32_t *values) {
  const int32_t largest = largest_of(x, n);
  const int shift = MAX(bit_length((uint64_t)largest) - bits, 0);
  for (int64_t i = 0; i < n; i++) values[i] = narrowed(x[i], shift, bits);
  return largest >= LIMIT ? LOST : shift;
}

INLINE int is_lost(int64_t exponent) { return exponent > LOST / 2; }

/* 2^-d is about the result times 2^(-15 - *n). */
INLINE int32_t power_of(int32_t d, int32_t *n) {
  const int32_t f = d & 0xffff;
  int32_t a = 224;
  a = ((a * f) >> 16) - 1743;
  a = ((a * f) >> 16) + 7844;
  a = ((a * f) >> 16) - 22709;
  a = ((a * f) >> 16) + 32768;
  *n = MIN(d >> 16, 31);
  return a;
}

/* floor(2^30 / d) of 2^15 <= d <= 2^16. There are no vectors for divisions, so this is a line and two steps of Newton's
   iteration, after which at most 2 is missing: tried for all d. */
INLINE int32_t inverse_of(int32_t d) {
  int32_t y = 48000 - (d >> 1);
  for (int i = 0; i < 2; i++) y += ((((1 << 30) - y * d) >> 15) * y) >> 15;
  const int32_t rest = (1 << 30) - y * d;
  return y + (rest >= d) + (rest >= 2 * d);
}

/* ---- products ---- */

#if defined(__AVX512F__) /* sums, and the x and weights of a step, fit into 32 registers */
#define INTEGER_ROWS 4
#define FOUR_ROW_OUTS 4
#define TWO_ROW_OUTS 8
#else
#define INTEGER_ROWS 4
#define FOUR_ROW_OUTS 2
#define TWO_ROW_OUTS 4
#endif
#define MOST_SUMS 24
#define MOST_OUTS 8
#define NUM_NARROW ((int64_t)(sizeof(vi) / sizeof(Narrow))) /* in a register, and weights that meet them */

/* 2 * WIDTH numbers of a byte, as pairs of int16. */
INLINE vi widen_pairs(const void *p) {
#if defined(__AVX512BW__)
  return (vi)_mm512_cvtepi8_epi16(_mm256_loadu_si256(p));
#elif defined(__AVX2__) && !defined(__AVX512F__)
  return (vi)_mm256_cvtepi8_epi16(_mm_loadu_si128(p));
#else
  typedef int8_t v8 __attribute__((vector_size(2 * WIDTH)));
  typedef int16_t v16 __attribute__((vector_size(4 * WIDTH)));
  v8 bytes;
  memcpy(&bytes, p, sizeof bytes);
  return (vi)__builtin_convertvector(bytes, v16);
#endif
}

/* NUM_NARROW weights. */
INLINE vi widen_int8(const char *weight) {
#if defined(__AVX512VNNI__)
  return (vi)_mm512_xor_si512(_mm512_loadu_si512(weight), _mm512_set1_epi8((char)0x80));
#else
  return widen_pairs(weight);
#endif
}

/* The sums of eight times WIDTH lanes. */
INLINE void int_sums_of_8(const vi *x, int32_t *sums) {
#if defined(__AVX2__)
  __m256i of[8], quads[2];
  for (int i = 0; i < 8; i++)
#if defined(__AVX512F__)
    of[i] = _mm256_add_epi32(_mm512_castsi512_si256((__m512i)x[i]), _mm512_extracti64x4_epi64((__m512i)x[i], 1));
#else
    of[i] = (__m256i)x[i];
#endif
  for (int i = 0; i < 2; i++) /* in each 128-bit part the sums of its lanes, of four vectors */
    quads[i] = _mm256_hadd_epi32(_mm256_hadd_epi32(of[4 * i], of[4 * i + 1]), _mm256_hadd_epi32(of[4 * i + 2], of[4 * i + 3]));
  const __m256i found =
      _mm256_add_epi32(_mm256_permute2x128_si256(quads[0], quads[1], 0x20), _mm256_permute2x128_si256(quads[0], quads[1], 0x31));
  _mm256_storeu_si256((__m256i *)sums, found);
#else
  for (int i = 0; i < 8; i++) {
    sums[i] = 0;
    for (int lane = 0; lane < WIDTH; lane++) sums[i] += x[i][lane];
  }
#endif
}

/* Adds the products of a step; `weights` of row i are at i times `row_bytes`. */
INLINE void add_int8_step(int rows, int outs, const Narrow *x, int64_t x_stride, const char *weight, int64_t row_bytes, vi *sums) {
#pragma GCC unroll 8
  for (int64_t at = 0; at < STEP_BYTES; at += NUM_NARROW) {
    vi weights[MOST_OUTS];
#pragma GCC unroll 8
    for (int i = 0; i < outs; i++) weights[i] = widen_int8(weight + i * row_bytes + at);
#pragma GCC unroll 8
    for (int j = 0; j < rows; j++) {
      vi of_row;
      memcpy(&of_row, x + j * x_stride + at, sizeof of_row);
      KEEP(of_row);
#pragma GCC unroll 8
      for (int i = 0; i < outs; i++) sums[j * outs + i] = add_int8_products(sums[j * outs + i], of_row, weights[i]);
    }
  }
}

/* found [rows, outs] = products of rows of `x`, zeros after their last input, with weights; `row_sums` are of their values. */
INLINE void int8_sums(int rows, int outs, const Narrow *x, int64_t x_stride, const int32_t *row_sums, const char *weight,
                      int64_t row_bytes, int32_t *found) {
  const int64_t whole = row_bytes / STEP_BYTES, rest = row_bytes % STEP_BYTES;
  vi sums[MOST_SUMS];
#pragma GCC unroll 24
  for (int i = 0; i < MOST_SUMS; i++) sums[i] = (vi){0};
  for (int64_t step = 0; step < whole; step++, x += STEP_BYTES, weight += STEP_BYTES) {
    add_int8_step(rows, outs, x, x_stride, weight, row_bytes, sums);
  }
  if (rest) {
    char last[MOST_OUTS * STEP_BYTES] = {0};
    for (int i = 0; i < outs; i++) memcpy(last + i * STEP_BYTES, weight + i * row_bytes, (size_t)rest);
    add_int8_step(rows, outs, x, x_stride, last, STEP_BYTES, sums);
  }
#pragma GCC unroll 3
  for (int i = 0; i < rows * outs; i += 8) int_sums_of_8(sums + i, found + i);
#if defined(__AVX512VNNI__)
#pragma GCC unroll 4
  for (int j = 0; j < rows; j++) /* what is not yet taken off may be beyond int32, and wraps */
    for (int i = 0; i < outs; i++) found[j * outs + i] = (int32_t)((uint32_t)found[j * outs + i] - 128u * (uint32_t)row_sums[j]);
#endif
}

/* Rows as they are multiplied, [rows, stride], and the outputs of one item of work. */
typedef struct {
  const int32_t *values, *mantissa, *exponent; /* rows as they are given: [rows, in] and [rows] */
  int16_t *x;                                  /* of 15 bits, zeros after `in` */
  int8_t *words[2];                            /* for matrix tiles, or NULL: high and low, x == 256 * high + low */
  char *tiles[2];                              /* both as `gather` arranges them; of 8 bits there is one */
  Narrow *narrow;                              /* of 8 bits, zeros after `in`; else NULL */
  int32_t *narrow_sum, *narrow_mantissa, *narrow_exponent; /* [rows] */
  int64_t rows, in, stride, outs_of_item;
  XLA_FFI_Buffer **weights, **results; /* int8 [out, in], mantissa [out], exponent [out] of each */
} Integers;

#define STEP (2 * WIDTH) /* inputs of a register */

/* sums [rows, LINE] = products of `rows` with `outs` rows of weights, both constants where this is inlined. */
INLINE void integer_tile(int rows, int outs, const int16_t *x, int64_t stride, const int8_t *w, int64_t in, int64_t *sums) {
  for (int64_t first = 0; first < in; first += CHUNK) {
    const int64_t end = MIN(first + CHUNK, in);
    vi sum[MOST_SUMS];
#pragma GCC unroll 24
    for (int i = 0; i < MOST_SUMS; i++) sum[i] = (vi){0};
    for (int64_t at = first; at < end; at += STEP) {
      vi weights[MOST_OUTS];
      if (at + STEP <= end) {
#pragma GCC unroll 8
        for (int o = 0; o < outs; o++) weights[o] = widen_pairs(w + o * in + at);
      } else {
        for (int o = 0; o < outs; o++) {
          int8_t last[STEP] = {0};
          memcpy(last, w + o * in + at, (size_t)(end - at));
          weights[o] = widen_pairs(last);
        }
      }
#pragma GCC unroll 4
      for (int r = 0; r < rows; r++) {
        vi of_row;
        memcpy(&of_row, x + r * stride + at, sizeof of_row);
#pragma GCC unroll 8
        for (int o = 0; o < outs; o++) sum[r * outs + o] = add_pairs(sum[r * outs + o], of_row, weights[o]);
      }
    }
    int32_t found[MOST_SUMS];
#pragma GCC unroll 3
    for (int i = 0; i < rows * outs; i += 8) int_sums_of_8(sum + i, found + i);
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
      for (int o = 0; o < outs; o++) sums[r * LINE + o] = (first ? sums[r * LINE + o] : 0) + found[r * outs + o];
  }
}

/* sums [rows, LINE] = products of one to four rows with up to LINE rows of weights. */
static void integer_sums(int64_t rows, const int16_t *x, int64_t stride, const int8_t *w, int64_t in, int64_t outs,
                         int64_t *sums) {
  int64_t o = 0;
#define TILES(ROWS, OUTS) \
  for (; o + (OUTS) <= outs; o += (OUTS)) integer_tile(ROWS, OUTS, x, stride, w + o * in, in, sums + o)
  if (rows == 1) TILES(1, TWO_ROW_OUTS);
  if (rows == 2) TILES(2, TWO_ROW_OUTS);
  if (rows == 3) TILES(3, FOUR_ROW_OUTS);
  if (rows == 4) TILES(4, FOUR_ROW_OUTS);
#undef TILES
  for (; o < outs; o++)
    for (int64_t r = 0; r < rows; r++) integer_tile(1, 1, x + r * stride, stride, w + o * in, in, sums + r * LINE + o);
}

/* The same of rows of 8 bits. */
static void narrow_sums(int64_t rows, const Narrow *x, int64_t stride, const int32_t *row_sums, const int8_t *w, int64_t in,
                        int64_t outs, int32_t *sums) {
  int64_t o = 0;
#define TILES(ROWS, OUTS)                                                                                                 \
  for (; o + (OUTS) <= outs; o += (OUTS)) {                                                                               \
    int32_t found[MOST_SUMS];                                                                                             \
    int8_sums(ROWS, OUTS, x, stride, row_sums, (const char *)w + o * in, in, found);                             \
    for (int r = 0; r < (ROWS); r++) memcpy(sums + r * LINE + o, found + r * (OUTS), sizeof(int32_t) * (OUTS));           \
  }
  if (rows == 1) TILES(1, TWO_ROW_OUTS);
  if (rows == 2) TILES(2, TWO_ROW_OUTS);
  if (rows == 3) TILES(3, FOUR_ROW_OUTS);
  if (rows == 4) TILES(4, FOUR_ROW_OUTS);
#undef TILES
  for (; o < outs; o++)
    for (int64_t r = 0; r < rows; r++) {
      int32_t found[MOST_SUMS];
      int8_sums(1, 1, x + r * stride, stride, row_sums + r, (const char *)w + o * in, in, found);
      sums[r * LINE + o] = found[0];
    }
}

/* Mantissas and exponents of a line of outputs, of which `num` are there. */
typedef struct {
  int32_t mantissa[LINE], exponent[LINE];
  int64_t num;
} Outputs;

/* y = the sums of row `r`, those of 15 bits shifted by 8 already, times its scale and those of the outputs. */
INLINE void finish(const Integers *p, int64_t r, const Outputs *outputs, const int32_t *total, int32_t *y) {
  const int32_t m = p->narrow ? p->narrow_mantissa[r] : p->mantissa[r];
  const int32_t exponent = p->narrow ? p->narrow_exponent[r] : p->exponent[r], lost = is_lost(exponent);
  const int32_t e = exponent + 15 + (p->narrow ? 0 : 8) + FRACTION;
  int32_t of_both[LINE], shift[LINE], found[LINE];
  OF_LINE of_both[i] = (m * outputs->mantissa[i] + (1 << 14)) >> 15;
  OF_LINE shift[i] = -(e + outputs->exponent[i]);
  scale_line(total, of_both, shift, found);
  OF_LINE found[i] = lost ? LIMIT : found[i];
  store_line(found, outputs->num, y);
}

/* Rows `first .. end - 1` of a line of outputs. */
static void integer_line(const Integers *p, const int8_t *w, const Outputs *outputs, int64_t first, int64_t end, int32_t *y,
                         int64_t out) {
  for (int64_t r = first; r < end; r += 4) {
    const int64_t rows = MIN(4, end - r);
    int64_t sums[4 * LINE];
    if (p->narrow) {
      int32_t total[4 * LINE] = {0};
      narrow_sums(rows, p->narrow + r * p->stride, p->stride, p->narrow_sum + r, w, p->in, outputs->num, total);
      for (int64_t j = 0; j < rows; j++) finish(p, r + j, outputs, total + j * LINE, y + (r + j) * out);
      continue;
    }
    integer_sums(rows, p->x + r * p->stride, p->stride, w, p->in, outputs->num, sums);
    for (int64_t j = 0; j < rows; j++) {
      int32_t total[LINE];
      OF_LINE total[i] = i < outputs->num ? (int32_t)((sums[j * LINE + i] + 128) >> 8) : 0;
      finish(p, r + j, outputs, total, y + (r + j) * out);
    }
  }
}

#if defined(AMX)
/* The same by matrix tiles, for two lines: 15 bits are two numbers of 8, and the sum of their products is that of two sums. Rows
   of 8 bits have no low word. */
static void integer_tiles(const Integers *p, const int8_t *w, const Outputs *lines, int64_t first, int64_t end, int32_t *y,
                          int64_t out) {
  const int64_t steps = (p->in + STEP_BYTES - 1) / STEP_BYTES, two = lines[1].num > 0, has_low = p->tiles[1] != NULL;
  const Product weights = {.weight = (const char *)w, .row_bytes = p->in, .out = lines[0].num + lines[1].num};
  for (int64_t r = first; r < end; r += SIDE) {
    char copies[2][TILE_BYTES] __attribute__((aligned(STEP_BYTES)));
    int32_t sums[4][SIDE * SIDE] __attribute__((aligned(STEP_BYTES)));
    const char *high = p->tiles[0] + r / SIDE * steps * TILE_BYTES, *low = p->tiles[has_low] + r / SIDE * steps * TILE_BYTES;
    int64_t stride;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t step = 0; step < steps; step++, high += TILE_BYTES, low += TILE_BYTES) {
      const char *of_line = weights_at(&weights, 0, step, copies[0], &stride);
      _tile_loadd(4, of_line, stride);
      _tile_loadd(6, high, STEP_BYTES);
      _tile_dpbssd(0, 4, 6);
      if (has_low) {
        _tile_loadd(7, low, STEP_BYTES);
        _tile_dpbssd(1, 4, 7);
      }
      if (!two) continue;
      of_line = weights_at(&weights, SIDE, step, copies[1], &stride);
      _tile_loadd(5, of_line, stride);
      _tile_dpbssd(2, 5, 6);
      if (has_low) _tile_dpbssd(3, 5, 7);
    }
    _tile_stored(0, sums[0], STEP_BYTES);
    _tile_stored(1, sums[1], STEP_BYTES);
    _tile_stored(2, sums[2], STEP_BYTES);
    _tile_stored(3, sums[3], STEP_BYTES);
    for (int line = 0; line < 1 + two; line++) {
      __m512i total[SIDE];
      for (int i = 0; i < SIDE; i++) {
        const __m512i of_high = _mm512_load_si512(sums[2 * line] + i * SIDE);
        const __m512i of_low = _mm512_load_si512(sums[2 * line + 1] + i * SIDE);
        total[i] = _mm512_add_epi32(of_high, _mm512_srai_epi32(_mm512_add_epi32(of_low, _mm512_set1_epi32(128)), 8));
      }
      transpose(total);
      for (int64_t j = r; j < MIN(r + SIDE, end); j++)
        finish(p, j, lines + line, (const int32_t *)(total + j - r), y + j * out + line * LINE);
    }
  }
}
#endif

INLINE int64_t items_of(const Integers *p, const XLA_FFI_Buffer *weight) {
  return (weight->dims[0] + p->outs_of_item - 1) / p->outs_of_item;
}

/* Some outputs of one weight for all rows, block after block of them. */
static void run_integer_product(const void *task, int64_t item) {
  const Integers *p = task;
  XLA_FFI_Buffer **weight = p->weights, **result = p->results;
  for (int64_t items; item >= (items = items_of(p, weight[0])); item -= items, weight += 3) result++;
  const int64_t out = weight[0]->dims[0], start = item * p->outs_of_item, stop = MIN(start + p->outs_of_item, out);
  const int32_t *mantissa = weight[1]->data, *exponent = weight[2]->data;
#if defined(AMX)
  Shapes before;
  if (p->tiles[0]) begin_tiles(&before);
#endif
  for (int64_t first = 0; first < p->rows; first += ROW_BLOCK)
    for (int64_t o = start; o < stop; o += 2 * LINE) {
      const int64_t end = MIN(first + ROW_BLOCK, p->rows);
      const int8_t *w = (const int8_t *)weight[0]->data + o * p->in;
      int32_t *y = (int32_t *)result[0]->data + o;
      Outputs lines[2];
      for (int i = 0; i < 2; i++) {
        const int64_t at = MIN(o + i * LINE, stop), num = MIN(LINE, stop - at);
        lines[i].num = num;
        load_line(mantissa + at, num, lines[i].mantissa);
        load_line(exponent + at, num, lines[i].exponent);
      }
#if defined(AMX)
      if (p->tiles[0]) {
        integer_tiles(p, w, lines, first, end, y, out);
        continue;
      }
#endif
      for (int i = 0; i < 2 && lines[i].num; i++)
        integer_line(p, w + i * LINE * p->in, lines + i, first, end, y + i * LINE, out);
    }
#if defined(AMX)
  if (p->tiles[0]) end_tiles(&before);
#endif
}

/* `x [n]`, which stands for `x * *mantissa * 2**(*exponent)`, rounded to 8 bits: see `spec.cached`. */
static void round_to_bytes(const int32_t *x, int64_t n, int8_t *to, int32_t *mantissa, int32_t *exponent) {
  const int32_t largest_given = largest_of(x, n);
  const int shift = MAX(bit_length((uint64_t)largest_given) - 15, 0);
  int32_t largest = 1;
  for (int64_t i = 0; i < n; i++) {
    const int32_t value = narrowed(x[i], shift, 15);
    largest = MAX(largest, value < 0 ? -value : value);
  }
  const int32_t inverse = (127 << 22) / largest;
  const int raise = 15 - bit_length((uint64_t)largest);
  for (int64_t i = 0; i < n; i++) to[i] = (int8_t)((narrowed(x[i], shift, 15) * inverse + (1 << 21)) >> 22);
  *mantissa = (int32_t)rounded_shift(rounded_shift(((int64_t)largest << raise) * 16513, 14) * *mantissa, 15);
  *exponent = (int32_t)MIN((largest_given >= LIMIT ? LOST : shift) - raise - 7 + 15 + (int64_t)*exponent, LOST);
}

/* One row in 8 bits. */
static void run_narrowing(const void *task, int64_t r) {
  const Integers *p = task;
  int8_t *to = p->words[0] + r * p->stride;
  int32_t sum = 0;
  p->narrow_mantissa[r] = p->mantissa[r];
  p->narrow_exponent[r] = p->exponent[r];
  round_to_bytes(p->values + r * p->in, p->in, to, p->narrow_mantissa + r, p->narrow_exponent + r);
  memset(to + p->in, 0, (size_t)(p->stride - p->in));
  for (int64_t i = 0; i < p->in; i++) sum += to[i];
  p->narrow_sum[r] = sum;
  if (sizeof(Narrow) > 1)
    for (int64_t i = 0; i < p->stride; i++) p->narrow[r * p->stride + i] = to[i];
}

/* One row as int16, and for matrix tiles as two words. */
static void run_splitting(const void *task, int64_t r) {
  const Integers *p = task;
  const int32_t *from = p->values + r * p->in;
  int16_t *x = p->x + r * p->stride;
  for (int64_t i = 0; i < p->in; i++) x[i] = (int16_t)from[i];
  for (int64_t i = p->in; i < p->stride; i++) x[i] = 0;
  if (!p->words[0]) return;
  int8_t *high = p->words[0] + r * p->stride, *low = p->words[1] + r * p->stride;
  for (int64_t i = 0; i < p->stride; i++) {
    high[i] = (int8_t)((x[i] + 128) >> 8);
    low[i] = (int8_t)x[i];
  }
}

/* (values int32 [rows, in], mantissa [rows], exponent [rows], then of each weight int8 [out, in], mantissa [out], exponent [out];
   bits, to which rows are rounded if they are 8) -> fixed int32 [rows, out] of each weight */
XLA_FFI_Error *detspec_integer_product(XLA_FFI_CallFrame *frame) {
  if (answered(frame)) return NULL;
  XLA_FFI_Buffer **args = (XLA_FFI_Buffer **)frame->args.args, **rets = (XLA_FFI_Buffer **)frame->rets.rets;
  const int64_t rows = args[0]->dims[0], in = args[0]->dims[1], stride = (in + STEP - 1) / STEP * STEP + STEP;
  if (frame->args.size != 3 + 3 * frame->rets.size) return fail(frame, "detspec_integer_product: wrong number of arguments");
  Integers task = {
      .values = args[0]->data,
      .mantissa = args[1]->data,
      .exponent = args[2]->data,
      .rows = rows,
      .in = in,
      .stride = stride,
      .weights = args + 3,
      .results = rets,
  };
  int64_t outs = 0, items = 0;
  for (int64_t i = 0; i < frame->rets.size; i++) outs += args[3 + 3 * i]->dims[0];
  const int shared = rows * in * outs >= ALONE;
  const int64_t fair = outs / (ITEMS_OF_THREAD * (shared ? threads_of(frame) : 1)), fits = BLOCK_BYTES / MAX(in, 1);
  task.outs_of_item = MAX(MIN(fits, fair) / (2 * LINE) * (2 * LINE), 2 * LINE);
  for (int64_t i = 0; i < frame->rets.size; i++) items += items_of(&task, args[3 + 3 * i]);
  const int64_t numbers = rows * stride, in_8_bits = *(const int32_t *)attribute(frame, 0) == 8;
#if defined(AMX)
  const Given given = {.x = args[0], .rows = rows, .k = 1, .experts = 1};
  const Sorted sorted = rows > INTEGER_ROWS ? sort_rows(&given, SIDE) : (Sorted){.size = 0};
  const int64_t steps = (in + STEP_BYTES - 1) / STEP_BYTES, tile_bytes = gathered_bytes(sorted.size, steps);
#else
  const int64_t tile_bytes = 0;
#endif
  char *memory = aligned_alloc(STEP_BYTES, 2 * whole_steps(tile_bytes) + whole_steps(4 * numbers) + whole_steps(12 * rows));
  if (!memory) return fail(frame, "detspec_integer_product: out of memory");
  task.x = (int16_t *)(memory + 2 * tile_bytes);
  if (in_8_bits) {
    task.words[0] = (int8_t *)(task.x + numbers);
    task.narrow = sizeof(Narrow) > 1 ? (Narrow *)task.x : (Narrow *)task.words[0];
    task.narrow_sum = (int32_t *)(task.x + 2 * numbers);
    task.narrow_mantissa = task.narrow_sum + rows;
    task.narrow_exponent = task.narrow_mantissa + rows;
  }
#if defined(AMX)
  for (int word = 0; word < (in_8_bits ? 1 : 2) && sorted.at; word++) {
    task.words[word] = (int8_t *)(task.x + numbers) + word * numbers;
    task.tiles[word] = memory + word * tile_bytes;
  }
#endif
  run_items(frame, rows * in >= ALONE, rows, in_8_bits ? run_narrowing : run_splitting, &task);
#if defined(AMX)
  for (int word = 0; word < (in_8_bits ? 1 : 2) && sorted.at; word++)
    gather(frame, &(Gathering){(char *)task.words[word], task.tiles[word], &sorted, 1, in, stride, steps});
  free(sorted.at);
#endif
  run_items(frame, shared, items, run_integer_product, &task);
  free(memory);
  return NULL;
}

/* ---- norms and gates ---- */

typedef struct {
  const int32_t *x, *other, *roots, *scale;
  int32_t *values, *mantissa, *exponent;
  int64_t length, epsilon, scale_exponent, spread, gelu;
} RowTask;

INLINE uint64_t high_word(uint64_t a, uint64_t b) { return (a * b) >> 32; }

static void run_integer_norm(const void *task, int64_t row) {
  const RowTask *t = task;
  const int64_t n = t->length;
  const int32_t *x = t->x + row * n;
  int32_t *values = t->values + row * n;
  int shift = narrow(x, n, 15, values);
  const int lost = is_lost(shift);
  if (lost) shift = 0;
  uint64_t total = 0;
  for (int64_t i = 0; i < n; i++) total += (uint64_t)((int64_t)values[i] * values[i]);
  total += (uint64_t)(t->epsilon * n) >> MIN(2 * shift, 31);
  total = MAX(total, 1);
  const int half = (bit_length(total) - 31) >> 1;
  const uint64_t u = half >= 0 ? total >> 2 * half : total << -2 * half;
  uint64_t y = (uint32_t)t->roots[u >> 24];
  for (int i = 0; i < 2; i++) y = (high_word(y, 3ull * (1 << 28) - high_word(u, high_word(y, y))) << 3) & 0xffffffffu;
  for (int64_t i = 0; i < n; i++) values[i] *= t->scale[i];
  const int of_row = narrow(values, n, 14, values);
  t->mantissa[row] = (int32_t)(y >> 16);
  t->exponent[row] = (int32_t)(lost ? LOST : of_row - 14 + 14 - 30 - half + t->scale_exponent);
}

#define MAX_BLOCK (1 << 15)

#define AT_ONCE 512 /* numbers whose sums and differences within lines are made together */

/* to [n] = sums and differences of numbers of `from` that are `size` apart; vectors read up to `size` numbers before and after. */
static void small_stage(const int32_t *restrict from, int64_t n, int64_t size, int32_t *restrict to) {
  for (int64_t i = 0; i < n; i++) {
    const int32_t before = from[i - size], after = from[i + size];
    to[i] = i & size ? before - from[i] : from[i] + after;
  }
}

static void large_stage(int32_t *restrict first, int32_t *restrict second, int64_t size) {
  for (int64_t i = 0; i < size; i++) {
    const int32_t a = first[i], b = second[i];
    first[i] = a + b;
    second[i] = a - b;
  }
}

/* Hadamard transforms of blocks of `x [n]`, where they lie. */
static void hadamard(int32_t *x, int64_t n) {
  const int64_t block = MIN(n & -n, MAX_BLOCK);
  for (int64_t at = 0; at < n; at += AT_ONCE) {
    int32_t lines[2][AT_ONCE + 2 * LINE] = {{0}};
    const int64_t num = MIN(n - at, AT_ONCE);
    int from = 0;
    memcpy(lines[0] + LINE, x + at, sizeof(int32_t) * (size_t)num);
    for (int64_t size = 1; size < MIN(block, LINE); size *= 2, from ^= 1)
      small_stage(lines[from] + LINE, num, size, lines[from ^ 1] + LINE);
    memcpy(x + at, lines[from] + LINE, sizeof(int32_t) * (size_t)num);
  }
  for (int64_t size = LINE; size < block; size *= 2)
    for (int64_t first = 0; first < n; first += 2 * size) large_stage(x + first, x + first + size, size);
}

/* The exponent of a gate's share: see `spec.gated` and `spec.gelu_exponent`; products are made of two parts that 32 bits hold. */
INLINE int32_t exponent_of(int32_t gate, int gelu) {
  const int32_t size = gate < 0 ? -gate : gate;
  if (gelu) {
    const int32_t x = MIN(size, GELU_MOST), root = (x + 8) >> 4, square = (root * root + (1 << 11)) >> 12;
    const int32_t slope = GELU_1 + ((square * GELU_3 + (1 << 15)) >> 16);
    return (x >> 13) * slope + (((x & 0x1fff) * slope + (1 << 12)) >> 13);
  }
  const int32_t x = MIN(size, 1 << 26);
  return (x >> 14) * LOG2_E + (((x & 0x3fff) * LOG2_E + (1 << 13)) >> 14);
}

/* values [n] = gates times their shares; `gelu` is a constant where this is inlined. */
INLINE void share_of(const int32_t *gate, int64_t n, int gelu, int32_t *values) {
  for (int64_t i = 0; i < n; i++) {
    int32_t shift;
    const int32_t a = power_of(exponent_of(gate[i], gelu), &shift);
    const int32_t of_positive = inverse_of((1 << 15) + ((a + (int32_t)((1u << shift) >> 1)) >> shift));
    const int32_t share = gate[i] >= 0 ? of_positive : (1 << 15) - of_positive;
    values[i] = (gate[i] >> 15) * share + (((gate[i] & 0x7fff) * share + (1 << 14)) >> 15);
  }
}

static void run_integer_gate(const void *task, int64_t row) {
  const RowTask *t = task;
  const int64_t n = t->length;
  const int32_t *gate = t->x + row * n, *up = t->other + row * n;
  int32_t *values = t->values + row * n;
  const int32_t of_up = largest_of(up, n);
  const int of_second = MAX(bit_length((uint64_t)of_up) - 15, 0);
  const int lost = of_up >= LIMIT || largest_of(gate, n) >= LIMIT;
  if (t->gelu) share_of(gate, n, 1, values);
  else share_of(gate, n, 0, values);
  const int of_first = narrow(values, n, 15, values);
  for (int64_t i = 0; i < n; i++) values[i] *= narrowed(up[i], of_second, 15);
  const int shift = narrow(values, n, 14, values);
  if (t->spread) hadamard(values, n);
  t->mantissa[row] = 1 << 14;
  t->exponent[row] = lost || is_lost(of_first) ? LOST : shift - 14 + of_first + of_second - 2 * FRACTION;
}

/* (x fixed int32 [rows, n], scale int32 [n], its exponent [], inverse roots int32 [256]; epsilon)
   -> values int32 [rows, n], mantissa [rows], exponent [rows] */
XLA_FFI_Error *detspec_integer_norm(XLA_FFI_CallFrame *frame) {
  if (answered(frame)) return NULL;
  XLA_FFI_Buffer **args = (XLA_FFI_Buffer **)frame->args.args, **rets = (XLA_FFI_Buffer **)frame->rets.rets;
  const RowTask task = {
      .x = args[0]->data,
      .scale = args[1]->data,
      .scale_exponent = *(const int32_t *)args[2]->data,
      .roots = args[3]->data,
      .values = rets[0]->data,
      .mantissa = rets[1]->data,
      .exponent = rets[2]->data,
      .length = args[0]->dims[1],
      .epsilon = *(const int32_t *)attribute(frame, 0),
  };
  run_items(frame, args[0]->dims[0] * task.length >= ALONE / 4, args[0]->dims[0], run_integer_norm, &task);
  return NULL;
}

/* (gate, up: fixed int32 [rows, n]; gelu, whether gates go through GELU with tanh; spread, whether a Hadamard transform follows)
   -> values int32 [rows, n], mantissa [rows], exponent [rows] of silu(gate) * up */
XLA_FFI_Error *detspec_integer_gate(XLA_FFI_CallFrame *frame) {
  if (answered(frame)) return NULL;
  XLA_FFI_Buffer **args = (XLA_FFI_Buffer **)frame->args.args, **rets = (XLA_FFI_Buffer **)frame->rets.rets;
  const RowTask task = {
      .x = args[0]->data,
      .other = args[1]->data,
      .values = rets[0]->data,
      .mantissa = rets[1]->data,
      .exponent = rets[2]->data,
      .length = args[0]->dims[1],
      .gelu = *(const int32_t *)attribute(frame, 0),
      .spread = *(const int32_t *)attribute(frame, 1),
  };
  run_items(frame, args[0]->dims[0] * task.length >= ALONE / 8, args[0]->dims[0], run_integer_gate, &task);
  return NULL;
}

/* ---- attention ---- */

#define MOST_HEAD 512
#define MOST_PAGE 1000 /* slots whose weighted values 32 bits can add up: 2^31 / (16513 * 127) */
#define NO_SCORE (-(1 << 30))

typedef struct {
  const int32_t *q, *q_mantissa, *q_exponent; /* [G * W, N, H], [G * W, N] */
  const int8_t *k, *v;                        /* [pages, K, page, H] */
  const int32_t *k_scale, *v_scale;           /* [pages, K, page]: mantissa + 2^16 * exponent */
  const int32_t *tables, *positions;          /* [G, max_pages], [G, W] */
  int32_t *y;                                 /* [G * W, N, H] */
  int32_t *scores;                            /* [items, TILE, stride] */
  int64_t stride, blocks, windows, window, heads, kv_heads, head_dim, page, max_pages, sliding, score_mantissa, score_exponent;
  int32_t cap, cap_mantissa, cap_exponent; /* the limit of scores, or 0; the factor of exponents */
} IntegerAttention;

/* One head of one position, and what it has seen: its largest score, the highest exponents of keys and of values, and the sum of
   its probabilities. */
typedef struct {
  int64_t place, total;
  int32_t position, start, mantissa, exponent, largest, of_keys, of_values;
} Query;

/* Soft caps of a line: see `spec.soft_capped`. A quotient is floor(2^31 / below) - 2^15. */
INLINE void cap_line(const IntegerAttention *a, int32_t *x) {
  int32_t size[LINE], m[LINE], r[LINE], d[LINE], limit[LINE];
  OF_LINE size[i] = x[i] < 0 ? -x[i] : x[i];
  OF_LINE m[i] = a->cap_mantissa;
  OF_LINE r[i] = -a->cap_exponent;
  scale_line(size, m, r, d);
  OF_LINE {
    int32_t shift;
    const int32_t power = power_of(d[i], &shift), below = (1 << 15) + ((power + (int32_t)((1u << shift) >> 1)) >> shift);
    const int32_t half = inverse_of(below), rest = (1 << 30) - half * below;
    m[i] = 2 * half + (2 * rest >= below) - (1 << 15);
  }
  OF_LINE limit[i] = a->cap;
  OF_LINE r[i] = 15;
  scale_line(limit, m, r, d);
  OF_LINE x[i] = size[i] >= LIMIT ? x[i] : x[i] < 0 ? -d[i] : d[i];
}

/* Turns the products of a query with `num` keys, the first at position `at`, into scores; those out of sight have NO_SCORE. */
static void score_line(const IntegerAttention *a, Query *query, const int64_t *products, int64_t slot, int64_t at, int64_t num,
                       int32_t *scores) {
  const int32_t first = (int32_t)(query->start - at), last = (int32_t)MIN(query->position - at, num - 1);
  const int32_t mantissa = query->mantissa, exponent = query->exponent;
  int32_t of_keys[LINE], of_values[LINE], x[LINE], m[LINE], r[LINE], found[LINE];
  load_line(a->k_scale + slot, num, of_keys);
  load_line(a->v_scale + slot, num, of_values);
  OF_LINE x[i] = (int32_t)products[i];
  OF_LINE m[i] = (mantissa * (of_keys[i] & 0xffff) + (1 << 14)) >> 15;
  OF_LINE r[i] = (i >= first) & (i <= last) ? -(exponent + (of_keys[i] >> 16)) : 47;
  scale_line(x, m, r, found);
  if (a->cap) cap_line(a, found);
  int32_t largest = NO_SCORE, highest_of_keys = -LOST, highest_of_values = -LOST;
  OF_LINE scores[i] = (i >= first) & (i <= last) ? found[i] : NO_SCORE;
  OF_LINE largest = MAX(largest, scores[i]);
  OF_LINE highest_of_keys = MAX(highest_of_keys, (i >= first) & (i <= last) ? of_keys[i] >> 16 : -LOST);
  OF_LINE highest_of_values = MAX(highest_of_values, (i >= first) & (i <= last) ? of_values[i] >> 16 : -LOST);
  query->largest = MAX(query->largest, largest);
  query->of_keys = MAX(query->of_keys, highest_of_keys);
  query->of_values = MAX(query->of_values, highest_of_values);
}

/* Turns `num` scores of a query into what the values are multiplied with, as pairs: that of the odd place is the upper half. */
static void weigh_line(Query *query, const int32_t *scores, const int32_t *v_scale, int64_t num, int32_t *pairs) {
  int32_t of_values[LINE], weights[LINE], total = 0;
  load_line(v_scale, num, of_values);
  OF_LINE {
    int32_t shift;
    const int32_t power = power_of(query->largest - scores[i], &shift), down = MIN(shift + 1, 31);
    const int32_t p = scores[i] == NO_SCORE || i >= num ? 0 : (power + (int32_t)((1u << down) >> 1)) >> down;
    const int32_t of_value = MIN(MAX(15 + query->of_values - (of_values[i] >> 16), 15), 31);
    weights[i] = (p * (of_values[i] & 0xffff) + (int32_t)((1u << of_value) >> 1)) >> of_value;
    total += p;
  }
  query->total += total;
  _Pragma("GCC unroll 1") for (int i = 0; i < LINE / 2; i++) pairs[i] = weights[2 * i] | weights[2 * i + 1] << 16;
}

/* Adds `registers` of weighted values of `num` slots to sums [rows, H]. */
INLINE void add_values(int rows, int registers, const int32_t *pairs, const int8_t *v, int64_t num, int64_t H, int64_t *sums) {
  vi sum[TILE * 2];
#pragma GCC unroll 8
  for (int i = 0; i < rows * registers; i++) sum[i] = (vi){0};
  for (int64_t s = 0; s < num; s += 2) {
    const int8_t *next = s + 1 < num ? v + H : v; /* the weight of a slot after the last is zero */
#pragma GCC unroll 2
    for (int i = 0; i < registers; i++) {
      const vi two = (widen_bytes(v + i * WIDTH) & 0xffff) | widen_bytes(next + i * WIDTH) << 16;
#pragma GCC unroll 4
      for (int r = 0; r < rows; r++) {
        vi *of_row = sum + r * registers + i;
        *of_row = add_pairs(*of_row, (vi){0} + pairs[r * (MOST_PAGE / 2 + LINE) + s / 2], two);
      }
    }
    v += 2 * H;
  }
  for (int r = 0; r < rows; r++)
    for (int i = 0; i < registers; i++) {
      int32_t found[WIDTH];
      memcpy(found, sum + r * registers + i, sizeof found);
      for (int n = 0; n < WIDTH; n++) sums[r * H + i * WIDTH + n] += found[n];
    }
}

/* The same for all of a head. */
static void add_page(int rows, const int32_t *pairs, const int8_t *v, int64_t num, int64_t H, int64_t *sums) {
  int64_t h = 0;
#define ADD(ROWS, COUNT) \
  for (; rows == (ROWS) && h + (COUNT) * WIDTH <= H; h += (COUNT) * WIDTH) \
  add_values(ROWS, COUNT, pairs, v + h, num, H, sums + h)
#define ADD_ALL(ROWS) \
  ADD(ROWS, 2);       \
  ADD(ROWS, 1)
  ADD_ALL(1);
  ADD_ALL(2);
  ADD_ALL(3);
  ADD_ALL(4);
#undef ADD_ALL
#undef ADD
  for (; h < H; h++)
    for (int r = 0; r < rows; r++)
      for (int64_t s = 0; s < num; s++)
        sums[r * H + h] += (pairs[r * (MOST_PAGE / 2 + LINE) + s / 2] >> (s % 2 * 16) & 0xffff) * v[s * H + h];
}

/* `rows` rows from `first` on, of window `g` and KV head `kv`; row `w * group + j` is head `kv * group + j` at position `w`.
   All scores come first, because probabilities are relative to the largest. */
static void attend_in_integers(const IntegerAttention *a, int rows, int64_t g, int64_t kv, int64_t first, int32_t *scores) {
  const int64_t H = a->head_dim, page = a->page, group = a->heads / a->kv_heads;
  int16_t q[TILE * MOST_HEAD] = {0};
  int32_t pairs[TILE * (MOST_PAGE / 2 + LINE)];
  int64_t sums[TILE * MOST_HEAD] = {0};
  Query query[TILE];
  int32_t last = 0, start = INT32_MAX;
  for (int r = 0; r < rows; r++) {
    const int64_t row = g * a->window + (first + r) / group, place = row * a->heads + kv * group + (first + r) % group;
    const int32_t position = a->positions[row];
    query[r] = (Query){
        .place = place,
        .position = position,
        .start = a->sliding ? MAX(position - (int32_t)a->sliding + 1, 0) : 0,
        .mantissa = (int32_t)rounded_shift(a->q_mantissa[place] * a->score_mantissa, 15),
        .exponent = a->q_exponent[place] + (int32_t)a->score_exponent + 30 + FRACTION,
        .largest = NO_SCORE,
        .of_keys = -LOST,
        .of_values = -LOST,
    };
    for (int64_t h = 0; h < H; h++) q[r * MOST_HEAD + h] = (int16_t)a->q[place * H + h];
    last = MAX(last, position);
    start = MIN(start, query[r].start);
  }
  for (int64_t block = start / page; block <= last / page; block++) {
    const int64_t slot = (a->tables[g * a->max_pages + block] * a->kv_heads + kv) * page;
    for (int64_t s = 0; s < page; s += LINE) {
      const int64_t num = MIN(page - s, LINE);
      int64_t products[TILE * LINE] = {0};
      integer_sums(rows, q, MOST_HEAD, a->k + (slot + s) * H, H, num, products);
      for (int r = 0; r < rows; r++)
        score_line(a, query + r, products + r * LINE, slot + s, block * page + s, num,
                   scores + r * a->stride + block * page + s);
    }
  }
  for (int64_t block = start / page; block <= last / page; block++) {
    const int64_t slot = (a->tables[g * a->max_pages + block] * a->kv_heads + kv) * page;
    const int64_t num = MIN(page, last + 1 - block * page);
    for (int64_t s = 0; s < num; s += LINE)
      for (int r = 0; r < rows; r++)
        weigh_line(query + r, scores + r * a->stride + block * page + s, a->v_scale + slot + s, MIN(page - s, LINE),
                   pairs + r * (MOST_PAGE / 2 + LINE) + s / 2);
    add_page(rows, pairs, a->v + slot * H, num, H, sums);
  }
  for (int r = 0; r < rows; r++) {
    const int32_t fall = bit_length((uint64_t)query[r].total) - 15;
    const int32_t inverse = (1 << 29) / (int32_t)rounded_shift(query[r].total, fall);
    const int lost = is_lost(a->q_exponent[query[r].place]) || is_lost(query[r].of_keys) || is_lost(query[r].of_values);
    for (int64_t h = 0; h < H; h += LINE) {
      int32_t x[LINE], m[LINE], by[LINE], found[LINE];
      OF_LINE {
        x[i] = (int32_t)((sums[r * H + MIN(h + i, H - 1)] + 128) >> 8);
        m[i] = inverse;
        by[i] = fall - query[r].of_values - 10;
      }
      scale_line(x, m, by, found);
      OF_LINE found[i] = lost ? LIMIT : found[i];
      store_line(found, H - h, a->y + query[r].place * H + h);
    }
  }
}

/* Some rows of one window and one KV head. */
static void run_integer_attention(const void *task, int64_t item) {
  const IntegerAttention *a = task;
  const int64_t block = item % a->blocks, kv = item / a->blocks % a->kv_heads, g = item / a->blocks / a->kv_heads;
  const int64_t group = a->heads / a->kv_heads, end = MIN((block + 1) * ROW_BLOCK, a->window * group);
  int32_t *scores = a->scores + item * TILE * a->stride;
  for (int64_t first = block * ROW_BLOCK; first < end;) {
    int rows = 0;
    while (rows < TILE && first + rows < end && a->positions[g * a->window + (first + rows) / group] >= 0) rows++;
    if (rows) attend_in_integers(a, rows, g, kv, first, scores);
    if (rows < TILE && first + rows < end) {
      const int64_t place = (g * a->window + (first + rows) / group) * a->heads + kv * group + (first + rows) % group;
      memset(a->y + place * a->head_dim, 0, sizeof *a->y * (size_t)a->head_dim);
      rows++;
    }
    first += rows;
  }
}

/* (q values int32 [G * W, N, H], mantissa and exponent [G * W, N], keys int8 [pages, K, page, H], their scales int32
   [pages, K, page], values and theirs, page tables [G, max_pages], positions [G, W]; cap, cap_exponent, cap_mantissa, score_exponent,
   score_mantissa, sliding)
   -> fixed int32 [G * W, N, H] */
XLA_FFI_Error *detspec_integer_attention(XLA_FFI_CallFrame *frame) {
  if (answered(frame)) return NULL;
  XLA_FFI_Buffer **args = (XLA_FFI_Buffer **)frame->args.args, **rets = (XLA_FFI_Buffer **)frame->rets.rets;
  const XLA_FFI_Buffer *keys = args[3], *positions = args[8];
  IntegerAttention task = {
      .q = args[0]->data,
      .q_mantissa = args[1]->data,
      .q_exponent = args[2]->data,
      .k = keys->data,
      .k_scale = args[4]->data,
      .v = args[5]->data,
      .v_scale = args[6]->data,
      .tables = args[7]->data,
      .positions = positions->data,
      .y = rets[0]->data,
      .windows = positions->dims[0],
      .window = positions->dims[1],
      .heads = args[0]->dims[1],
      .head_dim = args[0]->dims[2],
      .kv_heads = keys->dims[1],
      .page = keys->dims[2],
      .max_pages = args[7]->dims[1],
      .cap = *(const int32_t *)attribute(frame, 0),
      .cap_exponent = *(const int32_t *)attribute(frame, 1),
      .cap_mantissa = *(const int32_t *)attribute(frame, 2),
      .score_exponent = *(const int32_t *)attribute(frame, 3),
      .score_mantissa = *(const int32_t *)attribute(frame, 4),
      .sliding = *(const int32_t *)attribute(frame, 5),
  };
  if (task.head_dim > MOST_HEAD || task.page > MOST_PAGE)
    return fail(frame, "detspec_integer_attention: unsupported arguments");
  int64_t seen = 0, longest = 0;
  for (int64_t i = 0; i < task.windows * task.window; i++) {
    seen += MAX(task.positions[i] + 1, 0);
    longest = MAX(longest, task.positions[i] + 1);
  }
  task.stride = longest + task.page + LINE;
  task.blocks = (task.window * (task.heads / task.kv_heads) + ROW_BLOCK - 1) / ROW_BLOCK;
  const int64_t items = task.windows * task.kv_heads * task.blocks;
  task.scores = malloc(sizeof *task.scores * (size_t)(items * TILE * task.stride));
  if (!task.scores) return fail(frame, "detspec_integer_attention: out of memory");
  run_items(frame, 2 * seen * task.heads * task.head_dim >= ALONE, items, run_integer_attention, &task);
  free(task.scores);
  return NULL;
}

/* ---- noise ---- */

typedef struct {
  const uint32_t *seeds;
  const int32_t *positions, *logs, *bends; /* [rows]; [257] and [256] places of a logarithm */
  int32_t *y;                              /* [rows, vocabulary] */
  int64_t vocabulary;
} Noise;

/* The part of log2(u) with 26 fraction bits; `bits` of u, without zeros before them. */
INLINE int32_t log_part(uint32_t u, int bits, const int32_t *logs, const int32_t *bends) {
  const uint32_t z = (u << (32 - bits)) & 0x7fffffffu;
  const int32_t place = (int32_t)(z >> 23), rest = (int32_t)(z & 0x7fffff), x = rest >> 11;
  const int32_t step = logs[place + 1] - logs[place], of_step = rest >> 8; /* of 19 and 15 bits, so multiplied in two parts */
  const int32_t chord = logs[place] + (((step >> 10) * of_step + (((step & 0x3ff) * of_step + (1 << 14)) >> 10)) >> 5);
  return chord + ((bends[place] * ((x * (4096 - x)) >> 10) + (1 << 13)) >> 14);
}

/* Turns `num` random words into noise. */
static void noise_of(const int32_t *restrict logs, const int32_t *restrict bends, int64_t num, int32_t *restrict y) {
  for (int64_t v = 0; v < num; v++) {
    const uint32_t u = (uint32_t)y[v];
    const int bits = 32 - __builtin_clz(u);
    uint32_t waiting = ((uint32_t)(33 - bits) << 26) - (uint32_t)log_part(u, bits, logs, bends);
    waiting = MAX(waiting, 1);
    const int more = 32 - __builtin_clz(waiting);
    const int32_t log = (more - 1 - 26) * (1 << 18) + ((log_part(waiting, more, logs, bends) + (1 << 7)) >> 8);
    y[v] = 24020 - (((log >> 10) * 22713 + (((log & 0x3ff) * 22713 + (1 << 16)) >> 10)) >> 7);
  }
}

static void run_noise(const void *task, int64_t row) {
  const Noise *t = task;
  uint32_t key0 = 0, key1 = (uint32_t)t->positions[row];
  threefry_of_word(0, t->seeds[row], &key0, &key1);
  int32_t *y = t->y + row * t->vocabulary;
  for (int64_t v = 0; v < t->vocabulary; v++) { /* a loop of its own, because compilers make vectors of it */
    uint32_t first = 0, second = (uint32_t)v;
    threefry_of_word(key0, key1, &first, &second);
    y[v] = (int32_t)((first ^ second) | 1);
  }
  noise_of(t->logs, t->bends, t->vocabulary, y);
}

/* (seeds uint32 [rows], positions int32 [rows], places of a logarithm int32 [257], its bends int32 [256])
   -> fixed int32 [rows, vocabulary]: see `spec.gumbel` */
XLA_FFI_Error *detspec_integer_noise(XLA_FFI_CallFrame *frame) {
  if (answered(frame)) return NULL;
  XLA_FFI_Buffer **args = (XLA_FFI_Buffer **)frame->args.args, **rets = (XLA_FFI_Buffer **)frame->rets.rets;
  const Noise task = {args[0]->data, args[1]->data, args[2]->data, args[3]->data, rets[0]->data, rets[0]->dims[1]};
  run_items(frame, args[0]->dims[0] * task.vocabulary >= ALONE / 64, args[0]->dims[0], run_noise, &task);
  return NULL;
}

/* ---- keys and values ---- */

/* (int8 [pages, K, page, H], scales int32 [pages, K, page], new int32 [R, K, H] with mantissa and exponent [R, K], page ids [R],
   slots [R]) -> pages and scales, which lie where the arguments lie: see `spec.cached` */
XLA_FFI_Error *detspec_integer_append(XLA_FFI_CallFrame *frame) {
  if (answered(frame)) return NULL;
  XLA_FFI_Buffer **args = (XLA_FFI_Buffer **)frame->args.args, **rets = (XLA_FFI_Buffer **)frame->rets.rets;
  const int64_t rows = args[2]->dims[0], kv_heads = args[2]->dims[1], H = args[2]->dims[2], page = rets[0]->dims[2];
  const int32_t *mantissas = args[3]->data, *exponents = args[4]->data, *page_ids = args[5]->data, *slots = args[6]->data;
  if (args[0]->data != rets[0]->data || args[1]->data != rets[1]->data || H > MOST_HEAD)
    return fail(frame, "detspec_integer_append: unsupported arguments");
  for (int64_t r = 0; r < rows; r++)
    for (int64_t kv = 0; kv < kv_heads; kv++) {
      const int64_t from = r * kv_heads + kv, slot = (page_ids[r] * kv_heads + kv) * page + slots[r];
      int32_t mantissa = mantissas[from], exponent = exponents[from];
      round_to_bytes((const int32_t *)args[2]->data + from * H, H, (int8_t *)rets[0]->data + slot * H, &mantissa, &exponent);
      ((int32_t *)rets[1]->data)[slot] = (int32_t)((uint32_t)exponent << 16 | (uint32_t)mantissa);
    }
  return NULL;
}

#pragma GCC pop_options
#endif
