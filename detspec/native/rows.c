/* Sums over rows, gates, and rows and pages that are moved. */

/* ---- sums over rows ---- */

typedef struct {
  const float *from, *by; /* products of both are added, if there are two */
  float *to;
  int64_t length;
} Sums;

/* sum [PARTS] = the sum of `vectors` times LANES numbers or products, by halves that are powers of two. */
static void sum_vectors(const float *from, const float *by, int64_t vectors, vf *sum) {
  for (int part = 0; part < PARTS; part++) sum[part] = all(0.0f);
  if (vectors <= 8) {
    for (int64_t i = 0; i < vectors * LANES; i += LANES)
      for (int part = 0; part < PARTS; part++) {
        const vf numbers = load_f32(from + i + part * WIDTH);
        sum[part] += by ? numbers * load_f32(by + i + part * WIDTH) : numbers;
      }
    return;
  }
  int64_t half = 8;
  while (2 * half < vectors) half *= 2;
  vf rest[PARTS];
  sum_vectors(from, by, half, sum);
  sum_vectors(from + half * LANES, by ? by + half * LANES : NULL, vectors - half, rest);
  for (int part = 0; part < PARTS; part++) sum[part] += rest[part];
}

static void run_sum(const void *task, int64_t row) {
  const Sums *sums = task;
  const int64_t whole = sums->length / LANES, rest_bytes = sums->length % LANES * (int64_t)sizeof(float);
  const float *from = sums->from + row * sums->length, *by = sums->by ? sums->by + row * sums->length : NULL;
  vf sum[PARTS];
  sum_vectors(from, by, whole, sum);
  for (int part = 0; part < PARTS; part++) {
    const vf numbers = (vf)load_bits((const char *)(from + whole * LANES), part, rest_bytes);
    sum[part] += by ? numbers * (vf)load_bits((const char *)(by + whole * LANES), part, rest_bytes) : numbers;
  }
  sums->to[row] = sum_lanes(sum);
}

/* float32 [rows, n], or two of which products are added -> sums of the rows, float32 [rows] */
XLA_FFI_Error *detspec_sum(XLA_FFI_CallFrame *frame) {
  if (answered(frame)) return NULL;
  XLA_FFI_Buffer **args = (XLA_FFI_Buffer **)frame->args.args, **rets = (XLA_FFI_Buffer **)frame->rets.rets;
  const XLA_FFI_Buffer *last = args[frame->args.size - 1];
  if (args[0]->dtype != XLA_FFI_DataType_F32 || last->dtype != XLA_FFI_DataType_F32)
    return fail(frame, "detspec_sum: unsupported arguments");
  const int64_t rows = args[0]->dims[0], length = args[0]->dims[1];
  const Sums sums = {args[0]->data, frame->args.size > 1 ? last->data : NULL, rets[0]->data, length};
  run_items(frame, rows * length >= ALONE, rows, run_sum, &sums);
  return NULL;
}

/* ---- gates, of products that are there: others are made with their products, see `products.c` ---- */

typedef struct {
  const char *gate, *up;
  char *y;
  int64_t length;
  int activation;
} Gates;

static void run_gate(const void *task, int64_t row) {
  const Gates *gates = task;
  const int64_t at = row * gates->length;
  gate_row(gates->activation, gates->gate + at * 4, gates->up + at * 4, gates->y + at * ITEM_BYTES, gates->length);
}

/* (gate, up [rows, n] float32; activation) -> activation(gate) * up [rows, n] */
XLA_FFI_Error *detspec_gate(XLA_FFI_CallFrame *frame) {
  if (answered(frame)) return NULL;
  XLA_FFI_Buffer **args = (XLA_FFI_Buffer **)frame->args.args, *y = *(XLA_FFI_Buffer **)frame->rets.rets;
  if (args[0]->dtype != XLA_FFI_DataType_F32 || args[1]->dtype != XLA_FFI_DataType_F32 || dtype_of(y->dtype) != DTYPE)
    return fail(frame, "detspec_gate: unsupported arguments");
  const int activation = *(const int32_t *)attribute(frame, 0);
  const Gates gates = {args[0]->data, args[1]->data, y->data, y->dims[1], activation};
  run_items(frame, y->dims[0] * y->dims[1] >= ALONE / 16, y->dims[0], run_gate, &gates);
  return NULL;
}

/* ---- moving rows and pages: XLA converts whole arrays of bfloat16 for that ---- */

#define MANY_LINES (1 << 10) /* of the cache, that one thread has written before another would have woken up */

/* Keys or values of all rows on their way into pages. */
typedef struct {
  Item *pages;
  const Item *new;
  const int32_t *page_ids, *slots;
  const char *is_broken; /* rows that get numbers `in_place_of` theirs */
  Item in_place_of;
  int64_t rows, kv_heads, given, size, page, slot_stride, head_stride;
} Appending;

/* One row and KV head. All its lines are fetched before any is written: each key has as many as it has numbers. */
static void append_one(const Appending *a, int64_t r, int64_t kv) {
  Item *to = a->pages + (a->page_ids[r] * a->kv_heads + kv) * a->size * a->page + a->slots[r] * a->slot_stride;
  const Item *from = a->new + (r * a->kv_heads + kv) * a->given;
  for (int64_t h = 0; a->head_stride > 1 && h < a->size; h++) __builtin_prefetch(to + h * a->head_stride, 1);
  for (int64_t h = 0; h < a->given; h++) to[h * a->head_stride] = a->is_broken[r] ? a->in_place_of : from[h];
  for (int64_t h = a->given; h < a->size; h++) to[h * a->head_stride] = 0;
}

