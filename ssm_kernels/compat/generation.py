"""Decoding of ``mamba_ssm.utils.generation`` (2.3.2): its functions' signatures and effects on the steps of this package."""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..models.generation import GraphedStep, check_streamer

__all__ = [
    "DecodingCGCache",
    "GenerateOutput",
    "GenerationMixin",
    "InferenceParams",
    "decode",
    "modify_logit_for_repetition_penalty",
    "modify_logits_for_min_p_filtering",
    "modify_logits_for_top_k_filtering",
    "modify_logits_for_top_p_filtering",
    "sample",
    "update_graph_cache",
]


@dataclasses.dataclass
class InferenceParams:
    """The cache for decoding: :class:`ssm_kernels.models.InferenceParams` with all fields of ``mamba_ssm``'s, in its order.

    Args:
        max_seqlen: the largest number of steps; only recorded.
        max_batch_size: sequences decoded together.
        seqlen_offset: steps done so far. The caller counts them.
        batch_size_offset: must be 0; the mixers read a cache from its first row.
        key_value_memory_dict: the states of each mixer under its ``layer_idx``.
        lengths_per_sample: (batch,); the mixers do not read it. ``reset`` sets it to zero.

    Raises:
        NotImplementedError: ``batch_size_offset`` is not 0.
    """

    max_seqlen: int
    max_batch_size: int
    seqlen_offset: int = 0
    batch_size_offset: int = 0
    key_value_memory_dict: dict[int, Any] = dataclasses.field(default_factory=dict)
    lengths_per_sample: Tensor | None = None

    def __post_init__(self) -> None:
        if self.batch_size_offset != 0:
            raise NotImplementedError(f"InferenceParams: expected batch_size_offset 0, got {self.batch_size_offset}")

    def reset(self, max_seqlen: int, max_batch_size: int) -> None:
        """Sets the sizes and returns to offset 0; the states stay."""
        self.max_seqlen, self.max_batch_size, self.seqlen_offset = max_seqlen, max_batch_size, 0
        if self.lengths_per_sample is not None:
            self.lengths_per_sample.zero_()


@dataclasses.dataclass
class GenerateOutput:
    """The result of ``decode`` without transformers; with it, ``decode`` returns its ``GenerateDecoderOnlyOutput``.

    Attributes:
        sequences: (batch, max_length).
        scores: with ``output_scores``, the logits of each new token, (batch, padded vocabulary) each; else None.
    """

    sequences: Tensor
    scores: tuple[Tensor, ...] | None = None

    def __iter__(self) -> Iterator[str]:
        """Names of the fields that are set, as a dict of transformers has them."""
        return iter([name for name in ("sequences", "scores") if getattr(self, name) is not None])

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)


def modify_logits_for_min_p_filtering(logits: Tensor, min_p: float) -> None:
    """Sets logits below ``min_p`` to -inf, in place; changes nothing unless ``0 < min_p < 1``."""
    if 0 < min_p < 1:
        logits.masked_fill_(logits < min_p, -torch.inf)


def modify_logits_for_top_k_filtering(logits: Tensor, top_k: int) -> None:
    """Sets logits below the ``top_k``-th largest of each row, (..., vocabulary), to -inf, in place."""
    logits.masked_fill_(logits < logits.topk(top_k, dim=-1).values[..., -1:], -torch.inf)


def modify_logits_for_top_p_filtering(logits: Tensor, top_p: float) -> None:
    """Keeps in each row of (batch, vocabulary) the most probable tokens that sum to ``top_p``; others become -inf, in place.

    A token is dropped if its probability and those below it sum to at most ``1 - top_p``. Changes nothing unless
    ``0 < top_p < 1``.
    """
    if not 0 < top_p < 1:
        return
    ascending, order = logits.sort(dim=-1)
    is_dropped = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1 - top_p
    logits.masked_fill_(is_dropped.scatter(-1, order, is_dropped), -torch.inf)


