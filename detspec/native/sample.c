/* Draws tokens from logits: what `sampler.draw` and `filters.py` say, in few passes over a row.

   A token's value is logit / temperature + noise, and the token with the largest value is drawn, the first one among equals. The
   noise is -log(-log(u)), and u a hash of the seed, the position and the token (`ops/gumbel.py`). Noise is never above MOST_NOISE,
   so tokens that cannot win even with that are passed over, and their hash is not worked out. A cheap bound of the noise, by u
   alone, passes over nearly all others. So logarithms are taken of a few tokens of a row. What is passed over could not have been
   drawn, so the order in which values are found changes nothing. */

#define MOST_NOISE 16.0f    /* -log(-log(1 - 2^-23)) is 15.95 */
#define NOISE_MARGIN 0.001f /* more than logarithms are off */
#define CERTAIN 1e30f       /* see `sampler.tempered` */
#define NEAR_ZERO 1e-20f
#define SUM_VECTORS 64 /* of probabilities, that are added up by themselves */
#define TOGETHER 4     /* vectors of tokens whose noise is worked out: each hash is one long chain of steps */
#define MAXIMUM_OF 2   /* vectors of logits whose largest one stands for them */

INLINE int any(vi mask) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#elif defined(__AVX2__)
  return _mm256_movemask_ps((__m256)mask) != 0;
#else
  int32_t found = 0;
  for (int i = 0; i < WIDTH; i++) found |= mask[i];
  return found != 0;
#endif
}

INLINE int count(vi mask) {
#if defined(__AVX512F__)
  return __builtin_popcount(_mm512_test_epi32_mask((__m512i)mask, (__m512i)mask));
#elif defined(__AVX2__)
  return __builtin_popcount((unsigned)_mm256_movemask_ps((__m256)mask));
#else
  int32_t found = 0;
  for (int i = 0; i < WIDTH; i++) found -= mask[i];
  return found;
#endif
}

/* log(x) of positive normal x: x = 2^power (1 + r) with 1 + r around 1, and log(1 + r) by a polynomial (Moshier's Cephes). */
INLINE vf logarithm(vf x) {
  const vi bits = (vi)x, power = (bits - 0x3f3504f3) >> 23; /* 1 + r from sqrt(1/2) on */
  const vf r = (vf)(bits - (power << 23)) - all(1.0f), exponent = __builtin_convertvector(power, vf), square = r * r;
  vf series = all(7.0376836292e-2f);
  series = multiply_add(series, r, all(-1.1514610310e-1f));
  series = multiply_add(series, r, all(1.1676998740e-1f));
  series = multiply_add(series, r, all(-1.2420140846e-1f));
  series = multiply_add(series, r, all(1.4249322787e-1f));
  series = multiply_add(series, r, all(-1.6668057665e-1f));
  series = multiply_add(series, r, all(2.0000714765e-1f));
  series = multiply_add(series, r, all(-2.4999993993e-1f));
  series = multiply_add(series, r, all(3.3333331174e-1f));
  vf found = multiply_add(series * r, square, exponent * all(-2.12194440e-4f));
  found = multiply_add(square, all(-0.5f), found) + r;
  return multiply_add(exponent, all(0.693359375f), found); /* log 2 in two parts */
}

#define EACH(NUM) _Pragma("GCC unroll 4") for (int j = 0; j < (NUM); j++)

/* Threefry-2x32 of 20 rounds, of words or of vectors of them; NUM `x` and `y` are the blocks, and become their results. */
#define ROUND(BY, NUM) EACH(NUM) x[j] += y[j], y[j] = x[j] ^ (y[j] << (BY) | y[j] >> (32 - (BY)));
#define ROUNDS(A, B, C, D, GROUP, NUM)                        \
  ROUND(A, NUM) ROUND(B, NUM) ROUND(C, NUM) ROUND(D, NUM)     \
  EACH(NUM) x[j] += keys[(GROUP) % 3], y[j] += keys[((GROUP) + 1) % 3] + (GROUP);
