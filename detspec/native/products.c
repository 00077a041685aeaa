/* Products with weights, of rows or of rows and the matrices that they choose.

   y[r, o] = sum of x[r, i] * weight[o, i] over i. A step is 64 bytes of weights: 16 of float32, or 32 of two bytes. Lane l adds up
   the products of place l of all steps (of places 2 l and 2 l + 1), and `sum_lanes` the lanes. Inputs past the last are zeros.

   AMX, for bfloat16 on processors that have it: see "products by matrix tiles".
   DOTS, for bfloat16 on processors where that is faster: one instruction multiplies pairs of bfloat16 and adds both to the sum.
   Otherwise weights are widened to float32, first those at even places and then those at odd ones. Widening takes time, so rows
   share it, and x is widened once for all outputs.

   A caller may say which rows it will use. Only these are multiplied, packed next to each other. Their results go to their places,
   and those of the others are zeros:

       used 1 0 0 1 1      at 0 3 4      x 0 3 4  ->  y 0 . . 3 4

   Rows may also choose the matrices that they meet, k of E experts each. Then rows of results are packed by experts: row r has
   k r + j for its choice j. They are multiplied as if each expert were a product of its own.

       ids 2 0 | 0 3       at 1 2 | 0 | 3      begin 0 2 2 3      num 2 0 1 1 */

#define SIDE 16 /* rows and outputs of a matrix tile */
#define LINE 16 /* results */
#define ROW_BLOCK 64           /* rows that weights meet while they lie in the cache of a core */
#if defined(AMX)
#define BLOCK_BYTES (512 << 10) /* most bytes of weights that one item of work reads */
#define BLOCK_OUTS 32           /* outputs of an item are a multiple of it */
#else
#define BLOCK_BYTES (96 << 10)
#define BLOCK_OUTS 16
#endif
#define ITEMS_OF_THREAD 6      /* at least, where there are so many outputs: the last ones end at about the same time */
#define LEAST_AHEAD (8 << 10)   /* bytes from the weights that are multiplied to those that are fetched */
#define ALONE (1 << 18)        /* multiply-adds that one thread has done before another would have woken up */
#define STEP_BYTES 64          /* of weights */
#define STEP_ITEMS (STEP_BYTES / ITEM_BYTES)
#define REGISTER_BYTES ((int64_t)sizeof(vf))

#if DTYPE == F32 || (DTYPE == BF16 && defined(DOTS))
#define X_VECTORS 1 /* of all lanes, in a step of x */
#else
#define X_VECTORS 2
#endif

#if defined(__AVX512F__) /* sums, and the x and weights of a step, fit into 32 registers */
#define MANY_ROWS 4
#define MANY_ROW_OUTS 4
#define TWO_ROW_OUTS 8
#define ONE_ROW_OUTS 8
#define UNROLL_STEPS _Pragma("GCC unroll 4")
#else
#define MANY_ROWS 4
#define MANY_ROW_OUTS 2
#define TWO_ROW_OUTS 4
#define ONE_ROW_OUTS 6
#define UNROLL_STEPS
#endif
#define MOST_SUMS 24
#define MOST_OUTS 8

typedef struct {
  const char *weight;
  const void *x; /* rows as they are multiplied: vf [rows, PARTS, steps, X_VECTORS], Rounded, or of matrix tiles */
  float *y;
  const int32_t *at;                    /* rows of y, by those of x */
  int64_t first, end;                   /* rows of x */
  int64_t row_bytes, out, steps;        /* bytes and steps of a row of the weight */
  const float *scale, *row_scale;       /* [out], and of rows of x, of int8 weights */
  int64_t outs_of_item, num_items;      /* outputs that one item computes, where x is turned blocks of them; how many items there are */
} Product;

/* Where results go: row r, output o to y[at[r] * stride + o - out]; without `at` to row r - row. */
typedef struct {
  float *y;
  const int32_t *at;
  int64_t row, out, stride;
} Results;

