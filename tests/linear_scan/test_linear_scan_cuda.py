"""linear_scan and its family on CUDA beside the CPU's kernels: tiles of time, sizes beyond 32 bits, CUDA graphs.

Tests for every device are beside the tests for the CPU; this file has tests that only a GPU's kernels can fail.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import (
    arrange,
    assert_as_accurate,
    assert_equal,
    captured,
    debug_option,
    dtypes,
    move,
    move_all,
    no_synchronization,
)
from operator_spec import as_float64, with_gradients
from recurrence_helpers import (
    LINEAR,
    LIQUID,
    MINGRU,
    MINLSTM,
    PACKED,
    RESETS,
    RGLRU,
    Variant,
    assert_all_close,
    evaluate,
    every_recurrence,
    every_variant,
    first_input,
    make_cotangents,
    make_inputs,
    step_inputs,
)
from torch import Tensor

pytestmark = pytest.mark.cuda

both_layouts = pytest.mark.parametrize("layout", ["contiguous", "transposed"])
both_directions = pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])

# Few channels and many steps: time is cut into tiles that hand their states on. Channels enough to fill a GPU by themselves,
# and more steps than a tile of 16-bit inputs has.
LONG = {"batch": 1, "channels": 5, "seqlen": 8300}
MANY_CHANNELS = {"batch": 8, "channels": 4160, "seqlen": 300}
# More than a block of the kernels has, so that the two blocks at either end of a row are compared.
COMPARED_CHANNELS = 96


def compared_channels(inputs: dict[str, Any]) -> Callable[[Any], Any]:
    """Selects the channels to compare, in any tensor of a call: the CPU takes seconds for thousands of them.

    It leaves tensors as they are where there are few channels, or where an input that all channels share depends on all.
    """
    channels = first_input(inputs).shape[-1]
    tensors = [x for x in inputs.values() if isinstance(x, Tensor) and x.is_floating_point()]
    if channels <= 2 * COMPARED_CHANNELS or any(x.shape[-1] != channels for x in tensors):
        return lambda value: value

    def select(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        return torch.cat([value[..., :COMPARED_CHANNELS], value[..., -COMPARED_CHANNELS:]], dim=-1)

    return select


def assert_as_accurate_as_cpu(variant: Variant, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """Compares float64 to 1e-10, and other dtypes by the low-precision rule with the CPU's kernel in place of PyTorch."""
    cotangents, select = make_cotangents(inputs), compared_channels(inputs)
    actual = evaluate(variant, move_all(inputs, "cuda"), tuple(move(x, "cuda") for x in cotangents))
    on_cpu = {name: select(value).cpu() for name, value in actual.items()}
    inputs = {name: select(value) for name, value in inputs.items()}
    cotangents = tuple(select(x) for x in cotangents)
    exact = evaluate(variant, as_float64(inputs), tuple(x.double() for x in cotangents))
    if first_input(inputs).dtype == torch.float64:
        assert_all_close(on_cpu, exact, 1e-10)
        return actual
    expected = evaluate(variant, inputs, cotangents)
    for name, value in on_cpu.items():
        assert_as_accurate(value, expected[name], exact[name], name)
    return actual


