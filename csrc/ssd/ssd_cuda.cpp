// CUDA entry points of the chunked scan. Forward in 16 bits with up to kMaxKernelDstate states runs as kernels of its own
// (ssd_fwd.cuh) on the current stream, all else as ATen's products (ssd_aten.h). Nothing waits for the device, except that the
// values of cu_seqlens are checked on the host unless a CUDA graph is being captured.

#ifdef SSM_KERNELS_WITH_CUDA

#include "ssd/ssd_cuda.h"

#include <ATen/ceil_div.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <limits>
#include <string>
#include <string_view>

#include "cuda/device.h"
#include "ssd/ssd_aten.h"
#include "ssd/ssd_chunks.h"
#include "torch/checks.h"
#include "torch/packed_sequences.h"

namespace ssm_kernels::ssd {
namespace {

constexpr int64_t kRowElements = 8;  // rows are moved in pieces of as many
constexpr int64_t kMaxSegments = 16;

std::atomic<bool> prefers_mma{false};

std::string prefer_products(std::string_view name) {
  TORCH_CHECK_VALUE(name == "wgmma" || name == "mma", "_prefer_ssd_products: expected 'wgmma' or 'mma', got '", name, "'");
  return prefers_mma.exchange(name == "mma") ? "mma" : "wgmma";
}

// Whether kernels can move the rows: contiguous, of a multiple of kRowElements, at multiples of 16 bytes.
bool has_rows(const at::Tensor& tensor) {
  bool result = tensor.size(3) % kRowElements == 0 && tensor.stride(3) == 1 &&
                reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16 == 0;
  for (int64_t axis = 0; axis < 3; ++axis) result &= tensor.stride(axis) % kRowElements == 0 || tensor.size(axis) == 1;
  return result;
}

// A tensor with such rows, padded with zeros.
at::Tensor as_rows(const at::Tensor& tensor) {
  if (has_rows(tensor)) return tensor;
  const int64_t padding = at::ceil_div<int64_t>(tensor.size(3), kRowElements) * kRowElements - tensor.size(3);
  return padding > 0 ? at::constant_pad_nd(tensor, {0, padding}) : tensor.clone(at::MemoryFormat::Contiguous);
}

RowsView rows_view(const at::Tensor& tensor) {
  return {tensor.data_ptr(), tensor.stride(0), tensor.stride(1), tensor.stride(2)};
}
RowsView const_rows_view(const at::Tensor& tensor) {
  return {const_cast<void*>(tensor.const_data_ptr()), tensor.stride(0), tensor.stride(1), tensor.stride(2)};
}

// How many segments to cut each sequence into, so that the device is full: with blocks running in rounds of one a
// multiprocessor, the time is that of the chunks in a row; finding what segments do to a state takes half as long as scanning
// them, and each fold and the second kernel some chunks' time.
int64_t choose_segments(int64_t blocks_of_a_segment, int64_t chunks, int64_t multiprocessors) {
  const auto time = [&](int64_t segments) {
    const int64_t chunks_per_segment = at::ceil_div<int64_t>(chunks, segments);
    const auto rounds = [&](int64_t count) {
      return static_cast<double>(at::ceil_div<int64_t>(blocks_of_a_segment * count, multiprocessors));
    };
    const double scan = rounds(segments) * static_cast<double>(chunks_per_segment);
    if (segments == 1) return scan;
    const double states = rounds(segments - 1) * static_cast<double>(chunks_per_segment) * 0.5;
    return scan + states + 2 + 0.1 * static_cast<double>(segments);
  };
  int64_t best = 1;
  for (int64_t segments = 2; segments <= std::min(kMaxSegments, chunks); ++segments) {
    if (time(segments) < time(best)) best = segments;
  }
  return best;
}

// One call of the forward kernels.
class Forward {
 public:
  Forward(const Inputs& in, Discretization method, const FwdOutputs& outputs)
      : x_(as_rows(in.x)), B_(as_rows(in.B)), C_(as_rows(in.C)), outputs_(outputs) {
    if (is_present(in.z)) z_ = as_rows(*in.z);
    if (is_present(in.seq_idx)) resets_ = sequence_starts(*in.seq_idx);
    if (is_present(in.cu_seqlens)) cu_seqlens_ = in.cu_seqlens->to(at::kLong).contiguous();
    A_ = in.A.contiguous();
    if (is_present(in.dt_bias)) dt_bias_ = in.dt_bias->contiguous();
    const int64_t more_rows = x_.size(3) - in.x.size(3), more_columns = B_.size(3) - in.B.size(3);
    if (is_present(in.D)) D_ = in.D->dim() == 2 ? pad(*in.D, {0, more_rows}) : in.D->contiguous();
    if (is_present(in.initial_states)) initial_states_ = aligned(pad(*in.initial_states, {0, more_columns, 0, more_rows}));
    is_padded_ = more_rows > 0 || more_columns > 0;
    // What is not written in place is copied there.
    out_ = has_rows(outputs.out) ? outputs.out : at::empty(x_.sizes(), x_.options());
    final_states_ = is_padded_ ? at::empty({outputs.final_states.size(0), x_.size(2), x_.size(3), B_.size(3)},
                                           outputs.final_states.options())
                               : outputs.final_states;

    params_.batch = outputs.final_states.size(0);
    params_.seqlen = x_.size(1);
    params_.heads = x_.size(2);
    params_.groups = B_.size(2);
    params_.headdim = static_cast<int>(x_.size(3));
    params_.dstate = static_cast<int>(B_.size(3));
    params_.discretization = method;
    params_.dt_softplus = in.dt_softplus;
    params_.dt_min = static_cast<float>(in.dt_min);
    params_.dt_max = static_cast<float>(in.dt_max);
    params_.x = const_rows_view(x_);
    params_.B = const_rows_view(B_);
    params_.C = const_rows_view(C_);
    params_.dt = const_rows_view(in.dt);
    params_.out = rows_view(out_);
    params_.A = A_.const_data_ptr<float>();
    params_.final_states = final_states_.data_ptr<float>();
    if (z_.defined()) params_.z = const_rows_view(z_);
    if (dt_bias_.defined()) params_.dt_bias = dt_bias_.const_data_ptr<float>();
    if (D_.defined()) {
      params_.D = D_.const_data_ptr<float>();
      params_.D_stride_head = D_.stride(0);
      params_.D_stride_row = D_.dim() == 2 ? D_.stride(1) : 0;
    }
    if (cu_seqlens_.defined()) params_.cu_seqlens = cu_seqlens_.const_data_ptr<int64_t>();
    if (resets_.defined()) params_.resets = static_cast<const uint8_t*>(resets_.const_data_ptr());
    if (initial_states_.defined()) params_.initial_states = initial_states_.const_data_ptr<float>();
  }