/* Computes `rows` x `outs` results from row `r` and output `o` on, both numbers constants where it is inlined. Each step fetches
   `lines` cache lines from `ahead` on. */
typedef void Tile(int rows, int outs, int lines, const char *ahead, const Product *p, Results to, int64_t r, int64_t o);

/* Bytes of whole steps. */
INLINE size_t whole_steps(int64_t num_bytes) { return (size_t)(MAX(num_bytes, 1) + STEP_BYTES - 1) / STEP_BYTES * STEP_BYTES; }

INLINE float *place_of(Results to, int64_t r, int64_t o) {
  return to.y + (to.at ? to.at[r] : r - to.row) * to.stride + o - to.out;
}

/* Arguments and results of products. */
typedef struct {
  const XLA_FFI_Buffer *x;             /* [rows, in], or [rows, k, in] */
  const int32_t *ids;                  /* [rows, k], or NULL where all rows meet one matrix */
  const uint8_t *used;                 /* [rows], or NULL if all are */
  XLA_FFI_Buffer **weights, **results; /* weights [E, out, in] or [out, in], each followed by its scale if it has one */
  int64_t rows, k, experts, in, num_weights, with_scale;
} Given;

/* Reads (x, ids with `by_ids`, weights, used if not all are) -> results. Returns whether arguments are of this form. */
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
  };
  return dtype_of(x->dtype) == DTYPE && frame->args.size == 1 + by_ids + given->num_weights * (1 + with_scale) + some;
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
        memset((float *)y->data + row * out, 0, sizeof(float) * (size_t)out);
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
#if defined(__AVX512BW__)
  else if (there > 0) bits = (vu)_mm512_maskz_loadu_epi8(~0ull >> (64 - there), from);
#else
  else if (there > 0) memcpy(&bits, from, (size_t)there);
#endif
  return bits;
}

/* Vector `v` of X_VECTORS of a step. */
INLINE vf widen(vu bits, int v) {
#if X_VECTORS == 1
  return v ? (vf){0} : (vf)bits;
#elif DTYPE == BF16
  return (vf)(v ? bits & 0xffff0000u : bits << 16);
#else
  return from_f16(v ? bits >> 16 : bits & 0xffff);
#endif
}

INLINE vf add_products(vf sum, vf x, vf weights) {
#if DTYPE == BF16 && defined(DOTS)
  return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)weights);
#else
  return multiply_add(x, weights, sum);
#endif
}

/* Registers from one row of x to the next: one more than a row takes, or rows would share places in the cache. */
INLINE int64_t x_stride_of(int64_t steps) { return PARTS * steps * X_VECTORS + 1; }

#if !FLOAT_TILES
/* Rows of x as steps of vectors. */
typedef struct {
  const char *from;
  vf *to;
  const Sorted *rows;
  int64_t in, steps;
} Spread;

INLINE void spread_step(const char *from, int part, int64_t num_bytes, vf *to) {
  const vu bits = load_bits(from, part, num_bytes);
  for (int v = 0; v < X_VECTORS; v++) to[v] = widen(bits, v);
}

static void run_spread(const void *task, int64_t row) {
  const Spread *spread = task;
  const int64_t row_bytes = spread->in * ITEM_BYTES, whole = row_bytes / STEP_BYTES;
  const char *from = spread->from + spread->rows->at[row] / spread->rows->share * row_bytes;
  vf *to = spread->to + row * x_stride_of(spread->steps);
  for (int part = 0; part < PARTS; part++) {
    for (int64_t step = 0; step < whole; step++, to += X_VECTORS) spread_step(from + step * STEP_BYTES, part, STEP_BYTES, to);
    if (whole == spread->steps) continue;
    spread_step(from + whole * STEP_BYTES, part, row_bytes - whole * STEP_BYTES, to);
    to += X_VECTORS;
  }
}
#endif

