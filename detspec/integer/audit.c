/* The arithmetics "integer/1" and "integer8/1" in plain C99, token by token. spec.py defines them; functions have its names.
 *
 *     cc -std=c99 -O2 -o audit audit.c
 *     ./audit MODEL REQUESTS RESULTS [LOGITS]
 *
 * audit.py writes MODEL and REQUESTS; `read_model` and `read_wishes` show what is in them. Files are words of 32 bits, lowest
 * byte first, and bytes. For each token of a text but the first, RESULTS has its log-probability (16 fraction bits), the token
 * that the request chooses in its place, and pairs of the likeliest tokens there and their log-probabilities, as many as the
 * request asks for. LOGITS has all logits there. Where numbers have left their range, LEFT_RANGE stands for log-probabilities
 * and for the chosen token.
 *
 * No type is a float. Unsigned numbers wrap, no signed one overflows, and only `floor_shift` shifts negative ones.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

typedef int64_t i64;
typedef int32_t i32;
typedef uint32_t u32;
typedef uint64_t u64;

enum { MAGIC = 0x31544E49, MAGIC_8 = 0x38544E49, MAX_BLOCK = 1 << 15, LIMIT = (1 << 30) - 1, LOST = 10000, MAX_POSITIONS = 262144, SMALL_VOCABULARY = 262128, LEFT_RANGE = INT32_MIN };
enum { LOG2_E = 23637, LN_2 = 22713, GUMBEL_SHIFT = 24020, SMALLEST_LOGPROB = -(1 << 24), BEND = 48408812 };
enum { ONE = 0x3F800000, INFINITE = 0x7F800000 }; /* bits of float32 */
enum { RAW, PROCESSED, TEMPERED };                /* whose log-probabilities are reported */
static const i64 EXP2[5] = {32768, -22709, 7844, -1743, 224};
enum { GELU_1 = 18860, GELU_3 = 13493, GELU_MOST = 5 << 16 };
enum { SILU, GELU_TANH };                         /* what gates go through */

typedef struct { i64 *values, mantissa, exponent; } Activations;
typedef struct { int m, n; int8_t *values; i32 *mantissa, *exponent; } Matrix;
typedef struct { int8_t *values; i32 *mantissa, *exponent; } Cached; /* of all positions and heads */
typedef struct { i64 limit; i32 mantissa, exponent; } SoftCap; /* none if the limit is 0 */
typedef struct { /* of a request; fractions are bits of float32 */
    u32 temperature, top_k, top_p, min_p, seed, repetition, frequency, presence, *bias;
    i32 num_biased, *biased, min_tokens, num_stops, *stops, mode, num_likeliest, prompt, length; /* tokens of prompt, of all */
} Wishes;
typedef struct {
    i32 window;                                  /* positions that a token sees; 0 is all */
    u32 *steps;                                  /* for each pair of a head: a step's upper 32 bits and its lower 16 */
    i32 *attn_norm, *q_norm, *k_norm, *mlp_norm; /* scales: values, then their exponent; NULL where there is none */
    i32 *attn_post_norm, *mlp_post_norm;
    i32 *q_bias, *k_bias, *v_bias;
    Matrix q, k, v, o, gate, up, down;
    Cached keys, values;
} Layer;

static int L, D, F, N, K, H, V; /* layers, widths of stream and MLP, heads of queries and keys, their width, vocabulary */
static int in_8_bits;           /* whether activations are */
static int weight_bits;         /* fraction bits of the weights of tokens */
static int activation;          /* of gates */
static int norms_heads;         /* whether queries and keys have a norm for each head, not for all heads together */
static i32 score_mantissa, score_exponent, epsilon, *SINES, *LOGS, *INVERSE_ROOTS, *embed, *final_norm;
static SoftCap score_cap, logit_cap;
static Layer *layers;
static Matrix head;
static i64 *stream, *row, *q, *k, *v, *mixed, *gate, *up, *sum, *score, *logits, *below, *ordered, *told; /* numbers of one token */

/* --- Files --------------------------------------------------------------------------------------------------------------- */

static FILE *file; /* what is being read */

static void fail(const char *why) {
    fprintf(stderr, "audit: %s\n", why);
    exit(1);
}

static FILE *opened(const char *name, const char *mode) {
    FILE *found = fopen(name, mode);
    if (!found) fail("a file cannot be opened");
    return found;
}

