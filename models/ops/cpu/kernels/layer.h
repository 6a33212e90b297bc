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

// (x [R, H], position, request, count, block_tables, cos, sin,
//  of every layer: k_cache, v_cache, q_gamma, k_gamma, gamma, qkv, qkv_bias, output, output_bias, gamma2, gate_up,
//  gate_bias, up_bias, down, down_bias,
//  eps [1], numbers [3] = (columns of qkv, columns of gate, index of the layer)) -> y [R, H]
template <class W>
int layer(void** p, int* ndims, int64_t** s) {
    static thread_local Scratch qkv, attended, middle, gated;
    const auto* numbers = static_cast<int32_t*>(p[23]);
    const auto slice = [&](int at) { return Slice(p[at], s[at], ndims[at], numbers[2], sizeof(float)); };
    const auto weight = [&](int at) { return Slice(p[at], s[at], ndims[at], numbers[2], sizeof(typename W::T)); };
    const Slice k_cache = slice(7), v_cache = slice(8), q_gamma = slice(9), k_gamma = slice(10);
    const int64_t rows = *static_cast<int32_t*>(p[3]), kv_columns = 2 * k_cache.shape[1] * k_cache.shape[3];
    float* const q = qkv.of(rows, numbers[0]);
    float* const a = attended.of(rows, numbers[0] - kv_columns);
    float* const m = middle.of(rows, s[0][1]);
    float* const g = gated.of(rows, numbers[1]);
    {
        const Slice gamma = slice(11), w = weight(12), bias = slice(13);
        void* params[] = {p[0], gamma.data, p[22], w.data, bias.data, p[3], q};
        int64_t* shapes[] = {s[0], gamma.shape, s[22], w.shape, bias.shape, s[3], qkv.shape};
        norm_linear<W>(params, shapes);
    }
    {
        void* params[] = {q,    p[1], p[2],         p[3],         p[4],         p[5],         p[6],
                          k_cache.data, v_cache.data, q_gamma.data, k_gamma.data, p[22], a};
        int64_t* shapes[] = {qkv.shape, s[1], s[2], s[3], s[4], s[5], s[6], k_cache.shape, v_cache.shape, q_gamma.shape, k_gamma.shape,
                             s[22], attended.shape};
        int dims[] = {2, 1, 1, 1, 2, 2, 2, 5, 4, 1, 1, 1, 2};
        attention(13, params, dims, shapes, nullptr, nullptr, nullptr);
    }
    {
        const Slice w = weight(14), bias = slice(15);
        void* params[] = {a, p[0], w.data, bias.data, p[3], m};
        int64_t* shapes[] = {attended.shape, s[0], w.shape, bias.shape, s[3], middle.shape};
        linear_add<W>(params, shapes);
    }
    {
        const Slice gamma = slice(16), w = weight(17), gate_bias = slice(18), up_bias = slice(19);
        void* params[] = {m, gamma.data, p[22], w.data, gate_bias.data, up_bias.data, p[3], g};
        int64_t* shapes[] = {middle.shape, gamma.shape, s[22], w.shape, gate_bias.shape, up_bias.shape, s[3], gated.shape};
        norm_gated<W>(params, shapes);
    }
    {
        const Slice w = weight(20), bias = slice(21);
        void* params[] = {g, m, w.data, bias.data, p[3], p[24]};
        int64_t* shapes[] = {gated.shape, middle.shape, w.shape, bias.shape, s[3], s[24]};
        linear_add<W>(params, shapes);
    }
    return 0;
}

}  // namespace

// The kernels of one dtype. Each has a file of its own, so that they compile side by side.
#define KERNELS_OF_DTYPE(name, W)                                                     \
    KERNEL norm_linear_##name(KERNEL_ARGS) { return norm_linear<W>(params, shapes); } \
    KERNEL norm_gated_##name(KERNEL_ARGS) { return norm_gated<W>(params, shapes); }   \
    KERNEL linear_add_##name(KERNEL_ARGS) { return linear_add<W>(params, shapes); }   \
    KERNEL embedding_##name(KERNEL_ARGS) { return embedding<W>(params, shapes); }     \
    KERNEL layer_##name(KERNEL_ARGS) { return layer<W>(params, ndims, shapes); }