/* Rows `r` to `r + n - 1`, none broken, in slots that follow each other: line after line of keys, row after row of values. */
static void append_run(const Appending *a, int64_t r, int64_t n, int64_t kv) {
  Item *to = a->pages + (a->page_ids[r] * a->kv_heads + kv) * a->size * a->page + a->slots[r] * a->slot_stride;
  const Item *from = a->new + (r * a->kv_heads + kv) * a->given;
  const int64_t row = a->kv_heads * a->given;
  if (a->head_stride == 1)
    for (int64_t i = 0; i < n; i++, from += row, to += a->size) {
      memcpy(to, from, (size_t)a->given * sizeof(Item));
      memset(to + a->given, 0, (size_t)(a->size - a->given) * sizeof(Item));
    }
  else
    for (int64_t h = 0; h < a->size; h++, to += a->head_stride)
      for (int64_t i = 0; i < n; i++) to[i] = h < a->given ? from[i * row + h] : 0;
}

#define RUN 16 /* rows, whose numbers are read again for each line: they stay in the first cache */

/* How many rows from `r` on `append_run` may take together. */
static int64_t run_from(const Appending *a, int64_t r) {
  int64_t n = 0;
  for (; n < MIN(RUN, a->rows - r) && !a->is_broken[r + n]; n++)
    if (a->page_ids[r + n] != a->page_ids[r] || a->slots[r + n] != a->slots[r] + n) break;
  return n;
}

/* All rows of a KV head, one after the other: those without a token share a slot of scratch. Keys come first. */
static void run_append(const void *task, int64_t item) {
  const Appending *a = task;
  const int64_t kv = item % a->kv_heads;
  a += item / a->kv_heads;
  for (int64_t r = 0; r < a->rows;) {
    const int64_t n = run_from(a, r);
    if (n > 1) append_run(a, r, n, kv);
    else append_one(a, r, kv);
    r += MAX(n, 1);
  }
}

#define EXPONENT (DTYPE == F32 ? 0x7f800000u : DTYPE == BF16 ? 0x7f807f80u : 0x7c007c00u) /* of the numbers in four bytes */
#define LEAST_EXPONENT (DTYPE == F32 ? 0x00800000u : DTYPE == BF16 ? 0x00800080u : 0x04000400u)
#define NOT_A_NUMBER ((Item)(EXPONENT | EXPONENT >> 1))

/* Whether some of `n` numbers are not finite: the exponent of one is all ones, and overflows into the sign if one is added. */
static int has_broken(const Item *numbers, int64_t n) {
  const int64_t num_bytes = n * ITEM_BYTES, step = PARTS * REGISTER_BYTES;
  vu found = {0};
  for (int64_t at = 0; at < num_bytes; at += step)
    for (int part = 0; part < PARTS; part++)
      found |= (load_bits((const char *)numbers + at, part, num_bytes - at) & EXPONENT) + LEAST_EXPONENT;
  uint32_t any = 0;
  for (int i = 0; i < WIDTH; i++) any |= found[i];
  return (any & (EXPONENT + LEAST_EXPONENT)) != 0;
}

/* (key pages, value pages, keys [R, K, H], values [R, K, H], page ids [R], slots [R]; key_slot_axis) -> both pages, which lie where
   the arguments lie. Heads of pages that are longer than those of rows end in zeros. Keys of a row that is not finite are nan, and
   its values zeros: see `append_fn`. */
XLA_FFI_Error *detspec_append(XLA_FFI_CallFrame *frame) {
  if (answered(frame)) return NULL;
  XLA_FFI_Buffer **args = (XLA_FFI_Buffer **)frame->args.args, **rets = (XLA_FFI_Buffer **)frame->rets.rets;
  const int64_t rows = args[2]->dims[0], kv_heads = args[2]->dims[1];
  char *is_broken = malloc((size_t)rows);
  if (!is_broken) return fail(frame, "detspec_append: out of memory");
  Appending both[2];
  int is_fit = 1;
  int64_t lines = 0;
  for (int i = 0; i < 2; i++) {
    const XLA_FFI_Buffer *pages = rets[i], *new = args[2 + i];
    const int turned = i == 0 && *(const int32_t *)attribute(frame, 0) == 3;
    const int64_t size = pages->dims[turned ? 2 : 3], page = pages->dims[turned ? 3 : 2];
    is_fit &= dtype_of(pages->dtype) == DTYPE && new->dtype == pages->dtype && args[i]->data == pages->data;
    is_fit &= new->dims[0] == rows && new->dims[1] == kv_heads && pages->dims[1] == kv_heads;
    both[i] = (Appending){
        .pages = pages->data,
        .new = new->data,
        .page_ids = args[4]->data,
        .slots = args[5]->data,
        .is_broken = is_broken,
        .in_place_of = i == 0 ? NOT_A_NUMBER : 0,
        .rows = rows,
        .kv_heads = kv_heads,
        .given = new->dims[2],
        .size = size,
        .page = page,
        .slot_stride = turned ? 1 : size,
        .head_stride = turned ? page : 1,
    };
    lines += rows * kv_heads * (turned ? size : whole_steps(size * ITEM_BYTES) / STEP_BYTES);
  }
  if (is_fit) {
    for (int64_t r = 0; r < rows; r++) {
      is_broken[r] = 0;
      for (int i = 0; i < 2; i++) {
        const int64_t n = kv_heads * both[i].given;
        is_broken[r] |= (char)has_broken(both[i].new + r * n, n);
      }
    }
    run_items(frame, lines >= MANY_LINES, 2 * kv_heads, run_append, both);
  }
  free(is_broken);
  return is_fit ? NULL : fail(frame, "detspec_append: unsupported arguments");
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