static void *room(size_t count, size_t size) {
    void *found = calloc(count, size);
    if (!found) fail("not enough memory");
    return found;
}

static u32 word(void) {
    unsigned char b[4];
    if (fread(b, 1, 4, file) != 4) fail("a file ends too early");
    return b[0] | (u32) b[1] << 8 | (u32) b[2] << 16 | (u32) b[3] << 24;
}

static i32 number_in(i32 least, i32 most) {
    u32 w = word();
    i32 found = w >> 31 ? -(i32) ~w - 1 : (i32) w;
    if (found < least || found > most) fail("a number in a file is out of its bounds");
    return found;
}

/* An array of `n` numbers. Its length comes first, which is 0 where the model has no such array. */
static i32 *numbers(size_t n) {
    u32 length = word();
    i32 *found = length ? room(n, sizeof *found) : NULL;
    if (length && length != n) fail("an array has another length");
    for (u32 i = 0; i < length; i++) found[i] = number_in(INT32_MIN, INT32_MAX);
    return found;
}

static Matrix matrix(int m, int n) {
    Matrix w = {m, n, room(m, n), NULL, NULL};
    if (fread(w.values, n, m, file) != (size_t) m) fail("a file ends too early");
    w.mantissa = numbers(m);
    w.exponent = numbers(m);
    return w;
}

static SoftCap soft_cap(void) {
    SoftCap cap;
    cap.limit = number_in(0, 1 << 28), cap.mantissa = number_in(0, 1 << 15), cap.exponent = number_in(-1000, 1000);
    return cap;
}

static void read_model(void) {
    u32 magic = word();
    if (magic != MAGIC && magic != MAGIC_8) fail("this is no model of integer/1 or integer8/1");
    in_8_bits = magic == MAGIC_8;
    L = number_in(1, 10000), D = number_in(1, 32768), F = number_in(1, 131072), N = number_in(1, 4096);
    K = number_in(1, N), H = number_in(2, 512), V = number_in(1, 524160);
    weight_bits = V <= SMALL_VOCABULARY ? 28 : 26;
    if (N % K || H % 2 || N * H > 131072) fail("the model has heads that do not fit");
    score_mantissa = number_in(1 << 14, 1 << 15), score_exponent = number_in(-1000, 1000), epsilon = number_in(1, INT32_MAX);
    activation = number_in(SILU, GELU_TANH), norms_heads = number_in(0, 1);
    score_cap = soft_cap(), logit_cap = soft_cap();
    SINES = numbers(1025), LOGS = numbers(257), INVERSE_ROOTS = numbers(256);
    embed = numbers((size_t) V * D);
    layers = room(L, sizeof *layers);
    for (Layer *l = layers; l < layers + L; l++) {
        l->window = number_in(0, INT32_MAX);
        l->steps = room(H, sizeof *l->steps);
        for (int i = 0; i < H; i++) l->steps[i] = word();
        l->attn_norm = numbers(D + 1);
        l->q = matrix(N * H, D), l->q_bias = numbers(N * H), l->q_norm = numbers((norms_heads ? H : N * H) + 1);
        l->k = matrix(K * H, D), l->k_bias = numbers(K * H), l->k_norm = numbers((norms_heads ? H : K * H) + 1);
        l->v = matrix(K * H, D), l->v_bias = numbers(K * H);
        l->o = matrix(D, N * H);
        l->attn_post_norm = numbers(D + 1), l->mlp_post_norm = numbers(D + 1);
        l->mlp_norm = numbers(D + 1);
        l->gate = matrix(F, D), l->up = matrix(F, D), l->down = matrix(D, F);
    }
    final_norm = numbers(D + 1);
    head = matrix(V, D);
}

/* --- Numbers ------------------------------------------------------------------------------------------------------------- */

static i64 larger(i64 a, i64 b) { return a > b ? a : b; }
static i64 between(i64 least, i64 a, i64 most) { return a < least ? least : a > most ? most : a; }
static i64 size_of(i64 a) { return a < 0 ? -a : a; }
static i64 raised(i64 a, int r) { return a * ((i64) 1 << r); }                         /* a * 2**r */
static i64 floor_shift(i64 a, int r) { return a < 0 ? -1 - ((-1 - a) >> r) : a >> r; } /* floor(a / 2**r) */
static i64 rounded_shift(i64 a, int r) { return r ? floor_shift(a + raised(1, r - 1), r) : a; }

