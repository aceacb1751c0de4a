// CPU entry points of the chunked scan.

#include <torch/library.h>

#include "ssd/ssd_aten.h"

namespace ssm_kernels::ssd {

TORCH_LIBRARY_IMPL(ssm_kernels, CPU, m) {
  m.impl("_ssd_chunk_scan_fwd", &Unpacked<FwdSignature>::kernel<&fwd_aten>);
  m.impl("_ssd_chunk_scan_bwd", &Unpacked<BwdSignature>::kernel<&bwd_aten>);
}

}  // namespace ssm_kernels::ssd
