// Selective scan, backward, on CUDA.
//
// With y_t = <C_t, h_t> + D u_t, out_t = y_t silu(z_t) and dy_t = grad_out_t silu(z_t), the adjoint g of the state runs against
// time,
//
//   g_t = C_t dy_t + Abar_{t+1} g_{t+1}
//
// and with p_t = g_t B_t and q_t = g_t h_{t-1} Abar'(z_t) + delta_t u_t p_t k'(z_t), summed over states, channels or time,
//
//   grad_delta_t = sum_n A q_t + u_t sum_n p_t k      grad_u_t = delta_t sum_n p_t k + D dy_t      grad_A = sum_t delta_t q_t
//   grad_B_t = sum_d g_t delta_t u_t k                grad_C_t = sum_d dy_t h_t                    grad_z_t = grad_out_t y_t
//   silu'(z_t)
//
// (of grad_delta, (z k)' = k + z k' has been used). selective_scan_cuda.h says how the work is cut. A tile is a chunk: it
// starts from the state that forward saved, and tiles are taken from the last to the first. State by state, each lane computes
// Abar for its steps once; the maps from step to step are scanned over the lanes forwards, for the states, and backwards, for
// the adjoints, and run through again from the true state and adjoint, both of which then exist at every step, in registers
// only.
//
// grad_B and grad_C sum over channels: first over those of a warp, by a product with ones on the tensor cores (16-bit inputs,
// whose rounding is coarser than tf32's) or by shuffles; a slice of states at a time then over the warps of a block, and of a
// cluster of blocks where there are clusters, through shared memory; and what is left over the tiles of channels, by another
// kernel. Every order of additions is fixed.
//
// The bound is the rate at which instructions are issued: some twenty for each state and step.
#pragma once

#include "selective_scan/selective_scan_tile.cuh"

namespace ssm_kernels::selective_scan {

// The arrays in a block's shared memory.
template <typename Scalar>
struct BwdShared {
  using Acc = AccumulateType<Scalar>;

  Scalar *u, *delta, *z, *grad_out;
  Acc *A, *before, *adjoint, *decay, *grad_A, *grad_constant_B, *grad_constant_C;
  Acc *B, *C;
  // (warps, slice, 2, chunk): what each warp adds to the gradients of B and C.
  Acc* sums;
  size_t bytes;

  SSM_HOST_DEVICE BwdShared(unsigned char* memory, const SelectiveScanParams& p, const ScanPlan& plan) {
    const TileShape<kBwdSteps> shape(kBwdLog2Warps, kBwdLog2TimeLanes);
    const int tile = Tile<Scalar, kBwdSteps>::capacity(shape);
    const int states = shape.max_channels() * state_pitch(p);
    const int slice = MatrixSlice<Scalar, kBwdSteps>::pitch_of(shape) << kBwdLog2Slice;
    Carver carver(memory);
    u = carver.take<Scalar>(tile);
    delta = carver.take<Scalar>(tile);
    z = carver.take<Scalar>(p.z.data != nullptr ? tile : 0);
    grad_out = carver.take<Scalar>(tile);
    A = carver.take<Acc>(states);
    before = carver.take<Acc>(states);
    adjoint = carver.take<Acc>(states);
    decay = carver.take<Acc>(plan.carry_pass ? states : 0);
    grad_A = carver.take<Acc>(states);
    grad_constant_B = carver.take<Acc>(p.B.per_step ? 0 : states);
    grad_constant_C = carver.take<Acc>(p.C.per_step ? 0 : states);
    B = carver.take<Acc>(p.B.per_step ? slice : 0);
    C = carver.take<Acc>(p.C.per_step ? slice : 0);
    sums = carver.take<Acc>(
        plan.carry_pass || !(p.B.per_step || p.C.per_step) ? 0 : kSumsPerState << (kBwdLog2Warps + kBwdLog2Slice));
    bytes = carver.bytes();
  }

