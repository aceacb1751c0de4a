// The gates of a scan with a rule that reads two input samples a step, and their adjoint (ssd/aten/two_sample_gates.h). With
// zeta_s = d_s A, k and m of the rule, and s + 1 the next step of the same sequence:
//
//   log_decay_s = zeta_{s+1}      gain_s = e^zeta_{s+1} k_s d_s + m_{s+1} d_{s+1}      diagonal_gain_s = k_s d_s
//
// The last step of a sequence has log_decay 0 and gain k d. A repeated first sample adds m d to k d. The adjoint, with G the
// gradients of the three, f = k d and g = m d:
//
//   grad f_s       = e^zeta_{s+1} G_gain_s + G_diagonal_s
//   grad g_s       = G_gain_{s-1} + (grad f_s if the sample repeats)
//   grad zeta_s    = e^zeta_s f_{s-1} G_gain_{s-1} + G_log_decay_{s-1}      through the decay
//   grad d_s       = A grad zeta_s + (z k)' grad f_s + (z m)' grad g_s
//   grad A_s       = d_s (grad zeta_s + d_s (k' grad f_s + m' grad g_s))
//   grad lam_s     = d_s (grad f_s - e^zeta_s grad g_s)
//
// The gradient of one A for all steps of a head is the sum of those of the steps. If zeta is given in the place of A
// (`premultiplied`), its gradient is the one of A without the factor d_s in front, and grad d_s = k grad f_s + m grad g_s.
//
// The terms of s - 1 are absent at the first step of a sequence, which has the gradients of the states before it in their
// place.
//
// A warp has kGateSteps steps of 32 heads, a lane one head. A lane goes through its steps in order and keeps the values of the
// steps beside, so that it evaluates each step once, besides one step before and one after its own. A block writes one partial
// sum of the gradients of dt_bias, and of an A of heads, for each head, in a fixed order. Nothing is saved: the adjoint
// evaluates the steps again. The arithmetic is fp32 if dt is of fp16 or bf16, and fp64 if it is of fp32.
#pragma once

#include "common/activations.h"
#include "common/limits.h"
#include "common/two_sample_discretization.h"
#include "cuda/constants.h"
#include "cuda/launch.cuh"
#include "cuda/vector_io.cuh"
#include "ssd/cuda/two_sample_gates.h"

namespace ssm_kernels::ssd {

using cuda::chunked::RowsView;

constexpr int kGateThreadsOfBlock = kGateWarps * cuda::kWarpSize;

// The gates of one step and head.
template <typename T>
struct GateStep {
  T biased, unlimited, size, zeta, decay, lam;
  T A;                  // of the step; unused if it is the head's
  T current, previous;  // k d and m d
  bool repeats;         // whether the sample is also the one before it

  __device__ __forceinline__ T diagonal_gain() const { return repeats ? current + previous : current; }
};

// The steps of one head in one row of the batch. has_A_of_steps: whether each step has an A, in place of each head.
template <typename Scalar, bool has_A_of_steps>
class HeadSteps {
 public:
  using T = std::conditional_t<std::is_same_v<Scalar, float>, double, float>;

  __device__ __forceinline__ HeadSteps(const TwoSampleGateParams& p, int64_t row, int64_t head)
      : p_(p),
        dt_(static_cast<const Scalar*>(p.dt.data) + row * p.dt.stride_batch + head * p.dt.stride_head),
        lam_(static_cast<const Scalar*>(p.lam.data) + row * p.lam.stride_batch + head * p.lam.stride_head),
        A_(static_cast<const float*>(p.A_of_steps.data) + row * p.A_of_steps.stride_batch + head * p.A_of_steps.stride_head),
        flags_(row * p.seqlen),
        A_of_head_(has_A_of_steps ? 0.0f : p.A[head]),
        dt_bias_(p.dt_bias != nullptr ? p.dt_bias[head] : 0.0f) {}

