// A group of lanes and its channel: what the general kernels of two_sample.cuh and separate.cuh share.
//
// A group of 1 to 32 lanes takes a channel of a row of the batch through all tokens of the row, with kVectors vectors of states
// and of A in registers or local memory. The state is rounded to its type after each token, as calls of one token leave it. A
// lane moves a vector of the state at once where rows start at multiples of one, and else single elements.
#pragma once

#include <algorithm>
#include <limits>

#include "common/activations.h"
#include "cuda/launch.cuh"
#include "cuda/vector_io.cuh"
#include "selective_state_update/cuda/launch.h"

namespace ssm_kernels::selective_state_update::two_sample {

using cuda::from_accumulate, cuda::to_accumulate, cuda::Vector;

constexpr int kThreads = 128;
constexpr int kVector = 4;  // states of a lane that are neighbors
constexpr int kVectors = static_cast<int>(kMaxDstate) / (kWarpSize * kVector);
static_assert(kVectors * kWarpSize * kVector == kMaxDstate, "32 lanes hold all states of a channel");

// A call's properties besides its parameters. Without tokens, `tokens` has no meaning.
struct Call {
  bool has_tokens = false;
  bool has_vectors = false;         // of states
  bool has_buffer_vectors = false;  // of intermediate states
  bool has_written_x = false;
  int log2_lanes = 0;
  int64_t first = 0, count = 0;  // of the launch's first group of lanes, and all groups
};

// The tokens of a row, and its slots.
struct Row {
  const TokenParams* tokens;
  int64_t b, slot;
  TokenRange range;
  bool is_in_state;

  __device__ __forceinline__ Row(const StateUpdateParams& p, const Call& call, const TokenParams& tokens_, int64_t b_)
      : tokens(call.has_tokens ? &tokens_ : nullptr), b(b_) {
    slot = tokens != nullptr ? tokens->rows.read_slot(b) : p.indices.at(b);
    if (tokens != nullptr) range = tokens->rows.tokens_of(b);
    is_in_state = slot >= 0 && slot < p.slots;
  }
  // The slot for the state after token t of the row, or -1.
  __device__ __forceinline__ int64_t write_slot(const StateUpdateParams& p, int64_t t) const {
    const int64_t write = tokens != nullptr ? tokens->rows.write_slot(b, t, range.count) : slot;
    return write < p.slots ? write : -1;
  }
  // The entry of the buffer for the state after token t, or -1.
  __device__ __forceinline__ int64_t entry(int64_t t) const {
    if (tokens == nullptr || t >= tokens->rows.intermediate_tokens) return -1;
    const int64_t found = tokens->rows.intermediate_entry(b);
    return found < tokens->rows.intermediate_count ? found : -1;
  }
};

template <typename View>
__device__ __forceinline__ int64_t offset_in(const View& view, int64_t b, int64_t head, int64_t dim) {
  return b * view.stride_batch + head * view.stride_head + dim * view.stride_dim;
}

// A parameter of the type of the inputs or of the accumulation type.
template <typename Input>
__device__ __forceinline__ cuda::AccumulateType<Input> load_parameter(const void* data, int64_t offset, bool is_input_kind) {
  using Acc = cuda::AccumulateType<Input>;
  return is_input_kind ? to_accumulate(static_cast<const Input*>(data)[offset]) : static_cast<const Acc*>(data)[offset];
}

template <typename Input, typename State>
struct Channel {
  using Acc = cuda::AccumulateType<Input>;
  using States = Vector<State, kVector>;

  const StateUpdateParams& p;
  const Call& call;
  const TokenParams& tokens;
  int lanes, lane, dstate;
  int64_t place;
  bool exists;  // lanes of no channel take part in the exchanges of their warp
  int64_t head, dim, group;
  unsigned int group_mask;  // of the warp's lanes: groups of other rows may have other numbers of tokens
  Row row;
  Acc bias = 0, skip = 0;

