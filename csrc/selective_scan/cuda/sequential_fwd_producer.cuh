// Selective scan, forward, on CUDA, sequential: the producer warps. sequential_fwd.cuh describes the whole kernel.
//
// Raw tiles arrive in stages of shared memory by asynchronous copies, two tiles ahead, rows of B and C more than one tile
// ahead. A thread copies and reads its own vectors; in shifted rows it reads what its warp has copied. While the consumers scan
// tile t, producers compute delta = softplus?(raw + bias) and the input of tile t + 1 in the accumulation type, widen its rows
// of B and C, and write out = (sum of the partial outputs + D u) silu(z) of tile t - 1.
#pragma once

#include "common/activations.h"
#include "cuda/ptx/prefetch.cuh"
#include "selective_scan/cuda/sequential_fwd_shared.cuh"
#include "selective_scan/cuda/sequential_step.cuh"
#include "selective_scan/cuda/two_sample_step.cuh"

namespace ssm_kernels::selective_scan::sequential {

// Producers of methods that read two samples need these besides.
template <typename TileConfig, typename Method>
struct FwdSamples {
  __device__ __forceinline__ explicit FwdSamples(const TwoSampleParams*) {}
};
template <typename TileConfig>
struct FwdSamples<TileConfig, TwoSampleMethod> {
  using Scalar = typename TileConfig::Scalar;
  using Acc = typename TileConfig::Acc;
  using Vectors = ThreadVectors<TileConfig, VectorAccess::kAlongSteps>;
  using Pieces = cuda::ShiftedPieces<Scalar, kVectorSize<Scalar>>;

  const TwoSampleParams* two;
  const Scalar* lam;  // of the thread's first vector in the next tile to put
  // Along the steps, the last u of the thread's vectors in the tile before.
  Acc last_u[Vectors::kCount];

  __device__ __forceinline__ explicit FwdSamples(const TwoSampleParams* two_) : two(two_), lam(nullptr), last_u{} {}

  // A tile's lam and, along the channels, u before the step of the vector, in lanes that do not find it in the warp's part of
  // the tile. The loads are in flight while delta is computed.
  struct Loads {
    Pieces lam[Vectors::kCount], u_before[Vectors::kCount];
  };
};

// Global memory -> delta, inputs, B and C; partial outputs -> out.
template <typename TileConfig, typename Method>
struct FwdProducer {
  using Scalar = typename TileConfig::Scalar;
  using Acc = typename TileConfig::Acc;
  using Shared = FwdShared<TileConfig>;
  using Step = sequential::Step<Method, Scalar>;
  using AlongSteps = ThreadVectors<TileConfig, VectorAccess::kAlongSteps>;
  using AlongChannels = ThreadVectors<TileConfig, VectorAccess::kAlongChannels>;
  using Shifted = ThreadVectors<TileConfig, VectorAccess::kShifted>;
  using ShiftedChannels = ThreadVectors<TileConfig, VectorAccess::kShiftedChannels>;
  using Descending = ThreadVectors<TileConfig, VectorAccess::kDescending>;
  static constexpr int kVector = kVectorSize<Scalar>, kCount = AlongSteps::kCount;
  static constexpr int kMatrixVectors = Matrices<TileConfig>::kCount;

  const SelectiveScanFwdParams& p;
  const ScanPlan& plan;
  const Shared& shared;
  const Position& at;
  const FwdRows<Scalar>& rows;
  int thread;
  // Addresses in the next tile to read; out and z in the next tile to write.
  Scalar *delta, *u, *z, *out;
  const Scalar* matrices[kMatrixVectors];
  // Per vector of B and C, computed once: the stride to the next tile, the place among the raw matrices, the place from the
  // beginning of B, and whether the block that holds its first byte is copied whole where all states and steps exist.
  int64_t matrix_stride[kMatrixVectors];
  int matrix_place[kMatrixVectors], matrix_target[kMatrixVectors];
  bool is_matrix_vector[kMatrixVectors];
  FwdSamples<TileConfig, Method> samples;

