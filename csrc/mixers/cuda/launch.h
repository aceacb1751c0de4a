// Arguments of the kernel that converts the mixers' parameters: plain data, no torch type.
//
//   out = [-exp(A_log), bias, D], in the accumulation type
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/kernel_abi.h"
#include "common/scalar_kind.h"

namespace ssm_kernels::mixers {

// A contiguous tensor; count is 0 if it is absent.
struct ParameterView {
  const void* data = nullptr;
  int64_t count = 0;
  ScalarKind kind = ScalarKind::kFloat;
};

struct MixerParametersParams {
  ParameterView A_log, bias, D;
  void* out = nullptr;
};

template <typename Acc>
SSM_KERNEL_API cudaError_t launch_mixer_parameters(const MixerParametersParams& params, cudaStream_t stream);

SSM_KERNEL_STRUCT(MixerParametersParams, 80);

}  // namespace ssm_kernels::mixers
