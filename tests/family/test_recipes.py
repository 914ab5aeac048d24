"""Recipes: settings and paths of a recipe as data, and the configs of the family's recipes, which stay as they are."""

import hashlib
import json
from pathlib import Path

import pytest

from kinformer.core.config import Config, field_types
from kinformer.family.record import Recipe, part, translating
from kinformer.family.table import MEMBERS

DIGESTS = Path(__file__).with_name("recipes.json")


def changed(value):
    """A config as data without fields that have their defaults, so that a new field with a default changes nothing."""
    if isinstance(value, tuple):
        return [changed(item) for item in value]
    if not isinstance(value, Config):
        return value
    names = [name for name in field_types(type(value)) if getattr(value, name) != getattr(type(value), name, None)]
    return {"kind": value.kind} | {name: changed(getattr(value, name)) for name in names}


def digest(member: str) -> str:
    """A digest of all recipes of a member, each with its own vocabulary and with another."""
    recipes = {
        name: [changed(recipe(size)) for size in (None, 123)] for name, recipe in MEMBERS[member].recipes.items()
    }
    return hashlib.sha256(json.dumps(recipes, sort_keys=True).encode()).hexdigest()[:16]


@pytest.mark.parametrize("member", MEMBERS)
def test_recipes_stay_as_they_are(member):
    assert digest(member) == json.loads(DIGESTS.read_text())[member], (
        f"the recipes of {member} have changed; if they should, write the digests: python {Path(__file__).name}"
    )


def test_later_settings_replace_earlier_ones_and_paths_come_last():
    base = Recipe(8, 4, 2, {"mixer.bias": False}, {"mixer": part("softmax", position="rope")}, residual="post")
    data = base.but({"layers.1::2.mixer": "linear", "layers.-1.feed_forward.hidden_dim": 5}).data(7)
    mixers = [layer["mixer"] for layer in data["layers"]]
    assert mixers[0] == {"kind": "softmax", "num_heads": 2, "position": "rope", "bias": False}
    assert mixers[1::2] == [{"kind": "linear", "num_heads": 2}] * 2
    assert [layer["feed_forward"]["hidden_dim"] for layer in data["layers"]] == [32, 32, 32, 5]
    assert {layer["residual"] for layer in data["layers"]} == {"post"} and data["input"]["vocab_size"] == 7
    assert base.data()["input"]["vocab_size"] == 256


def test_an_encoder_decoder_shares_its_input_unless_the_encoder_has_its_own():
    shared = Recipe(8, 2, 2, translating(0.1, depth=3))()
    assert (shared.input.bos_token, shared.input.eos_token, shared.encoder.input) == (256, 257, None)
    assert len(shared.encoder.layers) == 3 and shared.encoder.layers[0].dropout == shared.layers[0].dropout == 0.1
    pixels = Recipe(8, 2, 2, translating(input=part("pixels")))()
    assert pixels.input.bos_token is None and pixels.encoder.input.kind == "pixels"


if __name__ == "__main__":
    DIGESTS.write_text(json.dumps({member: digest(member) for member in MEMBERS}, indent=0) + "\n")
