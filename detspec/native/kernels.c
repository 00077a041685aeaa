/* CPU kernels: products with weights, attention over a paged cache, and what moves rows and pages, as XLA custom calls.

   `library.py` compiles this file once for each dtype of a model or of its cache: DTYPE is F32, BF16 or F16. Weights in int8 are
   multiplied by rows of that dtype. What a cache in int8 needs is compiled with F32.

   Every result is a function of its own row in one order of operations. Neither the number of rows, nor the tiles, nor the
   threads change it: they only decide what is computed together. Nothing is left to the compiler either: multiply-adds are
   written as such, and the file is compiled without contraction. So bits follow from this text and the instruction set alone.

   Sums have 16 lanes on every processor: one register with AVX-512, two with AVX2, four with NEON. */

#include <math.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "xla/ffi/api/c_api.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define LANES 16
#if defined(__AVX512F__)
#define WIDTH 16 /* lanes of a register */
#elif defined(__AVX__)
#define WIDTH 8
#else
#define WIDTH 4
#endif
#define PARTS (LANES / WIDTH) /* registers of all lanes */
#define INLINE static inline __attribute__((always_inline))
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))

/* ---- registers ---- */

typedef float vf __attribute__((vector_size(4 * WIDTH)));
typedef int32_t vi __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t vu __attribute__((vector_size(4 * WIDTH)));

INLINE vf all(float x) { return x - (vf){0}; }

INLINE vf load_f32(const float *p) {
  vf x;
  memcpy(&x, p, sizeof x);
  return x;
}

INLINE void store_f32(float *p, vf x) { memcpy(p, &x, sizeof x); }

/* a * b + c, rounded once. */
INLINE vf multiply_add(vf a, vf b, vf c) {
#if defined(__AVX512F__)
  return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX__) && defined(__FMA__)
  return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  for (int i = 0; i < WIDTH; i++) c[i] = fmaf(a[i], b[i], c[i]);
  return c;
#endif
}

INLINE vf choose(vi mask, vf yes, vf no) { return (vf)((mask & (vi)yes) | (~mask & (vi)no)); }

INLINE vf larger(vf a, vf b) { return choose(a > b, a, b); }

/* ---- sums of lanes ---- */

/* The sum of LANES lanes: halves, then quarters, eighths and sixteenths are added. */
INLINE float sum_lanes(const vf *x) {
  vf sum[PARTS];
  for (int i = 0; i < PARTS; i++) sum[i] = x[i];
  for (int half = PARTS / 2; half; half /= 2)
    for (int i = 0; i < half; i++) sum[i] += sum[i + half];
  for (int half = WIDTH / 2; half; half /= 2)
    for (int i = 0; i < half; i++) sum[0][i] += sum[0][i + half];
  return sum[0][0];
}

/* The sums of eight times LANES lanes, in the order of `sum_lanes`. */
INLINE void sums_of_8(const vf *x, float *sums) {
#if defined(__AVX512F__)
#define SWAP(a, b, kind) _mm512_shuffle_f32x4((__m512)(a), (__m512)(b), kind)
  __m512 halves[4], quarters[2];
  for (int i = 0; i < 4; i++) halves[i] = _mm512_add_ps(SWAP(x[2 * i], x[2 * i + 1], 0x44), SWAP(x[2 * i], x[2 * i + 1], 0xee));
  for (int i = 0; i < 2; i++)
    quarters[i] = _mm512_add_ps(SWAP(halves[2 * i], halves[2 * i + 1], 0x88), SWAP(halves[2 * i], halves[2 * i + 1], 0xdd));
#undef SWAP
  /* Each 128-bit part now holds the quarter sums of one vector: of 0, 1, 2, 3 and of 4, 5, 6, 7. */
  __m512 eighths = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(quarters[0]), _mm512_castps_pd(quarters[1]))),
                                 _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(quarters[0]), _mm512_castps_pd(quarters[1]))));
  /* 0 0 4 4 | 1 1 5 5 | 2 2 6 6 | 3 3 7 7 */
  __m512 whole = _mm512_add_ps(eighths, _mm512_permute_ps(eighths, 0xb1));
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 2, 6, 10, 14, 0, 0, 0, 0, 0, 0, 0, 0);
  _mm256_storeu_ps(sums, _mm512_castps512_ps256(_mm512_permutexvar_ps(order, whole)));
