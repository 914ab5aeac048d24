// Operators of steps of generation on a CPU: a product of few rows with what stands before and after it, and attention
// of one query. native.py compiles this file and registers the operators, by PyTorch's stable C interface.

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

typedef void *Tensor;
typedef uint64_t Value;  // an argument or a result: a number, or a tensor that the operator owns
extern int32_t aoti_torch_get_data_ptr(Tensor, void **), aoti_torch_get_dtype(Tensor, int32_t *);
extern int32_t aoti_torch_get_sizes(Tensor, int64_t **), aoti_torch_get_strides(Tensor, int64_t **);
extern int32_t aoti_torch_get_dim(Tensor, int64_t *), aoti_torch_get_numel(Tensor, int64_t *);
extern int32_t aoti_torch_delete_tensor_object(Tensor);
extern int32_t aoti_torch_empty_strided(
    int64_t, const int64_t *, const int64_t *, int32_t, int32_t, int32_t, Tensor *);
extern int32_t aoti_torch_library_init_impl(const char *, const char *, const char *, uint32_t, void **);
extern int32_t aoti_torch_library_impl(void *, const char *, void (*)(Value *, uint64_t, uint64_t));
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

typedef struct {
    void *data;
    int64_t dim, count, *sizes, *strides;
    int32_t dtype;
} View;

static View view(Value value) {
    View v;
    Tensor t = (Tensor)value;
    aoti_torch_get_data_ptr(t, &v.data), aoti_torch_get_dim(t, &v.dim), aoti_torch_get_numel(t, &v.count);
    aoti_torch_get_sizes(t, &v.sizes), aoti_torch_get_strides(t, &v.strides), aoti_torch_get_dtype(t, &v.dtype);
    return v;
}