  __device__ __forceinline__ Channel(const StateUpdateParams& p_, const Call& call_, const TokenParams& tokens_)
      : p(p_),
        call(call_),
        tokens(tokens_),
        lanes(1 << call.log2_lanes),
        lane(static_cast<int>(threadIdx.x) & (lanes - 1)),
        dstate(static_cast<int>(p.dstate)),
        place(call.first + ((int64_t(blockIdx.x) * kThreads + threadIdx.x) >> call.log2_lanes)),
        exists(place < call.count),
        group_mask((kAllLanes >> (kWarpSize - lanes)) << (threadIdx.x % kWarpSize - lane)),
        row(p, call, tokens, (exists ? place : call.count - 1) / p.channels()) {
    const int64_t channels = p.channels(), channel = (exists ? place : call.count - 1) - row.b * channels;
    head = channel / p.headdim;
    dim = channel - head * p.headdim;
    group = channel / (channels / p.groups);
  }

  // The parameters of the channel, of a row with a slot.
  __device__ __forceinline__ void load_parameters() {
    if (p.dt_bias.data != nullptr) {
      bias = load_parameter<Input>(p.dt_bias.data, offset_in(p.dt_bias, 0, head, dim), p.dt_bias_is_input_kind);
    }
    if (p.D.data != nullptr) skip = load_parameter<Input>(p.D.data, offset_in(p.D, 0, head, dim), p.D_is_input_kind);
  }

  __device__ __forceinline__ int64_t token_stride(int64_t stride) const { return call.has_tokens ? stride : 0; }
  __device__ __forceinline__ Input& out(int64_t t) const {
    const int64_t token = (row.range.first + t) * token_stride(tokens.out);
    return static_cast<Input*>(p.out.data)[offset_in(p.out, row.b, head, dim) + token];
  }
  // The outputs of a row without a slot: zero for padding, NaN past the last slot.
  __device__ __forceinline__ void write_without_slot() const {
    if (!exists || lane != 0) return;
    const Input value = from_accumulate<Input>(row.slot < 0 ? Acc(0) : static_cast<Acc>(nan("")));
    for (int64_t t = 0; t < row.range.count; ++t) out(t) = value;
  }

  // Calls visit(v, n) for each vector of the lane with states, where n is its first state.
  template <bool unrolls, typename Visitor>
  __device__ __forceinline__ void for_each(const Visitor& visit) const {
#pragma unroll(unrolls ? kVectors : 1)
    for (int v = 0; v < kVectors; ++v) {
      if (const int first = (v * lanes + lane) * kVector; first < dstate) visit(v, first);
    }
  }
  __device__ __forceinline__ State* row_of(const StateView& view, int64_t entry) const {
    return static_cast<State*>(view.data) + entry * view.stride_batch + head * view.stride_head + dim * view.stride_dim;
  }
  // Vector v of the state before the row's first token, whose first state is n.
  __device__ __forceinline__ void load_state(States& h, int n) const {
    const State* const state = row_of(p.state, row.slot);
    if (call.has_vectors) {
      h = States::load_once(state + n);
      return;
    }
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      if (n + i < dstate) h.set(i, state[(n + i) * p.state.stride_state]);
    }
  }
  __device__ __forceinline__ Acc load_A(int n) const {
    const int64_t offset = offset_in(p.A, 0, head, dim) + n * p.A.stride_state;
    const Acc A = load_parameter<Input>(p.A.data, offset, p.A_is_input_kind);
    return p.A_is_log ? -Math<Acc>::exp(A) : A;
  }

