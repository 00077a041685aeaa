/* What all kernels share: registers, sums of lanes, numbers of two bytes, calls between XLA and C, and threads.

   `library.py` compiles this file and the others of this folder as one text, once for each dtype of a model or of its cache: DTYPE
   is F32, BF16 or F16. Weights in int8 are multiplied by rows of that dtype. What a cache in int8 needs is compiled with F32.

   Every result is a function of its own row in one order of operations. Neither the number of rows, nor the tiles, nor the
   threads change it: they only decide what is computed together. Nothing is left to the compiler either: multiply-adds are
   written as such, and the file is compiled without contraction. So bits follow from this text and the instruction set alone.

   Sums have 16 lanes on every processor: one register with AVX-512, two with AVX2, four with NEON. */

#define _GNU_SOURCE /* of Linux: processors of threads */
#include <math.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

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

/* ---- functions ---- */

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

enum { SILU, GELU_TANH }; /* activations, in the order of `ops/gate.py` */

/* activation(x) * up. Activations are x / (1 + exp(-z)): SiLU with z = x, and GELU by tanh, for 1 + tanh(u) = 2 / (1 + exp(-2 u)).
   Where that exponential is too large for float32, they are 0. */
INLINE vf gated(int activation, vf x, vf up) {
  const vf cubic = multiply_add(x * x, all(0.044715f), all(1.0f)) * x;
  const vf z = activation == SILU ? x : cubic * all(1.5957691216f); /* 2 sqrt(2 / pi) */
  return choose(z < all(-88.0f), x * all(0.0f), x / (all(1.0f) + exponential(-z, 1))) * up;
}

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

/* float32 as bits of bfloat16 in the low halves of lanes, rounded to the nearest, or to the even one of two. */
INLINE vu to_bf16(vf x) {
  const vu bits = (vu)x, nearest = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return (vu)choose(x == x, (vf)nearest, (vf)(bits >> 16 | 0x40));
}

/* float32 as bits of float16, likewise. */
INLINE vu to_f16(vf x) {
  const vu magnitude = (vu)x & 0x7fffffff, normal = (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
  const vf subnormal = (vf)((vu)((vf)magnitude + all(0.5f)) - 0x3f000000u); /* the sum is rounded to a multiple of 2^-24 */
  vf found = choose((vi)(magnitude < 113u << 23), subnormal, (vf)normal);
  found = choose((vi)(magnitude >= 0x477ff000u), (vf)((vu){0} + 0x7c00), found); /* from 65520 on */
  found = choose(x == x, found, (vf)((vu){0} + 0x7e00));
  return (vu)found | ((vu)x >> 16 & 0x8000);
}

/* Writes the low halves of lanes next to each other. */
INLINE void store_halves(void *p, vu x) {
#if defined(__AVX512F__)
  _mm256_storeu_si256(p, _mm512_cvtepi32_epi16((__m512i)x));
#elif defined(__AVX2__)
  _mm_storeu_si128(p, _mm_packus_epi32(_mm256_castsi256_si128((__m256i)x), _mm256_extracti128_si256((__m256i)x, 1)));
#else
  typedef uint16_t vh __attribute__((vector_size(2 * WIDTH)));
  const vh halves = __builtin_convertvector(x, vh);
  memcpy(p, &halves, sizeof halves);
#endif
}

/* Writes WIDTH numbers of `dtype`. */
INLINE void store(int dtype, void *p, vf x) {
  if (dtype == F32) store_f32(p, x);
  else store_halves(p, dtype == BF16 ? to_bf16(x) : to_f16(x));
}

/* WIDTH numbers of a row of `length` from number `i` on, as float32; zeros behind the last. */
INLINE vf load_some(int dtype, const char *row, int64_t i, int64_t length) {
  char items[WIDTH * 4] = {0};
  if (i + WIDTH <= length) return load(dtype, row + i * bytes_of(dtype));
  if (i >= length) return (vf){0};
  memcpy(items, row + i * bytes_of(dtype), (size_t)((length - i) * bytes_of(dtype)));
  return load(dtype, items);
}

/* Writes those of WIDTH numbers from number `i` of a row of `length` on that are in it. */
INLINE void store_some(int dtype, char *row, int64_t i, int64_t length, vf x) {
  char items[WIDTH * 4];
  if (i + WIDTH <= length) {
    store(dtype, row + i * bytes_of(dtype), x);
    return;
  }
  store(dtype, items, x);
  memcpy(row + i * bytes_of(dtype), items, (size_t)((length - i) * bytes_of(dtype)));
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
  int64_t num_items, together; /* of which a thread takes some together: to count them costs more than a short one */
  _Atomic int64_t next, done;
  _Atomic int holders; /* threads that may still look at this */
  _Atomic int is_helped;
  int processor; /* of the thread that calls */
} Work;

static void let_go(Work *work, int holders) {
  if (atomic_fetch_sub(&work->holders, holders) == holders) free(work);
}

/* Takes items until none is left. */
static void take_items(Work *work) {
  const uint64_t before = flush_subnormals();
  int64_t item;
  while ((item = atomic_fetch_add(&work->next, work->together)) < work->num_items) {
    const int64_t end = MIN(item + work->together, work->num_items), taken = end - item;
    for (; item < end; item++) work->run(work->task, item);
    atomic_fetch_add(&work->done, taken);
  }
  restore_subnormals(before);
}

/* Linux may wake a helper on the processor of the thread that calls it, though another one is idle, and leaves both there for
   milliseconds: a prefill of 12 ms after a pause took 17. So a thread that waits in vain for its helper lets it run for a moment,
   and the helper leaves. */

#if defined(__linux__)
INLINE int this_processor(void) { return sched_getcpu(); }

/* Moves this thread from `processor` to another one, if it may run there. Where it may run stays as it is. */
static void leave(int processor) {
  cpu_set_t all, others;
  if (this_processor() != processor || sched_getaffinity(0, sizeof all, &all)) return;
  others = all;
  CPU_CLR(processor, &others);
  if (CPU_COUNT(&others) && !sched_setaffinity(0, sizeof others, &others)) sched_setaffinity(0, sizeof all, &all);
}
#else
INLINE int this_processor(void) { return -1; }
static void leave(int processor) { (void)processor; }
#endif

static int64_t nanoseconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000000000ll + now.tv_nsec;
}