  void run() {
    cut();
    if (partition_.blocks == 0) return;
    int max_shared_bytes = 0;
    C10_CUDA_CHECK(cudaDeviceGetAttribute(&max_shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, x_.get_device()));
    const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
    const int error = x_.scalar_type() == at::kHalf
                          ? launch_ssd_fwd<__half>(params_, partition_, max_shared_bytes, stream)
                          : launch_ssd_fwd<__nv_bfloat16>(params_, partition_, max_shared_bytes, stream);
    C10_CUDA_CHECK(static_cast<cudaError_t>(error));
    if (!out_.is_same(outputs_.out)) outputs_.out.copy_(out_.narrow(3, 0, outputs_.out.size(3)));
    if (is_padded_) {
      const at::Tensor& target = outputs_.final_states;
      target.copy_(final_states_.narrow(2, 0, target.size(2)).narrow(3, 0, target.size(3)));
    }
  }

 private:
  static at::Tensor pad(const at::Tensor& tensor, at::IntArrayRef padding) {
    const bool is_needed = std::any_of(padding.begin(), padding.end(), [](int64_t size) { return size > 0; });
    return is_needed ? at::constant_pad_nd(tensor, padding) : tensor.contiguous();
  }

  static at::Tensor aligned(const at::Tensor& tensor) {
    return reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16 == 0 ? tensor : tensor.clone();
  }

