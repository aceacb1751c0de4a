"""Token generation: the prompt in one call, then a step for each token, which replays a CUDA graph on CUDA.

A step reads its token from a fixed tensor and updates the mixers' states in place, so a graph captured at one position is
right at every other. Sampling runs outside of the graph, where it can use any generator; the host launches it while the
device still replays the graph. The host waits for the device only where it reads tokens: for ``eos_token_id`` and streamers.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..nn.checks import check_bools, check_optional_int
from .prompts import Prompts
from .sampling import SeenTokens, check_repetition_penalty, check_sampling, draw, process, sample

__all__ = ["GenerationOutput", "GraphedStep", "InferenceParams", "Sampling", "Streamer", "generate", "sample"]

# The host checks after this many graph replays whether every sequence has reached eos_token_id.
_EOS_INTERVAL = 8


@dataclasses.dataclass
class InferenceParams:
    """The cache for decoding, with the fields of ``mamba_ssm``'s ``InferenceParams`` that layers read.

    Args:
        max_seqlen: the largest number of steps. Only callers need it, because the mixers' states do not grow.
        max_batch_size: sequences decoded together.
        seqlen_offset: steps done so far. The caller counts them.
        key_value_memory_dict: the states of each mixer under its ``layer_idx``.

    Examples:
        >>> import torch
        >>> from ssm_kernels.models import InferenceParams, MambaConfig, MambaLM
        >>> model = MambaLM(MambaConfig(d_model=64, n_layer=1, vocab_size=100))
        >>> states = model.allocate_inference_cache(2, 12)
        >>> cache = InferenceParams(max_seqlen=12, max_batch_size=2, key_value_memory_dict=states)
        >>> tokens = torch.randint(100, (2, 12))
        >>> with torch.no_grad():
        ...     logits = model(tokens[:, :8], inference_params=cache).logits  # the prompt
        ...     cache.seqlen_offset = 8
        ...     logits = model(tokens[:, 8:], inference_params=cache).logits  # continues from it
        >>> logits.shape
        torch.Size([2, 4, 104])
    """

    max_seqlen: int
    max_batch_size: int
    seqlen_offset: int = 0
    key_value_memory_dict: dict[int, Any] = dataclasses.field(default_factory=dict)


class Streamer(Protocol):
    """Receives tokens during generation, like the streamers of transformers."""

    def put(self, value: Tensor) -> None: ...
    def end(self) -> None: ...


def check_streamer(name: str, streamer: Any) -> None:
    if not all(callable(getattr(streamer, method, None)) for method in ("put", "end")):
        raise TypeError(f"{name}: expected streamer to have methods put and end, got {type(streamer).__name__}")


class GenerationOutput(NamedTuple):
    """The result of ``MambaLM.generate`` with ``output_scores``.

    Attributes:
        sequences: padding, prompts and new tokens, (batch, up to max_length).
        scores: for each new column of ``sequences``, (batch, vocab_size), float32: the logits after penalty and temperature
            and, where tokens are drawn, with -inf for those that top_k, top_p and min_p leave out. After the end of a sequence
            its rows have no meaning.

    Examples:
        >>> import torch
        >>> from ssm_kernels.models import MambaConfig, MambaLM
        >>> model = MambaLM(MambaConfig(d_model=64, n_layer=1, vocab_size=100))
        >>> output = model.generate(torch.randint(100, (2, 10)), max_new_tokens=5, output_scores=True)
        >>> output.sequences.shape, len(output.scores), output.scores[0].shape
        (torch.Size([2, 15]), 5, torch.Size([2, 100]))
    """

    sequences: Tensor
    scores: tuple[Tensor, ...]


@dataclasses.dataclass(frozen=True)
class Sampling:
    """The options of ``MambaLM.generate`` for drawing, checked."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    generator: torch.Generator | None

    def check(self, name: str) -> None:
        check_sampling(name, self.temperature, self.top_k, self.top_p, self.min_p, self.generator)
        check_repetition_penalty(name, self.repetition_penalty)


class GraphedStep:
    """One decoding step of a model in a CUDA graph, with the states that it updates.

    Attributes:
        inference_params: the cache that the graph reads and writes. Reading a prompt with it at ``seqlen_offset`` 0 starts
            anew.

    Args:
        model: a :class:`.mamba_lm.MambaLM` on a CUDA device.
        batch_size: sequences decoded together.
    """

    def __init__(self, model: Any, batch_size: int) -> None:
        device = model.lm_head.weight.device
        self.key = self.make_key(model, batch_size)
        self._graph = torch.cuda.CUDAGraph()
        # States that were made in inference mode could not be updated outside of it.
        with torch.cuda.device(device), torch.inference_mode(False), torch.no_grad(), _no_autocast_cache():
            # Any offset but 0 makes the mixers step.
            self.inference_params = InferenceParams(0, batch_size, 1, model.allocate_inference_cache(batch_size, 0))
            self._input_ids = torch.zeros(batch_size, 1, dtype=torch.int64, device=device)
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                # The first calls allocate in libraries, which a capture must not contain.
                for _ in range(2):
                    self._run(model)
            torch.cuda.current_stream().wait_stream(stream)
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                self._logits = self._run(model)

    @staticmethod
    def make_key(model: Any, batch_size: int) -> tuple[Any, ...]:
        """Graphs with equal keys are interchangeable. Hooks that were added or removed do not change the key."""
        autocast = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
        tensors = tuple((tensor.data_ptr(), tensor.dtype) for tensor in (*model.parameters(), *model.buffers()))
        return batch_size, autocast, model.training, tensors

    def __call__(self, tokens: Tensor) -> Tensor:
        """Logits, (batch, padded vocabulary), after ``tokens``, (batch,). The next call overwrites them."""
        self._input_ids.copy_(tokens[:, None])
        self._graph.replay()
        return self._logits

    def _run(self, model: Any) -> Tensor:
        return model(self._input_ids, inference_params=self.inference_params, num_last_tokens=1).logits[:, -1]


