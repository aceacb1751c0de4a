"""The language model of mamba_ssm: our classes under its names, and its own Python code on our operators."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import inspect
import math
import os
import subprocess
import sys
import tarfile
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from helpers import COMPAT_VERSION

from ssm_kernels import compat
from ssm_kernels.compat import mamba2_simple, mixer_seq_simple, models
from ssm_kernels.compat._modules import MODULES
from ssm_kernels.models import MambaConfig

CLIENT = "mamba_ssm"
CLIENT_VERSION = COMPAT_VERSION
OPERATOR = "mamba2_mixer"
OWN = "`MambaLMHeadModel` of its own files, 2.3.2.post1"
LAYERS = {"Mamba1": {"d_state": 4}, "Mamba2": {"layer": "Mamba2", "d_state": 8, "headdim": 8, "ngroups": 2}}
every_layer = pytest.mark.parametrize("layer", LAYERS)


def make_config(module, layer, **fields):
    sizes = {"d_model": 32, "n_layer": 2, "vocab_size": 21, "ssm_cfg": LAYERS[layer]}
    return module.MambaConfig(**sizes | fields)


def make_ours(layer, device="cpu", **fields):
    torch.manual_seed(0)
    config = make_config(models, layer, **fields)
    return models.MambaLMHeadModel(config, initializer_cfg={"initializer_range": 1.0}).to(device)


@pytest.fixture(scope="session")
def own_folder(tmp_path_factory):
    """The Python files of mamba_ssm, unpacked from its source distribution."""
    for package in ("einops", "transformers", "huggingface_hub"):
        pytest.importorskip(package, reason=f"mamba_ssm's code needs {package}")
    folder = tmp_path_factory.mktemp("mamba_ssm")
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-build-isolation", "--no-binary", ":all:"]
    command += ["--retries", "0", "--timeout", "10", "--disable-pip-version-check", "-d", str(folder), "mamba_ssm==2.3.2.post1"]
    try:
        environment = os.environ | {"MAMBA_SKIP_CUDA_BUILD": "TRUE"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    except subprocess.TimeoutExpired:
        pytest.skip("no source distribution of mamba_ssm within 60 s")
    archives = [*folder.glob("*.tar.gz")]
    if done.returncode or not archives:
        pytest.skip(f"no source distribution of mamba_ssm: {done.stderr.strip()[-200:]}")
    with tarfile.open(archives[0]) as archive:
        # Python before 3.10.12 and 3.11.4 has no filters.
        archive.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    return next(folder.glob("*/mamba_ssm"))


@pytest.fixture
def own(own_folder):
    """mamba_ssm's mixer_seq_simple from its files. Its operators, and only they, are those of compat."""
    with compat.installed():
        roots = ("mamba_ssm.ops", "mamba_ssm.ops.", "causal_conv1d", "causal_conv1d.")
        ours = {name: module for name, module in sys.modules.items() if name in roots or name.startswith(roots[1::2])}
    root = ModuleType("mamba_ssm")
    root.__path__ = [str(own_folder)]
    sys.modules.update(ours | {"mamba_ssm": root})
    try:
        yield importlib.import_module("mamba_ssm.models.mixer_seq_simple")
    finally:
        for name in [*sys.modules]:
            if name.partition(".")[0] in ("mamba_ssm", "causal_conv1d"):
                del sys.modules[name]


