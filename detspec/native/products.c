/* Products with weights, of rows or of rows and the matrices that they choose.

   y[r, o] = sum of x[r, i] * weight[o, i] over i. A segment of i, 2 KB of a row of weights, is added up in the order of i, and then
   the segments in their order. The lanes of a register are sums of WIDTH outputs, so this order is the same whatever else is
   computed, and on every kind of processor.

   AMX, for bfloat16 on processors that have it, adds up in another order: see "products by matrix tiles".
   DOTS, for bfloat16 on processors where that is faster: one instruction multiplies pairs of bfloat16 and adds both to the sum.
   Otherwise numbers are widened to float32.

   A step is 64 bytes of a row of weights: 16 words of a float32, of two bfloat16 or float16, or of four int8. An item of work turns
   some steps of some outputs, so that a register has the same word of WIDTH outputs. Then they meet all rows, tile after tile:

       weights   [outputs, steps, 16 words]  ->  [steps, 16 words, factors, registers, WIDTH outputs]
       x         [rows, steps, 16 words, factors]

   A word is one factor where an instruction takes it whole, or else two, widened. What is behind the last input is zero. Rows of x
   that are whole steps of such words are read where they lie, others are copied.

   A caller may say which rows it will use. Only these are multiplied, as if they lay next to each other. Their results go to their
   places, and those of the others are zeros:

       used 1 0 0 1 1      at 0 3 4      x 0 3 4  ->  y 0 . . 3 4

   Rows may also choose the matrices that they meet, k of E experts each. Then rows of results are packed by experts: row r has
   k r + j for its choice j. They are multiplied as if each expert were a product of its own.

       ids 2 0 | 0 3       at 1 2 | 0 | 3      begin 0 2 2 3      num 2 0 1 1

   A gate is a product whose item makes the sums of two weights, and writes one activated times the other. As float32, the sums of
   all items would go from core to core through the third cache. */

#define SIDE 16                /* rows and outputs of a matrix tile */
#define STEP_BYTES 64          /* of weights */
#define STEP_ITEMS (STEP_BYTES / ITEM_BYTES)
#define WORDS (STEP_BYTES / 4) /* of a step */
#define SEGMENT 32             /* steps */
#define REGISTER_BYTES ((int64_t)sizeof(vf))
#define MOST_FEW 8             /* rows that meet weights as soon as a step of them is turned */
#if defined(__AVX512F__) || defined(__aarch64__) /* sums, and the x and weights of a word, fit into 32 registers, or into 16 */
#define TILE_ROWS 4            /* rows that meet turned weights together */
#define LEAST_ROWS 1           /* of the last tile: it has so many, 4 or TILE_ROWS */
#define TILE_REGISTERS 4       /* of outputs that they meet */
#else
#define TILE_ROWS 6
#define LEAST_ROWS 2
#define TILE_REGISTERS 2
#endif
#if defined(__AVX512F__)
#define UNROLL_STEP _Pragma("GCC unroll 32")
#else
#define UNROLL_STEP
#endif
#define MOST_REGISTERS 4       /* of outputs, that rows meet together */
#define FETCH_WORDS 4          /* meet a tile from one fetch to the next */
#define COLD_STEPS 6           /* from the step that is turned to the one that is fetched, if nobody has fetched it before */
#define SAME_PLACE 4096        /* bytes apart, rows share places in the first cache: eight of them fill those */
#define MANY_ROWS 128          /* turning weights takes a small part of the time of more */
#define MANY_ROW_OUTS 64       /* outputs of an item of work, of many rows */
#define LESS_ROW_OUTS 32       /* of others: less lies in the cache while the next ones are fetched (0.9 of the time of 32 rows) */
#define ITEMS_OF_THREAD 6      /* at least, where there are so many outputs: the last ones end at about the same time */
#define ALONE (1 << 18)        /* multiply-adds that one thread has done before another would have woken up */

#if DTYPE == F32 || (DTYPE == BF16 && defined(DOTS))
#define FACTORS 1 /* of a word */
#else
#define FACTORS 2
#endif
#if defined(__AVX512VNNI__)
#define INT8_FACTORS 1
#else
#define INT8_FACTORS 2
#endif

typedef struct {
  const char *weight;
  const void *x; /* rows as they are multiplied: words [rows, x_stride], or of matrix tiles */
  const int32_t *x_at;              /* where those rows lie, `share` results to a row; NULL: one behind the other */
  int64_t share;
  void *y;                          /* float32, or of a gate DTYPE */
  const int32_t *at;                /* rows of y, by those of x; NULL: y begins with `first` */
  int64_t first, end;               /* rows of x */
  int64_t row_bytes, out, steps;    /* bytes and steps of a row of the weight */
  int64_t x_stride;                 /* words */
  const float *scale, *row_scale;   /* [out], and of rows of x, of int8 weights */
  const int32_t *row_sum;           /* of rows of x in int8 */
  int64_t outs_of_item, rows_of_item, num_items; /* rows of an item: of all, where tiles of a matrix multiply */
  const char *up;                   /* of a gate: the weight of what goes through it, else NULL */
  int activation;
} Product;

/* Bytes of whole steps. */
INLINE size_t whole_steps(int64_t num_bytes) { return (size_t)(MAX(num_bytes, 1) + STEP_BYTES - 1) / STEP_BYTES * STEP_BYTES; }

/* Arguments and results of products. */
typedef struct {
  const XLA_FFI_Buffer *x;             /* [rows, in], or [rows, k, in] */
  const int32_t *ids;                  /* [rows, k], or NULL where all rows meet one matrix */
  const uint8_t *used;                 /* [rows], or NULL if all are */
  XLA_FFI_Buffer **weights, **results; /* weights [E, out, in] or [out, in], each followed by its scale if it has one */
  int64_t rows, k, experts, in, num_weights, with_scale;
  int is_gate; /* weights are followed by those of what goes through the gate */
} Given;

/* Reads (x, ids with `by_ids`, weights, used if not all are; of gates an activation) -> results. Returns whether arguments are of
   this form. */
