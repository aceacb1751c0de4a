// Parameters of the causal convolution's kernels: plain data without torch types, shared by CPU and CUDA.
//
//   pre_t = bias + sum_l w_l x_{t-l},  l = 0 .. width - 1,  w_l = weight[:, width - 1 - l]        out_t = act(pre_t)
//
// for each channel separately; l is the lag of a tap. A tap before a sequence's first step reads the sequence's initial state,
// whose last element is one step before the sequence, or zero. A sequence's final state is the last width - 1 elements of its
// initial state followed by its steps.
//
// A batch row is one sequence, unless `ids` divides it: a new sequence begins wherever the id of a step differs from that of
// the previous step. With seq_idx the ids are arbitrary, and each batch row has one initial state, of its first sequence, and
// one final state, of its last. With cu_seqlens the ids count its sequences, each of which has its own states. Where seq_idx
// divides these further into parts, the first part has the initial state and the last the final state; the flags below, added
// to the ids, say which parts those are not.
//
// Steps with a negative id are padding: their outputs, the gradients of their inputs, and the final state of a sequence that
// ends with padding are zero. No result depends on x or on gradients there, so both may hold anything.
#pragma once

#include <cstdint>
#include <limits>

#include "common/decoding_rows.h"
#include "common/kernel_abi.h"
#include "common/macros.h"
#include "common/scalar_kind.h"

namespace ssm_kernels::causal_conv1d {

// A (batch, seqlen, channels) tensor, data null if absent. Strides are in elements.
struct SequenceView {
  void* data = nullptr;
  int64_t stride_batch = 0, stride_step = 0, stride_channel = 0;

  SSM_HOST_DEVICE int64_t offset(int64_t b, int64_t t, int64_t c) const {
    return b * stride_batch + t * stride_step + c * stride_channel;
  }
};

// A (sequences, channels, width - 1) tensor, data null if absent.
struct StateView {
  void* data = nullptr;
  int64_t stride_sequence = 0, stride_channel = 0, stride_step = 0;

  SSM_HOST_DEVICE int64_t offset(int64_t sequence, int64_t c, int64_t i) const {
    return sequence * stride_sequence + c * stride_channel + i * stride_step;
  }
};

// A (channels, width) or (channels,) tensor of the inputs' kind or the accumulation type, data null if absent.
struct ParameterView {
  const void* data = nullptr;
  int64_t stride_channel = 0, stride_tap = 0;
  bool is_input_kind = false;
};

// With has_state_of_each_sequence an id holds these flags above the bits of the sequence's number. kOddPart differs between
// adjacent parts of a sequence. kPadding is the sign.
constexpr int64_t kOddPart = int64_t(1) << 32, kNoInitialState = kOddPart << 1, kNoFinalState = kOddPart << 2;
constexpr int64_t kPadding = std::numeric_limits<int64_t>::min();

// The id of each step's sequence, (batch, seqlen), data null if each batch row is one sequence.
struct IdView {
  const void* data = nullptr;
  bool is_int64 = false;
  int64_t stride_batch = 0, stride_step = 0;

  SSM_HOST_DEVICE int64_t at(int64_t b, int64_t t) const {
    const int64_t offset = b * stride_batch + t * stride_step;
    return is_int64 ? static_cast<const int64_t*>(data)[offset] : static_cast<const int32_t*>(data)[offset];
  }
};

struct ConvParams {
  int64_t batch = 0, seqlen = 0, channels = 0;
  int64_t width = 0;
  bool has_silu = false;
  bool has_state_of_each_sequence = false;
  ScalarKind kind = ScalarKind::kFloat;  // of x, out, states and their gradients
  SequenceView x;
  ParameterView weight, bias;
  StateView initial_state;
  IdView ids;

