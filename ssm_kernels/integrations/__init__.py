"""Other packages' models and tools on the operators of this one. Each module is imported when it is first used."""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from .._submodules import public_names, submodules_on_use

if _TYPE_CHECKING:
    from . import decompositions as decompositions
    from . import dtensor as dtensor
    from . import fla as fla
    from . import flops as flops
    from . import transformers as transformers
else:  # A type checker would take a __getattr__ for every misspelled name.
    __getattr__ = submodules_on_use(__name__, ("decompositions", "dtensor", "fla", "flops", "transformers"))

__all__ = ["decompositions", "dtensor", "fla", "flops", "transformers"]

__dir__ = public_names(__name__)