  static constexpr int kSumsPerState = 2 * static_cast<int>(kChunkLength);
};

// Adds up two values of each lane over its warp's channels, in the accumulation type of 16-bit inputs: each row of a matrix of
// values times a column of ones. A row is one time lane's four channels, so that nothing of one step enters another.
__device__ __forceinline__ void sum_over_channels(float& first, float& second) {
  static_assert(kWarpSize / kBwdTimeLanes == 4, "the instruction multiplies rows of four");
  constexpr uint32_t kOne = 0x3f800000;
  float unused_first, unused_second;
  const float a = first, b = second;
  asm("mma.sync.aligned.m16n8k4.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %7, %7, %7};"
      : "=f"(first), "=f"(unused_first), "=f"(second), "=f"(unused_second)
      : "r"(__float_as_uint(a)), "r"(__float_as_uint(b)), "r"(kOne), "f"(0.0f));
}

// Stores the warp's sums over its channels: per state, (2, time lanes, steps).
template <typename Scalar, typename Acc>
__device__ __forceinline__ void store_channel_sums(Acc (&grad_B)[kBwdSteps], Acc (&grad_C)[kBwdSteps], const Lane& lane,
                                                   Acc* target) {
  static_assert(kBwdSteps == 8, "four lanes share two times eight sums");
  const int quarter = lane.channel_in_warp;
  Acc* const place = target + (quarter / 2) * kChunkLength + lane.time * kBwdSteps + (quarter % 2) * 4;
  Acc mine[4];
  if constexpr (sizeof(Scalar) == 2) {
#pragma unroll
    for (int j = 0; j < kBwdSteps; ++j) sum_over_channels(grad_B[j], grad_C[j]);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const Acc of_B = quarter & 1 ? grad_B[4 + i] : grad_B[i], of_C = quarter & 1 ? grad_C[4 + i] : grad_C[i];
      mine[i] = quarter & 2 ? of_C : of_B;
    }
  } else {
    Acc half[kBwdSteps];
#pragma unroll
    for (int j = 0; j < kBwdSteps; ++j) {
      const Acc sent = quarter & 2 ? grad_B[j] : grad_C[j];
      half[j] = (quarter & 2 ? grad_C[j] : grad_B[j]) + __shfl_xor_sync(kAllLanes, sent, 2);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const Acc sent = quarter & 1 ? half[i] : half[4 + i];
      mine[i] = (quarter & 1 ? half[4 + i] : half[i]) + __shfl_xor_sync(kAllLanes, sent, 1);
    }
  }
  Vector<Acc, 4> vector;
#pragma unroll
  for (int i = 0; i < 4; ++i) vector.set(i, mine[i]);
  vector.store(place);
}

template <typename Acc>
__device__ __forceinline__ Acc sum_over_time_lanes(Acc value) {
#pragma unroll
  for (int distance = kWarpSize / 2; distance >= kWarpSize / kBwdTimeLanes; distance /= 2) {
    value += __shfl_xor_sync(kAllLanes, value, distance);
  }
  return value;
}

// Blocks of the cluster wait for each other; what they wrote to shared memory before is seen by all after.
__device__ __forceinline__ void synchronize_cluster(int cluster) {
#if __CUDA_ARCH__ >= 900
  if (cluster > 1) {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
    return;
  }
#endif
  __syncthreads();
}