static i64 scaled(i64 a, i64 m, i64 r) {
    int by = (int) between(-15, r, 47);
    return between(-LIMIT, by < 0 ? raised(a * m, -by) : rounded_shift(a * m, by), LIMIT);
}

static int bit_length(i64 a) {
    int bits = 0;
    for (; a; a >>= 1) bits++;
    return bits;
}

static i64 largest_size(const i64 *a, int n) {
    i64 found = 0;
    for (int i = 0; i < n; i++) found = larger(found, size_of(a[i]));
    return found;
}

/* Narrows `a` where it lies; returns the shift, or LOST. */
static int narrowed(i64 *a, int n, int bits) {
    i64 largest = largest_size(a, n), most = raised(1, bits) - 1;
    int shift = (int) larger(bit_length(largest) - bits, 0);
    for (int i = 0; i < n; i++) a[i] = between(-most, rounded_shift(a[i], shift), most);
    return largest >= LIMIT ? LOST : shift;
}

static Activations row_of(i64 *a, int n, i64 exponent) {
    Activations found = {a, 1 << 14, narrowed(a, n, 14) + exponent - 14};
    return found;
}

static int is_lost(i64 exponent) { return exponent > LOST / 2; }

static i64 added(i64 a, i64 b) { return size_of(a) >= LIMIT ? a : size_of(b) >= LIMIT ? b : between(-LIMIT, a + b, LIMIT); }

/* --- Functions ----------------------------------------------------------------------------------------------------------- */

/* Rounds `a`, which stands for `a * mantissa * 2**exponent`, to 8 bits where it lies; its largest becomes 127. */
static Activations rounded(i64 *a, int n, i64 mantissa, i64 exponent) {
    int shift = narrowed(a, n, 15);
    i64 largest = larger(largest_size(a, n), 1), inverse = raised(127, 22) / largest;
    int raise_by = 15 - bit_length(largest);
    for (int i = 0; i < n; i++) a[i] = rounded_shift(a[i] * inverse, 22);
    mantissa = rounded_shift(rounded_shift(raised(largest, raise_by) * 16513, 14) * mantissa, 15);
    Activations found = {a, mantissa, between(INT32_MIN, shift - raise_by - 7 + 15 + exponent, LOST)};
    return found;
}

/* A row as products take it. */
static Activations as_read(Activations a, int n) { return in_8_bits ? rounded(a.values, n, a.mantissa, a.exponent) : a; }

/* In JAX two halves of 15 bits are added up, each in 32 bits, and joined; whole values in 64 bits give the same. */
static void product(Activations a, Matrix w, const i32 *bias, i64 *out) {
    int dropped = in_8_bits ? 0 : 8;
    for (int j = 0; j < w.m; j++) {
        const int8_t *values = w.values + (size_t) j * w.n;
        i64 total = 0, mantissa = rounded_shift(a.mantissa * w.mantissa[j], 15);
        for (int i = 0; i < w.n; i++) total += a.values[i] * values[i];
        out[j] = scaled(rounded_shift(total, dropped), mantissa, -(a.exponent + w.exponent[j] + 15 + dropped + 16));
        if (is_lost(a.exponent)) out[j] = LIMIT;
        if (bias) out[j] = added(out[j], bias[j]);
    }
}

static u64 high_word(u64 a, u64 b) { return a * b >> 32; }

static i64 inverse_root(i64 total, int *half) {
    *half = (int) floor_shift(bit_length(total) - 31, 1);
    int shift = 2 * *half;
    u64 u = shift < 0 ? (u64) total << -shift : (u64) total >> shift, y = (u64) INVERSE_ROOTS[u >> 24];
    for (int i = 0; i < 2; i++) y = high_word(y, (3u << 28) - high_word(u, high_word(y, y))) << 3 & 0xFFFFFFFF;
    return (i64) (y >> 16);
}

