// Selective state update on CUDA for the methods of common/two_sample_discretization.h, which read the sample before, too:
//
//   h = Abar(z) h + delta (k(z) B x + m(z) previous_B previous_x), z = delta A        out = (<C, h> + D x) silu(gate)
//
// The kernel of rows takes one token where all that it loads of a channel are vectors of kVector neighboring states and offsets
// fit 32 bits. A group of lanes takes kRowsInFlight neighboring channels of a row of the batch and loads all of them before it
// uses the first; each of its first lanes owns a channel, as in update.cuh.
//
// The general kernel takes the others: a group of 1 to 32 lanes takes a channel through all tokens of the row, with kVectors
// vectors of states, of A and of B of the token before in local memory. The state is rounded to its type after each token, as
// calls of one token leave it. A lane moves a vector of the state at once where rows start at multiples of one, and else single
// elements.
//
// A last kernel writes x and B of each token whose state was written to the same slot: the channels of a group share
// previous_B, and all of them have read it by then. The kernel of rows has written x, which no other channel reads.
#pragma once

#include <algorithm>
#include <limits>

#include "common/activations.h"
#include "common/two_sample_discretization.h"
#include "cuda/launch.cuh"
#include "cuda/ptx/pdl.cuh"
#include "cuda/vector_io.cuh"
#include "selective_state_update/cuda/launch.h"
#include "selective_state_update/cuda/rows.cuh"

namespace ssm_kernels::selective_state_update::two_sample {

using cuda::from_accumulate, cuda::to_accumulate, cuda::Vector;

constexpr int kThreads = 128;
constexpr int kVector = 4;  // states of a lane that are neighbors
constexpr int kVectors = static_cast<int>(kMaxDstate) / (kWarpSize * kVector);
static_assert(kVectors * kWarpSize * kVector == kMaxDstate, "32 lanes hold all states of a channel");

// A call's properties besides its parameters. Without tokens, `tokens` has no meaning.
struct Call {
  bool has_tokens = false;
  bool has_vectors = false;  // of states
  bool has_written_x = false;
  int log2_lanes = 0;
  int64_t first = 0, count = 0;  // of the launch's first group of lanes, and all groups
};

// The tokens of a row, and its slots.
struct Row {
  const TokenParams* tokens;
  const IndexView& indices;
  int64_t b, slot;
  TokenRange range;

