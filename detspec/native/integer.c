/* Kernels of integer models, compiled together with `kernels.c`: the functions of detspec/integer/spec.py by their names.

   Sums of integers are associative, so lanes, tiles and threads may add as is fastest, and nothing here decides a bit. Sums are
   of 64 bits where 32 could overflow. */

#if DTYPE == F32
#pragma GCC push_options
#pragma GCC optimize("O3")

#define LIMIT ((1 << 30) - 1)
#define LOST 10000
#define LOG2_E 23637
#define FRACTION 16
#define CHUNK 16384 /* inputs whose products a lane of 32 bits can add up: 2^31 / (2 * 16383 * 127) pairs, 32 lanes */

INLINE int64_t rounded_shift(int64_t x, int64_t r) { return (x + (((int64_t)1 << r) >> 1)) >> r; }

INLINE int64_t clip(int64_t x, int64_t most) { return MIN(MAX(x, -most), most); }

INLINE int64_t scaled_by(int64_t x, int64_t m, int64_t r) {
  r = MIN(MAX(r, -15), 47);
  const int64_t product = x * m, up = MAX(-r, 0), down = MAX(r, 0);
  return clip(rounded_shift(product * ((int64_t)1 << up), down), LIMIT);
}

INLINE int bit_length(uint64_t x) { return x ? 64 - __builtin_clzll(x) : 0; }

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
INLINE int32_t power_of(int32_t d, int *n) {
  const int32_t f = d & 0xffff;
  int32_t a = 224;
  a = ((a * f) >> 16) - 1743;
  a = ((a * f) >> 16) + 7844;
  a = ((a * f) >> 16) - 22709;
  a = ((a * f) >> 16) + 32768;
  *n = MIN(d >> 16, 31);
  return a;
}

/* ---- products ---- */

typedef struct {
  const int16_t *x; /* [rows, stride], zeros after `in` */
  const char *tiles; /* the same as matrix tiles, see "by matrix tiles"; NULL if they are not used */
  const int32_t *mantissa, *exponent;
  int64_t rows, in, stride;
  XLA_FFI_Buffer **weights, **results; /* int8 [out, in], mantissa [out], exponent [out] of each */
  int64_t num_weights, outs_of_item;
} Integers;

#if defined(__AVX512BW__)
#define STEP 32
typedef __m512i Sum16;
INLINE Sum16 widened(const int8_t *w) { return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)w)); }
INLINE Sum16 halves(const int16_t *x) { return _mm512_loadu_si512(x); }
#if defined(__AVX512VNNI__)
INLINE Sum16 add_pairs(Sum16 sum, Sum16 x, Sum16 w) { return _mm512_dpwssd_epi32(sum, x, w); }
#else
INLINE Sum16 add_pairs(Sum16 sum, Sum16 x, Sum16 w) { return _mm512_add_epi32(sum, _mm512_madd_epi16(x, w)); }
#endif
#define NO_SUM _mm512_setzero_si512()
INLINE int64_t sum_of(Sum16 x) {
  const __m512i low = _mm512_cvtepi32_epi64(_mm512_castsi512_si256(x)), high = _mm512_cvtepi32_epi64(_mm512_extracti64x4_epi64(x, 1));
  return _mm512_reduce_add_epi64(_mm512_add_epi64(low, high));
}
#elif defined(__AVX2__)
#define STEP 16
typedef __m256i Sum16;
INLINE Sum16 widened(const int8_t *w) { return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)w)); }
INLINE Sum16 halves(const int16_t *x) { return _mm256_loadu_si256((const __m256i *)x); }
INLINE Sum16 add_pairs(Sum16 sum, Sum16 x, Sum16 w) { return _mm256_add_epi32(sum, _mm256_madd_epi16(x, w)); }
#define NO_SUM _mm256_setzero_si256()
INLINE int64_t sum_of(Sum16 x) {
  int32_t lanes[8];
  int64_t sum = 0;
  _mm256_storeu_si256((__m256i *)lanes, x);
  for (int i = 0; i < 8; i++) sum += lanes[i];
  return sum;
}
#else
#define STEP 8
typedef int32_t Sum16 __attribute__((vector_size(32)));
typedef int16_t Halves __attribute__((vector_size(16)));
typedef int8_t Bytes __attribute__((vector_size(8)));
INLINE Sum16 widened(const int8_t *w) {
  Bytes bytes;
  memcpy(&bytes, w, sizeof bytes);
  return __builtin_convertvector(bytes, Sum16);
}
INLINE Sum16 halves(const int16_t *x) {
  Halves found;
  memcpy(&found, x, sizeof found);
  return __builtin_convertvector(found, Sum16);
}
INLINE Sum16 add_pairs(Sum16 sum, Sum16 x, Sum16 w) { return sum + x * w; }
#define NO_SUM ((Sum16){0})
INLINE int64_t sum_of(Sum16 x) {
  int64_t sum = 0;
  for (int i = 0; i < STEP; i++) sum += x[i];
  return sum;
}
#endif
#if STEP == 8
#undef CHUNK
#define CHUNK 8192 /* without pairs a lane adds up every eighth product: 2^31 / (16383 * 127) of them */
#endif