#if defined(__AVX__)
#define KEEP(x) __asm__("" : "+v"(x)) /* in a register: gcc would load it anew for each product */
#else
#define KEEP(x)
#endif

/* Adds the products of one part of a step, of which `num_bytes` bytes of each weight are there. */
INLINE void add_step(int rows, int outs, const vf *x, int64_t x_stride, const char *weight, int64_t row_bytes, int part,
                     int64_t num_bytes, vf *sums) {
#pragma GCC unroll 2
  for (int v = 0; v < X_VECTORS; v++) {
    vf weights[MOST_OUTS];
#pragma GCC unroll 8
    for (int i = 0; i < outs; i++) {
      weights[i] = widen(load_bits(weight + i * row_bytes, part, num_bytes), v);
      if (rows > 1) KEEP(weights[i]);
    }
#pragma GCC unroll 8
    for (int j = 0; j < rows; j++) {
      vf of_row = x[j * x_stride + v];
      KEEP(of_row);
#pragma GCC unroll 8
      for (int i = 0; i < outs; i++) sums[j * outs + i] = add_products(sums[j * outs + i], of_row, weights[i]);
    }
  }
}

/* A `Tile` of float weights: part after part, so that sums stay in registers; the steps of the first one fetch. */
INLINE void float_tile(int rows, int outs, int lines, const char *ahead, const Product *p, Results to, int64_t r, int64_t o) {
  const int64_t row_bytes = p->row_bytes, whole = row_bytes / STEP_BYTES, x_stride = x_stride_of(p->steps);
  vf lanes[MOST_SUMS * PARTS];
  for (int part = 0; part < PARTS; part++) {
    const vf *x = (const vf *)p->x + r * x_stride + part * p->steps * X_VECTORS;
    const char *weight = p->weight + o * row_bytes;
    vf sums[MOST_SUMS];
#pragma GCC unroll 24
    for (int i = 0; i < MOST_SUMS; i++) sums[i] = (vf){0};
#define ADD_STEP(STEP, NUM_BYTES) \
  add_step(rows, outs, x + (STEP) * X_VECTORS, x_stride, weight + (STEP) * STEP_BYTES, row_bytes, part, NUM_BYTES, sums)
    if (lines == 0) {
      UNROLL_STEPS
      for (int64_t step = 0; step < whole; step++) ADD_STEP(step, STEP_BYTES);
    } else {
      for (int64_t step = 0; step < whole; step++) {
        if (part == 0)
#pragma GCC unroll 8
          for (int i = 0; i < lines; i++) __builtin_prefetch(ahead + (step * lines + i) * STEP_BYTES, 0, 2);
        ADD_STEP(step, STEP_BYTES);
      }
    }
    if (whole < p->steps) ADD_STEP(whole, row_bytes - whole * STEP_BYTES);
#undef ADD_STEP
#pragma GCC unroll 24
    for (int i = 0; i < (rows * outs + 7) / 8 * 8; i++) lanes[i * PARTS + part] = sums[i];
  }
  float found[MOST_SUMS];
#pragma GCC unroll 3
  for (int i = 0; i < rows * outs; i += 8) sums_of_8(lanes + i * PARTS, found + i);
#pragma GCC unroll 4
  for (int j = 0; j < rows; j++) memcpy(place_of(to, r + j, o), found + j * outs, sizeof(float) * (size_t)outs);
}

/* Rows `first .. end - 1` of `outs` outputs from `o` on. The tiles of many rows share the fetching of later weights, into the second
   cache: the first has too few lines under way, so that 8 rows took 1.4 times as long. */