def _no_autocast_cache() -> torch.autocast:
    """Keeps autocast but disables its cache of weights: a graph must not read copies that are freed when autocast ends."""
    enabled = torch.is_autocast_enabled("cuda")
    return torch.autocast("cuda", torch.get_autocast_dtype("cuda"), enabled=enabled, cache_enabled=False)


def check_generation(
    name: str, prompts: Prompts, max_length: Any, max_new_tokens: Any, cg: Any, streamer: Any, output_scores: Any
) -> int:
    """Checks the arguments of ``generate`` that are not about drawing; returns the length of the result."""
    if (max_length is None) == (max_new_tokens is None):
        given = "neither" if max_length is None else "both"
        raise ValueError(f"{name}: expected max_length or max_new_tokens, got {given}")
    prompt, device = prompts.input_ids.shape[1], prompts.input_ids.device
    check_optional_int(name, "max_new_tokens", max_new_tokens, low=0)
    check_optional_int(name, "max_length", max_length, low=prompt)
    check_bools(name, output_scores=output_scores)
    if cg is not None:
        check_bools(name, cg=cg)
    if cg and device.type != "cuda":
        raise ValueError(f"{name}: expected input_ids on a CUDA device with cg=True, got {device}")
    if streamer is not None:
        check_streamer(name, streamer)
    return int(max_length) if max_length is not None else prompt + int(max_new_tokens)


@torch.no_grad()
def generate(
    model: Any,
    prompts: Prompts,
    length: int,
    sampling: Sampling,
    eos_ids: tuple[int, ...],
    pad_id: int,
    graphed: GraphedStep | None,
    streamer: Streamer | None,
    output_scores: bool,
) -> Tensor | GenerationOutput:
    """The loop of :meth:`.mamba_lm.MambaLM.generate`, with checked arguments; ``graphed``, if given, computes the steps."""
    input_ids = prompts.input_ids
    batch, prompt = input_ids.shape
    vocab_size = model.config.vocab_size
    options = (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
    if graphed is None:
        params = InferenceParams(length, batch, key_value_memory_dict=model.allocate_inference_cache(batch, length))
    else:
        params = graphed.inference_params
    sequences = torch.cat([input_ids, input_ids.new_empty(batch, length - prompt)], dim=1)
    if streamer is not None:
        streamer.put(input_ids.cpu())
    seen: SeenTokens | None = None
    if sampling.repetition_penalty != 1:
        seen = SeenTokens(input_ids, prompts.attention_mask, vocab_size, sampling.repetition_penalty)
    eos = torch.tensor(eos_ids, device=input_ids.device) if len(eos_ids) > 1 else None
    finished = torch.zeros(batch, dtype=torch.bool, device=input_ids.device)
    interval = 1 if graphed is None or streamer is not None else _EOS_INTERVAL
    scores: list[Tensor] = []
    done = prompt
    logits: Tensor | None = None
    while done < length:
        if logits is None:
            params.seqlen_offset = 0
            mask = {} if prompts.attention_mask is None else {"attention_mask": prompts.attention_mask}
            logits = model(input_ids, inference_params=params, num_last_tokens=1, **mask).logits[:, -1]
        elif graphed is not None:
            logits = graphed(sequences[:, done - 1])
        else:
            params.seqlen_offset = done - 1
            last = sequences[:, done - 1 : done]
            # The padding of sequences that have ended may be a row of the embedding without a token.
            if pad_id >= vocab_size:
                last = last.clamp(max=vocab_size - 1)
            logits = model(last, inference_params=params, num_last_tokens=1).logits[:, -1]
        # Rows that pad the vocabulary stand for no token.
        logits = logits[:, :vocab_size]
        if seen is not None:
            logits = seen.penalize(logits)
        if output_scores:
            scores.append(process(logits, *options).clone())
        tokens = draw(logits, *options, sampling.generator)
        if eos_ids:
            tokens = tokens.masked_fill(finished, pad_id)
            finished |= _is_eos(tokens, eos_ids, eos)
        if seen is not None:
            seen.add(tokens)
        sequences[:, done] = tokens
        done += 1
        if streamer is not None:
            streamer.put(tokens.cpu())
        if eos_ids and (done - prompt) % interval == 0 and bool(finished.all()):
            break
    if streamer is not None:
        streamer.end()
    if eos_ids and done > prompt:
        # Cut after the step in which the last sequence ended.
        running = (_is_eos(sequences[:, prompt:done], eos_ids, eos).cumsum(dim=1) == 0).sum(dim=1).max()
        done = min(done, prompt + int(running) + 1)
    found = sequences[:, :done]
    return GenerationOutput(found, tuple(scores[: done - prompt])) if output_scores else found


def _is_eos(tokens: Tensor, ids: tuple[int, ...], eos: Tensor | None) -> Tensor:
    return tokens == ids[0] if eos is None else torch.isin(tokens, eos)
