// The table of debug options: name, default and range of each, and the operator that sets them.

#include "torch/debug_options.h"

#include <c10/util/Exception.h>
#include <torch/library.h>

#include <array>
#include <atomic>
#include <limits>
#include <string>
#include <string_view>

namespace ssm_kernels {
namespace {

constexpr int64_t kUnlimited = std::numeric_limits<int64_t>::max();

struct Option {
  std::string_view name;
  int64_t least, most;
  // Names of the values from `least` on, for error messages; empty for a number of bytes.
  std::string_view meaning;
  std::atomic<int64_t> value;
};

// The last member is the default.
std::array<Option, static_cast<size_t>(DebugOption::kCount)> options = {{
    {"causal_conv1d_kernel", 0, 1, "faster, by_layout", {0}},
    {"linear_scan_kernel", 0, 2, "faster, tiles, sequential", {0}},
    {"selective_scan_kernel", 0, 2, "faster, sequential, warp_scan", {0}},
    {"selective_scan_shared_bytes", 1, kUnlimited, "", {kUnlimited}},
    {"ssd_mma", 0, 1, "wgmma, mma", {0}},
    {"ssd_workspace_bytes", 1, kUnlimited, "", {int64_t(1) << 30}},
    {"ssd_shared_bytes", kMinSharedBytesPerBlock, kUnlimited, "", {kUnlimited}},
    {"delta_rule_mma", 0, 1, "wgmma, mma", {0}},
    {"delta_rule_shared_bytes", kMinSharedBytesPerBlock, kUnlimited, "", {kUnlimited}},
    {"delta_rule_cpu", 0, 1, "kernels, matmuls", {0}},
    {"mamba3_cpu", 0, 1, "kernels, operators", {0}},
}};

std::string range_of(const Option& option) {
  if (option.meaning.empty()) return "of at least " + std::to_string(option.least);
  return "from " + std::to_string(option.least) + " to " + std::to_string(option.most) + " (" + std::string(option.meaning) +
         ")";
}

int64_t set_debug_option(std::string_view name, int64_t value) {
  std::string known;
  for (Option& option : options) {
    if (option.name == name) {
      TORCH_CHECK_VALUE(value >= option.least && value <= option.most, "_set_debug_option: expected ", name, " ",
                        range_of(option), ", got ", value);
      return option.value.exchange(value);
    }
    known += (known.empty() ? "" : ", ") + std::string(option.name);
  }
  TORCH_CHECK_VALUE(false, "_set_debug_option: unknown option '", name, "', expected one of: ", known);
}

}  // namespace

int64_t debug_option(DebugOption option) { return options[static_cast<size_t>(option)].value.load(); }

TORCH_LIBRARY_IMPL(ssm_kernels, CompositeExplicitAutograd, m) { m.impl("_set_debug_option", &set_debug_option); }

}  // namespace ssm_kernels
