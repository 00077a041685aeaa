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
#define LEAST_ROUNDED 0x1p-50f /* rows without a larger number are zeros, see `ops/linear/int8.py` */

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

#if !defined(AMX)
static void run_int8_products(const void *all, int64_t thread) { take_products(1, *(Products *const *)all, thread); }
#endif

static XLA_FFI_Error *multiply_by_int8(XLA_FFI_CallFrame *frame, int by_ids) {
  if (answered(frame)) return NULL;
  Given given;
  if (!read_given(frame, by_ids, 1, &given)) return fail(frame, "products in int8: unsupported arguments");
  const int64_t in = given.in, steps = (in + STEP_BYTES - 1) / STEP_BYTES;
  const int64_t stride = x_stride_of(steps, INT8_FACTORS) * 4 / (int64_t)sizeof(Narrow);
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
  char *multiplied = memory;
#endif
  const Product like = {
      .x = multiplied,
      .row_bytes = in,
      .steps = steps,
      .x_stride = x_stride_of(steps, INT8_FACTORS),
      .row_scale = rounded.scale,
      .row_sum = rounded.sum,
  };
  int64_t num_products = 0;
  Product *products = products_of(&given, &rows, like, &num_products);
  int complete = rows.at && memory && products;
  if (complete) {
    run_items(frame, rows.num_rows * in >= ALONE, rows.size, run_rounding, &(Rounding){given.x->data, rounded, &rows, in});
#if defined(AMX)
    gather(frame, &(Gathering){(char *)rounded.values, multiplied, &rows, 1, in, stride, steps});
    run_tile_products(frame, products, num_products, in, run_int8_tiles);
#else
    complete = run_products(frame, products, num_products, in, run_int8_products);
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
