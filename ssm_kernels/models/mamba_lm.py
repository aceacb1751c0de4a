"""A language model of residual blocks with Mamba, Mamba-2, minGRU or minLSTM mixers, like ``mamba_ssm``'s ``MambaLMHeadModel``.

Embedding, ``n_layer`` blocks (:class:`ssm_kernels.nn.Block`), a norm, and a head that shares the embedding's weight. Source: Gu
and Dao, *Mamba* (arXiv 2312.00752), section 3.4; the initialization is GPT-2's.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, overload

import torch
import torch.nn as nn
from torch import Tensor

from .._torchscript import refuse_script, refuse_tracing
from ..nn.checks import check_dtype, check_int
from ..nn.initialization import Initialization, linear, reset_all
from ..nn.naming import class_name
from ..nn.weight_decay import NamesNoDecay
from .checkpoints import find_folder, load_config, load_model, override, parse_size, save
from .config import MambaConfig
from .gathering import check_is_whole, write_whole
from .generation import GenerationOutput, GraphedStep, Sampling, Streamer, check_generation, generate
from .mixer_model import MixerModel
from .padding import next_token_loss
from .prompts import check_eos, check_pad, check_tokens, read_prompts
from .tying import TiedInitialization, are_different, first_with_memory, places_of_shared, restore_shared, warn_if_apart

__all__ = ["CausalLMLossOutput", "CausalLMOutput", "MambaLM", "MixerModel"]


class CausalLMOutput(NamedTuple):
    """The result of :class:`MambaLM`.

    Attributes:
        logits: (batch, seqlen, padded vocabulary).

    Examples:
        >>> import torch
        >>> from ssm_kernels.models import MambaConfig, MambaLM
        >>> model = MambaLM(MambaConfig(d_model=64, n_layer=1, vocab_size=100))
        >>> output = model(torch.randint(100, (4, 32)))
        >>> output.logits.shape
        torch.Size([4, 32, 104])
    """

    logits: Tensor


class CausalLMLossOutput(NamedTuple):
    """The result of :class:`MambaLM` with ``labels``; the loss comes first, where trainers of transformers look for it.

    Attributes:
        loss: the mean cross entropy of the next tokens, float32 (float64 in a float64 model).
        logits: (batch, seqlen, padded vocabulary).

    Examples:
        >>> import torch
        >>> from ssm_kernels.models import MambaConfig, MambaLM
        >>> model = MambaLM(MambaConfig(d_model=64, n_layer=1, vocab_size=100))
        >>> tokens = torch.randint(100, (4, 32))
        >>> loss, logits = model(tokens, labels=tokens)
        >>> loss.backward()
        >>> logits.shape
        torch.Size([4, 32, 104])
    """

    loss: Tensor
    logits: Tensor


def _restore_after_loading(model: MambaLM, incompatible_keys: Any) -> None:
    """A hook of ``load_state_dict``: with ``assign=True`` it gives each name a parameter of its own."""
    restore_shared(model.__dict__.pop("_shared_before_loading", []))


@refuse_script
class MambaLM(NamesNoDecay, nn.Module):
    """A language model: tokens, (batch, seqlen), to logits of the next token, (batch, seqlen, padded vocabulary).

    The model has the structure, parameter names, ``forward`` and ``allocate_inference_cache`` of ``mamba_ssm``'s
    ``MambaLMHeadModel`` and reads and writes its checkpoints: see :meth:`from_pretrained` and :meth:`save_pretrained`. It also
    initializes as that model does, with one difference: where blocks have an MLP, the projections that end a mixer or an MLP
    are divided by ``sqrt(2 * n_layer)``. ``mamba_ssm`` intends this too, but its outer model draws new values and divides them
    by ``sqrt(n_layer)``.

    Parameters: ``backbone.*`` as in :class:`MixerModel`, and ``lm_head.weight`` (padded vocabulary, d_model), the same
    parameter as ``backbone.embedding.weight`` with ``tie_embeddings``.

    Args:
        config: the sizes and options.
        initializer_cfg: see :class:`MixerModel`.
        device: where the parameters are made.
        dtype: dtype of the model. Parameters that the mixers keep in a wider dtype are float32 (float64 in a float64 model).

    Raises:
        ValueError: ``config.ssm_cfg`` has a value that the mixer refuses.
        TypeError: ``config`` is not a :class:`MambaConfig`, or ``config.ssm_cfg`` has a name that the mixer does not know.

    Examples:
        >>> import torch
        >>> from ssm_kernels.models import MambaConfig, MambaLM
        >>> model = MambaLM(MambaConfig(d_model=64, n_layer=2, vocab_size=100, mixer="Mamba2", ssm_cfg={"headdim": 16}))
        >>> tokens = torch.randint(100, (4, 33))
        >>> logits = model(tokens[:, :-1]).logits
        >>> logits.shape  # (batch, seqlen, padded vocabulary)
        torch.Size([4, 32, 104])
        >>> torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    """

    # transformers' Trainer reads it: keyword arguments that forward does not know are the mixers', not the loss's.
    accepts_loss_kwargs = False

    def __init__(
        self,
        config: MambaConfig,
        initializer_cfg: dict[str, Any] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(config, MambaConfig):
            raise TypeError(f"MambaLM: expected config to be a MambaConfig, got {type(config).__name__}")
        self.config = config
        self.backbone = MixerModel(config, initializer_cfg, device, dtype)
        self.lm_head = linear(config.d_model, config.padded_vocab_size, False, device, dtype)
        self._graphed: GraphedStep | None = None
        self.tie_weights()
        if config.tie_embeddings:
            # The head draws the embedding's distribution: either of the two may be initialized last.
            self.lm_head.reset_parameters.draw = self.backbone.embedding.reset_parameters.draw  # type: ignore[attr-defined]
        self._keep_tied()
        self.register_load_state_dict_post_hook(_restore_after_loading)

    def tie_weights(self) -> None:
        """Makes embedding and head share their weight, if the configuration says so.

        They stay one parameter in conversions, ``to_empty``, copies and ``load_state_dict`` of the model, ``assign=True``
        included. Something else may make them two, such as ``model.backbone.load_state_dict(..., assign=True)``. Then both take
        the embedding's, or the head's if the embedding is on ``meta``.
        """
        embedding, head = self.backbone.embedding, self.lm_head
        if self.config.tie_embeddings and head.weight is not embedding.weight:
            weight = first_with_memory([embedding.weight, head.weight])
            for module in (embedding, head):
                if module.weight is not weight:
                    module.weight = weight

    def init_weights(self) -> None:
        """Initializes all parameters as the constructor does, for a model that was made on ``meta``.

        Every module's ``reset_parameters`` initializes the module's own parameters, so that FSDP1 and a loop over
        ``model.modules()`` give the same distribution. With sharded parameters (DTensors) every rank calls this method.
        Buffers of modules without ``reset_parameters`` stay as they are.

        Raises:
            RuntimeError: a module that was added to the model, or changed in it, has parameters that its ``reset_parameters``
                does not initialize: it has none, or weight norm, pruning, quantization or adapters hold the weight. Call this
                method before you change the model.
            NotImplementedError: :class:`ssm_kernels.distributed.TensorParallel` has distributed the parameters.

        Examples:
            >>> import torch
            >>> from ssm_kernels.models import MambaConfig, MambaLM
            >>> with torch.device("meta"):
            ...     model = MambaLM(MambaConfig(d_model=64, n_layer=1, vocab_size=100))
            >>> model = model.to_empty(device="cpu")  # after fully_shard, if the model is sharded
            >>> model.init_weights()
            >>> model.lm_head.weight is model.backbone.embedding.weight
            True
        """
        self.tie_weights()
        reset_all(self, f"{class_name(self)}.init_weights")

    def _keep_tied(self) -> None:
        if self.config.tie_embeddings:
            for module in (self.backbone.embedding, self.lm_head):
                own = module.__dict__.get("reset_parameters")
                if isinstance(own, Initialization):
                    module.__dict__["reset_parameters"] = TiedInitialization(module, own.draw, self)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> MambaLM:
        places = places_of_shared(self)
        super()._apply(fn, recurse)
        restore_shared(places)
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        self.__dict__["_shared_before_loading"] = places_of_shared(self)
        names = [f"{prefix}{name}.weight" for name in ("backbone.embedding", "lm_head")]
        if self.config.tie_embeddings and are_different(*map(state_dict.get, names)):
            error_msgs = args[-1]
            error_msgs.append(
                f"MambaLM: expected {names[0]!r} and {names[1]!r} of the checkpoint to be equal, because tie_embeddings makes "
                "them one parameter, got different values: load them into a model with MambaConfig(tie_embeddings=False)"
            )
        super()._load_from_state_dict(state_dict, prefix, *args)

    @overload
    def forward(
        self,
        input_ids: Tensor | None = None,
        position_ids: Any = None,
        inference_params: Any = None,
        num_last_tokens: int = 0,
        *,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: None = None,
        **mixer_kwargs: Any,
    ) -> CausalLMOutput: ...
    @overload
    def forward(
        self,
        input_ids: Tensor | None = None,
        position_ids: Any = None,
        inference_params: Any = None,
        num_last_tokens: int = 0,
        *,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor,
        **mixer_kwargs: Any,
    ) -> CausalLMLossOutput: ...
    def forward(
        self,
        input_ids: Tensor | None = None,
        position_ids: Any = None,
        inference_params: Any = None,
        num_last_tokens: int = 0,
        *,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **mixer_kwargs: Any,
    ) -> CausalLMOutput | CausalLMLossOutput:
        """Logits of the token after each token.

        Args:
            input_ids: (batch, seqlen), int32 or int64, from 0 to ``config.vocab_size - 1``; where ``attention_mask`` is 0,
                any number.
            position_ids: ignored; for code written for transformers.
            inference_params: ``None``, or a cache such as :class:`InferenceParams`; see :class:`ssm_kernels.nn.Mamba`.
            num_last_tokens: return logits of this many last steps; 0 is all.
            attention_mask: (batch, seqlen), any dtype: 0 where a row has padding, at either end or between. No token and no
                state sees padding, and logits there are zero. The rows go through the mixers as packed sequences: not together
                with ``cu_seqlens`` or ``seq_idx``.
            inputs_embeds: (batch, seqlen, d_model), takes the place of the embedding of ``input_ids``. Differentiable.
            labels: (batch, seqlen), int32 or int64: the tokens themselves, as the model compares the logits of each step with
                the label of the next. -100 is left out, and so are labels on or behind padding and the first of each packed
                sequence. The others are from 0 to ``config.vocab_size - 1``. Not together with ``num_last_tokens``.
            mixer_kwargs: passed to every mixer, such as ``cu_seqlens`` for packed sequences.

        Returns:
            ``CausalLMOutput(logits)`` with logits (batch, seqlen or num_last_tokens, padded vocabulary); with ``labels``
            ``CausalLMLossOutput(loss, logits)``. The loss is the mean over the labels that count, NaN if none does.

        The CPU checks the values of ``input_ids`` and ``labels``. CUDA does not, because the host would have to wait for the
        device: PyTorch's device-side assertion reports values beyond the padded vocabulary, and a label that is one of the
        rows between counts. Compiled and exported code has no check.

        Raises:
            ValueError: a shape or, on the CPU, a token or a label is not as above, ``num_last_tokens`` is negative, or
                arguments are given together that exclude each other.
            TypeError: an argument is of another type, or the mixers do not take it.
            RuntimeError: an argument is on another device than the model or ``input_ids``.

        Examples:
            >>> import torch
            >>> from ssm_kernels.models import MambaConfig, MambaLM
            >>> model = MambaLM(MambaConfig(d_model=64, n_layer=1, vocab_size=100))
            >>> tokens = torch.randint(100, (2, 10))
            >>> mask = torch.ones(2, 10)
            >>> mask[0, :3] = 0  # the first prompt has padding before it
            >>> model(tokens, attention_mask=mask, num_last_tokens=1).logits.shape
            torch.Size([2, 1, 104])
            >>> model(tokens, labels=tokens).loss.backward()
        """
        name = "MambaLM"
        if inputs_embeds is None and input_ids is not None:
            check_tokens(name, input_ids)
        check_int(name, "num_last_tokens", num_last_tokens, low=0)
        if labels is not None and num_last_tokens > 0:
            raise ValueError(f"{name}: expected labels or num_last_tokens, got both")
        if labels is not None:
            self.backbone._check_is_local("labels")
        if self.training and self.config.tie_embeddings and not torch.compiler.is_compiling():
            warn_if_apart(self)
        optional = {"attention_mask": attention_mask, "inputs_embeds": inputs_embeds}
        optional = {key: value for key, value in optional.items() if value is not None}
        hidden_states = self.backbone(input_ids, inference_params=inference_params, **optional, **mixer_kwargs)
        if num_last_tokens > 0:
            hidden_states = hidden_states[:, -num_last_tokens:]
        logits = self.lm_head(hidden_states)
        if labels is None:
            return CausalLMOutput(logits)
        packed = {key: mixer_kwargs.get(key) for key in ("cu_seqlens", "seq_idx")}
        vocab_size = self.backbone._vocab_size()
        return CausalLMLossOutput(next_token_loss(name, logits, labels, vocab_size, attention_mask, **packed), logits)

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None, **kwargs: Any
    ) -> dict[int, Any]:
        """Returns zero states of every mixer under its ``layer_idx``, for ``InferenceParams.key_value_memory_dict``."""
        return self.backbone.allocate_inference_cache(batch_size, max_seqlen, dtype=dtype, **kwargs)

    @overload
    def generate(
        self,
        input_ids: Tensor | Sequence[Tensor] | Sequence[Sequence[int]],
        max_length: int | None = None,
        max_new_tokens: int | None = None,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 0.0,
        eos_token_id: int | Sequence[int] | None = None,
        cg: bool | None = None,
        streamer: Streamer | None = None,
        generator: torch.Generator | None = None,
        *,
        attention_mask: Tensor | None = None,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        pad_token_id: int | None = None,
        output_scores: Literal[False] = False,
    ) -> Tensor: ...
    @overload
    def generate(
        self,
        input_ids: Tensor | Sequence[Tensor] | Sequence[Sequence[int]],
        max_length: int | None = None,
        max_new_tokens: int | None = None,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 0.0,
        eos_token_id: int | Sequence[int] | None = None,
        cg: bool | None = None,
        streamer: Streamer | None = None,
        generator: torch.Generator | None = None,
        *,
        attention_mask: Tensor | None = None,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        pad_token_id: int | None = None,
        output_scores: Literal[True],
    ) -> GenerationOutput: ...
    @overload
    def generate(
        self,
        input_ids: Tensor | Sequence[Tensor] | Sequence[Sequence[int]],
        max_length: int | None = None,
        max_new_tokens: int | None = None,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 0.0,
        eos_token_id: int | Sequence[int] | None = None,
        cg: bool | None = None,
        streamer: Streamer | None = None,
        generator: torch.Generator | None = None,
        *,
        attention_mask: Tensor | None = None,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        pad_token_id: int | None = None,
        output_scores: bool,
    ) -> Tensor | GenerationOutput: ...
    def generate(
        self,
        input_ids: Tensor | Sequence[Tensor] | Sequence[Sequence[int]],
        max_length: int | None = None,
        max_new_tokens: int | None = None,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 0.0,
        eos_token_id: int | Sequence[int] | None = None,
        cg: bool | None = None,
        streamer: Streamer | None = None,
        generator: torch.Generator | None = None,
        *,
        attention_mask: Tensor | None = None,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        pad_token_id: int | None = None,
        output_scores: bool = False,
    ) -> Tensor | GenerationOutput:
        """Continues sequences with sampled tokens: the prompts in one call, then a step for each token.

        Options are applied in the order ``repetition_penalty``, ``temperature``, ``top_k``, ``top_p``, ``min_p``, with the
        definitions of transformers.

        Args:
            input_ids: the prompts, at least one token each: (batch, seqlen), int32 or int64, or a list of 1-D tensors or of
                lists of ints, of any lengths. Tokens are from 0 to ``config.vocab_size - 1``. They are checked on the CPU and,
                with ``eos_token_id``, ``streamer`` or ``attention_mask``, on CUDA.
            max_length: number of tokens, the longest prompt included. Give this or ``max_new_tokens``.
            max_new_tokens: number of tokens after the prompt.
            temperature: divides the logits; 0 takes the most probable token.
            top_k: only the ``top_k`` most probable tokens are drawn; 0 is all, 1 takes the most probable.
            top_p: of these, only the most probable ones whose probabilities sum to at least ``top_p``; 0 and 1 are all.
            eos_token_id: token, or tokens, that end a sequence. Generation ends with the last sequence.
            cg: whether each step replays a CUDA graph; ``None``: on CUDA. The model keeps the graph and its states for the
                next call with the same batch size, parameters and autocast. :meth:`clear_graph` frees them: call it after a
                change that leaves every parameter in its memory, such as a new hook or an adapter that is switched off.
            streamer: its ``put`` is called with the prompt and then with every step's tokens, (batch,), on the CPU, and ``end``
                after the last; streamers of transformers work.
            generator: draws the random numbers, on the device of ``input_ids``; ``None`` is PyTorch's. Equal generators give
                equal tokens.
            attention_mask: (batch, seqlen), for a tensor of prompts: 0 where a row has padding, at either end or between, as in
                :meth:`forward`. The row is the prompt of its other tokens. Padding may be any number.
            min_p: only tokens at least ``min_p`` times as probable as the most probable one are drawn; 0 is all.
            repetition_penalty: divides the logits of tokens that the row has had, or multiplies those below zero; 1 changes
                nothing. Padding does not count.
            pad_token_id: fills the shorter prompts of a list and the rest of sequences that have ended; ``None`` is the first
                ``eos_token_id``, or 0 without one. Padding of a tensor keeps its numbers.
            output_scores: also return the logits from which tokens were drawn.

        Returns:
            Padding, prompts and new tokens, (batch, up to max_length), in the dtype of ``input_ids``. Padding is on the left,
            so that new tokens begin at the same column in every row; padding of ``input_ids`` at the right or between tokens
            moves there, and its numbers keep their order. Tokens are below ``config.vocab_size``, also where the vocabulary is
            padded. With ``output_scores`` a :class:`GenerationOutput` of these ``sequences`` and ``scores``. Each row is what
            its prompt alone would give.

        Raises:
            ValueError: an argument is not as above.
            TypeError: an argument is of another type.
            RuntimeError: an argument is on another device than the model.

        Examples:
            >>> import torch
            >>> from ssm_kernels.models import MambaConfig, MambaLM
            >>> model = MambaLM(MambaConfig(d_model=64, n_layer=1, vocab_size=100))
            >>> prompt = torch.randint(100, (2, 10))
            >>> model.generate(prompt, max_new_tokens=5, temperature=0.8, top_p=0.95).shape  # with the prompt
            torch.Size([2, 15])
            >>> model.generate(prompt, max_length=15, temperature=0).shape  # the likeliest tokens
            torch.Size([2, 15])
        """
        name = "MambaLM.generate"
        refuse_tracing(name, "loops over tokens")
        eos_ids = check_eos(name, eos_token_id, self.config.vocab_size)
        pad_id = check_pad(name, pad_token_id, eos_ids, self.config.padded_vocab_size)
        device = self.backbone.embedding.weight.device
        # For these the host waits for the device anyway.
        waits = bool(eos_ids) or streamer is not None or attention_mask is not None
        prompts = read_prompts(name, input_ids, attention_mask, pad_id, device, self.backbone._vocab_size(), waits)
        length = check_generation(name, prompts, max_length, max_new_tokens, cg, streamer, output_scores)
        sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty, generator)
        sampling.check(name)
        self.backbone._check_inputs(prompts.input_ids, None)
        graphed = None
        if cg or (cg is None and prompts.input_ids.device.type == "cuda"):
            graphed = self._graphed_step(prompts.input_ids.shape[0])
        return generate(self, prompts, length, sampling, eos_ids, pad_id, graphed, streamer, output_scores)

    def clear_graph(self) -> None:
        """Frees the CUDA graph that :meth:`generate` keeps, and its states."""
        self._graphed = None

    @classmethod
    def from_pretrained(
        cls,
        folder: str | os.PathLike[str],
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **config_overrides: Any,
    ) -> MambaLM:
        """Loads a model that :meth:`save_pretrained`, ``mamba_ssm`` or transformers saved in a folder.

        The folder is not trusted: nothing in it is executed, and every shape is compared with the configuration before the
        model is allocated.

        Args:
            folder: has ``config.json`` and ``model.safetensors`` or ``pytorch_model.bin``, or an index of either's shards,
                ``*.index.json``. ``config.json`` is ``mamba_ssm``'s, or that of transformers' ``MambaForCausalLM`` or
                ``Mamba2ForCausalLM``. Where huggingface_hub is installed, also a name on the hub, such as
                ``"state-spaces/mamba-130m"``.
            device: where the parameters are made.
            dtype: dtype of the model, whatever dtype the checkpoint has.
            config_overrides: fields of :class:`MambaConfig` that override ``config.json``, such as
                ``discretization="zoh_exact"``. ``ssm_cfg`` replaces the one of the file as a whole.

        Raises:
            FileNotFoundError: there is no such folder, or a file is missing in it.
            ValueError: ``config.json`` does not describe such a model, a field has a value that is not supported, or a file is
                damaged, holds other things than tensors or refers to places outside of the folder.
            RuntimeError: the parameters in the folder do not fit the model that ``config.json`` describes.
            TypeError: an argument is of another type, or ``config_overrides`` has a name that is not a field.

        Examples:
            >>> import torch
            >>> from ssm_kernels.models import MambaConfig, MambaLM
            >>> model = MambaLM(MambaConfig(d_model=64, n_layer=1, vocab_size=100))
            >>> model.save_pretrained("checkpoint")
            >>> same = MambaLM.from_pretrained("checkpoint", dtype=torch.float32)
            >>> same.config == model.config
            True
        """
        check_dtype("MambaLM.from_pretrained", dtype)
        found = find_folder(folder)
        config = override(load_config(found), config_overrides)
        return load_model(found, config, functools.partial(cls, config, None, dtype=dtype), device)

    def save_pretrained(self, folder: str | os.PathLike[str], max_shard_size: int | str | None = None) -> None:
        """Writes ``config.json`` and ``pytorch_model.bin``; makes the folder if it is missing.

        Args:
            folder: where the files are written. Other files of weights in it are removed.
            max_shard_size: bytes, or a string such as ``"5GB"``: larger weights are written in shards,
                ``pytorch_model-00001-of-00003.bin`` and so on, with ``pytorch_model.bin.index.json``. ``None``: one file.

        ``mamba_ssm``'s ``MambaLMHeadModel.from_pretrained`` reads them if the mixer is ``"Mamba"`` or ``"Mamba2"`` and the
        discretization ``"zoh"``.

        If ``fully_shard`` or :class:`ssm_kernels.distributed.TensorParallel` has distributed the parameters, every rank calls
        this method. Rank 0 writes the files of the whole model, and the others wait for it.

        Raises:
            ValueError, TypeError: ``max_shard_size`` is not as above.
            RuntimeError: the model has only a part of its parameters here, as under FSDP1; ``tie_embeddings`` is true and
                embedding and head have different values; or the rank that writes has failed.

        Examples:
            >>> import torch
            >>> from ssm_kernels.models import MambaConfig, MambaLM
            >>> import os
            >>> model = MambaLM(MambaConfig(d_model=64, n_layer=1, vocab_size=100))
            >>> model.save_pretrained("checkpoint")
            >>> sorted(os.listdir("checkpoint"))
            ['config.json', 'pytorch_model.bin']
        """
        name = f"{class_name(self)}.save_pretrained"
        shard_size = parse_size(name, "max_shard_size", max_shard_size)
        check_is_whole(name, self)
        state = self.state_dict()
        head, embedding = "lm_head.weight", "backbone.embedding.weight"
        is_tied = self.config.tie_embeddings and head in state and embedding in state
        fault = None
        if is_tied and are_different(state[head], state[embedding]):
            fault = (
                f"expected {head!r} and {embedding!r} to be one parameter, because tie_embeddings is true, got different "
                "values: call tie_weights() to keep the embedding's"
            )
        same = {head: embedding} if is_tied else {}
        write_whole(name, state, same, fault, functools.partial(save, Path(folder), self.config, shard_size))

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out the CUDA graph, which can be neither copied nor pickled."""
        return self.__dict__ | {"_graphed": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._keep_tied()
        if _restore_after_loading not in self._load_state_dict_post_hooks.values():
            self.register_load_state_dict_post_hook(_restore_after_loading)

    def _graphed_step(self, batch_size: int) -> GraphedStep:
        if self._graphed is None or self._graphed.key != GraphedStep.make_key(self, batch_size):
            self._graphed = None  # free the memory of the old graph first
            self._graphed = GraphedStep(self, batch_size)
        return self._graphed