def random_offsets(sequences: int, seqlen: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(0)
    inner = torch.randint(0, seqlen + 1, (sequences - 1,), generator=generator).sort().values.tolist()
    return 0, *inner, seqlen


# ----- tiles


@both_layouts
@both_directions
@dtypes()
def test_tiles_and_their_tails(dtype, reverse, layout):
    lengths = (1, 7, 8, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 513, 1000, 1023, 1024, 1025, 2049)
    for variant, channels in itertools.product((LINEAR, MINLSTM), (1, 5, 32, 33, 70, 72)):
        for seqlen in lengths:
            sizes = {"channels": channels, "seqlen": seqlen, "reverse": reverse}
            assert_as_accurate_as_cpu(variant, make_inputs(variant, dtype=dtype, layout=layout, seed=seqlen, **sizes))


@dtypes()
@every_variant
def test_every_recurrence_over_many_tiles(variant, dtype):
    for reverse, sizes in itertools.product((False, True), (LONG, MANY_CHANNELS, {"channels": 33, "seqlen": 700})):
        if sizes is MANY_CHANNELS and reverse:
            continue
        assert_as_accurate_as_cpu(variant, make_inputs(variant, dtype=dtype, reverse=reverse, **sizes))


@both_layouts
@dtypes(torch.float64, torch.float32, torch.bfloat16)
@pytest.mark.parametrize(
    "sizes",
    [
        (1, 65536, 32),
        (1, 65537, 1),
        (1, 65537, 3),
        (1, 300_001, 2),
        (3, 9000, 20),
        (2, 1500, 130),
        (16, 4096, 64),
        (4, 300, 6000),
    ],
    ids=str,
)
def test_shapes(sizes, dtype, layout):
    batch, seqlen, channels = sizes
    for variant in (LINEAR, MINGRU):
        inputs = make_inputs(variant, batch=batch, seqlen=seqlen, channels=channels, dtype=dtype, layout=layout)
        assert_as_accurate_as_cpu(variant, inputs)


@both_layouts
@both_directions
@pytest.mark.parametrize("channels", [1, 3, 70, 260])
@pytest.mark.parametrize("offsets", [(1, 3000), (2, 3000), (40, 9000), (3000, 3000), (200, 70)], ids=str)
def test_packed_sequences_over_many_tiles(offsets, channels, reverse, layout):
    """Few and long, many and short, and more sequences than steps."""
    for variant, dtype in itertools.product((LINEAR, RGLRU), (torch.float64, torch.float32, torch.bfloat16)):
        options = {"channels": channels, "reverse": reverse, "dtype": dtype, "layout": layout}
        assert_as_accurate_as_cpu(variant, make_inputs(variant, cu_seqlens=random_offsets(*offsets), **options))


@pytest.mark.parametrize("options", RESETS.values(), ids=list(RESETS))
@pytest.mark.parametrize("sizes", [(1, 30_000, 3), (2, 5000, 70), (16, 1500, 1024)], ids=str)
@dtypes()
def test_resets_over_many_tiles(sizes, dtype, options):
    """The gradient of h0 has parts of several tiles."""
    batch, seqlen, channels = sizes
    for variant in (LINEAR, MINLSTM):
        inputs = make_inputs(variant, batch=batch, seqlen=seqlen, channels=channels, dtype=dtype, **options)
        assert_as_accurate_as_cpu(variant, inputs)


@both_directions
def test_packed_sequences_that_end_at_the_edges_of_tiles(reverse):
    for size in (8, 16, 32, 64, 128, 256, 512, 1024, 2048):
        offsets = (0, size - 1, size, size, 2 * size, 2 * size + 1, 4 * size)
        for dtype in (torch.float64, torch.float32):
            inputs = make_inputs(MINGRU, channels=9, cu_seqlens=offsets, reverse=reverse, dtype=dtype)
            assert_as_accurate_as_cpu(MINGRU, inputs)


@pytest.mark.parametrize("layout", ["offset", "sliced", "permuted"])
@pytest.mark.parametrize("base", ["contiguous", "transposed"])
@every_recurrence
def test_one_argument_in_another_layout(variant, base, layout):
    """The kernels read the other arguments in whole vectors."""
    for dtype, sizes in itertools.product((torch.bfloat16, torch.float32), ({"channels": 64, "seqlen": 256}, LONG)):
        for name in (*variant.recurrence.inputs, "h0"):
            inputs = make_inputs(variant, dtype=dtype, layout=base, **sizes)
            inputs[name] = arrange(inputs[name], layout)
            assert_as_accurate_as_cpu(variant, inputs)


def test_strong_decay_and_zero_transitions_over_many_tiles():
    """The product of a tile's transitions underflows, or is zero."""
    for dtype in (torch.float64, torch.float32):
        inputs = make_inputs(LINEAR, dtype=dtype, **LONG)
        for a in (1e-3 * inputs["a"], torch.where(inputs["a"] > 0, inputs["a"], 0), torch.zeros_like(inputs["a"])):
            results = assert_as_accurate_as_cpu(LINEAR, inputs | {"a": a})
            assert all(value.isfinite().all() for value in results.values())


@both_directions
@pytest.mark.parametrize(
    ("growth", "dtype"), [(None, torch.float32), (5, torch.float32), (3, torch.bfloat16)], ids=["slow", "fast", "bfloat16"]
)
@pytest.mark.parametrize("sizes", [LONG, MANY_CHANNELS], ids=["few_channels", "many_channels"])
def test_growth_with_nothing_to_grow(sizes, growth, dtype, reverse):
    """The product of the transitions of tiles, or of a single one, overflows, but until near the end the state is zero."""
    inputs = make_inputs(LINEAR, h0=False, reverse=reverse, dtype=dtype, **sizes)
    inputs["a"] = 1 + 0.2 * inputs["a"].abs() if growth is None else torch.full_like(inputs["a"], growth)
    grown = 100 if growth is None else 5
    inputs["b"][:, slice(grown, None) if reverse else slice(None, -grown)] = 0
    actual = evaluate(LINEAR, move_all(inputs, "cuda"))
    for name, exact in evaluate(LINEAR, as_float64(inputs)).items():
        error, scale = (x.abs().max().item() for x in (actual[name].cpu().double() - exact, exact))
        assert error <= (1e-5 if dtype == torch.float32 else 2**-8) * scale, name


@dtypes(torch.float32, torch.bfloat16)
def test_error_does_not_grow_along_the_sequence(dtype):
    for variant, memory in itertools.product((LINEAR, LIQUID), (1, 8)):
        inputs = make_inputs(variant, batch=1, channels=32, seqlen=65536, dtype=dtype)
        if variant is LINEAR:
            inputs["a"] = 1 - inputs["a"].abs() / memory
        else:
            inputs["tau"] = inputs["tau"] * memory
        cotangents = make_cotangents(inputs)
        actual = evaluate(variant, move_all(inputs, "cuda"), tuple(move(x, "cuda") for x in cotangents))
        exact = evaluate(variant, as_float64(inputs), tuple(x.double() for x in cotangents))
        for name in ("h", "grad_b" if variant is LINEAR else "grad_candidate"):
            error = actual[name].cpu().double() - exact[name]
            first, last = (part.square().mean().sqrt() for part in (error[:, :4096], error[:, -4096:]))
            assert max(first, last) <= 1.5 * min(first, last), f"{name}: {first:.3g} at the start, {last:.3g} at the end"


@both_layouts
@both_directions
@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
def test_nan_at_the_edges_of_tiles(packed, reverse, layout):
    """Elements that a NaN cannot reach keep their bits: earlier steps, other channels, other sequences."""
    cu_seqlens = (0, 1000, 1024, 2048, 2049, 6000, 8300) if packed else None
    inputs = move_all(
        make_inputs(
            MINGRU,
            channels=70,
            seqlen=8300,
            batch=1,
            cu_seqlens=cu_seqlens,
            reverse=reverse,
            dtype=torch.float32,
            layout=layout,
        ),
        "cuda",
    )
    cotangents = make_cotangents(inputs)
    clean = evaluate(MINGRU, inputs, cotangents)
    bounds = list(itertools.pairwise(cu_seqlens or (0, 8300)))
    for step in (0, 7, 31, 32, 255, 256, 1023, 1024, 2047, 2048, 4095, 4096, 6144, 8299):
        begin, end = next((b, e) for b, e in bounds if b <= step < e)
        touched = inputs | {"candidate": inputs["candidate"].clone()}
        touched["candidate"][0, step, 33] = float("nan")
        after = slice(begin, step + 1) if reverse else slice(step, end)
        actual = evaluate(MINGRU, touched, cotangents)
        reached = torch.zeros_like(clean["h"], dtype=torch.bool)
        reached[0, after, 33] = True
        assert torch.equal(actual["h"].isnan(), reached)
        assert torch.equal(actual["h"][~reached], clean["h"][~reached])
        for name in ("grad_gate", "grad_candidate"):
            others = torch.ones_like(clean[name], dtype=torch.bool)
            others[0, begin:end, 33] = False
            assert torch.equal(actual[name][others], clean[name][others]), name


@both_directions
@dtypes(torch.float64, torch.float32, torch.bfloat16)
def test_groups_of_tiles_and_their_edges(dtype, reverse):
    """A state crosses a group of 32 tiles at once. Sequences end before, at and after the edges of tiles and groups."""
    for size, offset in itertools.product((512, 1024, 2048, 4096, 8192), (-1, 0, 1)):
        for variant, channels in ((LINEAR, 8), (MINGRU, 72)):
            sizes = {"batch": 1, "channels": channels, "seqlen": size + offset, "h0": offset != 0, "reverse": reverse}
            assert_as_accurate_as_cpu(variant, make_inputs(variant, dtype=dtype, seed=size, **sizes))


@both_directions
@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
def test_transitions_of_zero_over_many_tiles(packed, reverse):
    """The carry reserves the bits of one zero for words that are not published yet."""
    cu_seqlens = (0, 100, 4096, 8300) if packed else None
    inputs = make_inputs(LINEAR, batch=1, channels=8, seqlen=8300, cu_seqlens=cu_seqlens, reverse=reverse, dtype=torch.float32)
    for a, b in ((0.0, 0.0), (-0.0, 0.0), (0.0, 1.0)):
        constant = inputs | {"a": torch.full_like(inputs["a"], a), "b": torch.full_like(inputs["b"], b)}
        h = evaluate(LINEAR, move_all(constant, "cuda"))["h"]
        assert torch.equal(h, torch.full_like(h, b))


@dtypes(torch.float32, torch.bfloat16)
@pytest.mark.parametrize("channels", [5, 64], ids=["any_rows", "vector_rows"])
def test_a_row_has_the_same_bits_in_every_batch_of_tiles(channels, dtype):
    """The number of chains decides how many tiles are in progress and whether they publish maps, but not the results."""
    with debug_option("linear_scan_kernel", "tiles"):
        for variant in (LINEAR, MINLSTM):
            inputs = make_inputs(variant, batch=300, seqlen=700, channels=channels, dtype=dtype, device="cuda")
            cotangents = make_cotangents(inputs)
            of_all = evaluate(variant, inputs, cotangents)
            for rows in (slice(0, 1), slice(7, 9), slice(100, 190), slice(0, 300)):
                part = {name: x[rows] if isinstance(x, Tensor) else x for name, x in inputs.items()}
                found = evaluate(variant, part, tuple(x[rows] for x in cotangents))
                assert_equal(found, {name: x[rows] for name, x in of_all.items()})


# ----- sequential kernels, which calls with many chains take


@pytest.fixture
def sequential():
    """The sequential kernels for all calls that they support: vector rows, not packed, types of at most 32 bits."""
    with debug_option("linear_scan_kernel", "sequential"):
        yield


small_dtypes = dtypes(torch.float32, torch.float16, torch.bfloat16)


@both_directions
@small_dtypes
@every_variant
def test_every_recurrence_in_the_sequential_kernels(variant, dtype, reverse, sequential):
    for seqlen, channels in ((300, 72), (17, 128)):
        inputs = make_inputs(variant, dtype=dtype, reverse=reverse, seqlen=seqlen, channels=channels)
        assert_as_accurate_as_cpu(variant, inputs)


@both_directions
@small_dtypes
def test_segments_and_their_tails(dtype, reverse, sequential):
    for variant, seqlen in itertools.product(
        (LINEAR, MINLSTM, RGLRU), (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 63, 64, 65, 257, 1000)
    ):
        for channels, h0 in ((8, True), (64, False), (200, True)):
            sizes = {"seqlen": seqlen, "channels": channels, "h0": h0, "reverse": reverse}
            assert_as_accurate_as_cpu(variant, make_inputs(variant, dtype=dtype, seed=seqlen, **sizes))


@both_directions
@small_dtypes
def test_both_kinds_of_kernels_agree_where_every_product_is_exact(dtype, reverse):
    """Transitions and inputs of -1, 0 and 1: all states are small integers, whatever the order of the operations."""
    generator = torch.Generator().manual_seed(0)
    for batch, seqlen, channels in ((1, 250, 64), (3, 100, 72), (40, 120, 256), (300, 33, 8)):
        inputs = make_inputs(LINEAR, batch=batch, seqlen=seqlen, channels=channels, dtype=dtype, reverse=reverse, device="cuda")
        cotangents = make_cotangents(inputs)

        def integers(like: Tensor) -> Tensor:
            return torch.randint(-1, 2, like.shape, generator=generator).to(like)

        inputs |= {name: integers(inputs[name]) for name in ("a", "b", "h0")}
        cotangents = tuple(integers(x) for x in cotangents)
        results = {}
        for kernel in ("tiles", "sequential"):
            with debug_option("linear_scan_kernel", kernel):
                results[kernel] = evaluate(LINEAR, inputs, cotangents)
        assert_equal(results["sequential"], results["tiles"])


@small_dtypes
def test_a_row_has_the_same_bits_in_every_batch(dtype, sequential):
    """The number of warps of a block depends on the number of blocks; results do not."""
    for variant in (LINEAR, MINLSTM):
        inputs = make_inputs(variant, batch=600, seqlen=90, channels=128, dtype=dtype, device="cuda")
        cotangents = make_cotangents(inputs)
        of_all = evaluate(variant, inputs, cotangents)
        for rows in (slice(0, 1), slice(7, 9), slice(100, 350)):
            part = {name: x[rows] if isinstance(x, Tensor) else x for name, x in inputs.items()}
            found = evaluate(variant, part, tuple(x[rows] for x in cotangents))
            assert_equal(found, {name: x[rows] for name, x in of_all.items()})


@small_dtypes
def test_many_chains_take_the_sequential_kernels(dtype):
    """Bit for bit what the option chooses; the tile kernels round otherwise."""
    inputs = make_inputs(LINEAR, batch=40, seqlen=1000, channels=512, dtype=dtype, device="cuda")
    cotangents = make_cotangents(inputs)
    found = evaluate(LINEAR, inputs, cotangents)
    with debug_option("linear_scan_kernel", "sequential"):
        assert_equal(evaluate(LINEAR, inputs, cotangents), found)
    with debug_option("linear_scan_kernel", "tiles"):
        others = evaluate(LINEAR, inputs, cotangents)
    assert any(not torch.equal(others[name], found[name]) for name in found)


@small_dtypes
def test_gradients_of_one_result_or_to_one_input(dtype, sequential):
    """An absent grad_h counts as zero, and gradients that are not needed are not written."""
    inputs = make_inputs(MINGRU, seqlen=100, channels=72, dtype=dtype)
    for name in ("gate", "candidate", "h0"):
        found = []
        for device in ("cpu", "cuda"):
            leaves = move_all(inputs, device)
            leaves[name].requires_grad_()
            MINGRU.scan(**leaves, return_last_state=True)[1].sum().backward()
            found.append(leaves[name].grad.cpu().double())
            leaves[name].requires_grad_(False)
            leaves[name].grad = None
        on_cpu, on_cuda = found
        assert (on_cuda - on_cpu).abs().max() <= (1e-5 if dtype == torch.float32 else 2**-7) * on_cpu.abs().max()


# ----- sizes


@both_layouts
@pytest.mark.parametrize("sizes", [(70_000, 9, 3), (1, 9, 140_000), (1, 70_000, 1)], ids=str)
def test_more_channels_rows_and_steps_than_a_grid_axis_holds(sizes, layout):
    batch, seqlen, channels = sizes
    inputs = make_inputs(LINEAR, batch=batch, seqlen=seqlen, channels=channels, dtype=torch.float32, layout=layout)
    assert_as_accurate_as_cpu(LINEAR, inputs)


@both_layouts
@both_directions
def test_more_elements_than_32_bits_count(reverse, layout, needs_gpu_memory):
    """Compares the first channels and the last ones, whose later steps are beyond element 2^31."""
    needs_gpu_memory("cuda", 60)
    seqlen, channels = 2**16, 2**15 + 64
    generator = torch.Generator("cuda").manual_seed(0)

    def sequence() -> Tensor:
        shape = (1, seqlen, channels) if layout == "contiguous" else (1, channels, seqlen)
        tensor = torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(generator=generator)
        return tensor if layout == "contiguous" else tensor.transpose(1, 2)

    a, b, grad_h = sequence().tanh_().requires_grad_(), sequence().requires_grad_(), sequence()
    h0, grad_last_state = (torch.randn(1, channels, generator=generator, device="cuda") for _ in range(2))
    h0.requires_grad_()
    assert a.numel() > 2**31
    h, last_state = LINEAR.scan(a, b, h0, reverse=reverse, return_last_state=True)
    torch.autograd.backward((h, last_state), (grad_h, grad_last_state))
    results = {"h": h, "last_state": last_state, "grad_a": a.grad, "grad_b": b.grad, "grad_h0": h0.grad}

    def chosen(tensor: Tensor) -> Tensor:
        return torch.cat([tensor.detach()[..., :32], tensor.detach()[..., -32:]], dim=-1).cpu()

    inputs = {"a": chosen(a), "b": chosen(b), "h0": chosen(h0), "reverse": reverse, "cu_seqlens": None}
    cotangents = chosen(grad_h), chosen(grad_last_state)
    expected = evaluate(LINEAR, inputs, cotangents)
    exact = evaluate(LINEAR, as_float64(inputs), tuple(x.double() for x in cotangents))
    for name, value in results.items():
        assert_as_accurate(chosen(value), expected[name], exact[name], name)


def test_offsets_beyond_32_bits(needs_gpu_memory):
    """Two batch rows, two steps, or two channels are 2^31 elements apart."""
    needs_gpu_memory("cuda", 10)
    for axis, shape in enumerate([(2, 8, 3), (8, 2, 3), (3, 8, 2)]):
        batch, seqlen, channels = shape
        inputs = make_inputs(LINEAR, batch=batch, seqlen=seqlen, channels=channels, dtype=torch.bfloat16, device="cuda")
        expected = evaluate(LINEAR, inputs, make_cotangents(inputs))
        strides = [1, 1, 1]
        strides[axis] = 2**31
        small = [i for i in range(3) if i != axis]
        strides[small[0]] = shape[small[1]]
        memory = torch.empty(2**31 + 64, dtype=torch.bfloat16, device="cuda")
        inputs["a"] = memory.as_strided(shape, strides).copy_(inputs["a"])
        assert_all_close(evaluate(LINEAR, inputs, make_cotangents(inputs)), expected, 2**-7)
        del memory, inputs


@dtypes(torch.float64, torch.float32, torch.bfloat16)
def test_no_uninitialized_memory_is_read(dtype, uninitialized_memory_is_nan):
    for sizes in (LONG, {"channels": 70, "seqlen": 150}, {"channels": 300, "seqlen": 65}, {"cu_seqlens": PACKED}):
        for variant, layout in itertools.product((LINEAR, RGLRU), ("contiguous", "transposed")):
            assert_as_accurate_as_cpu(variant, make_inputs(variant, dtype=dtype, layout=layout, **sizes))


# ----- beside other work


@every_recurrence
def test_nothing_waits_for_the_device(variant):
    inputs = move_all(make_inputs(variant, dtype=torch.float32, **LONG), "cuda")
    leaves, cotangents = with_gradients(inputs), make_cotangents(inputs)
    if variant is LIQUID:
        leaves["dt"] = 0.1
    of_step = step_inputs(variant, leaves)
    with no_synchronization():
        torch.autograd.backward(variant.scan(**leaves, return_last_state=True), cotangents)
        variant.step(**of_step, state=leaves["h0"])


# ----- CUDA graphs


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_graphs_of_few_chains_replayed_at_once(dtype):
    """Each replay clears the carry's words again: states of the replay before would be found otherwise."""
    graphs = []
    for seed in range(2):
        inputs = make_inputs(MINGRU, batch=1, channels=64, seqlen=8300, dtype=dtype, device="cuda", seed=seed)
        cotangents = make_cotangents(inputs)
        graph, found = captured(lambda inputs=inputs, cotangents=cotangents: evaluate(MINGRU, inputs, cotangents))
        graphs.append((graph, found, inputs, cotangents, torch.cuda.Stream()))
    for seed in range(2, 5):
        for _, _, inputs, _, _ in graphs:
            new = make_inputs(MINGRU, batch=1, channels=64, seqlen=8300, dtype=dtype, device="cuda", seed=seed)
            for name in ("gate", "candidate", "h0"):
                inputs[name].copy_(new[name])
        torch.cuda.synchronize()
        for graph, *_, stream in graphs:
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        for _, found, inputs, cotangents, _ in graphs:
            assert_equal(found, evaluate(MINGRU, inputs, cotangents))


@both_directions
def test_wrong_offsets_in_a_cuda_graph(reverse):
    """Graphs do not check offsets: wrong ones give wrong numbers, but the kernels read no memory beside the states."""
    around = torch.full((4, 33), float("nan"), device="cuda")
    inputs = move_all(make_inputs(LINEAR, channels=33, cu_seqlens=(0, 100, 400), reverse=reverse, dtype=torch.float32), "cuda")
    inputs["h0"] = around[1:3].copy_(inputs["h0"])
    expected = evaluate(LINEAR, inputs)
    graph, found = captured(lambda: evaluate(LINEAR, inputs))
    for offsets in ((7, 100, 400), (0, 500, 900), (-3, -2, -1), (400, 100, 0), (900, 900, 900)):
        inputs["cu_seqlens"].copy_(torch.tensor(offsets))
        graph.replay()
        assert found["h"].isfinite().all()
    inputs["cu_seqlens"].copy_(torch.tensor((0, 100, 400)))
    graph.replay()
    assert_equal(found, expected)


def test_cuda_graph_of_decoding_steps():
    """The state stays in one tensor from step to step."""
    inputs = move_all(make_inputs(MINGRU, channels=70, seqlen=6, dtype=torch.bfloat16), "cuda")
    h, last_state = MINGRU.scan(**inputs, return_last_state=True)
    gate, candidate, state = inputs["gate"][:, 0].clone(), inputs["candidate"][:, 0].clone(), inputs["h0"].clone()
    MINGRU.step(gate, candidate, state)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step_h, new_state = MINGRU.step(gate, candidate, state)
        state.copy_(new_state)
    state.copy_(inputs["h0"])
    for t in range(6):
        gate.copy_(inputs["gate"][:, t])
        candidate.copy_(inputs["candidate"][:, t])
        graph.replay()
        torch.testing.assert_close(step_h, h[:, t], rtol=2**-7, atol=2**-7)
    torch.testing.assert_close(state, last_state, rtol=1e-5, atol=1e-5)