static Activations normed(const i64 *a, int n, const i32 *scale, i64 *out) {
    for (int i = 0; i < n; i++) out[i] = a[i];
    int shift = narrowed(out, n, 15), half;
    i64 total = (i64) epsilon * n >> (is_lost(shift) ? 0 : between(0, 2 * shift, 31));
    for (int i = 0; i < n; i++) {
        total += out[i] * out[i];
        out[i] *= scale[i];
    }
    Activations found = row_of(out, n, 14 - 30 + scale[n]);
    found.mantissa = inverse_root(larger(total, 1), &half);
    found.exponent = is_lost(shift) ? LOST : found.exponent - half;
    return found;
}

static i64 sine(u32 turns) {
    i64 here = SINES[turns >> 22], next = SINES[(turns >> 22) + 1];
    return rounded_shift(here + floor_shift((next - here) * (turns >> 6 & 0xFFFF), 16), 6);
}

/* Head `j` of those in `a`, all of which `whole` is if they are normed together; else it is normed here, if there is a norm. Its
   values are rotated: they stand for themselves times its scale / 2**14. */
static Activations turned(i64 *a, int j, const Activations *whole, const i32 *norm, const u32 *steps, u64 position) {
    a += (size_t) j * H;
    Activations found = whole ? *whole : norm ? normed(a, H, norm, a) : row_of(a, H, -16);
    found.values = a;
    for (int i = 0; i < H / 2; i++) {
        u32 turns = (u32) (position * steps[2 * i] + (position * steps[2 * i + 1] >> 16));
        i64 sin = sine(turns), cos = sine(turns + (1u << 30)), first = a[i], second = a[i + H / 2];
        a[i] = first * cos - second * sin;
        a[i + H / 2] = second * cos + first * sin;
    }
    return found;
}

static void cached(i64 *a, i64 mantissa, i64 exponent, Cached to, size_t place) {
    Activations found = rounded(a, H, mantissa, exponent);
    for (int i = 0; i < H; i++) to.values[place * H + i] = (int8_t) a[i];
    to.mantissa[place] = (i32) found.mantissa;
    to.exponent[place] = (i32) found.exponent;
}

static i64 power(i64 d, int *n) {
    i64 a = EXP2[4];
    for (int i = 3; i >= 0; i--) a = floor_shift(a * (d & 0xFFFF), 16) + EXP2[i];
    *n = (int) between(0, d >> 16, 31);
    return a;
}

static i64 soft_capped(i64 a, SoftCap cap) {
    int n;
    if (!cap.limit || size_of(a) >= LIMIT) return a;
    i64 b = power(scaled(size_of(a), cap.mantissa, -cap.exponent), &n), p = rounded_shift(b, n);
    i64 found = scaled(cap.limit, raised((1 << 15) - p, 15) / ((1 << 15) + p), 15);
    return a < 0 ? -found : found;
}

/* One head's attention, from position `first` to `last`. */
static void attended(Activations query, const Layer *l, int of_keys, int first, int last, i64 *out) {
    i64 of_query = rounded_shift(query.mantissa * score_mantissa, 15), largest = INT64_MIN, highest = INT64_MIN, of_all = 0;
    int lost = is_lost(query.exponent), shift;
    for (int t = first; t <= last; t++) {
        size_t at = (size_t) t * K + of_keys;
        i64 total = 0, exponent = query.exponent + l->keys.exponent[at];
        for (int i = 0; i < H; i++) total += query.values[i] * l->keys.values[at * H + i];
        score[t] = scaled(total, rounded_shift(of_query * l->keys.mantissa[at], 15), -(exponent + score_exponent + 30 + 16));
        score[t] = soft_capped(score[t], score_cap);
        largest = larger(largest, score[t]);
        highest = larger(highest, l->values.exponent[at]);
        lost |= is_lost(l->keys.exponent[at]) | is_lost(l->values.exponent[at]);
    }
    for (int i = 0; i < H; i++) sum[i] = 0;
    for (int t = first; t <= last; t++) {
        size_t at = (size_t) t * K + of_keys;
        i64 a = power(largest - score[t], &shift), p = rounded_shift(a, shift + 1);
        i64 weight = rounded_shift(p * l->values.mantissa[at], (int) between(15, 15 + highest - l->values.exponent[at], 31));
        for (int i = 0; i < H; i++) sum[i] += weight * l->values.values[at * H + i];
        of_all += p;
    }
    int fall = bit_length(of_all) - 15;
    i64 inverse = raised(1, 29) / rounded_shift(of_all, fall);
    for (int i = 0; i < H; i++) out[i] = lost ? LIMIT : scaled(rounded_shift(sum[i], 8), inverse, fall - highest - 10);
}