  __device__ __forceinline__ T A(const GateStep<T>& step) const { return has_A_of_steps ? step.A : A_of_head_; }
  // Whether a sequence begins at the step, or the row has ended.
  __device__ __forceinline__ bool is_start(int64_t step) const {
    return step == 0 || step >= p_.seqlen || (p_.starts != nullptr && p_.starts[flags_ + step] != 0);
  }

  template <typename Rule>
  __device__ __forceinline__ GateStep<T> at(int64_t step, const Rule& rule) const {
    GateStep<T> result;
    result.biased = T(cuda::to_accumulate(dt_[step * p_.dt.stride_step])) + dt_bias_;
    result.unlimited = p_.dt_softplus ? softplus(result.biased) : result.biased;
    result.size = clamp(result.unlimited, T(p_.dt_min), T(p_.dt_max));
    if constexpr (has_A_of_steps) {
      result.A = A_[step * p_.A_of_steps.stride_step];
      result.zeta = p_.premultiplied ? result.A : result.size * result.A;
    } else {
      result.zeta = result.size * A_of_head_;
    }
    result.lam = 0;
    if constexpr (Rule::kHasLam) {
      const T given = cuda::to_accumulate(lam_[step * p_.lam.stride_step]);
      result.lam = p_.lam_sigmoid ? sigmoid(given) : given;
    }
    const auto method = rule.step(result.lam);
    result.decay = method.basis(result.zeta);
    const auto gain = method.gain(result.zeta, result.decay);
    result.current = result.size * gain.current;
    result.previous = result.size * gain.previous;
    const bool is_given = p_.given != nullptr && p_.given[flags_ + step] != 0;
    result.repeats = p_.repeats_first && is_start(step) && !is_given;
    return result;
  }

 private:
  const TwoSampleGateParams& p_;
  const Scalar *dt_, *lam_;
  const float* A_;
  int64_t flags_;
  T A_of_head_, dt_bias_;
};

// Calls visitor(rule) with a rule whose decay is e^zeta.
template <typename Visitor>
__device__ __forceinline__ void visit_exponential_rule(Discretization discretization, const Visitor& visitor) {
  if (discretization == Discretization::kFohRamp) {
    visitor(FohRamp());
  } else {
    visitor(ExpTrapezoidalRule());
  }
}

// A thread's work.
struct GateWork {
  int64_t row, block, head, first_step, end_step;
  bool is_there;  // whether the head exists

  __device__ __forceinline__ explicit GateWork(const TwoSampleGateParams& p) {
    const int64_t head_blocks = (p.heads + cuda::kWarpSize - 1) / cuda::kWarpSize,
                  step_blocks = (p.seqlen + kGateBlockSteps - 1) / kGateBlockSteps;
    const int64_t block_of_steps = blockIdx.x / head_blocks;
    head = blockIdx.x % head_blocks * cuda::kWarpSize + threadIdx.x % cuda::kWarpSize;
    row = block_of_steps / step_blocks;
    block = block_of_steps;
    first_step = block_of_steps % step_blocks * kGateBlockSteps + threadIdx.x / cuda::kWarpSize * kGateSteps;
    end_step = min(first_step + kGateSteps, p.seqlen);
    is_there = head < p.heads;
  }

