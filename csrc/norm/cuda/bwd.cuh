// Backward of the norms: the general kernels, which take every option. norm.h has the formulas of forward, launch.h the mapping
// to teams, rms_bwd.cuh and rms_short_bwd.cuh faster kernels for the most frequent cases. With y = norm(v) and gy the gradient
// of y weight:
//
//   grad_v = rstd (gy weight - mean(gy weight) - y mean(gy weight y)),  the first mean for LayerNorm alone
//   grad_weight = sum over rows of gy y,  grad_bias = sum over rows of gy
//
// A block keeps its columns and takes every row_blocks-th row. Each thread copies its vectors of x, grad_out and z (add_norm:
// grad_new_residual) kBwdStages - 1 rows ahead into its own stages of shared memory by cp.async, which takes no registers and
// no barrier. It reads a stage twice, for the two means and for the gradients, and computes v, y and the gate both times. The
// two means take one sum over the team. The sums for grad_weight stay in registers and those for grad_bias in shared memory
// until the last row; they then become a row of partial sums, which norm_sum_kernel adds in order.
//
// Without is_aligned, the teams copy rows as aligned pieces, and each lane moves its vectors within the stage before it reads
// them (staged_rows.cuh); gradients pass through the places of inputs. If only one stage has room, it is filled and read in
// turn. A group too long for a block's registers takes a cluster, or chunks that one block reads one after another; it then
// adds each row to the partial sums in global memory.
#pragma once

#include <algorithm>

#include "cuda/launch.cuh"
#include "cuda/partial_sums.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "norm/cuda/bwd_inputs.cuh"
#include "norm/cuda/rms_bwd.cuh"
#include "norm/cuda/rms_short_bwd.cuh"
#include "norm/cuda/row_values.cuh"
#include "norm/cuda/team_sum.cuh"

namespace ssm_kernels::norm {

// Adds the first `count` of a vector of terms to sums in global memory, which the first row initializes.
template <typename Acc, int size>
__device__ __forceinline__ void add_to(Acc* sums, const Acc (&terms)[size], int count, bool is_first) {
#pragma unroll
  for (int j = 0; j < size; ++j) {
    if (j < count) sums[j] = (is_first ? Acc(0) : sums[j]) + terms[j];
  }
}

// Stores the first `count` sums of a vector.
template <bool is_aligned, typename Acc, int size>
__device__ __forceinline__ void store_sums(Acc* target, const Acc (&sums)[size], int count) {
  if constexpr (is_aligned) {
    from_values<Acc>(sums).store(target);
  } else {
#pragma unroll
    for (int j = 0; j < size; ++j) {
      if (j < count) target[j] = sums[j];
    }
  }
}

// A thread's sums for grad_bias, in shared memory: with these sums in registers too, the kernels would spill. Its accesses are
// `distance` bytes apart.
template <typename Acc, int vectors, int size, int distance>
class SharedSums {
 public:
  __device__ __forceinline__ explicit SharedSums(char* first) : first_(first) {}

  __device__ __forceinline__ void clear() {
    const Acc zeros[size] = {};
#pragma unroll
    for (int i = 0; i < vectors; ++i) store(i, zeros);
  }
  __device__ __forceinline__ void add(int i, const Acc (&terms)[size]) {
    Acc values[size];
    load(i, values);
#pragma unroll
    for (int j = 0; j < size; ++j) values[j] += terms[j];
    store(i, values);
  }
  __device__ __forceinline__ void load(int i, Acc (&values)[size]) const {
#pragma unroll
    for (int j = 0; j < size; j += kPart) {
      const auto part = Vector<Acc, kPart>::load(address(i, j));
#pragma unroll
      for (int k = 0; k < kPart; ++k) values[j + k] = part[k];
    }
  }

 private:
  static constexpr int kPart = size / kSumAccesses<Acc, size>;  // sums of an access

