"""Folders that transformers saves: MambaLM.from_pretrained reads them, whole and in shards, to the same logits."""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("transformers", minversion="5.17", reason="the tests run models of transformers, in the extra [clients]")

from transformers_models import MODELS, close, rounding, tokens, without_tf32

from ssm_kernels.models import MambaLM

CLIENT = "transformers"
__all__ = ["without_tf32"]


@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("model", ["Mamba", "Mamba2"])
def test_logits_are_those_of_transformers(model, tied, shards, tmp_path):
    theirs = MODELS[model].make(tie_word_embeddings=tied, use_bias=True)
    theirs.save_pretrained(tmp_path, max_shard_size="10KB" if shards else "1GB")
    assert len([*tmp_path.glob("*.safetensors")]) > 1 if shards else (tmp_path / "model.safetensors").is_file()
    ours = MambaLM.from_pretrained(tmp_path)
    ids = tokens(2, 13, "cpu")
    with torch.no_grad():
        close(ours(ids).logits, theirs(ids).logits, 4 * rounding(MODELS[model], 13))
    assert (ours.lm_head.weight is ours.backbone.embedding.weight) == tied


@pytest.mark.parametrize("model", ["FalconMamba", "Bamba"])
def test_other_models_are_refused(model, tmp_path):
    MODELS[model].make().save_pretrained(tmp_path)
    kind = json.loads((tmp_path / "config.json").read_text())["model_type"]
    with pytest.raises(ValueError, match=rf"config\.json: expected model_type 'mamba' or 'mamba2', got '{kind}'"):
        MambaLM.from_pretrained(tmp_path)