  template <typename Element>
  __device__ __forceinline__ Element* rows(const RowsView& view) const {
    return static_cast<Element*>(view.data) + row * view.stride_batch + head * view.stride_head;
  }
};

template <typename Scalar, bool has_A_of_steps>
__global__ void __launch_bounds__(kGateThreadsOfBlock) two_sample_gates_kernel(const __grid_constant__ TwoSampleGateParams p) {
  const GateWork work(p);
  if (!work.is_there || work.first_step >= work.end_step) return;
  const HeadSteps<Scalar, has_A_of_steps> steps(p, work.row, work.head);
  float* const log_decay = work.rows<float>(p.log_decay);
  float* const gain = work.rows<float>(p.gain);
  float* const diagonal_gain = work.rows<float>(p.diagonal_gain);
  visit_exponential_rule(p.discretization, [&](auto rule) {
    auto step = steps.at(work.first_step, rule);
#pragma unroll 1
    for (int64_t i = work.first_step; i < work.end_step; ++i) {
      const bool is_last = steps.is_start(i + 1);
      const auto next = i + 1 < p.seqlen ? steps.at(i + 1, rule) : step;
      const auto diagonal = step.diagonal_gain();
      log_decay[i * p.log_decay.stride_step] = is_last ? 0.0f : static_cast<float>(next.zeta);
      gain[i * p.gain.stride_step] =
          static_cast<float>(is_last ? diagonal : Math<decltype(step.zeta)>::fma(next.decay, diagonal, next.previous));
      diagonal_gain[i * p.diagonal_gain.stride_step] = static_cast<float>(diagonal);
      step = next;
    }
  });
}

template <typename Scalar, bool has_A_of_steps>
__global__ void __launch_bounds__(kGateThreadsOfBlock)
    two_sample_gates_bwd_kernel(const __grid_constant__ TwoSampleGateBwdParams p) {
  using T = typename HeadSteps<Scalar, has_A_of_steps>::T;
  __shared__ T sums_of_A[kGateWarps][cuda::kWarpSize], sums_of_bias[kGateWarps][cuda::kWarpSize];
  const GateWork work(p);
  T sum_of_A = 0, sum_of_bias = 0;
  if (work.is_there && work.first_step < work.end_step) {
    const HeadSteps<Scalar, has_A_of_steps> steps(p, work.row, work.head);
    const float* const grad_log_decay = work.rows<const float>(p.log_decay);
    const float* const grad_gain = work.rows<const float>(p.gain);
    const float* const grad_diagonal_gain = work.rows<const float>(p.diagonal_gain);
    Scalar* const grad_dt = work.rows<Scalar>(p.grad_dt);
    Scalar* const grad_lam = work.rows<Scalar>(p.grad_lam);
    float* const grad_A = work.rows<float>(p.grad_A);
    visit_exponential_rule(p.discretization, [&](auto rule) {
      T earlier = 0, grad_gain_before = 0, grad_log_decay_before = 0;  // f, and the gates' gradients, of the previous step
      if (work.first_step > 0) {
        earlier = steps.at(work.first_step - 1, rule).diagonal_gain();
        grad_gain_before = grad_gain[(work.first_step - 1) * p.gain.stride_step];
        grad_log_decay_before = grad_log_decay[(work.first_step - 1) * p.log_decay.stride_step];
      }
      auto step = steps.at(work.first_step, rule);
#pragma unroll 1
      for (int64_t i = work.first_step; i < work.end_step; ++i) {
        const auto next = i + 1 < p.seqlen ? steps.at(i + 1, rule) : step;
        const T of_gain = grad_gain[i * p.gain.stride_step], of_log_decay = grad_log_decay[i * p.log_decay.stride_step];
        const T next_decay = steps.is_start(i + 1) ? T(1) : next.decay;
        const T grad_current = Math<T>::fma(next_decay, of_gain, T(grad_diagonal_gain[i * p.diagonal_gain.stride_step]));
        T grad_zeta = 0, grad_previous = 0;
        if (!steps.is_start(i)) {
          grad_zeta = Math<T>::fma(step.decay * earlier, grad_gain_before, grad_log_decay_before);
          grad_previous = grad_gain_before;
        } else if (p.first_zeta != nullptr) {
          const int64_t sequence = p.sequences != nullptr ? p.sequences[work.row * p.seqlen + i] : i == 0 ? work.row : -1;
          if (sequence >= 0) {
            grad_zeta = p.first_zeta[sequence * p.heads + work.head];
            grad_previous = p.first_previous[sequence * p.heads + work.head];
          }
        }
        if (step.repeats) grad_previous += grad_current;
        const auto method = rule.step(step.lam);
        const auto derivatives = method.derivatives(step.zeta, step.decay);
        T grad_size;
        if (has_A_of_steps && p.premultiplied) {
          const auto gain = method.gain(step.zeta, step.decay);
          grad_size = Math<T>::fma(grad_current, gain.current, grad_previous * gain.previous);
        } else {
          grad_size = Math<T>::fma(grad_current, derivatives.z_gain, grad_previous * derivatives.z_previous);
          // From this rate on every state has decayed to zero: the gradient through the decay is zero, not A times a rounding
          // error.
          const T A = steps.A(step);
          if (Math<T>::abs(A) < T(kLargestRate<float>)) grad_size = Math<T>::fma(grad_zeta, A, grad_size);
        }
        if (step.unlimited < T(p.dt_min) || step.unlimited > T(p.dt_max)) grad_size = 0;
        if (p.dt_softplus) grad_size *= softplus_derivative(step.biased);
        sum_of_bias += grad_size;
        const T of_factors = Math<T>::fma(grad_current, derivatives.gain, grad_previous * derivatives.previous);
        const T of_zeta = Math<T>::fma(of_factors, step.size, grad_zeta);
        if constexpr (!has_A_of_steps) {
          sum_of_A = Math<T>::fma(of_zeta, step.size, sum_of_A);
        } else if (p.grad_A.data != nullptr) {
          grad_A[i * p.grad_A.stride_step] = static_cast<float>(p.premultiplied ? of_zeta : of_zeta * step.size);
        }
        if (p.grad_dt.data != nullptr) {
          grad_dt[i * p.grad_dt.stride_step] = cuda::from_accumulate<Scalar>(static_cast<float>(grad_size));
        }
        if (p.grad_lam.data != nullptr) {
          T of_lam = step.size * (grad_current - grad_previous * step.decay);
          if (p.lam_sigmoid) of_lam *= step.lam * (T(1) - step.lam);
          grad_lam[i * p.grad_lam.stride_step] = cuda::from_accumulate<Scalar>(static_cast<float>(of_lam));
        }
        earlier = step.diagonal_gain();
        grad_gain_before = of_gain;
        grad_log_decay_before = of_log_decay;
        step = next;
      }
    });
  }
  const int warp = threadIdx.x / cuda::kWarpSize, lane = threadIdx.x % cuda::kWarpSize;
  sums_of_A[warp][lane] = sum_of_A;
  sums_of_bias[warp][lane] = sum_of_bias;
  __syncthreads();
  if (warp > 0 || !work.is_there) return;
  for (int other = 1; other < kGateWarps; ++other) {
    sum_of_A += sums_of_A[other][lane];
    sum_of_bias += sums_of_bias[other][lane];
  }
  if constexpr (!has_A_of_steps) p.grad_A_parts[work.block * p.heads + work.head] = static_cast<float>(sum_of_A);
  p.grad_bias_parts[work.block * p.heads + work.head] = static_cast<float>(sum_of_bias);
}

inline int64_t gate_blocks(const TwoSampleGateParams& p) {
  return p.batch * ((p.seqlen + kGateBlockSteps - 1) / kGateBlockSteps) * ((p.heads + cuda::kWarpSize - 1) / cuda::kWarpSize);
}

template <typename Scalar, bool has_A_of_steps>
cudaError_t launch_two_sample_gates(const TwoSampleGateParams& params, cudaStream_t stream) {
  return cuda::launch(two_sample_gates_kernel<Scalar, has_A_of_steps>, gate_blocks(params), kGateThreadsOfBlock, 0, stream,
                      /*uses_pdl=*/false, params);
}
template <typename Scalar, bool has_A_of_steps>
cudaError_t launch_two_sample_gates_bwd(const TwoSampleGateBwdParams& params, cudaStream_t stream) {
  return cuda::launch(two_sample_gates_bwd_kernel<Scalar, has_A_of_steps>, gate_blocks(params), kGateThreadsOfBlock, 0, stream,
                      /*uses_pdl=*/false, params);
}

}  // namespace ssm_kernels::ssd