  void cut() {
    const int multiprocessors = cuda::multiprocessor_count(x_.get_device());
    const int64_t heads_per_group = params_.heads / params_.groups;
    partition_.row_blocks = at::ceil_div<int64_t>(params_.headdim, kUnitRows);
    partition_.blocks_per_group = at::ceil_div<int64_t>(heads_per_group * partition_.row_blocks, kUnits);
    const int64_t blocks_of_a_segment = params_.batch * params_.groups * partition_.blocks_per_group;
    const int64_t chunks = at::ceil_div<int64_t>(params_.seqlen, kChunk);
    partition_.segments = choose_segments(blocks_of_a_segment, chunks, multiprocessors);
    partition_.chunks_per_segment = at::ceil_div<int64_t>(chunks, partition_.segments);
    partition_.blocks = blocks_of_a_segment * partition_.segments;
    partition_.may_use_wgmma = !prefers_mma;
    constexpr int64_t kMaxBlocks = std::numeric_limits<int32_t>::max();
    TORCH_CHECK_VALUE(partition_.blocks <= kMaxBlocks, "ssd_chunk_scan: expected at most ", kMaxBlocks,
                      " blocks of two heads or 128 rows of one, got ", partition_.blocks);
    if (partition_.segments == 1 || partition_.blocks == 0) return;
    const int64_t states = params_.batch * partition_.segments * params_.heads;
    workspace_ = at::empty({states * (int64_t(params_.headdim) * params_.dstate + 1)}, A_.options());
    partition_.segment_states = workspace_.data_ptr<float>();
    partition_.segment_decays = partition_.segment_states + states * params_.headdim * params_.dstate;
  }

  at::Tensor x_, z_, B_, C_, A_, dt_bias_, D_, cu_seqlens_, resets_, initial_states_, out_, final_states_, workspace_;
  const FwdOutputs& outputs_;
  bool is_padded_;
  SsdFwdParams params_;
  Partition partition_;
};

FwdResult fwd_cuda(const Inputs& in) {
  const Discretization method = check_inputs(in);
  const c10::cuda::CUDAGuard guard(in.x.device());
  const at::ScalarType dtype = in.x.scalar_type();
  if ((dtype != at::kHalf && dtype != at::kBFloat16) || in.B.size(3) > kMaxKernelDstate) return fwd_aten(in);
  if (is_present(in.cu_seqlens) && !cuda::is_capturing()) {
    check_cu_seqlens_values("ssd_chunk_scan", in.cu_seqlens->cpu(), in.x.size(1));
  }
  FwdOutputs outputs = allocate_fwd(in);
  Forward(in, method, outputs).run();
  return {outputs.out, outputs.final_states};
}

BwdResult bwd_cuda(const BwdInputs& bwd) {
  const c10::cuda::CUDAGuard guard(bwd.in.x.device());
  return bwd_aten(bwd);
}

}  // namespace

TORCH_LIBRARY_IMPL(ssm_kernels, CompositeExplicitAutograd, m) { m.impl("_prefer_ssd_products", &prefer_products); }

TORCH_LIBRARY_IMPL(ssm_kernels, CUDA, m) {
  m.impl("_ssd_chunk_scan_fwd", &Unpacked<FwdSignature>::kernel<&fwd_cuda>);
  m.impl("_ssd_chunk_scan_bwd", &Unpacked<BwdSignature>::kernel<&bwd_cuda>);
}

}  // namespace ssm_kernels::ssd

#endif
