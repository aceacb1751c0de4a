// The causal convolution of a Mamba mixer as one autograd node, whose input is the output of the in-projection:
//
//   x, z = halves of the columns of xz              (batch, seqlen, 2 channels)
//   x    = silu(conv(x))
//
// The gradient of xz is one buffer, which no kernel has to concatenate. The mixer's scan allocates it (allocate_grad_gate) and
// writes the gradient of z into its right half; backward of the convolution writes the gradient of x into the left half. In
// between, the left half holds the gradient of delta.
//
// The operator returns x twice, as two tensors that share memory, one for the projections and one for the scan. Backward thus
// gets two gradients of x, and the convolution's kernel adds them as it reads them.
//
// The node takes plain tensors only. A call that is traced or batched is composed of PyTorch's operators and causal_conv1d
// instead.

#include "mixers/mamba_conv_op.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <string>
#include <string_view>
#include <tuple>

#include "causal_conv1d/causal_conv1d_op.h"
#include "mixers/mixer_parameters_op.h"
#include "torch/allocation.h"
#include "torch/autograd_op.h"
#include "torch/checks.h"
#include "torch/eager.h"
#include "torch/schemas.h"

namespace ssm_kernels::mamba_conv {

TORCH_LIBRARY_FRAGMENT(ssm_kernels, library) {
  const Schemas schemas(library);

  // The convolution of a Mamba mixer, with SiLU, on the left half of the columns: x twice, with a gradient each, and the right
  // half. The head of this file says why. Errors about double backward name `layer`.
  schemas.def(
      "_mamba_conv(Tensor xz, Tensor weight, Tensor? bias, Tensor? initial_state, str layer='Mamba') "
      "-> (Tensor, Tensor, Tensor z)");
}

namespace {

using OptionalTensor = std::optional<at::Tensor>;
using causal_conv1d::kGradBias;
using causal_conv1d::kGradInitialState;
using causal_conv1d::kGradWeight;
using causal_conv1d::kGradX;
using causal_conv1d::NeedsGrad;

constexpr char kActivation[] = "silu";

using Result = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

struct Inputs {
  at::Tensor xz, weight;
  OptionalTensor bias, initial_state;
  std::string_view layer = "Mamba";

  auto tensors() { return std::tie(xz, weight, bias, initial_state); }
  auto fields() { return std::tuple_cat(tensors(), std::tie(layer)); }
};

at::Tensor left_half(const at::Tensor& xz) { return xz.narrow_symint(-1, 0, xz.sym_size(-1) / 2); }
at::Tensor right_half(const at::Tensor& xz) {
  const c10::SymInt columns = xz.sym_size(-1) / 2;
  return xz.narrow_symint(-1, columns, columns);
}

causal_conv1d::Inputs convolution_of(const at::Tensor& x, const at::Tensor& weight, const OptionalTensor& bias,
                                     const OptionalTensor& initial_state) {
  causal_conv1d::Inputs in;
  in.x = x;
  in.weight = mixers::taps_of(weight);
  in.bias = bias;
  in.initial_state = initial_state;
  in.activation = kActivation;
  return in;
}

// Returns the tensor whose right half of columns is `half`, if allocate_grad_gate allocated it and `half` is its only
// reference; else an undefined tensor.
at::Tensor whole_of(const at::Tensor& half) {
  if (!is_sole_owner(half) || half.dim() != 3) return {};
  const int64_t batch = half.size(0), seqlen = half.size(1), columns = half.size(2);
  const std::array<int64_t, 3> strides{seqlen * 2 * columns, 2 * columns, 1};
  const bool fits = half.strides() == at::IntArrayRef(strides) && half.storage_offset() == columns &&
                    half.storage().nbytes() == static_cast<size_t>(batch * strides[0]) * half.element_size();
  return fits ? half.as_strided({batch, seqlen, 2 * columns}, strides, 0) : at::Tensor();
}

// The sum of the defined gradients, in the memory of one of them if reuses_memory allows it and nothing else refers to it.
at::Tensor add_grads(const at::Tensor& a, const at::Tensor& b, bool reuses_memory) {
  if (!a.defined() || !b.defined()) return a.defined() ? a : b;
  if (reuses_memory) {
    const auto can_take = [](const at::Tensor& grad) { return is_sole_owner(grad) && grad.is_non_overlapping_and_dense(); };
    if (can_take(a)) return a.add_(b);
    if (can_take(b)) return b.add_(a);
  }
  return a + b;
}

class MambaConv : public torch::autograd::Function<MambaConv> {
 public:
  // Backward calls registered operators unless it runs eagerly, so compiled autograd may trace it.
  static constexpr bool is_traceable = true;

