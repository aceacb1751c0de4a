// Chooses the instruction set of the CPU kernels: the one that torch uses.

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
    // Ordered like torch's sets. If torch uses a set that is not built here, take the widest one below it; if torch uses an
    // unknown set, of another architecture, take the default.
    const std::string known[] = {"DEFAULT", "AVX2", "AVX512"};
    const size_t rank = std::find(std::begin(known), std::end(known), used) - std::begin(known);
    return rank == std::size(known) ? size_t(0) : std::min(rank, std::size(built) - 1);
  }();
  return index;
}

}  // namespace ssm_kernels
