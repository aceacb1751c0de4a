"""Code of a user, for the type checker alone: nothing runs it. mypy reports what is no longer so, an unused ignore too."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from typing_extensions import assert_type

import ssm_kernels
from ssm_kernels import models, reference
from ssm_kernels.choices import DiscretizationName
from ssm_kernels.compat.selective_scan import selective_scan_fn

Pair = tuple[Tensor, Tensor]
Triple = tuple[Tensor, Tensor, Tensor]
x = torch.zeros(1, 2, 3)
state = torch.zeros(1, 3)


def the_last_state_is_asked_for_or_not(flag: bool) -> None:
    assert_type(ssm_kernels.selective_scan(x, x, x, x, x), Tensor)
    assert_type(ssm_kernels.selective_scan(x, x, x, x, x, return_last_state=False), Tensor)
    assert_type(ssm_kernels.selective_scan(x, x, x, x, x, x, x, x, return_last_state=True, discretization="foh"), Pair)
    assert_type(ssm_kernels.selective_scan(x, x, x, x, x, reverse=flag, return_last_state=flag), Tensor | Pair)
    assert_type(ssm_kernels.selective_scan(x, x, x, x, x, states_at=[1, 2]), Pair)
    assert_type(ssm_kernels.selective_scan(x, x, x, x, x, states_at=x, return_last_state=True), Triple)
    ssm_kernels.selective_scan(x, x, x, x, x).mean().backward()

    assert_type(ssm_kernels.ssd_chunk_scan(x, x, x, x, x), Tensor)
    assert_type(ssm_kernels.ssd_chunk_scan(x, x, x, x, x, return_final_states=True, D=x), Pair)
    assert_type(ssm_kernels.ssd_chunk_scan(x, x, x, x, x, return_final_states=flag), Tensor | Pair)
    assert_type(ssm_kernels.ssd_chunk_scan(x, x, x, x, x, states_at=(1, 2)), Pair)
    assert_type(ssm_kernels.ssd_chunk_scan(x, None, None, x, x, log_decay=x, gain=x), Tensor)
    assert_type(ssm_kernels.ssd_chunk_scan(x, x, x, x, x, states_at=x, return_final_states=True), Triple)

    assert_type(ssm_kernels.delta_rule_scan(x, x, x, x), Tensor)
    assert_type(ssm_kernels.delta_rule_scan(x, x, x, x, g=x, return_final_states=True), Pair)
    assert_type(ssm_kernels.delta_rule_scan(x, x, x, x, gate_lower_bound=-5, return_final_states=flag), Tensor | Pair)
    assert_type(ssm_kernels.delta_rule_scan(x, x, x, x, states_at=(1, 2)), Pair)
    assert_type(ssm_kernels.delta_rule_scan(x, x, x, x, states_at=x, return_final_states=True), Triple)

    assert_type(ssm_kernels.mlstm_scan(x, x, x, x, x), Tensor)
    assert_type(ssm_kernels.mlstm_scan(x, x, x, x, x, return_final_states=True), tuple[Tensor, Triple])
    assert_type(ssm_kernels.mlstm_scan(x, x, x, x, x, return_final_states=flag), Tensor | tuple[Tensor, Triple])

    assert_type(ssm_kernels.causal_conv1d(x, state), Tensor)
    assert_type(ssm_kernels.causal_conv1d(x, state, activation="silu", return_final_state=False), Tensor)
    assert_type(ssm_kernels.causal_conv1d(x, state, state, initial_state=x, return_final_state=True), Pair)
    assert_type(ssm_kernels.causal_conv1d(x, state, seq_idx=state, return_final_state=flag), Tensor | Pair)

    assert_type(ssm_kernels.linear_scan(x, x), Tensor)
    assert_type(ssm_kernels.linear_scan(x, x, state, return_last_state=True), Pair)
    assert_type(ssm_kernels.linear_scan(x, x, return_last_state=flag), Tensor | Pair)
    assert_type(ssm_kernels.mingru_scan(x, x, candidate_activation="g"), Tensor)
    assert_type(ssm_kernels.mingru_scan(x, x, return_last_state=True), Pair)
    assert_type(ssm_kernels.mingru_scan(x, x, return_last_state=flag), Tensor | Pair)
    assert_type(ssm_kernels.minlstm_scan(x, x, x), Tensor)
    assert_type(ssm_kernels.minlstm_scan(x, x, x, return_last_state=True), Pair)
    assert_type(ssm_kernels.minlstm_scan(x, x, x, return_last_state=flag), Tensor | Pair)
    assert_type(ssm_kernels.liquid_scan(x, x, 0.1), Tensor)
    assert_type(ssm_kernels.liquid_scan(x, x, x, return_last_state=True), Pair)
    assert_type(ssm_kernels.liquid_scan(x, x, 1, return_last_state=flag), Tensor | Pair)
    assert_type(ssm_kernels.rglru_scan(x, x, x=x, recurrent_param=x), Tensor)
    assert_type(ssm_kernels.rglru_scan(x, x, x=x, recurrent_param=x, return_last_state=True), Pair)
    assert_type(ssm_kernels.rglru_scan(x, x, x=x, recurrent_param=x, return_last_state=flag), Tensor | Pair)
    assert_type(ssm_kernels.hgrn_scan(x, x=x), Tensor)
    assert_type(ssm_kernels.hgrn_scan(x, x=x, h0=state, return_last_state=True), Pair)
    assert_type(ssm_kernels.hgrn_scan(x, x=x, return_last_state=flag), Tensor | Pair)
    assert_type(ssm_kernels.elu_gru_scan(x, x), Tensor)
    assert_type(ssm_kernels.elu_gru_scan(x, x, return_last_state=True), Pair)
    assert_type(ssm_kernels.elu_gru_scan(x, x, return_last_state=flag), Tensor | Pair)
    assert_type(ssm_kernels.diag_linear_scan(x, x), Tensor)
    assert_type(ssm_kernels.diag_linear_scan(x, x, return_last_state=True), Pair)
    assert_type(ssm_kernels.diag_linear_scan(x, x, return_last_state=flag), Tensor | Pair)


def the_reference_as_well(flag: bool) -> None:
    assert_type(reference.selective_scan(x, x, x, x, x), Tensor)
    assert_type(reference.selective_scan(x, x, x, x, x, return_last_state=True), Pair)
    assert_type(reference.selective_scan(x, x, x, x, x, return_last_state=flag), Tensor | Pair)
    assert_type(reference.ssd_chunk_scan(x, x, x, x, x), Tensor)
    assert_type(reference.ssd_chunk_scan(x, x, x, x, x, return_final_states=True), Pair)
    assert_type(reference.causal_conv1d(x, state), Tensor)
    assert_type(reference.causal_conv1d(x, state, return_final_state=True), Pair)
    assert_type(reference.causal_conv1d(x, state, return_final_state=flag), Tensor | Pair)
    assert_type(reference.causal_conv1d_update(state, x, state), Pair)
    assert_type(reference.mingru_scan(x, x), Tensor)
    assert_type(reference.mingru_scan(x, x, return_last_state=True), Pair)
    assert_type(reference.mingru_scan(x, x, return_last_state=flag), Tensor | Pair)


def language_models() -> None:
    model = models.MambaLM(models.MambaConfig(d_model=16, n_layer=1, mixer="MinGRU"))
    assert_type(model.forward(x).logits, Tensor)
    assert_type(model.generate(x, max_new_tokens=3, temperature=0.5, top_k=3), Tensor)
    assert_type(model.generate(x, 5), Tensor)
    assert_type(model.generate([[1], [2, 3]], max_new_tokens=5, eos_token_id=[1, 2], output_scores=False), Tensor)
    found = model.generate([x, x], 5, attention_mask=x, output_scores=True)
    assert_type(found, models.GenerationOutput)
    assert_type(found.scores, tuple[Tensor, ...])
    assert_type(model.forward(x, attention_mask=x).logits, Tensor)
    assert_type(model.forward(inputs_embeds=x, labels=x).loss, Tensor)
    assert_type(models.MambaLM.from_pretrained("folder", discretization="foh"), models.MambaLM)
    block = ssm_kernels.nn.Block(16, ssm_kernels.nn.Mamba, norm_cls=torch.nn.LayerNorm)
    assert_type(block.forward(x), Pair)


def steps() -> None:
    assert_type(ssm_kernels.selective_state_update(state, state, state, state, state, state), Tensor)
    assert_type(ssm_kernels.causal_conv1d_update(state, x, state, activation="silu"), Tensor)
    assert_type(ssm_kernels.selective_state_update(x, x, x, x, x, x, out=x, pad_slot_id=0, cu_seqlens=x), Tensor)
    assert_type(ssm_kernels.causal_conv1d_update(state, x, state, out=x, num_accepted_tokens=x), Tensor)
    assert_type(ssm_kernels.mlstm_step(x, x, x, x, x, x, x, x, scale=0.1, state_batch_indices=x), Tensor)
    assert_type(ssm_kernels.delta_rule_step(x, x, x, x, x, g=x, qk_l2norm=True, num_householder=2), Tensor)
    assert_type(ssm_kernels.delta_rule_step(x, x, x, x, x, out=x, dst_state_batch_indices=x, cu_seqlens=x), Tensor)
    assert_type(ssm_kernels.linear_step(state, state, reset=state), Pair)
    assert_type(ssm_kernels.mingru_step(state, state, state, gate_is_logit=False), Pair)
    assert_type(ssm_kernels.minlstm_step(state, state, state), Pair)
    assert_type(ssm_kernels.liquid_step(state, state, 0.1, state), Pair)
    assert_type(ssm_kernels.rglru_step(state, state, x=state, recurrent_param=state), Pair)
    assert_type(ssm_kernels.hgrn_step(state, x=state), Pair)
    assert_type(ssm_kernels.elu_gru_step(state, state), Pair)
    assert_type(ssm_kernels.diag_linear_step(state, state), Pair)


def summaries() -> None:
    assert_type(ssm_kernels.selective_scan_summary(x, x, x, x, delta_bias=x), Pair)
    assert_type(ssm_kernels.ssd_chunk_scan_summary(x, x, x, x, dt_limit=(0, 1)), Pair)
    assert_type(ssm_kernels.linear_scan_summary(x, x, reverse=True), Pair)
    assert_type(ssm_kernels.mingru_scan_summary(x, x, gate_is_logit=False), Pair)
    assert_type(ssm_kernels.minlstm_scan_summary(x, x, x, candidate_activation="g"), Pair)
    assert_type(ssm_kernels.liquid_scan_summary(x, x, 0.1), Pair)
    assert_type(ssm_kernels.rglru_scan_summary(x, x, x=x, recurrent_param=x), Pair)
    assert_type(ssm_kernels.hgrn_scan_summary(x, x=x, reset=x), Pair)
    assert_type(ssm_kernels.elu_gru_scan_summary(x, x), Pair)
    assert_type(ssm_kernels.diag_linear_scan_summary(x, x), Pair)


def layers(flag: bool, packed: PackedSequence) -> None:
    selective = ssm_kernels.nn.SelectiveSSM(16)
    assert_type(selective.forward(x), Tensor)
    assert_type(selective.forward(x, x, x, False), Tensor)
    assert_type(selective.forward(x, return_last_state=True), Pair)
    assert_type(selective.forward(x, x, x, True), Pair)
    assert_type(selective.forward(x, return_last_state=flag), Tensor | Pair)
    assert_type(selective.step(x, state), Tensor)
    assert_type(ssm_kernels.nn.Mamba(16).forward(x), Tensor)
    assert_type(ssm_kernels.nn.Mamba2(64).step(x, state, state), tuple[Tensor, Tensor, Tensor])
    assert_type(ssm_kernels.nn.MinGRU(3, 5).forward(x), Pair)
    assert_type(ssm_kernels.nn.MinGRU(3, 5).forward(packed, hx=state), tuple[PackedSequence, Tensor])
    assert_type(ssm_kernels.nn.Liquid(3, 5).forward(packed, dt=packed), tuple[PackedSequence, Tensor])
    assert_type(ssm_kernels.nn.MinLSTM(3, 5).step(state), Pair)
    assert_type(ssm_kernels.nn.Liquid(3, 5).forward(x, dt=0.1), Pair)


def what_was_built() -> None:
    for name in ssm_kernels.discretizations:
        ssm_kernels.selective_scan(x, x, x, x, x, discretization=name)
    assert_type(ssm_kernels.build_info()["cuda"], str | None)


def names(rule: DiscretizationName) -> None:
    ssm_kernels.selective_scan(x, x, x, x, x, discretization=rule)
    ssm_kernels.nn.Mamba(16, discretization=rule, dt_rank="auto", dt_init="constant")
    ssm_kernels.nn.Mamba2(64, discretization="foh")
    ssm_kernels.nn.Liquid(3, 5, candidate_activation=None)
    ssm_kernels.rms_norm_gated(x, x, x, activation="gelu_tanh")
    models.MambaConfig(mixer="MinLSTM", discretization=rule)
    models.RecurrentMixer(16, rnn="MinLSTM", candidate_activation="tanh")


def misspelt_names(name: str) -> None:
    ssm_kernels.selective_scan(x, x, x, x, x, discretization="zho")  # type: ignore[call-overload]
    ssm_kernels.selective_scan(x, x, x, x, x, discretization=name)  # type: ignore[call-overload]
    ssm_kernels.ssd_chunk_scan(x, x, x, x, x, discretization="bilinear")  # type: ignore[call-overload]
    ssm_kernels.selective_state_update(x, x, x, x, x, x, discretization="rk45")  # type: ignore[arg-type]
    ssm_kernels.selective_scan_summary(x, x, x, x, discretization="zho")  # type: ignore[arg-type]
    ssm_kernels.causal_conv1d(x, state, activation="relu")  # type: ignore[call-overload]
    ssm_kernels.mingru_scan(x, x, candidate_activation="relu")  # type: ignore[call-overload]
    ssm_kernels.rms_norm_gated(x, x, x, activation="swiglu")  # type: ignore[arg-type]
    ssm_kernels.nn.Mamba(16, discretization="zho")  # type: ignore[arg-type]
    ssm_kernels.nn.Mamba(16, dt_init="uniform")  # type: ignore[arg-type]
    ssm_kernels.nn.Mamba(16, dt_rank="all")  # type: ignore[arg-type]
    ssm_kernels.nn.Mamba2(64, discretization="euler")  # type: ignore[arg-type]
    ssm_kernels.nn.Liquid(3, 5, candidate_activation="g")  # type: ignore[arg-type]
    models.MambaConfig(mixer="Mamba4")  # type: ignore[arg-type]
    models.MambaConfig(discretization="zho")  # type: ignore[arg-type]
    models.RecurrentMixer(16, rnn="GRU")  # type: ignore[arg-type]
    ssm_kernels.distributed.ContextParallel(exchange="ring")  # type: ignore[arg-type]
    reference.selective_scan(x, x, x, x, x, discretization="zho")  # type: ignore[call-overload]
    selective_scan_fn(x, x, x, x, x, discretization="zho")  # type: ignore[arg-type]


def mistakes(flag: bool) -> None:
    ssm_kernels.selective_scan(x, x, x, x)  # type: ignore[call-overload]
    ssm_kernels.selective_scan(x, x, x, x, x, return_last_state=True).mean()  # type: ignore[attr-defined]
    ssm_kernels.selective_scan(x, x, x, x, x, return_last_state=flag).mean()  # type: ignore[union-attr]
    ssm_kernels.causal_conv1d(x, state, state, "silu")  # type: ignore[call-overload]
    ssm_kernels.mingru_scan(x, x, gate_is_logit="yes")  # type: ignore[call-overload]
    ssm_kernels.hgrn_scan(x, x)  # type: ignore[call-overload]
    ssm_kernels.hgrn_step(state, state)  # type: ignore[call-arg]
    ssm_kernels.nn.MinGRU(3, 5).forward([x])  # type: ignore[call-overload]
    ssm_kernels.nn.MinGRU(3, 5, candidate_activation=1)  # type: ignore[arg-type]