  static variable_list forward(torch::autograd::AutogradContext* ctx, const at::Tensor& xz, const at::Tensor& weight,
                               const OptionalTensor& bias, const OptionalTensor& initial_state, std::string layer) {
    at::AutoDispatchBelowADInplaceOrView guard;
    const at::Tensor x = left_half(xz), z = right_half(xz);
    static const Operator<causal_conv1d::FwdOutputs, causal_conv1d::Inputs> op("ssm_kernels::_causal_conv1d_fwd");
    const at::Tensor out = op(convolution_of(x, weight, bias, initial_state)).out;
    const at::Tensor again = out.alias();
    // Views made below autograd have version counters of their own. With shared counters, autograd notices in-place changes.
    if (!xz.is_inference()) {
      for (const at::Tensor& view : {x, z})
        torch::autograd::impl::set_version_counter(view, xz.unsafeGetTensorImpl()->version_counter());
    }
    torch::autograd::impl::set_version_counter(again, out.unsafeGetTensorImpl()->version_counter());
    ctx->save_for_backward({x, weight, or_undefined(bias), or_undefined(initial_state)});
    ctx->saved_data["layer"] = std::move(layer);
    ctx->set_materialize_grads(false);
    // Without a gradient of xz, none of z is needed.
    if (!xz.requires_grad()) ctx->mark_non_differentiable({z});
    return {out, again, z};
  }

  // Takes `grads` by reference: a copy would hold a second reference to each gradient, and whole_of needs the only one.
  template <typename Grads>
  static variable_list backward(torch::autograd::AutogradContext* ctx, Grads&& grads) {
    constexpr size_t kNumArguments = 5;  // of forward, after ctx
    variable_list result(kNumArguments);
    if (!grads[0].defined() && !grads[1].defined() && !grads[2].defined()) return result;
    const auto saved = ctx->get_saved_variables();
    NeedsGrad needs_grad{};
    // Absent tensors have no edge in the graph.
    size_t edge = 0;
    for (size_t i = 0; i < needs_grad.size(); ++i) needs_grad[i] = saved[i].defined() && ctx->needs_input_grad(edge++);
    const bool is_eager = runs_eagerly() && are_plain(saved) && are_plain(grads);
    const at::Tensor& x = saved[0];
    // CUDA's kernels read both gradients of x; elsewhere they are added first.
    const bool reads_both = is_eager && needs_grad[kGradX] && x.is_cuda() && grads[0].defined() && grads[1].defined();
    causal_conv1d::BwdOutInputs convolution;
    convolution.in = convolution_of(x, saved[1], or_absent(saved[2]), or_absent(saved[3]));
    convolution.grad_out = or_absent(reads_both ? grads[0] : add_grads(grads[0], grads[1], is_eager));
    if (reads_both) convolution.grad_out_2 = grads[1];
    convolution.needs_grad = needs_grad;
    const bool has_grad_out = convolution.grad_out.has_value();
    causal_conv1d::BwdOutGrads grads_of_parameters;
    if (is_eager && needs_grad[kGradX]) {
      at::AutoDispatchBelowADInplaceOrView guard;
      at::Tensor grad_xz = grads[2].defined() ? whole_of(grads[2]) : at::Tensor();
      if (!grad_xz.defined()) {
        grad_xz = empty_tensor({x.size(0), x.size(1), 2 * x.size(2)}, x.options());
        grads[2].defined() ? right_half(grad_xz).copy_(grads[2]) : right_half(grad_xz).zero_();
      }
      convolution.required_grad_x = left_half(grad_xz);
      if (has_grad_out) {
        static const Operator<causal_conv1d::BwdOutGrads, causal_conv1d::BwdOutInputs> op(
            "ssm_kernels::_causal_conv1d_bwd_out");
        grads_of_parameters = op(convolution);
      } else {
        convolution.required_grad_x.zero_();
      }
      result[0] = grad_xz;
    } else {
      at::Tensor grad_x;
      if (has_grad_out) {
        static const Operator<causal_conv1d::GradTensors, causal_conv1d::BwdInputs> op("ssm_kernels::_causal_conv1d_bwd");
        convolution.layer = ctx->saved_data["layer"].toStringView();
        causal_conv1d::GradTensors computed = op(convolution);
        grad_x = std::move(computed[kGradX]);
        std::move(computed.begin() + 1, computed.end(), grads_of_parameters.begin());
      }
      if (needs_grad[kGradX]) {
        const auto or_zeros = [&](const at::Tensor& grad) { return grad.defined() ? grad : at::zeros_like(x); };
        result[0] = at::cat({or_zeros(grad_x), or_zeros(grads[2])}, -1);
      }
    }
    if (!has_grad_out) return result;
    for (const auto place : {kGradWeight, kGradBias, kGradInitialState}) {
      if (needs_grad[place]) result[place] = std::move(grads_of_parameters[place - 1]);
    }
    if (needs_grad[kGradWeight]) result[kGradWeight] = result[kGradWeight].view(saved[1].sizes());
    return result;
  }
};

// Composes the operator of causal_conv1d and views.
Result compose(const Inputs& in) {
  static const Operator<causal_conv1d::FwdOutputs, causal_conv1d::Inputs> op("ssm_kernels::_causal_conv1d");
  const at::Tensor out = op(convolution_of(left_half(in.xz), in.weight, in.bias, in.initial_state)).out;
  return {out, out.alias(), right_half(in.xz)};
}

struct MambaConvOp {
  using Inputs = mamba_conv::Inputs;
  using Result = mamba_conv::Result;
  static constexpr char kSchema[] = "ssm_kernels::_mamba_conv";
  static constexpr bool kIsPublic = false;