INLINE void column(Tile tile, int rows, int outs, const Product *p, Results to, int64_t first, int64_t end, int64_t o) {
  const int64_t row_bytes = p->row_bytes;
  const int64_t outs_ahead = outs * MAX(LEAST_AHEAD / MAX(outs * row_bytes, 1), 1);
  const char *ahead = p->weight + (o + outs_ahead) * row_bytes, *ahead_end = ahead + outs * row_bytes;
  const int64_t tiles = (end - first) / rows;
  int64_t r = first;
#define TILES(LINES) \
  for (; r + rows <= end && ahead < ahead_end; r += rows, ahead += (LINES) * row_bytes) tile(rows, outs, LINES, ahead, p, to, r, o)
  if (tiles >= outs) TILES(1);
  else if (2 * tiles >= outs && outs > 2) TILES(2);
  else TILES(outs);
#undef TILES
  for (; r + rows <= end; r += rows) tile(rows, outs, 0, ahead, p, to, r, o);
  for (; r < end; r++) tile(1, outs, 0, ahead, p, to, r, o);
}

/* `rows` x `outs` tiles over some rows and outputs; the last block of outputs begins early, so that it ends at the last one. */
INLINE void block(Tile tile, int rows, int outs, const Product *p, Results to, int64_t first, int64_t end, int64_t first_out,
                  int64_t end_out) {
  if (end_out - first_out < outs)
    for (int64_t o = first_out; o < end_out; o++) column(tile, 1, 1, p, to, first, end, o);
  else
    for (int64_t o = first_out; o < end_out; o += outs) column(tile, rows, outs, p, to, first, end, MIN(o, end_out - outs));
}

/* The same for many rows. Results of LINE outputs are collected, and leave as whole cache lines: rows of y often are a multiple
   of 4096 bytes apart, so that a line each of more than eight would not stay in the cache until it is full. */
INLINE void block_by_lines(Tile tile, int rows, int outs, const Product *p, Results to, int64_t first, int64_t end,
                           int64_t first_out, int64_t end_out) {
  float lines[ROW_BLOCK * LINE] __attribute__((aligned(STEP_BYTES)));
  for (int64_t o = first_out; o < end_out; o += LINE) {
    const int64_t num = MIN(LINE, end_out - o);
    block(tile, rows, outs, p, (Results){lines, NULL, first, o, LINE}, first, end, o, o + num);
    for (int64_t r = first; r < end; r++) memcpy(place_of(to, r, o), lines + (r - first) * LINE, sizeof(float) * (size_t)num);
  }
}

/* One item of the products `p`. */
INLINE void product_item(Tile tile, const Product *p, int64_t item) {
  for (; item >= p->num_items; p++) item -= p->num_items;
  const int64_t first_out = item * p->outs_of_item, end_out = MIN(first_out + p->outs_of_item, p->out);
  const Results to = {p->y, p->at, 0, 0, p->out};
  for (int64_t first = p->first; first < p->end; first += ROW_BLOCK) {
    const int64_t end = MIN(first + ROW_BLOCK, p->end);
    if (end - first == 1) block(tile, 1, ONE_ROW_OUTS, p, to, first, end, first_out, end_out);
    else if (end - first < MANY_ROWS) block(tile, 2, TWO_ROW_OUTS, p, to, first, end, first_out, end_out);
    else if (end - first < 2 * MANY_ROWS) block(tile, MANY_ROWS, MANY_ROW_OUTS, p, to, first, end, first_out, end_out);
    else block_by_lines(tile, MANY_ROWS, MANY_ROW_OUTS, p, to, first, end, first_out, end_out);
  }
}

#if !FLOAT_TILES
static void run_float_product(const void *task, int64_t item) { product_item(float_tile, task, item); }
#endif

/* Cuts `num_products` products into items of work, and runs them. */
static void run_products(XLA_FFI_CallFrame *frame, Product *products, int64_t num_products, int64_t in, Run *run) {
  int64_t multiply_adds = 0, outs = 0, num_items = 0;
  for (int64_t i = 0; i < num_products; i++) {
    multiply_adds += (products[i].end - products[i].first) * in * products[i].out;
    outs += products[i].out;
  }
  const int shared = multiply_adds >= ALONE;
  const int64_t threads = shared ? threads_of(frame) : 1, fair = outs / (ITEMS_OF_THREAD * threads);
  for (int64_t i = 0; i < num_products; i++) {
    Product *p = products + i;
    const int64_t fits = BLOCK_BYTES / MAX(p->row_bytes, 1);
    p->outs_of_item = shared ? MAX(MIN(fits, fair) / BLOCK_OUTS * BLOCK_OUTS, BLOCK_OUTS) : p->out;
    p->num_items = (p->out + p->outs_of_item - 1) / p->outs_of_item;
    num_items += p->num_items;
  }
  run_items(frame, shared, num_items, run, products);
}