/* Sums of `rows` x `outs` products, both constants where this is inlined; a row of weights ends after `in` bytes, x has zeros. */
INLINE void integer_tile(int rows, int outs, const int16_t *x, int64_t stride, const int8_t *w, int64_t in, int64_t *sums) {
  for (int i = 0; i < rows * outs; i++) sums[i] = 0;
  for (int64_t first = 0; first < in; first += CHUNK) {
    const int64_t end = MIN(first + CHUNK, in), whole = first + (end - first) / STEP * STEP;
    Sum16 sum[16];
    for (int i = 0; i < rows * outs; i++) sum[i] = NO_SUM;
    for (int64_t at = first; at < whole; at += STEP) {
      Sum16 of_x[4];
      for (int r = 0; r < rows; r++) of_x[r] = halves(x + r * stride + at);
      for (int o = 0; o < outs; o++) {
        const Sum16 of_w = widened(w + o * in + at);
        for (int r = 0; r < rows; r++) sum[r * outs + o] = add_pairs(sum[r * outs + o], of_x[r], of_w);
      }
    }
    for (int i = 0; i < rows * outs; i++) sums[i] += sum_of(sum[i]);
    for (int64_t at = whole; at < end; at++)
      for (int r = 0; r < rows; r++)
        for (int o = 0; o < outs; o++) sums[r * outs + o] += x[r * stride + at] * w[o * in + at];
  }
}

/* y [outs] = the sums of row `r`, shifted by 8 already, times its scale and those of the outputs. */
static void finish(const Integers *p, const int32_t *total, int64_t r, const int32_t *mantissa, const int32_t *exponent, int32_t *y,
                   int64_t outs) {
  const int32_t m = p->mantissa[r], e = p->exponent[r] + 15 + 8 + FRACTION;
  if (is_lost(p->exponent[r])) {
    for (int64_t i = 0; i < outs; i++) y[i] = LIMIT;
    return;
  }
  for (int64_t i = 0; i < outs; i++) {
    const int32_t of_both = (m * mantissa[i] + (1 << 14)) >> 15, shift = MIN(MAX(-(e + exponent[i]), -15), 47);
    const int64_t product = (int64_t)total[i] * of_both, up = MAX(-shift, 0), down = MAX(shift, 0);
    const int64_t found = ((product << up) + (((int64_t)1 << down) >> 1)) >> down;
    y[i] = (int32_t)MIN(MAX(found, -LIMIT), LIMIT);
  }
}

#if defined(AMX)
/* By matrix tiles: 15 bits are two numbers of 8, `x == 256 * high + low`, and the sum of their products is that of two sums. A tile
   of x has 16 groups of 4 bytes of 16 rows, and tiles of high and low follow each other:

       [rows / 16, steps of 64 inputs, high and low, 16 groups, 16 rows, 4 bytes] */