// A vector of the same array in the shared memory of another block of the cluster.
template <typename T, int size>
__device__ __forceinline__ Vector<T, size> load_from_block(const T* shared, int block, int cluster) {
#if __CUDA_ARCH__ >= 900
  if (cluster > 1) {
    static_assert(sizeof(Vector<T, size>) == kVectorBytes, "one load");
    uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
    asm("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(address) : "r"(block));
    Vector<T, size> vector;
    uint4& v = vector.pieces[0];
    asm volatile("ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(address));
    return vector;
  }
#endif
  return Vector<T, size>::load(shared);
}

template <typename Scalar, typename Method>
__device__ __forceinline__ void bwd_block(const SelectiveScanBwdParams& p, const ScanPlan& plan,
                                          const PartialSums& partial_sums, unsigned char* memory) {
  using Acc = AccumulateType<Scalar>;
  using Shared = BwdShared<Scalar>;
  constexpr int K = kBwdSteps, kSlice = 1 << kBwdLog2Slice, kThreads = kWarpSize << kBwdLog2Warps;
  const Shared shared(memory, p, plan);
  const Position at(p, plan, blockIdx.x);
  const Lane lane(kBwdLog2TimeLanes);
  TileShape<K> shape(kBwdLog2Warps, kBwdLog2TimeLanes);
  shape.channels = at.channels;
  const int dstate = static_cast<int>(p.dstate), pitch = state_pitch(p);
  const int warp = threadIdx.x / kWarpSize;
  const bool sums_channels = p.B.per_step || p.C.per_step;

  // Lanes without a channel add zeros to the sums over channels.
  const int states = shape.max_channels() * pitch;
  clear(states, shared.A, shared.before, shared.adjoint);
  __syncthreads();
  for_each_state(p, at, [&](int offset, int64_t channel, int state) {
    shared.A[offset] = load_state<Acc>(p.A, 0, channel, state) * kScaleOfA<Method, Acc>;
    Acc g = 0;
    if (plan.carry_pass) {
      shared.decay[offset] = 1;
    } else {
      if (p.grad_last_state.data != nullptr) g = load_state<Acc>(p.grad_last_state, at.batch, channel, state);
      for (int64_t s = plan.segments - 1; s > at.segment; --s) {
        const int64_t after = state_offset(p, at.batch * plan.segments + s, channel, state);
        g = Math<Acc>::fma(static_cast<const Acc*>(plan.decay)[after], g, static_cast<const Acc*>(plan.carry)[after]);
      }
      shared.grad_A[offset] = 0;
      if (!p.B.per_step) shared.grad_constant_B[offset] = 0;
      if (!p.C.per_step) shared.grad_constant_C[offset] = 0;
    }
    shared.adjoint[offset] = g;
  });

  const bool is_channel = lane.channel < at.channels;
  const auto channel = [&] { return opaque(at.first_channel) + lane.channel; };
  const auto of_channel = [&](const ChannelView& view) {
    return is_channel && view.data != nullptr ? static_cast<const Acc*>(view.data)[channel() * view.stride] : Acc(0);
  };
  const bool is_first = lane.is_first(), is_last = lane.is_last();
  const MatrixSlice<Scalar, K> B{shared.B, MatrixSlice<Scalar, K>::pitch_of(shape)}, C{shared.C, B.pitch};
  const Tile<Scalar, K> u_tile(shared.u, plan.u, shape), delta_tile(shared.delta, plan.delta, shape),
      z_tile(shared.z, plan.z, shape), grad_out_tile(shared.grad_out, plan.grad_out, shape);
  const auto read_matrix = [&](const MatrixView& view, const MatrixSlice<Scalar, K>& slice, int s, int state) {
    if (view.per_step) return Vector<Acc, K>::load(slice.lane(s, lane.time));
    const Acc value = is_channel ? constant_value<Acc>(view, channel(), state) : Acc(0);
    Vector<Acc, K> steps;
#pragma unroll
    for (int j = 0; j < K; ++j) steps.set(j, value);
    return steps;
  };
  const auto step_size = [&](Acc raw) { return p.delta_softplus ? softplus(raw) : raw; };

  Acc grad_D = 0, grad_bias = 0;
  const int64_t tiles = (at.end - at.begin + kChunkLength - 1) / kChunkLength;
  for (int64_t t0 = at.begin + (tiles - 1) * kChunkLength; t0 >= at.begin; t0 -= kChunkLength) {
    const int first_step = lane.time * K;
    shape.steps = static_cast<int>(min(at.end - t0, kChunkLength));
    if (!plan.carry_pass) {
      u_tile.load(plan.u, p.u, first_element<Scalar>(p.u, at, t0), shape);
      const int64_t boundary = at.batch * chunk_boundary_count(p.seqlen) + t0 / kChunkLength;
      for_each_state(p, at, [&](int offset, int64_t channel, int state) {
        shared.before[offset] = static_cast<const Acc*>(p.chunk_states)[state_offset(p, boundary, channel, state)];
      });
    }
    delta_tile.load(plan.delta, p.delta, first_element<Scalar>(p.delta, at, t0), shape);
    if (p.z.data != nullptr) z_tile.load(plan.z, p.z, first_element<Scalar>(p.z, at, t0), shape);
    if (p.grad_out.data != nullptr) {
      grad_out_tile.load(plan.grad_out, p.grad_out, first_element<Scalar>(p.grad_out, at, t0), shape);
    }

    Acc delta[K], delta_u[K], dy[K];
    // Sums over the states.
    Acc y[K], grad_input[K], grad_step[K];
    Acc sum_of_delta = 0;
    for (int first_state = 0; first_state < dstate; first_state += kSlice) {
      const int slice_states = min(kSlice, dstate - first_state);
      if (first_state > 0) __syncthreads();
      if (p.B.per_step && !plan.carry_pass) {
        B.stage(plan.B, p.B, matrix_row<Scalar>(p.B, p, at, first_state, t0), slice_states, kBwdLog2Slice, shape);
      }
      if (p.C.per_step) {
        C.stage(plan.C, p.C, matrix_row<Scalar>(p.C, p, at, first_state, t0), slice_states, kBwdLog2Slice, shape);
      }
      if (first_state == 0) cuda::wait_for_async_copies();
      __syncthreads();

      if (first_state == 0) {
        const Acc bias = of_channel(p.delta_bias);
        delta_tile.read(lane.channel, first_step, delta);
        if (!plan.carry_pass) u_tile.read(lane.channel, first_step, delta_u);
        if (p.grad_out.data != nullptr) {
          grad_out_tile.read(lane.channel, first_step, dy);
          if (p.z.data != nullptr) {
            z_tile.read(lane.channel, first_step, y);
#pragma unroll
            for (int j = 0; j < K; ++j) dy[j] *= silu(y[j]);
          }
        }
#pragma unroll
        for (int j = 0; j < K; ++j) {
          // A step of size zero leaves the state alone, and its adjoint.
          delta[j] = is_channel && first_step + j < shape.steps ? step_size(delta[j] + bias) : Acc(0);
          delta_u[j] *= delta[j];
          if (p.grad_out.data == nullptr) dy[j] = 0;
          y[j] = grad_input[j] = grad_step[j] = 0;
          sum_of_delta += delta[j];
        }
      }

      for (int s = 0; s < slice_states; ++s) {
        const int state = first_state + s, offset = lane.channel * pitch + state;
        const Acc A = shared.A[offset], adjoint_after = shared.adjoint[offset];
        Acc decay = 1;
        if constexpr (Method::kExponential) decay = Math<Acc>::exp2(A * sum_of_delta);
        Acc basis[K];
#pragma unroll
        for (int j = 0; j < K; ++j) {
          basis[j] = Transition<Method, Acc>(delta[j], A).basis;
          if constexpr (!Method::kExponential) decay *= Transition<Method, Acc>(delta[j], A, basis[j]).abar();
        }
        const auto transition = [&](int j) { return Transition<Method, Acc>(delta[j], A, basis[j]); };

        // The states: h[j] is that after step j.
        Acc h[K], h_before = 0;
        Vector<Acc, K> B_steps;
        if (!plan.carry_pass) {
          B_steps = read_matrix(p.B, B, s, state);
          h_before = shared.before[offset];
          Acc lane_decay = decay, end = is_first ? h_before : Acc(0);
#pragma unroll
          for (int j = 0; j < K; ++j) {
            h[j] = transition(j).input(delta_u[j]) * B_steps[j];
            end = Math<Acc>::fma(transition(j).abar(), end, h[j]);
          }
          scan_lanes<false, kBwdLog2TimeLanes>(lane, lane_decay, end);
          end = shuffle_earlier(end, lane.channels_per_warp);
          if (!is_first) h_before = end;
          Acc previous = h_before;
#pragma unroll
          for (int j = 0; j < K; ++j) previous = h[j] = Math<Acc>::fma(transition(j).abar(), previous, h[j]);
        }

        // The adjoints: a lane's map is from what comes to its last step from later ones to what leaves its first.
        const Vector<Acc, K> C_steps = read_matrix(p.C, C, s, state);
        Acc through = is_last ? adjoint_after : Acc(0);
        {
          Acc lane_decay = decay;
#pragma unroll
          for (int j = K - 1; j >= 0; --j) through = transition(j).abar() * Math<Acc>::fma(dy[j], C_steps[j], through);
          scan_lanes<true, kBwdLog2TimeLanes>(lane, lane_decay, through);
          __syncwarp();
          if (is_first) {
            shared.adjoint[offset] = through;
            if (plan.carry_pass) shared.decay[offset] *= lane_decay;
          }
          through = shuffle_later(through, lane.channels_per_warp);
          if (is_last) through = adjoint_after;
        }
        if (plan.carry_pass) continue;

        if (p.z.data != nullptr) {
#pragma unroll
          for (int j = 0; j < K; ++j) y[j] = Math<Acc>::fma(C_steps[j], h[j], y[j]);
        }
        // Doubles take twice the registers: rather than hold it, read it again.
        if constexpr (std::is_same_v<Acc, double>) B_steps = read_matrix(p.B, B, s, state);
        Acc to_grad_B[K], to_grad_C[K], grad_A = 0;
#pragma unroll
        for (int j = K - 1; j >= 0; --j) {
          const auto step = transition(j);
          const Acc g = Math<Acc>::fma(dy[j], C_steps[j], through);
          const Acc previous = j > 0 ? h[j - 1] : h_before;
          through = step.abar() * g;
          const Acc p_t = g * B_steps[j];
          Acc q;
          if constexpr (Method::kUnitGain && Method::kExponential) {
            q = through * previous;
            grad_input[j] += p_t;
            to_grad_B[j] = g * delta_u[j];
          } else {
            const Acc gain = Method::gain(step.z, step.basis);
            const auto derivatives = Method::derivatives(step.z, step.basis, gain);
            q = Method::kExponential ? through * previous : derivatives.abar * (g * previous);
            if constexpr (!Method::kUnitGain) q = Math<Acc>::fma(delta_u[j] * p_t, derivatives.gain, q);
            grad_input[j] = Math<Acc>::fma(p_t, gain, grad_input[j]);
            to_grad_B[j] = g * step.input(delta_u[j]);
          }
          grad_step[j] = Math<Acc>::fma(A, q, grad_step[j]);
          grad_A = Math<Acc>::fma(delta[j], q, grad_A);
          to_grad_C[j] = dy[j] * h[j];
        }

        grad_A = sum_over_time_lanes(grad_A);
        if (is_first) shared.grad_A[offset] += grad_A;
        const auto sum_steps = [&](const Acc(&values)[K]) {
          Acc sum = 0;
#pragma unroll
          for (int j = 0; j < K; ++j) sum += values[j];
          return sum_over_time_lanes(sum);
        };
        if (!p.B.per_step) {
          const Acc sum = sum_steps(to_grad_B);
          if (is_first) shared.grad_constant_B[offset] += sum;
        }
        if (!p.C.per_step) {
          const Acc sum = sum_steps(to_grad_C);
          if (is_first) shared.grad_constant_C[offset] += sum;
        }
        if (sums_channels) {
          store_channel_sums<Scalar>(to_grad_B, to_grad_C, lane, shared.sums + (warp * kSlice + s) * Shared::kSumsPerState);
        }
      }

      if (sums_channels && !plan.carry_pass) {
        synchronize_cluster(plan.cluster);
        constexpr int kSize = kVectorSize<Acc>;
        const int rank = static_cast<int>(at.tile % plan.cluster);
        const int64_t sums_tile = at.batch * (plan.tiles / plan.cluster) + at.tile / plan.cluster;
        const int pieces = slice_states * Shared::kSumsPerState / kSize;
        for (int i = rank * kThreads + threadIdx.x; i < pieces; i += plan.cluster * kThreads) {
          const int s = i * kSize / Shared::kSumsPerState, step = i * kSize % static_cast<int>(kChunkLength);
          Acc* const target = static_cast<Acc*>(i * kSize / kChunkLength % 2 == 0 ? partial_sums.grad_B : partial_sums.grad_C);
          if (target == nullptr) continue;
          Acc sum[kSize] = {};
          for (int block = 0; block < plan.cluster; ++block) {
            for (int w = 0; w < 1 << kBwdLog2Warps; ++w) {
              const auto part = load_from_block<Acc, kSize>(shared.sums + w * kSlice * Shared::kSumsPerState + i * kSize, block,
                                                            plan.cluster);
#pragma unroll
              for (int j = 0; j < kSize; ++j) sum[j] += part[j];
            }
          }
          Vector<Acc, kSize> vector;
#pragma unroll
          for (int j = 0; j < kSize; ++j) vector.set(j, sum[j]);
          vector.store_once(target + (sums_tile * dstate + first_state + s) * partial_sums.padded_steps + t0 + step);
        }
        if (plan.cluster > 1) synchronize_cluster(plan.cluster);
      }
    }

    if (!plan.carry_pass) {
      // The tiles are intact: what is left of a lane's steps is computed from them, then the gradients take their places.
      const Acc skip = of_channel(p.D), bias = of_channel(p.delta_bias);
      Acc u[K], raw[K];
      u_tile.read(lane.channel, first_step, u);
      delta_tile.read(lane.channel, first_step, raw);
      if (p.z.data != nullptr) {
        Acc gate[K], grad_out[K];
        z_tile.read(lane.channel, first_step, gate);
        if (p.grad_out.data != nullptr) grad_out_tile.read(lane.channel, first_step, grad_out);
#pragma unroll
        for (int j = 0; j < K; ++j) {
          const Acc incoming = p.grad_out.data != nullptr ? grad_out[j] : Acc(0);
          y[j] = incoming * Math<Acc>::fma(skip, u[j], y[j]) * silu_derivative(gate[j], sigmoid(gate[j]));
        }
      }
#pragma unroll
      for (int j = 0; j < K; ++j) {
        Acc grad_delta = Math<Acc>::fma(grad_step[j], 1 / kScaleOfA<Method, Acc>, u[j] * grad_input[j]);
        if (p.delta_softplus) grad_delta *= softplus_derivative(raw[j] + bias);
        if (is_channel && first_step + j < shape.steps) {
          grad_bias += grad_delta;
          grad_D = Math<Acc>::fma(dy[j], u[j], grad_D);
        }
        grad_input[j] = Math<Acc>::fma(delta[j], grad_input[j], skip * dy[j]);
        grad_step[j] = grad_delta;
      }
      __syncthreads();
      const Tile<Scalar, K> grad_u_tile(shared.u, plan.grad_u, shape), grad_delta_tile(shared.delta, plan.grad_delta, shape),
          grad_z_tile(shared.z, plan.grad_z, shape);
      grad_u_tile.write(lane.channel, first_step, grad_input);
      grad_delta_tile.write(lane.channel, first_step, grad_step);
      if (p.z.data != nullptr) grad_z_tile.write(lane.channel, first_step, y);
      __syncthreads();
      grad_u_tile.store(plan.grad_u, p.grad_u, first_element<Scalar>(p.grad_u, at, t0), shape);
      grad_delta_tile.store(plan.grad_delta, p.grad_delta, first_element<Scalar>(p.grad_delta, at, t0), shape);
      if (p.z.data != nullptr) grad_z_tile.store(plan.grad_z, p.grad_z, first_element<Scalar>(p.grad_z, at, t0), shape);
    }
    __syncthreads();
  }

  if (tiles == 0) __syncthreads();
  const int64_t row = opaque(at.batch) * plan.segments + at.segment;
  for_each_state(p, at, [&](int offset, int64_t channel, int state) {
    const int64_t target = state_offset(p, row, channel, state);
    if (plan.carry_pass) {
      static_cast<Acc*>(plan.decay)[target] = shared.decay[offset];
      static_cast<Acc*>(plan.carry)[target] = shared.adjoint[offset];
      return;
    }
    static_cast<Acc*>(partial_sums.grad_A)[target] = shared.grad_A[offset];
    if (!p.B.per_step) static_cast<Acc*>(partial_sums.grad_constant_B)[target] = shared.grad_constant_B[offset];
    if (!p.C.per_step) static_cast<Acc*>(partial_sums.grad_constant_C)[target] = shared.grad_constant_C[offset];
    if (p.grad_initial_state != nullptr && at.segment == 0) {
      static_cast<Acc*>(p.grad_initial_state)[state_offset(p, at.batch, channel, state)] = shared.adjoint[offset];
    }
  });
  if (!plan.carry_pass) {
    grad_D = sum_over_time_lanes(grad_D);
    grad_bias = sum_over_time_lanes(grad_bias);
    if (is_first && is_channel) {
      if (partial_sums.grad_D != nullptr) static_cast<Acc*>(partial_sums.grad_D)[row * p.dim + channel()] = grad_D;
      if (partial_sums.grad_delta_bias != nullptr)
        static_cast<Acc*>(partial_sums.grad_delta_bias)[row * p.dim + channel()] = grad_bias;
    }
  }
}

// Blocks of a multiprocessor: that leaves a thread 128 registers, or as many as doubles need.
template <typename Scalar>
constexpr int kBwdMinBlocks = std::is_same_v<Scalar, double> ? 2 : 4;

template <typename Scalar, typename Method>
__global__ void __launch_bounds__(kWarpSize << kBwdLog2Warps, kBwdMinBlocks<Scalar>)
    selective_scan_bwd_kernel(const __grid_constant__ SelectiveScanBwdParams params, const __grid_constant__ ScanPlan plan,
                              const __grid_constant__ PartialSums partial_sums) {
  extern __shared__ __align__(kVectorBytes) unsigned char memory[];
  bwd_block<Scalar, Method>(params, plan, partial_sums, memory);
}

template <typename Scalar, typename Method>
cudaError_t launch_bwd(const SelectiveScanBwdParams& params, const ScanPlan& plan, const PartialSums& partial_sums,
                       cudaStream_t stream) {
  const size_t bytes = BwdShared<Scalar>(nullptr, params, plan).bytes;
  const auto kernel = selective_scan_bwd_kernel<Scalar, Method>;
  if (const cudaError_t error = allow_shared_bytes(kernel, bytes); error != cudaSuccess) return error;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned int>(params.batch * plan.segments * plan.tiles));
  config.blockDim = dim3(plan.threads());
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  cudaLaunchAttribute cluster;
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {static_cast<unsigned int>(plan.cluster), 1, 1};
  if (plan.cluster > 1) {
    config.attrs = &cluster;
    config.numAttrs = 1;
  }
  return cudaLaunchKernelEx(&config, kernel, params, plan, partial_sums);
}

}  // namespace ssm_kernels::selective_scan
