// Instantiates the forward kernels of one dtype, `Scalar` in the enclosing namespace, for every discretization.
#pragma once

#include "selective_scan/cuda/sequential_fwd.cuh"
#include "selective_scan/cuda/short_scan_fwd.cuh"
#include "selective_scan/cuda/warp_scan_fwd.cuh"

#define SSM_INSTANTIATE_METHOD(enumerator, name, Method)                                                                  \
  template cudaError_t warp_scan::launch_fwd<Scalar, Method>(const SelectiveScanFwdParams&, const warp_scan::ScanPlan&,   \
                                                             cudaStream_t);                                               \
  template cudaError_t sequential::launch_fwd<Scalar, Method>(const SelectiveScanFwdParams&, const sequential::ScanPlan&, \
                                                              cudaStream_t);

#define SSM_INSTANTIATE_FWD                                                                                       \
  template size_t warp_scan::fwd_shared_bytes<Scalar>(const SelectiveScanFwdParams&, const warp_scan::ScanPlan&); \
  template size_t sequential::fwd_shared_bytes<Scalar>(const SelectiveScanFwdParams&);                            \
  template cudaError_t short_scan::launch_fwd<Scalar>(const SelectiveScanFwdParams&, const short_scan::ScanPlan&, \
                                                      cudaStream_t);                                              \
  SSM_DISCRETIZATIONS(SSM_INSTANTIATE_METHOD)