  __device__ __forceinline__ Row(const StateUpdateParams& p, const Call& call, const TokenParams& tokens_, int64_t b_)
      : tokens(call.has_tokens ? &tokens_ : nullptr), indices(p.indices), b(b_) {
    slot = tokens != nullptr ? tokens->rows.read_slot(b) : indices.at(b);
    if (tokens != nullptr) range = tokens->rows.tokens_of(b);
    is_in_state = slot >= 0 && slot < p.slots;
  }
  bool is_in_state;
  // The slot for the state after token t of the row, or -1.
  __device__ __forceinline__ int64_t write_slot(const StateUpdateParams& p, int64_t t) const {
    const int64_t write = tokens != nullptr ? tokens->rows.write_slot(b, t, range.count) : slot;
    return write < p.slots ? write : -1;
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

// How the kernel of rows divides a call: groups of lanes, of kRowsInFlight channels each.
struct RowsCall {
  int log2_lanes = 0;
  uint32_t count = 0;  // groups of lanes
  cuda::Divisor per_batch, headdim, channels_per_group;
};

template <typename Input, typename State>
__global__ void __launch_bounds__(kThreads, 7)
    selective_state_update_two_sample_rows_kernel(const __grid_constant__ StateUpdateParams p,
                                                  const __grid_constant__ TwoSampleParams two,
                                                  const __grid_constant__ RowsCall call) {
  using Acc = cuda::AccumulateType<Input>;
  using Inputs = Vector<Input, kVector>;
  using States = Vector<State, kVector>;
  constexpr int kRows = kRowsInFlight;
  cuda::launch_dependents();
  const int lanes = 1 << call.log2_lanes, lane = static_cast<int>(threadIdx.x) & (lanes - 1);
  // Blocks and threads shifted apart: the number of a thread may need more than 32 bits.
  const uint32_t group_of_lanes = blockIdx.x * (kThreads >> call.log2_lanes) + (threadIdx.x >> call.log2_lanes);
  const uint32_t place = min(group_of_lanes, call.count - 1), b = call.per_batch.divide(place);
  const uint32_t channel = (place - b * call.per_batch.template value<uint32_t>()) * kRows;
  const uint32_t head = call.headdim.divide(channel), dim = channel - head * call.headdim.template value<uint32_t>();
  const uint32_t group = call.channels_per_group.divide(channel);
  const int64_t slot = p.indices.at(b);
  const bool exists = group_of_lanes < call.count, is_slot = slot >= 0 && slot < p.slots;
  const bool is_owner = exists && lane < kRows;
  const int n = lane * kVector;
  const bool loads = is_slot && n < static_cast<int>(p.dstate);
  const int64_t row = is_slot ? slot : 0;

  const auto own = [&](const ChannelView& view, int64_t of_row) {
    return of_row * view.stride_batch + head * view.stride_head + (dim + lane) * view.stride_dim;
  };
  const auto load_own = [&](const ChannelView& view, int64_t of_row) {
    return static_cast<const Input*>(view.data)[own(view, of_row)];
  };
  const auto in_group = [&](const GroupView& view, int64_t of_row) {
    const Input* const source =
        static_cast<const Input*>(view.data) + of_row * view.stride_batch + group * view.stride_group + n;
    return loads ? Inputs::load(source) : Inputs::zero();
  };
  State* const state = static_cast<State*>(p.state.data) + row * p.state.stride_batch + head * p.state.stride_head + n;
  States h[kRows];
  Vector<Acc, kVector> A[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) h[r] = loads ? States::load_once(state + (dim + r) * p.state.stride_dim) : States::zero();
  Input x_in, dt_in, z_in, lam_in, before_in{};
  Acc bias = 0, skip = 0;
  if (is_owner) {
    x_in = load_own(p.x, b);
    dt_in = load_own(p.dt, b);
    if (is_slot) before_in = load_own(two.previous_x, row);
    if (p.z.data != nullptr) z_in = load_own(p.z, b);
    if (two.lam.data != nullptr) lam_in = load_own(two.lam, b);
    if (p.dt_bias.data != nullptr) bias = load_parameter<Input>(p.dt_bias.data, own(p.dt_bias, 0), p.dt_bias_is_input_kind);
    if (p.D.data != nullptr) skip = load_parameter<Input>(p.D.data, own(p.D, 0), p.D_is_input_kind);
  }
  const Inputs B = in_group(p.B, b), C = in_group(p.C, b), B_before = in_group(two.previous_B, row);
  const int64_t A_row = head * p.A.stride_head + dim * p.A.stride_dim + n;
  const auto load_A = [&](const auto* data) {
    using Loaded = Vector<std::remove_cv_t<std::remove_pointer_t<decltype(data)>>, kVector>;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const Loaded loaded = loads ? Loaded::load(data + A_row + r * p.A.stride_dim) : Loaded::zero();
#pragma unroll
      for (int i = 0; i < kVector; ++i) A[r].set(i, loaded.accumulate(i));
    }
  };
  if (!std::is_same_v<Input, Acc> && p.A_is_input_kind) {
    load_A(static_cast<const Input*>(p.A.data));
  } else {
    load_A(static_cast<const Acc*>(p.A.data));
  }
  if (p.A_is_log) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) A[r].set(i, -Math<Acc>::exp(A[r][i]));
    }
  }

  Acc delta = 0, lam = 0, current = 0, previous = 0;
  if (is_owner) {
    delta = to_accumulate(dt_in) + bias;
    if (p.dt_softplus) delta = softplus(delta);
    delta = clamp(delta, static_cast<Acc>(p.dt_min), static_cast<Acc>(p.dt_max));
    if (two.lam.data != nullptr) {
      lam = to_accumulate(lam_in);
      if (two.lam_sigmoid) lam = sigmoid(lam);
    }
    current = delta * to_accumulate(x_in);
    previous = delta * to_accumulate(before_in);
  }
  Acc partial[kRows];
  visit_two_sample_discretization(p.discretization, two.method, [&](auto rule) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const auto of_row = [&](Acc owned) { return shuffle(owned, r, lanes); };
      const Acc row_delta = of_row(delta), row_current = of_row(current), row_previous = of_row(previous);
      const auto method = rule.step(decltype(rule)::kHasLam ? of_row(lam) : Acc(0));
      Acc sum = 0;
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        const Acc z = row_delta * A[r][i], basis = method.basis(z);
        const Coefficients<Acc> gain = method.gain(z, basis);
        const Acc inputs =
            Math<Acc>::fma(row_previous * gain.previous, B_before.accumulate(i), row_current * gain.current * B.accumulate(i));
        const Acc value = Math<Acc>::fma(method.abar(z, basis), h[r].accumulate(i), inputs);
        sum = Math<Acc>::fma(value, C.accumulate(i), sum);
        h[r].set(i, from_accumulate<State>(value));
      }
      partial[r] = loads ? sum : Acc(0);  // a step size of inf makes even a zero state NaN
      if (exists && loads) h[r].store_once(state + (dim + r) * p.state.stride_dim);
    }
  });
  Acc sum = reduce_rows(partial, lane, lanes);
  if (!is_owner) return;
  if (p.D.data != nullptr) sum = Math<Acc>::fma(skip, to_accumulate(x_in), sum);
  if (p.z.data != nullptr) sum *= silu(to_accumulate(z_in));
  if (!is_slot) sum = slot < 0 ? Acc(0) : static_cast<Acc>(nan(""));
  static_cast<Input*>(p.out.data)[own(p.out, b)] = from_accumulate<Input>(sum);
  if (is_slot) static_cast<Input*>(two.previous_x.data)[own(two.previous_x, row)] = x_in;
}

