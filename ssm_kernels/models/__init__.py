"""Language models of the layers in ``ssm_kernels.nn``.

- :class:`MambaLM`: embedding, blocks, norm and head in the structure of ``mamba_ssm``'s ``MambaLMHeadModel``. It loads and
  saves that model's checkpoints. ``MambaConfig(mixer=...)`` chooses Mamba, Mamba-2, minGRU or minLSTM.
- :class:`MixerModel`: the same without the head.
- :class:`RecurrentMixer`: a minGRU or minLSTM instead of a Mamba mixer.
- :class:`GenerationOutput`: tokens and scores of ``MambaLM.generate``.
- :class:`InferenceParams`: the cache for decoding. ``MambaLM.generate`` makes its own.
- :func:`parameter_groups`: the parameters of any model with these layers, grouped for an optimizer with weight decay.
"""

from .._submodules import public_names
from .config import MambaConfig
from .generation import GenerationOutput, InferenceParams
from .mamba_lm import CausalLMLossOutput, CausalLMOutput, MambaLM
from .mixer_model import MixerModel
from .optimization import parameter_groups
from .recurrent_mixer import RecurrentMixer
from .sampling import sample

__all__ = [
    "CausalLMLossOutput",
    "CausalLMOutput",
    "GenerationOutput",
    "InferenceParams",
    "MambaConfig",
    "MambaLM",
    "MixerModel",
    "RecurrentMixer",
    "parameter_groups",
    "sample",
]

__dir__ = public_names(__name__)