def modify_logit_for_repetition_penalty(logits: Tensor, prev_output_tokens: Tensor, repetition_penalty: float = 1.0) -> Tensor:
    """Makes previous tokens less probable, in place: logits below zero are multiplied by the penalty, others divided.

    Args:
        logits: (batch, vocabulary).
        prev_output_tokens: (batch, seqlen), int64.
        repetition_penalty: Keskar et al. (arXiv 1909.05858), section 4.1; 1 changes nothing.

    Returns:
        ``logits``.
    """
    if repetition_penalty == 1.0:
        return logits
    score = logits.gather(1, prev_output_tokens)
    score = torch.where(score < 0, score * repetition_penalty, score / repetition_penalty)
    return logits.scatter_(1, prev_output_tokens, score)


def sample(logits: Tensor, top_k: int = 1, top_p: float = 0.0, min_p: float = 0.0, temperature: float = 1.0) -> Tensor:
    """Draws a token for each row of logits, which stay as they are.

    Args:
        logits: (batch, vocabulary).
        top_k: only the ``top_k`` most probable tokens are drawn; 1 takes the most probable, 0 is all.
        top_p: of these, only the most probable ones whose probabilities sum to at least ``top_p``; 0 is all.
        min_p: must be 0. ``mamba_ssm`` compares logits with ``min_p`` times the logit of token 0, for a batch of 1 only.
        temperature: divides the logits; 0 takes the most probable token, as in :func:`ssm_kernels.models.sample`.

    Returns:
        (batch,), int64.

    Raises:
        NotImplementedError: ``min_p`` is not 0.
        ValueError: ``top_p`` is above 1, ``logits`` have no token, or ``temperature`` is not finite.
    """
    if min_p != 0:
        raise NotImplementedError(f"sample: expected min_p=0.0, got {min_p}")
    if top_p > 1:
        raise ValueError(f"sample: expected top_p from 0 to 1, got {top_p}")
    if logits.shape[-1] == 0:
        raise ValueError(f"sample: expected logits of at least one token, got {[*logits.shape]}")
    if not math.isfinite(temperature):
        raise ValueError(f"sample: expected a finite temperature, got {temperature}")
    if top_k == 1 or temperature == 0:
        return logits.argmax(dim=-1)
    tokens = None
    if top_k > 0:
        logits, tokens = logits.topk(min(top_k, logits.shape[-1]), dim=-1)
    logits = logits / temperature
    modify_logits_for_top_p_filtering(logits, top_p)
    drawn = torch.multinomial(logits.softmax(dim=-1), num_samples=1)
    return (drawn if tokens is None else tokens.gather(-1, drawn))[:, 0]