  __device__ __forceinline__ Acc* address(int i, int j) const {
    return reinterpret_cast<Acc*>(first_ + (i * kSumAccesses<Acc, size> + j / kPart) * distance);
  }
  __device__ __forceinline__ void store(int i, const Acc (&values)[size]) {
#pragma unroll
    for (int j = 0; j < size; j += kPart) {
      Acc part[kPart];
#pragma unroll
      for (int k = 0; k < kPart; ++k) part[k] = values[j + k];
      from_values<Acc>(part).store(address(i, j));
    }
  }

  char* first_;
};

template <typename Scalar, bool is_aligned, bool is_add>
__global__ void __launch_bounds__(kBwdMaxThreads, 1)
    norm_bwd_kernel(const __grid_constant__ NormBwdParams p, const __grid_constant__ BwdPlan plan) {
  using Acc = AccumulateType<Scalar>;
  constexpr bool kIsStaged = !is_aligned && kHasVectorKernels<Scalar>, kMayCluster = kHasVectorKernels<Scalar>;
  using Inputs = std::conditional_t<kIsStaged, StagedBwdInputs<Scalar, is_add>, BwdInputs<Scalar, is_aligned, is_add>>;
  constexpr int kSize = Inputs::kSize, kVectors = Inputs::kVectors;
  static_assert(kBwdStages <= TeamSum<Acc, 2>::kBuffers, "the number of a stage selects a buffer of the sums");
  static_assert(kBwdMaxThreads <= kMaxWarps * kWarpSize, "a team's sums pass through one warp");
  extern __shared__ __align__(kVectorBytes) char records[];
  __shared__ typename TeamSum<Acc, 2>::Shared shared_sums;
  const Teams& teams = plan.teams;
  const int blocks = kMayCluster ? teams.cluster : 1, rank = kMayCluster ? blockIdx.x % blocks : 0;
  if (blocks > 1) cuda::cluster_barrier();  // the shared memory of all blocks can be written to from here on
  TeamSum<Acc, 2> team_sum(shared_sums, teams.lanes);
  const int team = teams.count == 1 ? 0 : threadIdx.x / teams.lanes, lane = threadIdx.x - team * teams.lanes;
  char* const record = records + (kIsStaged ? 0 : threadIdx.x * plan.record_bytes);
  const TeamPlace team_place{teams.lanes, lane, team};
  Inputs inputs(p, plan, record, team_place);
  const int row_team = team / plan.group_teams;
  const int block = blockIdx.x / blocks;
  const int row_block = block / plan.column_blocks, column_block = block - row_block * plan.column_blocks;
  const int group = column_block * plan.group_teams + (team - row_team * plan.group_teams);
  const int partial = row_block * plan.row_teams + row_team;
  const bool has_group = group < p.groups, is_single = is_aligned || teams.chunks <= blocks;
  const int stride = teams.lanes * kSize, group_size = static_cast<int>(p.group_size);
  const Acc size = static_cast<Acc>(p.group_size);
  // Aligned blocks have one chunk each.
  const int chunks = is_aligned ? rank + 1 : teams.chunks, chunk_step = is_aligned ? 1 : blocks;
  const int gradient_chunks = p.sums == nullptr ? chunks : 0;
  const bool has_gate = !is_add && p.z.data != nullptr, gate_before = has_gate && !p.norm_before_gate;

  const int first_column = group * group_size;
  const bool has_vectors =
      is_aligned || (is_vector_aligned<Scalar>(p.weight, first_column) && is_vector_aligned<Scalar>(p.bias, first_column));

  using Row = RowIndex<is_aligned>;
  const auto is_active = [&](Row row) { return has_group && row < static_cast<Row>(p.rows()); };
  const auto column = [&](int chunk, int i) { return (chunk * kVectors + i) * stride + lane * kSize; };
  const auto left = [&](int chunk, int i) { return group_size - column(chunk, i); };
  const auto chunk_column = [&](int chunk) { return chunk * kVectors * stride; };
  const auto chunk_columns = [&](int chunk) { return min(group_size - chunk_column(chunk), kVectors * stride); };
  const auto partial_offset = [&](int first_column) {
    return partial * p.columns() + group * static_cast<int>(p.group_size) + first_column;
  };

  const auto copy = [&](Row row, int chunk, int stage) {
    if (is_active(row)) {
      const GroupIndex<Row> index(p, row, group);
      if constexpr (kIsStaged) {
        inputs.copy(stage, chunk_columns(chunk),
                    [&](const RowsView& view) { return index.offset(view) + chunk_column(chunk); });
      } else {
        const auto offset_of = [&](const RowsView& view, int i) { return index.offset(view) + column(chunk, i); };
        inputs.copy(stage, [&](int i) { return column(chunk, i) < group_size; }, offset_of);
      }
    }
    cuda::cp_async_commit();
  };
  // Staged rows: fills a single stage.
  const auto fill = [&](Row row, int chunk) {
    team_place.sync();  // all lanes have read the stage
    copy(row, chunk, 0);
    cuda::cp_async_wait<0>();
    team_place.sync();
  };
  const int stages = is_aligned ? kBwdStages : plan.stages;
  if constexpr (is_aligned || kIsStaged) {
    for (int i = 0; i < stages - 1; ++i) copy(partial + i * plan.partials, rank, i);
  }
  int stage = 0, buffer = 0;  // of the row; of the sums, unless is_aligned

  Acc sum_weight[kVectors][kSize] = {};
  SharedSums<Acc, kVectors, kSize, kIsStaged ? kWarpSize * kVectorBytes : kVectorBytes> sum_bias(
      record + (kIsStaged ? plan.stages * plan.stage_bytes + threadIdx.x / kWarpSize * kWarpSize * plan.sum_bytes +
                                threadIdx.x % kWarpSize * kVectorBytes
                          : kBwdStages * plan.stage_accesses * kVectorBytes));
  const bool sums_bias = is_single && p.partial_bias != nullptr;
  if (sums_bias) sum_bias.clear();
  const auto statistic = [&](const void* values, Row row) {
    return is_active(row) ? static_cast<const Acc*>(values)[row * p.groups + group] : Acc(0);
  };
  Acc next_rstd = statistic(p.rstd, partial), next_mean = p.subtract_mean ? statistic(p.mean, partial) : Acc(0);

  // The bounds are the same for the whole block, because every thread takes part in the sums.
  for (Row row = partial; row - partial < static_cast<Row>(p.rows()); row += plan.partials) {
    if constexpr (kIsStaged) inputs.select(stage);
    const bool active = is_active(row);
    const GroupIndex<Row> index(p, row, group);
    const Acc rstd = next_rstd, mean = next_mean;
    next_rstd = statistic(p.rstd, row + plan.partials);
    if (p.subtract_mean) next_mean = statistic(p.mean, row + plan.partials);

    if constexpr (is_aligned) {
      // Refills the stage of the previous row, which only this thread reads.
      copy(row + (kBwdStages - 1) * plan.partials, rank, stage == 0 ? kBwdStages - 1 : stage - 1);
      cuda::cp_async_wait<kBwdStages - 1>();
    } else if (kIsStaged && stages > 1) {
      if (stages == kBwdStages) {
        cuda::cp_async_wait<kBwdStages - 2>();
      } else {
        cuda::cp_async_wait<0>();
      }
      team_place.sync();  // the row is visible, and all lanes have read the stage of the previous one
      copy(row + (stages - 1) * plan.partials, rank, stage == 0 ? stages - 1 : stage - 1);
    }

    Acc sums[2] = {0, 0};  // gy weight y and gy weight
    for (int chunk = rank; chunk < chunks; chunk += chunk_step) {
      if constexpr (kIsStaged) {
        if (stages == 1) fill(row, chunk);
        inputs.align([&](const RowsView& view) { return index.offset(view) + chunk_column(chunk); });
      }
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        if (!active || column(chunk, i) >= group_size) continue;
        const auto offset_of = [&](const RowsView& view, int) { return index.offset(view) + column(chunk, i); };
        Acc v[kSize], gy[kSize], weight[kSize];  // weight is needed last and loaded last, to save registers
        inputs.read(v, kX, stage, i, offset_of);
        inputs.read(gy, kGradOut, stage, i, offset_of);
        if constexpr (!is_add) {
          if (has_gate) {
            Acc z[kSize];
            inputs.read(z, kThird, stage, i, offset_of);
            visit_activation(p.activation, [&](auto gate) {
#pragma unroll
              for (int j = 0; j < kSize; ++j) z[j] = gate.value(z[j]);
            });
#pragma unroll
            for (int j = 0; j < kSize; ++j) {
              if (gate_before) {
                v[j] *= z[j];
              } else {
                gy[j] *= z[j];
              }
            }
          }
        }
        const bool is_whole = has_vectors && left(chunk, i) >= kSize;
        load_parameter_part<Scalar, is_aligned>(p, p.weight, index.first_column + column(chunk, i), is_whole, left(chunk, i), 1,
                                                weight);
        Acc y[kSize];
#pragma unroll
        for (int j = 0; j < kSize; ++j) {
          const Acc gw = gy[j] * weight[j];
          y[j] = (v[j] - mean) * rstd;
          sums[0] = Math<Acc>::fma(gw, y[j], sums[0]);
          sums[1] += gw;
        }
        if (is_single) {
#pragma unroll
          for (int j = 0; j < kSize; ++j) sum_weight[i][j] = Math<Acc>::fma(gy[j], y[j], sum_weight[i][j]);
          if (sums_bias) sum_bias.add(i, gy);
        } else {
          Acc terms[kSize];
#pragma unroll
          for (int j = 0; j < kSize; ++j) terms[j] = gy[j] * y[j];
          const int64_t offset = partial_offset(column(chunk, i));
          if (p.partial_weight != nullptr)
            add_to(static_cast<Acc*>(p.partial_weight) + offset, terms, left(chunk, i), row == partial);
          if (p.partial_bias != nullptr) add_to(static_cast<Acc*>(p.partial_bias) + offset, gy, left(chunk, i), row == partial);
        }
      }
    }
    if (blocks == 1) team_sum(sums, is_aligned ? stage : buffer);
    if constexpr (kMayCluster) {
      if (blocks > 1) {
        auto& shared = *reinterpret_cast<ClusterSum<2>::Shared*>(records + plan.sums_offset());
        ClusterSum<2>::add(shared, sums, buffer, blocks, teams.lanes / kWarpSize);
      }
    }
    buffer ^= 1;
    if (p.sums != nullptr && active && lane == 0 && rank == 0) static_cast<Acc*>(p.sums)[row * p.groups + group] = sums[0];
    const Acc mean_gwy = p.group_mean != nullptr ? statistic(p.group_mean, row) : sums[0] / size;
    const Acc mean_gw = p.subtract_mean ? sums[1] / size : Acc(0);

    for (int chunk = rank; chunk < gradient_chunks; chunk += chunk_step) {
      if constexpr (kIsStaged) {
        if (!is_single) {
          fill(row, chunk);
          inputs.align([&](const RowsView& view) { return index.offset(view) + chunk_column(chunk); });
        }
      }
      // The gradients of vector i, from the thread or, staged, to the places of inputs.
      const auto store = [&](BwdInput input, const RowsView& view, int64_t offset, int i, const Acc(&grad)[kSize]) {
        if (view.data == nullptr) return;
        if constexpr (kIsStaged) {
          if (input == kGradOut || inputs.stages_second(view)) return inputs.replace(input, i, grad);
          store_shifted_values<Scalar>(view, offset, left(chunk, i), grad);
        } else {
          store_values<Scalar>(view, offset, grad);
        }
      };
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        if (!active || column(chunk, i) >= group_size) continue;
        const auto offset_of = [&](const RowsView& view, int) { return index.offset(view) + column(chunk, i); };
        const int parameter_offset = index.first_column + column(chunk, i);
        const bool is_whole = has_vectors && left(chunk, i) >= kSize;
        Acc x[kSize], g[kSize], weight[kSize];
        inputs.read(x, kX, stage, i, offset_of);
        inputs.read(g, kGradOut, stage, i, offset_of);
        if constexpr (is_add) {
          load_parameter_part<Scalar, is_aligned>(p, p.weight, parameter_offset, is_whole, left(chunk, i), 1, weight);
          Acc grad[kSize];
#pragma unroll
          for (int j = 0; j < kSize; ++j) grad[j] = rstd * (g[j] * weight[j] - mean_gw - (x[j] - mean) * rstd * mean_gwy);
          if (p.grad_new_residual.data != nullptr) {
            inputs.read(x, kThird, stage, i, offset_of);
#pragma unroll
            for (int j = 0; j < kSize; ++j) grad[j] += x[j];
          }
          store(kGradOut, p.grad_x, offset_of(p.grad_x, i), i, grad);
          store(kX, p.grad_residual, offset_of(p.grad_residual, i), i, grad);
        } else {
          Acc a[kSize], slope[kSize];
          if (has_gate) {
            inputs.read(a, kThird, stage, i, offset_of);
            visit_activation(p.activation, [&](auto gate) {
#pragma unroll
              for (int j = 0; j < kSize; ++j) {
                const Gate<Acc> both = gate.with_derivative(a[j]);
                a[j] = both.value;
                slope[j] = both.derivative;
              }
            });
          } else {
#pragma unroll
            for (int j = 0; j < kSize; ++j) {
              a[j] = 1;
              slope[j] = 0;
            }
          }
          load_parameter_part<Scalar, is_aligned>(p, p.weight, parameter_offset, is_whole, left(chunk, i), 1, weight);
          // One copy per order of gate and norm: the orders share few values, and a joint copy would spill.
          const auto differentiate = [&](auto before) {
            constexpr bool kBefore = decltype(before)::value;
            Acc grad_x[kSize];
#pragma unroll
            for (int j = 0; j < kSize; ++j) {
              const Acc y = ((kBefore ? x[j] * a[j] : x[j]) - mean) * rstd;
              const Acc grad_v = rstd * ((kBefore ? g[j] : g[j] * a[j]) * weight[j] - mean_gw - y * mean_gwy);
              grad_x[j] = kBefore ? grad_v * a[j] : grad_v;
              slope[j] *= kBefore ? grad_v * x[j] : g[j];
              if (!kBefore) x[j] = y * weight[j];
            }
            store(kGradOut, p.grad_x, offset_of(p.grad_x, i), i, grad_x);
            if (kBefore || p.grad_z.data == nullptr) return;
            load_parameter_part<Scalar, is_aligned>(p, p.bias, parameter_offset, is_whole, left(chunk, i), 0, weight);
#pragma unroll
            for (int j = 0; j < kSize; ++j) slope[j] *= x[j] + weight[j];
          };
          if (gate_before) {
            differentiate(std::true_type());
          } else {
            differentiate(std::false_type());
          }
          store(kX, p.grad_z, offset_of(p.grad_z, i), i, slope);
        }
      }
      if constexpr (kIsStaged) {
        team_place.sync();
        const RowsView& second = is_add ? p.grad_residual : p.grad_z;
        if (active) {
          const auto store_all = [&](BwdInput input, const RowsView& view) {
            inputs.store(input, view, index.offset(view) + chunk_column(chunk), chunk_columns(chunk));
          };
          if (p.grad_x.data != nullptr) store_all(kGradOut, p.grad_x);
          if (second.data != nullptr && inputs.stages_second(second)) store_all(kX, second);
        }
      }
    }
    if (is_aligned || kIsStaged) stage = stage == stages - 1 ? 0 : stage + 1;
  }

  if (!is_single || !has_group) return;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    if (column(rank, i) >= group_size) continue;
    const int64_t offset = partial_offset(column(rank, i));
    const int count = left(rank, i);
    if (p.partial_weight != nullptr) {
      store_sums<is_aligned>(static_cast<Acc*>(p.partial_weight) + offset, sum_weight[i], count);
    }
    if (sums_bias) {
      Acc values[kSize];
      sum_bias.load(i, values);
      store_sums<is_aligned>(static_cast<Acc*>(p.partial_bias) + offset, values, count);
    }
  }
}

