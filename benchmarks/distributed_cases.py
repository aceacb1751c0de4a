"""The cases that ``bench_distributed.py`` measures on every rank: language models over ranks and on one GPU, and collectives.

Every rank runs the same code. A row has *figures* under "ours" (the model over the ranks), "one" (the whole model and batch on
one GPU) and "part" (one GPU with a rank's share of the steps, without communication). Times of "ours" are those of the slowest
rank, the others those of the fastest.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from benchmarks.benchmark import Case, Run
from benchmarks.harness import Stages, measure, peak_bytes, synchronize
from ssm_kernels.models import MambaConfig, MambaLM

VOCABULARY = 256  # bytes: the layers take nearly all of the time
# Relative differences from one GPU in bfloat16 beyond which a result is wrong.
WRONG = {"loss": 2e-3, "norm of the gradients": 3e-2}
OPERATIONS = {"all_gather_into_tensor": "all-gather", "all_reduce": "all-reduce", "reduce_scatter_tensor": "reduce-scatter"}
OPERATIONS |= {"send": "message"}
CALLS = 10  # of a collective, in one trial


def slowest(timings: Sequence[dict[str, float]]) -> dict[str, float]:
    return max(timings, key=lambda timing: timing["median"])


def fastest(timings: Sequence[dict[str, float]]) -> dict[str, float]:
    return min(timings, key=lambda timing: timing["median"])


def mesh_of(run: Run) -> Any:
    """The ranks: all processes, unless the options have a mesh of some."""
    return run.options.mesh or dist.init_device_mesh(run.device.type, (run.options.ranks,))


def of_ranks(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """The values of all ranks."""
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found


def measure_over_ranks(stages: Mapping[str, Stages], run: Run, parts: Sequence[str] = ()) -> dict[str, dict[str, Any]]:
    """The times of stages, by name: of all ("both") and of each that has a name in ``parts``. Ranks begin trials together."""
    group = mesh_of(run).get_group()
    settings = {"device": run.device, "trials": run.trials, "warmup": run.warmup, "cache_writes": run.cache_writes}

    def together() -> None:
        synchronize(run.device)
        dist.barrier(group)

    together()
    found = measure(stages, **settings, on_trial=together)
    mine = {
        name: {part: timing.to_dict() for part, timing in zip((*parts, "both"), (*timings.stages, timings.total), strict=False)}
        if parts
        else {"both": timings.total.to_dict()}
        for name, timings in found.items()
    }
    choose = {name: slowest if name == "ours" else fastest for name in mine}
    everyone = of_ranks(mine, group)
    return {
        name: {what: choose[name]([of_rank[name][what] for of_rank in everyone]) for what in timings}
        for name, timings in mine.items()
    }


class Sent(TorchDispatchMode):
    """Records the collectives and messages of a call: their names, and the bytes of the buffers that a rank passes to them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[dict[str, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Collectives in place have names that end in an underscore.
        name = func.name().rpartition("::")[2].rstrip("_")
        if name in OPERATIONS:
            self.calls.append({"operation": OPERATIONS[name], "bytes": args[0].nbytes})
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class ModelCase(Case):
    """Forward and backward of a language model in bfloat16, over ranks and on one GPU."""

    layer: str = "Mamba"
    ranks: int = 2
    batch: int = 1
    seqlen: int = 131072
    d_model: int = 1024
    n_layer: int = 24
    groups: int = 1
    device: str = "cuda"
    kind = ""
    splits_loss = False

    @property
    def name(self) -> str:
        sizes = f"B{self.batch} L{self.seqlen}, {self.n_layer} layers, d_model {self.d_model}{self.variant}"
        return f"{self.kind}, {self.layer} {sizes}, {self.ranks} {'GPUs' if self.device == 'cuda' else 'processes'}"

    @property
    def variant(self) -> str:
        """Follows the sizes in the name."""
        return f", {self.groups} groups" if self.groups > 1 else ""

    @property
    def fields(self) -> dict[str, Any]:
        sizes = {name: getattr(self, name) for name in ("layer", "ranks", "batch", "seqlen", "d_model", "n_layer")}
        return {"kind": self.kind, **sizes}

    def model(self, device: torch.device) -> MambaLM:
        torch.manual_seed(0)
        options = {"ngroups": self.groups} if self.groups > 1 else {}
        sizes: dict[str, Any] = {"d_model": self.d_model, "n_layer": self.n_layer, "vocab_size": VOCABULARY}
        return MambaLM(MambaConfig(**sizes, mixer=self.layer, ssm_cfg=options), device=device, dtype=torch.bfloat16)

    def tokens(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Inputs and targets."""
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(VOCABULARY, (self.batch, self.seqlen + 1), generator=generator).to(device)
        return tokens[:, :-1], tokens[:, 1:]

    def stages(self, model: MambaLM, inputs: Tensor, targets: Tensor, finish: Callable[[], None] | None = None) -> Stages:
        """Forward and backward. The loss is a part of the mean over all tokens."""

        def forward() -> Tensor:
            logits = model(inputs).logits.float()
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / (self.batch * self.seqlen)

        def backward(loss: Tensor) -> None:
            model.zero_grad(set_to_none=True)
            loss.backward()
            if finish is not None:
                finish()

        return forward, backward

    def results(self, model: MambaLM, stages: Stages, group: dist.ProcessGroup | None) -> dict[str, float]:
        """The loss, summed over the ranks of a group if there is one, and the norm of the gradients."""
        loss = stages[0]()
        stages[1](loss)
        loss = loss.detach()
        if group is not None:
            dist.all_reduce(loss, group=group)
        norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 1e30)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        model.zero_grad(set_to_none=True)
        return {"loss": loss.item(), "norm of the gradients": norm.item()}

    def distributed(self, model: MambaLM, run: Run) -> tuple[MambaLM, Stages]:
        """The copy of a model that is distributed over the ranks, and its stages."""
        raise NotImplementedError

    def contenders(self, run: Run) -> tuple[dict[str, MambaLM], dict[str, Stages]]:
        """Models and stages by name."""
        model = self.model(run.device)
        parallel, ours = self.distributed(copy.deepcopy(model), run)
        return {"ours": parallel, "one": model}, {"ours": ours, "one": self.stages(model, *self.tokens(run.device))}

    def layer_input(self, run: Run) -> Tensor:
        """The input of a rank's layer."""
        raise NotImplementedError

    def sent(self, model: MambaLM, run: Run) -> dict[str, list[dict[str, Any]]]:
        """The collectives of a layer."""
        x = self.layer_input(run)
        mixer: Any = model.backbone.layers[0].mixer
        with Sent() as forward:
            out = mixer(x)
        with Sent() as backward:
            out.sum().backward()
        model.zero_grad(set_to_none=True)
        # Along a chain the first rank sends in forward and the last in backward: each as much as those between.
        calls = {"forward": forward.calls, "backward": backward.calls}
        everyone = of_ranks(calls, mesh_of(run).get_group())
        return {direction: max((found[direction] for found in everyone), key=len) for direction in calls}

    def row(self, run: Run) -> dict[str, Any]:
        models, stages = self.contenders(run)
        groups = {"ours": mesh_of(run).get_group() if self.splits_loss else None, "one": None}
        found = {name: self.results(model, stages[name], groups[name]) for name, model in models.items()}
        errors = {what: abs(found["ours"][what] - value) / abs(value) for what, value in found["one"].items()}
        times = measure_over_ranks(stages, run, ("forward", "backward"))
        row: dict[str, Any] = {"name": self.name, **self.fields, "tokens": self.batch * self.seqlen}
        for name, timings in times.items():
            row[name] = {"recorded": False, "unsupported": None, **timings}
        for name, model in models.items():
            parameters = sum(local(parameter).nbytes for parameter in model.parameters())
            row[name] |= {"parameters": parameters, "peak": self.peak(model, stages[name], parameters, run)}
        row["sent"] = self.sent(models["ours"], run)
        row["errors"] = {"ours": errors}
        row["wrong"] = [f"ours: {what}" for what, error in errors.items() if not error <= WRONG[what]]
        return row

    @staticmethod
    def peak(model: MambaLM, stages: Stages, parameters: int, run: Run) -> int | None:
        """The most bytes that a rank has allocated at a time, parameters and gradients included."""

        def step() -> None:
            stages[1](stages[0]())
            model.zero_grad(set_to_none=True)

        found = of_ranks(peak_bytes(step, run.device), mesh_of(run).get_group())
        return None if found[0] is None else parameters + max(found)


def local(parameter: Tensor) -> Tensor:
    to_local = getattr(parameter, "to_local", None)
    found: Tensor = parameter if to_local is None else to_local()
    return found


def checkpoint_blocks(model: MambaLM, **options: Any) -> None:
    """Recomputes each block in backward: only its input and the residual stream are kept, and what ``context_fn`` keeps."""
    for block in model.backbone.layers:
        forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False, **options)
        block.forward = forward  # type: ignore[method-assign]


@dataclass(frozen=True)
class ContextCase(ModelCase):
    """The sequence is split over the ranks. Every model recomputes its blocks in backward: one GPU cannot keep them."""

    exchange: str = "chain"
    kind = "context parallel"
    splits_loss = True

    @property
    def variant(self) -> str:
        return "" if self.exchange == "chain" else f", {self.exchange}"

    def distributed(self, model: MambaLM, run: Run) -> tuple[MambaLM, Stages]:
        from torch.distributed.tensor.parallel import parallelize_module

        from ssm_kernels.distributed import ContextParallel, keep_exchanged_states, sum_gradients

        mesh = mesh_of(run)
        parallelize_module(model, mesh, ContextParallel(exchange=self.exchange))
        checkpoint_blocks(model, context_fn=keep_exchanged_states)
        own = (tokens.tensor_split(self.ranks, 1)[mesh.get_local_rank()] for tokens in self.tokens(run.device))
        return model, self.stages(model, *own, finish=lambda: sum_gradients(model, mesh))

    def contenders(self, run: Run) -> tuple[dict[str, MambaLM], dict[str, Stages]]:
        models, stages = super().contenders(run)
        checkpoint_blocks(models["one"])
        first = (tokens[:, : self.seqlen // self.ranks] for tokens in self.tokens(run.device))
        return models, stages | {"part": self.stages(models["one"], *first)}

    def layer_input(self, run: Run) -> Tensor:
        shape = (self.batch, self.seqlen // self.ranks, self.d_model)
        return torch.randn(shape, device=run.device, dtype=torch.bfloat16, requires_grad=True)


@dataclass(frozen=True)
class TensorCase(ModelCase):
    """Channels or heads, and the vocabulary, are shared by the ranks. Nothing is recomputed."""

    kind = "tensor parallel"

    def distributed(self, model: MambaLM, run: Run) -> tuple[MambaLM, Stages]:
        from torch.distributed.tensor.parallel import parallelize_module

        from ssm_kernels.distributed import TensorParallel

        parallelize_module(model, mesh_of(run), TensorParallel())
        return model, self.stages(model, *self.tokens(run.device))

    def layer_input(self, run: Run) -> Tensor:
        shape = (self.batch, self.seqlen, self.d_model)
        return torch.randn(shape, device=run.device, dtype=torch.bfloat16, requires_grad=True)


@dataclass(frozen=True)
class CollectiveCase(Case):
    """A collective alone: the time of a call in a sequence of calls, each of which waits for the one before."""

    operation: str = "all-gather"
    nbytes: int = 2**20
    ranks: int = 2

    @property
    def name(self) -> str:
        size = f"{self.nbytes / 2**20:g} MiB" if self.nbytes >= 2**20 else f"{self.nbytes / 2**10:g} KiB"
        return f"{self.operation} of {size}, {self.ranks} ranks"

    def row(self, run: Run) -> dict[str, Any]:
        functional, group = torch.ops._c10d_functional, mesh_of(run).get_group()
        data = torch.zeros(self.nbytes // 2, dtype=torch.bfloat16, device=run.device)

        def call() -> Tensor:
            if self.operation == "all-gather":
                buffer = functional.all_gather_into_tensor(data, self.ranks, group.group_name)
            else:
                buffer = functional.all_reduce(data, "sum", group.group_name)
            result: Tensor = functional.wait_tensor(buffer)
            return result

        def calls() -> None:
            for _ in range(CALLS):
                call()

        timing = measure_over_ranks({"ours": [calls]}, run)["ours"]["both"]
        for name in ("median", "p20", "p80"):
            timing[name] /= CALLS
        fields = {"kind": "collective", "operation": self.operation, "bytes": self.nbytes, "ranks": self.ranks}
        return {"name": self.name, **fields, "ours": {"recorded": False, "unsupported": None, "call": timing}, "wrong": []}
