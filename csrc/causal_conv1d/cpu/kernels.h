// Interface between the CPU entry points (entry.cpp, compiled once) and the CPU kernels (kernel.cpp, compiled once per
// instruction set).
//
// A task is a block of channels of one batch row, for all steps.
#pragma once

#include <cstddef>
#include <cstdint>

#include "causal_conv1d/causal_conv1d.h"
#include "common/kernel_abi.h"

namespace ssm_kernels::causal_conv1d {

constexpr int64_t kMinTaskChannels = 64, kTileSteps = 32;

// Tensors that are read in place get wide blocks, because hardware prefetchers follow long contiguous reads, as long as every
// thread has a task. Tensors that pass through tiles get blocks whose tiles fit into the L1 cache.
struct Tasks {
  int64_t channels, blocks, count;

  Tasks(const ConvParams& p, int64_t threads) : channels(is_read_in_place(p) ? 512 : 128) {
    if (p.x.stride_channel != 1) channels = kMinTaskChannels;
    while (channels > kMinTaskChannels && (p.channels + channels - 1) / channels * p.batch < threads) channels /= 2;
    blocks = (p.channels + channels - 1) / channels;
    count = p.batch * blocks;
  }

 private:
  static bool is_read_in_place(const ConvParams& p) {
    return p.x.stride_channel == 1 && (p.kind == ScalarKind::kFloat || p.kind == ScalarKind::kDouble);
  }
};

// The kernels of one instruction set. `scratch` is 64-byte aligned memory of scratch_bytes(width, tasks.channels) that belongs
// to the calling thread. A task writes its sums over time to `sums`, which is null unless a parameter needs a gradient: rows of
// tasks.channels values of the accumulation type, one per tap and one for the bias, sum_bytes(params, tasks) in all.
struct CpuKernels {
  int64_t (*scratch_bytes)(int64_t width, int64_t channels);
  int64_t (*sum_bytes)(const ConvParams&, const Tasks&);
  void (*fwd_task)(const ConvFwdParams&, const Tasks&, int64_t task, std::byte* scratch);
  void (*bwd_task)(const ConvBwdParams&, const Tasks&, int64_t task, std::byte* scratch, std::byte* sums);
  // Adds the sums of a block of channels over the batch, in order, into grad_weight and grad_bias.
  void (*finish)(const ConvBwdParams&, const Tasks&, int64_t block, const std::byte* sums);
  // `tasks` are those of conv_params(params). `tokens` is null where each row has as many steps and one slot.
  void (*update_task)(const ConvUpdateParams&, const ConvTokenParams* tokens, const Tasks&, int64_t task, std::byte* scratch);
};

// A decoding step as a convolution of a few steps, whose initial state is the end of a slot.
inline ConvFwdParams conv_params(const ConvUpdateParams& p) {
  ConvFwdParams params;
  params.batch = p.batch;
  params.seqlen = p.seqlen;
  params.channels = p.channels;
  params.width = p.width;
  params.has_silu = p.has_silu;
  params.kind = p.kind;
  params.x = p.x;
  params.weight = p.weight;
  params.bias = p.bias;
  params.out = p.out;
  return params;
}

SSM_KERNEL_STRUCT(Tasks, 24);
SSM_KERNEL_STRUCT(CpuKernels, 48);

}  // namespace ssm_kernels::causal_conv1d
