/* Attention over a paged cache.

   A query head of one position is a row. It meets the pages of its sequence in order, with online softmax in float32:

       score = soft cap(scale * q . k) - slope * distance      lanes are slots of the page, products are added over the head
       m     = largest score so far, l = sum of exp(score - m), o = sum of exp(score - m) * v      lanes are of the head

   Slots after the row's position, or before its window, have probability 0. Slots and pages after the last position, and pages
   before the window, would change nothing, so they are left out. Keys are [num_pages, K, H, page], values [num_pages, K, page, H].

   In int8 they have scales [num_pages, K, page]: q . k is multiplied by that of the key, exp(score - m) by that of the value once
   l has it. */

#define MAX_HEAD 512
#define MAX_PAGE 512
#define TILE 4 /* rows that meet a page together */
#if defined(__AVX__) && !defined(__AVX512F__)
#define REGISTERS 3 /* of slots or of the head, for each row of a tile */
#else
#define REGISTERS 4
#endif
#define MASK_VALUE -1e30f
#define NO_WINDOW INT32_MAX

/* products [rows, columns] = factors [rows, n] @ matrix [n, columns], each summed over n ascending; rows of the matrix are `stride`
   numbers apart. */
typedef void Multiply(int rows, const float *factors, int64_t factors_of_row, const char *matrix, int64_t num_rows,
                      int64_t columns, int64_t stride, float *products, int64_t products_of_row);

typedef struct {
  const char *q, *k, *v;
  const float *k_scale, *v_scale; /* of a cache in int8, else NULL */
  Multiply *multiply;             /* by keys or values */
  int64_t item_bytes;             /* of these */
  const int32_t *tables, *positions;
  const float *slopes; /* of heads; all 0 without linear biases */
  float *y, *sums; /* sums: m and l of each query, or NULL */
  int64_t windows, window, heads, head_dim, kv_heads, page, max_pages;
  int q_dtype;
  float scale, cap; /* cap 0: none */
  int32_t sliding_window;
} Attention;

/* cap * tanh(x / cap) */
INLINE vf soft_cap(vf x, float cap) {
  vf grown = exponential(x * all(2 / cap), 0);
  return all(cap) * (grown / (grown + all(2.0f)));
}

INLINE float largest(vf x) {
  for (int half = WIDTH / 2; half; half /= 2)
    for (int i = 0; i < half; i++) x[i] = x[i] > x[i + half] ? x[i] : x[i + half];
  return x[0];
}

