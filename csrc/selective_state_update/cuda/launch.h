// The interface between the CUDA entry point (entry.cpp) and the kernels (step.cuh, update.cuh): how warps share the work.
//
// A row is the dstate values of one channel of one row of the batch. A group of `lanes` lanes loads a row together and takes
// `rows` consecutive rows, kRowsInFlight at a time. Lane j of the group owns the j-th of them: it reads its x, dt and z,
// computes its step size and gate, and writes its output. The 32 / lanes groups of a warp take a tile: consecutive channels of
// one row of the batch, inside one group of B and C. A row is summed in the same order whatever `rows` is.
//
// The step kernel takes most calls of one token whose A has dstate values a row (kStepVector). Two kernels take the others. In
// the fast one a lane loads vectors of state_vector_bytes of the state, with 32-bit indices (addresses have 64 bits
// everywhere). It requires that the dstate values of state, B, C and A are contiguous and aligned, that the rows of the state
// and of A are evenly spaced, and that all sizes and strides are below 2^31. The general one takes any strides and fp64. Its
// lanes take the same elements, one load each, so that a row has the same bits in both. With several tokens the fast kernel
// also requires that the lanes load a row at once.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/kernel_abi.h"
#include "cuda/constants.h"
#include "cuda/divisor.h"
#include "selective_state_update/selective_state_update.h"

namespace ssm_kernels::selective_state_update {

using cuda::kWarpSize, cuda::kAllLanes;
constexpr int kMaxWarpsPerBlock = 4;
// Enough rows to cover the latency of memory. More would take registers from other warps, which cover it as well.
constexpr int kRowsInFlight = 4;

struct Tiling {
  bool fast = false;
  int log2_lanes = 2;        // at least kRowsInFlight lanes: each owns a row in flight
  int rows = kRowsInFlight;  // per group, a multiple of kRowsInFlight and at most the number of lanes
  int warps_per_block = kMaxWarpsPerBlock;
  // Whether neighboring warps take the same channels of different rows of the batch, and so share A in the first-level cache;
  // else they take neighboring channels of one row and share B and C.
  bool batch_fastest = false;
  int64_t first_tile = 0, tiles = 0;  // of this launch; of all launches. More tiles than a grid can have take several
  int64_t channels_per_group = 0;
  int64_t state_stride_row = 0, A_stride_row = 0;  // elements between the rows of neighboring channels; fast kernel only
  cuda::Divisor tiles_per_batch, tiles_per_group, batch, headdim;

  SSM_HOST_DEVICE int lanes() const { return 1 << log2_lanes; }
  SSM_HOST_DEVICE int rows_per_tile() const { return (kWarpSize >> log2_lanes) * rows; }
};

// Rows of untied A mostly have 16 values: with fp16 and bf16 states, smaller vectors give each of kRowsInFlight lanes some.
constexpr int state_vector_bytes(int64_t state_bytes, bool tied_A) { return state_bytes == 2 && !tied_A ? 8 : 16; }
// The elements of a row that a lane takes. Doubles, which only the general kernel takes, are single.
constexpr int vector_elements(int64_t state_bytes, bool tied_A) {
  return state_bytes == 8 ? 1 : static_cast<int>(state_vector_bytes(state_bytes, tied_A) / state_bytes);
}

// The elements of a lane's vector in the step kernel (step.cuh). It takes calls of one token with an A of dstate values a row,
// where the dstate values of state, A, B and C are contiguous, channels are evenly spaced in every tensor, and offsets fit 32
// bits. Where rows start at multiples of a vector, it needs lanes that load a row at once.
constexpr int kStepVector = 4;

enum StepFlags : uint32_t {
  kHasSlots = 1,
  kSlotsAreInt64 = 2,
  kHasGroups = 4,
  kA_IsInput = 8,  // else float
  kA_IsLog = 16,
  kBiasIsFloat = 32,
  kBiasIsInput = 64,
  kSkipIsFloat = 128,
  kSkipIsInput = 256,
  kHasGate = 512,
  kSoftplus = 1024,
  kClamps = 2048,
  kRowVectors = 4096,     // rows of the state and A start at multiples of a vector, and dstate is one
  kGroupElements = 8192,  // rows of B or C do not
};

// Strides are in elements.
struct StepParams {
  struct Strides {
    uint32_t batch = 0, channel = 0;  // of B and C: between groups
  };