/* The numbers of a row, fixed. */
static void as_fixed(Activations a, int n, i64 *out) {
    for (int i = 0; i < n; i++) out[i] = is_lost(a.exponent) ? LIMIT : scaled(a.values[i], a.mantissa, -(a.exponent + 16));
}

static i64 gelu_exponent(i64 a) {
    a = between(0, a, GELU_MOST);
    i64 root = rounded_shift(a, 4), square = rounded_shift(root * root, 12);
    return scaled(a, GELU_1 + rounded_shift(square * GELU_3, 16), 13);
}

static Activations gated(void) {
    int shift, lost = largest_size(gate, F) >= LIMIT;
    for (int i = 0; i < F; i++) {
        i64 size = size_of(gate[i]);
        i64 a = power(activation == GELU_TANH ? gelu_exponent(size) : scaled(between(0, size, 1 << 26), LOG2_E, 14), &shift);
        i64 share = (1 << 30) / ((1 << 15) + rounded_shift(a, shift));
        gate[i] = scaled(gate[i], gate[i] < 0 ? (1 << 15) - share : share, 15);
    }
    int of_first = narrowed(gate, F, 15), of_second = narrowed(up, F, 15);
    for (int i = 0; i < F; i++) gate[i] *= up[i];
    Activations found = row_of(gate, F, of_first + of_second - 2 * 16);
    if (lost || is_lost(of_first) || is_lost(of_second)) found.exponent = LOST;
    return found;
}

/* The Hadamard transform of blocks of `a`, each as long as the largest power of two that divides `n`. */
static void hadamard(i64 *a, int n) {
    int block = n & -n;
    if (block > MAX_BLOCK) block = MAX_BLOCK;
    for (int size = 1; size < block; size *= 2)
        for (int i = 0; i < n; i++) {
            if (i & size) continue;
            i64 first = a[i], second = a[i + size];
            a[i] = first + second, a[i + size] = first - second;
        }
}

/* The row of the stream that a part of a layer reads, after its norm if there is one. */
static Activations read_by_part(const i32 *norm) {
    if (norm) return as_read(normed(stream, D, norm, row), D);
    for (int i = 0; i < D; i++) row[i] = stream[i];
    return as_read(row_of(row, D, -16), D);
}

/* Adds a part's output, which lies in `row`, to the stream, after its norm if there is one. */
static void add_to_stream(const i32 *norm) {
    if (norm) {
        Activations a = normed(row, D, norm, row);
        if (in_8_bits) hadamard(row, D);
        as_fixed(a, D, row);
    }
    for (int i = 0; i < D; i++) stream[i] = added(stream[i], row[i]);
}

/* Norms all heads of queries or keys together, where the model does so. */
static const Activations *normed_together(i64 *a, int n, const i32 *norm, Activations *found) {
    if (!norm || norms_heads) return NULL;
    *found = normed(a, n, norm, a);
    return found;
}

/* Reads a token: its keys and values join the cache, and `logits` are those of what comes next. */
static void read_token(i32 token, int position) {
    for (int i = 0; i < D; i++) stream[i] = embed[(size_t) token * D + i];
    for (Layer *l = layers; l < layers + L; l++) {
        int first = l->window && l->window <= position ? position - l->window + 1 : 0;
        Activations a = read_by_part(l->attn_norm), of_q, of_k;
        product(a, l->q, l->q_bias, q), product(a, l->k, l->k_bias, k), product(a, l->v, l->v_bias, v);
        const Activations *all_q = normed_together(q, N * H, l->q_norm, &of_q);
        const Activations *all_k = normed_together(k, K * H, l->k_norm, &of_k);
        for (int j = 0; j < K; j++) {
            Activations key = turned(k, j, all_k, l->k_norm, l->steps, position);
            cached(key.values, key.mantissa, key.exponent - 14, l->keys, (size_t) position * K + j);
            cached(v + j * H, 1 << 14, -14 - 16, l->values, (size_t) position * K + j);
        }
        for (int j = 0; j < N; j++) {
            Activations query = turned(q, j, all_q, l->q_norm, l->steps, position);
            query.exponent += narrowed(query.values, H, 14) - 14;
            attended(query, l, j / (N / K), first, position, mixed + j * H);
        }
        product(as_read(row_of(mixed, N * H, -16), N * H), l->o, NULL, row);
        add_to_stream(l->attn_post_norm);
        a = read_by_part(l->mlp_norm);
        product(a, l->gate, NULL, gate), product(a, l->up, NULL, up);
        a = gated();
        if (in_8_bits) hadamard(a.values, F);
        product(as_read(a, F), l->down, NULL, row);
        add_to_stream(l->mlp_post_norm);
    }
    product(as_read(normed(stream, D, final_norm, row), D), head, NULL, logits);
    for (int i = 0; i < V; i++) logits[i] = soft_capped(logits[i], logit_cap);
}

