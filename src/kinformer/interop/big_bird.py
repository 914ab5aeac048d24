"""Big Bird as the library transformers saves it, as our member ``big-bird`` (Zaheer et al. 2020).

The random blocks are those that transformers draws while it trains, the layer's number being the seed, as in the paper;
when it does not train it takes block 0 for all of them. It counts a block that is listed twice twice, ours once, and it
has the table of its own lengths, 1024, 3072 and 4096, for 2048 too, as in the paper. There the last block of a padded
batch is global, here that of each text. Like theirs, block-sparse attention has no dropout.
"""

from __future__ import annotations

from pathlib import Path

from kinformer.interop.encoder import Family
from kinformer.interop.encoder_keys import CLASSIFIER, CLS, HeadKeys
from kinformer.interop.layouts import ConfigData, ConfigView
from kinformer.interop.settings import Settings, choice, integer, require


def _mixers(full: Settings, place: Path) -> list[ConfigData]:
    require(full, place, {"rescale_embeddings": False})
    projection = {"projection": {"kind": "multi_head", "bias": bool(full["use_bias"])}}
    depth = full["num_hidden_layers"]
    if choice(full, place, "attention_type", ("block_sparse", "original_full")) == "original_full":
        return [projection] * depth
    pattern = {
        "kind": "big_bird",
        "block": integer(full, place, "block_size"),
        "random": integer(full, place, "num_random_blocks", minimum=0),
        "num_heads": integer(full, place, "num_attention_heads"),
    }
    return [projection | {"dropout": 0.0, "pattern": pattern | {"seed": layer}} for layer in range(depth)]


def _notes(model: ConfigView) -> tuple[str, ...]:
    if not model["layers"][0]["mixer"].get("pattern", {}).get("random"):
        return ()
    return (
        "each query reads random blocks, here in training and in evaluation; transformers reads them in training "
        "alone, and the first block in their place in evaluation, so its evaluated outputs differ",
    )


BIG_BIRD = Family(
    title="Big Bird",
    member="big-bird",
    prefix="bert.",
    heads=HeadKeys(CLS, CLASSIFIER),
    mixers=_mixers,
    defaults={
        "vocab_size": 50358,
        "hidden_act": "gelu_new",
        "max_position_embeddings": 4096,
        "pad_token_id": 0,
        "sep_token_id": 66,
        "attention_type": "block_sparse",
        "use_bias": True,
        "block_size": 64,
        "num_random_blocks": 3,
    },
    activated=("masked_language", "classification"),
    notes=_notes,
    tokens={"eos_token": "sep_token_id"},
)