static char *arranged(const int16_t *x, int64_t rows, int64_t in, int64_t stride) {
  const int64_t steps = (in + STEP_BYTES - 1) / STEP_BYTES, row_tiles = (rows + SIDE - 1) / SIDE;
  char *tiles = aligned_alloc(STEP_BYTES, (size_t)(row_tiles * steps * 2 * TILE_BYTES));
  if (!tiles) return NULL;
  memset(tiles, 0, (size_t)(row_tiles * steps * 2 * TILE_BYTES));
  for (int64_t r = 0; r < rows; r++) {
    char *to = tiles + r / SIDE * steps * 2 * TILE_BYTES + r % SIDE * 4;
    for (int64_t i = 0; i < in; i += 4) { /* x has zeros behind the last input, up to a multiple of 32 */
      char *of_group = to + i / STEP_BYTES * 2 * TILE_BYTES + i % STEP_BYTES * (STEP_BYTES / 4);
      for (int n = 0; n < 4; n++) {
        const int value = x[r * stride + i + n], high = (value + 128) >> 8;
        of_group[n] = (char)high;
        of_group[TILE_BYTES + n] = (char)(value - 256 * high);
      }
    }
  }
  return tiles;
}

INLINE const void *tile_of_weights(const int8_t *w, int64_t in, int64_t out, int64_t o, int64_t step, char *copy, int64_t *stride) {
  const int64_t there = MIN(in - step * STEP_BYTES, STEP_BYTES), outs = MIN(out - o, SIDE);
  const int8_t *from = w + o * in + step * STEP_BYTES;
  *stride = in;
  if (there == STEP_BYTES && outs == SIDE) return from;
  memset(copy, 0, TILE_BYTES);
  for (int64_t i = 0; i < outs; i++) memcpy(copy + i * STEP_BYTES, from + i * in, (size_t)there);
  *stride = STEP_BYTES;
  return copy;
}

static void integer_tiles(const Integers *p, const int8_t *w, const int32_t *mantissa, const int32_t *exponent, int32_t *y,
                          int64_t first, int64_t end, int64_t out) {
  const int64_t steps = (p->in + STEP_BYTES - 1) / STEP_BYTES;
  Shapes before;
  begin_tiles(&before);
  for (int64_t o = first; o < end; o += 2 * SIDE)
    for (int64_t r = 0; r < p->rows; r += SIDE) {
      char copies[2][TILE_BYTES] __attribute__((aligned(STEP_BYTES)));
      int32_t sums[4][SIDE * SIDE] __attribute__((aligned(STEP_BYTES)));
      const char *x = p->tiles + r / SIDE * steps * 2 * TILE_BYTES;
      const int two = o + SIDE < end;
      int64_t stride;
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      for (int64_t step = 0; step < steps; step++, x += 2 * TILE_BYTES) {
        const void *of_first = tile_of_weights(w, p->in, out, o, step, copies[0], &stride);
        _tile_loadd(4, of_first, stride);
        _tile_loadd(6, x, STEP_BYTES);
        _tile_loadd(7, x + TILE_BYTES, STEP_BYTES);
        _tile_dpbssd(0, 4, 6);
        _tile_dpbssd(1, 4, 7);
        if (!two) continue;
        const void *of_second = tile_of_weights(w, p->in, out, o + SIDE, step, copies[1], &stride);
        _tile_loadd(5, of_second, stride);
        _tile_dpbssd(2, 5, 6);
        _tile_dpbssd(3, 5, 7);
      }
      _tile_stored(0, sums[0], STEP_BYTES);
      _tile_stored(1, sums[1], STEP_BYTES);
      _tile_stored(2, sums[2], STEP_BYTES);
      _tile_stored(3, sums[3], STEP_BYTES);
      const int64_t outs = MIN(end - o, 2 * SIDE), rows = MIN(p->rows - r, SIDE);
      for (int tile = 0; tile < 1 + two; tile++) {
        __m512i total[SIDE];
        for (int i = 0; i < SIDE; i++) {
          const __m512i high = _mm512_load_si512(sums[2 * tile] + i * SIDE), low = _mm512_load_si512(sums[2 * tile + 1] + i * SIDE);
          total[i] = _mm512_add_epi32(high, _mm512_srai_epi32(_mm512_add_epi32(low, _mm512_set1_epi32(128)), 8));
        }
        transpose(total);
        const int64_t at = o + tile * SIDE, num = MIN(outs - tile * SIDE, SIDE);
        for (int64_t j = 0; j < rows; j++)
          finish(p, (const int32_t *)(total + j), r + j, mantissa + at, exponent + at, y + (r + j) * out + at, num);
      }
    }
  end_tiles(&before);
}
#endif

