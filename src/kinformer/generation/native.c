// Operators of steps of generation on a CPU: products of few rows with what stands before and after them, attention of
// one query, and a chain of both. native.py compiles this file and registers the operators, by PyTorch's stable C
// interface.

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

typedef void *Tensor;
typedef void *List;
typedef uint64_t Value;  // an argument or a result: a number, or a tensor or list that the operator owns
extern int32_t aoti_torch_get_data_ptr(Tensor, void **), aoti_torch_get_dtype(Tensor, int32_t *);
extern int32_t aoti_torch_get_sizes(Tensor, int64_t **), aoti_torch_get_strides(Tensor, int64_t **);
extern int32_t aoti_torch_get_dim(Tensor, int64_t *), aoti_torch_get_numel(Tensor, int64_t *);
extern int32_t aoti_torch_delete_tensor_object(Tensor);
extern int32_t aoti_torch_empty_strided(
    int64_t, const int64_t *, const int64_t *, int32_t, int32_t, int32_t, Tensor *);
extern int32_t aoti_torch_library_init_impl(const char *, const char *, const char *, uint32_t, void **);
extern int32_t aoti_torch_library_impl(void *, const char *, void (*)(Value *, uint64_t, uint64_t));
extern int32_t torch_list_size(List, size_t *), torch_list_get_item(List, size_t, Value *), torch_delete_list(List);
extern int32_t torch_parallel_for(int64_t, int64_t, int64_t, void (*)(int64_t, int64_t, void *), void *);

enum { INT8 = 1, FLOAT = 6 };  // the numbers of PyTorch's dtypes; the third is bfloat16
enum { LANES = 16, FEW = 4, GRAIN = 1 << 15 };
#ifdef __AVX512F__
enum { SPANS = 4 };
#else
enum { SPANS = 1 };
#endif

typedef float Floats __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef float Quarter __attribute__((vector_size(16), aligned(4), may_alias));
typedef uint32_t Words __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
typedef int16_t Shorts __attribute__((vector_size(2 * LANES), aligned(1), may_alias));
typedef int32_t Ints __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

typedef struct {  // a tensor of up to four axes, the last one last
    char *data;
    int64_t dtype, count, sizes[4], strides[4];
} View;

static View view(Tensor t) {
    View v;
    int64_t dim, *sizes, *strides;
    int32_t dtype;
    aoti_torch_get_data_ptr(t, (void **)&v.data), aoti_torch_get_dtype(t, &dtype), aoti_torch_get_numel(t, &v.count);
    aoti_torch_get_dim(t, &dim), aoti_torch_get_sizes(t, &sizes), aoti_torch_get_strides(t, &strides);
    v.dtype = dtype;
    for (int64_t i = 0, at = dim - 4; i < 4; i++, at++) {
        v.sizes[i] = at < 0 ? 1 : sizes[at];
        v.strides[i] = at < 0 ? 0 : strides[at];
    }
    return v;
}

static Tensor empty(int64_t dim, const int64_t *sizes, int32_t dtype) {
    int64_t strides[8], step = 1;
    for (int64_t i = dim - 1; i >= 0; step *= sizes[i--]) strides[i] = step;
    Tensor made;
    aoti_torch_empty_strided(dim, sizes, strides, dtype, 0, 0, &made);
    return made;
}

static inline float wide(uint16_t half) {
    uint32_t word = (uint32_t)half << 16;
    float x;
    memcpy(&x, &word, 4);
    return x;
}

static inline uint16_t narrow(float x) {  // to the nearest, ties to even; NaN stays NaN
    uint32_t word;
    memcpy(&word, &x, 4);
    return x != x ? 0x7fc0 : (word + 0x7fff + (word >> 16 & 1)) >> 16;
}

static inline float get(const View *from, int64_t at) {
    return from->dtype == FLOAT ? ((const float *)from->data)[at] : wide(((const uint16_t *)from->data)[at]);
}

static inline void load(float *to, const View *from, int64_t first, int64_t count) {
    if (from->dtype == FLOAT) memcpy(to, (const float *)from->data + first, 4 * count);
    else
        for (int64_t i = 0; i < count; i++) to[i] = wide(((const uint16_t *)from->data)[first + i]);
}

