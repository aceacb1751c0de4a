// The operands of SSD's passes over the states (cuda/chunked/state_passing.cuh).
#pragma once

#include <type_traits>

#include "cuda/chunked/state_passing.cuh"
#include "ssd/cuda/toolkit.cuh"

namespace ssm_kernels::ssd {

// A chunk adds gain x B^T to the state S, and g C^T to the gradient T.
struct StateOperands {
  template <typename Params>
  static __device__ __forceinline__ const RowsView& group_rows(const Params& p, bool is_reverse) {
    if constexpr (std::is_base_of_v<SsdBwdParams, Params>) {
      if (is_reverse) return p.C;
    }
    return p.B;
  }
  template <typename Params>
  static __device__ __forceinline__ const RowsView& head_rows(const Params& p, bool is_reverse) {
    if constexpr (std::is_base_of_v<SsdBwdParams, Params>) {
      if (is_reverse) return p.grad_out;
    }
    return p.x;
  }
  static __device__ __forceinline__ const StepTable& scales(const ChunkTables& tables, bool is_reverse) {
    return is_reverse ? tables.exp_cumsum : tables.gain_to_chunk_end;
  }
};

template <typename Scalar, int dstate, StatesPass pass, typename Mma, typename Gates>
using SsdStatePassing = StatePassing<Scalar, dstate, pass, Mma, Gates, StateOperands, ScalarMap>;

}  // namespace ssm_kernels::ssd
