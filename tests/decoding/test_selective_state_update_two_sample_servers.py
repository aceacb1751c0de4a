"""Steps with servers' arguments, of rules that read two input samples and with a step of its own for A: the result is that of
calls of one token, row by row.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ssm_kernels import selective_state_update

OPERATOR = "selective_state_update"
DIM, DSTATE, SLOTS = 6, 5, 7
CACHES = ("state", "previous_x", "previous_B")
KINDS: dict[str, dict[str, Any]] = {
    "foh_ramp": {"discretization": "foh_ramp"},
    "trapezoidal": {"discretization": "trapezoidal"},
    "gbt_two_sample": {"discretization": "gbt_two_sample", "alpha": 0.7},
    "exp_trapezoidal": {"discretization": "exp_trapezoidal", "lam_sigmoid": True},
    "dt_A": {"discretization": "zoh_exact"},
    "exp_trapezoidal, dt_A": {"discretization": "exp_trapezoidal", "lam_sigmoid": True},
}
every_kind = pytest.mark.parametrize("kind", KINDS)
of_dtypes = pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-2}


class Call:
    """The arguments of a call of ``axes`` of tokens, and a cache of SLOTS states and samples."""

    def __init__(self, kind: str, axes: tuple[int, ...], device: str, dtype: torch.dtype, dstate: int = DSTATE) -> None:
        generator = torch.Generator().manual_seed(0)
        wide = torch.float64 if dtype == torch.float64 else torch.float32

        def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, dtype)

        self.of_tokens = {name: normal(*axes, DIM) for name in ("x", "dt", "z")}
        self.of_tokens |= {name: normal(*axes, 2, dstate) for name in ("B", "C")}
        if "exp_trapezoidal" in kind:
            self.of_tokens["lam"] = normal(*axes, DIM)
        if "dt_A" in kind:
            self.of_tokens["dt_A"] = normal(*axes, DIM).abs()
        self.options: dict[str, Any] = KINDS[kind] | {"dt_softplus": True}
        self.options |= {"A": -normal(DIM, dstate, dtype=wide).exp()}
        self.options |= {"D": normal(DIM, dtype=wide), "dt_bias": normal(DIM, dtype=wide)}
        self.cache = {"state": normal(SLOTS, DIM, dstate, dtype=wide)}
        if kind != "dt_A":
            self.cache |= {"previous_x": normal(SLOTS, DIM), "previous_B": normal(SLOTS, 2, dstate)}
        self.before = {name: value.clone() for name, value in self.cache.items()}
        self.tolerance = TOLERANCES[dtype]

    def run(self, **servers: Any) -> Tensor:
        return selective_state_update(**self.of_tokens, **self.options, **self.cache, **servers)

    def one_by_one(self, tokens: list[Any], read: int) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
        """The outputs of the tokens with these indices, and the cache after each, from that of a slot before the call."""
        own = {name: value[read : read + 1].clone() for name, value in self.before.items()}
        outs, caches = [], []
        for token in tokens:
            of_token = {name: value[token][None] for name, value in self.of_tokens.items()}
            outs.append(selective_state_update(**of_token, **self.options, **own)[0])
            caches.append({name: value[0].clone() for name, value in own.items()})
        return outs, caches

    def close(self, found: Tensor, expected: Tensor) -> None:
        torch.testing.assert_close(found, expected, rtol=self.tolerance, atol=self.tolerance)

    def check_cache(self, written: dict[int, dict[str, Tensor]]) -> None:
        """Slots have these states and samples, and all others those from before the call."""
        for name, value in self.cache.items():
            for slot in range(SLOTS):
                if slot in written:
                    self.close(value[slot], written[slot][name])
                else:
                    assert torch.equal(value[slot], self.before[name][slot]), (name, slot)


@of_dtypes
@every_kind
def test_packed_tokens_from_slots_to_slots(kind, dtype, device):
    """Into ``out`` and a buffer, with a sequence without tokens, a pad, and tokens after the last sequence."""
    call = Call(kind, (8,), device, dtype)
    ends, read, write = [0, 3, 3, 5, 7], [4, 1, 2, 6], [0, 1, 5, 3]
    out = torch.full_like(call.of_tokens["x"], 9)
    buffer = torch.full((5, 3, DIM, DSTATE), 7.0, device=device, dtype=call.cache["state"].dtype)
    result = call.run(
        out=out,
        cu_seqlens=torch.tensor(ends, device=device),
        state_batch_indices=torch.tensor(read, device=device, dtype=torch.int32),
        dst_state_batch_indices=torch.tensor(write, device=device, dtype=torch.int32),
        pad_slot_id=6,
        intermediate_states_buffer=buffer,
        intermediate_state_indices=torch.tensor([2, 0, 4, 1], device=device),
    )
    assert result is out
    written = {}
    for row, entry in ((0, 2), (2, 4)):
        tokens = [*range(ends[row], ends[row + 1])]
        outs, caches = call.one_by_one(tokens, read[row])
        call.close(out[tokens], torch.stack(outs))
        call.close(buffer[entry, : len(tokens)], torch.stack([cache["state"] for cache in caches]))
        assert (buffer[entry, len(tokens) :] == 7).all()
        written[write[row]] = caches[-1]
    assert not out[5:7].any() and (out[7] == 9).all()  # the row of the pad, and no row
    assert (buffer[[0, 1, 3]] == 7).all()
    call.check_cache(written)


@pytest.mark.parametrize("dstate", [DSTATE, 16, 200])
@every_kind
def test_accepted_tokens_of_speculative_decoding(kind, dstate, device):
    """A column of slots for each token: rows begin at the last accepted one, and write every state."""
    call = Call(kind, (2, 3), device, torch.float64, dstate)
    table = torch.tensor([[0, 1, 2], [3, 4, 5]], device=device)
    accepted = torch.tensor([3, 0], device=device, dtype=torch.int32)
    out = call.run(state_batch_indices=table, num_accepted_tokens=accepted)
    written = {}
    for row, read in ((0, 2), (1, 3)):
        outs, caches = call.one_by_one([(row, t) for t in range(3)], read)
        call.close(out[row], torch.stack(outs))
        written |= dict(zip(table[row].tolist(), caches, strict=True))
    call.check_cache(written)


@every_kind
def test_verified_drafts_write_no_cache(kind, device):
    call = Call(kind, (3, 2), device, torch.float64)
    buffer = torch.zeros(3, 2, DIM, DSTATE, device=device, dtype=torch.float64)
    slots = torch.tensor([5, -1, 2], device=device)
    out = call.run(state_batch_indices=slots, intermediate_states_buffer=buffer, disable_state_update=True)
    for row, read in ((0, 5), (2, 2)):
        outs, caches = call.one_by_one([(row, 0), (row, 1)], read)
        call.close(out[row], torch.stack(outs))
        call.close(buffer[row], torch.stack([cache["state"] for cache in caches]))
    assert not out[1].any() and not buffer[1].any()
    call.check_cache({})


@every_kind
def test_one_token_into_out(kind, device):
    call = Call(kind, (2,), device, torch.float64)
    out = torch.empty(2, 2 * DIM, device=device, dtype=torch.float64)[:, ::2]
    assert call.run(out=out, state_batch_indices=torch.tensor([6, 1], device=device)) is out
    written = {}
    for row, slot in ((0, 6), (1, 1)):
        outs, caches = call.one_by_one([row], slot)
        call.close(out[row], outs[0])
        written[slot] = caches[0]
    call.check_cache(written)


@pytest.mark.parametrize("kind", ["dt_A", "exp_trapezoidal"])
def test_opcheck(kind):
    call = Call(kind, (4,), "cpu", torch.float64)
    empty = torch.empty(0, dtype=torch.float64)
    samples = [call.cache.get(name, empty.clone()) for name in ("previous_x", "previous_B")]
    tokens, options = call.of_tokens, call.options
    tensors = [*(tokens[name] for name in ("x", "dt")), options["A"], tokens["B"], tokens["C"], options["D"], tokens["z"]]
    lam, dt_A = tokens.get("lam"), tokens.get("dt_A")
    slots, cu_seqlens = torch.tensor([2, 0]), torch.tensor([0, 1, 4])
    more = (options["discretization"], lam is not None, None, False, False, True)
    operator = torch.ops.ssm_kernels.selective_state_update_two_sample_out.default
    arguments = (call.cache["state"], *samples, *tensors, options["dt_bias"], lam, True, slots, dt_A, *more)
    torch.library.opcheck(operator, (*arguments, torch.empty_like(tokens["x"])), {"cu_seqlens": cu_seqlens})


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        (lambda call: {"out": call.cache["previous_x"][:2]}, RuntimeError, "share no memory with out"),
        (lambda call: {"out": call.of_tokens["lam"]}, RuntimeError, "share no memory with out"),
        (lambda call: {"out": torch.empty(2, DIM)}, RuntimeError, "expected out of dtype float64"),
        (
            lambda call: {"cu_seqlens": torch.tensor([0, 2]), "lam": torch.ones(2, 2).double()},
            ValueError,
            r"expected lam of shape \(tokens, dim\) = \[2, 6\]",
        ),
        (lambda call: {"state_batch_indices": torch.tensor([7, 0])}, ValueError, "expected state_batch_indices below"),
        (
            lambda call: {"dst_state_batch_indices": torch.tensor([3, 3]), "state_batch_indices": torch.tensor([0, 1])},
            ValueError,
            "",
        ),
    ],
)
def test_messages(changed, error, message):
    call = Call("exp_trapezoidal", (2,), "cpu", torch.float64)
    arguments = call.of_tokens | call.options | call.cache | {"state_batch_indices": torch.tensor([0, 1])}
    with pytest.raises(error, match=f"^selective_state_update: .*{message}"):
        selective_state_update(**arguments | changed(call))


def test_arguments_that_require_gradients():
    call = Call("trapezoidal", (2,), "cpu", torch.float64)
    call.of_tokens["x"].requires_grad_()
    with pytest.raises(NotImplementedError, match=r"^selective_state_update: decoding is not differentiable"):
        call.run(disable_state_update=True, state_batch_indices=torch.tensor([0, 1]))