/* ---- products of many rows ----

   Sums of lanes take long where rows are short: a register is added up for each result. Many rows go another way to the same
   sums. x and weights are turned, so that a register has one place of a step of WIDTH outputs, and is multiplied by that place of
   a row. Then lane after lane is made, and two are added as soon as `sum_lanes` can add them:

       lanes 0 8   4 12   2 10   6 14   1 9 ..         0+8, 4+12, 0+8+4+12, 2+10, ..

       x         [rows / 16, 16 lanes, steps, 16 rows]         turned once for all outputs
       weights   [16 lanes, steps, vectors, WIDTH outputs]     turned by each item of work, for its outputs   */

#if !FLOAT_TILES
#if defined(__AVX512F__)
#define TURNED_ROWS 8 /* of x, that meet registers of weights together; they divide SIDE */
#else
#define TURNED_ROWS 4
#endif
#define TURNED_VECTORS 3         /* registers of weights that they meet: a block */
#define TURNED_OUTS (TURNED_VECTORS * WIDTH)
#define TURNED_FROM 192          /* rows of each expert on average from which on this is faster */
#define TURNED_ITEM 512          /* rows of an item of work */
#define TURNED_BYTES (128 << 10) /* most bytes of weights that an item turns, if they are of more than one block */

/* Bytes of `width` turned rows. */
INLINE int64_t turned_bytes(int64_t steps, int64_t width) { return LANES * steps * X_VECTORS * width * 4; }

/* Rows that become columns of `to`, which has `width` of them; of `columns`, at most SIDE, those without a row are zeros. */
typedef struct {
  const char *from[SIDE];
  int64_t rows, columns, width;
  uint32_t *to;
  const char *ahead; /* rows that are turned next, which are fetched meanwhile; or NULL */
} Turn;

static void turn(const Turn *t, int64_t row_bytes, int64_t steps) {
  for (int64_t step = 0; step < steps; step++) {
    const int64_t there = MIN(row_bytes - step * STEP_BYTES, STEP_BYTES);
    for (int i = 0; t->ahead && i < SIDE; i++) __builtin_prefetch(t->ahead + (step * SIDE + i) * STEP_BYTES, 0, 2);
#if defined(__AVX512BW__)
    __m512i x[SIDE];
    const __mmask16 columns = (__mmask16)(0xffff >> (SIDE - t->columns));
    for (int j = 0; j < SIDE; j++)
      x[j] = j < t->rows ? (__m512i)load_bits(t->from[j] + step * STEP_BYTES, 0, there) : _mm512_setzero_si512();
    transpose(x);
    for (int l = 0; l < LANES; l++)
      for (int v = 0; v < X_VECTORS; v++)
        _mm512_mask_storeu_ps(t->to + ((l * steps + step) * X_VECTORS + v) * t->width, columns, (__m512)widen((vu)x[l], v));
#else
    for (int64_t j = 0; j < t->columns; j++)
      for (int part = 0; part < PARTS; part++)
        for (int v = 0; v < X_VECTORS; v++) {
          const vu found = j < t->rows ? (vu)widen(load_bits(t->from[j] + step * STEP_BYTES, part, there), v) : (vu){0};
          for (int l = 0; l < WIDTH; l++) t->to[(((part * WIDTH + l) * steps + step) * X_VECTORS + v) * t->width + j] = found[l];
        }
#endif
  }
}