// Partial sums of up to two parameters' gradients, (rows, columns) each, and the gradients.
struct SumParams {
  const void* partials[2];
  ParameterView targets[2];
  ScalarKind kind;                // of a target that is not of the accumulation type
  int64_t rows, columns, blocks;  // blocks per target
};

// There are few columns and a row of partial sums per resident block of backward.
using BlockSums = cuda::PartialSums</*columns=*/8, /*rows=*/64, /*loads=*/16>;

template <typename Acc>
__global__ void __launch_bounds__(BlockSums::kThreads, sizeof(Acc) == 4 ? 3 : 1)
    norm_sum_kernel(const __grid_constant__ SumParams p) {
  const int which = blockIdx.x >= p.blocks;
  const Acc* const partials = static_cast<const Acc*>(p.partials[which]);
  BlockSums::add(partials, p.rows, p.columns, blockIdx.x - which * p.blocks, [&](int64_t column, Acc sum) {
    void* const target = p.targets[which].data;
    if (p.targets[which].is_accumulate) {
      static_cast<Acc*>(target)[column] = sum;
    } else if constexpr (std::is_same_v<Acc, float>) {
      if (p.kind == ScalarKind::kHalf) {
        static_cast<__half*>(target)[column] = from_accumulate<__half>(sum);
      } else {
        static_cast<__nv_bfloat16*>(target)[column] = from_accumulate<__nv_bfloat16>(sum);
      }
    }
  });
}

