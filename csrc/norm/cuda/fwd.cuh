// Forward of the norms: the general kernels, which take every option. norm.h has the formulas, launch.h the mapping to teams;
// rms_fwd.cuh and rms_sum_fwd.cuh have faster kernels for the most frequent cases.
//
// A team reads a group once, into registers: x and its gate, or x and the residual. It sums v^2 (LayerNorm: v, then
// (v - mean)^2) and writes the output from the registers. All loads of a group come before their first use, so that a whole
// group is in flight. Saved for backward: rstd and, for LayerNorm, mean per group. Without is_aligned, rows pass through
// shared memory (staged_rows.cuh). A group too long for a block's registers is cut into chunks, which each pass reads again.
#pragma once

#include <algorithm>

#include "norm/cuda/rms_fwd.cuh"
#include "norm/cuda/rms_sum_fwd.cuh"
#include "norm/cuda/row_values.cuh"
#include "norm/cuda/staged_rows.cuh"
#include "norm/cuda/team_sum.cuh"

namespace ssm_kernels::norm {

// The team's images of x, and of z or the residual. Outputs take the places of inputs: out that of x, and the new residual
// that of the residual, with which it may differ in type.
template <typename Scalar, bool is_add>
struct FwdStage {
  TeamPlace team;
  bool takes_turns;  // whether the images take several chunks or groups, one after another
  StagedTensor<Scalar> x, second, new_residual;

  __device__ __forceinline__ FwdStage(const NormFwdParams& p, const FwdPlan& plan, char* memory, const TeamPlace& place)
      : FwdStage(p, plan, memory, memory + plan.teams.count * image_bytes(place.lanes, sizeof(Scalar)), place,
                 image_bytes(place.lanes, is_add && (p.residual.is_accumulate || p.new_residual.is_accumulate)
                                              ? sizeof(AccumulateType<Scalar>)
                                              : sizeof(Scalar))) {}

 private:
  __device__ __forceinline__ FwdStage(const NormFwdParams& p, const FwdPlan& plan, char* memory, char* after_x,
                                      const TeamPlace& place, int second_bytes)
      : team(place),
        takes_turns(plan.teams.chunks > 1 || plan.blocks * plan.teams.count < plan.units),
        x(memory + place.index * image_bytes(place.lanes, sizeof(Scalar)), false),
        second(after_x + place.index * second_bytes, is_add && p.residual.is_accumulate),
        new_residual(after_x + place.index * second_bytes, is_add && p.new_residual.is_accumulate) {}
};

struct NoStage {
  __device__ __forceinline__ NoStage(const NormFwdParams&, const FwdPlan&, char*, const TeamPlace&) {}
};

// A thread's part of a group: v in the accumulation type, and a gate that is applied after the norm.
template <typename Scalar, int vectors, int size, bool is_add, bool is_aligned>
struct GroupValues {
  using Acc = AccumulateType<Scalar>;
  static constexpr bool kMayBeWide = is_add && !std::is_same_v<Scalar, Acc>;

  Acc v[vectors][size];
  Vector<Scalar, size> z[is_add ? 1 : vectors];