static int read_given(XLA_FFI_CallFrame *frame, int by_ids, int with_scale, Given *given) {
  XLA_FFI_Buffer **args = (XLA_FFI_Buffer **)frame->args.args, **rets = (XLA_FFI_Buffer **)frame->rets.rets;
  const XLA_FFI_Buffer *x = args[0], *ids = args[by_ids], *last = args[frame->args.size - 1];
  const int some = last->dtype == XLA_FFI_DataType_PRED && last->rank == 1 && last->dims[0] == x->dims[0];
  *given = (Given){
      .x = x,
      .ids = by_ids ? ids->data : NULL,
      .used = some ? last->data : NULL,
      .weights = args + 1 + by_ids,
      .results = rets,
      .rows = x->dims[0],
      .k = by_ids ? ids->dims[1] : 1,
      .experts = by_ids ? args[2]->dims[0] : 1,
      .in = x->dims[x->rank - 1],
      .num_weights = frame->rets.size,
      .with_scale = with_scale,
      .is_gate = frame->attrs.size == 1,
  };
  const int64_t num_args = 1 + by_ids + given->num_weights * (1 + with_scale + given->is_gate) + some;
  return dtype_of(x->dtype) == DTYPE && frame->args.size == num_args;
}

/* Rows of results by the matrix that they meet: those of expert e are at[begin[e]] .. at[begin[e] + num[e] - 1]. Each expert begins
   at a multiple of the rows of a tile, and -1 fills the places before it. */
typedef struct {
  int32_t *at, *begin, *num;
  int64_t size, num_rows; /* of `at`, with such places and without them */
  int64_t share;          /* rows of results of one row of x */
} Sorted;

/* The expert of choice `j` of row `r`, or -1. */
INLINE int64_t expert_of(const Given *given, int64_t r, int64_t j) {
  if (given->used && !given->used[r]) return -1;
  const int64_t id = given->ids ? given->ids[r * given->k + j] : 0;
  return id >= 0 && id < given->experts ? id : -1;
}

/* Sorts rows of results, `tile_rows` to a tile, and zeros those that meet no matrix. `at` is to be freed; NULL without memory. */
static Sorted sort_rows(const Given *given, int64_t tile_rows) {
  const int64_t results = given->rows * given->k, fill = MIN(results, given->experts) * (tile_rows - 1);
  Sorted rows = {.share = given->x->rank == 3 ? 1 : given->k};
  rows.at = malloc(sizeof(int32_t) * (size_t)(results + fill + 2 * given->experts));
  if (!rows.at) return rows;
  rows.begin = rows.at + results + fill;
  rows.num = rows.begin + given->experts;
  memset(rows.num, 0, sizeof(int32_t) * (size_t)given->experts);
  for (int64_t r = 0; r < given->rows; r++)
    for (int64_t j = 0; j < given->k; j++) {
      const int64_t e = expert_of(given, r, j);
      if (e >= 0) rows.num[e]++;
    }
  for (int64_t e = 0; e < given->experts; e++) {
    rows.begin[e] = (int32_t)rows.size;
    rows.size += (rows.num[e] + tile_rows - 1) / tile_rows * tile_rows;
    rows.num_rows += rows.num[e];
    rows.num[e] = 0;
  }
  for (int64_t i = 0; i < rows.size; i++) rows.at[i] = -1;
  for (int64_t r = 0; r < given->rows; r++)
    for (int64_t j = 0; j < given->k; j++) {
      const int64_t e = expert_of(given, r, j), row = r * given->k + j;
      if (e >= 0) {
        rows.at[rows.begin[e] + rows.num[e]++] = (int32_t)row;
        continue;
      }
      for (int64_t i = 0; i < given->num_weights; i++) {
        const XLA_FFI_Buffer *y = given->results[i];
        const int64_t out = y->dims[y->rank - 1];
        const int64_t row_bytes = out * bytes_of(dtype_of(y->dtype));
        memset((char *)y->data + row * row_bytes, 0, (size_t)row_bytes);
      }
    }
  return rows;
}

/* Makes a product of each weight with the rows of each expert that has some; `like` has what all share. To be freed; NULL without
   memory. */
static Product *products_of(const Given *given, const Sorted *rows, Product like, int64_t *num_products) {
  Product *products = malloc(sizeof *products * (size_t)MAX(given->experts * given->num_weights, 1));
  *num_products = 0;
  for (int64_t e = 0; products && rows->at && e < given->experts; e++)
    for (int64_t i = 0; rows->num[e] && i < given->num_weights; i++) {
      const XLA_FFI_Buffer *y = given->results[i];
      XLA_FFI_Buffer **weight = given->weights + i * (1 + given->with_scale);
      like.out = y->dims[y->rank - 1];
      like.weight = (const char *)weight[0]->data + e * like.out * like.row_bytes;
      like.scale = given->with_scale ? (const float *)weight[1]->data + e * like.out : NULL;
      like.up = given->is_gate ? (const char *)weight[1]->data + e * like.out * like.row_bytes : NULL;
      like.y = y->data;
      like.at = rows->at;
      like.first = rows->begin[e];
      like.end = rows->begin[e] + rows->num[e];
      products[(*num_products)++] = like;
    }
  return products;
}

#if defined(__AVX512F__)
/* Transposes 16 x 16 numbers of 4 bytes. */
INLINE void transpose(__m512i *x) {
  __m512i pairs[SIDE], fours[SIDE], eights[SIDE];
#pragma GCC unroll 16
  for (int i = 0; i < SIDE; i += 2) {
    pairs[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
    pairs[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < SIDE; i += 4)
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
      fours[i + 2 * half] = _mm512_unpacklo_epi64(pairs[i + half], pairs[i + half + 2]);
      fours[i + 2 * half + 1] = _mm512_unpackhi_epi64(pairs[i + half], pairs[i + half + 2]);
    }
    /* In part k of 128 bits, fours[4 j + c] now has column 4 k + c of rows 4 j to 4 j + 3. */
#pragma GCC unroll 2
  for (int i = 0; i < SIDE; i += 8)
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
      eights[i + c] = _mm512_shuffle_i32x4(fours[i + c], fours[i + c + 4], 0x88);
      eights[i + c + 4] = _mm512_shuffle_i32x4(fours[i + c], fours[i + c + 4], 0xdd);
    }
#pragma GCC unroll 4
  for (int c = 0; c < 4; c++)
#pragma GCC unroll 2
    for (int odd = 0; odd < 2; odd++) {
      x[4 * odd + c] = _mm512_shuffle_i32x4(eights[4 * odd + c], eights[4 * odd + c + 8], 0x88);
      x[4 * odd + c + 8] = _mm512_shuffle_i32x4(eights[4 * odd + c], eights[4 * odd + c + 8], 0xdd);
    }
}
#endif