/* Rows of x, turned. */
typedef struct {
  const char *from;
  uint32_t *to;
  const Sorted *rows;
  int64_t row_bytes, steps;
} Turning;

static void run_turning(const void *task, int64_t item) {
  const Turning *turning = task;
  const int32_t *at = turning->rows->at + item * SIDE;
  Turn t = {.columns = SIDE, .width = SIDE, .to = turning->to + item * turned_bytes(turning->steps, SIDE) / 4};
  for (; t.rows < SIDE && at[t.rows] >= 0; t.rows++)
    t.from[t.rows] = turning->from + at[t.rows] / turning->rows->share * turning->row_bytes;
  turn(&t, turning->row_bytes, turning->steps);
}

/* Cache lines that are fetched while others are multiplied, `num` of them at a time. */
typedef struct {
  const char *next, *end;
  int64_t num;
} Ahead;

INLINE void fetch(Ahead *ahead) {
  const char *until = MIN(ahead->next + ahead->num * STEP_BYTES, ahead->end);
  for (; ahead->next < until; ahead->next += STEP_BYTES) __builtin_prefetch(ahead->next, 0, 2);
}

/* The results of TURNED_ROWS rows, of which `num` are there, and of `vectors` of outputs from `o` on. */
INLINE void turned_block(int vectors, const Product *p, const uint32_t *x, const vf *weights, int64_t r, int64_t num, int64_t o,
                         Ahead *ahead) {
  vf sums[TURNED_ROWS * TURNED_VECTORS], held[4][TURNED_ROWS * TURNED_VECTORS];
  const int64_t steps = p->steps * X_VECTORS;
  for (int64_t j = 0; j < num; j++)
    for (int i = 0; i < vectors; i++) __builtin_prefetch(p->y + p->at[r + j] * p->out + MIN(o + i * WIDTH, p->out - 1), 1);
  for (int n = 0; n < LANES; n++) {
    const int lane = (n & 1) << 3 | (n & 2) << 1 | (n & 4) >> 1 | n >> 3;
    const uint32_t *of_rows = x + lane * steps * SIDE;
    const vf *of_outs = weights + lane * steps * vectors;
    fetch(ahead);
#pragma GCC unroll 24
    for (int i = 0; i < TURNED_ROWS * vectors; i++) sums[i] = (vf){0};
    for (int64_t step = 0; step < steps; step++, of_rows += SIDE, of_outs += vectors)
#pragma GCC unroll 8
      for (int j = 0; j < TURNED_ROWS; j++) {
        vf of_row = (vf)((vu){0} + of_rows[j]);
        KEEP(of_row);
#pragma GCC unroll 3
        for (int i = 0; i < vectors; i++) sums[j * vectors + i] = add_products(sums[j * vectors + i], of_row, of_outs[i]);
      }
    int level = 0;
    for (; n >> level & 1; level++)
#pragma GCC unroll 24
      for (int i = 0; i < TURNED_ROWS * vectors; i++) sums[i] += held[level][i];
    if (n < LANES - 1)
#pragma GCC unroll 24
      for (int i = 0; i < TURNED_ROWS * vectors; i++) held[level][i] = sums[i];
  }
  for (int64_t j = 0; j < num; j++)
    for (int i = 0; i < vectors; i++) {
      const int64_t first = o + i * WIDTH, outs = MIN(p->out - first, WIDTH);
      float *y = p->y + p->at[r + j] * p->out + first;
      if (outs == WIDTH) store_f32(y, sums[j * vectors + i]);
      else if (outs > 0) memcpy(y, &sums[j * vectors + i], sizeof(float) * (size_t)outs);
    }
}

typedef struct {
  const Product *products;
  _Atomic int *failed;
  int64_t threads;
} TurnedProducts;

/* Blocks of outputs of a product, all of nearly as many vectors. */
INLINE int64_t turned_blocks(const Product *p) { return (p->out + TURNED_OUTS - 1) / TURNED_OUTS; }

