// Shared by the dispatcher's side of selective_scan_dense (dense_op.cpp), the selective scan with a matrix A for each channel,
// and its devices. What it shares with the scans of diagonal systems is in selective_scan_op.h and two_sample_op.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <tuple>

#include "selective_scan/dense.h"
#include "selective_scan/two_sample_op.h"

namespace ssm_kernels::selective_scan {

struct DenseInputs : TwoSampleInputs {
  DenseInputs() { is_dense = true; }

  auto tensors() { return std::tuple_cat(fields_but_state(), std::tie(initial_state, previous_u, previous_B)); }
  auto options() { return std::tie(discretization, repeats_first, delta_softplus, reverse); }
  auto fields() { return std::tuple_cat(tensors(), std::tie(seq_idx, cu_seqlens), options()); }
};

struct DenseFwdInputs : DenseInputs {
  auto fields() { return std::tuple_cat(DenseInputs::fields(), std::tie(save_chunk_states)); }
};

// In the order of backward's results: those of Grad, and these.
constexpr int kNumDenseGrads = kNumGrads + 2;
using DenseNeedsGrad = std::array<bool, kNumDenseGrads>;
using DenseGrads = std::array<at::Tensor, kNumDenseGrads>;

struct DenseBwdInputs {
  OptionalTensor grad_out, grad_last_state;
  DenseInputs in;
  at::Tensor chunk_states;
  DenseNeedsGrad needs_grad{};

  auto grads() { return std::tie(grad_out, grad_last_state); }
  auto saved() { return std::tie(chunk_states); }
  auto fields() {
    return std::tuple_cat(grads(), in.tensors(), std::tie(in.seq_idx, in.cu_seqlens), saved(), in.options(),
                          std::tie(needs_grad));
  }
};

// Raises unless the inputs are as ssm_kernels.selective_scan documents, the values of cu_seqlens apart; returns the method.
Discretization check_dense_inputs(const DenseInputs& in);

// `channels` of a tile, and at most `slots`. `schur` has T and Q, and on CUDA their transposes: (2 or 4, matrices, stride,
// stride).
DenseParams make_dense_params(const DenseInputs& in, Discretization method, const SelectiveScanParams& scan,
                              const at::Tensor& schur, int64_t channels, int64_t slots);

// Backward as the kernels know it: they write some gradients of `two`, and `sums`, of which `finish` makes the others.
struct DenseBwd {
  TwoSampleBwd two;

  // Checks the arguments of backward alone and allocates, on the device of u (the Meta device included).
  explicit DenseBwd(const DenseBwdInputs& bwd);

  // The parameters of the scan, without those gradients that `finish` makes.
  SelectiveScanBwdParams make_params(Discretization method, const PackedRows& rows, const at::Tensor& chunk_states) const;
  DenseSums allocate_sums(const DenseInputs& in, const SelectiveScanParams& scan, const DenseParams& dense);
  DenseGrads finish(const DenseInputs& in, const at::Tensor& schur) &&;
  DenseGrads grads() const;

 private:
  at::Tensor A_, constant_B_, constant_C_, D_, delta_bias_, parts_B_, parts_C_;
};

// Registers a device's kernels.
template <FwdOutputs (*fwd)(const DenseFwdInputs&), DenseGrads (*bwd)(const DenseBwdInputs&)>
void register_dense_kernels(torch::Library& m) {
  implement<fwd>(m, "_selective_scan_dense_fwd");
  implement<bwd>(m, "_selective_scan_dense_bwd");
}

}  // namespace ssm_kernels::selective_scan
