"""Import of encoders of images: the same logits as transformers, for images of any size, and their preparation."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load, save_file

import kinformer
from kinformer.interop import read_checkpoint
from kinformer.runtime.errors import KinformerError

from .encoders import assert_close, edit, imported

SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "image_size": 12,
    "patch_size": 4,
    "num_channels": 2,
    "initializer_range": 0.3,
}
CLASSES = {0: "cat", 1: "dog", 2: "newt"}
WINDOWS = {
    "embed_dim": 8,
    "depths": [2, 3],
    "num_heads": [2, 4],
    "window_size": 2,
    "image_size": 24,
    "patch_size": 2,
    "num_channels": 2,
    "initializer_range": 0.3,
}
MEMBERS = {
    "vit": ("ViTConfig", "ViTForImageClassification", SIZES),
    "deit": ("DeiTConfig", "DeiTForImageClassificationWithTeacher", SIZES),
    "deit without a teacher": ("DeiTConfig", "DeiTForImageClassification", SIZES),
    "swin": ("SwinConfig", "SwinForImageClassification", WINDOWS),
    "swin, v2": ("Swinv2Config", "Swinv2ForImageClassification", WINDOWS),
}


class Peer:
    """A random model of transformers in eval mode, saved to ``folder``."""

    def __init__(self, folder, name, **changes):
        import transformers

        torch.manual_seed(0)
        config, model, sizes = MEMBERS[name]
        made = getattr(transformers, config)(**sizes | {"id2label": CLASSES} | changes)
        self.model, self.folder = getattr(transformers, model)(made).eval(), folder
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
        self.model.save_pretrained(folder)

    def __call__(self, images, **options):
        with torch.no_grad():
            return self.model.to(images.dtype)(pixel_values=images, **options).logits


def images(*size, dtype=torch.float64):
    return torch.rand(3, 2, *size, generator=torch.Generator().manual_seed(1), dtype=dtype)


@pytest.fixture(scope="module")
def peers(tmp_path_factory):
    return {name: Peer(tmp_path_factory.mktemp(name), name) for name in MEMBERS}


@pytest.fixture
def folder(peers, tmp_path):
    """A copy of ViT's checkpoint that a test may spoil."""
    return shutil.copytree(peers["vit"].folder, tmp_path / "checkpoint")


@pytest.mark.parametrize("name", MEMBERS)
def test_same_logits(peers, name, tmp_path):
    """The distances of Swin V2 are float32 there, whatever the model is."""
    model = imported(peers[name].folder, tmp_path / "run")
    for dtype, limit in ((torch.float32, 1e-5), (torch.float64, 1e-9)):
        side = 24 if name.startswith("swin") else 12
        x = images(side, side, dtype=dtype)
        with torch.no_grad():
            assert_close(model.to(dtype)(x), peers[name](x), max(limit, 1e-6) if name == "swin, v2" else limit)


@pytest.mark.parametrize(
    "changes",
    [
        {"qkv_bias": False, "layer_norm_eps": 1e-3},
        {"image_size": [12, 20], "hidden_act": "gelu_new"},
        {"hidden_dropout_prob": 0.3, "attention_probs_dropout_prob": 0.2},
    ],
)
def test_same_logits_of_other_settings(changes, tmp_path):
    peer = Peer(tmp_path / "peer", "vit", **changes)
    model, x = imported(peer.folder, tmp_path / "run").double(), images(12, 20 if "image_size" in changes else 12)
    with torch.no_grad():
        assert_close(model(x), peer(x), 1e-9)


@pytest.mark.parametrize("size", [(20, 12), (8, 32)])
@pytest.mark.parametrize("name", ["vit", "deit"])
def test_same_logits_of_images_of_another_size(peers, name, size, tmp_path):
    model, x = imported(peers[name].folder, tmp_path / "run").double(), images(*size)
    with torch.no_grad():
        assert_close(model(x), peers[name](x, interpolate_pos_encoding=True), 1e-9)