/* Vectors of outputs before one of them. */
INLINE int64_t vectors_before(const Product *p, int64_t block) { return block * ((p->out + WIDTH - 1) / WIDTH) / turned_blocks(p); }

/* Some blocks of outputs of some rows. The rows meet one block after the other, so that those of y are written together. */
static void run_turned(const void *task, int64_t item) {
  const TurnedProducts *turned = task;
  const Product *p = turned->products;
  for (; item >= p->num_items; p++) item -= p->num_items;
  const int64_t items = (turned_blocks(p) + p->outs_of_item - 1) / p->outs_of_item, first_block = item % items * p->outs_of_item;
  const int64_t end_block = MIN(first_block + p->outs_of_item, turned_blocks(p)), of_block = turned_bytes(p->steps, TURNED_OUTS);
  const int64_t first = p->first + item / items * TURNED_ITEM, end = MIN(first + TURNED_ITEM, p->end);
  char *weights = aligned_alloc(STEP_BYTES, whole_steps((end_block - first_block) * of_block));
  if (!weights) {
    atomic_store(turned->failed, 1);
    return;
  }
  for (int64_t block = first_block; block < end_block; block++) {
    const int64_t o = vectors_before(p, block) * WIDTH, width = vectors_before(p, block + 1) * WIDTH - o;
    uint32_t *to = (uint32_t *)(weights + (block - first_block) * of_block);
    for (int64_t i = 0; i < width; i += SIDE) {
      const char *from = p->weight + (o + i) * p->row_bytes;
      Turn t = {.columns = MIN(width - i, SIDE), .width = width, .to = to + i, .ahead = from + SIDE * p->row_bytes};
      for (; t.rows < MIN(p->out - o - i, t.columns); t.rows++) t.from[t.rows] = from + t.rows * p->row_bytes;
      turn(&t, p->row_bytes, p->steps);
    }
  }
  /* What this thread probably turns next. */
  const int64_t next_block = MIN(end_block + (turned->threads - 1) * p->outs_of_item, turned_blocks(p));
  const int64_t last_block = MIN(next_block + p->outs_of_item, turned_blocks(p));
  Ahead ahead = {p->weight + vectors_before(p, next_block) * WIDTH * p->row_bytes,
                 p->weight + vectors_before(p, last_block) * WIDTH * p->row_bytes, 0};
  const int64_t fetches = (end - first + TURNED_ROWS - 1) / TURNED_ROWS * (end_block - first_block) * LANES;
  ahead.num = (ahead.end - ahead.next) / STEP_BYTES / fetches + 1;
  for (int64_t r = first; r < end; r += TURNED_ROWS)
    for (int64_t block = first_block; block < end_block; block++) {
      const uint32_t *x = (const uint32_t *)p->x + r / SIDE * turned_bytes(p->steps, SIDE) / 4 + r % SIDE;
      const vf *of_outs = (const vf *)(weights + (block - first_block) * of_block);
      const int64_t num = MIN(end - r, TURNED_ROWS), before = vectors_before(p, block), o = before * WIDTH;
      const int64_t vectors = vectors_before(p, block + 1) - before;
      if (vectors == 3) turned_block(3, p, x, of_outs, r, num, o, &ahead);
      else if (vectors == 2) turned_block(2, p, x, of_outs, r, num, o, &ahead);
      else turned_block(1, p, x, of_outs, r, num, o, &ahead);
    }
  free(weights);
}

