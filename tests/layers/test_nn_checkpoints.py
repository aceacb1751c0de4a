"""The discretization in checkpoints: those that name another one are refused, and mamba_ssm's load as they are."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn as nn
from helpers import says
from layer_helpers import MIXERS, WIDTH, make_sequence, new_layer
from torch import Tensor

OPERATOR = "selective_scan"

ENTRY = "discretization_name"
every_layer = pytest.mark.parametrize("name", [*MIXERS, "SelectiveSSM"])


class Model(nn.Module):
    """A model in which the layer has a prefix."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.mixer = layer


def run(layer: nn.Module) -> Tensor:
    return layer(make_sequence(2, 7, WIDTH, dtype=torch.float32, seed=3))


def saved_and_loaded(state_dict: dict[str, Tensor], folder) -> dict[str, Tensor]:
    torch.save(state_dict, folder / "checkpoint.pt")
    return torch.load(folder / "checkpoint.pt", weights_only=True)


@pytest.fixture(autouse=True)
def no_warnings():
    with warnings.catch_warnings():
        # As loading a checkpoint of another discretization warns; not what PyTorch deprecates in itself.
        warnings.simplefilter("error", UserWarning)
        # torch 2.15 warns that writes in place to a module's output skip its hooks.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
        yield


@every_layer
def test_zoh_has_the_entries_of_mamba_ssm(name):
    layer = new_layer(name)
    assert [*layer.state_dict()] == [key for key, _ in layer.named_parameters()] and not [*layer.buffers()]


@pytest.mark.parametrize("discretization", ["zoh", "foh", "zoh_exact", "rk4"])
@every_layer
def test_round_trip(name, discretization, tmp_path):
    layer, other = new_layer(name, discretization=discretization), new_layer(name, discretization=discretization)
    state_dict = saved_and_loaded(layer.state_dict(), tmp_path)
    assert other.load_state_dict(state_dict, strict=True) == ([], [])
    assert torch.equal(run(layer), run(other))
    # Plain dicts, as other formats than torch's save them.
    plain = {key: value.clone() for key, value in Model(layer).state_dict().items()}
    assert (f"mixer.{ENTRY}" in plain) == (discretization != "zoh")
    assert all(isinstance(value, Tensor) for value in plain.values())
    before = dict(plain)
    assert Model(new_layer(name, discretization=discretization)).load_state_dict(plain, strict=True) == ([], [])
    assert plain == before


@every_layer
def test_an_alias_is_the_same_discretization(name):
    for saved, own in (("foh", "zoh_exact"), ("zoh_exact", "foh")):
        state_dict = new_layer(name, discretization=saved).state_dict()
        assert bytes(state_dict[ENTRY].tolist()) == b"zoh_exact"
        assert new_layer(name, discretization=own).load_state_dict(state_dict) == ([], [])


@pytest.mark.parametrize("own", ["zoh_exact", "foh"])
@every_layer
def test_checkpoints_that_name_the_alias(name, own):
    """Layers saved such checkpoints while ``foh`` was the canonical name."""
    layer = new_layer(name, discretization=own)
    state_dict = layer.state_dict() | {ENTRY: torch.tensor([*b"foh"], dtype=torch.uint8)}
    assert layer.load_state_dict(state_dict, strict=True) == ([], [])
    assert bytes(layer.state_dict()[ENTRY].tolist()) == b"zoh_exact"
    message = f"{name}: expected a checkpoint of discretization 'zoh', got one of 'zoh_exact'"
    with pytest.raises(RuntimeError, match=says(message)):
        new_layer(name).load_state_dict(state_dict)


