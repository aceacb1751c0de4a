// mlstm_scan by its own chunked kernels: which calls they take, their workspace, and the parts of a call.

#ifdef SSM_KERNELS_WITH_CUDA

#include "mlstm/cuda/chunks.h"

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "cuda/constants.h"
#include "cuda/device.h"
#include "mlstm/cuda/launch.h"
#include "mlstm/mlstm_op.h"
#include "torch/allocation.h"
#include "torch/debug_options.h"

namespace ssm_kernels::mlstm {
namespace {

constexpr int64_t kTileSide = 64;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Whether TMA takes the rows of a (batch, seqlen, heads, columns) tensor.
bool has_tma_rows(const at::Tensor& tensor) {
  const int64_t elements = cuda::kVectorBytes / tensor.element_size();
  bool result = tensor.stride(3) == 1 && reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % cuda::kVectorBytes == 0;
  for (int64_t axis = 0; axis < 3; ++axis) {
    result &= tensor.size(axis) == 1 || (tensor.stride(axis) > 0 && tensor.stride(axis) % elements == 0);
  }
  return result;
}
at::Tensor with_tma_rows(const at::Tensor& tensor) {
  return has_tma_rows(tensor) ? tensor : tensor.clone(at::MemoryFormat::Contiguous);
}
// A result that kernels write in place or, where TMA does not take its rows, in another tensor.
class Target {
 public:
  explicit Target(const at::Tensor& result)
      : result_(result), written_(has_tma_rows(result) ? result : empty_tensor(result.sym_sizes(), result.options())) {}

  void describe(cuda::TmaDescriptor& map) const;
  void finish() const {
    if (!written_.is_same(result_)) at::Tensor(result_).copy_(written_);
  }

 private:
  at::Tensor result_, written_;
};

void describe(cuda::TmaDescriptor& map, const at::Tensor& tensor) {
  const auto size = [&](int64_t axis) { return static_cast<uint64_t>(tensor.size(axis)); };
  C10_CUDA_CHECK(
      cuda::make_tma_descriptor(map, const_cast<void*>(tensor.const_data_ptr()), {size(3), size(2), size(1), size(0)},
                                {tensor.stride(2), tensor.stride(1), tensor.stride(0)}, {kTileSide, 1, kTileSide, 1}));
}
void Target::describe(cuda::TmaDescriptor& map) const { mlstm::describe(map, written_); }

const float* floats_of(const at::Tensor& tensor) { return tensor.defined() ? tensor.const_data_ptr<float>() : nullptr; }
// Kernels load the floats in vectors, and a contiguous view may begin anywhere.
at::Tensor contiguous_floats(const OptionalTensor& tensor) {
  if (!is_present(tensor)) return at::Tensor();
  const bool is_aligned = reinterpret_cast<uintptr_t>(tensor->const_data_ptr()) % cuda::kVectorBytes == 0;
  return is_aligned ? tensor->contiguous() : tensor->clone(at::MemoryFormat::Contiguous);
}

// A call's arguments, its tensors and its workspace.
struct Call {
  const Inputs& in;
  const bool is_backward;
  const at::Tensor q, k, v, divisor, initial_C;
  ChunkParams params;

  Call(const Inputs& in, const Gates& gates, const at::Tensor& given_divisor, bool is_backward)
      : in(in),
        is_backward(is_backward),
        q(with_tma_rows(in.q)),
        k(with_tma_rows(in.k)),
        v(with_tma_rows(in.v)),
        divisor(given_divisor.defined() ? given_divisor.contiguous() : at::Tensor()),
        initial_C(contiguous_floats(in.initial_C)) {
    describe(params.q, q);
    describe(params.k, k);
    describe(params.v, v);
    params.batch = q.size(0);
    params.seqlen = q.size(1);
    params.heads = q.size(2);
    params.chunks = ceil_div(params.seqlen, kMatrixChunk);
    params.value_dim = v.size(3);
    params.multiprocessors = cuda::multiprocessor_count(q.get_device());
    params.scale = scale_of(in);
    params.eps = in.eps;
    params.log_decay = gates.log_decay.const_data_ptr<float>();
    params.gain = gates.gain.const_data_ptr<float>();
    params.m = gates.m.const_data_ptr<float>();
    params.divisor = floats_of(divisor);
    params.initial_states = floats_of(initial_C);
  }