/* Register `part` of at most `num_bytes` bytes; what lies behind them is zero. */
INLINE vu load_bits(const char *from, int part, int64_t num_bytes) {
  vu bits = {0};
  const int64_t there = num_bytes - part * REGISTER_BYTES;
  from += part * REGISTER_BYTES;
  if (there >= REGISTER_BYTES) memcpy(&bits, from, sizeof bits);
  else if (there > 0) memcpy(&bits, from, (size_t)there);
  return bits;
}

/* Factor `n` of words of weights. */
INLINE vf widen(int is_int8, vu words, int n) {
  if (is_int8) {
#if defined(__AVX512VNNI__)
    return (vf)(words ^ 0x80808080u);
#else
    const vi bytes = (vi)words; /* pairs of int16 */
    return (vf)(n ? (bytes << 8 >> 24 & 0xffff) | bytes >> 24 << 16 : (bytes << 24 >> 24 & 0xffff) | bytes << 16 >> 24 << 16);
#endif
  }
#if FACTORS == 1
  return (vf)words;
#elif DTYPE == BF16
  return (vf)(n ? words & 0xffff0000u : words << 16);
#else
  return from_f16(n ? words >> 16 : words & 0xffff);
#endif
}

INLINE vf add_products(vf sum, vf x, vf weights) {
#if DTYPE == BF16 && defined(DOTS)
  return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)weights);
#else
  return multiply_add(x, weights, sum);
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

/* Adds the products of what `widen` has made of words of int8. */
INLINE vi add_int8_products(vi sum, vi x, vi weights) {
#if defined(__AVX512VNNI__)
  return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, (__m512i)x);
#else
  return add_pairs(sum, x, weights);
#endif
}

#if defined(__AVX__)
#define KEEP(x) __asm__("" : "+v"(x)) /* in a register: gcc would load it anew for each product */
#else
#define KEEP(x)
#endif

/* ---- weights are turned ---- */

#if !defined(__AVX512F__)
/* The low or the high words of two registers in turn, in each part of 16 bytes. */
INLINE vu interleave(int high, vu a, vu b) {
#if defined(__AVX__)
  return (vu)(high ? _mm256_unpackhi_ps((__m256)a, (__m256)b) : _mm256_unpacklo_ps((__m256)a, (__m256)b));
#elif defined(__x86_64__)
  return (vu)(high ? _mm_unpackhi_ps((__m128)a, (__m128)b) : _mm_unpacklo_ps((__m128)a, (__m128)b));
#elif defined(__aarch64__)
  return (vu)(high ? vzip2q_u32((uint32x4_t)a, (uint32x4_t)b) : vzip1q_u32((uint32x4_t)a, (uint32x4_t)b));
#else
  return high ? (vu){a[2], b[2], a[3], b[3]} : (vu){a[0], b[0], a[1], b[1]};
#endif
}
#endif

/* Turns a step of WIDTH rows of weights, `stride` bytes apart; registers of `to` are `apart` from each other. */
INLINE void turn_rows(int is_int8, const char *from, int64_t stride, vf *to, int64_t apart) {
  const int factors = is_int8 ? INT8_FACTORS : FACTORS;
#if defined(__AVX512F__)
  __m512i x[WORDS];
#pragma GCC unroll 16
  for (int j = 0; j < WIDTH; j++) x[j] = _mm512_loadu_si512(from + j * stride);
  transpose(x);
#pragma GCC unroll 16
  for (int word = 0; word < WORDS; word++)
#pragma GCC unroll 2
    for (int n = 0; n < factors; n++) to[(word * factors + n) * apart] = widen(is_int8, (vu)x[word], n);
#else
  for (int first = 0; first < WORDS; first += 4, from += 16) {
    vu x[4], pairs[4]; /* parts of 16 bytes of register j are of rows j, j + 4 and so on */
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++)
#if defined(__AVX__)
      x[j] = (vu)_mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps((const float *)(from + j * stride))),
                                      _mm_loadu_ps((const float *)(from + (j + 4) * stride)), 1);
#else
      memcpy(&x[j], from + j * stride, sizeof x[j]);
#endif
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) pairs[i] = interleave(i & 1, x[i >> 1], x[(i >> 1) + 2]);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) x[i] = interleave(i & 1, pairs[i >> 1], pairs[(i >> 1) + 2]);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
#pragma GCC unroll 2
      for (int n = 0; n < factors; n++) to[((first + i) * factors + n) * apart] = widen(is_int8, x[i], n);
  }
#endif
}

/* Cache lines that are fetched while others are multiplied, `num` at a time. */
typedef struct {
  const char *next, *end;
  int64_t num;
} Ahead;

/* Into the second cache: the first has too few lines under way. */
INLINE void fetch(Ahead *ahead) {
  const char *until = MIN(ahead->next + ahead->num * STEP_BYTES, ahead->end);
  for (; ahead->next < until; ahead->next += STEP_BYTES) __builtin_prefetch(ahead->next, 0, 2);
}

/* Some steps of the weights of outputs from `out` on, and where they lie turned. Nobody has fetched them where they are `cold`. */
typedef struct {
  const Product *product;
  vf *turned;
  int64_t out, step, steps;
  int cold;
} Weights;

INLINE int factors_of(int is_int8) { return is_int8 ? INT8_FACTORS : FACTORS; }

/* Turns step `step` of `w` of register `i` of `registers`. Outputs and inputs behind the last are zeros. */
INLINE void turn_step(int is_int8, const Weights *w, int64_t step, int i, int registers, vf *to) {
  const Product *p = w->product;
  const int64_t out = w->out + i * WIDTH, at = (w->step + step) * STEP_BYTES;
  const int64_t there = MIN(p->row_bytes - at, STEP_BYTES), outs = MIN(p->out - out, WIDTH);
  const char *from = p->weight + out * p->row_bytes + at;
  char copy[WIDTH * STEP_BYTES];
  int64_t stride = p->row_bytes;
  for (int j = 0; w->cold && j < WIDTH; j++) __builtin_prefetch(from + j * stride + COLD_STEPS * STEP_BYTES, 0, 2);
  if (there < STEP_BYTES || outs < WIDTH) {
    memset(copy, 0, sizeof copy);
    for (int64_t j = 0; j < outs; j++) memcpy(copy + j * STEP_BYTES, from + j * stride, (size_t)there);
    from = copy, stride = STEP_BYTES;
  }
  turn_rows(is_int8, from, stride, to + i, registers);
}

