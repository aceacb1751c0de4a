// Asks torch once which instruction set it uses.

#include "cpu/capability.h"

#include <ATen/Version.h>

#include <algorithm>
#include <iterator>
#include <string>

namespace ssm_kernels {

size_t cpu_capability_index() {
  static const size_t index = [] {
#define SSM_ROW(capability) #capability,
    const std::string built[] = {SSM_CPU_CAPABILITIES(SSM_ROW)};
#undef SSM_ROW
    const std::string used = at::get_cpu_capability();
    // torch's sets are ordered too, so one that is not built here (or is another processor's) leaves the widest below it.
    const std::string known[] = {"DEFAULT", "AVX2", "AVX512"};
    const size_t rank = std::find(std::begin(known), std::end(known), used) - std::begin(known);
    return rank == std::size(known) ? size_t(0) : std::min(rank, std::size(built) - 1);
  }();
  return index;
}

}  // namespace ssm_kernels