  // Forward of packed sequences, with the final states of each.
  void set_sequences(const at::Tensor& cu_seqlens, const at::Tensor& final_C) {
    final_C.zero_();  // of sequences without steps
    params.cu_seqlens = cu_seqlens.const_data_ptr<int64_t>();
    params.sequences = cu_seqlens.size(0) - 1;
  }

  // Runs the call in parts of some rows of the batch, or of some heads of one, whose states take as much memory as those of
  // ssd_chunk_scan may.
  void run() {
    constexpr int64_t kSmallWorkspaceBytes = int64_t(256) << 20;
    const int64_t v_bytes = v.numel() * v.element_size();
    const int64_t most_bytes =
        std::min(debug_option(DebugOption::kSsdWorkspaceBytes), std::max(kSmallWorkspaceBytes, 2 * v_bytes));
    const int64_t state_bytes = params.chunks * params.value_dim * kMatrixKeys * v.element_size() * (is_backward ? 2 : 1);
    const int64_t ends = params.cu_seqlens == nullptr ? 0 : params.sequences;
    const int64_t line_bytes = state_bytes + ends * (kMatrixChunk + 1) * static_cast<int64_t>(sizeof(float));
    const int64_t most_lines = std::max<int64_t>(1, most_bytes / line_bytes);
    const auto at_once = [](int64_t count, int64_t most) {
      return ceil_div(count, ceil_div(count, std::max<int64_t>(1, most)));  // the parts are about equal
    };
    const int64_t entries = at_once(params.batch, most_lines / params.heads), heads = at_once(params.heads, most_lines);
    const std::vector<at::Tensor> workspace = allocate(entries * heads);
    for (int64_t entry = 0; entry < params.batch; entry += entries) {
      params.first_entry = entry;
      params.entries = std::min(entries, params.batch - entry);
      for (int64_t head = 0; head < params.heads; head += heads) {
        params.first_head = head;
        params.part_heads = std::min(heads, params.heads - head);
        params.segments = segments_of(params.lines());
        C10_CUDA_CHECK(launch_mlstm_chunks(params, is_backward, c10::cuda::getCurrentCUDAStream()));
      }
    }
  }

 private:
  // Segments of a line's chunks, if its blocks are fewer than the multiprocessors. Adding the state of an earlier segment takes
  // about as long as a chunk, so that a segment has at least as many chunks as there are segments, and at least kLeastChunks.
  int64_t segments_of(int64_t lines) const {
    constexpr int64_t kLeastChunks = 4;
    const int64_t blocks = lines * (params.value_dim / (2 * kTileSide));
    int64_t segments = std::max<int64_t>(1, params.multiprocessors / blocks);
    while (segments > 1 && segments * std::max(kLeastChunks, segments) > params.chunks) --segments;
    return segments;
  }