/* --- Log-probabilities and choices --------------------------------------------------------------------------------------- */

static i64 log_2(i64 u) {
    int bits = bit_length(u);
    i64 z = raised(u, 32 - bits) & 0x7FFFFFFF, place = z >> 23, rest = z & 0x7FFFFF, a = rest >> 11;
    i64 chord = LOGS[place] + rounded_shift((LOGS[place + 1] - LOGS[place]) * (rest >> 8), 15);
    i64 bend = BEND / ((256 + place) * (256 + place)) * (a * (4096 - a) >> 10);
    return raised(bits - 1, 26) + chord + rounded_shift(bend, 14);
}

static i64 natural(i64 log) { return rounded_shift(rounded_shift(log, 8) * LN_2, 17); }

static i64 weight_of(i64 fall) {
    int n;
    i64 a = power(scaled(between(0, fall, 1 << 26), LOG2_E, 14), &n);
    return rounded_shift(raised(a, weight_bits - 15), n);
}

static i64 largest_of(const i64 *a) {
    i64 found = a[0];
    for (int i = 1; i < V; i++) found = larger(found, a[i]);
    return found;
}

/* The logarithm of the sum of all exponentials. */
static i64 log_sum(const i64 *a) {
    i64 largest = largest_of(a), total = 0;
    for (int i = 0; i < V; i++) total += weight_of(largest - a[i]);
    int fall = (int) larger(bit_length(total) - 32, 0);
    return largest + natural(log_2(total >> fall) + raised(fall - weight_bits, 26));
}

static i64 logprob(i64 logit, i64 log_of_all) { return larger(logit - log_of_all, SMALLEST_LOGPROB); }

/* The likeliest token after the token `last`, or of all after -1; the lower one comes first among equals. */
static i32 likeliest(const i64 *a, i32 last) {
    i32 found = -1;
    for (i32 i = 0; i < V; i++) {
        int is_after = last < 0 || a[i] < a[last] || (a[i] == a[last] && i > last);
        if (is_after && (found < 0 || a[i] > a[found])) found = i;
    }
    return found;
}

static void threefry(const u32 key[2], u32 a, u32 b, u32 out[2]) {
    static const int rotations[2][4] = {{13, 15, 26, 6}, {17, 29, 16, 24}};
    const u32 keys[3] = {key[0], key[1], key[0] ^ key[1] ^ 0x1BD11BDA};
    a += keys[0], b += keys[1];
    for (int group = 1; group < 6; group++) {
        for (int i = 0; i < 4; i++) {
            int r = rotations[(group - 1) % 2][i];
            a += b;
            b = a ^ (b << r | b >> (32 - r));
        }
        a += keys[group % 3], b += keys[(group + 1) % 3] + group;
    }
    out[0] = a, out[1] = b;
}

static i64 gumbel(const u32 key[2], u32 token) {
    u32 bits[2];
    threefry(key, 0, token, bits);
    i64 waiting = larger(raised(32, 26) - log_2((bits[0] ^ bits[1]) | 1), 1);
    return GUMBEL_SHIFT - natural(log_2(waiting) - raised(26, 26));
}

/* A float32 without its sign is `m * 2**(e - 24)`, where `m` has 24 bits or is 0. */
static i64 float_parts(u32 bits, int *e) {
    i64 m = bits & 0x7FFFFF;
    *e = (int) (bits >> 23 & 0xFF) - 126;
    if (*e > -126) return m | 1 << 23;
    for (*e = -125; m && m < 1 << 23; m *= 2) --*e;
    return m;
}

