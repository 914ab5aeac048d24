"""Folders of models that also read images: the language model is imported, what images pass through is not."""

import json

import pytest
import torch

import kinformer
from kinformer.lab.cli.main import main
from tests.interop.decoders import assert_close
from tests.interop.peers import HYBRID, SIZES, tokens

TEXT = {name: value for name, value in SIZES.items() if name != "initializer_range"} | {"initializer_range": 0.1}
VISION = {"hidden_size": 16, "intermediate_size": 16}
PLACES = {"qwen3_5": ("visual",), "gemma3": ("multi_modal_projector", "vision_tower")}
"""The ``model_type`` to the modules that are left out."""


def new_model(kind):
    """A random model of transformers that reads images, too."""
    import transformers

    torch.manual_seed(0)
    ids = {"image_token_id": 57, "video_token_id": 58, "vision_start_token_id": 59, "vision_end_token_id": 60}
    if kind == "qwen3_5":
        vision = VISION | {"depth": 1, "num_heads": 2, "out_hidden_size": 32, "num_position_embeddings": 16}
        config = transformers.Qwen3_5Config(text_config=TEXT | HYBRID, vision_config=vision, **ids)
        return transformers.Qwen3_5ForConditionalGeneration(config).eval()
    vision = VISION | {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8, "patch_size": 4}
    text = TEXT | {"head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 12}
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=1)
    return transformers.Gemma3ForConditionalGeneration(config).eval()


@torch.no_grad()
@pytest.mark.parametrize("kind", PLACES)
def test_the_language_model_is_imported(kind, tmp_path):
    theirs, ids = new_model(kind), tokens()
    theirs.save_pretrained(tmp_path / "peer")
    done = kinformer.import_checkpoint(tmp_path / "peer", tmp_path / "run")
    assert sum(f"{', '.join(PLACES[kind])} left out" in note for note in done.notes) == 1
    logits = theirs(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    assert_close(kinformer.load(done.run.folder)(ids)[0], logits)


@pytest.mark.parametrize("value", [None, [], "text", {"vocab_size": "many"}])
def test_a_table_that_is_none_is_one_sentence(value, tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_5", "text_config": value}))
    assert main(["import", str(tmp_path), "--out", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert str(tmp_path / "config.json") in error and error.count("\n") == 1
