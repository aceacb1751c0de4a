r"""Tensor parallelism: the ranks of a mesh dimension share channels of Mamba, heads of other mixers, and the vocabulary.

In every mixer and MLP the first projection is column parallel, the last is row parallel, and everything between them runs on a
rank's own channels. Forward sums the outputs of the last projection over the ranks, ``d_model`` numbers per step of a sequence.
Backward sums the gradients of the first projection's input. Other collectives, per step:

- Mamba's ``x_proj`` computes dt, B and C from all channels. It is row parallel: an all-reduce of ``dt_rank + 2 d_state``
  numbers in forward, and of their gradients in backward. ``dt_proj`` is column parallel.
- A rank of Mamba2 reads the groups of its heads. Where ``nheads / ranks`` is a multiple of the heads of a group, a rank owns
  whole groups: their B, C and norm are local. Otherwise, as with one group, every rank has the parameters of B and C, computes
  the groups that its heads read, and sums the gradients of these parameters over the ranks. The norm of such groups needs an
  all-reduce of their sums of squares: ``ngroups`` numbers in forward and as many in backward.
- Mamba3 is as Mamba2, but its norms are of a head or of B and C. Every rank has the parameters of its angles, which all heads
  share, and sums their gradients over the ranks.

The ranks share the rows of the vocabulary in the embedding and in the head: the two may be one weight, which is the largest
matrix of a small model. The parameters of norms are replicated. Every parameter of a model becomes a DTensor on the mesh,
because ``torch.nn.utils.clip_grad_norm_`` and foreach optimizers take no mixture of tensors and DTensors.

Sources: Shoeybi et al., *Megatron-LM* (arXiv 1909.08053), section 3; Korthikanti et al. (arXiv 2205.05198), section 4.2.2, for
sequence parallelism; Dao and Gu, *Transformers are SSMs* (arXiv 2405.21060), section 8.1, for heads and groups.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.distributed.tensor.parallel.style import ParallelStyle

from ..models.mamba_lm import MambaLM
from ..nn.block import GatedMLP
from ..nn.checks import check_bools
from ..nn.delta_net import DeltaNet
from ..nn.delta_rule import DeltaRuleMixer
from ..nn.gated_delta_net import GatedDeltaNet
from ..nn.gated_delta_product import GatedDeltaProduct
from ..nn.gated_rms_norm import GatedRMSNorm
from ..nn.kimi_delta_attention import KimiDeltaAttention
from ..nn.mamba import Mamba
from ..nn.mamba2 import Mamba2
from ..nn.mamba3 import Mamba3
from ..nn.naming import class_name
from ._agreement import compare
from ._group import Group, check_dimensions
from ._layer_operators import LayerOperators
from ._reductions import finished, shared_input, sum_over_ranks
from ._sharding import (
    ColumnParallelLinear,
    Distribution,
    RowParallelLinear,
    ShardedLayer,
    ShardedLinear,
    ShardedModule,
    ShardSpec,
    swap_class,
)
from ._split_norm import SplitNorm, split_mamba2_mixer

__all__ = ["TensorParallel"]

_NAME = "TensorParallel"


class TensorParallel(ParallelStyle):
    """A ``ParallelStyle`` for ``torch.distributed.tensor.parallel.parallelize_module``: shares a layer or a model over ranks.

    .. code-block:: python

        mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("data", "tensor"))
        parallelize_module(model, mesh["tensor"], TensorParallel())

    It applies to :class:`ssm_kernels.nn.Mamba`, :class:`ssm_kernels.nn.Mamba2`, :class:`ssm_kernels.nn.Mamba3`, the layers of
    the delta rule, :class:`ssm_kernels.nn.block.GatedMLP` and to :class:`ssm_kernels.models.MambaLM` with such mixers:
    embedding, blocks and head. All ranks call the layer with equal inputs and get equal outputs. Gradients are DTensors like
    their parameters. Apply the style before ``fully_shard``, which takes another dimension of the mesh, and before the
    optimizer is made. A mesh of one rank leaves the module unchanged.

    The layer's attributes then describe this rank. ``d_inner``, ``d_ssm``, ``nheads``, ``ngroups`` and ``num_bc_heads``, or
    ``num_heads``, ``num_v_heads``, ``key_dim`` and ``value_dim``, count its channels, heads and groups. Attributes such as
    ``A_log`` are its shards, and the states of ``allocate_inference_cache`` and ``step`` are those of its channels.
    ``named_parameters`` has DTensors. ``state_dict`` and ``load_state_dict`` keep the names and shapes of the unsharded layer.
    They are collective calls: every rank makes them.

    Args:
        sequence_parallel: the input and the output of a layer are a rank's span of the steps, (batch, seqlen / ranks, d_model),
            and so is everything between the blocks of a model: an all-gather and a reduce-scatter take the place of each
            all-reduce. A model takes all tokens and gives all logits. ``seqlen`` must be a multiple of the ranks, so that
            ``step`` and ``generate`` raise an error, and so do ``num_last_tokens`` and ``seq_idx``.
        gather_logits: a model returns all logits as a tensor; otherwise a DTensor that is sharded along the vocabulary, for
            ``torch.distributed.tensor.parallel.loss_parallel``, which never gathers them.

    Raises:
        ValueError: when it is applied: the mesh has several dimensions; the number of ranks does not divide the channels, the
            heads or the columns of an MLP; the module has no tensor parallelism, or its parameters are distributed already; the
            ranks have different layers, options or dtypes; a layer has :class:`ContextParallel` over the same ranks. Every rank
            raises it, before anything is changed.
        TypeError: a projection is not an ``nn.Linear``, as after an adapter was added, or an argument is not a bool.

    Examples:
        >>> import torch
        >>> import torch.distributed as dist
        >>> from torch.distributed.tensor.parallel import parallelize_module
        >>> from ssm_kernels import distributed
        >>> from ssm_kernels.models import MambaConfig, MambaLM
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # no arguments under torchrun
        >>> mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
        >>> model = MambaLM(MambaConfig(d_model=32, n_layer=1, vocab_size=100))
        >>> model = parallelize_module(model, mesh, distributed.TensorParallel())
        >>> model(torch.randint(100, (2, 10))).logits.shape  # the same on every rank
        torch.Size([2, 10, 104])
        >>> dist.destroy_process_group()
    """

    def __init__(self, *, sequence_parallel: bool = False, gather_logits: bool = True) -> None:
        super().__init__()
        check_bools(_NAME, sequence_parallel=sequence_parallel, gather_logits=gather_logits)
        self.sequence_parallel, self.gather_logits = sequence_parallel, gather_logits

    def __repr__(self) -> str:
        return f"{_NAME}(sequence_parallel={self.sequence_parallel}, gather_logits={self.gather_logits})"

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if device_mesh.ndim != 1:
            raise ValueError(
                f"{_NAME}: expected a mesh of one dimension, got {device_mesh.ndim}: slice it by name, as in mesh['tensor']"
            )
        layers, group = _layers_of(module), Group.of(device_mesh)

        def check() -> None:
            for name, layer in layers:
                _check(f"{_NAME}: {name}" if name else f"{_NAME}: {class_name(layer)}", layer, device_mesh.size())
                operators = getattr(layer, "operators", None)
                ranks_of_spans = operators.group if isinstance(operators, LayerOperators) else None
                check_dimensions(_NAME, group, "ContextParallel", ranks_of_spans)

        # Ranks that go on alone would wait for each other.
        compare(group, _NAME, self._describe(module, layers), check)
        if device_mesh.size() == 1:
            return module
        how = Distribution(device_mesh, self.src_data_rank)
        for _, layer in layers:
            _DISTRIBUTE[_kind(layer)](layer, how, self.sequence_parallel)
        if isinstance(module, MambaLM):
            self._distribute_model(module, how)
        return module

    def _describe(self, module: nn.Module, layers: list[tuple[str, nn.Module]]) -> dict[str, str]:
        """Describes style, layers and parameters, which must be equal on every rank."""
        return {
            "style": f"{self}, src_data_rank={self.src_data_rank}",
            "module": class_name(module),
            **{name or "layer": f"{class_name(layer)}({layer.extra_repr()})" for name, layer in layers},
            **{
                name: f"{p.dtype} {[*p.shape]}{', requires_grad' if p.requires_grad else ''}"
                for name, p in module.named_parameters()
            },
        }

    def _distribute_model(self, model: MambaLM, how: Distribution) -> None:
        mesh, between = how.mesh, Shard(1) if self.sequence_parallel else Replicate()
        for layer in (*model.backbone.layers, model.backbone):
            for name in ("norm", "norm2", "norm_f"):
                norm = getattr(layer, name, None)
                if isinstance(norm, nn.Module):
                    _replicate(norm, how, sums_gradients=self.sequence_parallel)
        embedding = cast(Any, model.backbone.embedding)
        _distribute_parameters(embedding, how, weight=Shard(0))
        swap_class(embedding, _VocabularyParallel, how.group)
        embedding._sequence_parallel = self.sequence_parallel
        logits = Replicate() if self.gather_logits else Shard(-1)
        head = ColwiseParallel(input_layouts=between, output_layouts=logits, use_local_output=self.gather_logits)
        head.src_data_rank = how.src_data_rank
        head._apply(model.lm_head, mesh)
        model.lm_head.register_forward_hook(_wait_for_output)
        swap_class(model.lm_head, ShardedModule, how.group)
        model.tie_weights()
        swap_class(model, _TensorParallelLM, how.group)
        of_ranks = cast(Any, model)
        of_ranks._tensor_mesh, of_ranks._sequence_parallel = mesh, self.sequence_parallel


def _layers_of(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The layers to distribute, with their names."""
    if not isinstance(module, MambaLM):
        return [("", module)]
    layers: list[tuple[str, nn.Module]] = []
    for i, block in enumerate(module.backbone.layers):
        layers += [(f"backbone.layers.{i}.{name}", child) for name in ("mixer", "mlp") if (child := getattr(block, name, None))]
    return layers


