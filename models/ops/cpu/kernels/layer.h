// One decoder layer: the kernels of its parts, one after another, on parameters that hold those of all layers.
// Launches and parameters cost MindSpore time at every step; this leaves one of the former and few of the latter.
#pragma once
#include "linear.h"

KERNEL attention(KERNEL_ARGS);

namespace {

// Room for one of the layer's intermediate results.
struct Scratch {
    std::vector<float> data;
    int64_t shape[2] = {0, 0};
    float* of(int64_t rows, int64_t width) {
        shape[0] = rows, shape[1] = width;
        if (static_cast<int64_t>(data.size()) < rows * width) data.resize(rows * width);
        return data.data();
    }
};

// Layer `index` of a parameter that holds one of each layer, [layers, ...]; a single number stands for "none".
struct Slice {
    void* data;
    int64_t* shape;
    Slice(void* whole, int64_t* shape_, int ndim, int64_t index, int64_t bytes) : data(whole), shape(shape_) {
        if (ndim < 2) return;
        int64_t stride = bytes;
        for (int d = 1; d < ndim; ++d) stride *= shape_[d];
        data = static_cast<char*>(whole) + index * stride;
        shape = shape_ + 1;
    }
};

// Rows of numbers: where they stand, and [rows, width].
struct Rows {
    void* data;
    int64_t* shape;
};

// A kernel's inputs, and where those stand that both halves of a layer look at:
// count [1], eps [1], numbers [3] = (columns of qkv, columns of gate, index of the layer)
template <class W>
struct Half {
    void** p;
    int* ndims;
    int64_t** s;
    int count_at, eps_at, numbers_at;

    const int32_t* numbers() const { return static_cast<int32_t*>(p[numbers_at]); }
    int64_t rows() const { return *static_cast<int32_t*>(p[count_at]); }
    Slice slice(int at) const { return Slice(p[at], s[at], ndims[at], numbers()[2], sizeof(float)); }
    Slice weight(int at) const { return Slice(p[at], s[at], ndims[at], numbers()[2], sizeof(typename W::T)); }