static i64 number(u32 bits, int *e) {
    i64 m = rounded_shift(float_parts(bits, e), 8);
    *e -= 16;
    return m;
}

static i64 fixed(u32 bits) {
    int e;
    i64 m = float_parts(bits, &e);
    return scaled(bits >> 31 ? -m : m, 1, 24 - 16 - e);
}

static i64 held(i64 given, i64 found) { return size_of(given) >= LIMIT ? given : between(-LIMIT + 1, found, LIMIT - 1); }

static i64 penalised(i64 logit, i32 seen, i32 count, const Wishes *asked) {
    int e, of_frequency;
    i64 given = logit, m = number(asked->repetition, &e), frequency = number(asked->frequency, &of_frequency);
    if (seen) logit = logit > 0 ? scaled(logit, (1 << 30) / m, 30 + e) : scaled(logit, m, -e);
    i64 of_count = scaled(count, frequency, -(of_frequency + 16));
    logit = added(logit, asked->frequency >> 31 ? of_count : -of_count);
    if (count) logit = added(logit, -fixed(asked->presence));
    return held(given, logit);
}

/* How far `a` lies below its largest, over a temperature, in `to`. */
static void tempered(const i64 *a, u32 temperature, i64 *to) {
    int e;
    i64 m = number(temperature ? temperature : ONE, &e), largest = largest_of(a);
    for (int i = 0; i < V; i++) {
        to[i] = a[i] <= -LIMIT ? -LIMIT : scaled(larger(a[i] - largest, -LIMIT), (1 << 30) / m, 30 + e);
        if (largest >= LIMIT) to[i] = LIMIT;
    }
}

/* The logits that a token is drawn from, over the temperature, in `below`. */
static void process(i32 position, const i32 *seen, const i32 *count, const Wishes *asked) {
    for (int i = 0; i < V; i++) below[i] = logits[i];
    for (int i = 0; i < asked->num_biased; i++) {
        i64 given = logits[asked->biased[i]];
        below[asked->biased[i]] = held(given, added(given, fixed(asked->bias[i])));
    }
    for (int i = 0; i < asked->num_stops && position < (i64) asked->prompt + asked->min_tokens; i++)
        below[asked->stops[i]] = -LIMIT;
    for (int i = 0; i < V; i++) below[i] = penalised(below[i], seen[i], count[i], asked);
    tempered(below, asked->temperature, below);
}

static int descending(const void *a, const void *b) {
    i64 first = *(const i64 *) a, second = *(const i64 *) b;
    return (first < second) - (first > second);
}

/* A bound: the filters keep the tokens whose `below` reaches it. */
static i64 kept_from(const Wishes *asked) {
    int e;
    i64 least = -LIMIT, total = 0, so_far = 0, likelier = 0, share = fixed(asked->top_p), m = number(asked->min_p, &e);
    if (!asked->temperature) return least;
    if (m) least = larger(least, -larger(0, -natural(log_2(m << 15) + raised(e - 15, 26))));
    for (int i = 0; i < V; i++) ordered[i] = below[i];
    qsort(ordered, V, sizeof *ordered, descending);
    if (0 < asked->top_k && asked->top_k < (u32) V) least = larger(least, ordered[asked->top_k - 1]);
    if (share >= 1 << 16) return least;
    for (int i = 0; i < V && ordered[i] >= least; i++) total += weight_of(-ordered[i]);
    for (int i = 0; i < V && ordered[i] >= least; i++) {
        if (i && ordered[i] < ordered[i - 1]) likelier = so_far; /* equals are kept together */
        if (ordered[i] < 0 && likelier << 16 >= total * share) return ordered[i] + 1;
        so_far += weight_of(-ordered[i]);
    }
    return least;
}

/* The token that a request chooses among those whose `below` is at least `least`. */
static i32 chosen(u32 position, i64 least, const Wishes *asked) {
    const u32 of_seed[2] = {0, asked->seed};
    u32 key[2];
    i64 best = INT64_MIN;
    i32 found = 0;
    threefry(of_seed, 0, position, key);
    for (i32 i = 0; i < V; i++) {
        i64 by = below[i] < least ? INT64_MIN : asked->temperature ? below[i] + gumbel(key, i) : below[i];
        if (by > best) best = by, found = i;
    }
    return found;
}