INLINE void turn(int is_int8, int registers, const Weights *w, Ahead *ahead) {
  for (int i = 0; i < registers; i++)
    for (int64_t step = 0; step < w->steps; step++) {
      fetch(ahead);
      turn_step(is_int8, w, step, i, registers, w->turned + step * WORDS * factors_of(is_int8) * registers);
    }
}

/* ---- rows meet turned weights ---- */

/* Rows of a tile: where they lie in x and y. In x the last of `num` stands for those behind it. */
typedef struct {
  const uint32_t *words[MOST_FEW]; /* of x, from the first step that is multiplied on */
  int64_t x[MOST_FEW], y[MOST_FEW], num;
} TileRows;

INLINE TileRows rows_of_tile(int is_int8, int rows, const Weights *w, int64_t r, int64_t end) {
  const Product *p = w->product;
  TileRows at = {.num = MIN(end - r, rows)};
  for (int j = 0; j < rows; j++) {
    at.x[j] = MIN(r + j, end - 1);
    at.y[j] = p->at ? p->at[at.x[j]] : at.x[j] - p->first;
    const int64_t result = p->x_at ? p->x_at[at.x[j]] : at.x[j], from = p->share > 1 ? result / p->share : result;
    at.words[j] = (const uint32_t *)p->x + from * p->x_stride + w->step * WORDS * factors_of(is_int8);
  }
  return at;
}

/* Adds the sums [rows, registers, WIDTH] of a segment to those before it, which lie in y; after the last one y has the results. */
static __attribute__((noinline)) void end_segment(int is_int8, int registers, const Weights *w, const TileRows *at, const vf *sums) {
  const Product *p = w->product;
  const int last = w->step + w->steps == p->steps;
  for (int64_t j = 0; j < at->num; j++)
    for (int i = 0; i < registers; i++, sums++) {
      const int64_t out = w->out + i * WIDTH, outs = p->out - out;
      float *y = (float *)p->y + at->y[j] * p->out;
      vf sum = *sums;
      if (w->step) {
        const vf before = load_some(F32, (const char *)y, out, p->out);
        sum = is_int8 ? (vf)((vu)before + (vu)sum) : before + sum;
      }
      if (is_int8 && last) {
#if defined(__AVX512VNNI__)
        sum = (vf)((vu)sum - 128 * (uint32_t)p->row_sum[at->x[j]]); /* what was not taken off may be beyond int32, and wraps */
#endif
        const vf scale = load_some(F32, (const char *)p->scale, out, p->out);
        sum = __builtin_convertvector((vi)sum, vf) * all(p->row_scale[at->x[j]]) * scale;
      }
      if (outs >= WIDTH) store_f32(y + out, sum);
      else if (outs > 0) memcpy(y + out, &sum, sizeof(float) * (size_t)outs);
    }
}

/* As `end_segment`, from registers where all rows and outputs are there: through memory it takes a tenth of the time of short
   rows. */
INLINE void end_tile(int is_int8, int rows, int registers, const Weights *w, const TileRows *at, const vf *sums) {
  const Product *p = w->product;
  vf found[MAX(TILE_ROWS * TILE_REGISTERS, MOST_FEW)];
  if (!is_int8 && at->num == rows && w->out + registers * WIDTH <= p->out) {
#pragma GCC unroll 8
    for (int j = 0; j < rows; j++)
#pragma GCC unroll 4
      for (int i = 0; i < registers; i++) {
        float *y = (float *)p->y + at->y[j] * p->out + w->out + i * WIDTH;
        const vf sum = sums[j * registers + i];
        store_f32(y, w->step ? load_f32(y) + sum : sum);
      }
    return;
  }
#pragma GCC unroll 32
  for (int i = 0; i < rows * registers; i++) found[i] = sums[i];
  end_segment(is_int8, registers, w, at, found);
}

/* Adds the products of factor `n` of each row. */
INLINE void add_factor(int is_int8, int rows, int registers, const TileRows *at, int64_t n, const vf *weights, vf *sums) {
  vf of_outs[MOST_REGISTERS];
#pragma GCC unroll 4
  for (int i = 0; i < registers; i++) {
    of_outs[i] = weights[i];
    if (rows > 1 && registers > 1) KEEP(of_outs[i]);
  }
#pragma GCC unroll 8
  for (int j = 0; j < rows; j++) {
    vf of_row = (vf)((vu){0} + at->words[j][n]);
    if (registers > 1) KEEP(of_row);
#pragma GCC unroll 4
    for (int i = 0; i < registers; i++) {
      vf *sum = sums + j * registers + i;
      *sum = is_int8 ? (vf)add_int8_products((vi)*sum, (vi)of_row, (vi)of_outs[i]) : add_products(*sum, of_row, of_outs[i]);
    }
  }
}

/* `rows` rows from `r` on meet turned weights. */
INLINE void tile(int is_int8, int rows, int registers, const Weights *w, int64_t r, int64_t end, Ahead *ahead) {
  const TileRows at = rows_of_tile(is_int8, rows, w, r, end);
  const vf *weights = w->turned;
  vf sums[TILE_ROWS * TILE_REGISTERS];
#pragma GCC unroll 16
  for (int i = 0; i < rows * registers; i++) sums[i] = (vf){0};
  for (int64_t n = 0; n < w->steps * WORDS * factors_of(is_int8);) {
    fetch(ahead);
    for (int i = 0; i < FETCH_WORDS; i++, n++, weights += registers) add_factor(is_int8, rows, registers, &at, n, weights, sums);
  }
  end_tile(is_int8, rows, registers, w, &at, sums);
}

