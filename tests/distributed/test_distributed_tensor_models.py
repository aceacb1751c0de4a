"""Tensor parallelism of language models on 2 to 4 ranks, on CPUs and two GPUs: losses, gradients and tokens of one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from process_pool import Mesh, Place, Processes
from tensor_parallel_helpers import (
    BATCH,
    SEQLEN,
    Case,
    assert_close,
    assert_same_gradients,
    draw,
    language_model,
    over_places,
    own,
    pair,
    parallelize,
    tokens_of,
    whole,
)
from torch import Tensor

from ssm_kernels.models import MambaLM


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).logits.flatten(0, 1), tokens[:, 1:].flatten())


def check_model(make: Callable[[], MambaLM], mesh: Mesh, **options: Any) -> None:
    from torch.distributed.tensor.parallel import loss_parallel

    expected, actual = pair(make, mesh, **options)
    assert (actual.lm_head.weight is actual.backbone.embedding.weight) == actual.config.tie_embeddings
    tokens = tokens_of(mesh, BATCH, SEQLEN + 1)
    wanted = loss_of(expected, tokens)
    wanted.backward()
    if options.get("gather_logits", True):
        loss = loss_of(actual, tokens)
        loss.backward()
    else:
        with loss_parallel():
            logits = actual(tokens[:, :-1]).logits
            assert logits.to_local().shape[-1] < logits.shape[-1]
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
    assert_close(whole(loss.detach()), wanted.detach(), "loss")
    assert_same_gradients(actual, expected)
    norms = [whole(nn.utils.clip_grad_norm_(model.parameters(), 0.1)) for model in (expected, actual)]
    assert_close(norms[1], norms[0], "norm of the gradients")
    assert_same_gradients(actual, expected)


def check_model_generation(make: Callable[[], MambaLM], mesh: Mesh) -> None:
    import torch.distributed as dist

    expected, actual = pair(make, mesh)
    prompt = tokens_of(mesh, BATCH, 4)
    greedy = expected.generate(prompt, max_new_tokens=6, temperature=0)
    assert torch.equal(actual.generate(prompt, max_new_tokens=6, temperature=0), greedy)
    torch.manual_seed(mesh.get_rank())
    drawn = actual.generate(prompt, max_new_tokens=6)
    of_ranks = [torch.empty_like(drawn) for _ in range(mesh.size())]
    dist.all_gather(of_ranks, drawn, group=mesh.get_group())
    assert all(torch.equal(tokens, drawn) for tokens in of_ranks)
    generators = [torch.Generator(mesh.device_type).manual_seed(3) for _ in range(2)]
    sampled = [model.generate(prompt, 10, generator=g) for model, g in zip((expected, actual), generators, strict=True)]
    assert torch.equal(*sampled)


def check_fsdp(mixer: str, mesh: Mesh) -> None:
    """FSDP2 on one dimension of the mesh and tensor parallelism on the other; the batch is divided over the first."""
    from torch.distributed.fsdp import fully_shard

    expected, actual = pair(partial(language_model, mixer, d_intermediate=20), mesh["model"])
    for layer in actual.backbone.layers:
        fully_shard(layer, mesh=mesh["data"])
    fully_shard(actual, mesh=mesh["data"])
    tokens = tokens_of(mesh, 2 * BATCH, SEQLEN + 1)
    for _ in range(2):
        loss_of(expected, tokens).backward()
        loss_of(actual, own(tokens, 0, mesh["data"])).backward()
        norms = [whole(nn.utils.clip_grad_norm_(model.parameters(), 0.1)) for model in (expected, actual)]
        assert_close(norms[1], norms[0], "norm of the gradients")
        with torch.no_grad():
            for parameter in (*expected.parameters(), *actual.parameters()):
                parameter.sub_(parameter.grad, alpha=10)
                parameter.grad = None
    state = actual.state_dict()
    for name, value in expected.state_dict().items():
        assert_close(whole(state[name]), value, name)
    generated = [model.generate(tokens_of(mesh, BATCH, 4), 8, temperature=0) for model in (expected, actual)]
    assert torch.equal(*generated)


def check_tokens(mesh: Mesh) -> None:
    """Every rank finds tokens outside of the vocabulary; the last rank has no rows."""
    model = parallelize(language_model("Mamba", vocab_size=9, pad_vocab_size_multiple=1), mesh)
    for token in (-1, 9, 12):
        with pytest.raises(
            ValueError, match=f"below vocab_size = 9, got {min(token, 3)} as .* and {max(token, 3)} as the largest"
        ):
            model(torch.tensor([[3, token]]))
        with pytest.raises(IndexError, match=f"expected tokens from 0 to 8, got {min(token, 3)} to {max(token, 3)}"):
            model.backbone.embedding(torch.tensor([[3, token]]))
    assert torch.isfinite(model(torch.tensor([[0, 8]])).logits).all()


def check_classes(mesh: Mesh) -> None:
    """Layers of a kind have one class, so that the compiler compiles their code once."""
    from torch._dynamo.testing import CompileCounter

    _, model = pair(partial(language_model, "Mamba2"), mesh)
    torch._dynamo.reset()
    counter = CompileCounter()
    for block in model.backbone.layers:
        torch.compile(block.mixer, backend=counter, fullgraph=True)(draw(mesh))
    assert counter.frame_count == 1
    first, second = (block.modules() for block in model.backbone.layers)
    assert [type(module) for module in first] == [type(module) for module in second]


CASES: dict[str, Case] = {
    **{
        f"MambaLM, {mixer}, {n}": Case((n,), partial(check_model, partial(language_model, mixer, **fields)))
        for mixer, fields in (("Mamba", {"d_intermediate": 20}), ("Mamba2", {"tie_embeddings": False, "rms_norm": False}))
        for n in (2, 4)
    },
    "MambaLM, vocabulary of unequal shards": Case(
        (4,), partial(check_model, partial(language_model, "Mamba", pad_vocab_size_multiple=1))
    ),
    "MambaLM, loss parallel": Case((2,), partial(check_model, partial(language_model, "Mamba2"), gather_logits=False)),
    "MambaLM, sequence parallel, 2": Case((2,), partial(check_model, partial(language_model, "Mamba"), sequence_parallel=True)),
    "MambaLM, sequence parallel, 3": Case(
        (3,),
        partial(check_model, partial(language_model, "Mamba2", rms_norm=False, fused_add_norm=False), sequence_parallel=True),
    ),
    "MambaLM, generation": Case((3,), partial(check_model_generation, partial(language_model, "Mamba2"))),
    "MambaLM, FSDP2, Mamba": Case((2, 2), partial(check_fsdp, "Mamba")),
    "MambaLM, FSDP2, Mamba2": Case((2, 2), partial(check_fsdp, "Mamba2")),
    "MambaLM, FSDP2, Mamba3": Case((2, 2), partial(check_fsdp, "Mamba3")),
    "compilation of layers of a kind": Case((2,), check_classes),
    "errors, tokens outside of the vocabulary": Case((4,), check_tokens),
}

ON_GPUS = ("MambaLM, Mamba, 2", "MambaLM, Mamba2, 2", "MambaLM, loss parallel", "MambaLM, sequence parallel, 2")


def run_case(mesh: Mesh, name: str) -> None:
    CASES[name].check(mesh)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "place"), over_places(CASES, ON_GPUS))
def test_ranks_are_one_process(processes: Processes, name: str, place: Place) -> None:
    assert CASES[name].shape == place.shape
    processes.check(place, run_case, name)
