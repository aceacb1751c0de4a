#include "cuda/row_copies.cuh"
