// Few queries over many keys, forward only: decoding. Here the keys are what costs, so each is read once, where it
// lies, for all queries that share it; long texts are cut into parts for the threads, which are put together in order
// (Flash-Decoding, Dao et al. 2023).
#pragma once

#include "scores.h"

namespace {

constexpr int64_t PART = 512;  // keys of a part: fixed, so that the number of threads moves no bit

// The sums of W vectors, one in each lane: pairs are added across halves until one vector is left.
inline Vec sums(const Vec* x) {
    constexpr auto lanes = std::make_integer_sequence<int, W>();
    Vec level[W];
    std::copy_n(x, W, level);
#pragma GCC unroll 4
    for (int n = W; n > 1; n /= 2)
#pragma GCC unroll 8
        for (int r = 0; r < n / 2; ++r)
            level[r] = low_halves(level[r], level[r + n / 2], lanes) + high_halves(level[r], level[r + n / 2], lanes);
    return level[0];
}

// One part of the keys of one (batch row, key head).
template <class T>
class Few {
  public:
    explicit Few(const Call& c) : c_(c), rows_(c.H / c.K * c.T), wide_(up(c.E, W)) {
        arena().reserve((rows_ + W) * (wide_ + PART) + 64);
        q_ = arena().take(rows_ * wide_);
        s_ = arena().take(rows_ * PART);
        room_ = arena().take(W * wide_);
        tails_ = arena().take(W * PART);
    }

    // Per row: the maximum, the sum, and the weighted sum of the values (`out`, rows of up(Ev, W)).
    void run(int64_t b, int64_t head, int64_t first, float* most, float* sum, float* out) {
        int64_t keys = std::min(PART, c_.S - first), padded = up(keys, W);
        for (int64_t r = 0; r < rows_; ++r) {
            const T* from = c_.q.at<T>(b, r % c_.T, head * (rows_ / c_.T) + r / c_.T);
            read_rows(from, 0, 1, c_.E, q_ + r * wide_, wide_);
            for (int64_t e = 0; e < wide_; ++e) q_[r * wide_ + e] *= c_.score_factor();
        }
        score(b, head, first, keys);
        bool seen[PART] = {};
        for (int64_t r = 0; r < rows_; ++r) {
            float* s = s_ + r * PART;
            finish(s, b, head * (rows_ / c_.T) + r / c_.T, r % c_.T, first, keys);
            float top = -INF, total = 0;
            for (int64_t j = 0; j < keys; ++j) top = std::max(top, s[j]), seen[j] |= s[j] != -INF;
            std::fill(s + keys, s + padded, -INF);
            Vec base = all(std::max(top, -1e30f)), add{};
            for (int64_t j = 0; j < padded; j += W) {
                Vec p = exp2_of(load(s + j) - base);
                store(s + j, p);
                add += p;
            }
            for (int lane = 0; lane < W; ++lane) total += add[lane];
            most[r] = top, sum[r] = total;
        }
        mix_values(b, head, first, keys, seen, out);
    }

  private:
    // Products of all rows with all keys, W keys at a time.
    void score(int64_t b, int64_t head, int64_t first, int64_t keys) {
        for (int64_t j = 0; j < keys; j += W) {
            int64_t n = std::min<int64_t>(W, keys - j);
            const T* k = c_.k.at<T>(b, first + j, head);
            if (n == W && c_.E == wide_) {
                for (int64_t x = 0; x < W && j + W + x < keys; ++x) fetch(k + (W + x) * c_.k.token, wide_);
                for (int64_t r = 0; r < rows_; ++r) store(s_ + r * PART + j, dots(k, c_.k.token, q_ + r * wide_));
            } else {  // rows that end within a vector, or fewer of them
                read_rows(k, c_.k.token, n, c_.E, room_, wide_);
                for (int64_t r = 0; r < rows_; ++r) store(s_ + r * PART + j, dots(room_, wide_, q_ + r * wide_));
            }
        }
    }

    template <class U>
    Vec dots(const U* k, int64_t stride, const float* q) const {
        Vec sum[W] = {};
        for (int64_t e = 0; e < wide_; e += W) {
            Vec part = load(q + e);
#pragma GCC unroll 16
            for (int x = 0; x < W; ++x) sum[x] += load(k + x * stride + e) * part;
        }
        return sums(sum);
    }

    // The next rows into the cache: they are too far apart for the processor to see them coming.
    static void fetch(const T* row, int64_t n) {
        for (int64_t e = 0; e < n; e += 64 / int64_t(sizeof(T))) __builtin_prefetch(row + e);
    }

    // Bias, cap and mask of one row.
    void finish(float* s, int64_t b, int64_t h, int64_t t, int64_t first, int64_t keys) const {
        if (c_.dense_bias) {
            const float* bias = c_.dense_bias + b * c_.bias_batch + h * c_.bias_head + t * c_.bias_query + first;
            for (int64_t j = 0; j < keys; ++j) s[j] += bias[j] * c_.bias_factor();
        }
        if (c_.softcap > 0)
            for (int64_t j = 0; j < up(keys, W); j += W) store(s + j, float(c_.softcap) * LOG2E * tanh_of(load(s + j)));
        if (c_.dense_mask) {
            const uint8_t* mask = c_.dense_mask + b * c_.mask_batch + h * c_.mask_head + t * c_.mask_query + first;
            for (int64_t j = 0; j < keys; ++j) s[j] = mask[j] ? s[j] : -INF;
        } else {
            // Visible are the keys from t + S - T - most to t + S - T - least.
            int64_t at = t + c_.S - c_.T - first;
            int64_t from = std::clamp<int64_t>(at - c_.most, 0, keys);
            int64_t to = std::clamp<int64_t>(at - c_.least + 1, from, keys);
            std::fill(s, s + from, -INF);
            std::fill(s + to, s + keys, -INF);
        }
    }

