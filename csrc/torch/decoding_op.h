// The two forms of a decoding operator: `op`, which returns its result, and `op_out` for servers, which writes to arguments,
// reads and writes chosen slots of a cache, and takes several tokens a row.
//
// The arguments of `op` are a struct Step with the member state_batch_indices and
//
//   bool is_plain() const;  // whether kernels take the call without TokenParams: no row has several slots
//
// Its namespace has, for Step and for ServerInputs<Step>, the functions that DecodingKernels calls.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <optional>
#include <tuple>
#include <utility>

#include "torch/autograd_op.h"
#include "torch/checks.h"
#include "torch/dispatch.h"
#include "torch/slot_indices.h"

namespace ssm_kernels {

// The arguments of `op_out`, in the order of its schema.
template <typename Step>
struct ServerInputs : Step {
  at::Tensor out;
  std::optional<at::Tensor> dst_state_batch_indices;
  std::optional<int64_t> pad_slot_id;
  std::optional<at::Tensor> num_accepted_tokens, cu_seqlens;
  // A buffer that receives the state after each token; operators name it by what it holds.
  std::optional<at::Tensor> intermediate;
  std::optional<at::Tensor> intermediate_state_indices;
  bool disable_state_update = false;

  ServerInputs() = default;
  ServerInputs(const Step& in, at::Tensor out) : Step(in), out(std::move(out)) {}

  auto fields() {
    return std::tuple_cat(Step::fields(), std::tie(out, dst_state_batch_indices, pad_slot_id, num_accepted_tokens, cu_seqlens,
                                                   intermediate, intermediate_state_indices, disable_state_update));
  }

  DecodingOptions decoding() const {
    return {this->state_batch_indices,  dst_state_batch_indices, pad_slot_id, num_accepted_tokens, cu_seqlens, intermediate,
            intermediate_state_indices, disable_state_update};
  }

  bool is_packed() const { return is_present(cu_seqlens); }

  // Whether `op`, given `out`, would do the same.
  bool is_plain() const {
    return Step::is_plain() && !has_other_slots(this->state_batch_indices, dst_state_batch_indices, pad_slot_id) &&
           !is_present(num_accepted_tokens) && !is_packed() && !is_present(intermediate) && !disable_state_update;
  }
};

// Describes `op_out` by the description of `op` (autograd_op.h). A struct that derives from it has kSchema and meta().
template <typename Op>
struct ServerOp : InPlaceOp<ServerInputs<typename Op::Inputs>, NoResult> {
  using Inputs = ServerInputs<typename Op::Inputs>;
  static constexpr const char *kName = Op::kName, *kScan = Op::kScan;

  static auto tensors(const Inputs& in) { return std::tuple_cat(Op::tensors(in), std::tie(in.out, in.intermediate)); }

  static void cast(Inputs& in, const Autocast& to) { Op::cast(in, to); }

  static void count_writes(const Inputs& in) {
    if (!in.disable_state_update) Op::count_writes(in);
    torch::autograd::increment_version(in.out);
    if (is_present(in.intermediate)) torch::autograd::increment_version(*in.intermediate);
  }
};

// Both operators' kernels for a device, in the functions of Step's namespace:
//
//   void check_inputs(const Step&);
//   void check_out_inputs(const ServerInputs<Step>&);
//   at::Tensor allocate_out(const Step&);
//   Params make_params(const Step&, const at::Tensor& out);
//   Params make_out_params(const ServerInputs<Step>&, TokenParams&);
//
// TokenParams has the member `rows`, a DecodingRows. Device has Inputs, which is Step, TokenParams, Guard, which is
// constructed from the inputs and lives during the call, check_values(in, params), for servers check_values(in, params, rows),
// and run(in, params, tokens), where `tokens` is null for plain calls.
template <typename Device>
struct DecodingKernels {
  using Inputs = typename Device::Inputs;

  static NoResult out(const ServerInputs<Inputs>& in) {
    check_out_inputs(in);
    const typename Device::Guard guard(in);
    typename Device::TokenParams tokens;
    const auto params = make_out_params(in, tokens);
    Device::check_values(in, params, tokens.rows);
    if (in.out.numel() > 0) Device::run(in, params, in.is_plain() ? nullptr : &tokens);
    return {};
  }

  static at::Tensor step(const Inputs& in) {
    check_inputs(in);
    const typename Device::Guard guard(in);
    at::Tensor result = allocate_out(in);
    if (!in.is_plain()) {
      out(ServerInputs<Inputs>(in, result));
      return result;
    }
    const auto params = make_params(in, result);
    Device::check_values(in, params);
    if (result.numel() > 0) Device::run(in, params, /*tokens=*/nullptr);
    return result;
  }
};

}  // namespace ssm_kernels