static inline void store(const View *to, int64_t first, const float *from, int64_t count) {
    if (to->dtype == FLOAT) memcpy((float *)to->data + first, from, 4 * count);
    else
        for (int64_t i = 0; i < count; i++) ((uint16_t *)to->data)[first + i] = narrow(from[i]);
}

static inline float exponential(float x) {  // relative error 2e-7; a loop over it becomes vector code
    x = x < -87 ? -87 : x > 88 ? 88 : x;
    float n = rintf(x * 1.44269504f), r = x - n * 0.693359375f + n * 2.12194440e-4f, y = 1.0f / 720;
    y = (((((y * r + 1.0f / 120) * r + 1.0f / 24) * r + 1.0f / 6) * r + 0.5f) * r + 1) * r + 1;
    int32_t power = ((int32_t)n + 127) << 23;
    memcpy(&n, &power, 4);
    return y * n;
}

#ifdef __AVX512F__  // GCC's own conversions are slower
#define HALVES(x) ((Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)(x))), 16))
#else
#define HALVES(x) ((Floats)(__builtin_convertvector(*(const Halves *)(x), Words) << 16))
#endif
#define PAIRS(x) __builtin_convertvector(*(const Shorts *)(x), Ints)
#define LOW(x) __builtin_convertvector(PAIRS(x) << 24 >> 24, Floats)
#define HIGH(x) __builtin_convertvector(PAIRS(x) >> 8, Floats)
#define FLOATS(x) (*(const Floats *)(x))
#define FIRST(x) ((Floats)(*(const Words *)(x) << 16))
#define SECOND(x) ((Floats)(*(const Words *)(x) & 0xffff0000))
#define ITSELF(x) (x)

// The products [r][s] of R inputs x [n] and S spans, each of LANES rows of weights. A span is stored column by column, in
// 16 and 8 bits two columns at a time. PARTS > 1 is for one input and one span: it reads the span in the order of memory,
// which is the fastest, and adds PARTS sums side by side.
#define MULTIPLY(NAME, TYPE, STEP, ONE, OTHER, R, S, PARTS) \
    static void NAME(const void *weights, const float *x, int64_t n, Floats *out) { \
        Floats sums[R][S] = {0}, parts[PARTS] = {0}; \
        int64_t first = 0; \
        for (; PARTS > 1 && first + PARTS * STEP <= n; first += PARTS * STEP) \
            for (int part = 0; part < PARTS; part++) { \
                const TYPE *at = (const TYPE *)weights + (first + part * STEP) * LANES; \
                parts[part] += ONE(at) * x[first + part * STEP]; \
                if (STEP == 2) parts[part] += OTHER(at) * x[first + part * STEP + 1]; \
            } \
        for (int part = 0; part < PARTS; part++) sums[0][0] += parts[part]; \
        for (int64_t k = first; k < n; k += STEP) \
            for (int s = 0; s < S; s++) { \
                const TYPE *at = (const TYPE *)weights + (s * n + k) * LANES; \
                Floats one = ONE(at), other = OTHER(at); \
                for (int r = 0; r < R; r++) { \
                    sums[r][s] += one * x[r * n + k]; \
                    if (STEP == 2) sums[r][s] += other * x[r * n + k + 1]; \
                } \
            } \
        memcpy(out, sums, sizeof sums); \
    }