  __device__ __forceinline__ FwdProducer(const SelectiveScanFwdParams& p_, const ScanPlan& plan_, const Shared& shared_,
                                         const TwoSampleParams* two = nullptr)
      : p(p_),
        plan(plan_),
        shared(shared_),
        at(*shared_.position),
        rows(*shared_.rows),
        thread(static_cast<int>(threadIdx.x) - TileConfig::kConsumers),
        samples(two) {
    const auto set_addresses = [&](auto thread_vectors) {
      delta = thread_vectors.address(p.delta, rows.delta, 0);
      u = thread_vectors.address(p.u, rows.u, 0);
      z = thread_vectors.address(p.z, rows.z, 0);
      out = thread_vectors.address(p.out, rows.out, 0);
      if constexpr (kIsTwoSample<Method>) {
        if (two->lam.data != nullptr) samples.lam = thread_vectors.address(two->lam, first_row<Scalar>(two->lam, at), 0);
      }
    };
    if (is_along_channels(plan.sequences)) {
      set_addresses(AlongChannels{thread});
    } else {
      set_addresses(AlongSteps{thread});  // and of shifted and descending vectors
    }
#pragma unroll
    for (int i = 0; i < kMatrixVectors; ++i) {
      const typename Matrices<TileConfig>::ThreadVector vector(plan, i);
      matrices[i] = Matrices<TileConfig>::address(p, plan, rows.B, rows.C, i);
      matrix_stride[i] = TileConfig::kTileSteps * (vector.is_B ? p.B.stride_step : p.C.stride_step);
      matrix_place[i] = opaque(vector.place());
      matrix_target[i] = opaque(vector.target());
      is_matrix_vector[i] = p.dstate == kStates && vector.access != VectorAccess::kSingly;
    }
  }

  // Calls visit(ThreadVectors) for the tile that starts at t0.
  template <typename Visitor>
  __device__ __forceinline__ void by_access(int64_t t0, const Visitor& visit) const {
    const bool is_whole = kHasWholeTiles<Method, Scalar> && sequential::is_whole<TileConfig>(at, t0);
    if (plan.sequences == VectorAccess::kAlongChannels && is_whole) {
      visit(AlongChannels{thread});
    } else if (plan.sequences == VectorAccess::kAlongSteps && is_whole) {
      visit(AlongSteps{thread});
    } else if (plan.sequences == VectorAccess::kAlongSteps || plan.sequences == VectorAccess::kShifted) {
      visit(Shifted{thread});
    } else if (plan.sequences == VectorAccess::kDescending) {
      visit(Descending{thread});
    } else {
      visit(ShiftedChannels{thread});
    }
  }

  template <int stages>
  __device__ __forceinline__ static int stage_of(int tile) {
    return tile % stages * Shared::kStage;
  }
  __device__ __forceinline__ int steps_from(int64_t t0) const { return at.steps_from(t0, TileConfig::kTileSteps); }
  // Copies of shifted rows read past a whole tile that is not the last.
  __device__ __forceinline__ int steps_left(int64_t t0) const { return at.steps_from(t0, 2 * TileConfig::kTileSteps); }

