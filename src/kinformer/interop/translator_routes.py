"""The export route of translators: Marian. See ``interop.routes``."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from kinformer.interop import marian
from kinformer.interop.architecture import Settings
from kinformer.interop.key_map import ConfigData, ConfigView
from kinformer.interop.routes import PLACE, Padding, Route, Weights

if TYPE_CHECKING:
    from torch import Tensor


def _marian(model: ConfigView, length: int | None, padding: Padding | None) -> Settings:
    begin, end, encoder = model["input"]["bos_token"], model["input"]["eos_token"], model["encoder"]
    sides = {"encoder": encoder["layers"], "decoder": model["layers"]}
    size = model["input"]["vocab_size"]
    settings = {
        "vocab_size": size if encoder["input"] is None else encoder["input"]["vocab_size"],
        "decoder_vocab_size": size,
        "share_encoder_decoder_embeddings": encoder["input"] is None,
        "d_model": model["dim"],
        "max_position_embeddings": max(1024, 2 * (length or 0)),
        "activation_function": MARIAN[model["layers"][0]["feed_forward"]["activation"]],
        "dropout": model["dropout"],
        "attention_dropout": model["layers"][0]["mixer"]["dropout"],
        "scale_embedding": model["input"]["scale"],
        "tie_word_embeddings": True,
        "bos_token_id": begin,
        "eos_token_id": end,
        "pad_token_id": begin,
        "decoder_start_token_id": begin,
        "forced_eos_token_id": None,
    }
    for side, layers in sides.items():
        settings |= {
            f"{side}_layers": len(layers),
            f"{side}_attention_heads": layers[0]["mixer"]["num_heads"],
            f"{side}_ffn_dim": layers[0]["feed_forward"]["hidden_dim"],
        }
    return settings


def _read_marian(settings: Settings, ours: ConfigView) -> ConfigData:
    model = marian.model_config(settings, PLACE)
    return {**model, "head": {**model["head"], "bias": ours["head"]["bias"]}}  # without one, zeros are written


MARIAN = {ours: theirs for theirs, ours in marian.ACTIVATIONS.items()}


def _split(model: ConfigView) -> ConfigView:
    """Return ``model`` with sines before cosines; the same object where they stand so."""
    if model["position"].get("layout") != "interleaved" or model["encoder"]["position"] != model["position"]:
        return model
    position = {**model["position"], "layout": "split"}
    return {**model, "position": position, "encoder": {**model["encoder"], "position": position}}


READS_FEATURES = re.compile(r".*(embedding|qkv|query|key_value|up)\.weight")
MAKES_FEATURES = re.compile(r".*(out|down|norm)\.(weight|bias)")


def _features_split(weights: Weights, model: ConfigView) -> dict[str, Tensor]:
    """Return ``weights`` for hidden states whose even features come before the odd ones."""
    import torch

    order = torch.cat([torch.arange(0, model["dim"], 2), torch.arange(1, model["dim"], 2)])
    changed = {}
    for name, weight in weights.items():
        axis = -1 if READS_FEATURES.fullmatch(name) else 0 if MAKES_FEATURES.fullmatch(name) else None
        changed[name] = weight if axis is None else weight.index_select(axis, order)
    return changed


ROUTES = {
    "marian": Route(
        title="Marian",
        kind="encoder_decoder",
        reads="tokens",
        settings=_marian,
        read=_read_marian,
        write=lambda weights, model, _: marian.write(weights, model),
        classes=lambda model: ("MarianMTModel", "AutoModelForSeq2SeqLM"),
        order=_split,
        reorder=_features_split,
        reordered="the features of hidden states change their order",
    )
}
"""The ``model_type`` to its export route."""
