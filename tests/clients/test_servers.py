"""Decoding calls of inference servers: the patterns of vLLM, FlashInfer and SGLang, against plain loops in float64.

The loops restate what these callers expect of the functions. The packages are not needed.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ssm_kernels import causal_conv1d, causal_conv1d_update, selective_scan, selective_state_update

OPERATOR = "selective_state_update"

HEADS, HEADDIM, GROUPS, DSTATE, CHANNELS, WIDTH = 4, 8, 2, 16, 24, 4


class Layer:
    """Parameters of a Mamba-2 layer as servers pass them: one number for each head, expanded with strides of zero."""

    def __init__(self, device: str, dtype: torch.dtype = torch.float64, seed: int = 0) -> None:
        self.generator, self.device, self.dtype = torch.Generator().manual_seed(seed), device, dtype
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        self.A = (-0.1 - self.uniform(HEADS)).to(wide)
        self.D, self.dt_bias = self.normal(HEADS).to(wide), self.uniform(HEADS).to(wide)
        self.conv_weight, self.conv_bias = self.normal(CHANNELS, WIDTH), self.normal(CHANNELS)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64).to(self.device, self.dtype)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator, dtype=torch.float64).to(self.device, self.dtype)

    def tokens(self, *leading: int) -> dict[str, Tensor]:
        """x, dt, B and C of some tokens; dt expanded over headdim."""
        return {
            "x": self.normal(*leading, HEADS, HEADDIM),
            "dt": self.normal(*leading, HEADS)[..., None].expand(*leading, HEADS, HEADDIM),
            "B": self.normal(*leading, GROUPS, DSTATE),
            "C": self.normal(*leading, GROUPS, DSTATE),
        }

    def expanded(self) -> dict[str, Tensor]:
        return {
            "A": self.A[:, None, None].expand(HEADS, HEADDIM, DSTATE),
            "D": self.D[:, None].expand(HEADS, HEADDIM),
            "dt_bias": self.dt_bias[:, None].expand(HEADS, HEADDIM),
        }

    def step(self, state: Tensor, x: Tensor, dt: Tensor, B: Tensor, C: Tensor) -> tuple[Tensor, Tensor]:
        """One token of one sequence, written out: the output and the new state, in float64."""
        state, x, dt, B, C = (value.double() for value in (state, x, dt, B, C))
        delta = F.softplus(dt + self.dt_bias.double()[:, None])
        B, C = (matrix.repeat_interleave(HEADS // GROUPS, dim=0)[:, None] for matrix in (B, C))
        decay = torch.exp(delta * self.A.double()[:, None])[..., None]
        new = decay * state + (delta * x)[..., None] * B
        return (new * C).sum(-1) + self.D.double()[:, None] * x, new


def at(tokens: dict[str, Tensor], *place: int) -> dict[str, Tensor]:
    return {name: value[place] for name, value in tokens.items()}


def close(actual: Tensor, expected: Tensor) -> None:
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5}.get(actual.dtype, 2e-2)
    torch.testing.assert_close(actual.double(), expected.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_a_batch_padded_with_the_null_block(dtype, device):
    """vLLM: slot 0 is the null block, the output goes to a part of a buffer, the batch has a fixed size."""
    layer = Layer(device, dtype)
    state = layer.normal(10, HEADS, HEADDIM, DSTATE)
    before, buffer = state.clone(), torch.full((8, HEADS * HEADDIM), 7.0, device=device, dtype=dtype)
    slots = torch.tensor([4, 9, 0, 2, 0], dtype=torch.int32, device=device)
    tokens = layer.tokens(5)
    selective_state_update(
        state,
        **tokens,
        **layer.expanded(),
        z=None,
        dt_softplus=True,
        state_batch_indices=slots,
        dst_state_batch_indices=slots,
        pad_slot_id=0,
        out=buffer[:5].view(5, HEADS, HEADDIM),
    )
    for row, slot in enumerate(slots.tolist()):
        if slot == 0:
            continue
        out, new = layer.step(before[slot], **at(tokens, row))
        close(buffer[row].view(HEADS, HEADDIM), out)
        close(state[slot], new)
    assert buffer[[2, 4]].count_nonzero() == 0 and (buffer[5:] == 7).all()
    assert torch.equal(state[[0, 1, 3, 5, 6, 7, 8]], before[[0, 1, 3, 5, 6, 7, 8]])


def test_prefix_caching_reads_one_block_and_writes_another(device):
    """vLLM: where a block of tokens is full, the next state goes to the next block, and the old one stays as a cache."""
    layer = Layer(device)
    state = layer.normal(12, HEADS, HEADDIM, DSTATE)
    before, tokens = state.clone(), layer.tokens(2)
    read, write = (torch.tensor(slots, dtype=torch.int32, device=device) for slots in ([3, 7], [3, 8]))
    out = selective_state_update(
        state, **tokens, **layer.expanded(), dt_softplus=True, state_batch_indices=read, dst_state_batch_indices=write
    )
    for row, (source, target) in enumerate([(3, 3), (7, 8)]):
        expected, new = layer.step(before[source], **at(tokens, row))
        close(out[row], expected)
        close(state[target], new)
    assert torch.equal(state[7], before[7])


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_speculative_decoding_of_vllm(packed, device):
    """A slot for each draft of a sequence. Each call reads the state after the last accepted draft, and writes one for each
    new draft. The outputs of accepted tokens are those of decoding one by one; so are the convolution's before them."""
    layer = Layer(device)
    sequences, drafts = 3, 3
    slots = torch.tensor([[5, 1, 8], [2, 7, 3], [6, 9, 4]], dtype=torch.int32, device=device)
    conv_slots = slots[:, 0].contiguous()
    state = layer.normal(10, HEADS, HEADDIM, DSTATE)
    conv_state = torch.zeros(10, CHANNELS, WIDTH - 2 + drafts, device=device, dtype=torch.float64)
    prompt = layer.normal(sequences, WIDTH - 1, CHANNELS)
    conv_state[conv_slots.long(), :, : WIDTH - 1] = prompt.transpose(1, 2)
    history = [[state[slot].clone(), prompt[row]] for row, slot in enumerate(slots[:, 0].tolist())]
    accepted = torch.ones(sequences, dtype=torch.int32, device=device)
    for call in range(5):
        lengths = [drafts] * sequences if not packed else [1 + (call + row) % drafts for row in range(sequences)]
        ends = [0, *torch.tensor(lengths).cumsum(0).tolist()]
        flat, conv_x = layer.tokens(ends[-1]), layer.normal(ends[-1], CHANNELS)
        options, shape = {"num_accepted_tokens": accepted}, (sequences, drafts)
        if packed:
            options["cu_seqlens"] = torch.tensor(ends, dtype=torch.int32, device=device)
        view = {name: value if packed else value.unflatten(0, shape) for name, value in flat.items()}
        y = selective_state_update(
            state, **view, **layer.expanded(), dt_softplus=True, state_batch_indices=slots, pad_slot_id=0, **options
        ).reshape(-1, HEADS, HEADDIM)
        conv = causal_conv1d_update(
            conv_x if packed else conv_x.unflatten(0, shape),
            conv_state,
            layer.conv_weight,
            layer.conv_bias,
            activation="silu",
            state_batch_indices=conv_slots,
            pad_slot_id=0,
            **options,
        ).reshape(-1, CHANNELS)
        for row in range(sequences):
            accepted[row] = count = 1 + (call * 2 + row) % lengths[row]
            for t in range(ends[row], ends[row] + count):
                expected, history[row][0] = layer.step(history[row][0], **at(flat, t))
                close(y[t], expected)
                history[row][1] = torch.cat([history[row][1], conv_x[t][None]])
                window = history[row][1][-WIDTH:]
                close(conv[t], F.silu((window * layer.conv_weight.T).sum(0) + layer.conv_bias))