#define LONG_PAUSE 300000  /* nanoseconds: a helper is gone before, other programs on a full machine are not */
#define FULL_FOR 200000000 /* nanoseconds without another try then */

/* Lets somebody else run on this processor, who may be a helper. */
static void step_aside(void) {
  static _Atomic int64_t not_before;
  const int64_t begin = nanoseconds();
  if (begin < atomic_load(&not_before)) return;
  sched_yield();
  const int64_t end = nanoseconds();
  if (end - begin > LONG_PAUSE) atomic_store(&not_before, end + FULL_FOR);
}

static void help(void *given) {
  Work *work = given;
  atomic_store(&work->is_helped, 1);
  leave(work->processor);
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

#define SHARES 16      /* that each thread takes of many items */
#define AWAKE_AFTER 32 /* pauses: a helper that has not slept has begun */

/* Runs all items; `shared` by the threads of XLA's pool, or all by this one. A helper that comes too late finds none and leaves,
   so this waits for items that are being run, and never for a thread to become free. */
static void run_items(XLA_FFI_CallFrame *frame, int shared, int64_t num_items, Run *run, const void *task) {
  const int64_t threads = shared ? MIN(threads_of(frame), num_items) : 1, helpers = threads - 1;
  Work *work = helpers > 0 ? malloc(sizeof *work) : NULL;
  if (!work) {
    Work own = {.run = run, .task = task, .num_items = num_items, .together = num_items};
    take_items(&own);
    return;
  }
  *work = (Work){
      .run = run,
      .task = task,
      .num_items = num_items,
      .together = MAX(num_items / (SHARES * threads), 1),
      .holders = (int)helpers + 1,
      .processor = this_processor(),
  };
  for (int64_t i = 0; i < helpers; i++) {
    XLA_FFI_ThreadPool_Schedule_Args args = {XLA_FFI_ThreadPool_Schedule_Args_STRUCT_SIZE, NULL, frame->ctx, help, work};
    if (failed(frame, frame->api->XLA_FFI_ThreadPool_Schedule(&args))) let_go(work, 1);
  }
  for (int i = 0; i < AWAKE_AFTER && !atomic_load(&work->is_helped); i++) pause_once();
  if (!atomic_load(&work->is_helped)) step_aside();
  take_items(work);
  while (atomic_load(&work->done) < num_items) pause_once();
  let_go(work, 1);
}
