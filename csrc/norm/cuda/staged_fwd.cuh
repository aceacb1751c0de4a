// Forward of the norms whose rows start and end at any element, or whose groups have more columns than the registers of a
// block: every option of fwd.cuh, through shared memory. fwd.cuh has the formulas.
//
// Persistent blocks. A team takes every (blocks * teams)-th group, and where these have the same columns, each lane keeps its
// parameters in shared memory, widened and aligned. Groups are copied to images of spans (spans.cuh), one group ahead where two
// stages have room, so that memory is busy while a team computes and waits for its sums. Teams of less than a warp move the
// warp's groups as one span where these follow each other in memory. An output takes the place of an input that has been read,
// kVectorBytes before the place of the input's columns: what a chunk writes then ends before the next chunk's input. Columns
// belong to lanes as in the aligned kernel, and sums have the same order.
//
// Groups that do not fit into shared memory are copied in chunks, again by each pass.
#pragma once

#include "norm/cuda/device.cuh"
#include "norm/cuda/spans.cuh"
#include "norm/cuda/staged_rows.cuh"

namespace ssm_kernels::norm {

// The span of a tensor that a lane helps to move: that of its team, or of its warp's teams. `image` is the number of the image,
// `own` the number of elements from the span's start to the team's columns.
struct SpanPlace {
  int64_t offset;
  int count, image, own;
  SpanLane lane;
};

template <typename Scalar, bool is_add>
__global__ void __launch_bounds__(kStagedFwdBoundThreads, 1)
    norm_staged_fwd_kernel(const __grid_constant__ NormFwdParams p, const __grid_constant__ FwdPlan plan) {
  using Wide = float;
  constexpr int kSize = kVectorSize<Scalar>, kVectors = kVectorsOfThread<Scalar>;
  constexpr bool kMayBeWide = is_add && !std::is_same_v<Scalar, Wide>;
  extern __shared__ __align__(kVectorBytes) char fwd_shared[];
  __shared__ typename TeamSum<float, 1>::Shared shared;
  const Teams& teams = plan.teams;
  const StagedFwd& staged = plan.staged;
  TeamSum<float, 1> team_sum(shared, teams.lanes);
  const int team = teams.count == 1 ? 0 : threadIdx.x / teams.lanes, lane = threadIdx.x - team * teams.lanes;
  const TeamPlace place{teams.lanes, lane, team};
  const bool is_small = teams.lanes < kWarpSize;
  const int span_teams = is_small ? kWarpSize / teams.lanes : 1;
  const int team_in_span = is_small ? threadIdx.x % kWarpSize / teams.lanes : 0;
  const int stride = teams.lanes * kSize, chunk_stride = kVectors * stride, group_size = static_cast<int>(p.group_size);
  const float size = static_cast<float>(p.group_size);
  const bool is_resident = staged.image_chunks == teams.chunks, prefetches = staged.stages > 1;
  const RowsView& second = is_add ? p.residual : p.z;
  const bool has_gate = !is_add && p.z.data != nullptr;

  // A team's group. Those after the last one have no columns.
  struct Unit {
    int64_t unit, row;
    GroupIndex<int64_t> index;
  };
  const auto is_active = [&](const Unit& at) { return at.unit < plan.units; };
  const auto locate = [&](int64_t unit) {
    const int64_t row = p.groups == 1 ? unit : divide(unit, p.groups);
    return Unit{unit, row, GroupIndex<int64_t>(p, row, static_cast<int>(unit - row * p.groups))};
  };
  const int64_t step = static_cast<int64_t>(gridDim.x) * teams.count;
  const auto next_of = [&](const Unit& at) {
    if (!staged.keeps_columns) return locate(at.unit + step);
    const int64_t row = at.row + staged.row_step;
    Unit next{at.unit + step, row, GroupIndex<int64_t>(p, row, 0)};
    next.index.first_column = at.index.first_column;
    return next;
  };
  // `begin`: the group's first column in the images, 0 if these have all chunks.
  const auto span_of = [&](const RowsView& view, bool is_flat, const Unit& at, int begin) {
    if (is_small && is_flat) {
      const int64_t first = at.unit - team_in_span, left = plan.units - first;
      const int groups = left < span_teams ? max(static_cast<int>(left), 0) : span_teams;
      return SpanPlace{first * group_size, groups * group_size, team - team_in_span, team_in_span * group_size,
                       SpanLane{static_cast<int>(threadIdx.x % kWarpSize), kWarpSize}};
    }
    const int columns = is_resident ? group_size : min(group_size - begin, chunk_stride);
    return SpanPlace{at.index.offset(view) + begin, is_active(at) ? columns : 0, team, 0, SpanLane{lane, teams.lanes}};
  };
  // Calls the function with a null pointer to the type of a tensor's elements.
  const auto visit_width = [&](bool is_accumulate, const auto& function) {
    if constexpr (kMayBeWide) {
      if (is_accumulate) return function(static_cast<Wide*>(nullptr));
    }
    function(static_cast<Scalar*>(nullptr));
  };

  const auto copy = [&](const RowsView& view, bool is_flat, char* images, int pitch, const Unit& at, int begin) {
    const SpanPlace span = span_of(view, is_flat, at, begin);
    visit_width(view.is_accumulate, [&](auto* element) {
      using Element = std::decay_t<decltype(*element)>;
      Span<Element>::copy(images + span.image * pitch + kVectorBytes, static_cast<const Element*>(view.data) + span.offset,
                          span.count, span.lane);
    });
  };
  const auto copy_inputs = [&](int stage, const Unit& at, int begin) {
    char* const images = fwd_shared + stage * staged.stage_bytes;
    copy(p.x, staged.is_flat[StagedFwd::kX], images, staged.narrow_pitch, at, begin);
    if (second.data != nullptr) {
      copy(second, staged.is_flat[StagedFwd::kSecond], images + staged.second_images, staged.second_pitch, at, begin);
    }
  };
  // The columns of a team in an image of an input, or `before` it in that of an output.
  const auto own = [&](const RowsView& view, const SpanPlace& span, char* images, int pitch, int element_bytes, int lead) {
    const auto address = reinterpret_cast<uintptr_t>(view.data) + static_cast<uintptr_t>(span.offset) * element_bytes;
    return images + span.image * pitch + lead + static_cast<int>(address & (kVectorBytes - 1)) + span.own * element_bytes;
  };

  const StagedParameters<Scalar, kVectors, kSize> parameters(p, p.bias, fwd_shared + staged.stages * staged.stage_bytes);
  int64_t first = static_cast<int64_t>(blockIdx.x) * teams.count;
  Unit at = locate(first + team);
  if (prefetches) {
    copy_inputs(0, at, 0);
    cuda::cp_async_commit();
  }
  bool has_parameters = false;
  int stage = 0, buffer = 0;
  // The bounds are the same for the whole block, because every thread takes part in the sums.
  for (; first < plan.units; first += step) {
    const bool active = is_active(at);
    char* const x_images = fwd_shared + stage * staged.stage_bytes;
    char* const second_images = x_images + staged.second_images;
    char* const residual_images = x_images + staged.new_residual_images;
    const auto column = [&](int chunk, int i) { return chunk * chunk_stride + i * stride + lane * kSize; };
    const auto left = [&](int chunk, int i) { return active ? group_size - column(chunk, i) : 0; };

    float mean = 0, rstd = 0, v[kVectors][kSize];
    const auto set_rstd = [&](float mean_square) {
      rstd = 1.0f / Math<float>::sqrt(mean_square + static_cast<float>(p.eps));
      if (active && lane == 0) static_cast<float*>(p.rstd)[at.unit] = rstd;
    };
    // Reads vector i of a tensor; columns beyond the group are 0.
    const auto read = [&](const RowsView& view, const SpanPlace& span, char* images, int pitch, int i, int in_image,
                          float (&values)[kSize]) {
      visit_width(view.is_accumulate, [&](auto* element) {
        using Element = std::decay_t<decltype(*element)>;
        const char* const source = own(view, span, images, pitch, sizeof(Element), kVectorBytes) +
                                   (in_image + i * stride + lane * kSize) * static_cast<int>(sizeof(Element));
        const bool is_whole = !is_small && cuda::bytes_past_multiple<kVectorBytes>(source) == 0;
        to_values(Span<Element>::template load<kSize>(source, is_whole), values);
      });
    };
    // Pass 0 sums v^2 (LayerNorm: v), pass 1 (LayerNorm only) sums (v - mean)^2, pass 2 writes the output.
    const int first_pass = p.group_mean == nullptr ? 0 : 2;
    if (first_pass == 2) set_rstd(active ? static_cast<const float*>(p.group_mean)[at.unit] : 0.0f);
    for (int pass = first_pass; pass < 3; ++pass) {
      if (pass == 1 && !p.subtract_mean) continue;
      float sum[1] = {0};
      for (int chunk = 0; chunk < teams.chunks; ++chunk) {
        const int begin = is_resident ? 0 : chunk * chunk_stride, in_image = chunk * chunk_stride - begin;
        const int slot = is_resident ? chunk : 0;
        const bool reads = pass == first_pass || teams.chunks > 1;
        const bool begins = pass == first_pass && chunk == 0;
        if (is_resident ? pass == first_pass && !has_parameters : pass == 2) {
          parameters.fill(slot, at.index.first_column, group_size, [&](int i) { return column(chunk, i); });
        }
        if (begins && prefetches) {
          cuda::cp_async_wait<0>();
          place.sync();  // the group is visible, and the images of the previous one have been stored
          copy_inputs(stage ^ 1, next_of(at), 0);
          cuda::cp_async_commit();
        } else if (begins || !is_resident) {
          place.sync();  // all lanes have read the images
          copy_inputs(0, at, begin);
          cuda::cp_async_wait();
          place.sync();
        }
        const SpanPlace second_span = span_of(second, staged.is_flat[StagedFwd::kSecond], at, begin);
        if (reads) {
          const SpanPlace x_span = span_of(p.x, staged.is_flat[StagedFwd::kX], at, begin);
#pragma unroll
          for (int i = 0; i < kVectors; ++i) {
            read(p.x, x_span, x_images, staged.narrow_pitch, i, in_image, v[i]);
            if constexpr (is_add) {
              if (p.residual.data != nullptr) {
                float residual[kSize];
                read(p.residual, second_span, second_images, staged.second_pitch, i, in_image, residual);
#pragma unroll
                for (int j = 0; j < kSize; ++j) v[i][j] += residual[j];
              }
              // add_norm normalizes the new residual as rounded to its dtype.
              if (!p.new_residual.is_accumulate) to_values(from_values<Scalar>(v[i]), v[i]);
            } else if (has_gate && !p.norm_before_gate) {
              float z[kSize];
              read(p.z, second_span, second_images, staged.second_pitch, i, in_image, z);
              visit_activation(p.activation, [&](auto gate) {
#pragma unroll
                for (int j = 0; j < kSize; ++j) v[i][j] = __fmul_rn(v[i][j], gate.value(z[j]));
              });
            }
            if (left(chunk, i) < kSize) {
#pragma unroll
              for (int j = 0; j < kSize; ++j) v[i][j] = j < left(chunk, i) ? v[i][j] : 0.0f;
            }
          }
        }
        if (pass < 2) {
#pragma unroll
          for (int i = 0; i < kVectors; ++i) {
            float terms[kSize];
#pragma unroll
            for (int j = 0; j < kSize; ++j) terms[j] = v[i][j] - mean;
            if (pass == 1 && left(chunk, i) < kSize) {
#pragma unroll
              for (int j = 0; j < kSize; ++j) terms[j] = j < left(chunk, i) ? terms[j] : 0.0f;
            }
#pragma unroll
            for (int j = 0; j < kSize; ++j) {
              sum[0] = pass == 0 && p.subtract_mean ? sum[0] + terms[j] : Math<float>::fma(terms[j], terms[j], sum[0]);
            }
          }
          continue;
        }
        // Outputs take the places of inputs, which the last sum's barrier separates from their reads only in one chunk.
        if (is_small || teams.lanes == kWarpSize || teams.chunks > 1 || first_pass == 2) place.sync();
        const SpanPlace out_span = span_of(p.out, staged.is_flat[StagedFwd::kOut], at, begin);
        const SpanPlace residual_span = span_of(p.new_residual, staged.is_flat[StagedFwd::kNewResidual], at, begin);
        const auto write = [&](const RowsView& view, const SpanPlace& span, char* images, int pitch, int i,
                               const float (&values)[kSize]) {
          visit_width(view.is_accumulate, [&](auto* element) {
            using Element = std::decay_t<decltype(*element)>;
            char* const target = own(view, span, images, pitch, sizeof(Element), 0) +
                                 (in_image + i * stride + lane * kSize) * static_cast<int>(sizeof(Element));
            const bool is_whole = !is_small && cuda::bytes_past_multiple<kVectorBytes>(target) == 0;
            Span<Element>::write(target, from_values<Element>(values), is_whole);
          });
        };
        // A group's last vector may be written beyond its end, where the first vector of the next group follows. The last
        // vector is never a lane's first one if the groups of a warp share a span, and lanes write their first vectors last.
#pragma unroll
        for (int i = kVectors - 1; i >= 0; --i) {
          float weight[kSize], bias[kSize], out[kSize];
          parameters.load_weight(slot, i, weight);
          parameters.load_bias(slot, i, bias);
#pragma unroll
          for (int j = 0; j < kSize; ++j) out[j] = Math<float>::fma((v[i][j] - mean) * rstd, weight[j], bias[j]);
          if constexpr (!is_add) {
            if (has_gate && p.norm_before_gate) {
              float z[kSize];
              read(p.z, second_span, second_images, staged.second_pitch, i, in_image, z);
              visit_activation(p.activation, [&](auto gate) {
#pragma unroll
                for (int j = 0; j < kSize; ++j) out[j] *= gate.value(z[j]);
              });
            }
          }
          if (is_small) __syncwarp();
          if (left(chunk, i) <= 0) continue;
          write(p.out, out_span, x_images, staged.narrow_pitch, i, out);
          if constexpr (is_add) {
            write(p.new_residual, residual_span, residual_images, staged.new_residual_pitch, i, v[i]);
          }
        }
        if (is_resident && chunk < teams.chunks - 1) continue;
        place.sync();
        const auto store = [&](const RowsView& view, const SpanPlace& span, char* images, int pitch) {
          visit_width(view.is_accumulate, [&](auto* element) {
            using Element = std::decay_t<decltype(*element)>;
            Span<Element>::store(static_cast<Element*>(view.data) + span.offset, images + span.image * pitch, span.count,
                                 span.lane);
          });
        };
        store(p.out, out_span, x_images, staged.narrow_pitch);
        if constexpr (is_add) store(p.new_residual, residual_span, residual_images, staged.new_residual_pitch);
      }
      if (pass == 2) continue;
      team_sum(sum, buffer);
      buffer ^= 1;
      if (p.sums != nullptr) {
        if (active && lane == 0) static_cast<float*>(p.sums)[at.unit] = sum[0];
        break;
      }
      if (pass == 0 && p.subtract_mean) {
        mean = sum[0] / size;
        if (active && lane == 0) static_cast<float*>(p.mean)[at.unit] = mean;
      } else {
        set_rstd(sum[0] / size);
      }
    }
    has_parameters = staged.keeps_columns;
    if (prefetches) stage ^= 1;
    at = next_of(at);
  }
}

}  // namespace ssm_kernels::norm