def test_verification_of_flashinfer_and_sglang(device):
    """Drafts are verified without a write to the cache: the states after each draft go to a buffer of the batch, from which
    the caller takes the accepted one."""
    layer = Layer(device)
    rows, drafts = 3, 4
    state, cache = layer.normal(8, HEADS, HEADDIM, DSTATE), torch.tensor([6, 1, 3], device=device)
    conv_state = layer.normal(8, CHANNELS, WIDTH - 1)
    states = torch.zeros(rows + 2, drafts, HEADS, HEADDIM, DSTATE, device=device, dtype=torch.float64)
    windows = torch.zeros(rows + 2, drafts, CHANNELS, WIDTH - 1, device=device, dtype=torch.float64)
    entries = torch.tensor([4, 0, 2], dtype=torch.int32, device=device)
    for call in range(3):
        tokens, conv_x = layer.tokens(rows, drafts), layer.normal(rows, drafts, CHANNELS)
        before, conv_before = state.clone(), conv_state.clone()
        common = {"state_batch_indices": cache.int(), "intermediate_state_indices": entries, "disable_state_update": True}
        y = selective_state_update(
            state, **tokens, **layer.expanded(), dt_softplus=True, intermediate_states_buffer=states, **common
        )
        conv = causal_conv1d_update(
            conv_x, conv_state, layer.conv_weight, activation="silu", intermediate_conv_window=windows, **common
        )
        assert torch.equal(state, before) and torch.equal(conv_state, conv_before)
        for row, slot in enumerate(cache.tolist()):
            count = 1 + (call + row) % drafts
            h = before[slot]
            for t in range(count):
                expected, h = layer.step(h, **at(tokens, row, t))
                close(y[row, t], expected)
            state[slot] = states[entries[row], count - 1]
            close(state[slot], h)
            whole = torch.cat([conv_before[slot].T, conv_x[row]])
            exact = F.silu(torch.stack([(whole[t : t + WIDTH] * layer.conv_weight.T).sum(0) for t in range(drafts)]))
            close(conv[row], exact)
            conv_state[slot] = windows[entries[row], count - 1]
            assert torch.equal(conv_state[slot], whole[count : count + WIDTH - 1].T)