/* The logits whose log-probabilities a request gets for a token that is new. */
static const i64 *reported(i64 least, const Wishes *asked) {
    if (asked->mode == PROCESSED)
        for (int i = 0; i < V; i++) told[i] = below[i] < least ? -LIMIT : below[i];
    else if (asked->mode == TEMPERED && asked->temperature && asked->temperature != ONE)
        tempered(logits, asked->temperature, told);
    else
        return logits;
    return told;
}

/* --- Texts --------------------------------------------------------------------------------------------------------------- */

static void put(i64 number, FILE *out) {
    for (int i = 0; i < 4; i++) putc((int) ((u32) number >> 8 * i & 255), out);
}

static Wishes read_wishes(int longest) {
    Wishes w;
    w.temperature = number_in(0, INFINITE - 1), w.top_k = number_in(0, INT32_MAX), w.top_p = number_in(0, ONE);
    w.min_p = number_in(0, ONE), w.seed = word(), w.repetition = number_in(1, INFINITE - 1);
    w.frequency = word(), w.presence = word(), w.num_biased = number_in(0, V);
    w.biased = room(w.num_biased + 1, sizeof *w.biased), w.bias = room(w.num_biased + 1, sizeof *w.bias);
    for (int i = 0; i < w.num_biased; i++) w.biased[i] = number_in(0, V - 1), w.bias[i] = word();
    w.min_tokens = number_in(0, INT32_MAX), w.num_stops = number_in(0, V);
    w.stops = room(w.num_stops + 1, sizeof *w.stops);
    for (int i = 0; i < w.num_stops; i++) w.stops[i] = number_in(0, V - 1);
    w.mode = number_in(RAW, TEMPERED), w.num_likeliest = number_in(0, V);
    w.prompt = number_in(0, INT32_MAX), w.length = number_in(1, longest);
    return w;
}

static void audit_text(int longest, FILE *results, FILE *all_logits) {
    Wishes asked = read_wishes(longest);
    i32 *seen = room(V, sizeof *seen), *count = room(V, sizeof *count), token = number_in(0, V - 1);
    for (int t = 1; t < asked.length; t++) {
        read_token(token, t - 1);
        seen[token] = 1, count[token] += t > asked.prompt;
        process(t, seen, count, &asked);
        i64 least = kept_from(&asked);
        const i64 *of = t < asked.prompt ? logits : reported(least, &asked);
        i64 log_of_all = log_sum(of);
        int lost = largest_of(logits) >= LIMIT;
        token = number_in(0, V - 1);
        put(lost ? LEFT_RANGE : logprob(of[token], log_of_all), results);
        put(lost ? LEFT_RANGE : chosen(t, least, &asked), results);
        for (i32 i = 0, next = -1; i < asked.num_likeliest; i++) {
            put(next = likeliest(of, next), results);
            put(lost ? LEFT_RANGE : logprob(of[next], log_of_all), results);
        }
        for (int i = 0; all_logits && i < V; i++) put(logits[i], all_logits);
    }
    free(seen), free(count), free(asked.biased), free(asked.bias), free(asked.stops);
}

static Cached cache(size_t n) {
    Cached found = {room(n, H), room(n, sizeof(i32)), room(n, sizeof(i32))};
    return found;
}

int main(int argc, char **argv) {
    i64 **rows[] = {&stream, &row, &q, &k, &v, &mixed, &gate, &up, &sum, &score, &logits, &below, &ordered, &told};
    if (argc < 4) fail("usage: audit MODEL REQUESTS RESULTS [LOGITS]");
    file = opened(argv[1], "rb");
    read_model();
    fclose(file);
    file = opened(argv[2], "rb");
    FILE *results = opened(argv[3], "wb"), *all_logits = argc > 4 ? opened(argv[4], "wb") : NULL;
    int texts = number_in(0, INT32_MAX), longest = number_in(1, MAX_POSITIONS);
    i64 most = larger(larger(larger(D, F), larger(N * H, V)), longest);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) *rows[i] = room(most, sizeof(i64));
    for (Layer *l = layers; l < layers + L; l++) {
        l->keys = cache((size_t) longest * K);
        l->values = cache((size_t) longest * K);
    }
    while (texts--) audit_text(longest, results, all_logits);
    if (fclose(results) || (all_logits && fclose(all_logits))) fail("a result cannot be written");
    return 0;
}
