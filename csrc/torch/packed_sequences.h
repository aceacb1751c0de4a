// cu_seqlens: several sequences one after another in the one row of a batch. Sequence i is steps cu_seqlens[i] to
// cu_seqlens[i + 1] - 1, and may have none.
#pragma once

#include <ATen/core/Tensor.h>

#include "torch/checks.h"

namespace ssm_kernels {

// Raises unless cu_seqlens is a (sequences + 1,) tensor of integers beside a batch of 1. Its values are not looked at.
void check_cu_seqlens_argument(const ArgumentChecks& checks, const char* op, const at::Tensor& cu_seqlens,
                               const c10::SymInt& batch);
// Raises unless cu_seqlens, on the CPU, cuts a sequence of that length.
void check_cu_seqlens_values(std::string_view op, const at::Tensor& cu_seqlens, int64_t seqlen);

// The sequence that each of those steps belongs to, int32: of several that begin there, the one that is not empty. One of the
// sequences, whatever the values of cu_seqlens.
at::Tensor sequence_at(const at::Tensor& cu_seqlens, const at::Tensor& steps);

}  // namespace ssm_kernels