@torch.no_grad()
def decode(
    input_ids: Tensor,
    model: Any,
    max_length: int,
    top_k: int = 1,
    top_p: float = 0.0,
    min_p: float = 0.0,
    temperature: float = 1.0,
    repetition_penalty: float = 1.0,
    eos_token_id: int | None = None,
    teacher_outputs: Tensor | None = None,
    vocab_size: int | None = None,
    cg: bool = False,
    enable_timing: bool = False,
    output_scores: bool = False,
    streamer: Any = None,
) -> Any:
    """Continues prompts until ``max_length`` tokens.

    Args:
        input_ids: (batch, seqlen), int32 or int64.
        model: has ``forward(input_ids, inference_params=, num_last_tokens=)`` and ``allocate_inference_cache``.
        max_length: number of tokens, the prompt included.
        top_k: as for :func:`sample`, like ``top_p``, ``min_p`` and ``temperature``.
        repetition_penalty: as for :func:`modify_logit_for_repetition_penalty`, of the prompt and of the tokens drawn so far.
        eos_token_id: generation ends when every sequence draws it in the same step.
        teacher_outputs: (batch, up to max_length); its tokens replace drawn ones.
        vocab_size: cuts the logits, so that tokens are drawn below it. ``None`` keeps the padded vocabulary in ``scores``, and
            draws tokens below ``model.config.vocab_size``, if the model has it.
        cg: on CUDA, each step of a :class:`ssm_kernels.models.MambaLM` replays a CUDA graph; others run eagerly.
        enable_timing: must be False.
        output_scores: also return the logits.
        streamer: its ``put`` is called with the prompt and with every step's tokens, and ``end`` after the last.

    Returns:
        transformers' ``GenerateDecoderOnlyOutput`` or, where transformers is not installed, a :class:`GenerateOutput`:
        ``sequences``, (batch, max_length), and ``scores``, a tuple of (batch, vocabulary), empty without ``output_scores``.

    Raises:
        NotImplementedError: ``min_p`` or ``enable_timing`` is not neutral.
        TypeError: ``streamer`` lacks ``put`` or ``end``.
        RuntimeError: ``input_ids`` or ``teacher_outputs`` are on another device than the model.
    """
    for name, value, neutral in (("min_p", min_p, 0.0), ("enable_timing", enable_timing, False)):
        if value != neutral:
            raise NotImplementedError(f"generate: expected {name}={neutral}, got {value}")
    if streamer is not None:
        check_streamer("generate", streamer)
    if teacher_outputs is not None and teacher_outputs.device != input_ids.device:
        raise RuntimeError(f"generate: expected teacher_outputs on {input_ids.device}, got {teacher_outputs.device}")
    batch = input_ids.shape[0]
    graphed = model._graphed_step(batch) if cg and input_ids.is_cuda and hasattr(model, "_graphed_step") else None
    if graphed is None:
        params = InferenceParams(max_length, batch, key_value_memory_dict=model.allocate_inference_cache(batch, max_length))
    else:
        params = graphed.inference_params
    params.seqlen_offset = 0
    sequences, scores = [input_ids], []
    if streamer is not None:
        streamer.put(input_ids.cpu())
    tokens_drawn = getattr(getattr(model, "config", None), "vocab_size", None)
    given = 0 if teacher_outputs is None else teacher_outputs.shape[1]
    done = 0
    while True:
        if graphed is not None and done > 0:
            logits = graphed(sequences[-1][:, 0])
        else:
            logits = model(sequences[-1], inference_params=params, num_last_tokens=1).logits[:, -1]
        logits = logits if vocab_size is None else logits[..., :vocab_size]
        if output_scores:
            scores.append(logits.clone())
        done += sequences[-1].shape[1]
        params.seqlen_offset = done
        if repetition_penalty != 1.0:
            logits = modify_logit_for_repetition_penalty(logits.clone(), torch.cat(sequences, 1).long(), repetition_penalty)
        if teacher_outputs is not None and done < given:
            tokens = teacher_outputs[:, done]
        else:
            tokens = sample(logits[..., :tokens_drawn], top_k, top_p, min_p, temperature).to(input_ids.dtype)
        sequences.append(tokens[:, None])
        if streamer is not None:
            streamer.put(tokens[:, None].cpu())
        ended = eos_token_id is not None and bool((tokens == eos_token_id).all())
        if ended or done >= max_length - 1:
            break
    if streamer is not None:
        streamer.end()
    return _output_class()(sequences=torch.cat(sequences, dim=1), scores=tuple(scores))


def _output_class() -> Any:
    try:
        return importlib.import_module("transformers.generation").GenerateDecoderOnlyOutput
    except ImportError:
        return GenerateOutput