template <typename Scalar>
int count_norm_bwd_clusters(const NormBwdParams& params, const BwdPlan& plan) {
  auto kernel = params.is_add ? norm_bwd_kernel<Scalar, false, true> : norm_bwd_kernel<Scalar, false, false>;
  if (plan.teams.is_aligned) {
    kernel = params.is_add ? norm_bwd_kernel<Scalar, true, true> : norm_bwd_kernel<Scalar, true, false>;
  }
  return cuda::resident_clusters(kernel, plan.teams.threads(), plan.shared_bytes(), plan.teams.cluster);
}

template <typename Scalar>
cudaError_t launch_norm_bwd(const NormBwdParams& params, const BwdPlan& plan, cudaStream_t stream) {
  check_known(params.activation);
  void (*kernel)(NormBwdParams, BwdPlan) =
      params.is_add ? norm_bwd_kernel<Scalar, false, true> : norm_bwd_kernel<Scalar, false, false>;
  if constexpr (kHasVectorKernels<Scalar>) {
    if (plan.rms.rms_case != RmsCase::kNone) return launch_norm_rms_bwd<Scalar>(params, plan.rms, stream);
    if (plan.teams.is_aligned) {
      kernel = params.is_add ? norm_bwd_kernel<Scalar, true, true> : norm_bwd_kernel<Scalar, true, false>;
    }
  }
  if constexpr (kHasVectorKernels<Scalar> && sizeof(Scalar) == 2) {
    if (takes_short_rows(params, plan.teams)) kernel = norm_rms_short_bwd_kernel<Scalar>;
  }
  const int shared_bytes = plan.shared_bytes();
  if (const cudaError_t error = cuda::allow_shared_bytes(kernel, shared_bytes); error != cudaSuccess) return error;
  const int cluster = plan.teams.cluster;
  const int64_t blocks = static_cast<int64_t>(plan.row_blocks) * plan.column_blocks * cluster;
  return cuda::launch_clusters(kernel, blocks, plan.teams.threads(), shared_bytes, cluster, stream, params, plan);
}

template <typename Acc>
cudaError_t launch_norm_sum(const NormBwdParams& params, cudaStream_t stream) {
  SumParams sum{{}, {}, params.kind, params.partials, params.columns(), BlockSums::blocks(params.columns())};
  int targets = 0;
  const auto add = [&](const ParameterView& target, const void* partials) {
    if (target.data == nullptr) return;
    sum.targets[targets] = target;
    sum.partials[targets++] = partials;
  };
  add(params.grad_weight, params.partial_weight);
  add(params.grad_bias, params.partial_bias);
  if (targets == 0) return cudaSuccess;
  norm_sum_kernel<Acc><<<static_cast<unsigned>(targets * sum.blocks), BlockSums::kThreads, 0, stream>>>(sum);
  return cudaGetLastError();
}

}  // namespace ssm_kernels::norm
