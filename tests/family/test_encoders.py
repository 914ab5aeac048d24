"""The contract battery over the encoders of the family: padding, rows, heads, files, and what each is in its limit."""

import json

import pytest
import torch

import kinformer
from kinformer.core.config import from_dict, to_dict
from kinformer.core.encoder import GLOBAL, LOCAL
from kinformer.family.build import configure
from kinformer.family.kinds import kinds
from kinformer.heads.classes import ClassificationHead, TokenClassificationHead
from kinformer.models.encoder import Encoder
from kinformer.runtime.errors import KinformerError
from kinformer.stacks.sequential import Sequential
from kinformer.testing import ENCODER_MODEL_CHECKS, IMAGE_MODEL_CHECKS, EncoderModelSubject, ImageModelSubject
from tests.members import ENCODERS, IMAGES, SOUND

from .values import values_of

WITHOUT_KINDS = {
    "speech-lsh": "a token sees its bucket",
    "speech-lstm": "tokens are read in order",
    "etc": "its global tokens are a global input",
    "star": "its relay is the one global token",
    "sinkhorn": "it sorts blocks alone",
}


def build(name, **changes):
    return configure(name, "tiny", 61 if name in ENCODERS else None).replace(**changes).build()


def subject_of(name, **changes):
    shape = (7, 40) if name in SOUND else None
    kinds = name not in WITHOUT_KINDS
    return EncoderModelSubject(lambda: build(name, **changes), 61, time=41, global_tokens=kinds, shape=shape)


@pytest.mark.parametrize("check", ENCODER_MODEL_CHECKS)
@pytest.mark.parametrize("name", ENCODERS + SOUND)
def test_contract(name, check):
    ENCODER_MODEL_CHECKS[check](subject_of(name))


@pytest.mark.parametrize("check", IMAGE_MODEL_CHECKS)
@pytest.mark.parametrize("name", IMAGES)
def test_contract_of_images(name, check):
    IMAGE_MODEL_CHECKS[check](ImageModelSubject(lambda: build(name)))


@pytest.mark.parametrize("name", ENCODERS)
def test_mixers_of_texts_read_patches(name):
    mixer = configure(name, "tiny").layers[0].mixer
    config = configure("vit", "tiny", set={"layers.*.mixer": mixer})
    for check in ("rows", "both_ways"):
        IMAGE_MODEL_CHECKS[check](ImageModelSubject(config.build))


POOLINGS = ("first", "mean", "max", "gated")


@pytest.mark.parametrize(
    ("name", "pooling"),
    [
        *(("bert", pooling) for pooling in POOLINGS),
        *((name, POOLINGS[number % 4]) for number, name in enumerate(ENCODERS + SOUND) if name != "bert"),
    ],
)
def test_classes_of_texts(name, pooling):
    head = ClassificationHead.Config(classes=4, pooling=pooling)
    for check in ("rows", "padding"):
        ENCODER_MODEL_CHECKS[check](subject_of(name, head=head))
    model = build(name, head=head)
    assert model(values_of(model, 2, 9)).shape == (2, 4)


@pytest.mark.parametrize("position", ["timing", "learned_per_layer"])
def test_positions_that_enter_every_layer(position):
    config = configure("bert", "tiny", 61, {"position": position})
    for check in ("rows", "padding"):
        ENCODER_MODEL_CHECKS[check](EncoderModelSubject(config.build, 61, time=41, global_tokens=True))
    tokens = torch.full((1, 9), 7)
    y = config.build().eval()(tokens)
    assert not torch.allclose(y[0, 0], y[0, 5])


def test_classes_of_tokens():
    model = build("bert", head=TokenClassificationHead.Config(classes=3)).eval()
    valid = torch.tensor([[True] * 5 + [False] * 2, [True] * 7])
    logits = model(torch.randint(61, (2, 7)), valid=valid)
    assert logits.shape == (2, 7, 3)
    assert not logits[0, 5:].any()


@pytest.mark.parametrize("name", ENCODERS + IMAGES + SOUND)
def test_configs_and_weights_survive_files(name, tmp_path):
    from safetensors.torch import load, save

    config = configure(name, "tiny")
    assert from_dict(Encoder.Config, json.loads(json.dumps(to_dict(config))), kinds()) == config
    model, other = config.build().eval(), config.build().eval()
    other.load_state_dict(load(save({key: weight.contiguous() for key, weight in model.state_dict().items()})))
    values = values_of(model, 2, 33)
    assert torch.equal(model(values), other(values))


@pytest.mark.parametrize("name", ENCODERS + IMAGES + SOUND)
def test_checkpointing_changes_nothing(name):
    gradients = []
    for checkpoint in (False, True):
        torch.manual_seed(3)
        model = build(name, stack=Sequential.Config(checkpoint=checkpoint), dropout=0.1).train()
        torch.manual_seed(4)
        model(values_of(model, 2, 33)).square().mean().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    assert torch.equal(*gradients)


@pytest.mark.parametrize("name", ENCODERS + IMAGES + SOUND)
def test_every_weight_learns(name):
    """But the head's of classes that are not asked for, and frozen ones; a weight without a gradient would stop other
    engines."""
    model = build(name)
    model(values_of(model, 2, 33)).square().mean().backward()
    assert not [key for key, weight in model.named_parameters() if weight.requires_grad and weight.grad is None]


def test_kinds_say_which_tokens_are_global():
    model = build("longformer").double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    tokens = torch.randint(61, (1, 40))
    kinds_ = torch.full_like(tokens, LOCAL)
    kinds_[:, 0] = GLOBAL
    assert torch.equal(model(tokens, kinds=kinds_), model(tokens))
    kinds_[:, 20] = GLOBAL
    far = tokens.clone()
    far[:, 20] = (far[:, 20] + 3) % 61
    moved = [(model(one, kinds=kinds_) - model(two, kinds=kinds_)).abs() for one, two in [(tokens, far)]][0]
    assert moved[:, 39].max() > 0
    none = torch.zeros_like(kinds_)
    assert (model(tokens, kinds=none) - model(far, kinds=none))[:, 39].abs().max() == 0


def test_a_tapped_layer_and_the_last():
    model = build("bert").eval()
    encoded = model.hidden(torch.randint(61, (2, 9)), taps=(1,))
    assert torch.equal(encoded.tapped[0], encoded.long_input)


def test_refusals():
    with pytest.raises(KinformerError, match="positions end at max_length = 128"):
        kinformer.build("bert", recipe="tiny")(torch.zeros(1, 129, dtype=torch.int64))
    with pytest.raises(KinformerError, match="mask_token must be an id below"):
        configure("bert", "tiny", 61).input.replace(mask_token=61)
    with pytest.raises(KinformerError, match="tokens must be"):
        build("bert")(torch.zeros(3, dtype=torch.int64))
