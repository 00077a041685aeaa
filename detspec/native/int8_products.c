/* Products with int8 weights.

   y[r, o] = (sum of x[r, i] * weight[o, i] over i) * scale of row r * scale[o], of rows that are rounded to int8 here, as
   `ops/linear/int8.py` says. Sums of integers are exact in any order, so lanes and tiles may add as is fastest.

   Most processors multiply pairs of int16 and add both products to an int32. VNNI does so with four bytes, of which one factor has
   no sign: weights get 128 more, and 128 times the sum of the row is taken off at the end. */

#if defined(__AVX512VNNI__)
typedef int8_t Narrow; /* a rounded number of x, as it is multiplied */
#else
typedef int16_t Narrow;
#endif
#define MOST_INT8 127
#define LEAST_ROUNDED 0x1p-50f                           /* rows without a larger number are zeros, see `ops/linear/int8.py` */
#define NUM_NARROW ((int64_t)(sizeof(vi) / sizeof(Narrow))) /* in a register, and weights that meet them */

/* Rows of x, rounded. */
typedef struct {
  Narrow *values; /* [rows, stride], zeros after the last input */
  float *scale;   /* [rows] */
  int32_t *sum;   /* [rows], of the values */
  int64_t stride;
} Rounded;

typedef struct {
  const char *from;
  Rounded to;
  const Sorted *rows;
  int64_t in;
} Rounding;

/* WIDTH numbers of a row of `in` from number `i` on, as float32; zeros behind the last. */
INLINE vf load_some(int dtype, const char *row, int64_t i, int64_t in) {
  char items[WIDTH * 4] = {0};
  if (i + WIDTH <= in) return load(dtype, row + i * bytes_of(dtype));
  memcpy(items, row + i * bytes_of(dtype), (size_t)((in - i) * bytes_of(dtype)));
  return load(dtype, items);
}

/* What numbers of a row of `in` are multiplied by before they are rounded, 0 for rows of zeros; and the scale of the result. */
INLINE float rounding_factor(int dtype, const char *row, int64_t in, float *scale) {
  vi magnitudes = {0}; /* the larger number has the larger bits; those of infinity and nan are the largest */
  for (int64_t i = 0; i < in; i += WIDTH) {
    const vi found = (vi)load_some(dtype, row, i, in) & 0x7fffffff;
    magnitudes = (vi)choose(found > magnitudes, (vf)found, (vf)magnitudes);
  }
  int32_t bits = 0;
  for (int n = 0; n < WIDTH; n++) bits = MAX(bits, magnitudes[n]);
  float largest;
  memcpy(&largest, &bits, sizeof largest);
  const int finite = largest <= 0x1.fffffep127f, kept = finite && largest >= LEAST_ROUNDED;
  *scale = kept ? largest * (1.0f / MOST_INT8) : finite ? 0 : NAN;
  return kept ? MOST_INT8 / largest : 0;
}

/* WIDTH numbers of a row of `in` from number `i` on, rounded to integers; halves go to the even one. */
INLINE vi round_some(int dtype, const char *row, int64_t i, int64_t in, float factor) {
  const vf magic = all(0x1.8p23f); /* its last bits are the rounded number */
  if (factor == 0 || i >= in) return (vi){0};
  return (vi)(load_some(dtype, row, i, in) * all(factor) + magic) - (vi)magic;
}

static void run_rounding(const void *task, int64_t row) {
  const Rounding *rounding = task;
  const int64_t in = rounding->in, at = rounding->rows->at[row];
  if (at < 0) return;
  const char *from = rounding->from + at / rounding->rows->share * in * ITEM_BYTES;
  Narrow *to = rounding->to.values + row * rounding->to.stride;
  const float factor = rounding_factor(DTYPE, from, in, rounding->to.scale + row);
  vi sums = {0};
  for (int64_t i = 0; i < rounding->to.stride; i += WIDTH) {
    typedef Narrow vn __attribute__((vector_size(WIDTH * sizeof(Narrow))));
    const vi found = round_some(DTYPE, from, i, in, factor);
    const vn narrow = __builtin_convertvector(found, vn);
    memcpy(to + i, &narrow, sizeof narrow);
    sums += found;
  }
  rounding->to.sum[row] = 0;
  for (int n = 0; n < WIDTH; n++) rounding->to.sum[row] += sums[n];
}

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

/* Adds the products of pairs of int16. */
INLINE vi add_pairs(vi sum, vi x, vi weights) {
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
  return (vi)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)x, (__m512i)weights);
#elif defined(__AVX512BW__)
  return sum + (vi)_mm512_madd_epi16((__m512i)x, (__m512i)weights);
#elif defined(__AVX2__) && !defined(__AVX512F__)
  return sum + (vi)_mm256_madd_epi16((__m256i)x, (__m256i)weights);
#else /* the number at the odd place is the upper half of a lane */
  return sum + (x << 16 >> 16) * (weights << 16 >> 16) + (x >> 16) * (weights >> 16);
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

