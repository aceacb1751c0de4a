#include "mlstm/cuda/chunk_launch.cuh"
