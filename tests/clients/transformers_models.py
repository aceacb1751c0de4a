"""Small random models of transformers for the tests: their configurations, and what each must call."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import transformers
from fla_package import blocked_fla
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated

VOCABULARY = 64
PACKS_IN_MAMBA_LAYERS = "packed sequences without attention layers"
DELTA_RULE, DELTA_STEP = "_delta_rule_scan_fwd", "delta_rule_step"
CONV, CONV_STEP = "_causal_conv1d_fwd", "causal_conv1d_update"
STEP = "selective_state_update"

# Where FLA is installed, the models with delta rules have its Triton kernels for their own path, which need a GPU.
DELTA_MODULES = [
    f"transformers.models.{name}.modeling_{name}"
    for name in (
        *("qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen4_exp", "olmo_hybrid", "lara_mini"),
        *("kimi_linear", "bailing_hybrid", "glm5_next"),
    )
    if importlib.util.find_spec(f"transformers.models.{name}")
]
with blocked_fla():
    for _module in DELTA_MODULES:
        importlib.import_module(_module)

# transformers' warnings about slow paths are what some tests run on purpose.
transformers.utils.logging.set_verbosity_error()


@dataclass(frozen=True)
class Model:
    """A configuration, how many mixers it has, and the kernels that each calls.

    Attributes:
        scan: the operator of the mixer's scan; None for a model that has the convolution only.
        step: the operator of a decoding step.
        scans: calls of the scan, and of the decoding step, in a mixer's forward.
        config, head: the names of the classes, if they are not the name followed by "Config" and "ForCausalLM".
        packs: options for a test of packed sequences; None where transformers does not pass ``seq_idx`` to the scan.
        packs_as: the behaviour that this test shows.
    """

    name: str
    scan: str | None
    mixers: int = 2
    scans: int = 1
    packs: dict[str, Any] | None = None
    packs_as: str = "packed sequences with position_ids"
    step: str = STEP
    config: str | None = None
    head: str | None = None
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def module(self) -> str:
        return FILES.get(self.name, self.name.lower())

    def make(
        self,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        *,
        max_A_log: float = -1.0,
        **options: Any,
    ) -> Any:
        """A model in evaluation mode; the same weights at every call."""
        common = {"vocab_size": VOCABULARY, "hidden_size": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        config = getattr(transformers, self.config or f"{self.name}Config")(**common | self.options | options)
        torch.manual_seed(0)
        model = getattr(transformers, self.head or f"{self.name}ForCausalLM")(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                # Initial biases and D are constants, and weights of 0.02 hide errors of the scan.
                if not name.endswith(("A_log", "dt_bias", "dt_proj.bias", "dt_proj_bias")):
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
                elif name.endswith("A_log") and self.step == DELTA_STEP:
                    # The models' own gradients of strong gates are differences of large sums.
                    parameter.clamp_(max=max_A_log)
        if model.can_generate():
            model.generation_config.eos_token_id = None
        return model.to(device, dtype).eval()

    def calls(self, forwards: int, steps: int = 0) -> Counter[str]:
        """The kernel calls of so many forwards over sequences and cached decoding steps."""
        found = Counter({CONV: forwards * self.mixers, CONV_STEP: steps * self.mixers})
        if self.scan is not None:
            found += Counter({self.scan: forwards * self.mixers * self.scans, self.step: steps * self.mixers * self.scans})
        return +found

    def training_calls(self) -> Counter[str]:
        """The calls of a forward and its backward."""
        forward = self.calls(1)
        return forward + Counter({name.replace("_fwd", "_bwd"): count for name, count in forward.items()})


FILES = {
    "FalconMamba": "falcon_mamba",
    "NemotronH": "nemotron_h",
    "FalconH1": "falcon_h1",
}
ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
HEADS = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16, "mamba_n_groups": 2, "mamba_chunk_size": 16}
SCAN, SSD = "_selective_scan_fwd", "_ssd_chunk_scan_fwd"
MAMBA = {"num_hidden_layers": 2, "state_size": 8, "time_step_rank": 4}

# Releases of transformers whose gated norm knows no groups take one mean over all of them, unlike mamba_ssm and this library.
MAMBA2_GROUPS = 2 if "group_size" in inspect.signature(MambaRMSNormGated).parameters else 1

HYBRID = {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
GATED = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 6}
KIMI = {"linear_head_dim": 8, "linear_num_heads": 2}
# Batched products: the default, grouped products, does not compile in float32 with every release of PyTorch.
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "experts_implementation": "batched_mm"}
SHARED = EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 16}
# Values lie behind qk_nope_head_dim keys in one tensor: attention kernels read them misaligned if those are not 16 bytes.
LATENT = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
LATENT |= {"num_key_value_heads": 4}


def delta(name: str, *options: dict[str, Any], config: str | None = None, head: str | None = None) -> Model:
    """A hybrid model of two mixers with a delta rule and one attention layer."""
    merged: dict[str, Any] = {}
    for each in (ATTENTION, HYBRID, *options):
        merged |= each
    return Model(name, DELTA_RULE, step=DELTA_STEP, options=merged, config=config, head=head)


DELTA_MODELS = {
    model.name: model
    for model in (
        delta("Qwen3Next", {"head_dim": 8}, GATED, SHARED),
        delta("Qwen3_5", {"head_dim": 8}, GATED, config="Qwen3_5TextConfig"),
        delta("Qwen3_5Moe", {"head_dim": 8}, GATED, SHARED, config="Qwen3_5MoeTextConfig"),
        delta("OlmoHybrid", GATED),
        delta("LaraMini", {"head_dim": 8}, GATED, SHARED),
        delta("KimiLinear", LATENT, KIMI, EXPERTS, {"q_lora_rank": None, "num_local_experts": 4}),
        delta(
            "BailingHybrid",
            {"head_dim": 8, "num_local_experts": 4, "n_group": 1, "topk_group": 1, "num_mtp_layers": 0},
            LATENT,
            EXPERTS,
        ),
        delta(
            "Qwen4Exp",
            {"head_dim": 8, "hc_count": 2, "hc_lowrank": 4},
            {
                "indexer_n_heads": 2,
                "indexer_kv_heads": 1,
                "indexer_head_dim": 8,
                "indexer_budget": 16,
                "indexer_compress_ratio": 4,
            },
            {"ngram_vocab_size_base": 50, "split_ngram_parts": 2, "make_ngram_vocab_size_divisible_by": 2},
            GATED,
            SHARED,
            config="Qwen4ExpTextConfig",
        ),
        delta(
            "Glm5Next",
            LATENT,
            KIMI,
            EXPERTS,
            {"n_routed_experts": 4, "qk_rope_head_dim": 0},
            config="Glm5NextTextConfig",
            head="Glm5NextTextModel",
        ),
    )
    if hasattr(transformers, model.config or f"{model.name}Config")
}
MODELS = DELTA_MODELS | {
    model.name: model
    for model in (
        Model("Mamba", SCAN, options=MAMBA),
        Model("FalconMamba", SCAN, options=MAMBA),
        Model(
            "Jamba",
            SCAN,
            options=ATTENTION
            | {"num_hidden_layers": 3, "attn_layer_period": 3, "attn_layer_offset": 1, "num_experts": 2, "mamba_d_state": 8}
            | {"expert_layer_period": 2, "mamba_dt_rank": 4},
        ),
        Model(
            "Zamba",
            SCAN,
            mixers=3,
            scans=2,
            options=ATTENTION
            | {"num_hidden_layers": 3, "layers_block_type": ["mamba", "hybrid", "hybrid"], "num_key_value_heads": 4}
            | {"n_mamba_heads": 2, "mamba_d_state": 8, "mamba_dt_rank": 4},
        ),
        Model(
            "Mamba2",
            SSD,
            packs={},
            options={"num_hidden_layers": 2, "num_heads": 8, "head_dim": 8, "state_size": 16}
            | {"n_groups": MAMBA2_GROUPS, "chunk_size": 16},
        ),
        Model("Bamba", SSD, packs={}, options=ATTENTION | HEADS | {"num_hidden_layers": 3, "attn_layer_indices": [1]}),
        Model(
            "Zamba2",
            SSD,
            packs={},
            options=ATTENTION
            | {"num_hidden_layers": 2, "layers_block_type": ["mamba", "hybrid"], "num_key_value_heads": 4}
            | {"n_mamba_heads": 8, "mamba_d_state": 16, "mamba_ngroups": 2, "chunk_size": 16, "adapter_rank": 4},
        ),
        Model(
            "NemotronH",
            SSD,
            packs={},
            options=ATTENTION
            | {"layers_block_type": ["mamba", "attention", "mamba", "mlp"], "head_dim": 8, "ssm_state_size": 16}
            | {"mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2, "chunk_size": 16},
        ),
        Model("FalconH1", SSD, packs={}, options=ATTENTION | HEADS | {"num_hidden_layers": 2, "mamba_d_ssm": 64}),
        Model(
            "GraniteMoeHybrid",
            SSD,
            # Its attention keeps packed sequences apart with FlashAttention only.
            packs={"num_hidden_layers": 2, "layer_types": ["mamba", "mamba"]},
            packs_as=PACKS_IN_MAMBA_LAYERS,
            options=ATTENTION
            | HEADS
            | {"num_hidden_layers": 3, "layer_types": ["mamba", "attention", "mamba"], "num_local_experts": 2}
            | {"shared_intermediate_size": 16},
        ),
        Model(
            "Lfm2",
            None,
            options=ATTENTION | {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]},
        ),
    )
}


@pytest.fixture(autouse=True)
def without_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    """The models' own convolution computes in fp32 too. A test module imports this fixture."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