def _kind(layer: nn.Module) -> type[nn.Module]:
    return next((kind for kind in _DISTRIBUTE if isinstance(layer, kind)), nn.Module)


def _check(name: str, layer: nn.Module, ranks: int) -> None:
    """Checks a layer before anything is changed."""
    kind = _kind(layer)
    if kind is nn.Module:
        kinds = ", ".join(known.__name__ for known in _DISTRIBUTE)
        raise ValueError(f"{name}: expected a layer of {kinds} or a MambaLM of such, got {class_name(layer)}")
    if getattr(layer, "bimamba_type", "none") != "none":
        raise ValueError(f"{name}: expected a Mamba of one direction, got bimamba_type {layer.bimamba_type!r}")
    if any(isinstance(parameter, DTensor) for parameter in layer.parameters()):
        raise ValueError(f"{name}: expected parameters that are not distributed yet: apply it once, and before fully_shard")
    projections = ["in_proj", "x_proj", "dt_proj", "out_proj", "fc1", "fc2"]
    projections += ["q_proj", "k_proj", "v_proj", "a_proj", "b_proj", "o_proj"]
    is_kimi = isinstance(layer, KimiDeltaAttention)
    projections += ["f_proj.0", "f_proj.1", "g_proj.0", "g_proj.1"] if is_kimi else ["g_proj"]
    modules = dict(layer.named_modules())
    for projection in projections:
        linear = modules.get(projection)
        if linear is not None and not isinstance(linear, nn.Linear):
            raise TypeError(f"{name}: expected {projection} to be an nn.Linear, got {type(linear).__name__}")
    if isinstance(layer, Mamba):
        sizes = {"d_inner": layer.d_inner}
    elif isinstance(layer, Mamba2):
        sizes = {"nheads": layer.nheads, "d_inner - d_ssm": layer.d_inner - layer.d_ssm}
    elif isinstance(layer, Mamba3):
        sizes = {"nheads": layer.nheads}
    elif isinstance(layer, DeltaRuleMixer):
        sizes = {"num_heads": layer.num_heads}
    else:
        sizes = {"fc2.in_features": cast(GatedMLP, layer).fc2.in_features}
    for size_name, size in sizes.items():
        if size % ranks != 0:
            raise ValueError(f"{name}: expected a number of ranks that divides {size_name} = {size}, got {ranks}")