#define MULTIPLY_EACH(KIND, TYPE, STEP, ONE, OTHER) \
    MULTIPLY(KIND##_one, TYPE, STEP, ONE, OTHER, 1, 1, 4) \
    MULTIPLY(KIND##_few, TYPE, STEP, ONE, OTHER, FEW, SPANS, 1)
MULTIPLY_EACH(float, float, 1, FLOATS, FLOATS)
MULTIPLY_EACH(half, uint16_t, 2, FIRST, SECOND)
#ifdef __AVX512VNNI__
// The same of 8-bit weights, with inputs of 16 bits: behind each row x [n] stand its blocks' steps and whole numbers,
// two in a word. 127 * MOST * BLOCK < 2^31, so a sum of a block is exact.
enum { BLOCK = 512, MOST = 32767 };
#define MULTIPLY_BYTES(NAME, R, S, PARTS) \
    static void NAME(const void *weights, const float *x, int64_t n, Floats *out) { \
        Floats sums[R][S] = {0}; \
        int64_t blocks = (n + BLOCK - 1) / BLOCK, row = n + blocks + n / 2; \
        for (int64_t block = 0; block < blocks; block++) { \
            __m512i whole[R][S], parts[PARTS]; \
            memset(whole, 0, sizeof whole), memset(parts, 0, sizeof parts); \
            int64_t first = block * BLOCK, end = first + BLOCK < n ? first + BLOCK : n; \
            for (; PARTS > 1 && first + PARTS * 2 <= end; first += PARTS * 2) \
                for (int part = 0; part < PARTS; part++) { \
                    const int8_t *at = (const int8_t *)weights + (first + part * 2) * LANES; \
                    __m512i w = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const void *)at)); \
                    __m512i both = _mm512_set1_epi32(((const int32_t *)(x + n + blocks))[first / 2 + part]); \
                    parts[part] = _mm512_dpwssd_epi32(parts[part], w, both); \
                } \
            for (int part = 0; part < PARTS; part++) whole[0][0] = _mm512_add_epi32(whole[0][0], parts[part]); \
            for (int64_t k = first; k < end; k += 2) \
                for (int s = 0; s < S; s++) { \
                    const int8_t *at = (const int8_t *)weights + (s * n + k) * LANES; \
                    __m512i w = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const void *)at)); \
                    for (int r = 0; r < R; r++) { \
                        __m512i both = _mm512_set1_epi32(((const int32_t *)(x + r * row + n + blocks))[k / 2]); \
                        whole[r][s] = _mm512_dpwssd_epi32(whole[r][s], w, both); \
                    } \
                } \
            for (int r = 0; r < R; r++) \
                for (int s = 0; s < S; s++) sums[r][s] += x[r * row + n + block] * (Floats)_mm512_cvtepi32_ps(whole[r][s]); \
        } \
        memcpy(out, sums, sizeof sums); \
    }
MULTIPLY_BYTES(byte_one, 1, 1, 4)
MULTIPLY_BYTES(byte_few, FEW, SPANS, 1)

static void quantise(float *x, int64_t n) {
    int64_t blocks = (n + BLOCK - 1) / BLOCK;
    int16_t *whole = (int16_t *)(x + n + blocks);
    for (int64_t block = 0; block < blocks; block++) {
        int64_t first = block * BLOCK, end = first + BLOCK < n ? first + BLOCK : n;
        float top = 0;
        for (int64_t k = first; k < end; k++) top = fabsf(x[k]) > top ? fabsf(x[k]) : top;
        float scale = top > 0 ? MOST / top : 0;
        x[n + block] = top / MOST;
        for (int64_t k = first; k < end; k++) whole[k] = (int16_t)rintf(x[k] * scale);
    }
}
#else
MULTIPLY_EACH(byte, int8_t, 2, LOW, HIGH)
#endif
typedef void Multiply(const void *, const float *, int64_t, Floats *);

typedef struct {
    View x, w, scales, bias, residual, norm, shift, y;
} Around;  // tensors without elements are absent

typedef struct {
    const Around *in;
    float *x;
    int64_t columns, row;  // ``row``: numbers from a row of x to the next
} Product;

// Write ``count`` sums of a row, from a column on, with what stands behind the product.
static inline __attribute__((always_inline)) void finish(
    const Around *in, float *y, int64_t row, int64_t column, int64_t count) {
    float other[LANES];
    if (in->scales.count) {
        load(other, &in->scales, column, count);
        for (int64_t i = 0; i < count; i++) y[i] *= other[i];
    }
    if (in->bias.count) {
        load(other, &in->bias, column, count);
        for (int64_t i = 0; i < count; i++) y[i] += other[i];
    }
    if (in->residual.count) {
        load(other, &in->residual, row + column, count);
        for (int64_t i = 0; i < count; i++) y[i] += other[i];
    }
    store(&in->y, row + column, y, count);
}

