// The step kernel: selective state update of one token whose A has dstate values a row, as in Mamba-1.
//
// A lane holds a vector of each of its rows, and a group of lanes (launch.h) one row or kRowsInFlight rows. A warp takes
// neighboring channels of one row of the batch, and neighboring warps the same channels of other rows of the batch: they
// share A in the first-level cache. A small step lasts as long as its chain of latencies, a large one as long as its
// instructions and its state take, therefore
// * StepParams has few bytes, because each multiprocessor waits for them, and 32-bit strides,
// * every load is issued before the first value is used, and only a slot's index delays the load of a state,
// * options are bits of one word, and the lanes load a row at once, except by elements,
// * of four rows, lane j owns row j % 4: it computes the step size and the gate, and writes the output.
// * the kernel starts while the previous one ends (PDL), and does all that reads no tensor.
// With one row, more warps share a small step, and each lane computes the scalars of its row. The order of a sum is that of the
// other kernels (update.cuh): the elements of a vector in turn, then exchanges between lanes at distances 2, 1, 4, 8 and 16.
#pragma once

#include <cstring>
#include <type_traits>

#include "common/activations.h"
#include "common/discretization.h"
#include "cuda/index_math.cuh"
#include "cuda/launch.cuh"
#include "cuda/ptx/pdl.cuh"
#include "cuda/ptx/prefetch.cuh"
#include "cuda/vector_io.cuh"
#include "selective_state_update/cuda/launch.h"
#include "selective_state_update/cuda/rows.cuh"

namespace ssm_kernels::selective_state_update {

using cuda::prefetch;

// Returns the value unchanged, after all loads before: without it the compiler converts one of the first values, and so waits
// for it, before it issues the loads of branches that follow.
template <typename T>
__device__ __forceinline__ T after_loads(T value) {
  if constexpr (sizeof(T) == 2) {
    unsigned short bits;
    memcpy(&bits, &value, sizeof(T));
    asm volatile("" : "+h"(bits)::"memory");
    memcpy(&value, &bits, sizeof(T));
  } else {
    static_assert(sizeof(T) == 4, "the value is in one register");
    unsigned int bits;
    memcpy(&bits, &value, sizeof(T));
    asm volatile("" : "+r"(bits)::"memory");
    memcpy(&value, &bits, sizeof(T));
  }
  return value;
}

template <typename T>
__device__ __forceinline__ const T* at(const void* data, uint32_t offset) {
  return static_cast<const T*>(data) + offset;
}

// Four elements of 2 bytes, loaded as words: two where the first element is at a multiple of a word, else one between two
// halves. combine() is the first to wait for them.
struct GroupWords {
  uint32_t first, second, last = 0;
  bool is_odd;

