// cu_seqlens: sequences packed one after another into a batch of one entry. Sequence i has the steps cu_seqlens[i] to
// cu_seqlens[i + 1] - 1, which may be none.
#pragma once

#include <ATen/core/Tensor.h>

#include "torch/checks.h"

namespace ssm_kernels {

// Raises unless cu_seqlens is a (sequences + 1,) tensor of integers and the batch has one entry. Does not read its values.
void check_cu_seqlens_argument(const ArgumentChecks& checks, const char* op, const at::Tensor& cu_seqlens,
                               const c10::SymInt& batch);
// Raises unless the values of cu_seqlens, on the CPU, increase from 0 to seqlen.
void check_cu_seqlens_values(std::string_view op, const at::Tensor& cu_seqlens, int64_t seqlen);

// The sequence of each step, int32. Empty sequences have no step. For any values of cu_seqlens the result is a valid index.
at::Tensor sequence_at(const at::Tensor& cu_seqlens, const at::Tensor& steps);

}  // namespace ssm_kernels
