// Tensors whose memory holds the negatives, or the conjugates, of their values (x.conj().imag), as arguments of operators that
// write to arguments.
#pragma once

#include <torch/library.h>

namespace ssm_kernels {

// Registers the operator's kernel for the key of `m`, Negative or Conjugate: tensors that are read are resolved, one that is
// written to raises. PyTorch's own kernel for these keys expects that the results are the arguments written to.
void read_lazy_views(torch::Library& m, const char* name);

}  // namespace ssm_kernels