static void multiply(int64_t first, int64_t end, void *context) {
    const Product *job = context;
    const Around *in = job->in;
    int64_t n = job->columns, out = in->y.sizes[3], rows = in->y.count / out, spans, few;
    int64_t size = in->w.dtype == INT8 ? 1 : in->w.dtype == FLOAT ? 4 : 2;
    Multiply *ways[3][2] = {{float_one, float_few}, {half_one, half_few}, {byte_one, byte_few}};
    Multiply **way = ways[size == 4 ? 0 : size == 2 ? 1 : 2];
    for (int64_t at = first; at < end; at += spans) {
        spans = end - at >= 4 ? 4 : 1;
        for (int64_t row = 0; row < rows; row += few) {
            Floats sums[FEW * 4];
            const char *w = in->w.data + at * n * LANES * size;
            const float *x = job->x + row * job->row;
            few = rows - row >= FEW ? FEW : 1;
            int64_t step = few == 1 ? 1 : spans >= SPANS ? SPANS : 0;
            if (!step) few = step = 1;
            for (int64_t span = 0; span < spans; span += step) {
                way[few > 1](w + span * n * LANES * size, x, n, sums);
                for (int64_t i = 0; i < few * step; i++) {
                    int64_t r = row + i / step, c = (at + span + i % step) * LANES;
                    if (out - c >= LANES) finish(in, (float *)(sums + i), r * out, c, LANES);
                    else finish(in, (float *)(sums + i), r * out, c, out - c);
                }
            }
        }
    }
}

// What happens to x before the product: ``form`` is a norm, an activation, and whether x has two halves, of which the
// activated first multiplies the second.
enum { RMS_NORM = 1, LAYER_NORM = 2, NORMS = 3, SILU = 4, GELU_TANH = 8, GELU = 12, ACTIVATIONS = 12, GATED = 16 };

static void activate(float *x, int64_t n, int64_t form) {
    if (form == SILU)
        for (int64_t k = 0; k < n; k++) x[k] /= 1 + exponential(-x[k]);
    if (form == GELU_TANH)
        for (int64_t k = 0; k < n; k++) x[k] /= 1 + exponential(-1.59576912f * (x[k] + 0.044715f * x[k] * x[k] * x[k]));
    if (form == GELU)
        for (int64_t k = 0; k < n; k++) {  // the error function by Abramowitz and Stegun 7.1.26, to within 1.5e-7
            float z = fabsf(x[k]) * 0.707106781f, t = 1 / (1 + 0.3275911f * z);
            float p = (((1.061405429f * t - 1.453152027f) * t + 1.421413741f) * t - 0.284496736f) * t + 0.254829592f;
            float tail = 0.5f * p * t * exponential(-z * z);
            x[k] *= x[k] < 0 ? tail : 1 - tail;
        }
}

static void normalise(float *x, int64_t n, const Around *in, int64_t form, double eps, float *other) {
    float mean = 0, squares = 0;
    if (form == LAYER_NORM) {
        for (int64_t k = 0; k < n; k++) mean += x[k];
        mean /= n;
        for (int64_t k = 0; k < n; k++) x[k] -= mean;
    }
    for (int64_t k = 0; k < n; k++) squares += x[k] * x[k];
    float scale = 1 / sqrt(squares / n + eps);
    for (int64_t k = 0; k < n; k++) x[k] *= scale;
    if (in->norm.count) {
        load(other, &in->norm, 0, n);
        for (int64_t k = 0; k < n; k++) x[k] *= other[k];
    }
    if (in->shift.count) {
        load(other, &in->shift, 0, n);
        for (int64_t k = 0; k < n; k++) x[k] += other[k];
    }
}

static void run_product(const Around *in, double eps, int64_t form) {
    int64_t given = in->x.sizes[3], n = form & GATED ? given / 2 : given, rows = in->x.count / given;
    Product job = {in, 0, in->w.sizes[1] * in->w.sizes[3], in->w.sizes[1] * in->w.sizes[3]};
#ifdef __AVX512VNNI__
    if (in->w.dtype == INT8) job.row += (job.columns + BLOCK - 1) / BLOCK + job.columns / 2;
#endif
    job.x = calloc((rows + 1) * job.row, 4);
    float *other = job.x + rows * job.row;
    for (int64_t row = 0; row < rows; row++) {
        float *to = job.x + row * job.row;
        load(to, &in->x, row * given, n);
        activate(to, n, form & ACTIVATIONS);
        if (form & GATED) {
            load(other, &in->x, row * given + n, n);
            for (int64_t k = 0; k < n; k++) to[k] *= other[k];
        }
        if (form & NORMS) normalise(to, n, in, form & NORMS, eps, other);
#ifdef __AVX512VNNI__
        if (in->w.dtype == INT8) quantise(to, job.columns);
#endif
    }
    torch_parallel_for(0, in->w.sizes[0], GRAIN / (job.columns * rows * LANES + 1) + 1, multiply, &job);
    free(job.x);
}