  uint32_t flags = 0;
  int log2_lanes = 0;
  uint32_t batch = 0, channels = 0, dstate = 0, slots = 0;
  cuda::Divisor batch_divisor;
  const void *dt = nullptr, *dt_bias = nullptr;
  void* state = nullptr;
  const void *A = nullptr, *B = nullptr, *C = nullptr, *x = nullptr, *D = nullptr, *z = nullptr;
  void* out = nullptr;
  Strides dt_stride, B_stride, C_stride, x_stride, z_stride, out_stride;
  uint32_t bias_channel = 0, state_channel = 0, A_channel = 0, skip_channel = 0;
  uint32_t slot_bytes = 0;                  // between slots
  uint32_t state_row_bytes = 0, A_row = 0;  // between the rows of a lane
  float dt_min = 0, dt_max = 0;
  Discretization discretization = Discretization::kZoh;
  const void* slot_of_row = nullptr;
  uint32_t slot_stride = 0;
  cuda::Divisor group_divisor;  // channels of a group
};

struct StepTiling {
  int rows = 1;         // of a lane: 1, for zoh and vectors of B and C only, or kRowsInFlight
  bool vectors = true;  // rows of the state and A start at multiples of a vector, and dstate is one
  int warps_per_block = kMaxWarpsPerBlock;
  uint32_t tiles = 0;
};

template <typename Input, typename State>
SSM_KERNEL_API cudaError_t launch_step(const StepParams& params, const StepTiling& tiling, cudaStream_t stream);

// Input is the type of x, dt, B, C, z and out. `tokens` is null where each row has one token and one slot. Instantiated in
// instantiations/.
template <typename Input, typename State>
SSM_KERNEL_API cudaError_t launch_selective_state_update(const StateUpdateParams& params, const TokenParams* tokens,
                                                         const Tiling& tiling, cudaStream_t stream);

// The same for the methods of SSM_FURTHER_DISCRETIZATIONS, which have no step kernel.
template <typename Input, typename State>
SSM_KERNEL_API cudaError_t launch_further_state_update(const StateUpdateParams& params, const MethodParameters& parameters,
                                                       const TokenParams* tokens, const Tiling& tiling, cudaStream_t stream);

// The same for the methods of SSM_TWO_SAMPLE_DISCRETIZATIONS, which have kernels of their own (two_sample.cuh).
template <typename Input, typename State>
SSM_KERNEL_API cudaError_t launch_two_sample_update(const StateUpdateParams& params, const TwoSampleParams& two,
                                                    const TokenParams* tokens, cudaStream_t stream);

// The same with a step of its own for A, of methods that read one sample (separate.cuh).
template <typename Input, typename State>
SSM_KERNEL_API cudaError_t launch_separate_update(const StateUpdateParams& params, const TwoSampleParams& two,
                                                  const TokenParams* tokens, cudaStream_t stream);

// The same of complex states, whose type is the accumulation type (complex.cuh).
template <typename Input>
SSM_KERNEL_API cudaError_t launch_complex_update(const StateUpdateParams& params, const TwoSampleParams& two,
                                                 const TokenParams* tokens, cudaStream_t stream);

SSM_KERNEL_STRUCT(Tiling, 128);
SSM_KERNEL_STRUCT(StepParams, 240);
SSM_KERNEL_STRUCT(StepTiling, 16);

}  // namespace ssm_kernels::selective_state_update
