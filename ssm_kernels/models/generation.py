"""Token generation: the prompt in one call, then a step for each token, which replays a CUDA graph on CUDA.

A step reads its token from a fixed tensor and updates the mixers' states in place, so a graph captured at one position is
right at every other. Sampling runs outside of the graph, where it can use any generator; the host launches it while the
device still replays the graph. The host waits for the device only where it reads tokens: for ``eos_token_id`` and streamers.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import torch
from torch import Tensor

from ..nn.checks import (
    check_bools,
    check_int,
    check_not_negative,
    check_optional_int,
    check_probability,
    check_shape,
)

__all__ = ["GraphedStep", "InferenceParams", "Streamer", "generate", "sample"]

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
    """

    max_seqlen: int
    max_batch_size: int
    seqlen_offset: int = 0
    key_value_memory_dict: dict[int, Any] = dataclasses.field(default_factory=dict)


class Streamer(Protocol):
    """Receives tokens during generation, like the streamers of transformers."""

    def put(self, value: Tensor) -> None: ...
    def end(self) -> None: ...


def check_sampling(name: str, temperature: Any, top_k: Any, top_p: Any, generator: Any) -> None:
    check_not_negative(name, "temperature", temperature)
    check_int(name, "top_k", top_k, low=0)
    check_probability(name, "top_p", top_p)
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"{name}: expected generator to be a torch.Generator or None, got {type(generator).__name__}")


def sample(
    logits: Tensor,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 0.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draws a token for each row of logits, in float32. The host does not wait for the device.

    Args:
        logits: (batch, vocab_size), any floating-point dtype.
        temperature: divides the logits; 0 takes the largest.
        top_k: only the ``top_k`` most probable tokens are drawn; 0 is all, 1 takes the largest.
        top_p: of these, only the most probable ones whose probabilities sum to at least ``top_p``; 0 and 1 are all.
        generator: draws the random numbers, on the device of ``logits``; ``None`` is PyTorch's.

    Returns:
        (batch,), int64.

    Raises:
        ValueError: an argument is not as above.
        TypeError: an argument is of another type.
    """
    check_shape("sample", "logits", logits, "(batch, vocab_size)", (None, None))
    check_sampling("sample", temperature, top_k, top_p, generator)
    return _sample(logits, temperature, top_k, top_p, generator)


def _sample(logits: Tensor, temperature: float, top_k: int, top_p: float, generator: torch.Generator | None) -> Tensor:
    if temperature == 0 or top_k == 1:
        return logits.argmax(dim=-1)
    logits = logits.float()
    if temperature != 1:
        # Subtract the largest logit first: a low temperature would turn it into infinity. CUDA multiplies by the reciprocal,
        # and zero times infinity is NaN.
        logits = (logits - logits.amax(dim=-1, keepdim=True)) / max(temperature, 1e-30)
    tokens: Tensor | None = None
    if 0 < top_k < logits.shape[-1]:
        logits, tokens = logits.topk(top_k, dim=-1)
    if 0 < top_p < 1:
        if tokens is None:
            logits, tokens = logits.sort(dim=-1, descending=True)
        probabilities = logits.softmax(dim=-1)
        before = probabilities.cumsum(dim=-1) - probabilities
        # The most probable token always stays, whatever the sums round to.
        before[:, 0] = 0
        logits = logits.masked_fill(before >= top_p, -torch.inf)
    # Sample as the first of independent exponential clocks whose rates are the probabilities: torch.multinomial would make the
    # host wait for the device.
    probabilities = logits.softmax(dim=-1)
    clocks = torch.empty_like(probabilities).exponential_(generator=generator)
    drawn = (probabilities / clocks).argmax(dim=-1)
    return drawn if tokens is None else tokens.gather(-1, drawn[:, None])[:, 0]


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
    name: str, input_ids: Any, max_length: Any, max_new_tokens: Any, eos_token_id: Any, cg: Any, vocab_size: int
) -> int:
    """Checks the arguments of ``generate`` except the sampling options; returns the length of the result."""
    check_shape(name, "input_ids", input_ids, "(batch, seqlen)", (None, None))
    batch, prompt = input_ids.shape
    if batch == 0 or prompt == 0:
        raise ValueError(f"{name}: expected a prompt of at least one token, got input_ids of shape {[*input_ids.shape]}")
    if (max_length is None) == (max_new_tokens is None):
        given = "neither" if max_length is None else "both"
        raise ValueError(f"{name}: expected max_length or max_new_tokens, got {given}")
    check_optional_int(name, "max_new_tokens", max_new_tokens, low=0)
    check_optional_int(name, "max_length", max_length, low=prompt)
    check_optional_int(name, "eos_token_id", eos_token_id, low=0)
    if eos_token_id is not None and eos_token_id >= vocab_size:
        raise ValueError(f"{name}: expected eos_token_id below vocab_size = {vocab_size}, got {eos_token_id}")
    if cg is not None:
        check_bools(name, cg=cg)
    if cg and input_ids.device.type != "cuda":
        raise ValueError(f"{name}: expected input_ids on a CUDA device with cg=True, got {input_ids.device}")
    return int(max_length) if max_length is not None else prompt + int(max_new_tokens)


@torch.no_grad()
def generate(
    model: Any,
    input_ids: Tensor,
    length: int,
    temperature: float,
    top_k: int,
    top_p: float,
    eos_token_id: int | None,
    graphed: GraphedStep | None,
    streamer: Streamer | None,
    generator: torch.Generator | None,
) -> Tensor:
    """The loop of :meth:`.mamba_lm.MambaLM.generate`, with checked arguments; ``graphed``, if given, computes the steps."""
    batch, prompt = input_ids.shape
    vocab_size = model.config.vocab_size
    if graphed is None:
        params = InferenceParams(length, batch, key_value_memory_dict=model.allocate_inference_cache(batch, length))
    else:
        params = graphed.inference_params
    sequences = torch.cat([input_ids, input_ids.new_empty(batch, length - prompt)], dim=1)
    if streamer is not None:
        streamer.put(input_ids.cpu())
    finished = torch.zeros(batch, dtype=torch.bool, device=input_ids.device)
    interval = 1 if graphed is None or streamer is not None else _EOS_INTERVAL
    done = prompt
    logits: Tensor | None = None
    while done < length:
        if logits is None:
            params.seqlen_offset = 0
            logits = model(input_ids, inference_params=params, num_last_tokens=1).logits[:, -1]
        elif graphed is not None:
            logits = graphed(sequences[:, done - 1])
        else:
            params.seqlen_offset = done - 1
            logits = model(sequences[:, done - 1 : done], inference_params=params, num_last_tokens=1).logits[:, -1]
        # Rows that pad the vocabulary are no tokens.
        tokens = _sample(logits[:, :vocab_size], temperature, top_k, top_p, generator)
        if eos_token_id is not None:
            tokens = tokens.masked_fill(finished, eos_token_id)
            finished |= tokens == eos_token_id
        sequences[:, done] = tokens
        done += 1
        if streamer is not None:
            streamer.put(tokens.cpu())
        if eos_token_id is not None and (done - prompt) % interval == 0 and bool(finished.all()):
            break
    if streamer is not None:
        streamer.end()
    if eos_token_id is not None and done > prompt:
        # Cut after the step in which the last sequence ended.
        running = ((sequences[:, prompt:done] == eos_token_id).cumsum(dim=1) == 0).sum(dim=1).max()
        done = min(done, prompt + int(running) + 1)
    return sequences[:, :done]