  std::vector<at::Tensor> allocate(int64_t lines) {
    const int64_t chunks = lines * params.chunks, state_elements = params.value_dim * kMatrixKeys;
    const at::TensorOptions options = v.options().dtype(at::kFloat);
    std::vector<at::Tensor> result;
    const auto floats = [&](int64_t count) {
      result.push_back(empty_tensor({count}, options));
      return result.back().data_ptr<float>();
    };
    const auto states = [&] {
      result.push_back(empty_tensor({chunks, state_elements}, v.options()));
      return result.back().mutable_data_ptr();
    };
    params.tables = floats(chunks * kChunkTables * kMatrixChunk);
    params.decays = floats(chunks);
    params.states = states();
    if (params.cu_seqlens != nullptr) {
      params.end_tables = floats(lines * params.sequences * kMatrixChunk);
      params.end_decays = floats(lines * params.sequences);
    }
    if (segments_of(1) > 1) {
      // The blocks of all segments are at most as many as the multiprocessors.
      params.segment_states = floats(params.multiprocessors * 2 * kTileSide * kMatrixKeys);
      params.segment_decays = floats(params.multiprocessors);
    }
    if (!is_backward) return result;
    params.grad_states = states();
    params.sums = floats(chunks * kChunkSums * kMatrixChunk);
    params.products = floats(chunks * params.value_dim / 16);
    return result;
  }
};

}  // namespace

bool takes_chunks(const Inputs& in) {
  const int64_t value_dim = in.v.size(3);
  if (!in.q.is_cuda() || in.q.scalar_type() != at::kBFloat16) return false;
  // The kernels begin packed sequences with an empty memory.
  if (is_present(in.cu_seqlens) && (is_present(in.initial_C) || in.q.size(1) > std::numeric_limits<int>::max() / 2))
    return false;
  if (in.q.size(3) != kMatrixKeys || value_dim == 0 || value_dim % kMatrixValues != 0 || in.v.numel() == 0) return false;
  if (debug_option(DebugOption::kSsdMma) != 0) return false;
  const int64_t chunks = in.q.size(0) * in.q.size(2) * ceil_div(in.q.size(1), kMatrixChunk);
  if (chunks * (value_dim / kMatrixValues) > std::numeric_limits<int>::max() / 2) return false;
  const c10::cuda::CUDAGuard guard(in.q.device());
  return has_mlstm_chunks();
}

void chunks_fwd(const Inputs& in, const Gates& gates, FwdOutputs& outputs) {
  const c10::cuda::CUDAGuard guard(in.q.device());
  const bool is_packed = is_present(in.cu_seqlens);
  Call call(in, gates, is_packed && in.normalize ? outputs.divisor : at::Tensor(), /*is_backward=*/false);
  const Target out(outputs.out);
  out.describe(call.params.out);
  call.params.final_states = outputs.final_C.data_ptr<float>();
  if (is_packed) call.set_sequences(*in.cu_seqlens, outputs.final_C);
  at::Tensor normalizers, initial_n;
  if (in.normalize && !is_packed) {
    normalizers = normalizer_states_cuda(in, gates, outputs.final_n);
    initial_n = contiguous_floats(in.initial_n);
    call.params.normalizers = floats_of(normalizers);
    call.params.initial_normalizers = floats_of(initial_n);
    call.params.written_divisor = outputs.divisor.data_ptr<float>();
  }
  call.run();
  out.finish();
}

ChunkGrads chunks_bwd(const BwdInputs& bwd, const Inputs& in, const Gates& gates, const GradTensors& grads) {
  const c10::cuda::CUDAGuard guard(in.q.device());
  Call call(in, gates, in.normalize ? *bwd.divisor : at::Tensor(), /*is_backward=*/true);
  const at::Tensor grad_out = with_tma_rows(*bwd.grad_out), grad_final_C = contiguous_floats(bwd.grad_final_C);
  describe(call.params.grad_out, grad_out);
  call.params.grad_final_states = floats_of(grad_final_C);
  const auto target_of = [&](Grad grad, const at::Tensor& input) {
    return Target(bwd.needs_grad[grad] ? grads[grad] : empty_contiguous_like(input));
  };
  const Target grad_q = target_of(kGradQ, in.q), grad_k = target_of(kGradK, in.k), grad_v = target_of(kGradV, in.v);
  grad_q.describe(call.params.grad_q);
  grad_k.describe(call.params.grad_k);
  grad_v.describe(call.params.grad_v);
  if (bwd.needs_grad[kGradC] && is_present(in.initial_C)) call.params.grad_initial_states = grads[kGradC].data_ptr<float>();
  ChunkGrads result{empty_tensor_like(gates.gain), empty_tensor_like(gates.gain),
                    empty_tensor({in.q.size(0), in.q.size(1), in.q.size(2), 1}, gates.gain.options())};
  call.params.grad_log_decay = result.log_decay.data_ptr<float>();
  call.params.gain_times_grad = result.gain_times_grad.data_ptr<float>();
  call.params.out_products = result.out_products.data_ptr<float>();
  call.run();
  for (const Target* target : {&grad_q, &grad_k, &grad_v}) target->finish();
  return result;
}

}  // namespace ssm_kernels::mlstm

#endif