class GenerationMixin:
    """Adds ``mamba_ssm``'s ``generate`` to a model with ``forward`` and ``allocate_inference_cache``."""

    def generate(
        self,
        input_ids: Tensor,
        max_length: int,
        top_k: int = 1,
        top_p: float = 0.0,
        min_p: float = 0.0,
        temperature: float = 1.0,
        return_dict_in_generate: bool = False,
        output_scores: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Continues prompts by :func:`decode`, whose other arguments are ``kwargs``.

        Returns:
            ``sequences``, or with ``return_dict_in_generate`` what :func:`decode` returns, with ``scores`` None unless
            ``output_scores``.

        Raises:
            NotImplementedError: as :func:`decode`.
        """
        options = {"top_k": top_k, "top_p": top_p, "min_p": min_p, "temperature": temperature, "output_scores": output_scores}
        output = decode(input_ids, self, max_length, **options, **kwargs)  # type: ignore[arg-type]
        if not output_scores:
            output.scores = None
        return output if return_dict_in_generate else output.sequences


@dataclasses.dataclass
class DecodingCGCache:
    """The CUDA graph of a decoding step, with its states: made and kept up to date by :func:`update_graph_cache`.

    Attributes:
        callables: ``run`` by the graph's (batch, tokens).
        inference_params: the cache that the graph reads and writes. Reading a prompt with it at ``seqlen_offset`` 0 starts
            anew.
        run: ``run(input_ids, position_ids, seqlen)``: logits, (batch, 1, vocabulary), after ``input_ids``, (batch, 1). The
            other two arguments have no effect, as in ``mamba_ssm``'s models.
    """

    max_batch_size: int = 0
    max_seqlen: int = 0
    callables: dict[tuple[int, int], Callable[..., Tensor]] = dataclasses.field(default_factory=dict)
    inference_params: InferenceParams | None = None
    run: Callable[..., Tensor] | None = None
    _graphed: GraphedStep | None = dataclasses.field(default=None, repr=False)


def update_graph_cache(
    model: Any,
    cache: DecodingCGCache | None,
    batch_size: int,
    seqlen_og: int,
    max_seqlen: int,
    decoding_seqlens: Sequence[int] = (1,),
    dtype: torch.dtype | None = None,
    n_warmups: int = 2,
) -> DecodingCGCache:
    """Captures a decoding step, unless ``cache`` has it for this batch size and these parameters.

    Args:
        model: a :class:`ssm_kernels.models.MambaLM` on a CUDA device.
        cache: the result of an earlier call, which is updated, or None.
        batch_size: sequences decoded together. A change of it captures the step anew.
        seqlen_og: length of the prompt; without effect, as the states do not depend on it.
        max_seqlen: the largest number of steps; only recorded.
        decoding_seqlens: must be (1,): a step takes one token.
        dtype: must be None: the mixers choose the dtypes of their states.
        n_warmups: without effect: calls before the capture.

    Raises:
        NotImplementedError: ``decoding_seqlens`` or ``dtype`` is another.
        RuntimeError: the model is not on a CUDA device.
    """
    name = "update_graph_cache"
    if tuple(decoding_seqlens) != (1,):
        raise NotImplementedError(f"{name}: expected decoding_seqlens (1,), got {decoding_seqlens}")
    if dtype is not None:
        raise NotImplementedError(f"{name}: expected dtype None, got {dtype}")
    device = next(iter(model.parameters())).device
    if device.type != "cuda":
        raise RuntimeError(f"{name}: expected a model on a CUDA device, got {device}")
    cache = DecodingCGCache() if cache is None else cache
    if cache._graphed is None or cache._graphed.key != GraphedStep.make_key(model, batch_size):
        # Free the memory of the old graph first.
        cache.callables, cache.inference_params, cache.run, cache._graphed = {}, None, None, None
        graphed = GraphedStep(model, batch_size)

        def run(input_ids: Tensor, position_ids: Tensor | None, seqlen: int) -> Tensor:
            return graphed(input_ids[:, 0])[:, None].clone()

        cache.callables, cache.run, cache._graphed = {(batch_size, 1): run}, run, graphed
        states = graphed.inference_params.key_value_memory_dict
        cache.inference_params = InferenceParams(max_seqlen, batch_size, key_value_memory_dict=states)
    cache.max_batch_size, cache.max_seqlen = batch_size, max_seqlen
    return cache