def _distribute_parameters(module: nn.Module, how: Distribution, **placements: Placement) -> None:
    """Makes these parameters of ``module`` itself DTensors, if it has them."""
    for name, placement in placements.items():
        parameter = module._parameters.get(name)
        if parameter is not None:
            distributed = nn.Parameter(how.distribute(parameter, placement), parameter.requires_grad)
            # Marks such as _no_weight_decay.
            distributed.__dict__.update(parameter.__dict__)
            module._parameters[name] = distributed


def _localize(module: nn.Module, how: Distribution, mixin: type[nn.Module] = ShardedModule, **placements: Placement) -> None:
    _distribute_parameters(module, how, **placements)
    swap_class(module, mixin, how.group, placements)


def _replicate(norm: nn.Module, how: Distribution, sums_gradients: bool) -> None:
    names = [name for name, parameter in norm._parameters.items() if parameter is not None]
    _distribute_parameters(norm, how, **dict.fromkeys(names, Replicate()))
    swap_class(norm, ShardedModule, how.group, names, names if sums_gradients else ())


def _column_parallel(
    linear: nn.Module, how: Distribution, parts: Sequence[ShardSpec], sequence_parallel: bool, *, shares_input: bool = False
) -> None:
    swap_class(linear, ColumnParallelLinear, how.group)
    cast(ShardedLinear, linear).distribute(how, parts, {"weight": 0, "bias": 0}, sequence_parallel=sequence_parallel)
    cast(ColumnParallelLinear, linear)._shares_input = shares_input