  SSM_HOST_DEVICE bool is_first_step(int64_t b, int64_t t) const {
    return t == 0 || (ids.data != nullptr && ids.at(b, t) != ids.at(b, t - 1));
  }
  SSM_HOST_DEVICE bool is_last_step(int64_t b, int64_t t) const {
    return t == seqlen - 1 || (ids.data != nullptr && ids.at(b, t) != ids.at(b, t + 1));
  }
  SSM_HOST_DEVICE bool is_padding(int64_t b, int64_t t) const { return ids.data != nullptr && ids.at(b, t) < 0; }
  // The index among the states of the sequence that begins or ends at step t; negative if it has no state.
  SSM_HOST_DEVICE int64_t state_of_first_step(int64_t b, int64_t t) const {
    return has_state_of_each_sequence ? state_of(ids.at(b, t), kNoInitialState) : t == 0 ? b : -1;
  }
  SSM_HOST_DEVICE int64_t state_of_last_step(int64_t b, int64_t t) const {
    return has_state_of_each_sequence ? state_of(ids.at(b, t), kNoFinalState) : t == seqlen - 1 ? b : -1;
  }

 private:
  static SSM_HOST_DEVICE int64_t state_of(int64_t id, int64_t flag) { return (id & flag) != 0 ? -1 : id & (kOddPart - 1); }
};

struct ConvFwdParams : ConvParams {
  SequenceView out;
  StateView final_state;
};

// An absent grad_out or grad_final_state is a zero gradient; grad_out_2, if present, is added to grad_out. Backward does not
// compute a result whose view is absent.
struct ConvBwdParams : ConvParams {
  SequenceView grad_out, grad_out_2, grad_x;
  StateView grad_final_state, grad_initial_state;
  // Contiguous, (channels, width) and (channels,), in the dtypes of the parameters.
  void *grad_weight = nullptr, *grad_bias = nullptr;
};

// A decoding step, or a few. The state, (slots, channels, length) with length >= width - 1, is rolled in place; its last
// width - 1 elements are the inputs before the step.
struct ConvUpdateParams {
  int64_t batch = 0, seqlen = 0, channels = 0, slots = 0;
  int64_t width = 0, state_length = 0;
  bool has_silu = false;
  bool state_is_input_kind = true;  // else the accumulation type
  // Whether the state and the weights of each channel are a contiguous, aligned vector of four. Set by CUDA's entry point.
  bool has_state_vectors = false, has_weight_vectors = false;
  ScalarKind kind = ScalarKind::kFloat;
  SequenceView x, out;
  ParameterView weight, bias;
  StateView state;
  IdView slots_of_batch;  // (batch,), one index per entry; data null if entry b uses slot b
};

// The additional parameters of a call with rows of different lengths or chosen slots: the rows, and a (entries, tokens,
// channels, width - 1) buffer that receives the last width - 1 inputs up to and including each token. Packed tokens are steps
// of x and out without a batch stride.
//
// With num_accepted_tokens the state is as speculative decoding leaves it: the last width - 2 inputs before the tokens of the
// previous call, then these tokens. `accepted` of them stay; the window of a row, the width - 1 inputs before its first token,
// ends with the last of these.
struct ConvTokenParams {
  DecodingRows rows;
  StateView windows;  // stride_sequence between entries
  int64_t windows_token = 0;
};

// How a row rolls its state: element i, for i < count, becomes element i + shift of the first `end` elements of the state
// followed by the row's tokens.
struct Roll {
  int64_t end, shift, count;
};
SSM_HOST_DEVICE Roll roll_of(const ConvUpdateParams& p) { return {p.state_length, p.seqlen, p.state_length}; }
SSM_HOST_DEVICE Roll roll_of(const ConvUpdateParams& p, const DecodingRows& rows, int64_t b, int64_t tokens) {
  if (rows.num_accepted_tokens.data == nullptr) return {p.state_length, tokens, p.state_length};
  const int64_t accepted = rows.accepted(b, p.state_length - p.width + 2), count = p.width - 2 + tokens;
  return {accepted + p.width - 2, accepted, count < p.state_length ? count : p.state_length};
}

SSM_KERNEL_STRUCT(ConvFwdParams, 264);
SSM_KERNEL_STRUCT(ConvBwdParams, 376);
SSM_KERNEL_STRUCT(ConvUpdateParams, 248);
SSM_KERNEL_STRUCT(ConvTokenParams, 296);

}  // namespace ssm_kernels::causal_conv1d