/* Runs products of rows that are turned. Returns whether there was memory for them. */
static int run_turned_products(XLA_FFI_CallFrame *frame, Product *products, int64_t num_products) {
  _Atomic int failed = 0;
  int64_t num_items = 0, threads = threads_of(frame);
  for (int64_t i = 0; i < num_products; i++) {
    Product *p = products + i;
    const int64_t chunks = (p->end - p->first + TURNED_ITEM - 1) / TURNED_ITEM, blocks = turned_blocks(p);
    const int64_t fits = TURNED_BYTES / turned_bytes(MAX(p->steps, 1), TURNED_OUTS), fair = blocks * chunks / (ITEMS_OF_THREAD * threads);
    p->outs_of_item = MAX(MIN(fits, fair), 1);
    p->num_items = (blocks + p->outs_of_item - 1) / p->outs_of_item * chunks;
    num_items += p->num_items;
  }
  run_items(frame, 1, num_items, run_turned, &(TurnedProducts){products, &failed, threads});
  return !failed;
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
    _mm512_mask_storeu_ps(p->y + p->at[r + j] * p->out + o, mask, y);
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

INLINE void tile_item(int is_int8, const Product *p, int64_t item) {
  for (; item >= p->num_items; p++) item -= p->num_items;
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

static void run_int8_tiles(const void *task, int64_t item) { tile_item(1, task, item); }
#if FLOAT_TILES
static void run_float_tiles(const void *task, int64_t item) { tile_item(0, task, item); }
#endif
#endif

static XLA_FFI_Error *multiply_by_floats(XLA_FFI_CallFrame *frame, int by_ids) {
  if (answered(frame)) return NULL;
  Given given;
  if (!read_given(frame, by_ids, 0, &given)) return fail(frame, "products: unsupported arguments");
  const int64_t steps = (given.in + STEP_ITEMS - 1) / STEP_ITEMS, row_bytes = given.in * ITEM_BYTES;
#if FLOAT_TILES
  const Sorted rows = sort_rows(&given, SIDE);
  const int64_t prepared_bytes = gathered_bytes(rows.size, steps);
#else
  const int turned = given.rows * given.k >= TURNED_FROM * given.experts;
  const Sorted rows = sort_rows(&given, turned ? SIDE : 1);
  const int64_t of_row = turned ? turned_bytes(steps, 1) : x_stride_of(steps) * (int64_t)sizeof(vf);
  const int64_t prepared_bytes = (rows.size + SIDE - 1) / SIDE * SIDE * of_row;
#endif
  char *prepared = aligned_alloc(STEP_BYTES, whole_steps(prepared_bytes));
  int64_t num_products = 0;
  Product *products = products_of(&given, &rows, (Product){.x = prepared, .row_bytes = row_bytes, .steps = steps}, &num_products);
  int complete = rows.at && prepared && products;
  if (complete) {
#if FLOAT_TILES
    gather(frame, &(Gathering){given.x->data, prepared, &rows, 0, row_bytes, row_bytes, steps});
    run_products(frame, products, num_products, given.in, run_float_tiles);
#else
    if (turned) {
      run_items(frame, 1, rows.size / SIDE, run_turning, &(Turning){given.x->data, (uint32_t *)prepared, &rows, row_bytes, steps});
      complete = run_turned_products(frame, products, num_products);
    } else {
      const Spread spread = {given.x->data, (vf *)prepared, &rows, given.in, steps};
      run_items(frame, rows.num_rows * given.in >= ALONE, rows.size, run_spread, &spread);
      run_products(frame, products, num_products, given.in, run_float_product);
    }
#endif
  }
  free(products);
  free(prepared);
  free(rows.at);
  return complete ? NULL : fail(frame, "products: out of memory");
}

/* (x [rows, in], weight [out, in], ...; used [rows] bool, if not all are) -> (y [rows, out] float32, ...): products of the same
   rows with several weights. */
XLA_FFI_Error *detspec_linear(XLA_FFI_CallFrame *frame) { return multiply_by_floats(frame, 0); }

/* (x [rows, in] or [rows, k, in], ids [rows, k] int32, weight [E, out, in], ...; used [rows] bool, if not all are) ->
   (y [rows, k, out] float32, ...): products of each row with the matrices that its ids name. Without such a matrix y is zeros. */
XLA_FFI_Error *detspec_experts(XLA_FFI_CallFrame *frame) { return multiply_by_floats(frame, 1); }