#elif defined(__AVX2__)
  __m256 quarters[4], eighths[2];
  for (int i = 0; i < 4; i++) {
    const __m256 even = (__m256)(x[4 * i] + x[4 * i + 1]), odd = (__m256)(x[4 * i + 2] + x[4 * i + 3]);
    quarters[i] = _mm256_add_ps(_mm256_permute2f128_ps(even, odd, 0x20), _mm256_permute2f128_ps(even, odd, 0x31));
  }
  /* Each 128-bit part now holds the quarter sums of one vector: 0 | 1, 2 | 3 and so on. */
  for (int i = 0; i < 2; i++) {
    const __m256d two = _mm256_castps_pd(quarters[2 * i]), next = _mm256_castps_pd(quarters[2 * i + 1]);
    eighths[i] = _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(two, next)), _mm256_castpd_ps(_mm256_unpackhi_pd(two, next)));
  }
  /* 0 0 2 2 | 1 1 3 3 and 4 4 6 6 | 5 5 7 7 give 0 2 4 6 | 1 3 5 7 */
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  _mm256_storeu_ps(sums, _mm256_permutevar8x32_ps(_mm256_hadd_ps(eighths[0], eighths[1]), order));
#else
  for (int i = 0; i < 8; i++) sums[i] = sum_lanes(x + i * PARTS);
#endif
}

/* ---- numbers of two bytes ---- */

#define F32 0
#define BF16 1
#define F16 2
#define S8 3 /* of a cache, with F32 */

#define ITEM_BYTES ((int64_t)sizeof(Item))
#if defined(AMX) && DTYPE == BF16
#define FLOAT_TILES 1 /* weights of this dtype are multiplied by matrix tiles */
#else
#define FLOAT_TILES 0
#endif
#if DTYPE == F32
typedef uint32_t Item;
#else
typedef uint16_t Item;
#endif

static int dtype_of(XLA_FFI_DataType dtype) {
  return dtype == XLA_FFI_DataType_F32 ? F32 : dtype == XLA_FFI_DataType_BF16 ? BF16 : dtype == XLA_FFI_DataType_F16 ? F16 : -1;
}

/* As `dtype_of` for what is only moved: whole numbers of four bytes, too. */
static int moved_dtype_of(XLA_FFI_DataType dtype) { return dtype == XLA_FFI_DataType_S32 ? F32 : dtype_of(dtype); }

/* As `moved_dtype_of`, or -1 if this compilation has no functions for a cache of `dtype`. */
static int cache_dtype_of(XLA_FFI_DataType dtype) {
  if (DTYPE == F32 && dtype == XLA_FFI_DataType_S8) return S8;
  return moved_dtype_of(dtype) == DTYPE ? DTYPE : -1;
}

INLINE int64_t bytes_of(int dtype) { return dtype == F32 ? 4 : dtype == S8 ? 1 : 2; }

/* float16 bits in the low halves of lanes, as float32. Their own subnormal numbers are not lost where float32's are. */
INLINE vf from_f16(vu bits) {
  vu magnitude = bits & 0x7fff;
  vf normal = (vf)((magnitude << 13) + (112u << 23)); /* the exponents' biases are 15 and 127 */
  vf subnormal = __builtin_convertvector((vi)magnitude, vf) * all(0x1p-24f);
  vf found = choose((vi)(magnitude < 0x400), subnormal, normal);
  found = choose((vi)(magnitude >= 0x7c00), (vf)((vu)normal | 0x7f800000u), found);
  return (vf)((vu)found | (bits & 0x8000) << 16);
}

/* WIDTH numbers of a byte, as int32; gcc would widen them one by one. */
INLINE vi widen_bytes(const void *p) {
#if defined(__AVX512F__)
  return (vi)_mm512_cvtepi8_epi32(_mm_loadu_si128(p));
#elif defined(__AVX2__)
  return (vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64(p));
#else
  typedef int8_t vb __attribute__((vector_size(WIDTH)));
  typedef int16_t vs __attribute__((vector_size(2 * WIDTH)));
  vb bytes;
  memcpy(&bytes, p, sizeof bytes);
  return __builtin_convertvector(__builtin_convertvector(bytes, vs), vi);
#endif
}

