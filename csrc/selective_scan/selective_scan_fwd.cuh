// Selective scan, forward, on CUDA.
//
//   h_t = Abar(delta_t A) h_{t-1} + delta_t k(delta_t A) B_t u_t          out_t = (<C_t, h_t> + D u_t) silu(z_t)
//
// selective_scan_cuda.h says how the work is cut into blocks, warps and lanes. A block walks along time. Of each tile it stages
// u, delta, z in shared memory, and each lane takes the step sizes, delta u and the partial outputs of its kFwdSteps steps into
// registers. Then, state by state:
// * the lane computes Abar and its input for each of its steps, once, and composes them: the map from the state before its
// steps
//   to the state after them;
// * the lanes of a channel scan these maps (of exponential methods the product of Abar is the exponential of the sum of z);
// * the lane runs through its steps again from the state that it now knows, with one multiplication and one addition a step,
// and
//   adds C h to its outputs.
// The state passes from tile to tile through shared memory, where the states at the ends of chunks lie too until the block
// writes them out together.
//
// The bound is the special function unit: one exponential per state and step, 16 results a clock and multiprocessor.
#pragma once

#include "selective_scan/selective_scan_tile.cuh"

namespace ssm_kernels::selective_scan {

// The arrays in a block's shared memory.
template <typename Scalar>
struct FwdShared {
  using Acc = AccumulateType<Scalar>;
  static constexpr int kSteps = kFwdSteps<Acc>;
  static constexpr int kLanesPerChunk = static_cast<int>(kChunkLength) / kSteps;
  static_assert(kChunkLength % kSteps == 0, "a chunk ends where a lane's steps end");

  Scalar *u, *delta, *z;
  Acc *A, *ends, *decay, *B, *C;
  size_t bytes;

  SSM_HOST_DEVICE FwdShared(unsigned char* memory, const SelectiveScanParams& p, const ScanPlan& plan) {
    const TileShape<kSteps> shape(plan.log2_warps, plan.log2_time_lanes);
    const int states = shape.max_channels() * state_pitch(p);
    const int slice = MatrixSlice<Scalar, kSteps>::pitch_of(shape) << plan.log2_slice;
    Carver carver(memory);
    u = carver.take<Scalar>(Tile<Scalar, kSteps>::capacity(shape));
    delta = carver.take<Scalar>(Tile<Scalar, kSteps>::capacity(shape));
    z = carver.take<Scalar>(p.z.data != nullptr ? Tile<Scalar, kSteps>::capacity(shape) : 0);
    A = carver.take<Acc>(states);
    ends = carver.take<Acc>(states * chunks_per_tile(plan));
    decay = carver.take<Acc>(plan.carry_pass ? states : 0);
    B = carver.take<Acc>(p.B.per_step ? slice : 0);
    C = carver.take<Acc>(p.C.per_step ? slice : 0);
    bytes = carver.bytes();
  }

