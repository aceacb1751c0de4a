#include "mlstm/cuda/gates.cuh"
#include "mlstm/cuda/normalizer.cuh"
#include "mlstm/cuda/rows.cuh"

namespace ssm_kernels::mlstm {

template cudaError_t launch_mlstm_gates<__half>(const GateParams&, cudaStream_t);
template cudaError_t launch_mlstm_scale_rows<__half>(const RowParams&, bool, cudaStream_t);
template cudaError_t launch_mlstm_normalizer<__half>(const NormalizerParams&, bool, cudaStream_t);
template cudaError_t launch_mlstm_normalizer<__half>(const NormalizerBwdParams&, bool, cudaStream_t);

}  // namespace ssm_kernels::mlstm