/* Rows `first` to `end` - 1 meet a segment of `registers` registers of outputs. */
INLINE void many_rows(int is_int8, int registers, Weights w, int64_t first, int64_t end, Ahead *ahead) {
  vf turned[SEGMENT * WORDS * MAX(FACTORS, INT8_FACTORS) * TILE_REGISTERS];
  w.turned = turned;
  turn(is_int8, registers, &w, ahead);
  for (int64_t r = first; r < end; r += TILE_ROWS) {
    if (end - r <= LEAST_ROWS) tile(is_int8, LEAST_ROWS, registers, &w, r, end, ahead);
    else if (TILE_ROWS > 4 && end - r <= 4) tile(is_int8, 4, registers, &w, r, end, ahead);
    else tile(is_int8, TILE_ROWS, registers, &w, r, end, ahead);
  }
}

/* `rows` rows from `r` on meet a segment of `registers` registers of outputs. No turned weights leave the registers, where there
   are 32. */
INLINE void few_rows(int is_int8, int rows, int registers, const Weights *w, int64_t r, int64_t end, Ahead *ahead) {
  const TileRows at = rows_of_tile(is_int8, rows, w, r, end);
  const int factors = factors_of(is_int8);
  vf sums[MOST_FEW];
#pragma GCC unroll 8
  for (int i = 0; i < rows * registers; i++) sums[i] = (vf){0};
  for (int64_t step = 0; step < w->steps; step++) {
    vf turned[WORDS * 2 * MOST_REGISTERS];
#pragma GCC unroll 4
    for (int i = 0; i < registers; i++) {
      fetch(ahead);
      turn_step(is_int8, w, step, i, registers, turned);
    }
    UNROLL_STEP
    for (int n = 0; n < WORDS * factors; n++)
      add_factor(is_int8, rows, registers, &at, step * WORDS * factors + n, turned + n * registers, sums);
  }
  end_tile(is_int8, rows, registers, w, &at, sums);
}

/* ---- items of work ---- */

typedef struct {
  const Product *products;
  int64_t num_items, threads;
  float *sums; /* of gates, by threads */
  int64_t sums_of_thread;
  _Atomic int64_t next;
} Products;

INLINE int64_t num_blocks(const Product *p) { return (p->out + p->outs_of_item - 1) / p->outs_of_item; }

/* The product of an item, and its number there. */
INLINE const Product *product_of(const Products *all, int64_t *item) {
  const Product *p = all->products;
  for (; *item >= p->num_items; p++) *item -= p->num_items;
  return p;
}

/* The first output of an item. */
INLINE int64_t first_out(const Product *p, int64_t item) { return item % num_blocks(p) * p->outs_of_item; }

/* Registers of outputs that `rows` rows meet together. Short ones make eight sums, or four of a single row, so that multiply-adds
   need not wait for each other. */
INLINE int registers_of(int64_t rows) {
  if (rows > MOST_FEW) return TILE_REGISTERS;
  return WIDTH == LANES || rows > 4 ? 1 : rows > 1 ? 2 : 4;
}

/* Rows `first` to `end` - 1 meet outputs of `w`, up to `end_out`, segment after segment. */
INLINE void multiply_outs(int is_int8, Weights w, int64_t first, int64_t end, int64_t end_out, Ahead *ahead) {
  do {
    w.steps = MIN(w.product->steps - w.step, SEGMENT);
    if (end - first == 1) few_rows(is_int8, 1, registers_of(1), &w, first, end, ahead);
    else if (end - first <= 4) few_rows(is_int8, 4, registers_of(4), &w, first, end, ahead);
    else if (end - first <= MOST_FEW) few_rows(is_int8, MOST_FEW, registers_of(MOST_FEW), &w, first, end, ahead);
    else if (TILE_REGISTERS > 2 && w.out + 2 * WIDTH >= end_out) many_rows(is_int8, 2, w, first, end, ahead);
    else many_rows(is_int8, TILE_REGISTERS, w, first, end, ahead);
    w.step += w.steps;
  } while (w.step < w.product->steps);
}

/* Some rows and outputs of a product. */
typedef struct {
  int64_t first_row, end_row, first, end;
} Block;

/* The block of an item. */
INLINE Block block_of(const Product *p, int64_t item) {
  const int64_t row = p->first + item / num_blocks(p) * p->rows_of_item, first = first_out(p, item);
  return (Block){row, MIN(row + p->rows_of_item, p->end), first, MIN(first + p->outs_of_item, p->out)};
}

/* The weights of a block, to be fetched. */
INLINE Ahead weights_of(const char *weight, const Product *p, Block b) {
  return (Ahead){weight + b.first * p->row_bytes, weight + b.end * p->row_bytes, 0};
}

/* One block. Meanwhile the weights `ahead` are fetched. */
INLINE void multiply_block(int is_int8, const Product *p, Block b, int cold, Ahead ahead) {
  const int64_t rows = b.end_row - b.first_row, registers = registers_of(rows), outs = registers * WIDTH;
  const int64_t fetches_of_tiles = rows / TILE_ROWS * WORDS * factors_of(is_int8) / FETCH_WORDS;
  const int64_t fetches_of_outs = registers + (rows > MOST_FEW ? fetches_of_tiles : 0);
  const int64_t fetches_of_step = (b.end - b.first + outs - 1) / outs * fetches_of_outs;
  ahead.num = (ahead.end - ahead.next) / STEP_BYTES / MAX(p->steps * fetches_of_step, 1) + 1;
  for (int64_t out = b.first; out < b.end; out += outs)
    multiply_outs(is_int8, (Weights){.product = p, .out = out, .cold = cold}, b.first_row, b.end_row, b.end, &ahead);
}

#if !FLOAT_TILES
/* `multiply_block` of floats, compiled once: it takes a second. */
static __attribute__((noinline)) void multiply_float_block(const Product *p, Block b, int cold, Ahead ahead) {
  multiply_block(0, p, b, cold, ahead);
}
#endif

/* activation(gate) * up of a row. */
INLINE void gate_row(int activation, const char *gate, const char *up, char *y, int64_t length) {
  for (int64_t i = 0; i < length; i += WIDTH)
    store_some(DTYPE, y, i, length, gated(activation, load_some(F32, gate, i, length), load_some(F32, up, i, length)));
}