  // left(i) says how many columns the group has from vector i on, offset_of(view, i) where it is in a tensor.
  template <typename Left, typename OffsetOf>
  __device__ __forceinline__ void load(const NormFwdParams& p, const Left& left, const OffsetOf& offset_of,
                                       bool stores_residual) {
    Vector<Scalar, size> x[vectors], residual[is_add ? vectors : 1];
    Vector<Acc, size> wide_residual[kMayBeWide ? vectors : 1];
    const auto load_all = [&](auto& vectors_of_lane, const RowsView& view) {
      using Element = std::decay_t<decltype(vectors_of_lane[0])>;
      using Stored = std::decay_t<decltype(vectors_of_lane[0][0])>;
#pragma unroll
      for (int i = 0; i < vectors; ++i) {
        const Stored* const source = static_cast<const Stored*>(view.data) + offset_of(view, i);
        vectors_of_lane[i] = left(i) > 0 ? Element::load_once(source) : Element::zero();
      }
    };
    load_all(x, p.x);
    if constexpr (is_add) {
      const bool is_wide = kMayBeWide && p.residual.is_accumulate;
      if (p.residual.data != nullptr) {
        if constexpr (kMayBeWide) {
          if (is_wide) load_all(wide_residual, p.residual);
        }
        if (!is_wide) load_all(residual, p.residual);
      }
#pragma unroll
      for (int i = 0; i < vectors; ++i) {
        to_values(x[i], v[i]);
        if (p.residual.data != nullptr) {
#pragma unroll
          for (int j = 0; j < size; ++j) {
            if constexpr (kMayBeWide) {
              v[i][j] += is_wide ? wide_residual[i][j] : residual[i].accumulate(j);
            } else {
              v[i][j] += residual[i].accumulate(j);
            }
          }
        }
        // add_norm normalizes the new residual as rounded to its dtype.
        if (!p.new_residual.is_accumulate) to_values(from_values<Scalar>(v[i]), v[i]);
        if (stores_residual && left(i) > 0) {
          store_values<Scalar>(p.new_residual, offset_of(p.new_residual, i), v[i]);
        }
      }
    } else {
      if (p.z.data != nullptr) load_all(z, p.z);
#pragma unroll
      for (int i = 0; i < vectors; ++i) to_values(x[i], v[i]);
      if (p.z.data != nullptr && !p.norm_before_gate) multiply_by_gate(p.activation);
    }
  }

  // The same through shared memory. The block calls the function together, also for groups that it does not have. `count`:
  // columns of the chunk, offset_of(view): where it begins.
  template <typename Stage, typename OffsetOf>
  __device__ __forceinline__ void load_staged(const NormFwdParams& p, const Stage& stage, int count, const OffsetOf& offset_of,
                                              bool stores_residual) {
    const RowsView& second = is_add ? p.residual : p.z;
    if (stage.takes_turns) stage.team.sync();  // all lanes have read the images
    stage.x.copy(p.x.data, offset_of(p.x), count, stage.team);
    if (second.data != nullptr) stage.second.copy(second.data, offset_of(second), count, stage.team);
    cuda::cp_async_wait();
    stage.team.sync();
    stage.x.load(p.x.data, offset_of(p.x), v, stage.team);
    if constexpr (is_add) {
      if (p.residual.data != nullptr) {
        Acc residual[vectors][size];
        stage.second.load(p.residual.data, offset_of(p.residual), residual, stage.team);
#pragma unroll
        for (int i = 0; i < vectors; ++i) {
#pragma unroll
          for (int j = 0; j < size; ++j) v[i][j] += residual[i][j];
        }
      }
      if (!p.new_residual.is_accumulate) {
#pragma unroll
        for (int i = 0; i < vectors; ++i) to_values(from_values<Scalar>(v[i]), v[i]);
      }
    } else {
      if (p.z.data != nullptr) stage.second.load_narrow(p.z.data, offset_of(p.z), z, stage.team);
    }
    stage.team.sync();  // outputs may take the places of inputs
    if constexpr (is_add) {
      if (!stores_residual) return;
#pragma unroll
      for (int i = 0; i < vectors; ++i) stage.new_residual.replace(i, v[i], stage.team);
      stage.team.sync();
      stage.new_residual.store(p.new_residual.data, offset_of(p.new_residual), count, stage.team);
    } else {
      if (p.z.data != nullptr && !p.norm_before_gate) multiply_by_gate(p.activation);
    }
  }