@contextlib.contextmanager
def counted_kernels():
    """The names of our operators that are called, in order."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counter(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace == "ssm_kernels":
                calls.append(func.name())
            return func(*args, **(kwargs or {}))

    calls: list[str] = []
    with Counter():
        yield calls


def tokens(*shape, device="cpu", seed=1):
    return torch.randint(21, shape, generator=torch.Generator().manual_seed(seed)).to(device)


@every_layer
def test_a_copy_of_the_own_file_takes_our_config(own_folder, layer):
    with compat.installed():
        spec = importlib.util.spec_from_file_location("copied", own_folder / "models" / "mixer_seq_simple.py")
        copied = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(copied)
        model = copied.MambaLMHeadModel(make_config(models, layer), initializer_cfg={"initializer_range": 1.0})
    assert isinstance(model.backbone.layers[0].mixer, MODULES["mamba_ssm"][layer.removesuffix("1")])
    ours = make_ours(layer)
    ours.load_state_dict(model.state_dict(), strict=True)
    torch.testing.assert_close(model(tokens(2, 9)).logits, ours(tokens(2, 9)).logits)


def test_fields_of_the_config_are_kept():
    ssm_cfg = {"layer": "Mamba2", "d_state": 8, "headdim": 8}
    config = models.MambaConfig(d_model=32, n_layer=1, vocab_size=21)
    assert [*vars(config)] == [field.name for field in dataclasses.fields(MambaConfig)][:12]
    config.ssm_cfg = ssm_cfg
    model = models.MambaLMHeadModel(config)
    assert model.config is config and config.ssm_cfg is ssm_cfg and ssm_cfg["layer"] == "Mamba2"
    assert isinstance(model.backbone.layers[0].mixer, MODULES["mamba_ssm"]["Mamba2"])
    assert [block.layer_idx for block in models.MambaLMHeadModel(make_config(models, "Mamba1")).backbone.layers] == [0, 1]


def test_a_folder_gives_the_config_of_mamba_ssm(tmp_path):
    make_ours("Mamba2").save_pretrained(tmp_path)
    assert models.MambaLMHeadModel.from_pretrained(tmp_path).config == make_config(models, "Mamba2")
    config = MambaConfig(d_model=32, n_layer=1, vocab_size=21, mixer="MinGRU")
    assert models.MambaLMHeadModel(config).config is config


@pytest.mark.serves("logits and gradients", model=OWN)
@every_layer
def test_own_model_has_our_logits_and_gradients(own, layer, device):
    ours = make_ours(layer, device)
    theirs = own.MambaLMHeadModel(make_config(own, layer), device=device)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    input_ids = tokens(2, 37, device=device)
    with counted_kernels() as calls:
        logits = theirs(input_ids).logits
        F.cross_entropy(logits[:, :-1].flatten(0, 1), input_ids[:, 1:].flatten()).backward()
    assert sum("scan" in call and "bwd" in call for call in calls) == 2, calls
    expected = ours(input_ids).logits
    F.cross_entropy(expected[:, :-1].flatten(0, 1), input_ids[:, 1:].flatten()).backward()
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    gradients = dict(ours.named_parameters())
    for name, parameter in theirs.named_parameters():
        scale = gradients[name].grad.abs().max().item()
        torch.testing.assert_close(
            parameter.grad, gradients[name].grad, rtol=1e-4, atol=1e-4 * scale, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.serves("cached steps", model=OWN)
@every_layer
def test_own_model_steps_to_our_logits(own, layer, device):
    ours = make_ours(layer, device)
    theirs = own.MambaLMHeadModel(make_config(own, layer), device=device)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    input_ids = tokens(2, 12, device=device)
    params = importlib.import_module("mamba_ssm.utils.generation").InferenceParams(max_seqlen=12, max_batch_size=2)
    with torch.no_grad():
        logits = [theirs(input_ids[:, :7], inference_params=params).logits]
        with counted_kernels() as calls:
            for t in range(7, 12):
                params.seqlen_offset = t
                logits.append(theirs(input_ids[:, t : t + 1], inference_params=params).logits)
        assert sum("selective_state_update" in call for call in calls) == 10, calls
        torch.testing.assert_close(torch.cat(logits, 1), ours(input_ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.serves("generation", model="`MambaLMHeadModel`")
@every_layer
def test_generate_returns_scores_of_the_whole_sequence(layer, device):
    model = make_ours(layer, device, tie_embeddings=False)
    prompt = tokens(2, 9, device=device)
    output = model.generate(prompt, 20, return_dict_in_generate=True, output_scores=True)
    assert output.sequences.shape == (2, 20)
    assert torch.equal(output.sequences, model.generate(prompt, 20))
    with torch.no_grad():
        expected = model(output.sequences[:, :-1]).logits[:, 8:]
    torch.testing.assert_close(torch.stack(output.scores, 1), expected, rtol=1e-4, atol=1e-4)
    # Rows that pad the vocabulary are in the scores, and no tokens.
    drawable = torch.stack(output.scores, 1)[..., : model.config.vocab_size]
    assert torch.equal(output.sequences[:, 9:], drawable.argmax(-1))


@every_layer
def test_generate_follows_teacher_outputs(layer, device):
    model, teacher = make_ours(layer, device), tokens(2, 15, device=device)
    assert torch.equal(model.generate(teacher[:, :5], 15, teacher_outputs=teacher), teacher)


@pytest.mark.parametrize(("name", "value"), [("min_p", 0.1), ("enable_timing", True)])
def test_generate_refuses_by_name_what_it_lacks(name, value):
    with pytest.raises(NotImplementedError, match=name):
        make_ours("Mamba1").generate(tokens(1, 3), 5, **{name: value})


def test_temperature_zero_is_greedy_and_bad_arguments_are_named():
    from ssm_kernels.compat import generation

    model, prompt = make_ours("Mamba1"), tokens(2, 3)
    for options in ({"top_k": 0}, {"top_k": 5, "top_p": 0.5}):
        assert torch.equal(model.generate(prompt, 9, temperature=0.0, **options), model.generate(prompt, 9))
    calls = [
        (lambda: model.generate(prompt, 9, streamer=3), TypeError, "expected streamer to have methods put and end, got int"),
        (lambda: model.generate(prompt, 9, teacher_outputs=prompt.to("meta")), RuntimeError, "expected teacher_outputs on cpu"),
        (lambda: model.generate(prompt.to("meta"), 9), RuntimeError, "expected input_ids on the model's device, cpu, got meta"),
        (lambda: model(prompt.to("meta")), RuntimeError, "expected input_ids on the model's device, cpu, got meta"),
        (lambda: generation.sample(torch.zeros(2, 0)), ValueError, "expected logits of at least one token"),
        (lambda: generation.sample(torch.zeros(2, 3), 0, temperature=math.nan), ValueError, "expected a finite temperature"),
    ]
    for call, error, words in calls:
        with pytest.raises(error, match=words):
            call()


def test_repetition_penalty_of_the_tokens_so_far(device):
    model, prompt = make_ours("Mamba1", device, tie_embeddings=False), tokens(2, 9, device=device)
    output = model.generate(prompt, 14, repetition_penalty=1.7, return_dict_in_generate=True, output_scores=True)
    plain = model.generate(prompt, 14)
    assert not torch.equal(output.sequences, plain)
    for step, score in enumerate(output.scores):
        expected = score.clone()
        for row, earlier in enumerate(output.sequences[:, : 9 + step]):
            for token in earlier.unique():
                expected[row, token] = score[row, token] * 1.7 if score[row, token] < 0 else score[row, token] / 1.7
        assert torch.equal(output.sequences[:, 9 + step], expected[:, : model.config.vocab_size].argmax(-1))


def test_decode_is_generate_with_its_own_positions(device):
    from ssm_kernels.compat import generation

    model, prompt = make_ours("Mamba2", device), tokens(2, 9, device=device)
    output = generation.decode(prompt, model, 14)
    assert output.scores == () and torch.equal(output.sequences, model.generate(prompt, 14))
    assert model.generate(prompt, 14, return_dict_in_generate=True).scores is None


@pytest.mark.serves("generation from packed prompts", model="`MambaLMHeadModel`")
@pytest.mark.parametrize("padding", [0, 4])
def test_packed_prompts_are_continued_as_one_by_one(padding, device):
    check_generation_from_packed_prompts(make_ours("Mamba2", device), padding, device)


@pytest.mark.serves("generation from packed prompts", model=OWN)
@pytest.mark.parametrize("padding", [0, 4])
def test_own_model_continues_packed_prompts(own, padding, device):
    ours = make_ours("Mamba2", device)
    theirs = own.MambaLMHeadModel(make_config(own, "Mamba2"), device=device)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    check_generation_from_packed_prompts(theirs, padding, device)


def check_generation_from_packed_prompts(model, padding, device):
    """One call with the prompts, seq_idx and cu_seqlens, then steps of all sequences: the logits of each whole sequence."""
    from ssm_kernels.compat import generation

    lengths, steps = (9, 2, 21), 3
    sequences = [tokens(1, length + steps, device=device, seed=length) for length in lengths]
    ends = torch.tensor(lengths, device=device).cumsum(0)
    # As mamba_ssm's own test of padding: one sequence without steps, whose tokens are the padding.
    ends = torch.cat([ends, ends[-1:]]) if padding else ends
    numbers = [i for i, length in enumerate(lengths) for _ in range(length)] + [-1] * padding
    prompts = torch.cat([ids[:, :-steps] for ids in sequences] + [tokens(1, padding, device=device)], dim=1)
    params = generation.InferenceParams(max_seqlen=64, max_batch_size=len(ends))
    packing = {
        "seq_idx": torch.tensor([numbers], dtype=torch.int32, device=device),
        "cu_seqlens": F.pad(ends, (1, 0)).int(),
    }
    with torch.no_grad():
        logits = [model(prompts, inference_params=params, **packing).logits[0, ends - 1]]
        for step in range(steps - 1):
            params.seqlen_offset += 1
            new = torch.cat([ids[:, step - steps : step - steps + 1] for ids in sequences])
            new = torch.cat([new, new[-1:]]) if padding else new
            logits.append(model(new, inference_params=params, num_last_tokens=1).logits[:, 0])
        for i, ids in enumerate(sequences):
            expected = model(ids).logits[0, -steps - 1 : -1]
            torch.testing.assert_close(torch.stack([each[i] for each in logits]), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.cuda
@every_layer
def test_captured_steps_draw_the_tokens_of_eager_ones(layer):
    model, prompt = make_ours(layer, "cuda"), tokens(2, 9, device="cuda")
    eager = model.generate(prompt, 20, return_dict_in_generate=True, output_scores=True)
    for _ in range(2):
        captured = model.generate(prompt, 20, cg=True, return_dict_in_generate=True, output_scores=True)
        assert torch.equal(captured.sequences, eager.sequences)
        torch.testing.assert_close(captured.scores, eager.scores, rtol=1e-4, atol=1e-4)


@pytest.mark.cuda
@every_layer
def test_steps_of_a_graph_cache_have_the_logits_of_eager_ones(layer):
    from ssm_kernels.compat.generation import InferenceParams, update_graph_cache

    model, ids, cache = make_ours(layer, "cuda"), tokens(2, 9, device="cuda"), None
    with torch.no_grad():
        for _ in range(2):
            cache = update_graph_cache(model, cache, 2, 5, 9)
            eager = InferenceParams(9, 2)
            for params in (eager, cache.inference_params):
                params.reset(9, 2)
                model(ids[:, :5], inference_params=params, num_last_tokens=1)
            for step in range(5, 9):
                eager.seqlen_offset = step
                expected = model(ids[:, step : step + 1], inference_params=eager, num_last_tokens=1).logits
                torch.testing.assert_close(cache.run(ids[:, step : step + 1], None, step), expected, rtol=1e-4, atol=1e-4)


class EagerStep:
    """Stands for a GraphedStep where there is no GPU."""

    def __init__(self, model, batch_size):
        self.key = self.make_key(model, batch_size)
        self.inference_params = SimpleNamespace(key_value_memory_dict={0: "state"})

    @staticmethod
    def make_key(model, batch_size):
        return model.version, batch_size

    def __call__(self, tokens):
        return tokens[:, None] * torch.ones(3)


def test_a_graph_cache_is_captured_anew_for_another_batch_size_or_parameters(monkeypatch):
    from ssm_kernels.compat import generation

    monkeypatch.setattr(generation, "GraphedStep", EagerStep)
    update = generation.update_graph_cache
    model = SimpleNamespace(version=0, parameters=lambda: [SimpleNamespace(device=torch.device("cuda"))])
    cache = update(model, None, 2, 5, 9)
    assert (cache.max_batch_size, cache.max_seqlen, list(cache.callables)) == (2, 9, [(2, 1)])
    assert cache.run(torch.tensor([[3], [4]]), None, 5).tolist() == [[[3.0] * 3], [[4.0] * 3]]
    assert cache.inference_params.key_value_memory_dict == {0: "state"}
    run = cache.run
    assert update(model, cache, 2, 5, 20) is cache and cache.run is run
    assert update(model, cache, 3, 5, 9).run is not run and list(cache.callables) == [(3, 1)]
    run, model.version = cache.run, 1
    assert update(model, cache, 3, 5, 9).run is not run
    for options in ({"decoding_seqlens": (1, 2)}, {"dtype": torch.float32}):
        with pytest.raises(NotImplementedError, match=f"update_graph_cache: expected {next(iter(options))} "):
            update(model, cache, 3, 5, 9, **options)
    with pytest.raises(RuntimeError, match="update_graph_cache: expected a model on a CUDA device, got cpu"):
        update(make_ours("Mamba1"), None, 2, 5, 9)


def test_filters_change_logits_in_place():
    from ssm_kernels.compat import generation

    inf, rows = math.inf, torch.tensor([[0.1, 0.4, 0.3, 0.2], [0.7, 0.1, 0.05, 0.15]])
    logits = rows.log()
    generation.modify_logits_for_top_k_filtering(logits, 2)
    assert torch.equal(logits == -inf, torch.tensor([[True, False, False, True], [False, True, True, False]]))
    logits = rows.log()
    generation.modify_logits_for_top_p_filtering(logits, 0.6)
    assert torch.equal(logits == -inf, torch.tensor([[True, False, False, True], [False, True, True, True]]))
    logits = rows.clone()
    generation.modify_logits_for_min_p_filtering(logits, 0.25)
    assert torch.equal(logits == -inf, rows < 0.25)
    for unchanged in (0.0, 1.0):
        logits = rows.log()
        generation.modify_logits_for_top_p_filtering(logits, unchanged)
        generation.modify_logits_for_min_p_filtering(logits, unchanged)
        assert torch.equal(logits, rows.log())


def test_sample_draws_what_the_filters_leave():
    from ssm_kernels.compat import generation

    torch.manual_seed(0)
    logits = torch.tensor([0.1, 0.4, 0.3, 0.2]).log().expand(4000, 4)
    before = logits.clone()
    for options, expected in (
        ({}, [0, 1, 0, 0]),
        ({"top_k": 0}, [0.1, 0.4, 0.3, 0.2]),
        ({"top_k": 2}, [0, 4 / 7, 3 / 7, 0]),
        ({"top_k": 0, "top_p": 0.6}, [0, 4 / 7, 3 / 7, 0]),
        ({"top_k": 0, "temperature": 0.5}, [0.01 / 0.3, 0.16 / 0.3, 0.09 / 0.3, 0.04 / 0.3]),
    ):
        counts = generation.sample(logits, **options).bincount(minlength=4) / 4000
        # Five standard deviations of a frequency.
        torch.testing.assert_close(counts, torch.tensor(expected, dtype=torch.float32), rtol=0, atol=5 * (0.25 / 4000) ** 0.5)
    assert torch.equal(logits, before)
    with pytest.raises(NotImplementedError, match="min_p"):
        generation.sample(logits, 0, min_p=0.1)
    with pytest.raises(ValueError, match="top_p"):
        generation.sample(logits, 0, 1.5)


@pytest.mark.serves("checkpoints", model="`MambaLMHeadModel`")
@every_layer
def test_pretrained_folder_has_the_same_model(layer, tmp_path):
    model = make_ours(layer)
    model.save_pretrained(tmp_path)
    with compat.installed():
        from mamba_ssm.models.mixer_seq_simple import MambaLMHeadModel
        from mamba_ssm.utils.hf import load_config_hf

        loaded = MambaLMHeadModel.from_pretrained(str(tmp_path))
        assert load_config_hf(str(tmp_path))["d_model"] == 32
    assert type(loaded) is MambaLMHeadModel
    assert torch.equal(loaded(tokens(1, 8)).logits, model(tokens(1, 8)).logits)


def test_inference_params_have_their_positions():
    with compat.installed():
        from mamba_ssm.utils.generation import InferenceParams
    lengths = torch.ones(2)
    params = InferenceParams(10, 2, 3, 0, {0: "state"}, lengths)
    params.reset(20, 1)
    assert (params.max_seqlen, params.max_batch_size, params.seqlen_offset) == (20, 1, 0)
    assert params.key_value_memory_dict == {0: "state"} and lengths.sum() == 0
    replaced = dataclasses.replace(params, max_seqlen=9)
    assert replaced.max_seqlen == 9 and replaced.lengths_per_sample is lengths
    assert [*vars(params)] == [field.name for field in dataclasses.fields(params)] and repr(lengths) in repr(params)
    with pytest.raises(NotImplementedError, match="batch_size_offset"):
        InferenceParams(10, 2, batch_size_offset=1)


SMALL_MIXERS = {"d_intermediate": 24, "norm_epsilon": 0.1, "rms_norm": True, "residual_in_fp32": True}


def signature(function):
    return [(each.name, each.kind, each.default) for each in inspect.signature(function).parameters.values()]


@every_layer
@pytest.mark.parametrize("fused", [False, True])
def test_mixer_model_has_the_hidden_states_of_its_own(own, layer, fused, device):
    for function in ("create_block", "MixerModel"):
        # Those of versions 1.0 to 1.2 have no d_intermediate, so it and the next argument without a default may be missing.
        ours, theirs = (signature(getattr(module, function)) for module in (mixer_seq_simple, own))
        assert [each[:2] for each in ours] == [each[:2] for each in theirs]
        assert {each[0] for each in set(ours) - set(theirs)} <= {"d_intermediate", "vocab_size"}
    initialize = MODULES["mamba_ssm.models.mixer_seq_simple"]["_init_weights"]
    assert signature(initialize) == signature(own._init_weights)
    options = SMALL_MIXERS | {"ssm_cfg": LAYERS[layer], "fused_add_norm": fused, "device": device}
    torch.manual_seed(0)
    theirs = own.MixerModel(32, 2, vocab_size=21, initializer_cfg={"initializer_range": 1.0}, **options)
    ours = mixer_seq_simple.MixerModel(32, 2, vocab_size=21, **options)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    torch.testing.assert_close(ours(tokens(2, 23, device=device)), theirs(tokens(2, 23, device=device)), rtol=1e-4, atol=1e-4)


@every_layer
@pytest.mark.parametrize("rms_norm", [False, True])
def test_created_blocks_are_the_layers_of_a_mixer_model(layer, rms_norm, device):
    options = SMALL_MIXERS | {"ssm_cfg": LAYERS[layer], "rms_norm": rms_norm, "fused_add_norm": True, "device": device}
    model = mixer_seq_simple.MixerModel(32, 2, vocab_size=21, **options)
    x, residual = torch.randn(2, 23, 32, device=device), None
    expected_x, expected_residual = x, residual
    for i, expected in enumerate(model.layers):
        block = mixer_seq_simple.create_block(32, layer_idx=i, **options)
        block.load_state_dict(expected.state_dict(), strict=True)
        assert block.layer_idx == block.mixer.layer_idx == i
        x, residual = block(x, residual)
        expected_x, expected_residual = expected(expected_x, expected_residual)
        torch.testing.assert_close((x, residual), (expected_x, expected_residual))
    gradient = torch.autograd.grad(x.square().sum(), block.mixer.A_log)[0]
    assert gradient.abs().max() > 0
    assert model.embedding.weight.shape == (21, 32) and model.norm_f.eps == 0.1


def test_norms_are_those_of_mamba_ssm(device):
    """A block of its RMSNorm with fused_add_norm, and a client's own sum and norm after our models' blocks."""
    with compat.installed():
        from mamba_ssm import Mamba
        from mamba_ssm.modules.block import Block
        from mamba_ssm.ops.triton.layer_norm import RMSNorm, layer_norm_fn
    options = {"ssm_cfg": LAYERS["Mamba1"], "rms_norm": True, "device": device}
    blocks = [
        Block(32, Mamba, torch.nn.Identity, functools.partial(RMSNorm, eps=1e-3), fused_add_norm=fused).to(device)
        for fused in (True, False)
    ]
    blocks[1].load_state_dict(blocks[0].state_dict(), strict=True)
    x, residual = torch.randn(2, 5, 32, device=device), torch.randn(2, 5, 32, device=device)
    torch.testing.assert_close(blocks[0](x, residual), blocks[1](x, residual))
    models_of_norms = [
        *blocks,
        mixer_seq_simple.create_block(32, 24, **options),
        mixer_seq_simple.MixerModel(32, 1, 24, 21, norm_epsilon=0.1, **options),
        make_ours("Mamba1", device, d_intermediate=24),
    ]
    for model in models_of_norms:
        norms = [module for module in model.modules() if isinstance(module, torch.nn.RMSNorm)]
        assert norms and all(isinstance(norm, RMSNorm) and norm.bias is None for norm in norms)
    norm = models_of_norms[3].norm_f
    tail = layer_norm_fn(x, norm.weight, norm.bias, residual, eps=norm.eps, is_rms_norm=isinstance(norm, RMSNorm))
    torch.testing.assert_close(tail, F.rms_norm(x + residual, (32,), eps=0.1))


@pytest.mark.parametrize(("name", "value"), [("attn_layer_idx", [1]), ("attn_cfg", {"num_heads": 2})])
def test_attention_is_refused_by_name(name, value):
    for make in (mixer_seq_simple.create_block, functools.partial(mixer_seq_simple.MixerModel, 32, 2, vocab_size=21)):
        arguments = {"d_model": 32} if make is mixer_seq_simple.create_block else {}
        with pytest.raises(NotImplementedError, match=name):
            make(**arguments, d_intermediate=0, **{name: value})
    with pytest.raises(ValueError, match="expected ssm_cfg"):
        mixer_seq_simple.create_block(32, 0, ssm_cfg={"layer": "Mamba4"})


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "options", [{"ngroups": 2}, {"use_mem_eff_path": False, "dt_limit": (0.02, 0.05), "learnable_init_states": True}]
)
def test_mamba2_simple_has_the_values_of_its_own(own, options, packed, device):
    theirs = importlib.import_module("mamba_ssm.modules.mamba2_simple").Mamba2Simple
    assert signature(mamba2_simple.Mamba2Simple) == signature(theirs)
    if packed and "use_mem_eff_path" in options:
        pytest.skip("its convolution runs across packed sequences without use_mem_eff_path")
    torch.manual_seed(0)
    expected = theirs(32, d_state=8, headdim=16, chunk_size=16, **options, device=device)
    ours = mamba2_simple.Mamba2Simple(32, d_state=8, headdim=16, chunk_size=16, **options, device=device)
    if hasattr(expected, "init_states"):
        torch.nn.init.normal_(expected.init_states)
    ours.load_state_dict(expected.state_dict(), strict=True)
    u = torch.randn(2, 23, 32, device=device)
    seq_idx = (torch.arange(23, device=device) > 9).int().expand(2, -1).contiguous() if packed else None
    torch.testing.assert_close(ours(u, seq_idx), expected(u, seq_idx), rtol=1e-4, atol=1e-5)
    for module in (ours, expected):
        module(u, seq_idx).square().sum().backward()
    for name, parameter in expected.named_parameters():
        torch.testing.assert_close(ours.get_parameter(name).grad, parameter.grad, rtol=1e-3, atol=1e-4, msg=name)
    with pytest.raises(NotImplementedError, match="no cache"):
        ours.allocate_inference_cache(2, 10)


def test_generation_has_the_arguments_of_mamba_ssm(own):
    from ssm_kernels.compat import generation

    theirs = importlib.import_module("mamba_ssm.utils.generation")
    for name in ("decode", "sample", "update_graph_cache", *(name for name in generation.__all__ if name.startswith("modify"))):
        assert signature(getattr(generation, name)) == signature(getattr(theirs, name)), name