/* WIDTH unsigned numbers of two bytes, as uint32; gcc would widen them by halves of a register. */
INLINE vu widen_halves(const void *p) {
#if defined(__AVX512F__)
  return (vu)_mm512_cvtepu16_epi32(_mm256_loadu_si256(p));
#elif defined(__AVX2__)
  return (vu)_mm256_cvtepu16_epi32(_mm_loadu_si128(p));
#else
  typedef uint16_t vh __attribute__((vector_size(2 * WIDTH)));
  vh halves;
  memcpy(&halves, p, sizeof halves);
  return __builtin_convertvector(halves, vu);
#endif
}

/* WIDTH numbers of `dtype`, as float32. */
INLINE vf load(int dtype, const void *p) {
  if (dtype == F32) return load_f32(p);
  if (dtype == S8) return __builtin_convertvector(widen_bytes(p), vf);
  const vu bits = widen_halves(p);
  return dtype == BF16 ? (vf)(bits << 16) : from_f16(bits);
}

/* ---- calls between XLA and this file ---- */

static XLA_FFI_Error *fail(XLA_FFI_CallFrame *frame, const char *message) {
  XLA_FFI_Error_Create_Args args = {XLA_FFI_Error_Create_Args_STRUCT_SIZE, NULL, message, XLA_FFI_Error_Code_INVALID_ARGUMENT};
  return frame->api->XLA_FFI_Error_Create(&args);
}

/* Whether a call of the interface went wrong; frees its error. */
static int failed(XLA_FFI_CallFrame *frame, XLA_FFI_Error *error) {
  if (!error) return 0;
  XLA_FFI_Error_Destroy_Args args = {XLA_FFI_Error_Destroy_Args_STRUCT_SIZE, NULL, error};
  frame->api->XLA_FFI_Error_Destroy(&args);
  return 1;
}

/* The value of an attribute, by its place among the attributes' names in alphabetical order. */
static const void *attribute(XLA_FFI_CallFrame *frame, int64_t place) {
  return ((XLA_FFI_Scalar *)frame->attrs.attrs[place])->value;
}

/* Whether XLA only asks for the version of this interface. */
static int answered(XLA_FFI_CallFrame *frame) {
  const __auto_type extension = frame->extension_start; /* its type has another name from jax 0.12 on */
  if (!extension || extension->type != XLA_FFI_Extension_Metadata) return 0;
  XLA_FFI_Metadata *metadata = ((XLA_FFI_Metadata_Extension *)extension)->metadata;
  metadata->api_version.major_version = XLA_FFI_API_MAJOR;
  metadata->api_version.minor_version = XLA_FFI_API_MINOR;
  return 1;
}

/* ---- threads ---- */

/* Threads of XLA treat subnormal numbers in more than one way; kernels round them to zero. Returns what to restore. */
INLINE uint64_t flush_subnormals(void) {
#if defined(__x86_64__)
  const uint64_t before = _mm_getcsr();
  _mm_setcsr((unsigned)before | 0x8040);
  return before;
#elif defined(__aarch64__)
  uint64_t before;
  __asm__ volatile("mrs %0, fpcr" : "=r"(before));
  __asm__ volatile("msr fpcr, %0" : : "r"(before | 1u << 24));
  return before;
#else
  return 0;
#endif
}

INLINE void restore_subnormals(uint64_t before) {
#if defined(__x86_64__)
  _mm_setcsr((unsigned)before);
#elif defined(__aarch64__)
  __asm__ volatile("msr fpcr, %0" : : "r"(before));
#endif
}

typedef void Run(const void *task, int64_t item);

typedef struct {
  Run *run;
  const void *task;
  int64_t num_items;
  _Atomic int64_t next, done;
  _Atomic int holders; /* threads that may still look at this */
} Work;

static void let_go(Work *work, int holders) {
  if (atomic_fetch_sub(&work->holders, holders) == holders) free(work);
}

/* Takes items until none is left. */
static void take_items(Work *work) {
  const uint64_t before = flush_subnormals();
  int64_t item;
  while ((item = atomic_fetch_add(&work->next, 1)) < work->num_items) {
    work->run(work->task, item);
    atomic_fetch_add(&work->done, 1);
  }
  restore_subnormals(before);
}

static void help(void *work) {
  take_items(work);
  let_go(work, 1);
}