#define THREEFRY(NAME, Words, NUM)                                       \
  INLINE void NAME(uint32_t key_0, uint32_t key_1, Words *x, Words *y) { \
    const uint32_t keys[3] = {key_0, key_1, key_0 ^ key_1 ^ 0x1bd11bdau}; \
    EACH(NUM) x[j] += keys[0], y[j] += keys[1];                          \
    ROUNDS(13, 15, 26, 6, 1, NUM)                                        \
    ROUNDS(17, 29, 16, 24, 2, NUM)                                       \
    ROUNDS(13, 15, 26, 6, 3, NUM)                                        \
    ROUNDS(17, 29, 16, 24, 4, NUM)                                       \
    ROUNDS(13, 15, 26, 6, 5, NUM)                                        \
  }
THREEFRY(threefry, vu, TOGETHER)
THREEFRY(threefry_of_word, uint32_t, 1)
#undef THREEFRY
#undef ROUNDS
#undef ROUND

/* What is drawn from, and by what. */
typedef struct {
  const float *logits; /* [rows, vocab] */
  const float *temperature, *top_p, *min_p;
  const int32_t *seed, *position, *top_k;
  int32_t *tokens;
  int64_t vocab;
} Draws;

/* A row, as its passes need it. */
typedef struct {
  const float *logits;
  int64_t vocab;
  float largest, temperature;
  int limited;        /* quotients are too large for float32, see `sampler.tempered` */
  uint32_t key_0, key_1;
  float floor, below; /* scaled logits from `floor` on and above `below` may be drawn */
} Drawing;

/* Logits from token `i` on; behind the last, none that can be drawn. */
INLINE vf logits_from(const Drawing *d, int64_t i) {
  if (i + WIDTH <= d->vocab) return load_f32(d->logits + i);
  vf found = all(-INFINITY);
  memcpy(&found, d->logits + i, sizeof(float) * (size_t)(d->vocab - i));
  return found;
}

/* Logits over the temperature. */
INLINE vf scaled(const Drawing *d, vf logits) {
  if (!d->limited) return logits / all(d->temperature);
  const vf finite = choose((logits < all(INFINITY)) & (logits > all(-INFINITY)), all(-CERTAIN), logits);
  return choose(logits == all(d->largest), all(CERTAIN), finite);
}

/* The largest logit; nan if there is one. */
static float largest_logit(const Drawing *d) {
  vf most = all(-INFINITY);
  vi lost = {0};
  for (int64_t i = 0; i < d->vocab; i += WIDTH) {
    const vf logits = logits_from(d, i);
    lost |= logits != logits;
    most = larger(logits, most);
  }
  return any(lost) ? NAN : largest(most);
}

/* The first token with the largest logit. */
static int32_t first_largest(const Drawing *d) {
  for (int64_t i = 0; i < d->vocab; i += WIDTH) {
    const vi found = logits_from(d, i) == all(d->largest);
    for (int lane = 0; any(found) && lane < WIDTH; lane++)
      if (found[lane]) return (int32_t)(i + lane);
  }
  return 0;
}

/* Whether a quotient of a finite logit is not finite. */
static int overflows(const Drawing *d) {
  vi found = {0};
  for (int64_t i = 0; i < d->vocab; i += WIDTH) {
    const vf logits = logits_from(d, i), quotients = logits / all(d->temperature);
    found |= (logits - logits == all(0.0f)) & (quotients - quotients != all(0.0f));
  }
  return any(found);
}

/* The k-th largest of `num` numbers, none of them nan: bits of floats are in order as integers, once those of negative ones are
   turned. The largest number is looked for that k of them reach. */
static float kth_largest(const float *numbers, int64_t num, int64_t k) {
  int64_t low = INT32_MIN, high = INT32_MAX; /* of `low` enough reach it */
  while (low < high) {
    const int64_t middle = (low + high + 1) >> 1;
    int64_t reach = 0, i = 0;
    for (; i + WIDTH <= num; i += WIDTH) {
      vi bits;
      memcpy(&bits, numbers + i, sizeof bits);
      reach += count((bits ^ ((bits >> 31) & 0x7fffffff)) >= (int32_t)middle);
    }
    for (; i < num; i++) {
      int32_t bits;
      memcpy(&bits, numbers + i, sizeof bits);
      reach += (bits ^ ((bits >> 31) & 0x7fffffff)) >= middle;
    }
    if (reach >= k) low = middle;
    else high = middle - 1;
  }
  int32_t bits = (int32_t)low;
  bits ^= (bits >> 31) & 0x7fffffff;
  float found;
  memcpy(&found, &bits, sizeof found);
  return found;
}