  static SSM_HOST_DEVICE int chunks_per_tile(const ScanPlan& plan) { return (1 << plan.log2_time_lanes) / kLanesPerChunk; }
};

template <typename Scalar, typename Method>
__device__ __forceinline__ void fwd_block(const SelectiveScanFwdParams& p, const ScanPlan& plan, unsigned char* memory) {
  using Acc = AccumulateType<Scalar>;
  using Shared = FwdShared<Scalar>;
  constexpr int K = Shared::kSteps;
  constexpr int kMaxLog2TimeLanes = 5;
  static_assert(1 << kMaxLog2TimeLanes == kWarpSize, "a channel has at most all lanes of a warp");
  const Shared shared(memory, p, plan);
  const Position at(p, plan, blockIdx.x);
  const Lane lane(plan.log2_time_lanes);
  TileShape<K> shape(plan.log2_warps, plan.log2_time_lanes);
  shape.channels = at.channels;
  const int dstate = static_cast<int>(p.dstate), pitch = state_pitch(p);
  const int states = shape.max_channels() * pitch;

  const int chunks_per_tile = Shared::chunks_per_tile(plan);
  Acc* const carried = shared.ends + (chunks_per_tile - 1) * states;
  // The chunk of the tile whose last state this lane holds.
  const bool ends_chunk = (lane.time + 1) % Shared::kLanesPerChunk == 0;
  Acc* const end = shared.ends + lane.time / Shared::kLanesPerChunk * states;

  clear(states, shared.A, carried);
  __syncthreads();
  for_each_state(p, at, [&](int offset, int64_t channel, int state) {
    shared.A[offset] = load_state<Acc>(p.A, 0, channel, state) * kScaleOfA<Method, Acc>;
    Acc h = 0;
    if (plan.carry_pass) {
      shared.decay[offset] = 1;
    } else {
      if (p.initial_state.data != nullptr) h = load_state<Acc>(p.initial_state, at.batch, channel, state);
      for (int64_t s = 0; s < at.segment; ++s) {
        const int64_t before = state_offset(p, at.batch * plan.segments + s, channel, state);
        h = Math<Acc>::fma(static_cast<const Acc*>(plan.decay)[before], h, static_cast<const Acc*>(plan.carry)[before]);
      }
      if (p.chunk_states != nullptr && at.segment == 0) {
        static_cast<Acc*>(p.chunk_states)[state_offset(p, at.batch * chunk_boundary_count(p.seqlen), channel, state)] = h;
      }
    }
    carried[offset] = h;
  });

  const bool is_channel = lane.channel < at.channels;
  const int64_t channel = at.first_channel + lane.channel;
  const auto of_channel = [&](const ChannelView& view) {
    return is_channel && view.data != nullptr ? static_cast<const Acc*>(view.data)[channel * view.stride] : Acc(0);
  };
  const Acc skip = of_channel(p.D), bias = of_channel(p.delta_bias);
  const MatrixSlice<Scalar, K> B{shared.B, MatrixSlice<Scalar, K>::pitch_of(shape)}, C{shared.C, B.pitch};

  for (int64_t t0 = at.begin; t0 < at.end; t0 += shape.max_steps()) {
    const int first_step = lane.time * K;
    shape.steps = static_cast<int>(min(at.end - t0, int64_t(shape.max_steps())));
    const Tile<Scalar, K> u_tile(shared.u, plan.u, shape), delta_tile(shared.delta, plan.delta, shape),
        z_tile(shared.z, plan.z, shape);
    u_tile.load(plan.u, p.u, first_element<Scalar>(p.u, at, t0), shape);
    delta_tile.load(plan.delta, p.delta, first_element<Scalar>(p.delta, at, t0), shape);
    if (p.z.data != nullptr && !plan.carry_pass) z_tile.load(plan.z, p.z, first_element<Scalar>(p.z, at, t0), shape);

    Acc delta[K], delta_u[K], out[K];
    Acc sum_of_delta = 0;
    for (int first_state = 0; first_state < dstate; first_state += 1 << plan.log2_slice) {
      const int slice_states = min(1 << plan.log2_slice, dstate - first_state);
      if (first_state > 0) __syncthreads();
      if (p.B.per_step) {
        B.stage(plan.B, p.B, matrix_row<Scalar>(p.B, p, at, first_state, t0), slice_states, plan.log2_slice, shape);
      }
      if (p.C.per_step && !plan.carry_pass) {
        C.stage(plan.C, p.C, matrix_row<Scalar>(p.C, p, at, first_state, t0), slice_states, plan.log2_slice, shape);
      }
      if (first_state == 0) cuda::wait_for_async_copies();
      __syncthreads();

      if (first_state == 0) {
        u_tile.read(lane.channel, first_step, out);
        delta_tile.read(lane.channel, first_step, delta);
#pragma unroll
        for (int j = 0; j < K; ++j) {
          Acc step = delta[j] + bias;
          if (p.delta_softplus) step = softplus(step);
          // A step of size zero leaves the state alone.
          delta[j] = is_channel && first_step + j < shape.steps ? step : Acc(0);
          delta_u[j] = delta[j] * out[j];
          out[j] *= skip;
          sum_of_delta += delta[j];
        }
      }

      for (int s = 0; s < slice_states; ++s) {
        const int state = first_state + s, offset = lane.channel * pitch + state;
        const Acc A = shared.A[offset];
        const Acc h_first = carried[offset];
        Acc h = lane.is_first() ? h_first : Acc(0);
        Acc decay = 1;
        if constexpr (Method::kExponential) decay = Math<Acc>::exp2(A * sum_of_delta);
        Acc abar[K], input[K];
        {
          Vector<Acc, K> B_steps;
          if (p.B.per_step) {
            B_steps = Vector<Acc, K>::load(B.lane(s, lane.time));
          } else {
            const Acc value = is_channel ? constant_value<Acc>(p.B, channel, state) : Acc(0);
#pragma unroll
            for (int j = 0; j < K; ++j) B_steps.set(j, value);
          }
#pragma unroll
          for (int j = 0; j < K; ++j) {
            const Transition<Method, Acc> transition(delta[j], A);
            abar[j] = transition.abar();
            input[j] = transition.input(delta_u[j]) * B_steps[j];
            h = Math<Acc>::fma(abar[j], h, input[j]);
            if constexpr (!Method::kExponential) decay *= abar[j];
          }
        }
        scan_lanes<false, kMaxLog2TimeLanes>(lane, decay, h);
        const Acc h_before = shuffle_earlier(h, lane.channels_per_warp);
        __syncwarp();
        if (ends_chunk) end[offset] = h;
        if (plan.carry_pass) {
          if (lane.is_last()) shared.decay[offset] *= decay;
          continue;
        }

        h = lane.is_first() ? h_first : h_before;
        Vector<Acc, K> C_steps;
        if (p.C.per_step) {
          C_steps = Vector<Acc, K>::load(C.lane(s, lane.time));
        } else {
          const Acc value = is_channel ? constant_value<Acc>(p.C, channel, state) : Acc(0);
#pragma unroll
          for (int j = 0; j < K; ++j) C_steps.set(j, value);
        }
#pragma unroll
        for (int j = 0; j < K; ++j) {
          h = Math<Acc>::fma(abar[j], h, input[j]);
          out[j] = Math<Acc>::fma(C_steps[j], h, out[j]);
        }
      }
    }

    if (!plan.carry_pass) {
      if (p.z.data != nullptr) {
        Acc gate[K];
        z_tile.read(lane.channel, first_step, gate);
#pragma unroll
        for (int j = 0; j < K; ++j) out[j] *= silu(gate[j]);
      }
      // The output takes the place of u, which every lane must have read.
      __syncthreads();
      const Tile<Scalar, K> out_tile(shared.u, plan.out, shape);
      out_tile.write(lane.channel, first_step, out);
      __syncthreads();
      out_tile.store(plan.out, p.out, first_element<Scalar>(p.out, at, t0), shape);
      if (p.chunk_states != nullptr) {
        for (int chunk = 0; chunk < chunks_per_tile; ++chunk) {
          const int64_t boundary = t0 / kChunkLength + chunk + 1;
          if (boundary >= chunk_boundary_count(p.seqlen)) break;
          const int64_t row = at.batch * chunk_boundary_count(p.seqlen) + boundary;
          for_each_state(p, at, [&](int offset, int64_t channel, int state) {
            static_cast<Acc*>(p.chunk_states)[state_offset(p, row, channel, state)] = shared.ends[chunk * states + offset];
          });
        }
      }
    }
    __syncthreads();
  }

  if (at.begin >= at.end) __syncthreads();
  for_each_state(p, at, [&](int offset, int64_t channel, int state) {
    if (plan.carry_pass) {
      const int64_t target = state_offset(p, at.batch * plan.segments + at.segment, channel, state);
      static_cast<Acc*>(plan.decay)[target] = shared.decay[offset];
      static_cast<Acc*>(plan.carry)[target] = carried[offset];
    } else if (at.segment + 1 == plan.segments) {
      static_cast<Acc*>(p.last_state)[state_offset(p, at.batch, channel, state)] = carried[offset];
    }
  });
}

// Registers of a thread: 128, or as many as doubles need.
template <typename Scalar>
constexpr int kFwdMinBlocks = std::is_same_v<Scalar, double> ? 1 : 2;

template <typename Scalar, typename Method>
__global__ void __launch_bounds__(kFwdMaxWarps* kWarpSize, kFwdMinBlocks<Scalar>)
    selective_scan_fwd_kernel(const __grid_constant__ SelectiveScanFwdParams params, const __grid_constant__ ScanPlan plan) {
  extern __shared__ __align__(kVectorBytes) unsigned char memory[];
  fwd_block<Scalar, Method>(params, plan, memory);
}

template <typename Scalar>
size_t fwd_shared_bytes(const SelectiveScanParams& params, const ScanPlan& plan) {
  return FwdShared<Scalar>(nullptr, params, plan).bytes;
}

template <typename Scalar, typename Method>
cudaError_t launch_fwd(const SelectiveScanFwdParams& params, const ScanPlan& plan, cudaStream_t stream) {
  const size_t bytes = fwd_shared_bytes<Scalar>(params, plan);
  const auto kernel = selective_scan_fwd_kernel<Scalar, Method>;
  if (const cudaError_t error = allow_shared_bytes(kernel, bytes); error != cudaSuccess) return error;
  const auto blocks = static_cast<unsigned int>(params.batch * plan.segments * plan.tiles);
  kernel<<<blocks, plan.threads(), bytes, stream>>>(params, plan);
  return cudaGetLastError();
}

}  // namespace ssm_kernels::selective_scan
