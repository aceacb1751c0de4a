// The structs of common/two_sample_discretization.h, and the adjoint of a scan with them, against differences. Prints the
// largest relative errors: of the derivatives of each rule, then of the gradients of each rule.
#include "common/two_sample_discretization.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <vector>

using namespace ssm_kernels;

namespace {

constexpr int kSteps = 5;

struct Inputs {
  double A, h0, u_before, B_before;
  double delta[kSteps], u[kSteps], B[kSteps], C[kSteps], lam[kSteps];
};
constexpr int kInputs = sizeof(Inputs) / sizeof(double);

template <typename Rule>
double derivative_error(const std::function<Rule()>& make) {
  double worst = 0;
  const Rule rule = make();
  for (const double z : {-30.0, -4.0, -2.0, -1.51, -1.2, -0.6, -0.3, -1e-3, -1e-7, 0.0, 1e-4, 0.2}) {
    const auto values = [&](double x, double (&out)[5]) {
      const double basis = rule.basis(x);
      const auto gain = rule.gain(x, basis);
      out[0] = rule.abar(x, basis), out[1] = gain.current, out[2] = gain.previous, out[3] = x * gain.current;
      out[4] = x * gain.previous;
    };
    const double step = 1e-5 * std::max(1.0, std::abs(z));
    double above[5], below[5];
    values(z + step, above), values(z - step, below);
    const auto d = rule.derivatives(z, rule.basis(z));
    const double found[5] = {d.abar, d.gain, d.previous, d.z_gain, d.z_previous};
    for (int i = 0; i < 5; ++i) {
      const double expected = (above[i] - below[i]) / (2 * step);
      worst = std::max(worst, std::abs(found[i] - expected) / std::max(1e-2, std::abs(expected)));
    }
  }
  return worst;
}

// The loss: the sum of C h, and the last state.
template <typename MakeRule>
double loss(const Inputs& in, const MakeRule& make, std::vector<double>& states) {
  double h = in.h0, before = in.B_before * in.u_before, sum = 0;
  states.assign(1, h);
  for (int t = 0; t < kSteps; ++t) {
    const auto rule = make(in.lam[t]);
    const double z = in.delta[t] * in.A, basis = rule.basis(z), v = in.B[t] * in.u[t];
    const auto gain = rule.gain(z, basis);
    h = rule.abar(z, basis) * h + in.delta[t] * (gain.current * v + gain.previous * before);
    before = v;
    states.push_back(h);
    sum += in.C[t] * h;
  }
  return sum + h;
}

template <typename MakeRule>
double gradient_error(const MakeRule& make, bool has_lam) {
  Inputs in = {-0.7,
               0.3,
               0.9,
               -1.1,
               {0.4, 0.0, 1.3, 0.05, 0.8},
               {1, -0.5, 0.3, 2, -1},
               {0.2, 1, -0.7, 0.4, 0.6},
               {1, -1, 0.5, 0.25, 2},
               {0.1, 0.9, 0.5, 1.0, 0.0}};
  std::vector<double> h;
  loss(in, make, h);
  Inputs grad = {};
  double adjoint = 1, of_later = 0;  // Abar_{t+1} g_{t+1}, and the gradient of v_t through step t + 1
  for (int t = kSteps - 1; t >= 0; --t) {
    const auto rule = make(in.lam[t]);
    const double delta = in.delta[t], z = delta * in.A, basis = rule.basis(z), v = in.B[t] * in.u[t];
    const double before = t > 0 ? in.B[t - 1] * in.u[t - 1] : in.B_before * in.u_before;
    const auto gain = rule.gain(z, basis);
    const auto d = rule.derivatives(z, basis);
    const double g = adjoint + in.C[t], of_v = delta * gain.current * g + of_later;
    grad.C[t] = h[t + 1];
    grad.u[t] = of_v * in.B[t];
    grad.B[t] = of_v * in.u[t];
    grad.delta[t] = g * (in.A * d.abar * h[t] + d.z_gain * v + d.z_previous * before);
    grad.A += g * delta * (d.abar * h[t] + delta * (d.gain * v + d.previous * before));
    grad.lam[t] = has_lam ? delta * g * (v - std::exp(z) * before) : 0;
    adjoint = rule.abar(z, basis) * g;
    of_later = delta * gain.previous * g;
  }
  grad.h0 = adjoint;
  grad.u_before = of_later * in.B_before;
  grad.B_before = of_later * in.u_before;
  double worst = 0;
  for (int i = 0; i < kInputs; ++i) {
    double* const value = reinterpret_cast<double*>(&in) + i;
    const double kept = *value, step = 1e-5;
    *value = kept + step;
    const double above = loss(in, make, h);
    *value = kept - step;
    const double below = loss(in, make, h);
    *value = kept;
    const double expected = (above - below) / (2 * step);
    worst = std::max(worst, std::abs(reinterpret_cast<double*>(&grad)[i] - expected) / std::max(1e-2, std::abs(expected)));
  }
  return worst;
}

}  // namespace

int main() {
  std::printf("%.2e\n", derivative_error<FohRamp>([] { return FohRamp(); }));
  std::printf("%.2e\n", derivative_error<Trapezoidal>([] { return Trapezoidal(); }));
  std::printf("%.2e\n", derivative_error<GbtTwoSample>([] { return GbtTwoSample(0.7); }));
  std::printf("%.2e\n", derivative_error<ExpTrapezoidal<double>>([] { return ExpTrapezoidal<double>{0.3}; }));
  std::printf("%.2e\n", gradient_error([](double) { return FohRamp(); }, false));
  std::printf("%.2e\n", gradient_error([](double) { return Trapezoidal(); }, false));
  std::printf("%.2e\n", gradient_error([](double) { return GbtTwoSample(0.7); }, false));
  std::printf("%.2e\n", gradient_error([](double lam) { return ExpTrapezoidal<double>{lam}; }, true));
}