/* The k-th largest logit. The k-th largest of some blocks' largest ones is no larger, so those below it are left out first. */
static float kth_logit(const Drawing *d, int64_t k) {
  const int64_t of_block = MAXIMUM_OF * WIDTH, blocks = (d->vocab + of_block - 1) / of_block;
  float *kept = malloc(sizeof(float) * (size_t)(d->vocab + WIDTH));
  if (!kept) return kth_largest(d->logits, d->vocab, k);
  float least = -INFINITY;
  if (k <= blocks) {
    for (int64_t block = 0; block < blocks; block++) {
      vf most = all(-INFINITY);
      for (int64_t i = block * of_block; i < MIN((block + 1) * of_block, d->vocab); i += WIDTH)
        most = larger(logits_from(d, i), most);
      kept[block] = largest(most);
    }
    least = kth_largest(kept, blocks, k);
  }
  int64_t num = 0;
  for (int64_t i = 0; i < d->vocab; i += WIDTH) {
    const vf logits = logits_from(d, i);
    const vi found = logits >= all(least);
    for (int64_t lane = 0; any(found) && lane < MIN(d->vocab - i, WIDTH); lane++)
      if (found[lane]) kept[num++] = logits[lane];
  }
  const float found = kth_largest(kept, num, k);
  free(kept);
  return found;
}

/* Whether what is above `below` has less than `share` of the probability of all that top_k and min_p leave. Both are added up over
   the probability of the likeliest token. */
static int has_less_above(const Drawing *d, float below, float share) {
  const vf most = scaled(d, all(d->largest));
  vf total[PARTS] = {{0}}, above[PARTS] = {{0}};
  for (int64_t first = 0; first < d->vocab; first += SUM_VECTORS * LANES) {
    vf sum[PARTS] = {{0}}, sum_above[PARTS] = {{0}};
    for (int64_t i = first; i < MIN(first + SUM_VECTORS * LANES, d->vocab); i += LANES)
      for (int part = 0; part < PARTS && i + part * WIDTH < d->vocab; part++) {
        const vf logits = scaled(d, logits_from(d, i + part * WIDTH));
        const vi counts = (logits >= all(d->floor)) & (logits - most > all(-87.0f));
        if (!any(counts)) continue;
        const vf probability = choose(counts, exponential(logits - most, 1), all(0.0f));
        sum[part] += probability;
        sum_above[part] += choose(logits > all(below), probability, all(0.0f));
      }
    for (int part = 0; part < PARTS; part++) total[part] += sum[part], above[part] += sum_above[part];
  }
  return sum_lanes(above) < share * sum_lanes(total);
}

