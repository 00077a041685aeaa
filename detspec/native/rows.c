/* Sums over rows, and rows and pages that are moved. */

/* ---- sums over rows ---- */

typedef struct {
  const float *from;
  float *to;
  int64_t length;
} Sums;

/* sum [PARTS] = the sum of `vectors` times LANES numbers, by halves that are powers of two. */
static void sum_vectors(const float *from, int64_t vectors, vf *sum) {
  for (int part = 0; part < PARTS; part++) sum[part] = all(0.0f);
  if (vectors <= 8) {
    for (int64_t i = 0; i < vectors; i++)
      for (int part = 0; part < PARTS; part++) sum[part] += load_f32(from + i * LANES + part * WIDTH);
    return;
  }
  int64_t half = 8;
  while (2 * half < vectors) half *= 2;
  vf rest[PARTS];
  sum_vectors(from, half, sum);
  sum_vectors(from + half * LANES, vectors - half, rest);
  for (int part = 0; part < PARTS; part++) sum[part] += rest[part];
}

static void run_sum(const void *task, int64_t row) {
  const Sums *sums = task;
  const float *from = sums->from + row * sums->length;
  const int64_t whole = sums->length / LANES, rest = sums->length % LANES;
  vf sum[PARTS];
  sum_vectors(from, whole, sum);
  for (int part = 0; part < PARTS; part++)
    sum[part] += (vf)load_bits((const char *)(from + whole * LANES), part, rest * (int64_t)sizeof(float));
  sums->to[row] = sum_lanes(sum);
}

/* float32 [rows, n] -> sums of the rows, float32 [rows] */
XLA_FFI_Error *detspec_sum(XLA_FFI_CallFrame *frame) {
  if (answered(frame)) return NULL;
  XLA_FFI_Buffer **args = (XLA_FFI_Buffer **)frame->args.args, **rets = (XLA_FFI_Buffer **)frame->rets.rets;
  if (args[0]->dtype != XLA_FFI_DataType_F32) return fail(frame, "detspec_sum: unsupported arguments");
  const int64_t rows = args[0]->dims[0], length = args[0]->dims[1];
  const Sums sums = {args[0]->data, rets[0]->data, length};
  run_items(frame, rows * length >= ALONE, rows, run_sum, &sums);
  return NULL;
}

/* ---- moving rows and pages: XLA converts whole arrays of bfloat16 for that ---- */

#define MANY_LINES (1 << 10) /* of the cache, that one thread has written before another would have woken up */

typedef struct {
  Item *pages;
  const Item *new;
  const int32_t *page_ids, *slots;
  int64_t rows, kv_heads, given, size, page, slot_stride, head_stride;
} Appending;

/* One row and KV head. All its lines are fetched before any is written: each key has as many as it has numbers. */
static void append_one(const Appending *a, int64_t r, int64_t kv) {
  Item *to = a->pages + (a->page_ids[r] * a->kv_heads + kv) * a->size * a->page + a->slots[r] * a->slot_stride;
  const Item *from = a->new + (r * a->kv_heads + kv) * a->given;
  for (int64_t h = 0; a->head_stride > 1 && h < a->size; h++) __builtin_prefetch(to + h * a->head_stride, 1);
  for (int64_t h = 0; h < a->given; h++) to[h * a->head_stride] = from[h];
  for (int64_t h = a->given; h < a->size; h++) to[h * a->head_stride] = 0;
}

/* All rows of a KV head, one after the other: those without a token share a slot of scratch. */
static void run_append(const void *task, int64_t kv) {
  const Appending *a = task;
  for (int64_t r = 0; r < a->rows; r++) append_one(a, r, kv);
}

/* (pages, new [R, K, H], page ids [R], slots [R]; slot_axis) -> pages, which lie where the argument lies. Heads of pages that
   are longer than those of `new` end in zeros. */
XLA_FFI_Error *detspec_append(XLA_FFI_CallFrame *frame) {
  if (answered(frame)) return NULL;
  XLA_FFI_Buffer **args = (XLA_FFI_Buffer **)frame->args.args, **rets = (XLA_FFI_Buffer **)frame->rets.rets;
  const XLA_FFI_Buffer *pages = rets[0], *new = args[1];
  if (dtype_of(pages->dtype) != DTYPE || new->dtype != pages->dtype || args[0]->data != pages->data)
    return fail(frame, "detspec_append: unsupported arguments");
  const int keys = *(const int32_t *)attribute(frame, 0) == 3;
  const int64_t kv_heads = pages->dims[1], size = pages->dims[keys ? 2 : 3], page = pages->dims[keys ? 3 : 2];
  const Appending a = {
      .pages = pages->data,
      .new = new->data,
      .page_ids = args[2]->data,
      .slots = args[3]->data,
      .rows = new->dims[0],
      .kv_heads = kv_heads,
      .given = new->dims[2],
      .size = size,
      .page = page,
      .slot_stride = keys ? 1 : size,
      .head_stride = keys ? page : 1,
  };
  const int64_t lines = a.rows * kv_heads * (keys ? size : whole_steps(size * ITEM_BYTES) / STEP_BYTES);
  run_items(frame, lines >= MANY_LINES, kv_heads, run_append, &a);
  return NULL;
}