static Tensor empty(int64_t dim, const int64_t *sizes, int32_t dtype, void **data) {
    int64_t strides[8], step = 1;
    for (int64_t i = dim - 1; i >= 0; step *= sizes[i--]) strides[i] = step;
    Tensor made;
    aoti_torch_empty_strided(dim, sizes, strides, dtype, 0, 0, &made);
    aoti_torch_get_data_ptr(made, data);
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

static inline void put(void *to, int32_t dtype, int64_t at, float x) {
    if (dtype == FLOAT) ((float *)to)[at] = x;
    else ((uint16_t *)to)[at] = narrow(x);
}

static void load(float *to, const View *from, int64_t first, int64_t count) {
    if (from->dtype == FLOAT) memcpy(to, (const float *)from->data + first, 4 * count);
    else
        for (int64_t i = 0; i < count; i++) to[i] = wide(((const uint16_t *)from->data)[first + i]);
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
    View w, scales, bias, residual;
    float *x;
    int64_t rows, columns, row, out;  // ``row``: numbers from a row of x to the next
    int32_t dtype;
    void *y;
} Product;

static void multiply(int64_t first, int64_t end, void *context) {
    Product *job = context;
    int64_t n = job->columns, spans, few, size = job->w.dtype == INT8 ? 1 : job->w.dtype == FLOAT ? 4 : 2;
    Multiply *ways[3][2] = {{float_one, float_few}, {half_one, half_few}, {byte_one, byte_few}};
    Multiply **way = ways[size == 4 ? 0 : size == 2 ? 1 : 2];
    for (int64_t at = first; at < end; at += spans) {
        spans = end - at >= 4 ? 4 : 1;
        for (int64_t row = 0; row < job->rows; row += few) {
            Floats sums[FEW * 4];
            const char *w = (const char *)job->w.data + at * n * LANES * size;
            const float *x = job->x + row * job->row;
            few = job->rows - row >= FEW ? FEW : 1;
            int64_t step = few == 1 ? 1 : spans >= SPANS ? SPANS : 0;
            if (!step) few = step = 1;
            for (int64_t span = 0; span < spans; span += step) {
                way[few > 1](w + span * n * LANES * size, x, n, sums);
                for (int64_t i = 0; i < few * step * LANES; i++) {
                    int64_t r = row + i / (step * LANES), c = (at + span) * LANES + i % (step * LANES);
                    if (c >= job->out) continue;
                    float y = ((float *)sums)[i];
                    if (job->scales.count) y *= get(&job->scales, c);
                    if (job->bias.count) y += get(&job->bias, c);
                    if (job->residual.count) y += get(&job->residual, r * job->out + c);
                    put(job->y, job->dtype, r * job->out + c, y);
                }
            }
        }
    }
}

// product(Tensor x, Tensor w, int out, Tensor scales, Tensor bias, Tensor residual, Tensor norm, float eps, bool gated)
//     -> Tensor: w [spans, columns / step, LANES, step]; tensors without elements are absent.
void product(Value *stack, uint64_t inputs, uint64_t outputs) {
    View x = view(stack[0]), norm = view(stack[6]);
    Product job = {view(stack[1]), view(stack[3]), view(stack[4]), view(stack[5])};
    double eps;
    memcpy(&eps, stack + 7, 8);
    int gated = stack[8] & 1;
    int64_t given = x.sizes[x.dim - 1], n = gated ? given / 2 : given, sizes[8];
    job.columns = job.w.sizes[1] * job.w.sizes[3], job.out = stack[2], job.dtype = x.dtype;
    job.rows = x.count / given, job.row = job.columns;
#ifdef __AVX512VNNI__
    if (job.w.dtype == INT8) job.row += (job.columns + BLOCK - 1) / BLOCK + job.columns / 2;
#endif
    memcpy(sizes, x.sizes, 8 * x.dim);
    sizes[x.dim - 1] = job.out;
    job.x = calloc((job.rows + 1) * job.row, 4);
    float *other = job.x + job.rows * job.row;
    for (int64_t row = 0; row < job.rows; row++) {
        float *to = job.x + row * job.row;
        load(to, &x, row * given, n);
        if (gated) {
            load(other, &x, row * given + n, n);
            for (int64_t k = 0; k < n; k++) to[k] *= other[k] / (1 + exponential(-to[k]));
        }
        if (norm.count) {
            float squares = 0;
            for (int64_t k = 0; k < n; k++) squares += to[k] * to[k];
            float scale = 1 / sqrt(squares / n + eps);
            load(other, &norm, 0, n);
            for (int64_t k = 0; k < n; k++) to[k] *= scale * other[k];
        }
#ifdef __AVX512VNNI__
        if (job.w.dtype == INT8) quantise(to, job.columns);
#endif
    }
    Tensor made = empty(x.dim, sizes, x.dtype, &job.y);
    torch_parallel_for(0, job.w.sizes[0], GRAIN / (job.columns * job.rows * LANES + 1) + 1, multiply, &job);
    free(job.x);
    aoti_torch_delete_tensor_object((Tensor)stack[0]), aoti_torch_delete_tensor_object((Tensor)stack[1]);
    for (int i = 3; i < 7; i++) aoti_torch_delete_tensor_object((Tensor)stack[i]);
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
    View q, k, v, cos, sin, keys, values;
    int pairs;
    float scale;
    void *y;
} Attention;

// The head at ``at``, turned if there are cosines [batch or 1, 1, 1, half].
static void turn(const Attention *job, float *to, const View *from, int64_t at, int64_t batch) {
    int64_t half = job->cos.count ? job->cos.sizes[3] : 0, place = half && job->cos.sizes[0] > 1 ? batch * half : 0;
    load(to, from, at, from->sizes[3]);
    for (int64_t i = 0; i < half; i++) {
        float *a = to + (job->pairs ? 2 * i : i), *b = a + (job->pairs ? 1 : half), was = *a;
        float cosine = get(&job->cos, place + i), sine = get(&job->sin, place + i);
        *a = was * cosine - *b * sine, *b = was * sine + *b * cosine;
    }
}

static void attend_groups(int64_t first, int64_t end, void *context) {
    Attention *job = context;
    View *keys = &job->keys, *values = &job->values;
    const int64_t *past = keys->strides, *other = values->strides, groups = job->k.sizes[1];
    int64_t n = job->q.sizes[3], m = job->v.sizes[3], slots = keys->sizes[2], heads = job->q.sizes[1] / groups;
    float *q = malloc(4 * (n + m + slots)), *out = q + n, *weights = out + m;
    for (int64_t index = first; index < end; index++) {
        int64_t batch = index / groups, group = index % groups;
        int64_t key = batch * past[0] + group * past[1], value = batch * other[0] + group * other[1];
        turn(job, q, &job->k, batch * job->k.strides[0] + group * job->k.strides[1], batch);
        for (int64_t i = 0; i < n; i++) put(keys->data, keys->dtype, key + (slots - 1) * past[2] + i, q[i]);
        load(out, &job->v, batch * job->v.strides[0] + group * job->v.strides[1], m);
        for (int64_t i = 0; i < m; i++) put(values->data, values->dtype, value + (slots - 1) * other[2] + i, out[i]);
        for (int64_t head = group * heads; head < (group + 1) * heads; head++) {
            turn(job, q, &job->q, batch * job->q.strides[0] + head * job->q.strides[1], batch);
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
            for (int64_t i = 0; i < m; i++)
                put(job->y, job->q.dtype, (batch * job->q.sizes[1] + head) * m + i, out[i] / total);
        }
    }
    free(q);
}

// attend(Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin, Tensor(a!) keys, Tensor(b!) values, float scale,
//     bool pairs) -> Tensor: q [batch, heads, 1, head_dim]; k and v go into the last slots of keys and values.
void attend(Value *stack, uint64_t inputs, uint64_t outputs) {
    Attention job = {view(stack[0]), view(stack[1]), view(stack[2]), view(stack[3]), view(stack[4]), view(stack[5]), view(stack[6])};
    double scale;
    memcpy(&scale, stack + 7, 8);
    job.scale = scale, job.pairs = stack[8] & 1;
    int64_t groups = job.k.sizes[1], sizes[4] = {job.q.sizes[0], job.q.sizes[1], 1, job.v.sizes[3]};
    Tensor made = empty(4, sizes, job.q.dtype, &job.y);
    int64_t work = job.keys.sizes[2] * (job.q.sizes[3] + job.v.sizes[3]) * (job.q.sizes[1] / groups);
    torch_parallel_for(0, sizes[0] * groups, GRAIN / (work + 1) + 1, attend_groups, &job);
    for (int i = 0; i < 7; i++) aoti_torch_delete_tensor_object((Tensor)stack[i]);
    stack[0] = (Value)made;
}

// Register both operators for tensors on a CPU; 0 if PyTorch took them.
int enter(void) {
    void *library;
    return aoti_torch_library_init_impl("kinformer_step", "CPU", __FILE__, __LINE__, &library) ||
           aoti_torch_library_impl(library, "product", product) || aoti_torch_library_impl(library, "attend", attend);
}