  // Starts the copies of a tile, and of the previous tile's gates, which are needed last. The warp's reads of the stages that
  // they overwrite have ended.
  __device__ __forceinline__ void read(int tile) {
    const int64_t t0 = int64_t(tile) * TileConfig::kTileSteps;
    __syncwarp();
    if (tile > 0) read_gate(tile - 1);
    if (t0 < at.end) {
      const auto copy = [&](auto thread_vectors) {
        const int left = steps_left(t0);
        thread_vectors.copy_async(p.delta, delta, shared.delta_raw + stage_of<Shared::kStages>(tile), at.channels, left);
        thread_vectors.copy_async(p.u, u, shared.u + stage_of<Shared::kStagesOfU>(tile), at.channels, left);
        delta += TileConfig::kTileSteps * p.delta.stride_step;
        u += TileConfig::kTileSteps * p.u.stride_step;
      };
      by_access(t0, copy);
    }
    cuda::cp_async_commit();
  }
  // Fetches lam of a tile into the second-level cache.
  template <typename P>
  __device__ __forceinline__ void prefetch_samples(P thread_vectors, int64_t t0) const {
    const TwoSampleParams& two = *samples.two;
    if (two.lam.data == nullptr) return;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const Scalar* const first = samples.lam + i * thread_vectors.stride(two.lam);
      if (thread_vectors.left(i, at.channels, steps_from(t0)) > 0) cuda::prefetch(first);
    }
  }
  template <typename P>
  __device__ __forceinline__ int64_t lam_stride(P) const {
    return P::kAlongChannels ? samples.two->lam.stride_dim : samples.two->lam.stride_step;
  }
  // Elements that do not exist have any value.
  template <typename Loads, typename P>
  __device__ __forceinline__ void load_samples(Loads& loads, P thread_vectors, int64_t t0) const {
    const TwoSampleParams& two = *samples.two;
    const int64_t stride = lam_stride(thread_vectors);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int left = thread_vectors.left(i, at.channels, steps_from(t0));
      if (two.lam.data != nullptr) {
        loads.lam[i] = {samples.lam + i * thread_vectors.stride(two.lam), stride == 1 ? left : min(left, 1)};
      }
      if constexpr (P::kAlongChannels) {
        const int64_t before = t0 + thread_vectors.step(i) - 1;
        const bool loads_before = thread % kWarpSize < P::kPerStep && before >= 0;
        loads.u_before[i] = {rows.u + thread_vectors.channel(i) * p.u.stride_dim + before * p.u.stride_step,
                             loads_before ? left : 0};
      }
    }
  }
  __device__ __forceinline__ Acc sample_before_row(int channel) const {
    return to_accumulate(load_or_zero(u_address_before<Scalar>(p, *samples.two, at, plan.sequences, rows.u, channel, 0)));
  }
  __device__ __forceinline__ void read_gate(int tile) {
    const int64_t t0 = int64_t(tile) * TileConfig::kTileSteps;
    if (p.z.data == nullptr || t0 >= at.end) return;
    const auto copy = [&](auto thread_vectors) {
      thread_vectors.copy_async(p.z, z, shared.z + stage_of<Shared::kStages>(tile), at.channels, steps_left(t0));
      z += TileConfig::kTileSteps * p.z.stride_step;
    };
    by_access(t0, copy);
  }
  // Starts the copies of a tile's rows of B and C, after put() of the previous tile.
  __device__ __forceinline__ void read_matrices(int tile) {
    const int64_t t0 = int64_t(tile) * TileConfig::kTileSteps;
    __syncwarp();
    if (t0 < at.end) {
      const int left = steps_left(t0);
#pragma unroll
      for (int i = 0; i < kMatrixVectors; ++i) {
        const int past = cuda::bytes_past_multiple<kVectorBytes>(matrices[i]);
        using ThreadVector = typename Matrices<TileConfig>::ThreadVector;
        if (is_matrix_vector[i] && left >= TileConfig::kTileSteps) {
          const char* const block = reinterpret_cast<const char*>(matrices[i]) - past;
          auto* const target = shared.raw_matrices + matrix_place[i];
          cuda::cp_async<kVectorBytes>(target, block);
          // The block after a row's last one holds `past` of its bytes.
          if (past != 0 && ThreadVector(plan, i).is_last_in_row()) cuda::cp_async(target + 1, block + kVectorBytes, past);
        } else {
          Matrices<TileConfig>::copy_async(p, {plan, i}, matrices[i], left, shared.raw_matrices);
        }
        matrices[i] += matrix_stride[i];
      }
    }
    cuda::cp_async_commit();
  }

  // All vectors of a thread at once: producers have one warp a scheduler, which waits for each chain of instructions, and the
  // branches over softplus and the gate would put one vector's chain after the other's.
  template <typename P>
  __device__ __forceinline__ void put_vectors(P thread_vectors, int tile) {
    const TileArray<TileConfig> deltas = shared.delta(tile), inputs = shared.input(tile);
    Acc delta[kCount][kVector], u[kCount][kVector];
    [[maybe_unused]] const auto loads = [&] {
      if constexpr (kIsTwoSample<Method>) {
        typename FwdSamples<TileConfig, Method>::Loads loads;
        load_samples(loads, thread_vectors, int64_t(tile) * TileConfig::kTileSteps);
        return loads;
      } else {
        return 0;
      }
    }();
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const auto raw_delta =
          thread_vectors.get_raw(p.delta, this->delta, shared.delta_raw + stage_of<Shared::kStages>(tile), i);
      const auto raw_u = thread_vectors.get_raw(p.u, this->u, shared.u + stage_of<Shared::kStagesOfU>(tile), i);
      thread_vectors.get_steps(raw_delta, raw_u, 0, shared.bias, false, i, 0, delta[i], u[i]);
    }
    if (p.delta_softplus) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
