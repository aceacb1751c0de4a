// Trains a state-space model in C++, with no Python in the process: a selective scan learns A, B and C of another one from what
// goes in and what comes out.
//
//   fit path/to/ssm_kernels/_ops.abi3.so [cpu|cuda]
//
// The folder of _ops.abi3.so has the kernel libraries that it loads.
//
// Prints the loss, and exits with 1 if it has not fallen to a hundredth.

#include <ATen/core/dispatch/Dispatcher.h>
#include <dlfcn.h>
#include <torch/optim/adam.h>
#include <torch/types.h>

#include <cstdio>
#include <optional>
#include <string_view>
#include <tuple>

namespace {

using OptionalTensor = std::optional<at::Tensor>;

// ssm_kernels::selective_scan, its arguments in the order of the schema, which docs/torch_ops.md lists.
std::tuple<at::Tensor, at::Tensor> selective_scan(const at::Tensor& u, const at::Tensor& delta, const at::Tensor& A,
                                                  const at::Tensor& B, const at::Tensor& C, std::string_view discretization) {
  using Signature = std::tuple<at::Tensor, at::Tensor>(
      const at::Tensor& u, const at::Tensor& delta, const at::Tensor& A, const at::Tensor& B, const at::Tensor& C,
      const OptionalTensor& D, const OptionalTensor& z, const OptionalTensor& delta_bias, const OptionalTensor& initial_state,
      const OptionalTensor& seq_idx, const OptionalTensor& cu_seqlens, std::string_view discretization, bool delta_softplus,
      bool reverse);
  static const auto scan = c10::Dispatcher::singleton().findSchemaOrThrow("ssm_kernels::selective_scan", "").typed<Signature>();
  return scan.call(u, delta, A, B, C, {}, {}, {}, {}, {}, {}, discretization, /*delta_softplus=*/true,
                   /*reverse=*/false);
}

// Tensors of (dim, dstate) each; A is -exp(log_A), so that states decay whatever is learned.
struct System {
  at::Tensor log_A, B, C;

  System(int64_t dim, int64_t dstate, const at::TensorOptions& options)
      : log_A(torch::randn({dim, dstate}, options)),
        B(torch::randn({dim, dstate}, options)),
        C(torch::randn({dim, dstate}, options)) {}

  at::Tensor operator()(const at::Tensor& u, const at::Tensor& delta) const {
    return std::get<0>(selective_scan(u, delta, -log_A.exp(), B, C, "bilinear"));
  }
};

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2 || argc > 3) {
    std::fprintf(stderr, "usage: %s path/to/ssm_kernels/_ops.abi3.so [cpu|cuda]\n", argv[0]);
    return 2;
  }
  // Its operators register themselves with the dispatcher.
  if (dlopen(argv[1], RTLD_NOW) == nullptr) {
    std::fprintf(stderr, "%s\n", dlerror());
    return 2;
  }

  torch::manual_seed(0);
  const auto options = at::TensorOptions().device(argc == 3 ? argv[2] : "cpu");
  constexpr int64_t kBatch = 8, kDim = 16, kSeqlen = 128, kDstate = 4;
  const System teacher(kDim, kDstate, options), student(kDim, kDstate, options);
  torch::optim::Adam optimizer({student.log_A.requires_grad_(), student.B.requires_grad_(), student.C.requires_grad_()}, 0.02);

  double first = 0, loss = 0;
  for (int step = 0; step <= 500; ++step) {
    const at::Tensor u = torch::randn({kBatch, kDim, kSeqlen}, options), delta = torch::randn({kBatch, kDim, kSeqlen}, options);
    const at::Tensor error = torch::mse_loss(student(u, delta), teacher(u, delta));
    loss = error.item<double>();
    if (step == 0) first = loss;
    if (step % 100 == 0) std::printf("step %3d  loss %.5f\n", step, loss);
    optimizer.zero_grad();
    error.backward();
    optimizer.step();
  }
  return loss <= first / 100 ? 0 : 1;
}
