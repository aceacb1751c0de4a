// Parameters of the linear scan's kernels, on CPU and CUDA: plain data, no torch type.
//
//   h_t = a_t h_{t-1} + b_t                          (batch, seqlen, channels), a and b the recurrence's of the inputs at t
//
// and its adjoint, with g_t the whole gradient of h_t, and e_t the gradient of h_{t-1} through step t:
//
//   g_t = grad_h_t + e_{t+1}        e_t = a_t g_t = a_t e_{t+1} + a_t grad_h_t
//
// which is a linear scan with the same a, from the last step to the first. It begins with the gradient of the last state and
// ends with the gradient of the initial state.
//
// Packed sequences follow one another in a batch of one row, and each begins with its own initial state. A reset begins the
// sequence of its batch row anew, from the same initial state, whose gradient is the sum of e over all its beginnings. Reverse
// time only changes the views: data points to the last step, and the strides of steps are negative.
#pragma once

#include <cstdint>

#include "common/kernel_abi.h"
#include "common/macros.h"
#include "common/recurrences.h"
#include "common/scalar_kind.h"

namespace ssm_kernels::linear_scan {

// A (batch, seqlen, channels) tensor, data null if absent. Strides are in elements.
struct SequenceView {
  void* data = nullptr;
  int64_t stride_batch = 0, stride_step = 0, stride_channel = 0;
  bool is_accumulate = false;  // whether the tensor has the accumulation type, whatever the others have
};

// A (sequences, channels) tensor of the accumulation type, data null if absent; absent states are zero.
struct StateView {
  void* data = nullptr;
  int64_t stride_sequence = 0, stride_channel = 0;

  template <typename Acc>
  SSM_HOST_DEVICE Acc& element(int64_t sequence, int64_t channel) const {
    return static_cast<Acc*>(data)[sequence * stride_sequence + channel * stride_channel];
  }
};

// A (batch, seqlen) mask, data null if absent.
struct ResetView {
  const bool* data = nullptr;
  int64_t stride_batch = 0, stride_step = 0;
};

struct LinearScanParams {
  int64_t batch = 0, seqlen = 0, channels = 0;
  Recurrence recurrence = Recurrence::kLinear;
  RecurrenceOptions options;
  SequenceView inputs[kMaxRecurrenceInputs];
  SequenceView h;
  // The packed sequence of each step, (seqlen). Null if sequences are not packed: sequence b is row b of the batch.
  const int32_t* sequence_of_step = nullptr;
  ResetView reset;  // absent if sequences are packed
  StateView initial_state;

  SSM_HOST_DEVICE int64_t sequence(int64_t b, int64_t t) const { return sequence_of_step == nullptr ? b : sequence_of_step[t]; }
  SSM_HOST_DEVICE bool is_reset(int64_t b, int64_t t) const {
    return reset.data != nullptr && reset.data[b * reset.stride_batch + t * reset.stride_step];
  }
  // Whether batch row b takes step t from an initial state.
  SSM_HOST_DEVICE bool begins(int64_t b, int64_t t) const {
    return t == 0 || (sequence_of_step != nullptr && sequence_of_step[t - 1] != sequence_of_step[t]) || is_reset(b, t);
  }
  // Whether a sequence ends with step t.
  SSM_HOST_DEVICE bool ends(int64_t t) const {
    return t == seqlen - 1 || (sequence_of_step != nullptr && sequence_of_step[t + 1] != sequence_of_step[t]);
  }
  // Whether no later step reads the state after step t: a sequence ends, or the next step is a reset.
  SSM_HOST_DEVICE bool is_cut(int64_t b, int64_t t) const { return ends(t) || is_reset(b, t + 1); }
};

struct LinearScanFwdParams : LinearScanParams {
  StateView last_state;  // written for sequences that have steps
};

// The map from the state before all steps to the state after them: last_state + decay h. A reset makes the decay zero.
struct LinearScanSummaryParams : LinearScanParams {
  StateView last_state, decay;  // written for sequences that have steps, and for every row of a batch
};

struct LinearScanBwdParams : LinearScanParams {
  SequenceView grad_h;                             // absent: zero
  StateView grad_last_state;                       // absent: zero
  SequenceView grad_inputs[kMaxRecurrenceInputs];  // absent: not wanted
  // Absent: not wanted; written for sequences that have steps. The CPU's kernel adds up resets. CUDA's kernel writes e of each
  // beginning to row b * seqlen + t instead if there is a reset mask.
  StateView grad_initial_state;
};

SSM_KERNEL_STRUCT(LinearScanFwdParams, 320);
SSM_KERNEL_STRUCT(LinearScanBwdParams, 544);
SSM_KERNEL_STRUCT(LinearScanSummaryParams, 344);

}  // namespace ssm_kernels::linear_scan