#if !FLOAT_TILES
/* One block of a gate, with `sums` for it twice. Meanwhile the weights `ahead` are fetched. */
static void gate_block(const Product *p, Block b, float *sums, int cold, Ahead ahead) {
  const int64_t rows = b.end_row - b.first_row, outs = b.end - b.first;
  Product own = *p;
  own.first = b.first_row, own.end = b.end_row, own.out = outs, own.at = NULL;
  for (int up = 0; up < 2; up++) {
    own.weight = (up ? p->up : p->weight) + b.first * p->row_bytes;
    own.y = sums + up * rows * outs;
    const Block block = {b.first_row, b.end_row, 0, outs};
    multiply_float_block(&own, block, cold && !up, up ? ahead : weights_of(p->up, p, b));
  }
  for (int64_t r = 0; r < rows; r++) {
    char *y = (char *)p->y + (p->at[b.first_row + r] * p->out + b.first) * ITEM_BYTES;
    gate_row(p->activation, (const char *)(sums + r * outs), (const char *)(sums + (rows + r) * outs), y, outs);
  }
}
#endif

/* Takes items until none is left, each while the one before is multiplied: whoever fetches weights also multiplies them, for what
   lies in the cache of another core comes late. The last items are not taken before their time, or others would wait. */
INLINE void take_products(int is_int8, Products *all, int64_t thread) {
  int64_t taken = atomic_fetch_add(&all->next, 1);
  for (int cold = 1; taken < all->num_items;) {
    const int early = taken + all->threads < all->num_items;
    const int64_t later = early ? atomic_fetch_add(&all->next, 1) : all->num_items;
    int64_t item = taken, next = later;
    const Product *p = product_of(all, &item), *q = early && later < all->num_items ? product_of(all, &next) : NULL;
    const Ahead ahead = q ? weights_of(q->weight, q, block_of(q, next)) : (Ahead){0};
    if (is_int8) multiply_block(1, p, block_of(p, item), cold, ahead);
#if !FLOAT_TILES
    else if (p->up) gate_block(p, block_of(p, item), all->sums + thread * all->sums_of_thread, cold, ahead);
    else multiply_float_block(p, block_of(p, item), cold, ahead);
#endif
    cold = !early;
    taken = early ? later : atomic_fetch_add(&all->next, 1);
  }
}

#if !FLOAT_TILES
static void run_float_products(const void *all, int64_t thread) { take_products(0, *(Products *const *)all, thread); }

/* Rows of x as words that are multiplied. */
typedef struct {
  const char *from;
  uint32_t *to;
  const Sorted *rows;
  int64_t in, stride;
} Spread;

static void run_spread(const void *task, int64_t row) {
  const Spread *spread = task;
  const int64_t row_bytes = spread->in * ITEM_BYTES;
  const char *from = spread->from + spread->rows->at[row] / spread->rows->share * row_bytes;
  uint32_t *to = spread->to + row * spread->stride;
#if FACTORS == 1
  memcpy(to, from, (size_t)row_bytes);
  memset((char *)to + row_bytes, 0, (size_t)(spread->stride * 4 - row_bytes));
#else
  for (int64_t i = 0; i < spread->stride; i += WIDTH) store_f32((float *)to + i, load_some(DTYPE, from, i, spread->in));
#endif
}
#endif

/* Words from one row of x to the next: a cache line more than a row takes, or rows would share places in the cache. */
INLINE int64_t x_stride_of(int64_t steps, int factors) { return steps * WORDS * factors + WORDS; }

/* Whether threads share the work of products. */
static int are_shared(const Product *products, int64_t num_products, int64_t in) {
  int64_t multiply_adds = 0;
  for (int64_t i = 0; i < num_products; i++)
    multiply_adds += (products[i].end - products[i].first) * in * products[i].out * (products[i].up ? 2 : 1);
  return multiply_adds >= ALONE;
}

#if !FLOAT_TILES
/* Runs products by items of a block of outputs and all rows; or of some rows, where threads would get too few. Returns whether
   there was memory. */
static int run_products(XLA_FFI_CallFrame *frame, Product *products, int64_t num_products, int64_t in, Run *run) {
  const int shared = are_shared(products, num_products, in);
  Products all = {.products = products, .threads = shared ? threads_of(frame) : 1};
  int64_t blocks = 0, rows = 1;
  for (int64_t i = 0; i < num_products; i++) rows = MAX(rows, products[i].end - products[i].first);
  const int64_t outs = rows > MANY_ROWS ? MANY_ROW_OUTS : LESS_ROW_OUTS;
  for (int64_t i = 0; i < num_products; i++) blocks += (products[i].out + outs - 1) / outs;
  const int64_t enough = shared ? ITEMS_OF_THREAD * all.threads : 0;
  const int64_t chunks = MAX(MIN(enough / MAX(blocks, 1) + 1, rows / MANY_ROWS), 1);
  for (int64_t i = 0; i < num_products; i++) {
    Product *p = products + i;
    p->outs_of_item = outs;
    p->rows_of_item = (rows + chunks - 1) / chunks;
    p->num_items = num_blocks(p) * ((p->end - p->first + p->rows_of_item - 1) / p->rows_of_item);
    all.num_items += p->num_items;
    if (p->up) all.sums_of_thread = 2 * p->rows_of_item * outs;
  }
  all.sums = malloc(sizeof(float) * (size_t)(all.threads * all.sums_of_thread + 1));
  if (!all.sums) return 0;
  run_items(frame, shared, all.threads, run, &(Products *){&all});
  free(all.sums);
  return 1;
}
#endif

#if defined(AMX)
/* ---- products by matrix tiles ----

   AMX, for bfloat16 and int8 on processors that have it. A tile holds 16 rows of 64 bytes. One instruction multiplies a step of 16
   outputs' weights by that step of 16 rows of x, and adds the products to 16 x 16 sums, group after group: of two bfloat16, or of
   four int8. So a sum has one order here, too, and what else is in the tiles does not change it.

       weights   [16 outputs, 64 bytes]                  as they lie in memory; zeros behind the last
       x         [16 groups of 4 bytes, 16 rows]         gathered once for all outputs
       sums      [16 outputs, 16 rows]                   */

#define TILE_BYTES (SIDE * STEP_BYTES)

/* The shapes of the eight tile registers, as the processor reads them. Libraries may rely on theirs, so they get them back. */
typedef struct {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
} Shapes;

