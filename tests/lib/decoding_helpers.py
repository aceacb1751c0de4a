"""Inputs of the decoding steps of servers, with slots, several tokens a row and a buffer of states, and loops of one step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import conv_helpers
import delta_rule_step_helpers
import selective_scan_helpers
import torch
from conv_helpers import make_step_inputs as make_conv_step_inputs
from helpers import assert_as_accurate
from operator_spec import as_float64
from selective_scan_helpers import STEP_FORMS, make_step_inputs
from torch import Tensor

from ssm_kernels import causal_conv1d_update, delta_rule_step, reference, selective_state_update

SLOTS = 24


class DecodingStep(NamedTuple):
    """A step that updates a state in place, as a function of a call's inputs that returns the output and the new state.

    Attributes:
        family: the operator's key in ``helpers.KERNEL_OPTIONS``.
        large: options of ``make_inputs``, to which tests add ``batch``.
        sizes: more of them.
        first: the argument whose dtype messages name.
        written: tensors that a call changes and that must have their values in memory.
        either: tensors that may have the dtype of the first one or the accumulation dtype.
        good: options of ``make_inputs`` with sizes that no error confuses, by which the tables of messages are written.
        together: options of ``make_inputs`` with every tensor that a call of one token can have.
        make_token_inputs: the arguments of a call of several tokens.
        tokens_together: its options with every tensor.
    """

    family: str
    make_inputs: Callable[..., dict[str, Any]]
    step: Callable[[dict[str, Any]], tuple[Tensor, Tensor]]
    reference: Callable[..., tuple[Tensor, Tensor]]
    large: Mapping[str, Any]
    sizes: Sequence[Mapping[str, Any]]
    first: str
    written: Sequence[str]
    either: Sequence[str]
    good: Mapping[str, Any]
    together: Mapping[str, Any]
    make_token_inputs: Callable[..., dict[str, Any]]
    tokens_together: Mapping[str, Any]

    def row_names(self, **options: Any) -> list[str]:
        """Names of the tensors of such inputs that have an entry for each row of the batch."""
        one, two = (self.make_inputs(**{**options, "batch": batch}) for batch in (1, 2))
        return [name for name, value in one.items() if isinstance(value, Tensor) and value.shape != two[name].shape]


def distinct_slots(rows: int, columns: int | None, seed: int, device: str, dtype: torch.dtype = torch.int32) -> Tensor:
    """Slots in no order, (rows,) or (rows, columns). Tables of the two parities of ``seed`` have none in common."""
    generator = torch.Generator().manual_seed(seed)
    slots = 2 * torch.randperm(SLOTS // 2, generator=generator)[: rows * (columns or 1)] + seed % 2
    return slots.reshape((rows,) if columns is None else (rows, columns)).to(device, dtype)


class ServerStep(NamedTuple):
    """A decoding step whose form for servers takes slots, several tokens a row and a buffer of states.

    Attributes:
        state: the argument that is updated in place.
        tokens: the argument that shows the rows and tokens: it has as many axes as the state if rows have several tokens.
        sequences: all arguments with an entry for each token, those in ``updates`` with ``num_householder`` of them.
        cast: the arguments that autocast casts to the lower dtype.
        parameter: an argument without entries for tokens.
        make_inputs: takes ``batch``, ``tokens``, ``packed`` and ``slots``, as of :func:`delta_rule_step_helpers.make_inputs`.
        out_shape: the shape of the output, of the inputs.
        forms: options that change the shapes of the arguments.
        sizes: options that take the kernels' paths apart.
        same_bits: whether tokens give the bits of as many steps on CUDA too.
    """

    name: str
    function: Callable[..., Tensor]
    reference: Callable[..., tuple[Tensor, Tensor]]
    state: str
    tokens: str
    sequences: tuple[str, ...]
    updates: tuple[str, ...]
    cast: tuple[str, ...]
    parameter: str
    make_inputs: Callable[..., dict[str, Any]]
    out_shape: Callable[[dict[str, Any]], Sequence[int]]
    forms: Sequence[Mapping[str, Any]]
    sizes: Sequence[Mapping[str, Any]]
    same_bits: bool

    @property
    def operator(self) -> torch._ops.OpOverloadPacket:
        """The form for servers."""
        return getattr(torch.ops.ssm_kernels, f"{self.name}_out")

    @property
    def written(self) -> tuple[str, ...]:
        return (self.state, "out", "intermediate_states_buffer")

    def make_token_inputs(
        self,
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
        """Keyword arguments with ``SLOTS`` slots.

        Args:
            tokens: None for one token without an axis.
            packed: ``cu_seqlens``, in place of ``rows`` and ``tokens``.
            columns: None for ``state_batch_indices`` of shape (rows,), 0 for none, else (rows, columns) and
                ``num_accepted_tokens``.
            destination: None for no ``dst_state_batch_indices``, 0 for shape (rows,), else (rows, destination).
            intermediate: tokens of a buffer of states, with ``intermediate_state_indices``; None for none.
            options: of ``make_inputs``.
        """
        rows = rows if packed is None else len(packed) - 1
        inputs = self.make_inputs(batch=rows, tokens=tokens, packed=packed, slots=SLOTS, device=device, **options)
        inputs["state_batch_indices"] = None if columns == 0 else distinct_slots(rows, columns, 0, device, index_dtype)
        if columns == 0:
            inputs[self.state] = inputs[self.state][:rows]
        elif columns:
            inputs["num_accepted_tokens"] = (torch.arange(rows) % (columns + 1)).to(device, index_dtype)
        if destination is not None:
            inputs["dst_state_batch_indices"] = distinct_slots(rows, destination or None, 1, device, index_dtype)
        if packed is not None:
            inputs["cu_seqlens"] = torch.tensor(packed, device=device, dtype=index_dtype)
        if intermediate is not None:
            state = inputs[self.state]
            inputs["intermediate_states_buffer"] = state.new_full((rows + 2, intermediate, *state.shape[1:]), 7)
            inputs["intermediate_state_indices"] = torch.arange(rows, 0, -1, device=device, dtype=index_dtype)
        inputs["disable_state_update"] = False
        if out:
            inputs["out"] = inputs[self.tokens].new_full(tuple(self.out_shape(inputs)), torch.nan)
        return inputs

    def decode(self, inputs: dict[str, Any]) -> dict[str, Tensor]:
        """The output and all tensors that a call writes to, of copies of them."""
        return decode(inputs, self.function)

    def assert_matches(self, inputs: dict[str, Any]) -> dict[str, Tensor]:
        """As many calls of one row and one token give the same: bit for bit on the CPU and, with ``same_bits``, on CUDA."""
        actual, expected = self.decode(inputs), self.decode_by_steps(inputs)
        assert actual.keys() == expected.keys()
        for name, value in actual.items():
            if value.device.type == "cpu" or self.same_bits:
                assert torch.equal(value, expected[name]), name
            else:
                eps = torch.finfo(value.dtype).eps
                torch.testing.assert_close(value, expected[name], rtol=4 * eps, atol=64 * eps)
        return actual

    def assert_matches_reference(self, inputs: dict[str, Any]) -> None:
        """The float64 reference, by the low-precision rule below float64."""
        actual = self.decode(inputs)
        exact = self.decode_by_steps(as_float64(inputs), self.reference)
        if inputs[self.tokens].dtype == torch.float64:
            for name, value in actual.items():
                torch.testing.assert_close(value, exact[name], rtol=1e-12, atol=1e-12)
            return
        native = self.decode_by_steps(inputs, self.reference)
        for name, value in actual.items():
            assert_as_accurate(value, native[name].to(value.dtype), exact[name], name)

    def one_step(self, state: Tensor, **inputs: Any) -> tuple[Tensor, Tensor]:
        """A step of one row: the output and the new state."""
        state = state.clone()
        return self.function(state, **inputs), state

    def decode_by_steps(self, inputs: dict[str, Any], step: Callable | None = None) -> dict[str, Tensor]:
        """The results of :meth:`decode`, by calls of ``step`` for one row and one token, in plain Python."""
        step = self.one_step if step is None else step
        tables = ("state_batch_indices", "dst_state_batch_indices", "num_accepted_tokens", "cu_seqlens")
        read, write, accepted, ends = (None if inputs.get(name) is None else inputs[name].tolist() for name in tables)
        write = read if write is None else write
        entries, pad, buffer = (
            inputs.get(name) for name in ("intermediate_state_indices", "pad_slot_id", "intermediate_states_buffer")
        )
        before, buffer = inputs[self.state], None if buffer is None else buffer.clone()
        state, of_tokens, updates = before.clone(), inputs[self.tokens], inputs.get("num_householder", 1)
        out = of_tokens.new_zeros(tuple(self.out_shape(inputs)))
        has_tokens = ends is None and of_tokens.dim() == before.dim()
        skipped = {*tables, *self.written, *self.sequences, "intermediate_state_indices", "pad_slot_id", "disable_state_update"}
        shared = {name: value for name, value in inputs.items() if name not in skipped}

        def is_padding(slot: int) -> bool:
            return slot < 0 or slot == pad

        def token_of(name: str, b: int, t: int) -> Tensor | None:
            value = inputs.get(name)
            if value is None:
                return None
            n = updates if name in self.updates else 1
            if ends is None and not has_tokens:
                return value[b][None]
            part = value[t * n : (t + 1) * n] if ends is not None else value[b, t * n : (t + 1) * n]
            return part[None] if n > 1 else part

        for b in range(len(of_tokens) if ends is None else len(ends) - 1):
            slot = b if read is None else read[b]
            slot = slot if isinstance(slot, int) else slot[0 if accepted is None else max(accepted[b] - 1, 0)]
            if read is not None and is_padding(slot):
                continue
            places = range(ends[b], ends[b + 1]) if ends is not None else range(of_tokens.shape[1] if has_tokens else 1)
            h = before[slot]
            for t, place in enumerate(places):
                y, new = step(h[None], **{name: token_of(name, b, place) for name in self.sequences}, **shared)
                h = new[0].to(state.dtype)
                out[place if ends is not None else (b, place) if has_tokens else b] = y[0].to(out.dtype)
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
        results = {self.state: state, "out": out}
        return results if buffer is None else results | {"intermediate_states_buffer": buffer}


WRITTEN = ("state", "states", "conv_state", "out", "intermediate_states_buffer", "intermediate_conv_window")


def decode(inputs: dict[str, Any], function: Callable) -> dict[str, Tensor]:
    """The output and all tensors that a call writes to, of copies of them in the same strides."""
    copies = {
        name: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x)
        for name in WRITTEN
        if (x := inputs.get(name)) is not None
    }
    out = function(**inputs | copies)
    assert "out" not in copies or out is copies["out"]
    return copies | {"out": out}


UPDATE_SEQUENCES = ("x", "dt", "z", "B", "C")


def _make_update_inputs(*, batch: int, tokens: int | None, packed: tuple[int, ...] | None, **options: Any) -> dict[str, Any]:
    leading = (batch,) if tokens is None else (batch, tokens)
    leading = leading if packed is None else (packed[-1],)
    inputs = make_step_inputs(batch=torch.Size(leading).numel(), **options)
    for name in UPDATE_SEQUENCES:
        if inputs[name] is not None:
            inputs[name] = inputs[name].unflatten(0, leading)
    return inputs


SELECTIVE_STATE_UPDATE = ServerStep(
    "selective_state_update",
    selective_state_update,
    reference.selective_state_update,
    state="state",
    tokens="x",
    sequences=UPDATE_SEQUENCES,
    updates=(),
    cast=UPDATE_SEQUENCES,
    parameter="A",
    make_inputs=_make_update_inputs,
    out_shape=lambda inputs: inputs["x"].shape,
    forms=list(STEP_FORMS.values()),
    sizes=[{**STEP_FORMS[form], "dstate": dstate} for form in ("channels", "heads_groups") for dstate in (3, 16, 136)],
    same_bits=False,
)
DELTA_RULE_STEP = ServerStep(
    "delta_rule_step",
    delta_rule_step,
    reference.delta_rule_step,
    state="states",
    tokens="q",
    sequences=("q", "k", "v", "beta", "g"),
    updates=("k", "v", "beta"),
    cast=("q", "k", "v"),
    parameter="A_log",
    make_inputs=delta_rule_step_helpers.make_inputs,
    out_shape=lambda inputs: (*inputs["q"].shape[:-2], *inputs["states"].shape[1:3]),
    forms=[{"gate": gate} for gate in delta_rule_step_helpers.GATES],
    sizes=[
        {"key_dim": 3, "A_log": True},
        {"key_dim": 16, "gate": "column", "num_householder": 2, "qk_l2norm": True, "A_log": True},
        {"key_dim": 136, "qk_l2norm": True, "A_log": True},
        {"key_dim": 264, "gate": None, "qk_l2norm": True},
    ],
    same_bits=True,
)
# By the name of the operator of one step.
SERVER_STEPS = {step.name: step for step in (SELECTIVE_STATE_UPDATE, DELTA_RULE_STEP)}

# Options of make_token_inputs: rows and tokens, and what chooses slots.
CALLS: dict[str, dict[str, Any]] = {
    "out": {},
    "out_without_slots": {"columns": 0},
    "destination": {"destination": 0},
    "tokens": {"tokens": 4},
    "tokens_without_slots": {"tokens": 3, "columns": 0},
    "tokens_destination": {"tokens": 3, "destination": 0},
    "tokens_each_destination": {"tokens": 3, "destination": 4},
    "accepted": {"rows": 3, "tokens": 2, "columns": 3, "destination": 2},
    "accepted_in_place": {"rows": 3, "tokens": 3, "columns": 3},
    "packed": {"packed": (0, 2, 2, 5, 6)},
    "packed_accepted": {"packed": (0, 3, 3, 4), "columns": 3},
    "packed_each_destination": {"packed": (0, 3, 4), "destination": 3},
    "intermediate": {"tokens": 3, "intermediate": 4},
    "packed_intermediate": {"packed": (0, 1, 4), "intermediate": 3},
}


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
    """Keyword arguments of ``causal_conv1d_update``, as of :class:`ServerStep`; ``accepted``: num_accepted_tokens."""
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


# Raw gates of a delta rule, a number for each column of the state.
RAW_GATES = {"gate": "column", "A_log": True, "dt_bias": True}
# All that a server passes with several tokens a row.
OF_SERVERS = {"packed": (0, 2, 5), "columns": 3, "destination": 3, "intermediate": 3}
DECODING_STEPS = {
    "selective_state_update": DecodingStep(
        family="selective_state_update",
        make_inputs=make_step_inputs,
        step=selective_scan_helpers.step,
        reference=reference.selective_state_update,
        large={"heads": 4, "groups": 2, "dim": 40, "dstate": 16},
        sizes=[{**size, "dstate": 64} for size in (*STEP_FORMS.values(), {"dim": 700}, {"heads": 16, "dim": 64})],
        first="x",
        written=("state", "out"),
        either=("state", "A", "D", "dt_bias"),
        good={"batch": 2, "dim": 6, "dstate": 4, "groups": 2, "slots": 2},
        together={"slots": 3},
        make_token_inputs=SELECTIVE_STATE_UPDATE.make_token_inputs,
        tokens_together=OF_SERVERS,
    ),
    "delta_rule_step": DecodingStep(
        family="delta_rule_step",
        make_inputs=delta_rule_step_helpers.make_inputs,
        step=delta_rule_step_helpers.step,
        reference=reference.delta_rule_step,
        large={"heads": 2, "value_heads": 4, "key_dim": 24, "value_dim": 20},
        sizes=[{"key_dim": 128, "value_dim": 128, "qk_l2norm": True}, {"key_dim": 33}, {"key_dim": 256, "gate": "column"}],
        first="q",
        written=("states", "out"),
        either=("states", "beta", "g", "A_log", "dt_bias"),
        good={"batch": 2, "heads": 3, "value_heads": 6, "key_dim": 4, "value_dim": 5, "slots": 2, **RAW_GATES},
        together={"slots": 3, **RAW_GATES},
        make_token_inputs=DELTA_RULE_STEP.make_token_inputs,
        tokens_together={**OF_SERVERS, "A_log": True, "dt_bias": True},
    ),
    "causal_conv1d_update": DecodingStep(
        family="causal_conv1d",
        make_inputs=make_conv_step_inputs,
        step=conv_helpers.step,
        reference=reference.causal_conv1d_update,
        large={"channels": 700, "seqlen": 3},
        sizes=[{}, {"channels": 64, "width": 2}],
        first="x",
        written=("conv_state",),
        either=("weight", "bias", "conv_state"),
        good={"slots": 3},
        together={"slots": 4},
        make_token_inputs=make_conv_token_inputs,
        tokens_together={"packed": (0, 2, 5), "destination": True, "accepted": (1, 2), "length": 6, "intermediate": 3},
    ),
}
