"""Drawing tokens: temperature, top-k, top-p and min-p, and the penalty for repetition, in the definitions of transformers."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .._torchscript import refuse_script
from ..nn.checks import check_int, check_not_negative, check_number, check_probability, check_shape

__all__ = ["SeenTokens", "check_repetition_penalty", "check_sampling", "draw", "process", "sample"]


def check_sampling(name: str, temperature: Any, top_k: Any, top_p: Any, min_p: Any, generator: Any) -> None:
    check_not_negative(name, "temperature", temperature)
    check_int(name, "top_k", top_k, low=0)
    check_probability(name, "top_p", top_p)
    check_probability(name, "min_p", min_p)
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"{name}: expected generator to be a torch.Generator or None, got {type(generator).__name__}")


def check_repetition_penalty(name: str, value: Any) -> None:
    check_number(name, "repetition_penalty", value)
    if not 0 < value < math.inf:
        raise ValueError(f"{name}: expected repetition_penalty to be positive and finite, got {value}")


@refuse_script
def sample(
    logits: Tensor,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 0.0,
    generator: torch.Generator | None = None,
    *,
    min_p: float = 0.0,
) -> Tensor:
    """Draws a token for each row of logits, in float32. The host does not wait for the device.

    Args:
        logits: (batch, vocab_size), any floating-point dtype, at least one token.
        temperature: divides the logits; 0 takes the largest.
        top_k: only the ``top_k`` most probable tokens are drawn; 0 is all, 1 takes the largest.
        top_p: of these, only the most probable ones whose probabilities sum to at least ``top_p``; 0 and 1 are all.
        generator: draws the random numbers, on the device of ``logits``; ``None`` is PyTorch's.
        min_p: of these, only tokens at least ``min_p`` times as probable as the most probable one; 0 is all.

    Returns:
        (batch,), int64.

    Raises:
        ValueError: an argument is not as above.
        TypeError: an argument is of another type.

    Examples:
        >>> import torch
        >>> from ssm_kernels.models import sample
        >>> logits = torch.tensor([[0.0, 5.0, 1.0], [9.0, 0.0, 0.0]])
        >>> sample(logits, temperature=0)
        tensor([1, 0])
        >>> sample(logits, temperature=0.8, top_k=2, generator=torch.Generator().manual_seed(0)).shape
        torch.Size([2])
    """
    check_shape("sample", "logits", logits, "(batch, vocab_size)", (None, None))
    if logits.shape[1] == 0 or not logits.is_floating_point():
        got = f"shape {[*logits.shape]} and dtype {logits.dtype}"
        error = ValueError if logits.shape[1] == 0 else TypeError
        raise error(f"sample: expected logits of at least one token and of a floating-point dtype, got {got}")
    check_sampling("sample", temperature, top_k, top_p, min_p, generator)
    return draw(logits, temperature, top_k, top_p, min_p, generator)


def draw(
    logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float, generator: torch.Generator | None
) -> Tensor:
    """:func:`sample` with checked arguments."""
    if temperature == 0 or top_k == 1:
        return logits.argmax(dim=-1)
    logits, tokens = _restrict(logits, temperature, top_k, top_p)
    # Sample as the first of independent exponential clocks whose rates are the probabilities: torch.multinomial would make the
    # host wait for the device.
    probabilities = logits.softmax(dim=-1)
    if min_p > 0:
        probabilities = probabilities.masked_fill(_is_improbable(probabilities, min_p), 0)
    clocks = torch.empty_like(probabilities).exponential_(generator=generator)
    drawn = (probabilities / clocks).argmax(dim=-1)
    return drawn if tokens is None else tokens.gather(-1, drawn[:, None])[:, 0]


def process(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Logits, (batch, vocab_size), from which :func:`draw` draws: -inf for tokens that it cannot draw.

    With ``temperature`` 0 they are ``logits`` in float32, as transformers' scores are without sampling.
    """
    if temperature == 0:
        return logits.float()
    scores, tokens = _restrict(logits, temperature, top_k, top_p)
    if min_p > 0:
        scores = scores.masked_fill(_is_improbable(scores.softmax(dim=-1), min_p), -torch.inf)
    if tokens is None:
        return scores
    return torch.full_like(logits, -torch.inf, dtype=scores.dtype).scatter(-1, tokens, scores)


def _restrict(logits: Tensor, temperature: float, top_k: int, top_p: float) -> tuple[Tensor, Tensor | None]:
    """Applies temperature, top-k and top-p; also returns which tokens the columns are, if they are sorted."""
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
    return logits, tokens


def _is_improbable(probabilities: Tensor, min_p: float) -> Tensor:
    return probabilities < min_p * probabilities.amax(dim=-1, keepdim=True)


class SeenTokens:
    """Makes tokens that a row has had less probable: logits below zero are multiplied by the penalty, others divided by it.

    Source: Keskar et al. (arXiv 1909.05858), section 4.1, in transformers' form.

    Args:
        prompt: (batch, seqlen), the first tokens.
        is_token: (batch, seqlen), false where ``prompt`` is padding; ``None`` is nowhere.
        vocab_size: columns of the logits.
    """

    def __init__(self, prompt: Tensor, is_token: Tensor | None, vocab_size: int, penalty: float) -> None:
        # The last column takes padding and rows of the embedding without a token.
        self._seen = torch.zeros(prompt.shape[0], vocab_size + 1, dtype=torch.bool, device=prompt.device)
        self._penalty = penalty
        ids = prompt.long()
        is_other = ids >= vocab_size if is_token is None else (ids >= vocab_size) | ~is_token
        self._seen.scatter_(1, ids.masked_fill(is_other, vocab_size), True)

    def add(self, tokens: Tensor) -> None:
        """Adds a token to each row, (batch,)."""
        self._seen.scatter_(1, tokens[:, None].long(), True)

    def penalize(self, logits: Tensor) -> Tensor:
        penalized = torch.where(logits < 0, logits * self._penalty, logits / self._penalty)
        return torch.where(self._seen[:, :-1], penalized, logits)