static void run_integer_product(const void *task, int64_t item) {
  const Integers *p = task;
  int64_t which = 0, first = item * p->outs_of_item;
  while (first >= (p->weights[3 * which]->dims[0] + p->outs_of_item - 1) / p->outs_of_item * p->outs_of_item) {
    first -= (p->weights[3 * which]->dims[0] + p->outs_of_item - 1) / p->outs_of_item * p->outs_of_item;
    which++;
  }
  const XLA_FFI_Buffer *weight = p->weights[3 * which];
  const int64_t out = weight->dims[0], end = MIN(first + p->outs_of_item, out);
  const int8_t *w = weight->data;
  const int32_t *mantissa = p->weights[3 * which + 1]->data, *exponent = p->weights[3 * which + 2]->data;
  int32_t *y = p->results[which]->data;
#if defined(AMX)
  if (p->tiles) {
    integer_tiles(p, w, mantissa, exponent, y, first, end, out);
    return;
  }
#endif
  for (int64_t o = first; o < end; o += 4)
    for (int64_t r = 0; r < p->rows; r += 4) {
      const int outs = (int)MIN(4, end - o), rows = (int)MIN(4, p->rows - r);
      int64_t sums[16];
      const int16_t *x = p->x + r * p->stride;
      if (rows == 4 && outs == 4)
        integer_tile(4, 4, x, p->stride, w + o * p->in, p->in, sums);
      else if (rows == 1 && outs == 4)
        integer_tile(1, 4, x, p->stride, w + o * p->in, p->in, sums);
      else
        for (int j = 0; j < rows; j++)
          for (int i = 0; i < outs; i++) integer_tile(1, 1, x + j * p->stride, p->stride, w + (o + i) * p->in, p->in, sums + j * outs + i);
      for (int j = 0; j < rows; j++) {
        int32_t total[4];
        for (int i = 0; i < outs; i++) total[i] = (int32_t)rounded_shift(sums[j * outs + i], 8);
        finish(p, total, r + j, mantissa + o, exponent + o, y + (r + j) * out + o, outs);
      }
    }
}

/* (values int32 [rows, in], mantissa [rows], exponent [rows], then of each weight int8 [out, in], mantissa [out], exponent [out])
   -> fixed int32 [rows, out] of each weight */
XLA_FFI_Error *detspec_integer_product(XLA_FFI_CallFrame *frame) {
  if (answered(frame)) return NULL;
  XLA_FFI_Buffer **args = (XLA_FFI_Buffer **)frame->args.args, **rets = (XLA_FFI_Buffer **)frame->rets.rets;
  const int64_t rows = args[0]->dims[0], in = args[0]->dims[1], stride = (in + 31) / 32 * 32;
  if (frame->args.size != 3 + 3 * frame->rets.size) return fail(frame, "detspec_integer_product: wrong number of arguments");
  int16_t *x = malloc(sizeof *x * (size_t)MAX(rows * stride, 1));
  if (!x) return fail(frame, "detspec_integer_product: out of memory");
  for (int64_t r = 0; r < rows; r++) {
    const int32_t *from = (const int32_t *)args[0]->data + r * in;
    for (int64_t i = 0; i < in; i++) x[r * stride + i] = (int16_t)from[i];
    for (int64_t i = in; i < stride; i++) x[r * stride + i] = 0;
  }
  char *tiles = NULL;
#if defined(AMX)
  if (rows > MANY_ROWS && !(tiles = arranged(x, rows, in, stride))) {
    free(x);
    return fail(frame, "detspec_integer_product: out of memory");
  }
#endif
  const int64_t outs_of_item = MAX(32, MIN(256, (1 << 17) / MAX(in, 1) / 32 * 32));
  int64_t items = 0, all_outs = 0;
  for (int64_t i = 0; i < frame->rets.size; i++) {
    items += (args[3 + 3 * i]->dims[0] + outs_of_item - 1) / outs_of_item;
    all_outs += args[3 + 3 * i]->dims[0];
  }
  const Integers task = {x, tiles, args[1]->data, args[2]->data, rows, in, stride, args + 3, rets, frame->rets.size, outs_of_item};
  run_items(frame, rows * in * all_outs >= ALONE, items, run_integer_product, &task);
  free(tiles);
  free(x);
  return NULL;
}

