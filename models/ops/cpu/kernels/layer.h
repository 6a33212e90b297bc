// Decoder layers: the kernels of their parts, one after another, on parameters that hold those of all layers.
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
// count [1], eps [1], numbers [4] = (columns of qkv, columns of gate, index of the first layer, how many)
// It is about the layer that comes `further` behind the first.
template <class W>
struct Half {
    void** p;
    int* ndims;
    int64_t** s;
    int count_at, eps_at, numbers_at;
    int64_t further = 0;

    const int32_t* numbers() const { return static_cast<int32_t*>(p[numbers_at]); }
    int64_t rows() const { return *static_cast<int32_t*>(p[count_at]); }
    int64_t index() const { return numbers()[2] + further; }
    Slice slice(int at) const { return Slice(p[at], s[at], ndims[at], index(), sizeof(float)); }
    Slice weight(int at) const { return Slice(p[at], s[at], ndims[at], index(), sizeof(typename W::T)); }

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

// The inputs of a kernel that begin with ATTENTION.
template <class W>
Half<W> attention_of(void** p, int* ndims, int64_t** s, int64_t further = 0) {
    return {p, ndims, s, 4, 8, 9, further};
}

// y = what attention makes of x, + residual
template <class W>
void attend(const Half<W>& in, void* x, const Rows& residual, const Rows& y) {
    static thread_local Scratch qkv, attended;
    void** const p = in.p;
    int64_t** const s = in.s;
    const Slice k_cache = in.slice(10), v_cache = in.slice(11), q_gamma = in.slice(12), k_gamma = in.slice(13);
    const int64_t kv_columns = 2 * k_cache.shape[1] * k_cache.shape[3];
    float* const q = qkv.of(in.rows(), in.numbers()[0]);
    float* const a = attended.of(in.rows(), in.numbers()[0] - kv_columns);
    {
        const Slice gamma = in.slice(14), w = in.weight(15), bias = in.slice(16);
        void* params[] = {x, in.ndims[14] > 1 ? gamma.data : nullptr, p[8], w.data, bias.data, p[4], q};
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

// y [R, H] = residual and what a layer makes of x
template <class W>
void layer(const Half<W>& in, void* x, const Rows& residual, const Rows& y) {
    static thread_local Scratch middle;
    const Rows between{middle.of(in.rows(), residual.shape[1]), middle.shape};
    attend<W>(in, x, residual, between);
    feed<W>(in, ATTENTION, between, between, y);
}

// (ATTENTION, FEEDING) -> [R, H]: layers that add to their input. From the second on they work on the output in place.
template <class W>
int layers(void** p, int* ndims, int64_t** s) {
    constexpr int OUT = ATTENTION + FEEDING;
    const int64_t count = attention_of<W>(p, ndims, s).numbers()[3];
    for (int64_t i = 0; i < count; ++i) {
        const Rows x{p[i == 0 ? 0 : OUT], s[OUT]};
        layer<W>(attention_of<W>(p, ndims, s, i), x.data, x, {p[OUT], s[OUT]});
    }
    return 0;
}
// (ATTENTION, FEEDING, residual [R, H]) -> [R, H]
template <class W>
int fed_layer(void** p, int* ndims, int64_t** s) {
    constexpr int RESIDUAL = ATTENTION + FEEDING, OUT = RESIDUAL + 1;
    layer<W>(attention_of<W>(p, ndims, s), p[0], {p[RESIDUAL], s[RESIDUAL]}, {p[OUT], s[OUT]});
    return 0;
}

// Where several workers share a layer, what each has of its halves:
// (ATTENTION) -> [R, H]
template <class W>
int attend_part(void** p, int* ndims, int64_t** s) {
    attend<W>(attention_of<W>(p, ndims, s), p[0], {nullptr, s[ATTENTION]}, {p[ATTENTION], s[ATTENTION]});
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
    KERNEL layers_##name(KERNEL_ARGS) { return layers<W>(params, ndims, shapes); }         \
    KERNEL fed_layer_##name(KERNEL_ARGS) { return fed_layer<W>(params, ndims, shapes); }   \
    KERNEL attend_##name(KERNEL_ARGS) { return attend_part<W>(params, ndims, shapes); }    \
    KERNEL feed_##name(KERNEL_ARGS) { return feed_part<W>(params, ndims, shapes); }