INLINE void pause_once(void) {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

static int64_t threads_of(XLA_FFI_CallFrame *frame) {
  int64_t threads = 1;
  XLA_FFI_ThreadPool_NumThreads_Args args = {XLA_FFI_ThreadPool_NumThreads_Args_STRUCT_SIZE, NULL, frame->ctx, &threads};
  return failed(frame, frame->api->XLA_FFI_ThreadPool_NumThreads(&args)) ? 1 : threads;
}

/* Runs all items; `shared` by the threads of XLA's pool, or all by this one. A helper that comes too late finds none and leaves,
   so this waits for items that are being run, and never for a thread to become free. */
static void run_items(XLA_FFI_CallFrame *frame, int shared, int64_t num_items, Run *run, const void *task) {
  const int64_t helpers = shared ? MIN(threads_of(frame), num_items) - 1 : 0;
  Work *work = helpers > 0 ? malloc(sizeof *work) : NULL;
  if (!work) {
    Work own = {.run = run, .task = task, .num_items = num_items};
    take_items(&own);
    return;
  }
  *work = (Work){.run = run, .task = task, .num_items = num_items, .holders = (int)helpers + 1};
  for (int64_t i = 0; i < helpers; i++) {
    XLA_FFI_ThreadPool_Schedule_Args args = {XLA_FFI_ThreadPool_Schedule_Args_STRUCT_SIZE, NULL, frame->ctx, help, work};
    if (failed(frame, frame->api->XLA_FFI_ThreadPool_Schedule(&args))) let_go(work, 1);
  }
  take_items(work);
  while (atomic_load(&work->done) < num_items) pause_once();
  let_go(work, 1);
}

/* ---- products with weights ----

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

/* ---- products with int8 weights ----

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

/* ---- attention over a paged cache ----

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

/* exp(x) - 1 without `plus`, else exp(x). */
INLINE vf exponential(vf x, float plus) {
  const vf low = all(-87.0f), high = all(88.0f), magic = all(0x1.8p23f);
  vf in = choose(x < low, low, choose(x > high, high, x));
  vf shifted = multiply_add(in, all(0x1.715476p0f), magic); /* its last bits are the power of two */
  vf power = shifted - magic;
  vf r = multiply_add(power, all(-0x1.62e4p-1f), in); /* ln 2 in two parts; |r| <= ln(2) / 2 */
  r = multiply_add(power, all(-0x1.7f7d1cp-20f), r);
  vf series = all(1.0f / 5040);
  series = multiply_add(series, r, all(1.0f / 720));
  series = multiply_add(series, r, all(1.0f / 120));
  series = multiply_add(series, r, all(1.0f / 24));
  series = multiply_add(series, r, all(1.0f / 6));
  series = multiply_add(series, r, all(0.5f));
  series = multiply_add(series, r, all(1.0f));
  vf one_more = multiply_add(series, r, all(1.0f));
  vf found = (vf)((vi)one_more + ((vi)shifted << 23));
  if (plus == 0) found = choose(power == all(0.0f), series * r, found - all(1.0f));
  else found = choose(x < low, all(0.0f), found);
  return choose(x != x, x, found);
}

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

typedef struct {
  Item *pages;
  const Item *new;
  const int32_t *page_ids, *slots;
  int64_t kv_heads, given, size, page, slot_stride, head_stride;
} Appending;

INLINE Item *slot_of(const Appending *a, int64_t item) {
  const int64_t r = item / a->kv_heads, kv = item % a->kv_heads;
  return a->pages + (a->page_ids[r] * a->kv_heads + kv) * a->size * a->page + a->slots[r] * a->slot_stride;
}

/* One row and KV head. All its lines are fetched before any is written: each key has as many as it has numbers. */
static void run_append(const void *task, int64_t item) {
  const Appending *a = task;
  Item *to = slot_of(a, item);
  const Item *from = a->new + item * a->given;
  for (int64_t h = 0; a->head_stride > 1 && h < a->size; h++) __builtin_prefetch(to + h * a->head_stride, 1);
  for (int64_t h = 0; h < a->given; h++) to[h * a->head_stride] = from[h];
  for (int64_t h = a->given; h < a->size; h++) to[h * a->head_stride] = 0;
}

/* (pages, new [R, K, H], page ids [R], slots [R]; slot_axis) -> pages, which lie where the argument lies. Heads of pages that
   are longer than those of `new` end in zeros. Rows are of different slots. */
XLA_FFI_Error *detspec_append(XLA_FFI_CallFrame *frame) {
  if (answered(frame)) return NULL;
  XLA_FFI_Buffer **args = (XLA_FFI_Buffer **)frame->args.args, **rets = (XLA_FFI_Buffer **)frame->rets.rets;
  const XLA_FFI_Buffer *pages = rets[0], *new = args[1];
  if (dtype_of(pages->dtype) != DTYPE || new->dtype != pages->dtype || args[0]->data != pages->data)
    return fail(frame, "detspec_append: unsupported arguments");
  const int keys = *(const int32_t *)attribute(frame, 0) == 3;
  const int64_t kv_heads = pages->dims[1], size = pages->dims[keys ? 2 : 3], page = pages->dims[keys ? 3 : 2];
  const Appending a = {
      pages->data, new->data, args[2]->data, args[3]->data, kv_heads, new->dims[2], size, page, keys ? 1 : size, keys ? page : 1,
  };
  for (int64_t item = 0; item < new->dims[0] * kv_heads; item++) run_append(&a, item);
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

/* ---- what the machine can do at most ---- */

#define CEILING_ITEMS 64 /* items of work; each gives one result, so that nothing is left out */
#define PEAK_SUMS 12

typedef struct {
  const char *from;
  float *to;
  int64_t item_bytes, repeats;
} Ceiling;

static void run_read(const void *task, int64_t item) {
  const Ceiling *ceiling = task;
  const char *from = ceiling->from + item * ceiling->item_bytes;
  vu mixed[PARTS] = {{0}};
  for (int64_t at = 0; at < ceiling->item_bytes; at += STEP_BYTES)
    for (int part = 0; part < PARTS; part++) mixed[part] ^= load_bits(from + at, part, STEP_BYTES);
  for (int part = 1; part < PARTS; part++) mixed[0] ^= mixed[part];
  ceiling->to[item] = (float)mixed[0][0];
}

#if FLOAT_TILES
static void run_multiply_adds(const void *task, int64_t item) {
  const Ceiling *ceiling = task;
  char numbers[TILE_BYTES] __attribute__((aligned(STEP_BYTES)));
  for (int i = 0; i < TILE_BYTES; i++) numbers[i] = ceiling->from[item];
  Shapes before;
  begin_tiles(&before);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_loadd(4, numbers, STEP_BYTES);
  _tile_loadd(5, numbers, STEP_BYTES);
  for (int64_t n = 0; n < ceiling->repeats * PEAK_SUMS; n += 4) {
    _tile_dpbf16ps(0, 4, 5);
    _tile_dpbf16ps(1, 4, 5);
    _tile_dpbf16ps(2, 4, 5);
    _tile_dpbf16ps(3, 4, 5);
  }
  _tile_stored(0, numbers, STEP_BYTES);
  end_tiles(&before);
  memcpy(ceiling->to + item, numbers, sizeof(float));
}
#else
static void run_multiply_adds(const void *task, int64_t item) {
  const Ceiling *ceiling = task;
  vf sums[PEAK_SUMS], x = all(ceiling->from[item]), weight = all(0.5f);
#pragma GCC unroll 12
  for (int i = 0; i < PEAK_SUMS; i++) sums[i] = all((float)i);
  for (int64_t n = 0; n < ceiling->repeats * PARTS; n++)
#pragma GCC unroll 12
    for (int i = 0; i < PEAK_SUMS; i++) sums[i] = add_products(sums[i], x, weight);
  vf sum[PARTS] = {{0}};
#pragma GCC unroll 12
  for (int i = 0; i < PEAK_SUMS; i++) sum[0] += sums[i];
  ceiling->to[item] = sum_lanes(sum);
}
#endif

/* (bytes; repeats) -> float32 [CEILING_ITEMS]: reads all bytes once if `repeats` is 0, a multiple of CEILING_ITEMS * STEP_BYTES; or
   else runs CEILING_ITEMS * repeats * PEAK_SUMS instructions of products, each of all LANES or of a tile. All threads take part. */
XLA_FFI_Error *detspec_ceiling(XLA_FFI_CallFrame *frame) {
  if (answered(frame)) return NULL;
  XLA_FFI_Buffer **args = (XLA_FFI_Buffer **)frame->args.args, **rets = (XLA_FFI_Buffer **)frame->rets.rets;
  const int64_t repeats = *(const int32_t *)attribute(frame, 0);
  const Ceiling ceiling = {args[0]->data, rets[0]->data, args[0]->dims[0] / CEILING_ITEMS, repeats};
  run_items(frame, 1, CEILING_ITEMS, repeats ? run_multiply_adds : run_read, &ceiling);
  return NULL;
}