INLINE void begin_tiles(Shapes *before) {
  Shapes shapes = {.palette = 1};
  for (int i = 0; i < 8; i++) shapes.row_bytes[i] = STEP_BYTES, shapes.rows[i] = SIDE;
  _tile_storeconfig(before);
  _tile_loadconfig(&shapes);
}

INLINE void end_tiles(const Shapes *before) {
  if (before->palette) _tile_loadconfig(before);
  else _tile_release();
}

/* Rows of x as tiles [rows / 16, steps, 16 groups, 16 rows]. */
typedef struct {
  const char *from;
  char *to;
  const Sorted *rows;
  int64_t packed;                   /* whether they lie as sorted, and not where they lie in x */
  int64_t row_bytes, stride, steps; /* bytes of a row, and from one to the next */
} Gathering;

INLINE int64_t gathered_bytes(int64_t rows, int64_t steps) { return (rows + SIDE - 1) / SIDE * steps * TILE_BYTES; }

static void run_gathering(const void *task, int64_t item) {
  const Gathering *g = task;
  const char *from[SIDE];
  char *to = g->to + item * g->steps * TILE_BYTES;
  const int32_t *at = g->rows->at + item * SIDE;
  int64_t rows = 0;
  for (; rows < SIDE && at[rows] >= 0; rows++)
    from[rows] = g->from + (g->packed ? item * SIDE + rows : at[rows] / g->rows->share) * g->stride;
  for (int64_t at = 0; at < g->row_bytes; at += STEP_BYTES, to += TILE_BYTES) {
    const int64_t there = MIN(g->row_bytes - at, STEP_BYTES);
    const __mmask64 mask = ~0ull >> (STEP_BYTES - there);
    __m512i x[SIDE];
    for (int j = 0; j < SIDE; j++)
      x[j] = j < rows ? _mm512_maskz_loadu_epi8(mask, from[j] + at) : _mm512_setzero_si512();
    transpose(x);
    for (int j = 0; j < SIDE; j++) _mm512_store_si512(to + j * STEP_BYTES, x[j]);
  }
}

static void gather(XLA_FFI_CallFrame *frame, const Gathering *gathering) {
  const Sorted *rows = gathering->rows;
  run_items(frame, rows->num_rows * gathering->row_bytes >= ALONE, rows->size / SIDE, run_gathering, gathering);
}

/* Where the weights of 16 outputs of a step lie; what is no whole tile is copied. */
INLINE const char *weights_at(const Product *p, int64_t o, int64_t step, char *copy, int64_t *stride) {
  const char *from = p->weight + o * p->row_bytes + step * STEP_BYTES;
  const int64_t there = MIN(p->row_bytes - step * STEP_BYTES, STEP_BYTES), outs = MIN(p->out - o, SIDE);
  *stride = p->row_bytes;
  if (there == STEP_BYTES && outs == SIDE) return from;
  memset(copy, 0, TILE_BYTES);
  for (int64_t i = 0; i < outs; i++) memcpy(copy + i * STEP_BYTES, from + i * p->row_bytes, (size_t)there);
  *stride = STEP_BYTES;
  return copy;
}

/* The results of a tile register, as rows of y. */
INLINE void tile_results(int is_int8, const char *sums, const Product *p, int64_t r, int64_t o) {
  const int64_t outs = MIN(p->out - o, SIDE), rows = MIN(p->end - r, SIDE);
  const __mmask16 mask = (__mmask16)(0xffff >> (SIDE - outs));
  const __m512 scale = is_int8 ? _mm512_maskz_loadu_ps(mask, p->scale + o) : _mm512_setzero_ps();
  __m512i x[SIDE];
  for (int j = 0; j < SIDE; j++) x[j] = _mm512_load_si512(sums + j * STEP_BYTES);
  transpose(x);
  for (int64_t j = 0; j < rows; j++) {
    __m512 y = _mm512_castsi512_ps(x[j]);
    if (is_int8) y = _mm512_mul_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(x[j]), _mm512_set1_ps(p->row_scale[r + j])), scale);
    _mm512_mask_storeu_ps((float *)p->y + p->at[r + j] * p->out + o, mask, y);
  }
}

#define MULTIPLY(to, weights, x)                    \
  do {                                              \
    if (is_int8) _tile_dpbssd(to, weights, x);      \
    else _tile_dpbf16ps(to, weights, x);            \
  } while (0)

/* `outs` x `rows` tiles, 1 or 2 of each, from output `o` and row `r` on. With `fetches`, the outputs that follow are fetched. */
INLINE void tile_block(int is_int8, int outs, int rows, int fetches, const Product *p, int64_t r, int64_t o) {
  char copies[2 * TILE_BYTES] __attribute__((aligned(STEP_BYTES)));
  char sums[4 * TILE_BYTES] __attribute__((aligned(STEP_BYTES)));
  const char *of_rows = (const char *)p->x + r / SIDE * p->steps * TILE_BYTES, *more_rows = of_rows + p->steps * TILE_BYTES;
  const char *ahead = p->weight + (o + outs * SIDE) * p->row_bytes;
  int64_t stride;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t step = 0; step < p->steps; step++, of_rows += TILE_BYTES, more_rows += TILE_BYTES) {
    const char *weights = weights_at(p, o, step, copies, &stride);
    _tile_loadd(4, weights, stride);
    if (outs == 2) {
      weights = weights_at(p, o + SIDE, step, copies + TILE_BYTES, &stride);
      _tile_loadd(5, weights, stride);
    }
    _tile_loadd(6, of_rows, STEP_BYTES);
    MULTIPLY(0, 4, 6);
    if (outs == 2) MULTIPLY(1, 5, 6);
    if (rows == 2) {
      _tile_loadd(7, more_rows, STEP_BYTES);
      MULTIPLY(2, 4, 7);
      if (outs == 2) MULTIPLY(3, 5, 7);
    }
    if (fetches)
#pragma GCC unroll 32
      for (int i = 0; i < outs * SIDE; i++) __builtin_prefetch(ahead + (step * outs * SIDE + i) * STEP_BYTES, 0, 2);
  }
  _tile_stored(0, sums, STEP_BYTES);
  tile_results(is_int8, sums, p, r, o);
  if (outs == 2) {
    _tile_stored(1, sums + TILE_BYTES, STEP_BYTES);
    tile_results(is_int8, sums + TILE_BYTES, p, r, o + SIDE);
  }
  if (rows == 2) {
    _tile_stored(2, sums + 2 * TILE_BYTES, STEP_BYTES);
    tile_results(is_int8, sums + 2 * TILE_BYTES, p, r + SIDE, o);
    if (outs == 2) {
      _tile_stored(3, sums + 3 * TILE_BYTES, STEP_BYTES);
      tile_results(is_int8, sums + 3 * TILE_BYTES, p, r + SIDE, o + SIDE);
    }
  }
}