template <typename Input, typename State>
__global__ void __launch_bounds__(kThreads)
    selective_state_update_two_sample_kernel(const __grid_constant__ StateUpdateParams p,
                                             const __grid_constant__ TwoSampleParams two, const __grid_constant__ Call call,
                                             const __grid_constant__ TokenParams tokens) {
  using Acc = cuda::AccumulateType<Input>;
  using States = Vector<State, kVector>;
  const int lanes = 1 << call.log2_lanes, lane = static_cast<int>(threadIdx.x) & (lanes - 1);
  const int64_t group_of_lanes = call.first + ((int64_t(blockIdx.x) * kThreads + threadIdx.x) >> call.log2_lanes);
  const bool exists = group_of_lanes < call.count;  // the others take part in the exchanges of their warp
  const int64_t place = exists ? group_of_lanes : call.count - 1, channels = p.channels();
  const int64_t b = place / channels, channel = place - b * channels;
  const int64_t head = channel / p.headdim, dim = channel - head * p.headdim, group = channel / (channels / p.groups);
  const int dstate = static_cast<int>(p.dstate);
  // Groups of other rows may have other numbers of tokens.
  const unsigned int group_mask = (kAllLanes >> (kWarpSize - lanes)) << (threadIdx.x % kWarpSize - lane);
  const Row row(p, call, tokens, b);
  const auto token_stride = [&](int64_t stride) { return call.has_tokens ? stride : int64_t(0); };
  Input* const out =
      static_cast<Input*>(p.out.data) + offset_in(p.out, b, head, dim) + row.range.first * token_stride(tokens.out);
  if (!row.is_in_state) {
    if (!exists || lane != 0) return;
    const Input value = from_accumulate<Input>(row.slot < 0 ? Acc(0) : static_cast<Acc>(nan("")));
    for (int64_t t = 0; t < row.range.count; ++t) out[t * token_stride(tokens.out)] = value;
    return;
  }

  // State i of a lane's vector v is (v * lanes + lane) * kVector + i.
  const auto first_state = [&](int v) { return (v * lanes + lane) * kVector; };
  const auto for_each = [&](const auto& visit) {
#pragma unroll 1
    for (int v = 0; v < kVectors; ++v) {
      if (first_state(v) < dstate) visit(v, first_state(v));
    }
  };
  const auto row_of_slot = [&](int64_t slot) {
    return static_cast<State*>(p.state.data) + slot * p.state.stride_batch + head * p.state.stride_head +
           dim * p.state.stride_dim;
  };
  States h[kVectors];
  Acc A[kVectors][kVector], b_before[kVectors][kVector];
  const State* const state = row_of_slot(row.slot);
  const Input* const B_before = static_cast<const Input*>(two.previous_B.data) + row.slot * two.previous_B.stride_batch +
                                group * two.previous_B.stride_group;
  const int64_t A_row = head * p.A.stride_head + dim * p.A.stride_dim;
  for_each([&](int v, int n) {
    if (call.has_vectors) {
      h[v] = States::load_once(state + n);
    } else {
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        if (n + i < dstate) h[v].set(i, state[(n + i) * p.state.stride_state]);
      }
    }
  });
  for_each([&](int v, int n) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      if (n + i >= dstate) continue;
      A[v][i] = load_parameter<Input>(p.A.data, A_row + (n + i) * p.A.stride_state, p.A_is_input_kind);
      if (p.A_is_log) A[v][i] = -Math<Acc>::exp(A[v][i]);
      b_before[v][i] = to_accumulate(B_before[(n + i) * two.previous_B.stride_state]);
    }
  });
  Acc x_before = to_accumulate(static_cast<const Input*>(two.previous_x.data)[offset_in(two.previous_x, row.slot, head, dim)]);

  const Acc bias = p.dt_bias.data == nullptr
                       ? Acc(0)
                       : load_parameter<Input>(p.dt_bias.data, offset_in(p.dt_bias, 0, head, dim), p.dt_bias_is_input_kind);
  const Acc skip =
      p.D.data == nullptr ? Acc(0) : load_parameter<Input>(p.D.data, offset_in(p.D, 0, head, dim), p.D_is_input_kind);