    // y = x W^T + bias + residual, W and bias from input `at` on. A residual without data: none.
    void add(const Rows& x, int at, const Rows& residual, const Rows& y) const {
        const Slice w = weight(at), bias = slice(at + 1);
        void* params[] = {x.data, residual.data, w.data, bias.data, p[count_at], y.data};
        int64_t* shapes[] = {x.shape, residual.shape, w.shape, bias.shape, s[count_at], y.shape};
        linear_add<W>(params, shapes);
    }
};

// ATTENTION: x [R, I], position, horizon, request, count, block_tables, cos, sin, eps, numbers,
//  of every layer: k_cache, v_cache, q_gamma, k_gamma, gamma (a single number: no norm), qkv, qkv_bias, output, output_bias
constexpr int ATTENTION = 19;

// y = what attention makes of x, + residual
template <class W>
void attend(void** p, int* ndims, int64_t** s, const Rows& residual, const Rows& y) {
    static thread_local Scratch qkv, attended;
    const Half<W> in{p, ndims, s, 4, 8, 9};
    const Slice k_cache = in.slice(10), v_cache = in.slice(11), q_gamma = in.slice(12), k_gamma = in.slice(13);
    const int64_t kv_columns = 2 * k_cache.shape[1] * k_cache.shape[3];
    float* const q = qkv.of(in.rows(), in.numbers()[0]);
    float* const a = attended.of(in.rows(), in.numbers()[0] - kv_columns);
    {
        const Slice gamma = in.slice(14), w = in.weight(15), bias = in.slice(16);
        void* params[] = {p[0], ndims[14] > 1 ? gamma.data : nullptr, p[8], w.data, bias.data, p[4], q};
        int64_t* shapes[] = {s[0], gamma.shape, s[8], w.shape, bias.shape, s[4], qkv.shape};
        norm_linear<W>(params, shapes);
    }
    void* params[] = {q, p[1], p[2], p[3], p[4], p[5], p[6], p[7],
                      k_cache.data, v_cache.data, q_gamma.data, k_gamma.data, p[8], a};
    int64_t* shapes[] = {qkv.shape, s[1], s[2], s[3], s[4], s[5], s[6], s[7],
                         k_cache.shape, v_cache.shape, q_gamma.shape, k_gamma.shape, s[8], attended.shape};
    int dims[] = {2, 1, 1, 1, 1, 2, 2, 2, 5, 4, 1, 1, 1, 2};
    attention(14, params, dims, shapes, nullptr, nullptr, nullptr);
    in.add({a, attended.shape}, 17, residual, y);
}

// FEEDING, of every layer: gamma, gate_up, gate_bias, up_bias, down, down_bias
constexpr int FEEDING = 6;

// y = what the feed-forward network makes of the norm of x, + residual. FEEDING stands from input `at` on.
template <class W>
void feed(const Half<W>& in, int at, const Rows& x, const Rows& residual, const Rows& y) {
    static thread_local Scratch gated;
    float* const g = gated.of(in.rows(), in.numbers()[1]);
    const Slice gamma = in.slice(at), w = in.weight(at + 1), gate_bias = in.slice(at + 2), up_bias = in.slice(at + 3);
    void* params[] = {x.data, gamma.data, in.p[in.eps_at], w.data, gate_bias.data, up_bias.data, in.p[in.count_at], g};
    int64_t* shapes[] = {x.shape, gamma.shape, in.s[in.eps_at], w.shape, gate_bias.shape, up_bias.shape, in.s[in.count_at], gated.shape};
    norm_gated<W>(params, shapes);
    in.add({g, gated.shape}, at + 4, residual, y);
}

// (ATTENTION, FEEDING) -> y [R, H], added to x; FED: there is one more input, residual [R, H], that it is added to.
template <class W, bool FED = false>
int layer(void** p, int* ndims, int64_t** s) {
    static thread_local Scratch middle;
    constexpr int LAST = ATTENTION + FEEDING;
    const Half<W> in{p, ndims, s, 4, 8, 9};
    const Rows residual = FED ? Rows{p[LAST], s[LAST]} : Rows{p[0], s[0]};
    const Rows between{middle.of(in.rows(), residual.shape[1]), middle.shape};
    attend<W>(p, ndims, s, residual, between);
    feed<W>(in, ATTENTION, between, between, {p[LAST + FED], s[LAST + FED]});
    return 0;
}

// Where several workers share a layer, what each has of its halves:
// (ATTENTION) -> [R, H]
template <class W>
int attend_part(void** p, int* ndims, int64_t** s) {
    attend<W>(p, ndims, s, {nullptr, s[ATTENTION]}, {p[ATTENTION], s[ATTENTION]});
    return 0;
}
// (x [R, H], count, eps, numbers, FEEDING) -> [R, H]
template <class W>
int feed_part(void** p, int* ndims, int64_t** s) {
    constexpr int LAST = 4 + FEEDING;
    feed<W>({p, ndims, s, 1, 2, 3}, 4, {p[0], s[0]}, {nullptr, s[LAST]}, {p[LAST], s[LAST]});
    return 0;
}

}  // namespace

// The kernels of one dtype. Each has a file of its own, so that they compile side by side.
#define KERNELS_OF_DTYPE(name, W)                                                          \
    KERNEL linear_##name(KERNEL_ARGS) { return linear<W>(params, shapes); }                \
    KERNEL norm_linear_##name(KERNEL_ARGS) { return norm_linear<W>(params, shapes); }      \
    KERNEL norm_gated_##name(KERNEL_ARGS) { return norm_gated<W>(params, shapes); }        \
    KERNEL linear_add_##name(KERNEL_ARGS) { return linear_add<W>(params, shapes); }        \
    KERNEL embedding_##name(KERNEL_ARGS) { return embedding<W>(params, shapes); }          \
    KERNEL layer_##name(KERNEL_ARGS) { return layer<W>(params, ndims, shapes); }           \
    KERNEL fed_layer_##name(KERNEL_ARGS) { return layer<W, true>(params, ndims, shapes); } \
    KERNEL attend_##name(KERNEL_ARGS) { return attend_part<W>(params, ndims, shapes); }    \
    KERNEL feed_##name(KERNEL_ARGS) { return feed_part<W>(params, ndims, shapes); }
