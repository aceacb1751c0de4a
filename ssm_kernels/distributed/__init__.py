"""Models larger than one device, on ``torch.distributed``: tensor parallelism and checkpoints. docs/distributed_tensor.md."""

from .checkpoints import get_state_dict, set_state_dict
from .tensor_parallel import TensorParallel

__all__ = ["TensorParallel", "get_state_dict", "set_state_dict"]