  __device__ __forceinline__ void multiply_by_gate(GateActivation activation) {
    visit_activation(activation, [&](auto gate) {
#pragma unroll
      for (int i = 0; i < vectors; ++i) {
#pragma unroll
        for (int j = 0; j < size; ++j) v[i][j] *= gate.value(z[i].accumulate(j));
      }
    });
  }
};

// The gated fp16 and bf16 kernels need two resident blocks to have enough bytes in flight, and fit into the 64 registers that
// this leaves them. The others would spill.
template <typename Scalar, bool is_add>
constexpr int kFwdMinBlocks = sizeof(Scalar) == 2 && !is_add ? 2 : 1;

// Threads of a block in the launch bounds, which limit the registers of a thread; no block has more than kFwdMaxThreads. In
// aligned fp32 add_norm, with 72 registers, two blocks of the 416 threads that 12,296 columns take are resident. fp16 and bf16
// would spill, and have two of 384 threads. As many blocks of staged rows are resident, or almost.
template <typename Scalar, bool is_aligned, bool is_add>
constexpr int kFwdBoundThreads = is_add                              ? (is_aligned && sizeof(Scalar) == 4 ? 896 : 768)
                                 : is_aligned || sizeof(Scalar) == 2 ? kFwdMaxThreads
                                                                     : 640;

template <typename Scalar, bool is_aligned, bool is_add>
__global__ void __launch_bounds__((kFwdBoundThreads<Scalar, is_aligned, is_add>), (kFwdMinBlocks<Scalar, is_add>))
    norm_fwd_kernel(const __grid_constant__ NormFwdParams p, const __grid_constant__ FwdPlan plan) {
  using Acc = AccumulateType<Scalar>;
  constexpr int kSize = kVectorSize<Scalar>, kVectors = kVectorsOfThread<Scalar>;
  constexpr bool kIsStaged = !is_aligned && kHasVectorKernels<Scalar>;
  extern __shared__ __align__(kVectorBytes) char fwd_shared[];
  static_assert(kFwdMaxThreads <= kMaxWarps * kWarpSize, "a team's sums pass through one warp");
  __shared__ typename TeamSum<Acc, 1>::Shared shared;
  const Teams& teams = plan.teams;
  TeamSum<Acc, 1> team_sum(shared, teams.lanes);
  const int team = teams.count == 1 ? 0 : threadIdx.x / teams.lanes, lane = threadIdx.x - team * teams.lanes;
  const int stride = teams.lanes * kSize, group_size = static_cast<int>(p.group_size);
  const Acc size = static_cast<Acc>(p.group_size);

  using Stage = std::conditional_t<kIsStaged, FwdStage<Scalar, is_add>, NoStage>;
  const Stage stage(p, plan, fwd_shared, TeamPlace{teams.lanes, lane, team});
  int buffer = 0;

  // The bounds are the same for the whole block, because every thread takes part in the sums.
  using Row = RowIndex<is_aligned>;
  for (Row first = static_cast<Row>(blockIdx.x) * teams.count; first < static_cast<Row>(plan.units);
       first += static_cast<Row>(gridDim.x) * teams.count) {
    const Row unit = first + team;
    const bool is_active = unit < static_cast<Row>(plan.units);
    const Row row = !is_active ? 0 : p.groups == 1 ? unit : divide(unit, static_cast<Row>(p.groups));
    const GroupIndex<Row> index(p, row, is_active ? static_cast<int>(unit - row * static_cast<Row>(p.groups)) : 0);

    GroupValues<Scalar, kVectors, kSize, is_add, is_aligned> group;
    Acc mean = 0, rstd = 0;
    const bool has_vectors = is_aligned || (is_vector_aligned<Scalar>(p.weight, index.first_column) &&
                                            is_vector_aligned<Scalar>(p.bias, index.first_column));
    const auto set_rstd = [&](Acc mean_square) {
      rstd = Acc(1) / Math<Acc>::sqrt(mean_square + static_cast<Acc>(p.eps));
      if (is_active && lane == 0) static_cast<Acc*>(p.rstd)[unit] = rstd;
    };
    // Pass 0 sums v^2 (LayerNorm: v), pass 1 (LayerNorm only) sums (v - mean)^2, pass 2 writes the output.
    const int first_pass = p.group_mean == nullptr ? 0 : 2;
    if (first_pass == 2) set_rstd(is_active ? static_cast<const Acc*>(p.group_mean)[unit] : Acc(0));
    for (int pass = first_pass; pass < 3; ++pass) {
      if (pass == 1 && !p.subtract_mean) continue;
      Acc sum[1] = {0};
      for (int chunk = 0; chunk < teams.chunks; ++chunk) {
        const int first_column = chunk * kVectors * stride + lane * kSize;
        const auto column = [&](int i) { return first_column + i * stride; };
        const auto is_valid = [&](int i) { return is_active && column(i) < group_size; };
        const auto left = [&](int i) { return is_active ? group_size - column(i) : -kSize; };
        const auto offset_of = [&](const RowsView& view, int i) { return index.offset(view) + column(i); };
        const int chunk_column = chunk * kVectors * stride;
        const int count = is_active ? min(group_size - chunk_column, kVectors * stride) : 0;
        const auto chunk_offset = [&](const RowsView& view) { return index.offset(view) + chunk_column; };
        if (pass == first_pass || teams.chunks > 1) {
          if constexpr (kIsStaged) {
            group.load_staged(p, stage, count, chunk_offset, pass == 0);
          } else {
            group.load(p, left, offset_of, pass == 0);
          }
        }
        if (pass < 2) {
#pragma unroll
          for (int i = 0; i < kVectors; ++i) {
            if (!is_valid(i)) continue;
            const auto add = [&](auto has_end) {
#pragma unroll
              for (int j = 0; j < kSize; ++j) {
                const Acc v = !decltype(has_end)::value || j < left(i) ? group.v[i][j] - mean : Acc(0);
                sum[0] = pass == 0 && p.subtract_mean ? sum[0] + v : Math<Acc>::fma(v, v, sum[0]);
              }
            };
            // Beyond the group, v is 0, and v - mean is not.
            if (is_aligned || pass == 0 || left(i) >= kSize) {
              add(std::false_type());
            } else {
              add(std::true_type());
            }
          }
          continue;
        }
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
          if (!is_valid(i)) continue;
          Acc weight[kSize], bias[kSize];
          const bool is_whole = has_vectors && left(i) >= kSize;
          load_parameter_part<Scalar, is_aligned>(p, p.weight, index.first_column + column(i), is_whole, left(i), 1, weight);
          load_parameter_part<Scalar, is_aligned>(p, p.bias, index.first_column + column(i), is_whole, left(i), 0, bias);
#pragma unroll
          for (int j = 0; j < kSize; ++j) group.v[i][j] = Math<Acc>::fma((group.v[i][j] - mean) * rstd, weight[j], bias[j]);
        }
        if constexpr (!is_add) {
          if (p.z.data != nullptr && p.norm_before_gate) group.multiply_by_gate(p.activation);
        }
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
          if constexpr (kIsStaged) {
            stage.x.replace(i, group.v[i], stage.team);
          } else {
            if (is_valid(i)) store_values<Scalar>(p.out, offset_of(p.out, i), group.v[i]);
          }
        }
        if constexpr (kIsStaged) {
          stage.team.sync();
          stage.x.store(p.out.data, chunk_offset(p.out), count, stage.team);
        }
      }
      if (pass == 2) continue;
      team_sum(sum, buffer);
      buffer ^= 1;
      if (p.sums != nullptr) {
        if (is_active && lane == 0) static_cast<Acc*>(p.sums)[unit] = sum[0];
        break;
      }
      if (pass == 0 && p.subtract_mean) {
        mean = sum[0] / size;
        if (is_active && lane == 0) static_cast<Acc*>(p.mean)[unit] = mean;
      } else {
        set_rstd(sum[0] / size);
      }
    }
  }
}