INLINE vi add_int8_products(vi sum, vi x, vi weights) {
#if defined(__AVX512VNNI__)
  return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, (__m512i)x);
#else
  return add_pairs(sum, x, weights);
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
INLINE void int8_sums(int rows, int outs, int lines, const char *ahead, const Narrow *x, int64_t x_stride,
                      const int32_t *row_sums, const char *weight, int64_t row_bytes, int32_t *found) {
  const int64_t whole = row_bytes / STEP_BYTES, rest = row_bytes % STEP_BYTES;
  vi sums[MOST_SUMS];
#pragma GCC unroll 24
  for (int i = 0; i < MOST_SUMS; i++) sums[i] = (vi){0};
  for (int64_t step = 0; step < whole; step++, x += STEP_BYTES, weight += STEP_BYTES) {
#pragma GCC unroll 8
    for (int i = 0; i < lines; i++) __builtin_prefetch(ahead + (step * lines + i) * STEP_BYTES, 0, 2);
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

/* A `Tile` of int8 weights. */
INLINE void int8_tile(int rows, int outs, int lines, const char *ahead, const Product *p, Results to, int64_t r, int64_t o) {
  const Rounded *rounded = p->x;
  int32_t found[MOST_SUMS];
  int8_sums(rows, outs, lines, ahead, rounded->values + r * rounded->stride, rounded->stride, rounded->sum + r,
            p->weight + o * p->row_bytes, p->row_bytes, found);
#pragma GCC unroll 4
  for (int j = 0; j < rows; j++) {
    float *y = place_of(to, r + j, o);
    for (int i = 0; i < outs; i++) y[i] = (float)found[j * outs + i] * p->row_scale[r + j] * p->scale[o + i];
  }
}

#if !defined(AMX)
static void run_int8_product(const void *task, int64_t item) { product_item(int8_tile, task, item); }
#endif

static XLA_FFI_Error *multiply_by_int8(XLA_FFI_CallFrame *frame, int by_ids) {
  if (answered(frame)) return NULL;
  Given given;
  if (!read_given(frame, by_ids, 1, &given)) return fail(frame, "products in int8: unsupported arguments");
  const int64_t in = given.in, steps = (in + STEP_BYTES - 1) / STEP_BYTES;
  const int64_t stride = steps * STEP_BYTES + NUM_NARROW; /* one register more, as for floats */
#if defined(AMX)
  const Sorted rows = sort_rows(&given, SIDE);
  const size_t tile_bytes = whole_steps(gathered_bytes(rows.size, steps));
#else
  const Sorted rows = sort_rows(&given, 1);
  const size_t tile_bytes = 0;
#endif
  const size_t value_bytes = whole_steps(rows.size * stride * (int64_t)sizeof(Narrow));
  const size_t number_bytes = whole_steps(rows.size * 4); /* of a number of four bytes for each row */
  char *memory = aligned_alloc(STEP_BYTES, value_bytes + 2 * number_bytes + tile_bytes), *numbers = memory + value_bytes;
  const Rounded rounded = {(Narrow *)memory, (float *)numbers, (int32_t *)(numbers + number_bytes), stride};
#if defined(AMX)
  char *multiplied = numbers + 2 * number_bytes;
#else
  const Rounded *multiplied = &rounded;
#endif
  const Product like = {.x = multiplied, .row_bytes = in, .steps = steps, .row_scale = rounded.scale};
  int64_t num_products = 0;
  Product *products = products_of(&given, &rows, like, &num_products);
  const int complete = rows.at && memory && products;
  if (complete) {
    run_items(frame, rows.num_rows * in >= ALONE, rows.size, run_rounding, &(Rounding){given.x->data, rounded, &rows, in});
#if defined(AMX)
    gather(frame, &(Gathering){(char *)rounded.values, multiplied, &rows, 1, in, stride, steps});
    run_products(frame, products, num_products, in, run_int8_tiles);
#else
    run_products(frame, products, num_products, in, run_int8_product);
#endif
  }
  free(products);
  free(memory);
  free(rows.at);
  return complete ? NULL : fail(frame, "products in int8: out of memory");
}

/* (x [rows, in], values [out, in] int8, scale [out] float32, ...; used [rows] bool, if not all are) -> (y [rows, out] float32, ...):
   products of the same rows with several weights. */
XLA_FFI_Error *detspec_int8_linear(XLA_FFI_CallFrame *frame) { return multiply_by_int8(frame, 0); }

/* (x [rows, in] or [rows, k, in], ids [rows, k] int32, values [E, out, in] int8, scale [E, out] float32, ...; used [rows] bool, if
   not all are) -> (y [rows, k, out] float32, ...): as `detspec_experts` does it. */
XLA_FFI_Error *detspec_int8_experts(XLA_FFI_CallFrame *frame) { return multiply_by_int8(frame, 1); }