def test_images_are_prepared_as_the_checkpoint_says(peers, folder, tmp_path, capsys):
    plain = imported(folder, tmp_path / "plain").double()
    assert "has no preprocessor_config.json" in capsys.readouterr().err
    mean, std = [0.5, 0.2], [0.5, 2.0]
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_mean": mean, "image_std": std}))
    model, x = imported(folder, tmp_path / "run").double(), images(12, 12)
    assert not capsys.readouterr().err
    normal = (x - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
    with torch.no_grad():
        assert_close(model(x), peers["vit"](normal), 1e-6)
        assert torch.allclose(model(x), plain(normal)) and not torch.allclose(model(x), plain(x))
    edit(folder / "preprocessor_config.json", do_rescale=False)
    with pytest.raises(KinformerError, match="pixels are not brought to 0 to 1"):
        read_checkpoint(folder)


def test_the_run_knows_its_classes(peers, tmp_path):
    imported(peers["vit"].folder, tmp_path / "run")
    run = kinformer.open_run(tmp_path / "run")
    assert run.data["identity"]["classes"] == ["cat", "dog", "newt"]
    assert (run.task.name, run.member, run.tokenizer) == ("vision", "vit", None)


def test_a_pooler_is_left_out_and_nothing_else(folder):
    weights = load((folder / "model.safetensors").read_bytes())
    save_file(weights | {"vit.pooler.dense.bias": torch.ones(16)}, folder / "model.safetensors")
    assert not any("pooler" in name for name in read_checkpoint(folder).weights)
    save_file(weights | {"vit.encoder.layer.0.gate": torch.ones(16)}, folder / "model.safetensors")
    with pytest.raises(
        KinformerError,
        match=r"holds 'vit.encoder.layer.0.gate', which a ViT for image classification",
    ):
        read_checkpoint(folder)


@pytest.mark.parametrize(
    ("missing", "told"),
    [
        ("vit.embeddings.cls_token", "lacks the class token or the positions"),
        ("vit.encoder.layer.1.attention.attention.key.bias", "lacks encoder.layer.1.attention.attention.key.bias"),
        ("classifier.weight", "lacks head.output.weight|head.output.weight"),
    ],
)
def test_a_missing_tensor_is_named(folder, missing, told, tmp_path):
    weights = load((folder / "model.safetensors").read_bytes())
    save_file({name: weight for name, weight in weights.items() if name != missing}, folder / "model.safetensors")
    with pytest.raises(KinformerError, match=told):
        imported(folder, tmp_path / "run")


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
def test_a_weight_of_masks_is_refused(folder, dtype):
    name = "vit.encoder.layer.1.attention.attention.key.weight"
    weights = load((folder / "model.safetensors").read_bytes())
    save_file(weights | {name: weights[name].to(dtype)}, folder / "model.safetensors")
    with pytest.raises(KinformerError, match=f"{name} is {dtype}, but weights must be floating-point"):
        read_checkpoint(folder)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"patch_size": [4, 2]}, "only square patches"),
        ({"image_size": "large"}, "image_size is 'large', but must be a whole number"),
        ({"hidden_act": "tanh"}, "hidden_act is 'tanh'"),
        ({"id2label": {"0": "cat", "2": "dog"}}, "does not name the classes 0, 1, 2"),
        ({"model_type": "beit"}, "the model_type 'beit' cannot be imported; what can: .*vit"),
    ],
)
def test_settings_that_cannot_be_imported(folder, changes, told):
    edit(folder / "config.json", **changes)
    with pytest.raises(KinformerError, match=told):
        read_checkpoint(folder)


@pytest.mark.parametrize("size", [(24, 24), (22, 30), (17, 13)])
def test_windows_of_images_of_any_size(peers, size, tmp_path):
    model, x = imported(peers["swin"].folder, tmp_path / "run").double(), images(*size)
    with torch.no_grad():
        assert_close(model(x), peers["swin"](x), 1e-9)


def test_windows_of_old_files_which_hold_an_index(peers, tmp_path):
    folder = shutil.copytree(peers["swin"].folder, tmp_path / "checkpoint")
    index = {"swin.encoder.layers.0.blocks.1.attention.self.relative_position_index": torch.zeros(4, 4).long()}
    save_file(load((folder / "model.safetensors").read_bytes()) | index, folder / "model.safetensors")
    x = images(24, 24)
    with torch.no_grad():
        assert_close(imported(folder, tmp_path / "run").double()(x), peers["swin"](x), 1e-9)


@pytest.mark.parametrize("name", ["swin", "swin, v2"])
def test_wider_windows_and_no_bias(name, tmp_path):
    peer = Peer(tmp_path / "peer", name, window_size=3, qkv_bias=False, mlp_ratio=2.0)
    model, x = imported(peer.folder, tmp_path / "run").double(), images(24, 24)
    with torch.no_grad():
        assert_close(model(x), peer(x), 1e-9 if name == "swin" else 1e-6)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"use_absolute_embeddings": True}, "use_absolute_embeddings is True"),
        ({"depths": 4}, "depths is 4, but must be a list"),
        ({"num_heads": [2]}, "depths are of 2 stages, but num_heads of 1"),
        ({"layer_norm_eps": 1e-3}, "only 1e-05 can be imported"),
        ({"pretrained_window_sizes": [7, 7]}, "biases of one window only"),
    ],
)
def test_windows_that_cannot_be_imported(peers, changes, told, tmp_path):
    folder = shutil.copytree(peers["swin"].folder, tmp_path / "checkpoint")
    edit(folder / "config.json", **changes)
    with pytest.raises(KinformerError, match=told):
        read_checkpoint(folder)