template <typename Scalar>
cudaError_t launch_norm_fwd(const NormFwdParams& params, const FwdPlan& plan, cudaStream_t stream) {
  check_known(params.activation);
  void (*kernel)(NormFwdParams, FwdPlan) =
      params.is_add ? norm_fwd_kernel<Scalar, false, true> : norm_fwd_kernel<Scalar, false, false>;
  if constexpr (kHasVectorKernels<Scalar>) {
    if (plan.rms.rms_case == RmsCase::kNoGateWide) return launch_norm_rms_sum_fwd<Scalar>(params, plan.rms, stream);
    if (plan.rms.rms_case != RmsCase::kNone) return launch_norm_rms_fwd<Scalar>(params, plan.rms, stream);
    if (plan.teams.is_aligned) {
      kernel = params.is_add ? norm_fwd_kernel<Scalar, true, true> : norm_fwd_kernel<Scalar, true, false>;
    }
  }
  const int threads = plan.teams.threads();
  if (const cudaError_t error = cuda::allow_shared_bytes(kernel, plan.shared_bytes); error != cudaSuccess) return error;
  kernel<<<static_cast<unsigned>(plan.blocks), threads, plan.shared_bytes, stream>>>(params, plan);
  return cudaGetLastError();
}

}  // namespace ssm_kernels::norm