  __device__ __forceinline__ void load(const void* source, bool is_vector) {
    static_assert(kStepVector == 4, "a vector of elements of 2 bytes has two words");
    is_odd = reinterpret_cast<uintptr_t>(source) % sizeof(uint32_t) != 0;
    const auto* const halves = static_cast<const unsigned short*>(source);
    if (is_vector) {
      const uint2 words = *static_cast<const uint2*>(source);
      first = words.x;
      second = words.y;
    } else if (is_odd) {
      first = halves[0];
      second = *reinterpret_cast<const uint32_t*>(halves + 1);
      last = halves[3];
    } else {
      first = *reinterpret_cast<const uint32_t*>(halves);
      second = *reinterpret_cast<const uint32_t*>(halves + 2);
    }
  }
  template <typename Inputs>
  __device__ __forceinline__ Inputs combine() const {
    const uint32_t words[2] = {__byte_perm(first, second, is_odd ? 0x5410 : 0x3210),
                               __byte_perm(second, last, is_odd ? 0x5432 : 0x3210)};
    Inputs result;
    memcpy(&result, words, sizeof(result));
    return result;
  }
};

// `vectors`: rows of the state and A start at multiples of a vector, and dstate is one; those of B and C, too, unless there are
// several rows and kGroupElements. Otherwise elements of B and C, and without kRowVectors of the state and A, are loaded and
// stored one at a time.
template <typename Input, typename State, typename Method, int rows, bool vectors>
__device__ __forceinline__ void update_step(const StepParams& p) {
  using cuda::from_accumulate, cuda::to_accumulate;
  static_assert(rows == 1 || rows == kRowsInFlight, "a lane owns one row");
  using Acc = float;
  using Inputs = cuda::Vector<Input, kStepVector>;
  using Values = cuda::Vector<Acc, kStepVector>;
  using States = cuda::Vector<State, kStepVector>;
  const uint32_t flags = p.flags;
  const auto has = [&](uint32_t flag) { return (flags & flag) != 0; };
  constexpr bool is_float = std::is_same_v<Input, Acc>;  // flags of inputs that have the type Input are then never set

  const uint32_t thread = blockIdx.x * blockDim.x + threadIdx.x;
  const uint32_t tile = thread / kWarpSize;
  const uint32_t channel_tile = p.batch_divisor.divide(tile);
  const uint32_t batch = tile - channel_tile * p.batch;
  const uint32_t lane = thread & ((1u << p.log2_lanes) - 1);
  // Row r of all groups of lanes are neighboring channels. Lanes beyond the last channel or dstate read what other lanes read
  // as well, and write nothing.
  const int log2_groups = 5 - p.log2_lanes;
  const uint32_t own_first = ((channel_tile * rows) << log2_groups) + (thread % kWarpSize >> p.log2_lanes);
  const uint32_t first = min(own_first, p.channels - 1);
  const uint32_t last_row = min((p.channels - 1 - first) >> log2_groups, rows - 1u);
  const auto row = [&](int r) { return r == 0 ? 0 : min(static_cast<uint32_t>(r), last_row); };
  const auto is_row = [&](uint32_t r) { return own_first + (r << log2_groups) < p.channels; };
  const uint32_t channel = rows == 1 ? first : first + (min(lane & (rows - 1), last_row) << log2_groups);

  if constexpr (rows == 1) {
    // Looks ahead while the previous kernel ends. A prefetch reads no value, so that it may come before writes.
    const uint32_t n = min(lane * kStepVector, p.dstate - kStepVector);
    if (!has(kHasSlots)) {
      prefetch(
          reinterpret_cast<const State*>(static_cast<const char*>(p.state) + cuda::widening_multiply(batch, p.slot_bytes)) +
          (first * p.state_channel + n));
    }
    if (!has(kA_IsInput)) prefetch(at<Acc>(p.A, first * p.A_channel + n));
  }
  cuda::grid_dependency_sync();

  int64_t slot = batch;
  if (has(kHasSlots)) {
    const uint32_t offset = batch * p.slot_stride;
    slot = has(kSlotsAreInt64) ? *at<int64_t>(p.slot_of_row, offset) : *at<int32_t>(p.slot_of_row, offset);
  }
  const bool is_slot = static_cast<uint64_t>(slot) < p.slots;
  char* const slot_states =
      static_cast<char*>(p.state) + cuda::widening_multiply(is_slot ? static_cast<uint32_t>(slot) : 0u, p.slot_bytes);
  const uint32_t group = has(kHasGroups) ? p.group_divisor.divide(first) : 0;
  const auto own = [&](const void* data, const StepParams::Strides& stride) {
    return *at<Input>(data, batch * stride.batch + channel * stride.channel);
  };
  Input* const out = static_cast<Input*>(p.out) + (batch * p.out_stride.batch + channel * p.out_stride.channel);

  Input x_in, skip_in, z_in;
  Acc skip = 0, sum = 0;
  uint32_t pass = 0;
  do {  // one pass, except by elements
    const uint32_t own_n = pass + lane * kStepVector;
    const bool row_vectors = vectors || has(kRowVectors);
    const uint32_t n = min(own_n, row_vectors ? p.dstate - kStepVector : p.dstate - 1);
    const uint32_t count = own_n < p.dstate ? p.dstate - own_n : 0;
    const auto load = [&](const auto* source, bool as_vector) {
      using Scalar = std::remove_cv_t<std::remove_pointer_t<decltype(source)>>;
      if (vectors || as_vector) return cuda::Vector<Scalar, kStepVector>::load(source);
      return load_elements<kStepVector>(static_cast<int>(count), source, 1);
    };

    State* const first_state = reinterpret_cast<State*>(slot_states) + (first * p.state_channel + n);
    const auto state_of_row = [&](int r) {
      return reinterpret_cast<State*>(reinterpret_cast<char*>(first_state) +
                                      cuda::widening_multiply(row(r), p.state_row_bytes));
    };
    const auto of_group = [&](const void* data, const StepParams::Strides& stride) {
      return at<Input>(data, batch * stride.batch + group * stride.channel + n);
    };

    // Loads only. Those of the state come first: they wait longest, and the barrier keeps the compiler from moving others
    // ahead.
    States h[rows];
#pragma unroll
    for (int r = 0; r < rows; ++r) {
      if constexpr (vectors) {
        h[r] = States::load_once(state_of_row(r));
      } else {
        h[r] = load(state_of_row(r), row_vectors);
      }
    }
    __syncwarp();
    Input dt_in = own(p.dt, p.dt_stride), bias_in;
    Acc bias = 0;
    if (has(kBiasIsFloat)) bias = *at<Acc>(p.dt_bias, channel * p.bias_channel);
    if (!is_float && has(kBiasIsInput)) bias_in = *at<Input>(p.dt_bias, channel * p.bias_channel);
    Values A[rows];
    const uint32_t first_A = first * p.A_channel + n;
#pragma unroll
    for (int r = 0; r < rows; ++r) {
      const uint32_t offset = first_A + row(r) * p.A_row;
      if (!is_float && has(kA_IsInput)) {
        const Inputs loaded = load(at<Input>(p.A, offset), row_vectors);
        memcpy(&A[r], &loaded, sizeof(loaded));
      } else {
        A[r] = load(at<Acc>(p.A, offset), row_vectors);
      }
    }
    // The page of the output is looked up now, not when the result is there.
    prefetch(out);
    x_in = own(p.x, p.x_stride);
    if (has(kSkipIsFloat)) skip = *at<Acc>(p.D, channel * p.skip_channel);
    if (!is_float && has(kSkipIsInput)) skip_in = *at<Input>(p.D, channel * p.skip_channel);
    if (has(kHasGate)) z_in = own(p.z, p.z_stride);
    Inputs B, C;
    GroupWords B_words, C_words;
    constexpr bool has_words = vectors && rows > 1 && !is_float;
    const Input *const B_source = of_group(p.B, p.B_stride), *const C_source = of_group(p.C, p.C_stride);
    if constexpr (has_words) {
      // With one branch for both, 64 registers are too few.
      B_words.load(B_source, !has(kGroupElements));
      C_words.load(C_source, !has(kGroupElements));
    } else {
      const bool are_vectors = vectors && (rows == 1 || !has(kGroupElements));
      const auto load_group = [&](const Input* source) {
        return are_vectors ? Inputs::load(source)
                           : load_elements<kStepVector>(vectors ? kStepVector : static_cast<int>(count), source, 1);
      };
      B = load_group(B_source);
      C = load_group(C_source);
    }

    dt_in = after_loads(dt_in), x_in = after_loads(x_in);
    if constexpr (has_words) {
      B = B_words.template combine<Inputs>();
      C = C_words.template combine<Inputs>();
    }
    if constexpr (!is_float) bias_in = after_loads(bias_in), skip_in = after_loads(skip_in);
    Acc delta = to_accumulate(dt_in);
    if (!is_float && has(kBiasIsInput)) bias = to_accumulate(bias_in);
    if (has(kBiasIsInput | kBiasIsFloat)) delta += bias;
    if (has(kSoftplus)) delta = softplus(delta);
    if (has(kClamps)) delta = clamp(delta, p.dt_min, p.dt_max);
    const Acc scaled = delta * to_accumulate(x_in);
    if (has(kA_IsInput | kA_IsLog)) {
#pragma unroll
      for (int r = 0; r < rows; ++r) {
        if (!is_float && has(kA_IsInput)) {
          Inputs loaded;
          memcpy(&loaded, &A[r], sizeof(loaded));
#pragma unroll
          for (int i = 0; i < kStepVector; ++i) A[r].set(i, loaded.accumulate(i));
        }
        if (has(kA_IsLog)) {
#pragma unroll
          for (int i = 0; i < kStepVector; ++i) A[r].set(i, -Math<Acc>::exp(A[r][i]));
        }
      }
    }

    const Method method = make_method<Method>(p.discretization);
    Acc partial[rows];
#pragma unroll
    for (int r = 0; r < rows; ++r) {
      const int lanes = 1 << p.log2_lanes;
      const Acc row_delta = rows == 1 ? delta : shuffle(delta, r, lanes);
      const Acc row_scaled = rows == 1 ? scaled : shuffle(scaled, r, lanes);
      Acc sum = 0;
      visit_method(method, [&](const auto& method) {
#pragma unroll
        for (int i = 0; i < kStepVector; ++i) {
          const Acc z = row_delta * A[r][i], basis = method.basis(z);
          const Acc factor = row_scaled * current_gain(method, z, basis);
          const Acc value = Math<Acc>::fma(method.abar(z, basis), h[r].accumulate(i), factor * B.accumulate(i));
          if (vectors || i < static_cast<int>(count)) sum = Math<Acc>::fma(value, C.accumulate(i), sum);
          h[r].set(i, from_accumulate<State>(value));
        }
      });
      if (is_slot && is_row(r)) {
        if (row_vectors) {
          if (count > 0) h[r].store_once(state_of_row(r));
        } else {
          store_elements(h[r], static_cast<int>(count), state_of_row(r), 1);
        }
      }
      // A step size of inf makes even a zero state NaN.
      partial[r] = count > 0 ? sum : 0;
    }

    Acc row_sum;
    if constexpr (rows == 1) {
      row_sum = partial[0];
      if (p.log2_lanes >= 2) row_sum += __shfl_xor_sync(kAllLanes, row_sum, 2);
      if (p.log2_lanes >= 1) row_sum += __shfl_xor_sync(kAllLanes, row_sum, 1);
#pragma unroll 1
      for (int distance = 4; distance < 1 << p.log2_lanes; distance *= 2)
        row_sum += __shfl_xor_sync(kAllLanes, row_sum, distance);
    } else {
      row_sum = reduce_rows(partial, static_cast<int>(lane), 1 << p.log2_lanes);
    }
    sum += row_sum;
  } while (!vectors && (pass += kStepVector << p.log2_lanes) < p.dstate);

  if (lane < rows && is_row(lane)) {
    Acc skipped = 0, gate = 1;
    if (!is_float && has(kSkipIsInput)) skip = to_accumulate(skip_in);
    if (has(kSkipIsInput | kSkipIsFloat)) skipped = __fmul_rn(skip, to_accumulate(x_in));  // not contracted with the sum
    if (has(kHasGate)) gate = silu(to_accumulate(z_in));
    Acc result = (sum + skipped) * gate;
    if (!is_slot) result = slot < 0 ? Acc(0) : static_cast<Acc>(nanf(""));
    *out = from_accumulate<Input>(result);
  }
}

// Blocks per multiprocessor: four rows take 64 registers, so that a step of 4096 warps fits on the device at once. Elements
// take 96.
template <int rows, bool vectors>
constexpr int kMinStepBlocks = rows == 1 ? 10
                               : vectors ? 8
                                         : 5;

template <typename Input, typename State, typename Method, int rows, bool vectors>
__global__ void __launch_bounds__(kMaxWarpsPerBlock* kWarpSize, kMinStepBlocks<rows, vectors>)
    selective_state_update_step_kernel(const __grid_constant__ StepParams params) {
  cuda::launch_dependents();
  update_step<Input, State, Method, rows, vectors>(params);
}

template <typename Input, typename State>
cudaError_t launch_step(const StepParams& params, const StepTiling& tiling, cudaStream_t stream) {
  void (*kernel)(StepParams) = nullptr;
  if (!tiling.vectors) {
    kernel = params.discretization == Discretization::kZoh
                 ? selective_state_update_step_kernel<Input, State, Zoh, kRowsInFlight, false>
                 : selective_state_update_step_kernel<Input, State, RuntimeMethod, kRowsInFlight, false>;
  } else if (tiling.rows == 1) {
    kernel = selective_state_update_step_kernel<Input, State, Zoh, 1, true>;
  } else {
    visit_basic_discretization(params.discretization, [&](auto method) {
      kernel = selective_state_update_step_kernel<Input, State, decltype(method), kRowsInFlight, true>;
    });
  }
  const unsigned int blocks = (tiling.tiles + tiling.warps_per_block - 1) / tiling.warps_per_block;
  return cuda::launch(kernel, blocks, tiling.warps_per_block * kWarpSize, 0, stream, cuda::has_pdl(kernel), params);
}

}  // namespace ssm_kernels::selective_state_update