// product(Tensor x, Tensor w, int out, Tensor scales, Tensor bias) -> Tensor: w [spans, columns / step, LANES, step]
void product(Value *stack, uint64_t inputs, uint64_t outputs) {
    Tensor x = (Tensor)stack[0];
    Around in = {view(x), view((Tensor)stack[1]), view((Tensor)stack[3]), view((Tensor)stack[4])};
    int64_t dim, *given, sizes[8];
    aoti_torch_get_dim(x, &dim), aoti_torch_get_sizes(x, &given);
    memcpy(sizes, given, 8 * dim);
    sizes[dim - 1] = stack[2];
    Tensor made = empty(dim, sizes, in.x.dtype);
    in.y = view(made);
    run_product(&in, 0, 0);
    for (int i = 0; i < 5; i++)
        if (i != 2) aoti_torch_delete_tensor_object((Tensor)stack[i]);
    stack[0] = (Value)made;
}

static inline float lanes(Floats all) {  // their sum, by quarters, which stay in registers
    float sums[LANES];
    memcpy(sums, &all, sizeof all);
    Quarter four = {0};
    for (int i = 0; i < LANES; i += 4) four += *(Quarter *)(sums + i);
    return (four[0] + four[1]) + (four[2] + four[3]);
}

// The dot product of x and q [n], and out += weight * x.
#define ATTEND(KIND, TYPE, WIDEN, WIDE) \
    static float dot_##KIND(const TYPE *x, const float *q, int64_t n) { \
        Floats all = {0}; \
        int64_t k = 0; \
        for (; k + LANES <= n; k += LANES) all += WIDEN(x + k) * FLOATS(q + k); \
        float sum = lanes(all); \
        for (; k < n; k++) sum += WIDE(x[k]) * q[k]; \
        return sum; \
    } \
    static void add_##KIND(float *out, float weight, const TYPE *x, int64_t n) { \
        int64_t k = 0; \
        for (; k + LANES <= n; k += LANES) *(Floats *)(out + k) += weight * WIDEN(x + k); \
        for (; k < n; k++) out[k] += weight * WIDE(x[k]); \
    }
ATTEND(float, float, FLOATS, ITSELF)
ATTEND(half, uint16_t, HALVES, wide)

typedef struct {
    View q, k, v, cos, sin, keys, values, y;
} Past;  // q [batch, heads, 1, head_dim]; k and v go into the last slots of keys and values

typedef struct {
    const Past *in;
    float scale;
    int64_t pairs;  // whether neighbours are turned together
} Attention;

// The head at ``at``, turned if there are cosines [batch or 1, 1, 1, half].
static void turn(const Attention *job, float *to, const View *from, int64_t at, int64_t batch) {
    const View *cos = &job->in->cos, *sin = &job->in->sin;
    int64_t half = cos->count ? cos->sizes[3] : 0, place = half && cos->sizes[0] > 1 ? batch * half : 0;
    load(to, from, at, from->sizes[3]);
    for (int64_t i = 0; i < half; i++) {
        float *a = to + (job->pairs ? 2 * i : i), *b = a + (job->pairs ? 1 : half), was = *a;
        float cosine = get(cos, place + i), sine = get(sin, place + i);
        *a = was * cosine - *b * sine, *b = was * sine + *b * cosine;
    }
}

