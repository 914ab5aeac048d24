"""The task mae: the loss of an implementation of others, what the model can and cannot see, masks, fine-tuning."""

import numpy as np
import pytest
import torch

import kinformer
from kinformer.family.build import configure
from kinformer.lab.tasks.mae import (
    MaeBatch,
    MaskedPatches,
    _pixels,
    fitted_to_masks,
    masked_of,
    predict_patches,
    seen_patches,
    targets_of,
)
from kinformer.lab.tasks.options import MaeOptions
from kinformer.runtime.errors import KinformerError

QUICK = {"recipe": "tiny", "steps": 2, "batch_size": 4, "threads": 1, "device": "cpu", "quiet": True}
pytestmark = pytest.mark.usefixtures("cache")


def build(**changes):
    torch.manual_seed(0)
    config = configure("vit", "tiny")
    return kinformer.build("vit", recipe="tiny", set=fitted_to_masks(config, None) | changes).double().eval()


def batch_of(rows=3):
    images = torch.rand(rows, 3, 32, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return MaeBatch(images, seen_patches(64, 0.75, np.arange(rows), 7))


def peer_of(model):
    """The same model as one of transformers."""
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTMAEConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128, image_size=32, patch_size=4,
        decoder_num_attention_heads=1, decoder_hidden_size=16, decoder_num_hidden_layers=1, layer_norm_eps=1e-6,
        decoder_intermediate_size=64, norm_pix_loss=True,
    )  # fmt: skip
    peer, ours = transformers.ViTMAEForPreTraining(config).eval(), model.state_dict()
    peer.decoder.initialize_weights(64)  # the fixed positions, which are zeros before
    peer = peer.double()
    names = {"feed_forward.up": "mlp.fc1", "feed_forward.down": "mlp.fc2", "mixer.out": "attention.o_proj",
             "mixer_residual.norm": "layernorm_before", "feed_forward_residual.norm": "layernorm_after"}  # fmt: skip
    theirs = {}
    for place, layers in (("stack.layers.", "vit.layers."), ("head.layers.", "decoder.decoder_layers.")):
        for name in [name for name in ours if name.startswith(place)]:
            number, _, inner = name.removeprefix(place).partition(".")
            part, _, kind = inner.rpartition(".")
            if part == "mixer.projection.qkv":
                for letter, piece in zip("qkv", ours[name].chunk(3), strict=True):
                    theirs[f"{layers}{number}.attention.{letter}_proj.{kind}"] = piece
            else:
                theirs[f"{layers}{number}.{names[part]}.{kind}"] = ours[name]
    for kind in ("weight", "bias"):
        pixels = ours[f"head.output.{kind}"].unflatten(0, (3, 16))
        theirs |= {
            f"vit.layernorm.{kind}": ours[f"norm.{kind}"],
            f"decoder.decoder_embed.{kind}": ours[f"head.entrance.{kind}"],
            f"decoder.decoder_norm.{kind}": ours[f"head.norm.{kind}"],
            # pixels are [rows, columns, channels] there
            f"decoder.decoder_pred.{kind}": pixels.transpose(0, 1).flatten(0, 1),
        }  # fmt: skip
    theirs |= {
        "vit.embeddings.cls_token": ours["input.tokens"][None],
        "vit.embeddings.position_embeddings": ours["input.positions"][None],
        "vit.embeddings.patch_embeddings.projection.weight": ours["input.projection.weight"].view(32, 3, 4, 4),
        "vit.embeddings.patch_embeddings.projection.bias": ours["input.projection.bias"],
        "decoder.mask_token": ours["head.mask"][None, None],
        "decoder.decoder_pos_embed": peer.state_dict()["decoder.decoder_pos_embed"],
    }
    peer.load_state_dict(theirs)
    return peer


def test_the_loss_is_that_of_transformers():
    model, batch = build(), batch_of()
    loss, metrics, _ = MaskedPatches(MaeOptions())(model, batch, None, 0.0)
    masked = masked_of(batch, 64)
    # The patches of least noise are seen there.
    with torch.no_grad():
        theirs = peer_of(model)(pixel_values=batch.images, noise=masked.double() + 1e-3 * torch.rand(3, 64).double())
    torch.testing.assert_close(loss, theirs.loss, rtol=0, atol=1e-6)  # its positions are float32
    assert metrics["predicted"] == 3 * 48 and metrics["error"].item() == pytest.approx(144 * loss.item())


def test_the_model_sees_the_seen_patches_alone():
    model, batch = build(), batch_of(1)
    want = predict_patches(model, batch)
    for patch in range(64):
        row, column = 4 * (patch // 8), 4 * (patch % 8)
        images = batch.images.clone()
        images[:, :, row : row + 4, column : column + 4] += 1
        got = predict_patches(model, batch._replace(images=images))
        assert torch.equal(got, want) == (patch not in batch.seen)


def test_with_all_patches_seen_it_is_the_whole_model():
    model, batch = build(), batch_of()
    everything = torch.arange(64).expand(3, -1)
    torch.testing.assert_close(
        predict_patches(model, batch._replace(seen=everything)), model(batch.images), rtol=0, atol=1e-12
    )
    chosen = torch.arange(65).expand(3, -1)
    torch.testing.assert_close(
        model.hidden_of(batch.images, chosen), model.hidden(batch.images).long_input, rtol=0, atol=1e-12
    )


def test_masks_are_even_and_of_the_row_alone():
    seen = seen_patches(16, 0.75, np.arange(4000), 3)
    assert seen.shape == (4000, 4) and bool((seen.diff(dim=1) > 0).all())
    counts = seen.flatten().bincount(minlength=16)
    assert counts.min() > 880 and counts.max() < 1120  # 1000 of each, four deviations of 27
    assert torch.equal(seen_patches(16, 0.75, np.arange(7, 9), 3), seen[7:9])


@pytest.mark.parametrize("raw", [False, True])
def test_targets_and_back(raw):
    model, batch = build(), batch_of(2)
    targets = targets_of(model, batch.images, raw)
    if not raw:
        patch = batch.images[0, :, :4, 4:8].flatten()
        want = (patch - patch.mean()) / (patch.var() + 1e-6).sqrt()
        torch.testing.assert_close(targets.values[0, 1], want)
    pixels = targets.values * targets.scale + targets.mean
    images = torch.from_numpy(_pixels(model.input, pixels, batch.images))
    assert torch.equal(images, (255 * batch.images).round().to(torch.uint8))


def test_a_classifier_begins_with_a_run(tmp_path):
    run = kinformer.train("vit", task="mae", out=tmp_path / "mae", **QUICK)
    tuned = kinformer.train("vit", init=str(run.folder), out=tmp_path / "classes", **(QUICK | {"recipe": None}))
    assert tuned.data["inherited"]["new"] == ["head.output.weight", "head.output.bias"]
    assert kinformer.evaluate(tuned.folder).metrics["accuracy"] >= 0


@pytest.mark.parametrize(
    ("member", "options", "words"),
    [
        ("swin", {}, "'windows' here goes by neighbours"),
        ("vit", {"masked": 0.01}, "leaves none of 16 patches"),
        ("vit", {"augment": "mixup"}, "mixup"),
        ("vit", {"set": {"head": "pooled"}}, "predicts no pixels"),
    ],
)
def test_what_cannot_be_is_refused(member, options, words, tmp_path):
    with pytest.raises(KinformerError, match=words):
        kinformer.train(member, task="mae", out=tmp_path / "run", **QUICK, **options)