#pragma unroll
        for (int j = 0; j < kVector; ++j) delta[i][j] = softplus(delta[i][j]);
      }
    }
    if constexpr (kIsTwoSample<Method>) put_previous(thread_vectors, tile, loads, delta, u);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if constexpr (!kIsTwoSample<Method>) {
#pragma unroll
        for (int j = 0; j < kVector; ++j) u[i][j] = input_of<Step>(delta[i][j], u[i][j]);
      }
      thread_vectors.put(deltas, i, 0, delta[i]);
      thread_vectors.put(inputs, i, 0, u[i]);
    }
  }

  // u before each step of vector i, where `u` is that of each step.
  template <typename P, typename Loads>
  __device__ __forceinline__ void get_before(P thread_vectors, int tile, const Loads& loads, int i, const Acc (&u)[kVector],
                                             Acc (&before)[kVector]) {
    const int lane = thread % kWarpSize;
    if constexpr (P::kAlongChannels) {
      auto raw = loads.u_before[i].vector();
      if (lane >= P::kPerStep) {
        const P vectors_before{thread - P::kPerStep};
        raw = vectors_before.get_raw(p.u, this->u - p.u.stride_step, shared.u + stage_of<Shared::kStagesOfU>(tile), i);
      }
#pragma unroll
      for (int j = 0; j < kVector; ++j) before[j] = raw.accumulate(j);
      if (tile == 0 && thread_vectors.step(i) == 0) {
#pragma unroll
        for (int j = 0; j < kVector; ++j) {
          if (thread_vectors.channel(i) + j < at.channels) before[j] = sample_before_row(thread_vectors.channel(i) + j);
        }
      }
    } else {
      // The first vector of a row follows its last one in the tile before.
      constexpr int kLast = P::kPerRow - 1;
      const Acc own = lane % P::kPerRow == kLast ? samples.last_u[i] : u[kVector - 1];
      before[0] = __shfl_sync(kAllLanes, own, lane % P::kPerRow == 0 ? lane + kLast : lane - 1);
      samples.last_u[i] = u[kVector - 1];
#pragma unroll
      for (int j = 1; j < kVector; ++j) before[j] = u[j - 1];
    }
  }

  // Stores the factors of B_{t-1} of a tile, replaces u by those of B_t, and delta by what consumers read in its place. Called
  // by the whole warp.
  template <typename P, typename Loads>
  __device__ __forceinline__ void put_previous(P thread_vectors, int tile, const Loads& loads, Acc (&delta)[kCount][kVector],
                                               Acc (&u)[kCount][kVector]) {
    const TwoSampleParams& two = *samples.two;
    Acc previous[kCount][kVector];
    const auto for_each = [](const auto& visit) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
#pragma unroll
        for (int j = 0; j < kVector; ++j) visit(i, j);
      }
    };