/* ---- norms and gates ---- */

typedef struct {
  const int32_t *x, *other, *roots, *scale;
  int32_t *values, *mantissa, *exponent;
  int64_t length, epsilon, scale_exponent;
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

static void run_integer_gate(const void *task, int64_t row) {
  const RowTask *t = task;
  const int64_t n = t->length;
  const int32_t *gate = t->x + row * n, *up = t->other + row * n;
  int32_t *values = t->values + row * n;
  const int32_t of_up = largest_of(up, n);
  const int of_second = MAX(bit_length((uint64_t)of_up) - 15, 0);
  int lost = of_up >= LIMIT;
  for (int64_t i = 0; i < n; i++) {
    const int32_t size = gate[i] < 0 ? -gate[i] : gate[i];
    lost |= size >= LIMIT;
    int shift;
    const int32_t a = power_of((int32_t)(((int64_t)MIN(size, 1 << 26) * LOG2_E + (1 << 13)) >> 14), &shift);
    const int32_t below = (1 << 15) + (int32_t)rounded_shift(a, shift);
    int32_t share = (1 << 30) / below;
    share = gate[i] >= 0 ? share : (1 << 15) - share;
    values[i] = (int32_t)clip(((int64_t)gate[i] * share + (1 << 14)) >> 15, LIMIT);
  }
  const int of_first = narrow(values, n, 15, values);
  for (int64_t i = 0; i < n; i++) values[i] *= narrowed(up[i], of_second, 15);
  const int shift = narrow(values, n, 14, values);
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

/* (gate, up: fixed int32 [rows, n]) -> values int32 [rows, n], mantissa [rows], exponent [rows] of silu(gate) * up */
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
  };
  run_items(frame, args[0]->dims[0] * task.length >= ALONE / 8, args[0]->dims[0], run_integer_gate, &task);
  return NULL;
}

/* ---- attention ---- */

#define MOST_HEAD 512

typedef struct {
  const int32_t *q, *q_mantissa, *q_exponent; /* [G * W, N, H], [G * W, N] */
  const int8_t *k, *v;                        /* [pages, K, page, H] */
  const int32_t *k_scale, *v_scale;           /* [pages, K, page]: mantissa + 2^16 * exponent */
  const int32_t *tables, *positions;          /* [G, max_pages], [G, W] */
  int32_t *y;                                 /* [G * W, N, H] */
  int32_t *scores;                            /* [G * K, longest], of one query at a time */
  int64_t longest, windows, window, heads, kv_heads, head_dim, page, max_pages, sliding, score_mantissa, score_exponent;
} IntegerAttention;