#pragma unroll 1
  for (int64_t t = 0; t < row.range.count; ++t) {
    const int64_t token = row.range.first + t;
    const auto of_channel = [&](const ChannelView& view, int64_t stride) {
      return to_accumulate(static_cast<const Input*>(view.data)[offset_in(view, b, head, dim) + token * token_stride(stride)]);
    };
    const auto of_group = [&](const GroupView& view, int64_t stride, int n) {
      return to_accumulate(static_cast<const Input*>(
          view.data)[b * view.stride_batch + group * view.stride_group + token * token_stride(stride) + n * view.stride_state]);
    };
    const Acc x = of_channel(p.x, tokens.x);
    Acc delta = of_channel(p.dt, tokens.dt), lam = 0, sum = 0;
    if (p.dt_bias.data != nullptr) delta += bias;
    if (p.dt_softplus) delta = softplus(delta);
    delta = clamp(delta, static_cast<Acc>(p.dt_min), static_cast<Acc>(p.dt_max));
    if (two.lam.data != nullptr) {
      lam = of_channel(two.lam, two.lam_token);
      if (two.lam_sigmoid) lam = sigmoid(lam);
    }
    const Acc current = delta * x, previous = delta * x_before;
    visit_two_sample_discretization(p.discretization, two.method, [&](auto rule) {
      const auto method = rule.step(lam);
      for_each([&](int v, int n) {
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
          // A step size of inf makes even a zero state NaN.
          if (n + i >= dstate) continue;
          const Acc own = of_group(p.B, tokens.B, n + i), z = delta * A[v][i], basis = method.basis(z);
          const Coefficients<Acc> gain = method.gain(z, basis);
          const Acc inputs = Math<Acc>::fma(previous * gain.previous, b_before[v][i], current * gain.current * own);
          const Acc value = Math<Acc>::fma(method.abar(z, basis), to_accumulate(h[v][i]), inputs);
          sum = Math<Acc>::fma(value, of_group(p.C, tokens.C, n + i), sum);
          h[v].set(i, from_accumulate<State>(value));
          b_before[v][i] = own;
        }
      });
    });
    x_before = x;
    for (int distance = 1; distance < lanes; distance *= 2) sum += __shfl_xor_sync(group_mask, sum, distance);
    if (exists && lane == 0) {
      if (p.D.data != nullptr) sum = Math<Acc>::fma(skip, x, sum);
      if (p.z.data != nullptr) sum *= silu(of_channel(p.z, tokens.z));
      out[t * token_stride(tokens.out)] = from_accumulate<Input>(sum);
    }
    const int64_t write = row.write_slot(p, t);
    if (!exists || write < 0) continue;
    State* const target = row_of_slot(write);
    for_each([&](int v, int n) {
      if (call.has_vectors) {
        h[v].store_once(target + n);
      } else {
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
          if (n + i < dstate) target[(n + i) * p.state.stride_state] = h[v][i];
        }
      }
    });
  }
}