def test_several_tokens_of_flashinfer_write_each_state(device):
    """(batch, tokens, heads, headdim) with a table of slots to write to, and padding in it."""
    layer = Layer(device, torch.float32)
    state = layer.normal(12, HEADS, HEADDIM, DSTATE)
    before, tokens = state.clone(), layer.tokens(2, 3)
    read = torch.tensor([3, 5], device=device)
    write = torch.tensor([[1, 2, 4], [6, -1, 7]], device=device)
    out = torch.empty_like(tokens["x"])
    selective_state_update(
        state,
        **tokens,
        **layer.expanded(),
        dt_softplus=True,
        state_batch_indices=read,
        dst_state_batch_indices=write,
        pad_slot_id=-1,
        out=out,
    )
    for row, slot in enumerate(read.tolist()):
        h = before[slot]
        for t, target in enumerate(write[row].tolist()):
            expected, h = layer.step(h, **at(tokens, row, t))
            close(out[row, t], expected)
            if target >= 0:
                close(state[target], h)
    assert torch.equal(state[[3, 5]], before[[3, 5]])


def test_prompts_by_the_scan_and_tokens_by_steps(device):
    """The states of packed prompts go into slots, and decoding goes on as the scan of the whole sequences does."""
    layer, dim = Layer(device), 12
    A, D = -layer.uniform(dim, DSTATE), layer.normal(dim)
    weight = layer.normal(dim, WIDTH)
    lengths, steps, slots = (9, 5), 6, torch.tensor([4, 1, -1], device=device)
    sizes = {"x": dim, "d": dim, "B": DSTATE, "C": DSTATE}
    sequences = [{name: layer.normal(length + steps, size) for name, size in sizes.items()} for length in lengths]
    state = torch.zeros(6, dim, DSTATE, device=device, dtype=torch.float64)
    conv_state = torch.zeros(6, dim, WIDTH - 1, device=device, dtype=torch.float64)
    expected = []
    for slot, length, sequence in zip(slots.tolist(), lengths, sequences, strict=False):
        u = causal_conv1d(sequence["x"][None], weight, activation="silu")
        arguments = [value.T[None] for value in (u[0], sequence["d"])], [sequence[name].T[None] for name in "BC"]
        expected.append(selective_scan(*arguments[0], A, *arguments[1], D, delta_softplus=True)[0].T)
        x = sequence["x"][None, :length]
        prompt, final_state = causal_conv1d(x, weight, activation="silu", return_final_state=True)
        conv_state[slot] = final_state[0]
        first, second = ([value[..., :length] for value in part] for part in arguments)
        close(first[0], prompt.transpose(1, 2))
        _, last = selective_scan(*first, A, *second, D, delta_softplus=True, return_last_state=True)
        state[slot] = last[0]
    out = torch.empty(3, dim, device=device, dtype=torch.float64)
    for t in range(steps):
        starts = list(zip(sequences, lengths, strict=True))
        rows = {name: torch.stack([sequence[name][length + t] for sequence, length in starts]) for name in sizes}
        x, d, B, C = (torch.cat([rows[name], torch.full_like(rows[name][:1], torch.nan)]) for name in sizes)
        u = causal_conv1d_update(x, conv_state, weight, activation="silu", state_batch_indices=slots, out=torch.empty_like(x))
        selective_state_update(state, u, d, A, B, C, D, dt_softplus=True, state_batch_indices=slots, out=out)
        for row, length in enumerate(lengths):
            close(out[row], expected[row][length + t])
        assert out[2].count_nonzero() == 0