static void attend_one(const IntegerAttention *a, int64_t g, int64_t row, int64_t head, int64_t position, int32_t *scores) {
  const int64_t H = a->head_dim, kv = head / (a->heads / a->kv_heads), place = row * a->heads + head;
  const int64_t start = a->sliding ? MAX(position - a->sliding + 1, 0) : 0;
  const int32_t *tables = a->tables + g * a->max_pages;
  const int64_t exponent = a->q_exponent[place] + a->score_exponent;
  const int64_t of_query = rounded_shift(a->q_mantissa[place] * a->score_mantissa, 15);
  int16_t q[MOST_HEAD];
  for (int64_t h = 0; h < H; h++) q[h] = (int16_t)a->q[place * H + h];
  int32_t largest = INT32_MIN, highest = INT32_MIN;
  int lost = is_lost(a->q_exponent[place]);
  for (int64_t j = start; j <= position; j++) {
    const int64_t slot = (tables[j / a->page] * a->kv_heads + kv) * a->page + j % a->page;
    const int8_t *k = a->k + slot * H;
    int32_t total = 0;
    for (int64_t h = 0; h < H; h++) total += q[h] * k[h];
    const int32_t scale = a->k_scale[slot], of_value = a->v_scale[slot] >> 16, of_key = scale >> 16;
    const int64_t mantissa = rounded_shift(of_query * (scale & 0xffff), 15);
    scores[j - start] = (int32_t)scaled_by(total, mantissa, -(exponent + of_key + 30 + FRACTION));
    largest = MAX(largest, scores[j - start]);
    highest = MAX(highest, of_value);
    lost |= is_lost(of_key) | is_lost(of_value);
  }
  int64_t sums[MOST_HEAD] = {0}, of_all = 0;
  for (int64_t j = start; j <= position;) {
    const int64_t end = MIN(position + 1, (j / a->page + 1) * a->page);
    int32_t of_page[MOST_HEAD];
    for (int64_t h = 0; h < H; h++) of_page[h] = 0;
    for (; j < end; j++) {
      const int64_t slot = (tables[j / a->page] * a->kv_heads + kv) * a->page + j % a->page;
      int shift;
      const int32_t power = power_of(largest - scores[j - start], &shift);
      const int64_t p = rounded_shift(power, shift + 1);
      const int32_t scale = a->v_scale[slot];
      const int32_t weight = (int32_t)rounded_shift(p * (scale & 0xffff), MIN(15 + highest - (scale >> 16), 31));
      of_all += p;
      if (!weight) continue;
      const int8_t *v = a->v + slot * H;
      for (int64_t h = 0; h < H; h++) of_page[h] += weight * v[h];
    }
    for (int64_t h = 0; h < H; h++) sums[h] += of_page[h];
  }
  const int fall = bit_length((uint64_t)of_all) - 15;
  const int64_t inverse = (1 << 29) / rounded_shift(of_all, fall);
  for (int64_t h = 0; h < H; h++) {
    const int64_t found = scaled_by(rounded_shift(sums[h], 8), inverse, fall - highest - 10);
    a->y[place * H + h] = (int32_t)(lost ? LIMIT : found);
  }
}

static void run_integer_attention(const void *task, int64_t item) {
  const IntegerAttention *a = task;
  const int64_t g = item / a->kv_heads, kv = item % a->kv_heads, group = a->heads / a->kv_heads;
  int32_t *scores = a->scores + item * a->longest;
  for (int64_t w = 0; w < a->window; w++) {
    const int64_t row = g * a->window + w, position = a->positions[row];
    for (int64_t head = kv * group; head < (kv + 1) * group; head++)
      if (position >= 0)
        attend_one(a, g, row, head, position, scores);
      else
        memset(a->y + (row * a->heads + head) * a->head_dim, 0, sizeof *a->y * (size_t)a->head_dim);
  }
}

/* (q values int32 [G * W, N, H], mantissa and exponent [G * W, N], keys int8 [pages, K, page, H], their scales int32
   [pages, K, page], values and theirs, page tables [G, max_pages], positions [G, W]; score_exponent, score_mantissa, sliding)
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
      .score_exponent = *(const int32_t *)attribute(frame, 0),
      .score_mantissa = *(const int32_t *)attribute(frame, 1),
      .sliding = *(const int32_t *)attribute(frame, 2),
  };
  if (task.head_dim > MOST_HEAD || task.page > 1000) return fail(frame, "detspec_integer_attention: unsupported arguments");
  int64_t seen = 0;
  for (int64_t i = 0; i < task.windows * task.window; i++) {
    seen += MAX(task.positions[i] + 1, 0);
    task.longest = MAX(task.longest, task.positions[i] + 1);
  }
  task.scores = malloc(sizeof *task.scores * (size_t)MAX(task.windows * task.kv_heads * task.longest, 1));
  if (!task.scores) return fail(frame, "detspec_integer_attention: out of memory");
  run_items(frame, 2 * seen * task.heads * task.head_dim >= ALONE, task.windows * task.kv_heads, run_integer_attention, &task);
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

#define TURN(x, by) ((x) << (by) | (x) >> (32 - (by)))
#define ROUNDS(a, b, c, d)                       \
  x += y, y = x ^ TURN(y, a), x += y, y = x ^ TURN(y, b); \
  x += y, y = x ^ TURN(y, c), x += y, y = x ^ TURN(y, d)

/* Threefry-2x32 of two words, which take the place of those given. */
INLINE void threefry(uint32_t key0, uint32_t key1, uint32_t *first, uint32_t *second) {
  const uint32_t key2 = key0 ^ key1 ^ 0x1bd11bdau;
  uint32_t x = *first + key0, y = *second + key1;
  ROUNDS(13, 15, 26, 6);
  x += key1, y += key2 + 1;
  ROUNDS(17, 29, 16, 24);
  x += key2, y += key0 + 2;
  ROUNDS(13, 15, 26, 6);
  x += key0, y += key1 + 3;
  ROUNDS(17, 29, 16, 24);
  x += key1, y += key2 + 4;
  ROUNDS(13, 15, 26, 6);
  *first = x + key2, *second = y + key0 + 5;
}