// Copies x and B of tokens to the slots that received the states after them. A thread has one element of a row.
template <typename Input>
__global__ void __launch_bounds__(kThreads)
    selective_state_update_samples_kernel(const __grid_constant__ StateUpdateParams p,
                                          const __grid_constant__ TwoSampleParams two, const __grid_constant__ Call call,
                                          const __grid_constant__ TokenParams tokens) {
  cuda::grid_dependency_sync();
  const int64_t channels = call.has_written_x ? 0 : p.channels(), elements = channels + p.groups * p.dstate;
  const int64_t place = call.first + int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (place >= call.count) return;
  const int64_t b = place / elements, element = place - b * elements;
  const Row row(p, call, tokens, b);
  if (!row.is_in_state) return;
  const bool is_x = element < channels;
  const int64_t head = element / p.headdim, dim = element - head * p.headdim;
  const int64_t group = (element - channels) / p.dstate, n = element - channels - group * p.dstate;
  const auto in_group = [&](const GroupView& view, int64_t row_of) {
    return row_of * view.stride_batch + group * view.stride_group + n * view.stride_state;
  };
  const Input* const source = is_x ? static_cast<const Input*>(p.x.data) + offset_in(p.x, b, head, dim)
                                   : static_cast<const Input*>(p.B.data) + in_group(p.B, b);
  const int64_t stride = !call.has_tokens ? 0 : is_x ? tokens.x : tokens.B;
  for (int64_t t = 0; t < row.range.count; ++t) {
    const int64_t write = row.write_slot(p, t);
    if (write < 0) continue;
    Input* const target = is_x ? static_cast<Input*>(two.previous_x.data) + offset_in(two.previous_x, write, head, dim)
                               : static_cast<Input*>(two.previous_B.data) + in_group(two.previous_B, write);
    *target = source[(row.range.first + t) * stride];
  }
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

namespace ssm_kernels::selective_state_update {

template <typename Input, typename State>
cudaError_t launch_two_sample_update(const StateUpdateParams& params, const TwoSampleParams& two, const TokenParams* tokens,
                                     cudaStream_t stream) {
  namespace kernels = two_sample;
  constexpr int64_t kVector = kernels::kVector;
  const int64_t channels = params.channels(), groups = params.batch * channels;
  kernels::Call call;
  call.has_tokens = tokens != nullptr;
  while ((kVector << call.log2_lanes) < params.dstate && (1 << call.log2_lanes) < kWarpSize) ++call.log2_lanes;
  // Whether vectors of kVector elements of these sizes start at multiples of their size, or of 16 bytes.
  const auto are_aligned = [&](const void* data, int64_t bytes, std::initializer_list<int64_t> strides) {
    const int64_t alignment = std::min<int64_t>(kVector * bytes, 16);
    bool result = reinterpret_cast<int64_t>(data) % alignment == 0;
    for (const int64_t stride : strides) result &= stride * bytes % alignment == 0;
    return result;
  };
  const auto has_vectors = [&](const StateView& view, int64_t bytes) {
    return (view.stride_state == 1 || params.dstate == 1) && params.dstate % kVector == 0 &&
           are_aligned(view.data, bytes, {view.stride_batch, view.stride_head, view.stride_dim});
  };
  const auto has_group_vectors = [&](const GroupView& view) {
    return view.stride_state == 1 && are_aligned(view.data, sizeof(Input), {view.stride_batch, view.stride_group});
  };
  call.has_vectors = has_vectors(params.state, sizeof(State));
  const TokenParams all = tokens != nullptr ? *tokens : TokenParams();
  const auto launch_samples = [&] {
    const auto kernel = kernels::selective_state_update_samples_kernel<Input>;
    const int64_t of_row = (call.has_written_x ? 0 : channels) + params.groups * params.dstate;
    return kernels::launch_all(kernel, call.has_written_x && cuda::has_pdl(kernel), params, two, call, all,
                               params.batch * of_row, kernels::kThreads, stream);
  };
  if constexpr (!std::is_same_v<Input, double>) {
    constexpr int64_t kRows = kRowsInFlight, kLimit = int64_t(1) << 30;
    const int64_t bytes_of_A = params.A_is_input_kind ? sizeof(Input) : sizeof(cuda::AccumulateType<Input>);
    if (tokens == nullptr && call.has_vectors && has_vectors(params.A, bytes_of_A) && has_group_vectors(params.B) &&
        has_group_vectors(params.C) && has_group_vectors(two.previous_B) && params.dstate <= kWarpSize * kVector &&
        groups > 0 && params.headdim % kRows == 0 && channels / params.groups % kRows == 0 && groups < kLimit) {
      kernels::RowsCall rows;
      rows.log2_lanes = std::max(call.log2_lanes, 2);
      rows.count = static_cast<uint32_t>(groups / kRows);
      rows.per_batch = cuda::Divisor(channels / kRows);
      rows.headdim = cuda::Divisor(params.headdim);
      rows.channels_per_group = cuda::Divisor(channels / params.groups);
      const int64_t per_block = kernels::kThreads >> rows.log2_lanes;
      call.has_written_x = true;
      const cudaError_t error =
          cuda::launch(kernels::selective_state_update_two_sample_rows_kernel<Input, State>,
                       (rows.count + per_block - 1) / per_block, kernels::kThreads, 0, stream, false, params, two, rows);
      return error == cudaSuccess ? launch_samples() : error;
    }
  }
  const cudaError_t error = kernels::launch_all(kernels::selective_state_update_two_sample_kernel<Input, State>, false, params,
                                                two, call, all, groups, kernels::kThreads >> call.log2_lanes, stream);
  return error == cudaSuccess ? launch_samples() : error;
}

}  // namespace ssm_kernels::selective_state_update