class Calls(TorchDispatchMode):
    """Counts the calls of this package's operators, backward included."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "ssm_kernels":
            self.found[func._opname] += 1
        return func(*args, **kwargs or {})


@contextlib.contextmanager
def counting() -> Iterator[Counter[str]]:
    with Calls() as calls:
        yield calls.found


@contextlib.contextmanager
def counting_compiled() -> Iterator[Counter[str]]:
    """The same under torch.compile, which takes no dispatch mode: the calls that the profiler sees."""
    found: Counter[str] = Counter()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        yield found
    for event in profile.events():
        if event.name.startswith("ssm_kernels::"):
            found[event.name.removeprefix("ssm_kernels::")] += 1


def trained(model: Any) -> set[str]:
    """The parameters that get gradients: an indexer, which chooses what attention reads, gets none."""
    return {name for name, _ in model.named_parameters() if ".indexer." not in name}


def tokens(batch: int, seqlen: int, device: str | torch.device, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (batch, seqlen), generator=generator).to(device)


def backward(logits: Tensor) -> None:
    """Backward of a random linear function of the logits."""
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2)).to(logits)
    (logits * weights).sum().backward()


def logits_and_gradients(model: Any, ids: Tensor, **inputs: Any) -> dict[str, Tensor]:
    """The logits (of a base model the hidden states), and every parameter's gradient, in training mode without a cache."""
    model.train()
    model.zero_grad()
    logits = model(ids, use_cache=False, **inputs)[0]
    backward(logits)
    found = {"logits": logits.detach()}
    found |= {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.eval()
    return found


def distance(actual: Tensor, expected: Tensor) -> float:
    """The relative L2 distance."""
    actual, expected = actual.double(), expected.double()
    return ((actual - expected).norm() / expected.norm().clamp(min=1e-30)).item()


def rounding(model: Model, seqlen: int) -> float:
    """The relative error that fp32 allows: each step of each mixer's recurrence rounds once more, a delta rule twice."""
    rounds = 2 if model.step == DELTA_STEP else 1
    return rounds * model.mixers * seqlen * torch.finfo(torch.float32).eps


def close(actual: Tensor, expected: Tensor, tolerance: float, name: str = "logits") -> None:
    found = distance(actual, expected)
    assert found <= tolerance, f"{name}: relative distance {found:.1e}, allowed {tolerance:.1e}"
