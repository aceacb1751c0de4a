// Prints what the selective scan's plans take of a block's shared memory on a device that has argv[1] bytes: of each call a
// line "<dtype> <direction> <dstate> <options>: <bytes> <steps of a span>". With more arguments, the sizes "<bytes of an
// element> <0 or 1: channels are contiguous> <batch> <dim> <seqlen>" of calls with 16 states on 132 multiprocessors, prints
// whether forward and backward of each are sequential. For tests/selective_scan/test_selective_scan_plan.py, without a GPU.
#define SSM_KERNELS_WITH_CUDA
#include <cstdio>
#include <cstdlib>

#include "selective_scan/cuda/plan.cpp"
#include "selective_scan/cuda/sequential_bwd.cuh"
#include "selective_scan/cuda/sequential_fwd.cuh"
#include "selective_scan/cuda/warp_scan_bwd.cuh"
#include "selective_scan/cuda/warp_scan_fwd.cuh"

using namespace ssm_kernels::selective_scan;

namespace {

// A plan depends on the absence of tensors, not on their addresses.
alignas(kVectorBytes) unsigned char present[kVectorBytes];

struct Options {
  int64_t batch, dim, seqlen, dstate;
  bool z, saves, constant_B, constant_C, packed, reverse;
};
constexpr int64_t kPackedSequences = 100;

// `bytes` of a number. Reversed rows end at a multiple of kVectorBytes.
void set_inputs(SelectiveScanParams& p, const Options& o, int64_t bytes) {
  p.batch = p.rows = o.batch;
  if (o.packed) {
    p.rows = kPackedSequences;
    p.cu_seqlens = reinterpret_cast<const int64_t*>(present);
  }
  p.dim = o.dim;
  p.seqlen = o.seqlen;
  p.dstate = o.dstate;
  p.chunk_length = chunk_length(o.dstate);
  void* const first = o.reverse ? present + kVectorBytes - bytes : present;
  const int64_t step = o.reverse ? -1 : 1;
  p.u = p.delta = {first, o.dim * o.seqlen, o.seqlen, step};
  if (o.z) p.z = p.u;
  const auto matrix = [&](bool constant) -> MatrixView {
    if (constant) return {present, false, 1, 0, o.dstate, 1, 0};
    return {first, true, 1, o.dstate * o.seqlen, o.dstate * o.seqlen, o.seqlen, step};
  };
  p.B = matrix(o.constant_B);
  p.C = matrix(o.constant_C);
}

template <typename Scalar>
void print(const char* dtype, const Options& o, const DeviceLimits& device) {
  const auto line = [&](const char* direction, const Plan& plan, int64_t span) {
    const auto moves = [&](VectorAccess access) { return plan.is_sequential && plan.sequential.sequences == access; };
    std::printf("%s %s N%ld B%ld D%ld L%ld%s%s%s%s%s%s%s%s%s: %ld %ld\n", dtype, direction, static_cast<long>(o.dstate),
                static_cast<long>(o.batch), static_cast<long>(o.dim), static_cast<long>(o.seqlen), o.reverse ? " reverse" : "",
                o.packed ? " packed" : "", o.z ? " z" : "", o.saves ? " saves" : "", o.constant_B ? " constant B" : "",
                o.constant_C ? " constant C" : "", moves(VectorAccess::kShifted) ? " shifted" : "",
                moves(VectorAccess::kDescending) ? " descending" : "", plan.is_sequential ? " sequential" : "",
                static_cast<long>(plan.shared_bytes), static_cast<long>(span));
  };
  SelectiveScanFwdParams fwd;
  set_inputs(fwd, o, sizeof(Scalar));
  fwd.out = fwd.u;
  if (o.saves) fwd.chunk_states = present;
  line("forward", plan_fwd<Scalar>(fwd, device, KernelChoice::kFaster), o.seqlen);
  if (!o.packed && !o.reverse) line("summary", plan_carry_pass<Scalar>(fwd, device), o.seqlen);
  if (!o.saves) return;
  SelectiveScanBwdParams bwd;
  set_inputs(bwd, o, sizeof(Scalar));
  bwd.grad_out = bwd.grad_u = bwd.grad_delta = bwd.u;
  bwd.grad_z = bwd.z;
  const Plan plan = plan_bwd<Scalar>(bwd, device, KernelChoice::kFaster);
  line("backward", plan, span_steps(bwd, plan));
  if (!o.packed && !o.reverse) line("initial_gradient", plan_carry_pass<Scalar>(bwd, device), o.seqlen);
}

template <typename Scalar>
void print_choice(bool along_channels, int64_t batch, int64_t dim, int64_t seqlen, const DeviceLimits& device) {
  const auto set = [&](auto& p) {
    set_inputs(p, {batch, dim, seqlen, 16, true, true, false, false, false, false}, sizeof(Scalar));
    if (along_channels) p.u = p.delta = p.z = {present, dim * seqlen, 1, dim};
  };
  SelectiveScanFwdParams fwd;
  set(fwd);
  fwd.out = fwd.u;
  SelectiveScanBwdParams bwd;
  set(bwd);
  bwd.grad_out = bwd.grad_u = bwd.grad_delta = bwd.grad_z = bwd.u;
  std::printf("%d %d\n", plan_fwd<Scalar>(fwd, device, KernelChoice::kFaster).is_sequential,
              plan_bwd<Scalar>(bwd, device, KernelChoice::kFaster).is_sequential);
}

}  // namespace

int main(int count, char** arguments) {
  const int64_t per_block = std::atoll(arguments[1]);
  if (count > 2) {
    const DeviceLimits device{132, per_block, per_block + 1024, 1024};
    for (int i = 2; i + 4 < count; i += 5) {
      const auto number = [&](int j) { return std::atoll(arguments[i + j]); };
      const auto print = number(0) == 4 ? print_choice<float> : print_choice<__nv_bfloat16>;
      print(number(1) != 0, number(2), number(3), number(4), device);
    }
    return 0;
  }
  const DeviceLimits device{84, per_block, per_block + 1024, 1024};
  for (const int64_t batch : {1, 100}) {
    for (const int64_t dim : {1, 5, 64, 2048}) {
      for (const int64_t seqlen : {30, 60, 196, 197, 200, 4096}) {
        for (const int64_t dstate : {1, 8, 16, 17, 32, 64, 100, 120, 128, 200, 255, 256}) {
          for (int bits = 0; bits < 64; ++bits) {
            const auto has = [&](int bit) { return (bits & bit) != 0; };
            const Options options{batch, dim, seqlen, dstate, has(1), has(2), has(4), has(8), has(16), has(32)};
            if (options.packed ? batch != 1 || options.reverse : options.reverse && dstate != 16) continue;
            print<double>("float64", options, device);
            print<float>("float32", options, device);
            print<__nv_bfloat16>("bfloat16", options, device);
            print<__half>("float16", options, device);
          }
        }
      }
    }
  }
}