static void attend_groups(int64_t first, int64_t end, void *context) {
    const Attention *job = context;
    const Past *in = job->in;
    const View *keys = &in->keys, *values = &in->values;
    const int64_t *past = keys->strides, *other = values->strides, groups = in->k.sizes[1];
    int64_t n = in->q.sizes[3], m = in->v.sizes[3], slots = keys->sizes[2], heads = in->q.sizes[1] / groups;
    float *q = malloc(4 * (n + m + slots)), *out = q + n, *weights = out + m;
    for (int64_t index = first; index < end; index++) {
        int64_t batch = index / groups, group = index % groups;
        int64_t key = batch * past[0] + group * past[1], value = batch * other[0] + group * other[1];
        turn(job, q, &in->k, batch * in->k.strides[0] + group * in->k.strides[1], batch);
        store(keys, key + (slots - 1) * past[2], q, n);
        load(out, &in->v, batch * in->v.strides[0] + group * in->v.strides[1], m);
        store(values, value + (slots - 1) * other[2], out, m);
        for (int64_t head = group * heads; head < (group + 1) * heads; head++) {
            turn(job, q, &in->q, batch * in->q.strides[0] + head * in->q.strides[1], batch);
            float top = -INFINITY, total = 0;
            for (int64_t j = 0; j < slots; j++) {
                int64_t at = key + j * past[2];
                weights[j] = keys->dtype == FLOAT ? dot_float((float *)keys->data + at, q, n)
                                                  : dot_half((uint16_t *)keys->data + at, q, n);
                top = weights[j] > top ? weights[j] : top;
            }
            for (int64_t j = 0; j < slots; j++) total += weights[j] = exponential(job->scale * (weights[j] - top));
            memset(out, 0, 4 * m);
            for (int64_t j = 0; j < slots; j++) {
                int64_t at = value + j * other[2];
                if (values->dtype == FLOAT) add_float(out, weights[j], (float *)values->data + at, m);
                else add_half(out, weights[j], (uint16_t *)values->data + at, m);
            }
            for (int64_t i = 0; i < m; i++) out[i] /= total;
            store(&in->y, (batch * in->q.sizes[1] + head) * m, out, m);
        }
    }
    free(q);
}

static void run_attention(const Past *in, double scale, int64_t pairs) {
    Attention job = {in, scale, pairs};
    int64_t groups = in->k.sizes[1];
    int64_t work = in->keys.sizes[2] * (in->q.sizes[3] + in->v.sizes[3]) * (in->q.sizes[1] / groups);
    torch_parallel_for(0, in->q.sizes[0] * groups, GRAIN / (work + 1) + 1, attend_groups, &job);
}

// A chain of calls, each a row of the program: its eight views by number, and two more arguments. The first views are
// of the tensors. The others are rows of the program, and their data is in the chain's result, in numbers.
typedef struct {
    int64_t attends, flag;
    double number;
    int64_t views[8];
} Call;
typedef struct {
    int64_t views, calls, numbers, dtype, padding[7];
} Program;

// chain(Tensor(a!)[] tensors, Tensor program) -> Tensor: the numbers that the calls write, one after the other
void chain(Value *stack, uint64_t inputs, uint64_t outputs) {
    List tensors = (List)stack[0];
    const Program *program = (const Program *)view((Tensor)stack[1]).data;
    const View *parts = (const View *)(program + 1);
    const Call *calls = (const Call *)(parts + program->views);
    size_t given;
    torch_list_size(tensors, &given);
    View *views = malloc((given + program->views) * sizeof(View));
    Value *items = malloc(given * sizeof(Value));
    for (size_t i = 0; i < given; i++) {
        torch_list_get_item(tensors, i, items + i);
        views[i] = view((Tensor)items[i]);
    }
    Tensor made = empty(1, &program->numbers, program->dtype);
    View whole = view(made);
    for (int64_t i = 0; i < program->views; i++) {
        views[given + i] = parts[i];
        views[given + i].data = whole.data + (int64_t)parts[i].data * (whole.dtype == FLOAT ? 4 : 2);
    }
    for (const Call *call = calls; call < calls + program->calls; call++) {
        View of[8];
        for (int i = 0; i < 8; i++) of[i] = views[call->views[i]];
        if (call->attends) run_attention((const Past *)of, call->number, call->flag);
        else run_product((const Around *)of, call->number, call->flag);
    }
    for (size_t i = 0; i < given; i++) aoti_torch_delete_tensor_object((Tensor)items[i]);
    free(views), free(items);
    torch_delete_list(tensors), aoti_torch_delete_tensor_object((Tensor)stack[1]);
    stack[0] = (Value)made;
}

// Register the operators for tensors on a CPU; 0 if PyTorch took them.
int enter(void) {
    void *library;
    return aoti_torch_library_init_impl("kinformer_step", "CPU", __FILE__, __LINE__, &library) ||
           aoti_torch_library_impl(library, "product", product) || aoti_torch_library_impl(library, "chain", chain);
}