INLINE void tile_item(int is_int8, const Products *all, int64_t item) {
  const Product *p = product_of(all, &item);
  const int64_t first_out = item * p->outs_of_item, end_out = MIN(first_out + p->outs_of_item, p->out);
  Shapes before;
  begin_tiles(&before);
  for (int64_t r = p->first; r < p->end; r += 2 * SIDE)
    for (int64_t o = first_out; o < end_out; o += 2 * SIDE) {
      const int two_outs = o + SIDE < end_out, two_rows = r + SIDE < p->end, fetches = r == p->first && o + 2 * SIDE < end_out;
#define BLOCK(OUTS, ROWS, FETCHES) tile_block(is_int8, OUTS, ROWS, FETCHES, p, r, o)
      if (two_outs && two_rows) BLOCK(2, 2, fetches);
      else if (two_outs) BLOCK(2, 1, fetches);
      else if (two_rows) BLOCK(1, 2, 0);
      else BLOCK(1, 1, 0);
#undef BLOCK
    }
  end_tiles(&before);
}

#define TILE_ITEM_BYTES (512 << 10) /* most bytes of weights that one item of work reads */
#define TILE_ITEM_OUTS (2 * SIDE)   /* outputs of an item are a multiple of it */

static void run_tile_products(XLA_FFI_CallFrame *frame, Product *products, int64_t num_products, int64_t in, Run *run) {
  const int shared = are_shared(products, num_products, in);
  Products all = {.products = products, .threads = shared ? threads_of(frame) : 1};
  int64_t outs = 0;
  for (int64_t i = 0; i < num_products; i++) outs += products[i].out;
  for (int64_t i = 0; i < num_products; i++) {
    Product *p = products + i;
    const int64_t most = MIN(TILE_ITEM_BYTES / MAX(p->row_bytes, 1), outs / (ITEMS_OF_THREAD * all.threads));
    p->outs_of_item = shared ? MAX(most / TILE_ITEM_OUTS, 1) * TILE_ITEM_OUTS : p->out;
    p->num_items = num_blocks(p);
    all.num_items += p->num_items;
  }
  run_items(frame, shared, all.num_items, run, &all);
}

static void run_int8_tiles(const void *task, int64_t item) { tile_item(1, task, item); }
#if FLOAT_TILES
static void run_float_tiles(const void *task, int64_t item) { tile_item(0, task, item); }
#endif
#endif

static XLA_FFI_Error *multiply_by_floats(XLA_FFI_CallFrame *frame, int by_ids) {
  if (answered(frame)) return NULL;
  Given given;
  if (!read_given(frame, by_ids, 0, &given) || (FLOAT_TILES && given.is_gate))
    return fail(frame, "products: unsupported arguments");
  const int64_t steps = (given.in + STEP_ITEMS - 1) / STEP_ITEMS, row_bytes = given.in * ITEM_BYTES;
#if FLOAT_TILES
  const Sorted rows = sort_rows(&given, SIDE);
  const int64_t stride = 0, prepared_bytes = gathered_bytes(rows.size, steps);
#else
  const Sorted rows = sort_rows(&given, 1);
  const int share_places = rows.num_rows <= MOST_FEW && row_bytes % SAME_PLACE == 0;
  const int are_words = FACTORS == 1 && row_bytes % STEP_BYTES == 0 && !share_places; /* rows of x as they lie */
  const int64_t stride = are_words ? row_bytes / 4 : x_stride_of(steps, FACTORS);
  const int64_t prepared_bytes = are_words ? 0 : rows.size * stride * 4;
#endif
  char *prepared = aligned_alloc(STEP_BYTES, whole_steps(prepared_bytes));
  Product like = {.x = prepared, .row_bytes = row_bytes, .steps = steps, .x_stride = stride};
#if !FLOAT_TILES
  if (are_words) like.x = given.x->data, like.x_at = rows.at, like.share = rows.share;
#endif
  if (given.is_gate) like.activation = *(const int32_t *)attribute(frame, 0);
  int64_t num_products = 0;
  Product *products = products_of(&given, &rows, like, &num_products);
  int complete = rows.at && prepared && products;
  if (complete) {
#if FLOAT_TILES
    gather(frame, &(Gathering){given.x->data, prepared, &rows, 0, row_bytes, row_bytes, steps});
    run_tile_products(frame, products, num_products, given.in, run_float_tiles);
#else
    const Spread spread = {given.x->data, (uint32_t *)prepared, &rows, given.in, stride};
    if (!are_words) run_items(frame, rows.num_rows * given.in >= ALONE, rows.size, run_spread, &spread);
    complete = run_products(frame, products, num_products, given.in, run_float_products);
#endif
  }
  free(products);
  free(prepared);
  free(rows.at);
  return complete ? NULL : fail(frame, "products: out of memory");
}

/* (x [rows, in], weight [out, in], ...; used [rows] bool, if not all are) -> (y [rows, out] float32, ...): products of the same
   rows with several weights. Or a gate: (x, gate, up [out, in]; used; activation) -> [rows, out], without matrix tiles. */
XLA_FFI_Error *detspec_linear(XLA_FFI_CallFrame *frame) { return multiply_by_floats(frame, 0); }

/* (x [rows, in] or [rows, k, in], ids [rows, k] int32, weight [E, out, in], ...; used [rows] bool, if not all are) ->
   (y [rows, k, out] float32, ...): products of each row with the matrices that its ids name. Without such a matrix y is zeros.
   Gates as `detspec_linear` has them. */
XLA_FFI_Error *detspec_experts(XLA_FFI_CallFrame *frame) { return multiply_by_floats(frame, 1); }
