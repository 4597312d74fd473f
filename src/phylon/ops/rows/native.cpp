// Kernels over the rows of a training step, as plain C over pointers. Every result is the same for any number of threads.
#include "activation.h"
#include "adamw.h"
#include "experts.h"
#include "loss.h"
#include "norm.h"
#include "rotary.h"

template <class T> static void column_sums(const T* x, float* parts, long rows, long cols) {
#pragma omp parallel for schedule(static)
    for (int s = 0; s < SHARES; ++s) {
        float* out = parts + (long)s * cols;
        memset(out, 0, cols * sizeof(float));
        Share part = share(s, rows);
        for (long r = part.first; r < part.last; ++r)
            for (long c = 0; c < cols; c += W)
                store(out + c, load(out + c, cols - c) + load(x + r * cols + c, cols - c), cols - c);
    }
}

#define FLOAT(p) ((float*)(p))
#define BF16(p) ((bf16*)(p))

extern "C" {

// types: 1 is a bf16 x, 2 a bf16 h, 4 a bf16 y.
void rows_norm(int types, const void* x, const void* h, const void* w, const void* b, void* total, void* y, void* mean,
               void* rstd, long rows, long d, float eps, int centred) {
#define CASE(N, X, H, Y)                                                                                              \
    case N:                                                                                                           \
        return norm_forward((const X*)x, (const H*)h, FLOAT(w), FLOAT(b), (X*)total, (Y*)y, FLOAT(mean), FLOAT(rstd), \
                            rows, d, eps, centred);
    switch (types) {
        CASE(0, float, float, float)
        CASE(1, bf16, float, float)
        CASE(2, float, bf16, float)
        CASE(3, bf16, bf16, float)
        CASE(4, float, float, bf16)
        CASE(5, bf16, float, bf16)
        CASE(6, float, bf16, bf16)
        CASE(7, bf16, bf16, bf16)
    }
#undef CASE
}

void rows_norm_backward(int types, const void* dy, const void* dtotal, const void* x, const void* w, const void* mean,
                        const void* rstd, void* dx, void* parts, void* dw, void* db, long rows, long d, int centred) {
#define CASE(N, X, Y)                                                                                                \
    case N:                                                                                                          \
        norm_backward((const Y*)dy, (const X*)dtotal, (const X*)x, FLOAT(w), FLOAT(mean), FLOAT(rstd), (X*)dx,       \
                      FLOAT(parts), rows, d, centred);                                                               \
        break;
    switch (types) {
        CASE(0, float, float)
        CASE(1, bf16, float)
        CASE(4, float, bf16)
        CASE(5, bf16, bf16)
    }
#undef CASE
    if (dw) add_shares(FLOAT(parts), FLOAT(dw), d);
    if (db) add_shares(FLOAT(parts) + SHARES * d, FLOAT(db), d);
}

#define KINDS(CALL)                                                                                                  \
    switch (kind) {                                                                                                  \
        case RELU: CALL(RELU); break;                                                                                \
        case GELU: CALL(GELU); break;                                                                                \
        case GELU_TANH: CALL(GELU_TANH); break;                                                                      \
        case SILU: CALL(SILU); break;                                                                                \
        case TANH: CALL(TANH); break;                                                                                \
    }

void rows_activation(int kind, int low, const void* x, const void* bias, const void* up, const void* up_bias, void* y,
                     long rows, long d) {
#define WIDE(K) act_forward<K>(FLOAT(x), FLOAT(bias), FLOAT(up), FLOAT(up_bias), FLOAT(y), rows, d)
#define LOW(K) act_forward<K>(BF16(x), FLOAT(bias), BF16(up), FLOAT(up_bias), BF16(y), rows, d)
    if (low) {
        KINDS(LOW)
    } else {
        KINDS(WIDE)
    }
#undef WIDE
#undef LOW
}

void rows_activation_backward(int kind, int low, const void* dy, const void* x, const void* bias, const void* up,
                              const void* up_bias, void* dx, void* dup, void* y, void* parts, void* db, void* dub,
                              long rows, long d) {
#define WIDE(K)                                                                                                       \
    act_backward<K>(FLOAT(dy), FLOAT(x), FLOAT(bias), FLOAT(up), FLOAT(up_bias), FLOAT(dx), FLOAT(dup), FLOAT(y),     \
                    FLOAT(parts), rows, d)
#define LOW(K)                                                                                                        \
    act_backward<K>(BF16(dy), BF16(x), FLOAT(bias), BF16(up), FLOAT(up_bias), BF16(dx), BF16(dup), BF16(y),           \
                    FLOAT(parts), rows, d)
    if (low) {
        KINDS(LOW)
    } else {
        KINDS(WIDE)
    }
#undef WIDE
#undef LOW
    if (db) add_shares(FLOAT(parts), FLOAT(db), d);
    if (dub) add_shares(FLOAT(parts) + SHARES * d, FLOAT(dub), d);
}

void rows_sum(int low, const void* x, void* parts, void* out, long rows, long cols) {
    low ? column_sums(BF16(x), FLOAT(parts), rows, cols) : column_sums(FLOAT(x), FLOAT(parts), rows, cols);
    add_shares(FLOAT(parts), FLOAT(out), cols);
}

void rows_cross_entropy(void* scores, const void* bias, const void* targets, const void* weights, void* losses,
                        long rows, long v, float cap, float smoothing, float z, int grad) {
    cross_entropy(FLOAT(scores), FLOAT(bias), (const int64_t*)targets, FLOAT(weights), FLOAT(losses), rows, v, cap,
                  smoothing, z, grad);
}

void rows_adamw(int low, void* w, void* copy, const void* grad, void* m, void* v, long n, float scale, float beta1,
                float beta2, float eps, float rate, float root, float keep) {
    if (low)
        adamw(FLOAT(w), BF16(copy), BF16(grad), FLOAT(m), FLOAT(v), n, scale, beta1, beta2, eps, rate, root, keep);
    else
        adamw(FLOAT(w), BF16(copy), FLOAT(grad), FLOAT(m), FLOAT(v), n, scale, beta1, beta2, eps, rate, root, keep);
}

double rows_square_sum(int low, const void* grad, long n) {
    return low ? square_sum(BF16(grad), n) : square_sum(FLOAT(grad), n);
}

void rows_rotary(int low, const void* x, const void* cosine, const void* sine, void* y, long batch, long tokens,
                 long heads, long e, long half, long stride_b, long stride_t, long stride_h, long table_b, float sign) {
    if (low)
        rotary(BF16(x), FLOAT(cosine), FLOAT(sine), BF16(y), batch, tokens, heads, e, half, stride_b, stride_t, stride_h,
               table_b, sign);
    else
        rotary(FLOAT(x), FLOAT(cosine), FLOAT(sine), FLOAT(y), batch, tokens, heads, e, half, stride_b, stride_t,
               stride_h, table_b, sign);
}

void rows_gather(int low, const void* x, const void* index, void* y, long rows, long d) {
    const int64_t* from = (const int64_t*)index;
    low ? gather(BF16(x), from, BF16(y), rows, d) : gather(FLOAT(x), from, FLOAT(y), rows, d);
}

// types: 1 are bf16 rows, 2 is a bf16 sum.
void rows_combine(int types, const void* x, const void* where, const void* gates, void* y, long n, long k, long d) {
    const int64_t* at = (const int64_t*)where;
    switch (types) {
        case 0: return combine(FLOAT(x), at, FLOAT(gates), FLOAT(y), n, k, d);
        case 1: return combine(BF16(x), at, FLOAT(gates), FLOAT(y), n, k, d);
        case 2: return combine(FLOAT(x), at, FLOAT(gates), BF16(y), n, k, d);
        case 3: return combine(BF16(x), at, FLOAT(gates), BF16(y), n, k, d);
    }
}

void rows_combine_backward(int types, const void* dy, const void* x, const void* where, const void* gates, void* dx,
                           void* dgates, long n, long k, long d) {
    const int64_t* at = (const int64_t*)where;
    switch (types) {
        case 0: return combine_backward(FLOAT(dy), FLOAT(x), at, FLOAT(gates), FLOAT(dx), FLOAT(dgates), n, k, d);
        case 1: return combine_backward(FLOAT(dy), BF16(x), at, FLOAT(gates), BF16(dx), FLOAT(dgates), n, k, d);
        case 2: return combine_backward(BF16(dy), FLOAT(x), at, FLOAT(gates), FLOAT(dx), FLOAT(dgates), n, k, d);
        case 3: return combine_backward(BF16(dy), BF16(x), at, FLOAT(gates), BF16(dx), FLOAT(dgates), n, k, d);
    }
}
}