  // Casts as causal_conv1d does: the sequence and the state to the autocast dtype, parameters of a third dtype to float32.
  static void cast(Inputs& in, const Autocast& to) {
    to.to_lower(in.xz, in.initial_state);
    to.to_float_unless(to.lower, in.weight, in.bias);
  }
};

Result mamba_conv(Inputs& in) {
  TORCH_CHECK_VALUE(in.xz.dim() == 3 && in.xz.sym_size(2) % 2 == 0, in.layer,
                    ": expected xz of shape (batch, seqlen, 2 * channels), got ", in.xz.sym_sizes());
  const bool makes_node = std::apply(
      [](const auto&... tensor) {
        // As the scan, which follows: Python names the class that is derived from this layer.
        TORCH_CHECK_NOT_IMPLEMENTED(!(has_tangent(tensor) || ...), not_supported("Mamba", kForwardMode));
        return (needs_autograd(tensor) || ...);
      },
      in.tensors());
  if (!makes_node || !has_plain_tensors(in.tensors())) return compose(in);
  auto outputs = MambaConv::apply(in.xz, in.weight, in.bias, in.initial_state, std::string(in.layer));
  return {outputs[0], outputs[1], outputs[2]};
}

}  // namespace

bool is_gate(const at::Tensor& z) {
  if (!z.requires_grad() || !is_plain_tensor(z)) return false;
  const auto node = z.grad_fn();
  return node != nullptr && dynamic_cast<torch::autograd::CppNode<MambaConv>*>(&*node) != nullptr;
}

at::Tensor allocate_grad_gate(const at::Tensor& z) {
  return right_half(empty_tensor({z.size(0), z.size(1), 2 * z.size(2)}, z.options()));
}

at::Tensor left_of_grad_gate(const at::Tensor& grad_gate) {
  return grad_gate.as_strided(grad_gate.sizes(), grad_gate.strides(), /*storage_offset=*/0);
}

TORCH_LIBRARY_IMPL(ssm_kernels, CompositeImplicitAutograd, m) { implement<&mamba_conv>(m, "_mamba_conv"); }

SSM_AUTOCAST_OPERATOR(MambaConvOp)

}  // namespace ssm_kernels::mamba_conv
