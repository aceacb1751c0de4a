// _copy_rows(source, columns): a contiguous copy of the first columns of `source`, or of all and columns of zeros behind them.
// A layer whose rows do not fill whole vectors copies its sequences into rows that do, and its results back.

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#ifdef SSM_KERNELS_WITH_CUDA
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "cuda/row_copies.h"
#endif

#include <algorithm>
#include <limits>
#include <tuple>

#include "torch/allocation.h"
#include "torch/dispatch.h"
#include "torch/schemas.h"

namespace ssm_kernels::copy_rows {

TORCH_LIBRARY_FRAGMENT(ssm_kernels, library) {
  const Schemas schemas(library);

  // A contiguous copy of the first columns of a tensor, or of all and columns of zeros behind them.
  schemas.kernels("_copy_rows(Tensor source, SymInt columns) -> Tensor");
}

namespace {

struct Inputs {
  at::Tensor source;
  c10::SymInt columns;

  auto fields() { return std::tie(source, columns); }
};

at::Tensor allocate(const Inputs& in) {
  TORCH_CHECK_VALUE(in.source.dim() > 0, "_copy_rows: expected source with an axis, got a number");
  c10::SymDimVector shape(in.source.sym_sizes().begin(), in.source.sym_sizes().end());
  shape.back() = in.columns;
  return empty_tensor(shape, in.source.options());
}

at::Tensor copy(const Inputs& in) {
  const at::Tensor out = allocate(in);
  const int64_t columns = out.size(-1), copied = std::min(columns, in.source.size(-1));
  out.narrow(-1, 0, copied).copy_(in.source.narrow(-1, 0, copied));
  out.narrow(-1, copied, columns - copied).zero_();
  return out;
}

#ifdef SSM_KERNELS_WITH_CUDA
at::Tensor cuda(const Inputs& in) {
  constexpr int64_t kMostBytes = std::numeric_limits<int32_t>::max() / 4;
  const at::Tensor& source = in.source;
  const int64_t bytes = source.element_size(), axes = source.dim() - 1;
  const bool has_kernel = (bytes == 2 || bytes == 4) && axes >= 0 && axes <= 2 && source.stride(-1) == 1 &&
                          std::max(source.size(-1), in.columns.expect_int()) * bytes <= kMostBytes;
  if (!has_kernel) return copy(in);
  const c10::cuda::CUDAGuard guard(source.device());
  const at::Tensor out = allocate(in);
  cuda::RowCopy rows;
  rows.source = static_cast<const char*>(source.const_data_ptr());
  rows.target = static_cast<char*>(out.mutable_data_ptr());
  for (int64_t axis = 0; axis < axes; ++axis) {
    // A tile is some entries of the second axis.
    const int64_t place = 2 - axes + axis;
    rows.sizes[place] = source.size(axis);
    rows.source_strides[place] = source.stride(axis) * bytes;
    rows.target_strides[place] = out.stride(axis) * bytes;
  }
  rows.row_bytes = static_cast<int>(std::min(source.size(-1), out.size(-1)) * bytes);
  rows.written_bytes = static_cast<int>(out.size(-1) * bytes);
  cuda::RowCopies copies;
  copies.add(rows);
  C10_CUDA_CHECK(cuda::launch_row_copies(copies, c10::cuda::getCurrentCUDAStream()));
  return out;
}
#endif

}  // namespace

TORCH_LIBRARY_IMPL(ssm_kernels, CPU, m) { implement<&copy>(m, "_copy_rows"); }

TORCH_LIBRARY_IMPL(ssm_kernels, Meta, m) { implement<&allocate>(m, "_copy_rows"); }

#ifdef SSM_KERNELS_WITH_CUDA
TORCH_LIBRARY_IMPL(ssm_kernels, CUDA, m) { implement<&cuda>(m, "_copy_rows"); }
#endif

}  // namespace ssm_kernels::copy_rows