def _row_parallel(
    linear: nn.Module, how: Distribution, parts: Sequence[ShardSpec], sequence_parallel: bool, *, is_inner: bool = False
) -> None:
    _distribute_parameters(linear, how, bias=Replicate())
    swap_class(linear, RowParallelLinear, how.group, summed=["bias"] if sequence_parallel else ())
    cast(ShardedLinear, linear).distribute(how, parts, {"weight": 1}, sequence_parallel=sequence_parallel)
    cast(RowParallelLinear, linear)._is_inner = is_inner


def _distribute_mamba(layer: nn.Module, how: Distribution, sequence_parallel: bool) -> None:
    layer = cast(Mamba, layer)
    channels = layer.d_inner
    _column_parallel(layer.in_proj, how, [ShardSpec("x", channels), ShardSpec("z", channels)], sequence_parallel)
    _localize(layer.conv1d, how, weight=Shard(0), bias=Shard(0))
    _row_parallel(layer.x_proj, how, [ShardSpec("x", channels)], False, is_inner=True)
    _localize(layer.dt_proj, how, weight=Shard(0), bias=Shard(0))
    _row_parallel(layer.out_proj, how, [ShardSpec("y", channels)], sequence_parallel)
    layer.d_inner //= how.mesh.size()
    of_channels = ["A_log", "D"] + ["lam_logit"] * (layer.discretization == "exp_trapezoidal")
    _localize(layer, how, ShardedLayer, **dict.fromkeys(of_channels, Shard(0)))