    void mix_values(int64_t b, int64_t head, int64_t first, int64_t keys, const bool* seen, float* out) {
        int64_t r = 0;
        for (; r + 4 <= rows_; r += 4) mix_rows<4>(b, head, first, keys, seen, r, out);
        for (; r < rows_; ++r) mix_rows<1>(b, head, first, keys, seen, r, out);
    }

    template <int R>
    void mix_rows(int64_t b, int64_t head, int64_t first, int64_t keys, const bool* seen, int64_t r, float* out) {
        int64_t e = 0, wide = up(c_.Ev, W);
        const T* v = c_.v.at<T>(b, first, head);
        for (; e + 4 * W <= c_.Ev; e += 4 * W) mix_columns<R, 4>(v, c_.v.token, keys, seen, r, e, out + e, wide);
        for (; e + W <= c_.Ev; e += W) mix_columns<R, 1>(v, c_.v.token, keys, seen, r, e, out + e, wide);
        if (e == c_.Ev) return;
        for (int64_t j = 0; j < keys; ++j)  // the end of the rows, within a vector
            read_rows(v + j * c_.v.token + e, 0, 1, c_.Ev - e, tails_ + j * W, W);
        mix_columns<R, 1>(tails_, W, keys, seen, r, 0, out + e, wide);
    }

    template <int R, int X, class U>
    void mix_columns(const U* v, int64_t stride, int64_t keys, const bool* seen, int64_t r, int64_t e, float* out,
                     int64_t wide) const {
        Vec sum[R][X] = {};
        for (int64_t j = 0; j < keys; ++j) {
            const U* row = v + j * stride + e;
            __builtin_prefetch(row + 16 * stride);
            __builtin_prefetch(row + 16 * stride + X * W - 1);
            if (!seen[j]) continue;
#pragma GCC unroll 4
            for (int x = 0; x < X; ++x) {
                Vec value = load(row + x * W);
#pragma GCC unroll 4
                for (int y = 0; y < R; ++y) sum[y][x] += s_[(r + y) * PART + j] * value;
            }
        }
        for (int y = 0; y < R; ++y)
            for (int x = 0; x < X; ++x) store(out + (r + y) * wide + x * W, sum[y][x]);
    }

    const Call& c_;
    int64_t rows_, wide_;
    float *q_, *s_, *room_, *tails_;
};

// Put the parts of one row together, the sink's share among them.
template <class T>
void unite(const Call& c, int64_t b, int64_t h, int64_t t, const float* most, const float* sum, const float* out,
           int64_t parts, int64_t rows) {
    int64_t wide = up(c.Ev, W);
    float sink = c.sink ? c.sink[h] * LOG2E : -INF, top = -INF;
    for (int64_t p = 0; p < parts; ++p) top = std::max(top, most[p * rows]);
    top = std::max(top, sink);
    float all_sum = c.sink ? std::exp2(sink - top) : 0;
    for (int64_t p = 0; p < parts; ++p)  // a part that sees nothing has the sum 0
        if (sum[p * rows] != 0) all_sum += sum[p * rows] * std::exp2(most[p * rows] - top);
    T* to = c.o.at<T>(b, t, h);
    for (int64_t e = 0; e < c.Ev; e += W) {
        Vec total{};
        for (int64_t p = 0; p < parts; ++p)
            if (sum[p * rows] != 0)
                total += load(out + p * rows * wide + e) * (std::exp2(most[p * rows] - top) / all_sum);
        alignas(64) float lanes[W];
        store(lanes, total);
        write_rows(lanes, W, 1.0f, 1, std::min<int64_t>(W, c.Ev - e), to + e, 0);
    }
}

template <class T>
void few(const Call& c) {
    int64_t rows = c.H / c.K * c.T, parts = (c.S + PART - 1) / PART, wide = up(c.Ev, W), units = c.B * c.K;
    std::vector<float> most(units * parts * rows), sum(units * parts * rows), out(units * parts * rows * wide);
#pragma omp parallel num_threads(c.threads) if (c.threads > 1)
    {
        Few<T> mine(c);
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < units * parts; ++i) {
            int64_t u = i / parts, at = i * rows;
            mine.run(u / c.K, u % c.K, i % parts * PART, &most[at], &sum[at], &out[at * wide]);
        }
#pragma omp for schedule(static)
        for (int64_t i = 0; i < units * rows; ++i) {
            int64_t u = i / rows, r = i % rows, at = u * parts * rows + r, h = u % c.K * (rows / c.T) + r / c.T;
            unite<T>(c, u / c.K, h, r % c.T, &most[at], &sum[at], &out[at * wide], parts, rows);
        }
    }
}

}  // namespace
