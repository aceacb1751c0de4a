#ifdef SSM_KERNELS_WITH_CUDA

#include "ssd/cuda/tensors.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <limits>

#include "common/integers.h"
#include "cuda/device.h"
#include "torch/allocation.h"
#include "torch/checks.h"
#include "torch/debug_options.h"
#include "torch/packed_sequences.h"

namespace ssm_kernels::ssd {
namespace {

static_assert(kMinSharedBytes == kMinSharedBytesPerBlock, "the least that the option may be set to");

constexpr int64_t kVectorBytes = 16;

bool is_aligned(const at::Tensor& tensor) { return reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % kVectorBytes == 0; }

// Whether rows are contiguous and begin at multiples of so many elements, from memory aligned to as many.
bool begin_at_multiples(const at::Tensor& tensor, int64_t elements) {
  const auto bytes = static_cast<uintptr_t>(elements * tensor.element_size());
  bool result = tensor.stride(3) == 1 && reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % bytes == 0;
  for (int64_t axis = 0; axis < 3; ++axis) result &= tensor.stride(axis) % elements == 0 || tensor.size(axis) == 1;
  return result;
}

RowsView view_of(const at::Tensor& tensor, void* data, bool reverse) {
  RowsView view{data, tensor.stride(0), tensor.stride(1), tensor.stride(2)};
  if (reverse && tensor.numel() > 0) {
    view.data = static_cast<char*>(data) + (tensor.size(1) - 1) * view.stride_step * tensor.element_size();
    view.stride_step = -view.stride_step;
  }
  return view;
}

}  // namespace

bool has_vectors(const at::Tensor& tensor) {
  const int64_t vector_elements = kVectorBytes / tensor.element_size();
  return tensor.size(3) % vector_elements == 0 && begin_at_multiples(tensor, vector_elements);
}
bool has_pairs(const at::Tensor& tensor) { return tensor.size(3) % 2 == 0 && begin_at_multiples(tensor, 2); }
bool has_contiguous_rows(const at::Tensor& tensor) { return tensor.stride(3) == 1 || tensor.size(3) == 1; }

at::Tensor PendingCopies::as_rows(const at::Tensor& tensor) {
  // Whole vectors are loaded: memory after a row is not part of it.
  if (has_vectors(tensor)) return tensor;
  const at::Tensor padded = empty_padded_like(tensor);
  add(tensor, padded);
  return padded.narrow(3, 0, tensor.size(3));
}

void PendingCopies::add(const at::Tensor& source, const at::Tensor& target) {
  if (!has_contiguous_rows(target)) {
    target.copy_(without_padding(source, target));
    return;
  }
  const at::Tensor rows = has_contiguous_rows(source) ? source : source.contiguous();
  cuda::RowCopy copy;
  copy.source = static_cast<const char*>(rows.const_data_ptr());
  copy.target = static_cast<char*>(target.data_ptr());
  const int64_t bytes = rows.element_size();
  for (int axis = 0; axis < cuda::RowCopy::kAxes; ++axis) {
    copy.sizes[axis] = target.size(axis);
    copy.source_strides[axis] = rows.stride(axis) * bytes;
    copy.target_strides[axis] = target.stride(axis) * bytes;
  }
  copy.row_bytes = static_cast<int>(std::min(rows.size(3), target.size(3)) * bytes);
  copy.written_bytes = static_cast<int>(target.size(3) * bytes);
  if (!copies_.add(copy)) {
    launch();
    copies_.add(copy);
  }
  kept_.push_back(rows);
  kept_.push_back(target);
}

void PendingCopies::launch() {
  if (copies_.count > 0) C10_CUDA_CHECK(cuda::launch_row_copies(copies_, c10::cuda::getCurrentCUDAStream()));
  copies_ = {};
  kept_.clear();
}

at::Tensor empty_padded_like(const at::Tensor& tensor) {
  return empty_tensor({tensor.size(0), tensor.size(1), tensor.size(2), padded_row(tensor.size(3))}, tensor.options());
}

RowsView rows_view(const at::Tensor& tensor, bool reverse) { return view_of(tensor, tensor.data_ptr(), reverse); }
RowsView const_rows_view(const at::Tensor& tensor, bool reverse) {
  return view_of(tensor, const_cast<void*>(tensor.const_data_ptr()), reverse);
}

RowsView in_bytes(RowsView view, const at::Tensor& tensor) {
  const int64_t bytes = tensor.element_size();
  return {view.data, view.stride_batch * bytes, view.stride_step * bytes, view.stride_head * bytes};
}

at::Tensor without_padding(const at::Tensor& padded, const at::Tensor& target) {
  return padded.narrow(-2, 0, target.size(-2)).narrow(-1, 0, target.size(-1));
}

KernelResult result_as_rows(const at::Tensor& target, bool is_written) {
  return {target, is_written ? target : empty_padded_like(target)};
}

KernelInputs::KernelInputs(const Inputs& in, Discretization method, PendingCopies& copies)
    : x(copies.as_rows(in.x)),
      B(copies.as_rows(in.B)),
      C(in.C.is_same(in.B) ? B : copies.as_rows(in.C)),
      in_(in),
      method_(method),
      sequences_(is_present(in.cu_seqlens) ? in.cu_seqlens->size(0) - 1 : in.x.size(0)) {
  if (is_present(in.seq_idx)) resets_ = sequence_starts(in.reverse ? in.seq_idx->flip(1) : *in.seq_idx);
  if (is_present(in.cu_seqlens)) {
    cu_seqlens_ = in.cu_seqlens->to(at::kLong).contiguous();
    if (in.reverse) cu_seqlens_ = in.x.size(1) - cu_seqlens_.flip(0);
  }
  if (resets_.defined() && cu_seqlens_.defined()) {
    // A reset at the first step of a packed sequence would clear its initial state.
    const at::Tensor sequences = sequence_at(cu_seqlens_, at::arange(in.x.size(1), cu_seqlens_.options()));
    resets_.logical_and_(sequence_starts(sequences.unsqueeze(0)).logical_not_());
  }
  if (is_present(in.A)) A_ = in.A->contiguous();
  if (is_present(in.dt_bias)) dt_bias_ = in.dt_bias->contiguous();
  if (is_present(in.log_decay)) log_decay_ = *in.log_decay;
  if (is_present(in.gain)) gain_ = *in.gain;
  if (is_present(in.diagonal_gain)) diagonal_gain_ = *in.diagonal_gain;
  // The kernels read all gates with one dtype and the same strides.
  const auto for_each_gate = [&](const auto& body) {
    for (at::Tensor* gate : {&log_decay_, &gain_, &diagonal_gain_}) {
      if (gate->defined()) body(*gate);
    }
  };
  bool have_one_dtype = true, have_same_strides = true;
  for_each_gate([&](const at::Tensor& gate) { have_one_dtype &= gate.scalar_type() == log_decay_.scalar_type(); });
  if (!have_one_dtype) for_each_gate([](at::Tensor& gate) { gate = gate.to(at::kFloat); });
  for_each_gate([&](const at::Tensor& gate) { have_same_strides &= gate.strides() == log_decay_.strides(); });
  if (!have_same_strides) for_each_gate([](at::Tensor& gate) { gate = gate.contiguous(); });
  if (is_present(in.D)) D_ = in.D->contiguous();
  if (is_present(in.initial_states)) initial_states_ = as_states(*in.initial_states, copies);
}

void KernelInputs::fill(SsdParams& params) const {
  params.batch = sequences_;
  params.seqlen = x.size(1);
  params.heads = x.size(2);
  params.groups = B.size(2);
  params.headdim = static_cast<int>(x.size(3));
  params.dstate = static_cast<int>(B.size(3));
  params.state_columns = static_cast<int>(state_columns());
  params.discretization = method_;
  params.dt_softplus = in_.dt_softplus;
  const auto [dt_min, dt_max] = kernel_dt_limit(in_.dt_min, in_.dt_max);
  params.dt_min = static_cast<float>(dt_min);
  params.dt_max = static_cast<float>(dt_max);
  params.x = const_rows_view(x, in_.reverse);
  params.B = const_rows_view(B, in_.reverse);
  params.C = const_rows_view(C, in_.reverse);
  if (A_.defined()) {
    params.dt = const_rows_view(*in_.dt, in_.reverse);
    params.A = A_.const_data_ptr<float>();
  }
  if (dt_bias_.defined()) params.dt_bias = dt_bias_.const_data_ptr<float>();
  if (D_.defined()) {
    params.D = D_.const_data_ptr<float>();
    params.D_stride_head = D_.stride(0);
    params.D_stride_row = D_.dim() == 2 ? D_.stride(1) : 0;
  }
  if (cu_seqlens_.defined()) params.cu_seqlens = cu_seqlens_.const_data_ptr<int64_t>();
  if (resets_.defined()) params.resets = static_cast<const uint8_t*>(resets_.const_data_ptr());
  params.states_stride_entry = states_stride_entry();
  if (initial_states_.defined()) params.initial_states = initial_states_.const_data_ptr<float>() + offset_of_first_states();
}

void KernelInputs::fill(GivenGates& gates) const {
  if (!has_given_gates()) return;
  gates.log_decay = in_bytes(const_rows_view(log_decay_, in_.reverse), log_decay_);
  gates.are_fp32 = log_decay_.scalar_type() == at::kFloat;
  gates.has_gain = gain_.defined();
  gates.has_out_factor = is_present(in_.out_factor);
  if (gates.has_gain) gates.gain_offset = offset_from_log_decay(gain_);
  if (!gates.has_out_factor) return;
  TORCH_INTERNAL_ASSERT(gates.are_fp32 && in_.out_factor->scalar_type() == at::kFloat &&
                        in_.out_factor->strides() == log_decay_.strides());
  gates.out_factor_offset = offset_from_log_decay(*in_.out_factor);
}

int64_t KernelInputs::offset_from_log_decay(const at::Tensor& gate) const {
  const auto address = [&](const at::Tensor& tensor) {
    return reinterpret_cast<intptr_t>(const_rows_view(tensor, in_.reverse).data);
  };
  return address(gate) - address(log_decay_);
}

WorkPartition KernelInputs::partition() const {
  const CallSizes sizes{sequences_, x.size(1), x.size(2), B.size(2), x.size(3), B.size(3)};
  check_count(tiles_per_entry(sizes), "warpgroups' tiles");
  const WorkPartition result = partition_work(sizes);
  check_count(result.work_tiles, "blocks");
  return result;
}

int64_t KernelInputs::state_columns() const {
  // The short scan of fp32 moves four columns at once, the other kernels two.
  return round_up(B.size(3), B.scalar_type() == at::kFloat ? 4 : 2);
}

at::Tensor KernelInputs::empty_states() const {
  return empty_tensor({sequences_, x.size(2), x.size(3), state_columns()}, wide_options(in_.x));
}

at::Tensor KernelInputs::as_states(const at::Tensor& states, PendingCopies& copies) const {
  if (state_columns() == states.size(3) && states.is_contiguous() && is_aligned(states)) return states;
  const at::Tensor result = empty_states();
  copies.add(states, result);
  return result;
}

KernelResult KernelInputs::result_as_states(const at::Tensor& target) const {
  const bool is_written = state_columns() == target.size(3) && target.is_contiguous() && is_aligned(target);
  return {target, is_written ? target : empty_states()};
}

int64_t KernelInputs::states_stride_entry() const {
  const int64_t stride = x.size(2) * x.size(3) * state_columns();
  return in_.reverse && cu_seqlens_.defined() ? -stride : stride;
}

int64_t KernelInputs::offset_of_first_states() const {
  return std::max<int64_t>(0, -states_stride_entry()) * std::max<int64_t>(0, sequences_ - 1);
}

int max_shared_bytes(const at::Tensor& x) {
  return static_cast<int>(
      std::min<int64_t>(cuda::max_shared_bytes(x.get_device()), debug_option(DebugOption::kSsdSharedBytes)));
}

void check_count(int64_t count, const char* of) {
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
  TORCH_CHECK_VALUE(count <= kMax, "ssd_chunk_scan: the problem is too large: expected at most ", kMax, " ", of, ", got ",
                    count);
}

}  // namespace ssm_kernels::ssd

#endif
