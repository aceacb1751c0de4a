"""Inputs of the decoding steps of servers, with slots, several tokens a row and a buffer of states, and loops of one step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import conv_helpers
import delta_rule_step_helpers
import selective_scan_helpers
import torch
from conv_helpers import make_step_inputs as make_conv_step_inputs
from selective_scan_helpers import STEP_FORMS, make_step_inputs
from torch import Tensor

from ssm_kernels import causal_conv1d_update, reference, selective_state_update

SLOTS = 24


class DecodingStep(NamedTuple):
    """A step that updates a state in place, as a function of a call's inputs that returns the output and the new state.

    Attributes:
        family: the operator's key in ``helpers.KERNEL_OPTIONS``.
        large: options of ``make_inputs``, to which tests add ``batch``.
        sizes: more of them.
    """

    family: str
    make_inputs: Callable[..., dict[str, Any]]
    step: Callable[[dict[str, Any]], tuple[Tensor, Tensor]]
    reference: Callable[..., tuple[Tensor, Tensor]]
    large: Mapping[str, Any]
    sizes: Sequence[Mapping[str, Any]]

    def row_names(self, **options: Any) -> list[str]:
        """Names of the tensors of such inputs that have an entry for each row of the batch."""
        one, two = (self.make_inputs(**{**options, "batch": batch}) for batch in (1, 2))
        return [name for name, value in one.items() if isinstance(value, Tensor) and value.shape != two[name].shape]


DECODING_STEPS = {
    "selective_state_update": DecodingStep(
        "selective_state_update",
        make_step_inputs,
        selective_scan_helpers.step,
        reference.selective_state_update,
        {"heads": 4, "groups": 2, "dim": 40, "dstate": 16},
        [{**size, "dstate": 64} for size in (*STEP_FORMS.values(), {"dim": 700}, {"heads": 16, "dim": 64})],
    ),
    "delta_rule_step": DecodingStep(
        "delta_rule_step",
        delta_rule_step_helpers.make_inputs,
        delta_rule_step_helpers.step,
        reference.delta_rule_step,
        {"heads": 2, "value_heads": 4, "key_dim": 24, "value_dim": 20},
        [{"key_dim": 128, "value_dim": 128, "qk_l2norm": True}, {"key_dim": 33}, {"key_dim": 256, "gate": "column"}],
    ),
    "causal_conv1d_update": DecodingStep(
        "causal_conv1d",
        make_conv_step_inputs,
        conv_helpers.step,
        reference.causal_conv1d_update,
        {"channels": 700, "seqlen": 3},
        [{}, {"channels": 64, "width": 2}],
    ),
}


def distinct_slots(rows: int, columns: int | None, seed: int, device: str, dtype: torch.dtype = torch.int32) -> Tensor:
    """Slots in no order, (rows,) or (rows, columns). Tables of the two parities of ``seed`` have none in common."""
    generator = torch.Generator().manual_seed(seed)
    slots = 2 * torch.randperm(SLOTS // 2, generator=generator)[: rows * (columns or 1)] + seed % 2
    return slots.reshape((rows,) if columns is None else (rows, columns)).to(device, dtype)


def make_token_inputs(
    *,
    rows: int = 2,
    tokens: int | None = None,
    packed: tuple[int, ...] | None = None,
    columns: int | None = None,
    destination: int | None = None,
    intermediate: int | None = None,
    out: bool = True,
    index_dtype: torch.dtype = torch.int32,
    device: str = "cpu",
    **options: Any,
) -> dict[str, Any]:
    """Keyword arguments of ``selective_state_update`` with ``SLOTS`` slots.

    Args:
        tokens: None for one token without an axis.
        packed: ``cu_seqlens``, in place of ``rows`` and ``tokens``.
        columns: None for ``state_batch_indices`` of shape (rows,), 0 for none, else (rows, columns) and
            ``num_accepted_tokens``.
        destination: None for no ``dst_state_batch_indices``, 0 for shape (rows,), else (rows, destination).
        intermediate: tokens of a buffer of states, with ``intermediate_state_indices``; None for none.
        options: of :func:`make_step_inputs`.
    """
    rows = rows if packed is None else len(packed) - 1
    leading = (rows,) if tokens is None else (rows, tokens)
    leading = leading if packed is None else (packed[-1],)
    inputs = make_step_inputs(batch=torch.Size(leading).numel(), slots=SLOTS, device=device, **options)
    for name in ("x", "dt", "z", "B", "C"):
        if inputs[name] is not None:
            inputs[name] = inputs[name].unflatten(0, leading)
    inputs["state_batch_indices"] = None if columns == 0 else distinct_slots(rows, columns, 0, device, index_dtype)
    if columns == 0:
        inputs["state"] = inputs["state"][:rows]
    elif columns:
        accepted = torch.arange(rows) % (columns + 1)
        inputs["num_accepted_tokens"] = accepted.to(device, index_dtype)
    if destination is not None:
        inputs["dst_state_batch_indices"] = distinct_slots(rows, destination or None, 1, device, index_dtype)
    if packed is not None:
        inputs["cu_seqlens"] = torch.tensor(packed, device=device, dtype=index_dtype)
    if intermediate is not None:
        state = inputs["state"]
        inputs["intermediate_states_buffer"] = torch.full_like(state[:1], 7).expand(rows + 2, *state.shape[1:]).clone()
        buffer = inputs["intermediate_states_buffer"][:, None].repeat(1, intermediate, *(1,) * (state.dim() - 1))
        inputs["intermediate_states_buffer"] = buffer
        inputs["intermediate_state_indices"] = torch.arange(rows, 0, -1, device=device, dtype=index_dtype)
    if out:
        inputs["out"] = torch.full_like(inputs["x"], torch.nan)
    return inputs


WRITTEN = ("state", "out", "intermediate_states_buffer", "conv_state", "intermediate_conv_window")


def decode(inputs: dict[str, Any], function: Callable = selective_state_update) -> dict[str, Tensor]:
    """The output and all tensors that a call writes to, of copies of them."""
    copies = {name: inputs[name].clone() for name in WRITTEN if inputs.get(name) is not None}
    out = function(**inputs | copies)
    assert "out" not in copies or out is copies["out"]
    return copies | {"out": out}


def one_step(state: Tensor, **inputs: Any) -> tuple[Tensor, Tensor]:
    """A step of one row: the output and the new state."""
    state = state.clone()
    return selective_state_update(state, **inputs), state


def decode_by_steps(inputs: dict[str, Any], step: Callable = one_step) -> dict[str, Tensor]:
    """The results of :func:`decode`, by calls of ``step`` for one row and one token, in plain Python."""
    tables = ("state_batch_indices", "dst_state_batch_indices", "num_accepted_tokens", "cu_seqlens")
    read, write, accepted, ends = (None if inputs.get(name) is None else inputs[name].tolist() for name in tables)
    write = read if write is None else write
    entries = inputs.get("intermediate_state_indices")
    pad, buffer = inputs.get("pad_slot_id"), inputs.get("intermediate_states_buffer")
    state, buffer = inputs["state"].clone(), None if buffer is None else buffer.clone()
    before, out = inputs["state"], torch.zeros_like(inputs["x"])
    has_tokens = ends is None and inputs["x"].dim() == inputs["state"].dim()
    sequences = ("x", "dt", "z", "B", "C")
    parameters = ("A", "D", "dt_bias", "dt_softplus", "discretization", "dt_limit", "A_is_log")
    shared = {name: inputs[name] for name in parameters if name in inputs}

    def is_padding(slot: int) -> bool:
        return slot < 0 or slot == pad

    rows = len(inputs["x"]) if ends is None else len(ends) - 1
    for b in range(rows):
        slot = b if read is None else read[b]
        slot = slot if isinstance(slot, int) else slot[0 if accepted is None else max(accepted[b] - 1, 0)]
        if read is not None and is_padding(slot):
            continue
        if ends is not None:
            places = range(ends[b], ends[b + 1])
        else:
            places = [(b, t) for t in range(inputs["x"].shape[1])] if has_tokens else [b]
        h = before[slot]
        for t, place in enumerate(places):
            row = {name: inputs[name][place][None] for name in sequences if inputs.get(name) is not None}
            y, new = step(h[None], **row, **shared)
            h = new[0].to(state.dtype)
            out[place] = y[0].to(out.dtype)
            target = b if write is None else write[b]
            if not isinstance(target, int):
                target = target[t]
            elif t < len(places) - 1:
                target = -1
            if not inputs.get("disable_state_update") and (write is None or not is_padding(target)) and target >= 0:
                state[target] = h
            entry = b if entries is None else int(entries[b])
            if buffer is not None and (entries is None or not is_padding(entry)):
                buffer[entry, t] = h
    results = {"state": state, "out": out}
    return results if buffer is None else results | {"intermediate_states_buffer": buffer}


def make_conv_token_inputs(
    *,
    rows: int = 2,
    tokens: int | None = None,
    packed: tuple[int, ...] | None = None,
    slots: bool = True,
    destination: bool = False,
    accepted: tuple[int, ...] | None = None,
    intermediate: int | None = None,
    out: bool = True,
    index_dtype: torch.dtype = torch.int32,
    device: str = "cpu",
    **options: Any,
) -> dict[str, Any]:
    """Keyword arguments of ``causal_conv1d_update``, as of :func:`make_token_inputs`; ``accepted``: num_accepted_tokens."""
    rows = rows if packed is None else len(packed) - 1
    inputs = make_conv_step_inputs(
        batch=rows if packed is None else packed[-1], seqlen=tokens, slots=SLOTS, device=device, **options
    )
    inputs["state_batch_indices"] = distinct_slots(rows, None, 0, device, index_dtype) if slots else None
    if not slots:
        inputs["conv_state"] = inputs["conv_state"][:rows]
    if destination:
        inputs["dst_state_batch_indices"] = distinct_slots(rows, None, 1, device, index_dtype)
    if accepted is not None:
        inputs["num_accepted_tokens"] = torch.tensor(accepted, device=device, dtype=index_dtype)
    if packed is not None:
        inputs["cu_seqlens"] = torch.tensor(packed, device=device, dtype=index_dtype)
    if intermediate is not None:
        state, past = inputs["conv_state"], inputs["weight"].shape[1] - 1
        inputs["intermediate_conv_window"] = state.new_full((rows + 2, intermediate, state.shape[1], past), 7)
        inputs["intermediate_state_indices"] = torch.arange(rows, 0, -1, device=device, dtype=index_dtype)
    if out:
        inputs["out"] = torch.full_like(inputs["x"], torch.nan)
    return inputs


def convolve_rows(window: Tensor, x: Tensor, **parameters: Any) -> Tensor:
    """The output of the steps of one row, from the inputs before them."""
    return causal_conv1d_update(x, window.contiguous(), **parameters)


def convolve_by_rows(inputs: dict[str, Any], convolve: Callable = convolve_rows) -> dict[str, Tensor]:
    """The results of :func:`decode` for ``causal_conv1d_update``, by calls for one row, the states in plain Python."""
    tables = ("state_batch_indices", "dst_state_batch_indices", "num_accepted_tokens", "cu_seqlens")
    read, write, accepted, ends = (None if inputs.get(name) is None else inputs[name].tolist() for name in tables)
    write = read if write is None else write
    entries = None if inputs.get("intermediate_state_indices") is None else inputs["intermediate_state_indices"].tolist()
    before, windows = inputs["conv_state"], inputs.get("intermediate_conv_window")
    state, windows = before.clone(), None if windows is None else windows.clone()
    x, out = inputs["x"], torch.zeros_like(inputs["x"])
    parameters = {name: inputs[name] for name in ("weight", "bias", "activation")}
    past = inputs["weight"].shape[1] - 1

    def is_padding(slot: int) -> bool:
        return slot < 0 or slot == inputs.get("pad_slot_id")

    for b in range(len(x) if ends is None else len(ends) - 1):
        slot = b if read is None else read[b]
        place = b if ends is None else slice(ends[b], ends[b + 1])
        steps = x[place] if x[place].dim() == 2 else x[place][None]
        if (read is not None and is_padding(slot)) or not len(steps):
            continue
        end = before.shape[2] if accepted is None else max(accepted[b], 1) - 1 + past
        window = before[slot][:, end - past : end]
        out[place] = convolve(window[None], steps[None], **parameters)[0].reshape(out[place].shape)
        inputs_of_row = torch.cat([before[slot][:, :end], steps.T.to(state.dtype)], dim=1)
        target = b if write is None else write[b]
        if not inputs.get("disable_state_update") and (write is None or not is_padding(target)):
            if accepted is None:
                state[target] = inputs_of_row[:, len(steps) :]
            else:
                kept = inputs_of_row[:, end - past + 1 :]
                state[target, :, : kept.shape[1]] = kept
        entry = b if entries is None else entries[b]
        if windows is not None and (entries is None or not is_padding(entry)):
            for t in range(len(steps)):
                windows[entry, t] = inputs_of_row[:, end + t + 1 - past : end + t + 1]
    results = {"conv_state": state, "out": out}
    return results if windows is None else results | {"intermediate_conv_window": windows}