@pytest.mark.parametrize(("saved", "own"), [("zoh_exact", "zoh"), ("zoh_exact", "rk4"), ("highorder", "zoh_exact")])
@every_layer
def test_another_discretization(name, saved, own, tmp_path):
    state_dict = saved_and_loaded(Model(new_layer(name, discretization=saved)).state_dict(), tmp_path)
    model = Model(new_layer(name, discretization=own))
    message = f"{name} (mixer): expected a checkpoint of discretization '{own}', got one of '{saved}'"
    for strict in (True, False):
        with pytest.raises(RuntimeError, match=says(message, f"discretization='{saved}'", f"delete 'mixer.{ENTRY}'")):
            model.load_state_dict(state_dict, strict=strict)
    del state_dict[f"mixer.{ENTRY}"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert model.load_state_dict(state_dict, strict=True) == ([], [])
    assert len(caught) == (own != "zoh")
    assert model.mixer.discretization == own
    assert torch.equal(model.mixer.A_log, state_dict["mixer.A_log"])


@every_layer
def test_checkpoints_of_mamba_ssm(name):
    """Such checkpoints name no rule. They load as others do, with a warning if the layer's rule is not mamba_ssm's."""
    checkpoint = {key: torch.rand_like(value) for key, value in new_layer(name).state_dict().items()}
    assert new_layer(name).load_state_dict(checkpoint, strict=True) == ([], [])
    for strict in (True, False):
        layer = new_layer(name, discretization="foh")
        message = f"{name}: expected a checkpoint of discretization 'zoh_exact', got one that names none, as of mamba_ssm"
        with pytest.warns(UserWarning, match=says(message)):
            assert layer.load_state_dict(checkpoint, strict=strict) == ([], [])
        state_dict = layer.state_dict()
        assert bytes(state_dict.pop(ENTRY).tolist()) == b"zoh_exact"
        torch.testing.assert_close(dict(state_dict), checkpoint, rtol=0, atol=0)


def mean(*state_dicts: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: torch.stack([entries[key].float() for entries in state_dicts]).mean(0) for key in state_dicts[0]}


CHANGES: dict[str, Callable[[dict[str, Tensor]], dict[str, Tensor]]] = {
    "half": lambda saved: {key: value.half() for key, value in saved.items()},
    "bfloat16": lambda saved: {key: value.bfloat16() for key, value in saved.items()},
    "double": lambda saved: {key: value.double() for key, value in saved.items()},
    "mean of two": lambda saved: mean(saved, saved),
    "mean of three": lambda saved: mean(saved, saved, saved),
    # As an exponential moving average leaves them.
    "near the bytes": lambda saved: {key: value.float() * (1 + 1e-5) for key, value in saved.items()},
}


@pytest.mark.parametrize("discretization", ["zoh_exact", "highorder", "rk4"])
@pytest.mark.parametrize("change", CHANGES)
@every_layer
def test_checkpoints_that_were_cast_or_averaged(name, change, discretization):
    saved = CHANGES[change](new_layer(name, discretization=discretization).state_dict())
    layer = new_layer(name, discretization=discretization)
    assert layer.load_state_dict(saved) == ([], [])
    assert bytes(layer.state_dict()[ENTRY].tolist()) == discretization.encode()
    message = f"{name}: expected a checkpoint of discretization 'zoh', got one of '{discretization}'"
    with pytest.raises(RuntimeError, match=says(message)):
        new_layer(name).load_state_dict(saved)


@pytest.mark.parametrize(
    ("entry", "got"),
    [
        ("foh", "str"),
        (None, "NoneType"),
        (torch.tensor([[102, 111, 104]], dtype=torch.uint8), "a tensor of shape [1, 3] and dtype torch.uint8"),
        (torch.tensor(102), "a tensor of shape [] and dtype torch.int64"),
        (torch.tensor([*b"euler?"]), "with the values [101, 117, 108, 101, 114, 63]"),
        (torch.tensor([255, 254]), "with the values [255, 254]"),
        (torch.tensor([102.0, 300.0]), "with the values [102.0, 300.0]"),
        (torch.tensor([102.0, float("nan")]), "with the values [102.0, nan]"),
        (torch.tensor([102.0, float("inf")]), "with the values [102.0, inf]"),
        (torch.tensor([102j]), "dtype torch.complex64"),
        (torch.zeros(0), "a tensor of shape [0]"),
    ],
    ids=["string", "None", "2-D", "0-D", "unknown", "no UTF-8", "no byte", "nan", "inf", "complex", "empty"],
)
@pytest.mark.parametrize("own", ["zoh", "foh"])
@every_layer
def test_entries_that_name_no_discretization(name, own, entry, got):
    model = Model(new_layer(name, discretization=own))
    state_dict = {**model.state_dict(), f"mixer.{ENTRY}": entry}
    message = f"{name} (mixer): expected 'mixer.{ENTRY}' of the checkpoint to be the bytes of one of"
    for strict in (True, False):
        with pytest.raises(RuntimeError, match=says(message, got, f"delete 'mixer.{ENTRY}' from the checkpoint")):
            model.load_state_dict(state_dict, strict=strict)
    del state_dict[f"mixer.{ENTRY}"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert model.load_state_dict(state_dict) == ([], [])


@every_layer
def test_mamba_ssm_refuses_what_it_would_get_wrong(name):
    """Its modules have these parameters and no more."""
    theirs = nn.Module()
    for key in ("A_log", "D"):
        theirs.register_parameter(key, nn.Parameter(torch.empty_like(getattr(new_layer(name), key))))
    state_dict = {key: value for key, value in new_layer(name, discretization="foh").state_dict().items() if "." not in key}
    state_dict.pop("dt_bias", None)
    with pytest.raises(RuntimeError, match=says("Unexpected key(s)", ENTRY)):
        theirs.load_state_dict(state_dict, strict=True)


@every_layer
def test_missing_and_unexpected_entries_are_still_reported(name):
    state_dict = new_layer(name, discretization="foh").state_dict()
    del state_dict["A_log"]
    state_dict["more"] = torch.zeros(1)
    with pytest.raises(RuntimeError, match=r'(?s)Missing key\(s\).*"A_log".*Unexpected key\(s\).*"more"'):
        new_layer(name, discretization="foh").load_state_dict(state_dict)


@every_layer
def test_copies_casts_and_empty_layers(name):
    layer = new_layer(name, discretization="foh")
    for other in (copy.deepcopy(layer), copy.deepcopy(layer).to(torch.bfloat16), copy.deepcopy(layer).double()):
        assert torch.equal(other.state_dict()[ENTRY], layer.state_dict()[ENTRY])
    # Made without memory, then given any, then the checkpoint's.
    for assign in (True, False):
        other = new_layer(name, discretization="foh", device="meta")
        assert other.state_dict()[ENTRY].is_meta
        if not assign:
            other.to_empty(device="cpu")
            assert torch.equal(other.state_dict()[ENTRY], layer.state_dict()[ENTRY])
        other.load_state_dict(layer.state_dict(), assign=assign)
        assert not any(tensor.is_meta for tensor in other.state_dict().values())
        assert torch.equal(other.state_dict()[ENTRY], layer.state_dict()[ENTRY])
        assert torch.equal(run(other), run(layer))


@every_layer
def test_compiled(name, fresh_dynamo):
    layer = new_layer(name, discretization="foh")
    compiled = torch.compile(copy.deepcopy(layer), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(run(compiled), run(layer))
    state_dict = compiled.state_dict()
    compiled.load_state_dict(state_dict)
    assert f"_orig_mod.{ENTRY}" in state_dict


@pytest.mark.slow
@every_layer
def test_distributed(name, tmp_path):
    """DistributedDataParallel, fully_shard, and the checkpoints of torch.distributed, which have the layer's own entries."""
    dist = torch.distributed
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("needs torch.distributed with gloo")
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        for discretization in ("zoh", "foh"):
            layer = new_layer(name, discretization=discretization)
            wrapped = nn.parallel.DistributedDataParallel(copy.deepcopy(layer))
            torch.testing.assert_close(run(wrapped), run(layer))
            state_dict = get_model_state_dict(wrapped)
            assert state_dict.keys() == layer.state_dict().keys()
            other = nn.parallel.DistributedDataParallel(new_layer(name, discretization=discretization))
            set_model_state_dict(other, state_dict)
            assert torch.equal(run(other), run(layer))
            mesh = dist.init_device_mesh("cpu", (1,))
            sharded = fully_shard(copy.deepcopy(layer), mesh=mesh)
            torch.testing.assert_close(run(sharded), run(layer))
            full = get_model_state_dict(sharded, options=StateDictOptions(full_state_dict=True))
            torch.testing.assert_close(full, dict(layer.state_dict()), rtol=0, atol=0)
            other = fully_shard(new_layer(name, discretization=discretization), mesh=mesh)
            set_model_state_dict(other, get_model_state_dict(sharded))
            torch.testing.assert_close(run(other), run(layer))
    finally:
        dist.destroy_process_group()