/* (values, scales, new [R, K, H], page ids [R], slots [R]; slot_axis) -> (values, scales), which lie where the arguments lie: the
   same for pages in int8. Each row [H] of `new` is rounded as rows of a product are. */
XLA_FFI_Error *detspec_append_int8(XLA_FFI_CallFrame *frame) {
  if (answered(frame)) return NULL;
  XLA_FFI_Buffer **args = (XLA_FFI_Buffer **)frame->args.args, **rets = (XLA_FFI_Buffer **)frame->rets.rets;
  const XLA_FFI_Buffer *pages = rets[0], *new = args[2];
  const int keys = *(const int32_t *)attribute(frame, 0) == 3, dtype = dtype_of(new->dtype);
  const int64_t kv_heads = pages->dims[1], size = pages->dims[keys ? 2 : 3], page = pages->dims[keys ? 3 : 2];
  const int64_t given = new->dims[2], slot_stride = keys ? 1 : size, head_stride = keys ? page : 1;
  if (pages->dtype != XLA_FFI_DataType_S8 || dtype < 0 || size % WIDTH || args[0]->data != pages->data || args[1]->data != rets[1]->data)
    return fail(frame, "detspec_append_int8: unsupported arguments");
  const int32_t *page_ids = args[3]->data, *slots = args[4]->data;
  const char *from = new->data;
  for (int64_t r = 0; r < new->dims[0]; r++)
    for (int64_t kv = 0; kv < kv_heads; kv++, from += given * bytes_of(dtype)) {
      const int64_t place = page_ids[r] * kv_heads + kv;
      int8_t *to = (int8_t *)pages->data + place * size * page + slots[r] * slot_stride;
      const float factor = rounding_factor(dtype, from, given, (float *)rets[1]->data + place * page + slots[r]);
      for (int64_t h = 0; h < size; h += WIDTH) {
        const vi rounded = round_some(dtype, from, h, given, factor);
        for (int n = 0; n < WIDTH; n++) to[(h + n) * head_stride] = (int8_t)rounded[n];
      }
    }
  return NULL;
}

/* (table [V, D], rows [R]) -> rows of the table [R, D]; a row outside of the table is its nearest one */
XLA_FFI_Error *detspec_take(XLA_FFI_CallFrame *frame) {
  if (answered(frame)) return NULL;
  XLA_FFI_Buffer **args = (XLA_FFI_Buffer **)frame->args.args, **rets = (XLA_FFI_Buffer **)frame->rets.rets;
  const XLA_FFI_Buffer *table = args[0];
  const int32_t *rows = args[1]->data;
  const int64_t row_bytes = table->dims[1] * ITEM_BYTES;
  if (moved_dtype_of(table->dtype) != DTYPE) return fail(frame, "detspec_take: unsupported arguments");
  for (int64_t r = 0; r < args[1]->dims[0]; r++) {
    const int64_t row = MIN(MAX(rows[r], 0), table->dims[0] - 1);
    memcpy((char *)rets[0]->data + r * row_bytes, (const char *)table->data + row * row_bytes, (size_t)row_bytes);
  }
  return NULL;
}

/* (pages [num_pages, ...], sources [n], targets [n]) -> pages, which lie where the argument lies. No target is a source of another
   page. */
XLA_FFI_Error *detspec_copy(XLA_FFI_CallFrame *frame) {
  if (answered(frame)) return NULL;
  XLA_FFI_Buffer **args = (XLA_FFI_Buffer **)frame->args.args, **rets = (XLA_FFI_Buffer **)frame->rets.rets;
  char *pages = rets[0]->data;
  const int dtype = cache_dtype_of(rets[0]->dtype);
  if (dtype < 0 || args[0]->data != pages) return fail(frame, "detspec_copy: unsupported arguments");
  int64_t page_bytes = bytes_of(dtype);
  for (int64_t axis = 1; axis < rets[0]->rank; axis++) page_bytes *= rets[0]->dims[axis];
  const int32_t *sources = args[1]->data, *targets = args[2]->data;
  for (int64_t i = 0; i < args[1]->dims[0]; i++)
    if (sources[i] != targets[i])
      memcpy(pages + targets[i] * page_bytes, pages + sources[i] * page_bytes, (size_t)page_bytes);
  return NULL;
}