def _groups_of_rank(heads: int, ngroups: int, how: Distribution) -> tuple[tuple[int, ...], bool]:
    """The groups of B and C that this rank's heads read, and whether no other rank reads them."""
    rank, of_rank, of_group = how.mesh.get_local_rank(), heads // how.mesh.size(), heads // ngroups
    # Consecutive heads of one group: this rank's are the blocks from rank * of_rank on.
    block = math.gcd(of_rank, of_group)
    groups = tuple(head // of_group for head in range(rank * of_rank, (rank + 1) * of_rank, block))
    return groups, of_rank % of_group == 0


def _matrices(ngroups: int, d_state: int, groups: tuple[int, ...], owns_groups: bool) -> list[ShardSpec]:
    """B and C as parts of a projection."""
    size = ngroups * d_state
    return [ShardSpec(name, size) if owns_groups else ShardSpec(name, size, ngroups, groups) for name in "BC"]


def _distribute_mamba2(layer: nn.Module, how: Distribution, sequence_parallel: bool) -> None:
    layer = cast(Mamba2, layer)
    ranks, heads = how.mesh.size(), layer.nheads // how.mesh.size()
    groups, owns_groups = _groups_of_rank(layer.nheads, layer.ngroups, how)
    B, C = _matrices(layer.ngroups, layer.d_state, groups, owns_groups)
    x, z, dt = ShardSpec("x", layer.d_ssm), ShardSpec("z", layer.d_ssm), ShardSpec("dt", layer.nheads)
    d_mlp = layer.d_inner - layer.d_ssm
    mlp = [ShardSpec("mlp_gate", d_mlp), ShardSpec("mlp_up", d_mlp)] if d_mlp else []
    _column_parallel(layer.in_proj, how, [*mlp, z, x, B, C, dt], sequence_parallel)
    swap_class(layer.conv1d, ShardedLinear, how.group)
    cast(Any, layer.conv1d).distribute(how, [x, B, C], {"weight": 0, "bias": 0})
    inputs = [ShardSpec("mlp", d_mlp), ShardSpec("y", layer.d_ssm)] if d_mlp else [ShardSpec("y", layer.d_ssm)]
    _row_parallel(layer.out_proj, how, inputs, sequence_parallel)
    if layer.rmsnorm:
        if owns_groups:
            _localize(layer.norm, how, weight=Shard(0))
        else:
            _localize(layer.norm, how, _SplitRMSNorm, weight=Shard(0))
            norm = layer.norm
            split = SplitNorm(how.group, layer.ngroups, norm.group_size, groups, norm.norm_before_gate, norm.eps)
            cast(_SplitRMSNorm, norm)._split = split
    layer.d_inner //= ranks
    layer.d_ssm //= ranks
    layer.nheads, layer.ngroups = heads, len(groups)
    of_heads = ["A_log", "D", "dt_bias"] + ["lam_logit"] * (layer.discretization == "exp_trapezoidal")
    _localize(layer, how, _TensorParallelMamba2, **dict.fromkeys(of_heads, Shard(0)))


def _distribute_mamba3(layer: nn.Module, how: Distribution, sequence_parallel: bool) -> None:
    layer = cast(Mamba3, layer)
    ranks, angles = how.mesh.size(), layer.num_rope_angles
    groups, owns_groups = _groups_of_rank(layer.nheads, layer.num_bc_heads, how)
    z, x = ShardSpec("z", layer.d_inner), ShardSpec("x", layer.d_inner)
    of_heads = [ShardSpec(name, layer.nheads) for name in ("dt", "A", "trap")]
    # All heads turn by the same angles: every rank computes them, and their gradient by its own heads alone.
    matrices = _matrices(layer.num_bc_heads, layer.d_state, groups, owns_groups)
    if layer.is_mimo:  # the rows of all groups of one rank after those of another
        of_ranks = [(part, rank) for part in matrices for rank in range(layer.mimo_rank)]
        matrices = [dataclasses.replace(part, name=f"{part.name}{rank}") for part, rank in of_ranks]
    parts = [z, x, *matrices, *of_heads]
    _column_parallel(layer.in_proj, how, [*parts, ShardSpec("angles", angles, 1, (0,))], sequence_parallel)
    for norm in (layer.B_norm, layer.C_norm):
        _replicate(norm, how, True)
    if layer.is_outproj_norm:
        _localize(layer.norm, how, weight=Shard(0))
    _row_parallel(layer.out_proj, how, [ShardSpec("y", layer.d_inner)], sequence_parallel)
    layer.d_inner //= ranks
    layer.nheads //= ranks
    layer.num_bc_heads = len(groups)
    matrix = layer.mimo_rank * layer.num_bc_heads * layer.d_state
    layer._sizes = [layer.d_inner] * 2 + [matrix] * 2 + [layer.nheads] * 3 + [angles]
    names = ["dt_bias", "B_bias", "C_bias", "D", *(["mimo_x", "mimo_z", "mimo_o"] if layer.is_mimo else [])]
    _localize(layer, how, ShardedLayer, **dict.fromkeys(names, Shard(0)))


def _distribute_mlp(layer: nn.Module, how: Distribution, sequence_parallel: bool) -> None:
    layer = cast(GatedMLP, layer)
    hidden = layer.fc2.in_features
    _column_parallel(layer.fc1, how, [ShardSpec("value", hidden), ShardSpec("gate", hidden)], sequence_parallel)
    _row_parallel(layer.fc2, how, [ShardSpec("hidden", hidden)], sequence_parallel)
    swap_class(layer, ShardedLayer, how.group)


def _distribute_delta_rule(layer: nn.Module, how: Distribution, sequence_parallel: bool) -> None:
    layer = cast(DeltaRuleMixer, layer)
    updates = getattr(layer, "num_householder", 1)

    def of_updates(size: int) -> list[ShardSpec]:
        return [ShardSpec(f"update{i}", size) for i in range(updates)]

    queries, keys, values = [ShardSpec("q", layer.key_dim)], of_updates(layer.key_dim), of_updates(layer.value_dim)
    for name, parts in (("q", queries), ("k", keys), ("v", values)):
        _column_parallel(layer.get_submodule(f"{name}_proj"), how, parts, sequence_parallel, shares_input=True)
        if layer.use_short_conv:
            conv = layer.get_submodule(f"{name}_conv1d")
            swap_class(conv, ShardedLinear, how.group)
            cast(Any, conv).distribute(how, parts, {"weight": 0, "bias": 0})
    for name, parts in (
        ("a_proj", [ShardSpec("a", layer.num_v_heads)]),
        ("b_proj", of_updates(layer.num_v_heads)),
        ("f_proj", [ShardSpec("f", layer.num_v_heads * layer.head_k_dim)]),
        ("g_proj", [ShardSpec("g", layer.value_dim)]),
    ):
        projection = layer._modules.get(name)
        if isinstance(projection, nn.Sequential):
            # Every rank computes all of the few columns between the two matrices, and their gradient by its own channels alone.
            _replicate(projection[0], how, True)
            projection = projection[1]
        if projection is not None:
            _column_parallel(projection, how, parts, sequence_parallel, shares_input=True)
    _replicate(layer.o_norm, how, True)
    _row_parallel(layer.o_proj, how, [ShardSpec("y", layer.value_dim)], sequence_parallel)
    for size in ("num_heads", "num_v_heads", "key_dim", "value_dim"):
        setattr(layer, size, getattr(layer, size) // how.mesh.size())
    layer.__dict__["_sequence_parallel"] = sequence_parallel
    _localize(layer, how, _TensorParallelDeltaRule, A_log=Shard(0), dt_bias=Shard(0))


_DISTRIBUTE = {
    **{Mamba: _distribute_mamba, Mamba2: _distribute_mamba2, Mamba3: _distribute_mamba3, GatedMLP: _distribute_mlp},
    **dict.fromkeys((DeltaNet, GatedDeltaNet, KimiDeltaAttention, GatedDeltaProduct), _distribute_delta_rule),
}


class _TensorParallelDeltaRule(ShardedLayer):
    """Mixin for the layers around a delta rule: one collective for the input of all projections, and one for its gradient."""

    _sequence_parallel: bool

    def _mix(self, hidden_states: Tensor, *states: Any) -> Any:
        shared = shared_input(hidden_states, self._group, self._sequence_parallel)
        return cast(Any, super())._mix(shared, *states)


class _TensorParallelMamba2(ShardedLayer):
    """Mixin for Mamba2. ``norm`` is a ``_SplitRMSNorm`` where the heads of a group are on several ranks."""

    def _mixer(self) -> Callable[..., tuple[Tensor, Any, Any]]:
        layer = cast(Mamba2, self)
        norm = getattr(layer, "norm", None)
        if not isinstance(norm, _SplitRMSNorm):
            return Mamba2._mixer(layer)
        operators = layer.operators
        mixer = operators.mamba2_mixer if isinstance(operators, LayerOperators) else split_mamba2_mixer
        return partial(mixer, norm=norm._split)


class _SplitRMSNorm(ShardedModule):
    """Mixin for GatedRMSNorm: a rank has only some channels of a group, and the ranks sum their squares."""

    _split: SplitNorm

    def forward(self, x: Tensor, z: Tensor | None) -> Tensor:
        """The norm, for decoding. Not differentiable: with gradients, it raises a NotImplementedError."""
        weight = cast(GatedRMSNorm, self).weight
        needs_grad = any(tensor is not None and tensor.requires_grad for tensor in (x, z, weight))
        if torch.is_grad_enabled() and needs_grad:
            raise NotImplementedError(
                "Mamba2: expected no gradients through norm, whose groups TensorParallel splits over ranks: call the layer, "
                "or norm under torch.no_grad()"
            )
        return self._split.forward(x, None if z is None else z.to(x.dtype), weight)[0]


class _VocabularyParallel(ShardedModule):
    """Mixin for an embedding of which this rank has the rows of some tokens. The embeddings of the others are zero here.

    Tokens outside of the vocabulary raise an IndexError on the CPU and fail an assertion on CUDA, as in ``nn.Embedding``.

    PyTorch's ``RowwiseParallel`` gives the same result, but a gradient of all rows on every rank.
    """

    _sequence_parallel: bool

    def forward(self, tokens: Tensor) -> Tensor:
        whole = cast(DTensor, self.weight)
        rows = whole.to_local()
        vocabulary = whole.shape[0]
        # As Shard cuts: equal numbers of rows, and fewer or none for the last ranks.
        first = self._group.rank * -(-vocabulary // self._group.size)
        places = tokens - first
        is_other = (places < 0) | (places >= rows.shape[0])
        if rows.shape[0] == 0:
            rows = F.pad(rows, (0, 0, 0, 1))
        # Every rank finds tokens outside of the vocabulary: PyTorch's check of the place -1 does not wait for a GPU.
        places = places.masked_fill(is_other, 0).masked_fill((tokens < 0) | (tokens >= vocabulary), -1)
        try:
            found = F.embedding(places, rows)
        except IndexError as error:
            raise IndexError(
                f"{_NAME}: expected tokens from 0 to {vocabulary - 1}, got {int(tokens.min())} to {int(tokens.max())}"
            ) from error
        return sum_over_ranks(found.masked_fill(is_other[..., None], 0), self._group, self._sequence_parallel)


class _TensorParallelLM(nn.Module):
    """Mixin for MambaLM."""

    _tensor_mesh: DeviceMesh
    _sequence_parallel: bool

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Any = None,
        inference_params: Any = None,
        num_last_tokens: int = 0,
        **mixer_kwargs: Any,
    ) -> Any:
        ranks, seqlen = self._tensor_mesh.size(), input_ids.shape[-1]
        if self._sequence_parallel and seqlen % ranks != 0:
            raise ValueError(
                f"MambaLM: expected a seqlen that is a multiple of the {ranks} ranks with sequence_parallel, got {seqlen}"
            )
        if self._sequence_parallel and num_last_tokens != 0:
            raise ValueError(f"MambaLM: expected num_last_tokens 0 with sequence_parallel, got {num_last_tokens}")
        return super().forward(input_ids, position_ids, inference_params, num_last_tokens, **mixer_kwargs)

    def generate(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """:meth:`MambaLM.generate` without CUDA graphs. All ranks draw the same tokens: a generator of rank 0's seed draws them
        unless one is given, which must then be in the same state on all ranks.
        """
        arguments = inspect.signature(MambaLM.generate).bind(self, input_ids, *args, **kwargs).arguments
        if arguments.get("cg"):
            raise ValueError("MambaLM.generate: expected no cg with tensor parallelism, whose collectives it does not capture")
        if self._sequence_parallel:
            raise ValueError("MambaLM.generate: expected a model without sequence_parallel, which cannot cut one step")
        if arguments.get("generator") is None:
            seed = torch.randint(2**62, (1,), device=input_ids.device)
            dist.broadcast(seed, group_src=0, group=self._tensor_mesh.get_group())
            arguments["generator"] = torch.Generator(input_ids.device).manual_seed(int(seed))
        return MambaLM.generate(**(arguments | {"cg": False}))


def _wait_for_output(module: nn.Module, inputs: Any, output: Any) -> Any:
    """A forward hook: PyTorch's styles return tensors of a subclass that wait at their first use."""
    return finished(output)