#pragma unroll
    for (int i = 0; i < kCount; ++i) get_before(thread_vectors, tile, loads, i, u[i], previous[i]);
    if (two.lam.data != nullptr) {
      const int64_t stride = lam_stride(thread_vectors);
      Acc lam[kCount][kVector];
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const auto raw = loads.lam[i].vector();
#pragma unroll
        for (int j = 0; j < kVector; ++j) lam[i][j] = raw.accumulate(j);
      }
      if (stride == 0) {
        for_each([&](int i, int j) { lam[i][j] = lam[i][0]; });
      } else if (stride != 1) {
        const int steps = steps_from(int64_t(tile) * TileConfig::kTileSteps);
        for_each([&](int i, int j) {
          const int left = thread_vectors.left(i, at.channels, steps);
          const Scalar* const first = samples.lam + i * thread_vectors.stride(two.lam);
          if (left > 0) lam[i][j] = to_accumulate(first[min(j, left - 1) * stride]);
        });
      }
      samples.lam += TileConfig::kTileSteps * two.lam.stride_step;
      if (two.lam_sigmoid) for_each([&](int i, int j) { lam[i][j] = sigmoid(lam[i][j]); });
      for_each([&](int i, int j) {
        const Acc current = delta[i][j] * lam[i][j];
        previous[i][j] *= delta[i][j] - current;
        u[i][j] *= current;
      });
    } else if (is_bilinear(p)) {
      // Consumers read 1 / delta, and samples have no factor of delta. An infinite step is NaN.
      const Acc alpha = constant_weight<Acc>(p, two);
      for_each([&](int i, int j) {
        delta[i][j] = Math<Acc>::fma(delta[i][j], Acc(0), Math<Acc>::reciprocal(delta[i][j]));
        previous[i][j] *= Acc(1) - alpha;
        u[i][j] *= alpha;
      });
    } else {
      for_each([&](int i, int j) {
        previous[i][j] *= delta[i][j];
        u[i][j] *= delta[i][j];
      });
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) thread_vectors.put(shared.previous(tile), i, 0, previous[i]);
  }

  // Waits for a tile's copies and stores what the consumers read of it. Only the next tile's copies are then still in flight.
  __device__ __forceinline__ void put(int tile) {
    cuda::cp_async_wait<1>();
    __syncwarp();
    by_access(int64_t(tile) * TileConfig::kTileSteps, [&](auto thread_vectors) { put_vectors(thread_vectors, tile); });
#pragma unroll
    for (int i = 0; i < kMatrixVectors; ++i) {
      const VectorAccess access = Matrices<TileConfig>::ThreadVector(plan, i).access;
      const auto raw = Matrices<TileConfig>::get_raw(access, matrices[i], shared.raw_matrices + matrix_place[i]);
      Matrices<TileConfig>::put(shared.matrices(tile).B + matrix_target[i], access, raw);
    }
  }

  template <typename P>
  __device__ __forceinline__ void write_vectors(P thread_vectors, int tile) const {
    const int steps = steps_from(int64_t(tile) * TileConfig::kTileSteps);
    Acc sum[kCount][kVector];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const auto raw_u = thread_vectors.get_raw(p.u, this->u, shared.u + stage_of<Shared::kStagesOfU>(tile), i);
      thread_vectors.get(shared.part(tile, 0), i, 0, sum[i]);
#pragma unroll
      for (int part = 1; part < kStateLanes; ++part) {
        Acc other[kVector];
        thread_vectors.get(shared.part(tile, part), i, 0, other);
#pragma unroll
        for (int j = 0; j < kVector; ++j) sum[i][j] += other[j];
      }
      Acc skip[kVector], u[kVector];
      thread_vectors.get_channels(shared.skip, i, 0, skip);
      thread_vectors.widen(raw_u, 0, u);
#pragma unroll
      for (int j = 0; j < kVector; ++j) sum[i][j] = Math<Acc>::fma(skip[j], u[j], sum[i][j]);
    }
    if (p.z.data != nullptr) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const auto raw_z = thread_vectors.get_raw(p.z, this->z, shared.z + stage_of<Shared::kStages>(tile), i);
        Acc z[kVector];
        thread_vectors.widen(raw_z, 0, z);
#pragma unroll
        for (int j = 0; j < kVector; ++j) sum[i][j] *= silu(z[j]);
      }
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      typename Shared::RawVector raw_out;
      thread_vectors.narrow(sum[i], 0, raw_out);
      Scalar* const target = out + i * thread_vectors.stride(p.out);
      thread_vectors.store(raw_out, target, thread_vectors.left(i, at.channels, steps));
    }
  }

  // Writes the outputs of a tile.
  __device__ __forceinline__ void write(int tile) {
    by_access(int64_t(tile) * TileConfig::kTileSteps, [&](auto thread_vectors) {
      write_vectors(thread_vectors, tile);
      out += TileConfig::kTileSteps * p.out.stride_step;
    });
  }

  __device__ __forceinline__ void run() {
    const int tiles = static_cast<int>((at.end + TileConfig::kTileSteps - 1) / TileConfig::kTileSteps);
    if (tiles == 0) return;
    if constexpr (kIsTwoSample<Method>) {
      if (!is_along_channels(plan.sequences)) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
          const int channel = AlongSteps{thread}.channel(i);
          if (channel < at.channels) samples.last_u[i] = sample_before_row(channel);
        }
      }
    }
    // The consumers scan `tile` meanwhile, from 0 on. write() before read(): the stage of tile - 1 is reused for tile + 2.
    // One loop, so that each part is compiled once.
#pragma unroll 1
    for (int tile = -2;; ++tile) {
      const bool is_end = tile == tiles;
      if (is_end) {
        cuda::cp_async_wait<0>();
        __syncwarp();
      }
      if (tile > 0) write(tile - 1);
      if (is_end) break;
      read(tile + 2);
      if (tile + 1 >= 0 && tile + 1 < tiles) put(tile + 1);
      read_matrices(tile + 2);
      if constexpr (kIsTwoSample<Method>) {
        const int64_t t0 = int64_t(tile + 2) * TileConfig::kTileSteps;
        if (t0 < at.end) by_access(t0, [&](auto thread_vectors) { prefetch_samples(thread_vectors, t0); });
      }
      if (tile > -2) sync_roles<TileConfig>();
    }
  }
};

}  // namespace ssm_kernels::selective_scan::sequential