/* sums[r] = sum over n of factors[r][n] * row n of `matrix`, for `registers` registers of each row of the matrix. */
INLINE void add_rows(int dtype, int rows, int registers, const float *factors, int64_t factors_of_row, const char *matrix,
                     int64_t num_rows, int64_t row_bytes, float *sums, int64_t sums_of_row) {
  vf sum[TILE * REGISTERS];
#pragma GCC unroll 16
  for (int i = 0; i < rows * registers; i++) sum[i] = (vf){0};
  for (int64_t n = 0; n < num_rows; n++) {
#pragma GCC unroll 4
    for (int i = 0; i < registers; i++) {
      vf x = load(dtype, matrix + n * row_bytes + i * WIDTH * bytes_of(dtype));
#pragma GCC unroll 4
      for (int r = 0; r < rows; r++) {
        vf *of_row = sum + r * registers + i;
        *of_row = multiply_add(all(factors[r * factors_of_row + n]), x, *of_row);
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
    for (int i = 0; i < registers; i++) store_f32(sums + r * sums_of_row + i * WIDTH, sum[r * registers + i]);
}

/* `Multiply` by a matrix of `dtype`. */
INLINE void multiply(int dtype, int rows, const float *factors, int64_t factors_of_row, const char *matrix, int64_t num_rows,
                     int64_t columns, int64_t stride, float *products, int64_t products_of_row) {
  const int64_t row_bytes = stride * bytes_of(dtype);
  int64_t at = 0;
#define ADD_ROWS(ROWS, COUNT) \
  add_rows(dtype, ROWS, COUNT, factors, factors_of_row, matrix + at * bytes_of(dtype), num_rows, row_bytes, products + at, \
           products_of_row)
#define ADD_ALL_ROWS(COUNT) \
  for (; at + (COUNT) * WIDTH <= columns; at += (COUNT) * WIDTH) { \
    if (rows == 1) ADD_ROWS(1, COUNT); \
    if (rows == 2) ADD_ROWS(2, COUNT); \
    if (rows == 3) ADD_ROWS(3, COUNT); \
    if (rows == 4) ADD_ROWS(4, COUNT); \
  }
  ADD_ALL_ROWS(REGISTERS)
  ADD_ALL_ROWS(1)
#undef ADD_ALL_ROWS
#undef ADD_ROWS
}

static void multiply_floats(int rows, const float *factors, int64_t factors_of_row, const char *matrix, int64_t num_rows,
                            int64_t columns, int64_t stride, float *products, int64_t products_of_row) {
  multiply(DTYPE, rows, factors, factors_of_row, matrix, num_rows, columns, stride, products, products_of_row);
}

#if DTYPE == F32
static void multiply_int8(int rows, const float *factors, int64_t factors_of_row, const char *matrix, int64_t num_rows,
                          int64_t columns, int64_t stride, float *products, int64_t products_of_row) {
  multiply(S8, rows, factors, factors_of_row, matrix, num_rows, columns, stride, products, products_of_row);
}
#else
#define multiply_int8 NULL
#endif

/* What one row knows of the pages it has met. */
typedef struct {
  int64_t head, place; /* its query head, and where its query and its result begin */
  int32_t position;
  float m, l, rescale;
} Row;

/* Turns products of a row with the keys in `slots` of a page, which starts at position `first`, into probabilities; updates m and
   l. In int8 the page's scales begin at `scales`. */
static void soften(const Attention *a, Row *row, int64_t first, int64_t scales, int64_t slots, float *p) {
  vi lane;
  for (int i = 0; i < WIDTH; i++) lane[i] = i;
  const float slope = a->slopes[row->head];
  vf most = all(MASK_VALUE);
  for (int64_t s = 0; s < slots; s += WIDTH) {
    vi distance = row->position - ((int32_t)(first + s) + lane);
    vi keep = (distance >= 0) & (distance < a->sliding_window);
    vf score = load_f32(p + s);
    if (a->k_scale) score *= load_f32(a->k_scale + scales + s);
    score *= all(a->scale);
    if (a->cap > 0) score = soft_cap(score, a->cap);
    if (slope != 0) score -= all(slope) * __builtin_convertvector(distance, vf);
    score = choose(keep, score, all(MASK_VALUE));
    most = larger(most, score);
    store_f32(p + s, score);
  }
  const float m = MAX(row->m, largest(most));
  row->rescale = exponential(all(row->m - m), 1)[0];
  row->m = m;
  vf sum[PARTS] = {{0}};
  for (int64_t s = 0; s < slots; s += LANES)
    for (int part = 0; part < PARTS; part++) {
      float *of_part = p + s + part * WIDTH;
      vf score = load_f32(of_part);
      vf probability = choose(score == all(MASK_VALUE), all(0.0f), exponential(score - all(m), 1));
      sum[part] += probability;
      if (a->v_scale) probability *= load_f32(a->v_scale + scales + s + part * WIDTH);
      store_f32(of_part, probability);
    }
  row->l = row->l * row->rescale + sum_lanes(sum);
}

/* `rows` rows from `first` on, of window `g` and KV head `kv`; row `w * group + j` is head `kv * group + j` at position `w`. */
static void attend(const Attention *a, int rows, int64_t g, int64_t kv, int64_t first) {
  const int64_t H = a->head_dim, page = a->page, group = a->heads / a->kv_heads;
  const int64_t page_bytes = page * H * a->item_bytes;
  float q[TILE * MAX_HEAD], o[TILE * MAX_HEAD], pv[TILE * MAX_HEAD], p[TILE * MAX_PAGE];
  Row row[TILE];
  int32_t last = 0, start = INT32_MAX;
  for (int r = 0; r < rows; r++) {
    const int64_t w = (first + r) / group, head = kv * group + (first + r) % group;
    row[r] = (Row){head, ((g * a->window + w) * a->heads + head) * H, a->positions[g * a->window + w], MASK_VALUE, 0, 0};
    last = MAX(last, row[r].position);
    start = MIN(start, a->sliding_window == NO_WINDOW ? 0 : MAX(row[r].position - a->sliding_window + 1, 0));
    for (int64_t h = 0; h < H; h += WIDTH) {
      store_f32(q + r * H + h, load(a->q_dtype, a->q + (row[r].place + h) * bytes_of(a->q_dtype)));
      store_f32(o + r * H + h, (vf){0});
    }
  }
  for (int64_t block = start / page; block <= last / page; block++) {
    const int64_t page_id = a->tables[g * a->max_pages + MIN(block, a->max_pages - 1)];
    const int64_t place = page_id * a->kv_heads + kv, at = place * page_bytes;
    const int64_t used = MIN(last + 1 - block * page, page), slots = (used + LANES - 1) / LANES * LANES;
    a->multiply(rows, q, H, a->k + at, H, slots, page, p, page);
    for (int r = 0; r < rows; r++) soften(a, row + r, block * page, place * page, slots, p + r * page);
    a->multiply(rows, p, page, a->v + at, used, H, H, pv, H);
    for (int r = 0; r < rows; r++)
      for (int64_t h = r * H; h < (r + 1) * H; h += WIDTH)
        store_f32(o + h, multiply_add(load_f32(o + h), all(row[r].rescale), load_f32(pv + h)));
  }
  for (int r = 0; r < rows; r++) {
    for (int64_t h = 0; h < H; h += WIDTH) store_f32(a->y + row[r].place + h, load_f32(o + r * H + h) / all(row[r].l));
    if (a->sums) memcpy(a->sums + 2 * (row[r].place / H), (float[]){row[r].m, row[r].l}, 2 * sizeof(float));
  }
}

/* Queries of window `g` that are not padding: those whose positions ascend, none in a window that needs no attention. */
static int64_t queries_of(const Attention *a, int64_t g) {
  const int32_t *position = a->positions + g * a->window;
  int64_t num = position[0] >= 0;
  while (num && num < a->window && position[num] > position[num - 1]) num++;
  return num;
}

/* One window and one KV head. */
static void run_attention(const void *task, int64_t item) {
  const Attention *a = task;
  const int64_t g = item / a->kv_heads, kv = item % a->kv_heads, group = a->heads / a->kv_heads, num = queries_of(a, g);
  for (int64_t first = 0; first < num * group; first += TILE) attend(a, (int)MIN(TILE, num * group - first), g, kv, first);
  for (int64_t w = num; w < a->window; w++) {
    const int64_t place = (g * a->window + w) * a->heads + kv * group;
    memset(a->y + place * a->head_dim, 0, sizeof(float) * group * a->head_dim);
    for (int64_t j = 0; a->sums && j < group; j++) memcpy(a->sums + 2 * (place + j), (float[]){0, 1}, 2 * sizeof(float));
  }
}

/* (q [G, W, N, H], keys, values, page tables [G, max_pages], positions [G, W], slopes [N]; cap, scale, sliding_window)
   -> float32 [G, W, N, H], and if asked for m and l, [G, W, N, 2]; keys and values in int8 are followed by two arguments more,
   their scales */
XLA_FFI_Error *detspec_attention(XLA_FFI_CallFrame *frame) {
  if (answered(frame)) return NULL;
  XLA_FFI_Buffer **args = (XLA_FFI_Buffer **)frame->args.args, **rets = (XLA_FFI_Buffer **)frame->rets.rets;
  const XLA_FFI_Buffer *q = args[0], *v = args[2], *positions = args[4];
  const int dtype = cache_dtype_of(v->dtype), scaled = dtype == S8;
  if (frame->args.size != (scaled ? 8 : 6) || frame->rets.size > 2 || frame->attrs.size != 3)
    return fail(frame, "detspec_attention: wrong number of arguments");
  Attention a = {
      .q = q->data,
      .k = args[1]->data,
      .v = v->data,
      .k_scale = scaled ? args[6]->data : NULL,
      .v_scale = scaled ? args[7]->data : NULL,
      .multiply = scaled ? multiply_int8 : multiply_floats,
      .item_bytes = bytes_of(dtype),
      .tables = args[3]->data,
      .positions = positions->data,
      .slopes = args[5]->data,
      .y = rets[0]->data,
      .sums = frame->rets.size == 2 ? rets[1]->data : NULL,
      .windows = positions->dims[0],
      .window = positions->dims[1],
      .heads = q->dims[1],
      .head_dim = q->dims[2],
      .kv_heads = v->dims[1],
      .page = v->dims[2],
      .max_pages = args[3]->dims[1],
      .q_dtype = dtype_of(q->dtype),
      .cap = *(const float *)attribute(frame, 0),
      .scale = *(const float *)attribute(frame, 1),
      .sliding_window = *(const int32_t *)attribute(frame, 2),
  };
  if (a.q_dtype < 0 || dtype < 0 || a.head_dim % LANES || a.page % LANES || a.head_dim > MAX_HEAD || a.page > MAX_PAGE)
    return fail(frame, "detspec_attention: unsupported arguments");
  int64_t multiply_adds = 0;
  for (int64_t g = 0; g < a.windows; g++)
    multiply_adds += 2 * (a.positions[(g + 1) * a.window - 1] + 1) * queries_of(&a, g) * a.heads * a.head_dim;
  run_items(frame, multiply_adds >= ALONE, a.windows * a.kv_heads, run_attention, &a);
  return NULL;
}