/* The token with the largest value among those that may be drawn, 0 if there is none. */
static int32_t draw(const Drawing *d) {
  vi lane;
  for (int i = 0; i < WIDTH; i++) lane[i] = i;
  float best = -INFINITY;
  int32_t token = 0;
  for (int64_t first = 0; first < d->vocab; first += TOGETHER * WIDTH) {
    vf logits[TOGETHER], one_to_two[TOGETHER];
    vi left[TOGETHER], may_win = {0};
    vu x[TOGETHER], y[TOGETHER];
    EACH(TOGETHER) {
      const int64_t i = first + j * WIDTH;
      logits[j] = i < d->vocab ? scaled(d, logits_from(d, i)) : all(-INFINITY);
      left[j] = (logits[j] >= all(d->floor)) & (logits[j] > all(d->below));
      may_win |= left[j] & (logits[j] + all(MOST_NOISE) > all(best));
      x[j] = (vu){0}, y[j] = (vu)((int32_t)i + lane);
    }
    if (!any(may_win)) continue;
    threefry(d->key_0, d->key_1, x, y);
    may_win = (vi){0};
    EACH(TOGETHER) {
      one_to_two[j] = (vf)((x[j] ^ y[j]) >> 9 | 0x3f800000);
      /* -log(u) is at least 1 - u, and the logarithm to base 2 of that at least what its bits are as a number. */
      const vf rest = __builtin_convertvector((vi)(all(2.0f) - one_to_two[j]), vf) * all(0x1p-23f);
      const vf bound = (all(127.0f) - rest) * all(0x1.62e43p-1f);
      may_win |= left[j] & (logits[j] + (bound + all(NOISE_MARGIN)) > all(best));
    }
    if (!any(may_win)) continue;
    for (int j = 0; j < TOGETHER; j++) {
      const vf uniform = larger(one_to_two[j] - all(1.0f), all(0x1p-126f)); /* the logarithm of 0 is not finite */
      const vf value = logits[j] - logarithm(-logarithm(uniform));
      for (int n = 0; n < WIDTH; n++)
        if (left[j][n] && value[n] > best) best = value[n], token = (int32_t)(first + j * WIDTH) + n;
    }
  }
  return token;
}

/* One row. Which tokens top_p keeps is asked once one is drawn: it is kept if what is likelier has less than the share. If not,
   the draw goes on among what is likelier, see `filters.py`. */
static void run_draw(const void *task, int64_t row) {
  const Draws *draws = task;
  Drawing d = {.logits = draws->logits + row * draws->vocab, .vocab = draws->vocab, .temperature = draws->temperature[row]};
  int32_t *token = draws->tokens + row;
  d.largest = largest_logit(&d);
  if (d.largest != d.largest) {
    *token = (int32_t)d.vocab - 1;
    return;
  }
  if (!(d.temperature > 0)) {
    *token = first_largest(&d);
    return;
  }
  d.limited = d.temperature < NEAR_ZERO && overflows(&d);
  d.key_1 = (uint32_t)draws->position[row];
  threefry_of_word(0, (uint32_t)draws->seed[row], &d.key_0, &d.key_1);
  d.floor = d.below = -INFINITY;
  const float largest = scaled(&d, all(d.largest))[0];
  const float top_p = draws->top_p[row], min_p = draws->min_p[row];
  const int64_t top_k = draws->top_k[row];
  const int has_limit = largest - largest == 0;
  if (has_limit && top_k > 0 && top_k < d.vocab) d.floor = scaled(&d, all(kth_logit(&d, top_k)))[0];
  if (has_limit && min_p > 0) d.floor = MAX(d.floor, MIN(largest, largest + logarithm(all(min_p))[0]));
  for (;;) {
    *token = draw(&d);
    if (!has_limit || top_p >= 1) return;
    d.below = scaled(&d, all(d.logits[*token]))[0];
    if (d.below >= largest || has_less_above(&d, d.below, top_p)) return;
  }
}

/* (logits [R, V], temperature [R], top_p [R], min_p [R] float32, top_k [R], seed [R], position [R] int32) -> tokens [R] int32 */
XLA_FFI_Error *detspec_draw(XLA_FFI_CallFrame *frame) {
  if (answered(frame)) return NULL;
  XLA_FFI_Buffer **args = (XLA_FFI_Buffer **)frame->args.args, **rets = (XLA_FFI_Buffer **)frame->rets.rets;
  if (frame->args.size != 7 || args[0]->dtype != XLA_FFI_DataType_F32) return fail(frame, "detspec_draw: unsupported arguments");
  const Draws draws = {
      .logits = args[0]->data,
      .temperature = args[1]->data,
      .top_p = args[2]->data,
      .min_p = args[3]->data,
      .top_k = args[4]->data,
      .seed = args[5]->data,
      .position = args[6]->data,
      .tokens = rets[0]->data,
      .vocab = args[0]->dims[1],
  };
  const int64_t rows = args[0]->dims[0];
  run_items(frame, rows * draws.vocab >= ALONE / 8, rows, run_draw, &draws);
  return NULL;
}
