// Parameters of the selective state update's kernels, on CPU and CUDA: plain data, no torch type.
//
//   delta = clamp(softplus?(dt + dt_bias))                (batch, heads, headdim)
//   h     = Abar(delta A) h + delta k(delta A) B x        (slots, heads, headdim, dstate), in place
//   out   = (<C, h> + D x) silu(z)                        (batch, heads, headdim)
//
// With A_is_log, -e^A takes the place of A.
//
// The form without heads, a state of shape (slots, dim, dstate), is one head of headdim = dim. A channel is one (head, headdim)
// pair, counted head * headdim + p; channel c reads group c / (channels / groups) of B and C.
#pragma once

#include <cstdint>

#include "common/decoding_rows.h"
#include "common/discretization.h"
#include "common/kernel_abi.h"
#include "common/limits.h"
#include "common/scalar_kind.h"

namespace ssm_kernels::selective_state_update {

// A (batch, heads, headdim) or, with no batch stride, (heads, headdim) tensor, data null if absent. Strides are in elements.
struct ChannelView {
  void* data = nullptr;
  int64_t stride_batch = 0, stride_head = 0, stride_dim = 0;
};

// A (slots, heads, headdim, dstate) or, with no batch stride, (heads, headdim, dstate) tensor.
struct StateView {
  void* data = nullptr;
  int64_t stride_batch = 0, stride_head = 0, stride_dim = 0, stride_state = 0;
};

// A (batch, groups, dstate) tensor.
struct GroupView {
  void* data = nullptr;
  int64_t stride_batch = 0, stride_group = 0, stride_state = 0;
};

// The slot of each batch row, data null if entry b uses slot b.
struct IndexView {
  const void* data = nullptr;
  bool is_int64 = false;
  int64_t stride = 0;

  SSM_HOST_DEVICE int64_t at(int64_t b) const {
    if (data == nullptr) return b;
    return is_int64 ? static_cast<const int64_t*>(data)[b * stride] : static_cast<const int32_t*>(data)[b * stride];
  }
};

struct StateUpdateParams {
  int64_t batch = 0, slots = 0, heads = 0, headdim = 0, groups = 0, dstate = 0;
  Discretization discretization = Discretization::kZoh;
  bool dt_softplus = false, A_is_log = false;
  double dt_min = 0, dt_max = 0;
  ScalarKind input_kind = ScalarKind::kFloat;  // of x, dt, B, C, z and out
  ScalarKind state_kind = ScalarKind::kFloat;
  // Else the accumulation type.
  bool A_is_input_kind = false, D_is_input_kind = false, dt_bias_is_input_kind = false;

  StateView state, A;
  ChannelView x, dt, z, out, D, dt_bias;
  GroupView B, C;
  IndexView indices;

  SSM_HOST_DEVICE int64_t channels() const { return heads * headdim; }
  // Whether a row of A is one number, as in Mamba-2: Abar and the gain are then the row's as well.
  SSM_HOST_DEVICE bool tied_A() const { return A.stride_state == 0; }
};

// The additional parameters of a call with several tokens a row or chosen slots: the rows, the strides between tokens, and a
// (entries, tokens, heads, headdim, dstate) buffer that receives the state after each token. The views of x, dt, z, out, B and
// C then start at the first token of each row; with packed tokens they have no batch stride.
struct TokenParams {
  DecodingRows rows;
  int64_t x = 0, dt = 0, z = 0, out = 0, B = 0, C = 0;
  StateView intermediate;
  int64_t intermediate_token = 0;
  int64_t intermediate_row = 0;  // elements between the rows of neighboring channels. Set by CUDA's entry point
};

// The additional parameters of methods that read two input samples (common/two_sample_discretization.h), of a step of its own
// for A (common/separate_step.h) or of complex states (common/complex.h):
//
//   h = Abar(delta A) h + delta (k(delta A) B x + m(delta A) previous_B previous_x)
//
// Methods that read one sample have no previous_x and no previous_B: their data is null.
//
// A row reads the previous sample from the slot that it reads the state from, and its later tokens the token before. Slots that
// receive the state after a token then receive its x and B. Blocks of one row share previous_B, so that no block writes it: it
// is written after all of them have read it.
struct TwoSampleParams {
  MethodParameters method;
  ChannelView lam;        // as x; of exp_trapezoidal. Data null for other methods
  int64_t lam_token = 0;  // its stride between tokens
  bool lam_sigmoid = false;
  // Complex states, as in selective_scan.h: dstate counts real numbers, and B, C and previous_B are of the accumulation type.
  bool is_complex = false, conjugate_pairs = true;
  ChannelView previous_x;  // (slots, heads, headdim), in the type of x
  GroupView previous_B;    // (slots, groups, dstate), in the type of B
  ChannelView dt_A;        // as x: the step of A in place of delta, without bias, softplus and limits. Data null: delta
  int64_t dt_A_token = 0;  // its stride between tokens
};

SSM_KERNEL_STRUCT(StateUpdateParams, 448);
SSM_KERNEL_STRUCT(TokenParams, 360);
SSM_KERNEL_STRUCT(TwoSampleParams, 160);

}  // namespace ssm_kernels::selective_state_update