  // Elements of token t.
  __device__ __forceinline__ Acc of_channel(const ChannelView& view, int64_t stride, int64_t t) const {
    const int64_t token = (row.range.first + t) * token_stride(stride);
    return to_accumulate(static_cast<const Input*>(view.data)[offset_in(view, row.b, head, dim) + token]);
  }
  __device__ __forceinline__ Acc of_group(const GroupView& view, int64_t stride, int64_t t, int n) const {
    const int64_t token = (row.range.first + t) * token_stride(stride);
    return to_accumulate(static_cast<const Input*>(
        view.data)[row.b * view.stride_batch + group * view.stride_group + token + n * view.stride_state]);
  }
  __device__ __forceinline__ Acc step_size(int64_t t) const {
    Acc delta = of_channel(p.dt, tokens.dt, t);
    if (p.dt_bias.data != nullptr) delta += bias;
    if (p.dt_softplus) delta = softplus(delta);
    return clamp(delta, static_cast<Acc>(p.dt_min), static_cast<Acc>(p.dt_max));
  }
  // Writes the output of token t. `sum`: the lane's part of <C, h>.
  __device__ __forceinline__ void write_out(int64_t t, Acc x, Acc sum) const {
    for (int distance = 1; distance < lanes; distance *= 2) sum += __shfl_xor_sync(group_mask, sum, distance);
    if (!exists || lane != 0) return;
    if (p.D.data != nullptr) sum = Math<Acc>::fma(skip, x, sum);
    if (p.z.data != nullptr) sum *= silu(of_channel(p.z, tokens.z, t));
    out(t) = from_accumulate<Input>(sum);
  }
  // Writes the states after token t to its slot and to its entry of the buffer.
  template <bool unrolls>
  __device__ __forceinline__ void write_states(int64_t t, const States (&h)[kVectors]) const {
    if (!exists) return;
    const auto write = [&](const StateView& view, State* target, bool has_vectors) {
      for_each<unrolls>([&](int v, int n) {
        if (has_vectors) {
          h[v].store_once(target + n);
          return;
        }
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
          if (n + i < dstate) target[(n + i) * view.stride_state] = h[v][i];
        }
      });
    };
    if (const int64_t slot = row.write_slot(p, t); slot >= 0) write(p.state, row_of(p.state, slot), call.has_vectors);
    if (const int64_t entry = row.entry(t); entry >= 0) {
      const StateView& buffer = tokens.intermediate;
      write(buffer, row_of(buffer, entry) + t * tokens.intermediate_token, call.has_buffer_vectors);
    }
  }
};

// Whether rows of states are vectors of kVector elements of `bytes` bytes, which start at multiples of their size or of 16
// bytes.
inline bool has_vectors(const StateUpdateParams& p, const StateView& view, int64_t bytes, int64_t stride_token = 0) {
  const int64_t alignment = std::min<int64_t>(kVector * bytes, 16);
  bool result = (view.stride_state == 1 || p.dstate == 1) && p.dstate % kVector == 0 &&
                reinterpret_cast<int64_t>(view.data) % alignment == 0;
  for (const int64_t stride : {view.stride_batch, view.stride_head, view.stride_dim, stride_token}) {
    result = result && stride * bytes % alignment == 0;
  }
  return result;
}

template <typename State>
Call make_call(const StateUpdateParams& p, const TokenParams* tokens) {
  Call call;
  call.has_tokens = tokens != nullptr;
  while ((kVector << call.log2_lanes) < p.dstate && (1 << call.log2_lanes) < kWarpSize) ++call.log2_lanes;
  call.has_vectors = has_vectors(p, p.state, sizeof(State));
  call.has_buffer_vectors =
      tokens != nullptr && has_vectors(p, tokens->intermediate, sizeof(State), tokens->intermediate_token);
  return call;
}

// Launches the kernel for `count` groups of lanes or elements, `per_block` a block: a grid has a limited size. With
// `is_dependent` it may start while the previous kernel runs.
template <typename Kernel>
cudaError_t launch_all(Kernel kernel, bool is_dependent, const StateUpdateParams& p, const TwoSampleParams& two, Call call,
                       const TokenParams& tokens, int64_t count, int64_t per_block, cudaStream_t stream) {
  constexpr int64_t kMaxBlocks = std::numeric_limits<int32_t>::max();
  call.count = count;
  for (call.first = 0; call.first < count; call.first += kMaxBlocks * per_block) {
    const int64_t blocks = std::min((count - call.first + per_block - 1) / per_block, kMaxBlocks);
    const cudaError_t error = cuda::launch(kernel, blocks, kThreads, 0, stream, is_dependent, p, two, call, tokens);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace ssm_kernels::selective_state_update::two_sample