/* The part of log2(u) with 26 fraction bits; `bits` of u, without zeros before them. */
INLINE int32_t log_part(uint32_t u, int bits, const int32_t *logs, const int32_t *bends) {
  const uint32_t z = (u << (32 - bits)) & 0x7fffffffu;
  const int32_t place = (int32_t)(z >> 23), rest = (int32_t)(z & 0x7fffff), x = rest >> 11;
  const int32_t chord = logs[place] + (int32_t)(((int64_t)(logs[place + 1] - logs[place]) * (rest >> 8) + (1 << 14)) >> 15);
  return chord + ((bends[place] * ((x * (4096 - x)) >> 10) + (1 << 13)) >> 14);
}

static void run_noise(const void *task, int64_t row) {
  const Noise *t = task;
  uint32_t key0 = 0, key1 = (uint32_t)t->positions[row];
  threefry(0, t->seeds[row], &key0, &key1);
  int32_t *y = t->y + row * t->vocabulary;
  for (int64_t v = 0; v < t->vocabulary; v++) { /* a loop of its own, because compilers make vectors of it */
    uint32_t first = 0, second = (uint32_t)v;
    threefry(key0, key1, &first, &second);
    y[v] = (int32_t)((first ^ second) | 1);
  }
  for (int64_t v = 0; v < t->vocabulary; v++) {
    const uint32_t u = (uint32_t)y[v];
    const int bits = 32 - __builtin_clz(u);
    uint32_t waiting = ((uint32_t)(33 - bits) << 26) - (uint32_t)log_part(u, bits, t->logs, t->bends);
    waiting = MAX(waiting, 1);
    const int more = 32 - __builtin_clz(waiting);
    const int64_t log = ((int64_t)(more - 1 - 26) * (1 << 18)) + ((log_part(waiting, more, t->logs, t->bends) + (1 << 7)) >> 8);
    y[v] = 24020 - (int32_t)((log * 22713 + (1 << 16)) >> 17);
  }
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
      int32_t values[MOST_HEAD];
      const int shift = narrow((const int32_t *)args[2]->data + from * H, H, 15, values);
      const int32_t largest = MAX(largest_of(values, H), 1), inverse = (127 << 22) / largest;
      const int raise = 15 - bit_length((uint64_t)largest);
      int8_t *to = (int8_t *)rets[0]->data + slot * H;
      for (int64_t h = 0; h < H; h++) to[h] = (int8_t)((values[h] * inverse + (1 << 21)) >> 22);
      const int64_t of_127 = rounded_shift(((int64_t)largest << raise) * 16513, 14);
      const int64_t mantissa = rounded_shift(of_127 * mantissas[from], 15);
      const int64_t exponent = MIN(shift - raise - 7 + 15 + (int64_t)exponents[from], LOST);
      ((int32_t *)rets[1]->data)[slot] = (int32_t)((uint32_t)exponent << 16 | (uint32_t)mantissa);
    }
  return NULL;
}

#pragma GCC pop_options
#endif
