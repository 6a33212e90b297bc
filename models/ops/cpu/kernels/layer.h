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

inline const int32_t* numbers_of(void** p) { return static_cast<int32_t*>(p[24]); }

// (x [R, H], position, horizon, request, count, block_tables, cos, sin,
//  of every layer: k_cache, v_cache, q_gamma, k_gamma, gamma, qkv, qkv_bias, output, output_bias, gamma2, gate_up,
//  gate_bias, up_bias, down, down_bias,
//  eps [1], numbers [4] = (columns of qkv, columns of gate, index of the first layer, number of layers)) -> y [R, H]
// FED: x is what the layer attends to, without a norm; it adds to one more input behind numbers, residual [R, H].
template <class W, bool FED>
void layer(void** p, int* ndims, int64_t** s, void* x, int64_t index) {
    void *const residual = FED ? p[25] : x, *const y = p[FED ? 26 : 25];
    int64_t *const residual_shape = s[FED ? 25 : 0], *const y_shape = s[FED ? 26 : 25];
    static thread_local Scratch qkv, attended, middle, gated;
    const auto* numbers = numbers_of(p);
    const auto slice = [&](int at) { return Slice(p[at], s[at], ndims[at], index, sizeof(float)); };
    const auto weight = [&](int at) { return Slice(p[at], s[at], ndims[at], index, sizeof(typename W::T)); };
    const Slice k_cache = slice(8), v_cache = slice(9), q_gamma = slice(10), k_gamma = slice(11);
    const int64_t rows = *static_cast<int32_t*>(p[4]), kv_columns = 2 * k_cache.shape[1] * k_cache.shape[3];
    float* const q = qkv.of(rows, numbers[0]);
    float* const a = attended.of(rows, numbers[0] - kv_columns);
    float* const m = middle.of(rows, residual_shape[1]);
    float* const g = gated.of(rows, numbers[1]);
    {
        const Slice gamma = slice(12), w = weight(13), bias = slice(14);
        void* params[] = {x, FED ? nullptr : gamma.data, p[23], w.data, bias.data, p[4], q};
        int64_t* shapes[] = {s[0], gamma.shape, s[23], w.shape, bias.shape, s[4], qkv.shape};
        norm_linear<W>(params, shapes);
    }
    {
        void* params[] = {q, p[1], p[2], p[3], p[4], p[5], p[6], p[7],
                          k_cache.data, v_cache.data, q_gamma.data, k_gamma.data, p[23], a};
        int64_t* shapes[] = {qkv.shape, s[1], s[2], s[3], s[4], s[5], s[6], s[7],
                             k_cache.shape, v_cache.shape, q_gamma.shape, k_gamma.shape, s[23], attended.shape};
        int dims[] = {2, 1, 1, 1, 1, 2, 2, 2, 5, 4, 1, 1, 1, 2};
        attention(14, params, dims, shapes, nullptr, nullptr, nullptr);
    }
    {
        const Slice w = weight(15), bias = slice(16);
        void* params[] = {a, residual, w.data, bias.data, p[4], m};
        int64_t* shapes[] = {attended.shape, residual_shape, w.shape, bias.shape, s[4], middle.shape};
        linear_add<W>(params, shapes);
    }
    {
        const Slice gamma = slice(17), w = weight(18), gate_bias = slice(19), up_bias = slice(20);
        void* params[] = {m, gamma.data, p[23], w.data, gate_bias.data, up_bias.data, p[4], g};
        int64_t* shapes[] = {middle.shape, gamma.shape, s[23], w.shape, gate_bias.shape, up_bias.shape, s[4], gated.shape};
        norm_gated<W>(params, shapes);
    }
    {
        const Slice w = weight(21), bias = slice(22);
        void* params[] = {g, m, w.data, bias.data, p[4], y};
        int64_t* shapes[] = {gated.shape, middle.shape, w.shape, bias.shape, s[4], y_shape};
        linear_add<W>(params, shapes);
    }
}

// From the second on, layers work on their output in place.
template <class W>
int layers(void** p, int* ndims, int64_t** s) {
    const int64_t first = numbers_of(p)[2], count = numbers_of(p)[3];
    for (int64_t i = 0; i < count; ++i) layer<W, false>(p, ndims, s, p[i == 0 ? 0 : 25], first + i);
    return 0;
}
template <class W>
int fed_layer(void** p, int* ndims, int64_t** s) {
    layer<W, true>(p, ndims, s, p[0], numbers_of(p)[2]);
    return 0;
}

}  // namespace

// The kernels of one dtype. Each has a file of its own, so that they compile side by side.
#define KERNELS_OF_DTYPE(name, W)                                                     \
    KERNEL linear_##name(KERNEL_ARGS) { return linear<W>(params, shapes); }           \
    KERNEL norm_linear_##name(KERNEL_ARGS) { return norm_linear<W>(params, shapes); } \
    KERNEL norm_gated_##name(KERNEL_ARGS) { return norm_gated<W>(params, shapes); }   \
    KERNEL linear_add_##name(KERNEL_ARGS) { return linear_add<W>(params, shapes); }   \
    KERNEL embedding_##name(KERNEL_ARGS) { return embedding<W>(params, shapes); }     \
    KERNEL layers_##name(KERNEL_ARGS) { return layers<W>(params, ndims, shapes); }    \
    KERNEL fed_layer_##name(KERNEL_ARGS) { return fed_layer<W>(params, ndims, shapes); }
