"""Import of ModernBERT: the numbers of transformers at every layer, padded, and what is refused."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import kinformer
from kinformer.interop.checkpoint import ARCHITECTURES, read_checkpoint
from kinformer.runtime.errors import KinformerError
from tests.interop.decoders import assert_close

SIZES = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 4,
    "max_position_embeddings": 64, "local_attention": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "cls_token_id": 1, "sep_token_id": 2, "initializer_range": 0.3, "attn_implementation": "eager",
}  # fmt: skip
CHANGES = {
    "as it is": {},
    "with biases": {"attention_bias": True, "mlp_bias": True, "hidden_activation": "gelu_pytorch_tanh"},
    "with other kinds of layers": {"layer_types": ["sliding_attention", "full_attention"] * 2},
}
LENGTHS = (30, 17, 4)


class Pair:
    """A model of transformers with random weights, its folder, and the model imported from that."""

    def __init__(self, folder, kind="ForMaskedLM", **changes):
        import transformers

        torch.manual_seed(0)
        config = transformers.ModernBertConfig(**SIZES | changes)
        self.theirs = getattr(transformers, f"ModernBert{kind or 'Model'}")(config).eval()
        with torch.no_grad():
            for parameter in self.theirs.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
        self.folder = folder / "theirs"
        self.theirs.save_pretrained(self.folder)
        self.done = kinformer.import_checkpoint(self.folder, folder / "run")
        self.ours = kinformer.load(folder / "run")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Pairs by their name in CHANGES, each made once."""
    made = {}

    def pair(name):
        if name not in made:
            made[name] = Pair(tmp_path_factory.mktemp("pair"), **CHANGES[name])
        return made[name]

    return pair


def texts(left=False):
    valid = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    valid = valid.flip(1) if left else valid
    ids = torch.randint(3, 61, valid.shape, generator=torch.Generator().manual_seed(3))
    return ids.masked_fill(~valid, 0), valid


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("name", CHANGES)
@torch.no_grad()
def test_same_logits(name, left, pairs):
    """In a padded batch and alone."""
    pair, (ids, valid) = pairs(name), texts(left)
    logits = pair.ours(ids, valid=valid)
    assert_close(logits[valid], pair.theirs(ids, attention_mask=valid.long()).logits[valid])
    for row, mask, result in zip(ids, valid, logits, strict=True):
        assert_close(result[mask], pair.theirs(row[mask][None]).logits[0])


@torch.no_grad()
def test_same_hidden_states_at_every_layer(pairs):
    pair, (ids, valid) = pairs("as it is"), texts()
    result = pair.ours.hidden(ids, valid=valid, taps=range(3))
    theirs = pair.theirs(ids, attention_mask=valid.long(), output_hidden_states=True).hidden_states
    for ours, want in zip((*result.tapped, result.long_input), (*theirs[1:4], theirs[-1]), strict=True):
        assert_close(ours[valid], want[valid])


@pytest.mark.parametrize("name", CHANGES)
def test_same_gradients(name, pairs):
    pair, (ids, valid) = pairs(name), texts()
    for model in (pair.ours, pair.theirs):
        model.zero_grad()
        logits = model(ids, valid=valid) if model is pair.ours else model(ids, attention_mask=valid.long()).logits
        torch.nn.functional.cross_entropy(logits[valid], ids[valid].flip(0)).backward()
    form = ARCHITECTURES["modernbert"]
    model = form.read_config(pair.theirs.config.to_dict(), pair.folder)
    theirs = {name: parameter.grad for name, parameter in pair.theirs.named_parameters()}
    wanted = form.read_tensors(theirs, model, pair.folder)
    ours = {name: parameter.grad for name, parameter in pair.ours.named_parameters()}
    assert ours.keys() == wanted.keys()
    for name, gradient in ours.items():
        assert_close(gradient, wanted[name])


def test_what_a_run_is(pairs):
    run = pairs("as it is").done.run
    assert (run.member, run.task.name, run.training) == ("bert", "mlm", {"length": 64})
    assert (run.config.input.bos_token, run.config.input.eos_token) == (1, 2)
    assert [layer.mixer.position.base for layer in run.config.layers] == [160_000.0, 10_000.0, 10_000.0, 160_000.0]
    assert run.config.layers[1].mixer.pattern.window == 4


@torch.no_grad()
def test_a_model_without_a_head(tmp_path):
    pair, (ids, valid) = Pair(tmp_path, ""), texts()
    assert any("the masked-language head is a new one" in note for note in pair.done.notes)
    hidden = pair.theirs(ids, attention_mask=valid.long()).last_hidden_state
    assert_close(pair.ours.hidden(ids, valid=valid).long_input[valid], hidden[valid])


def edited(pair, tmp_path, config=None, change=None, left_out=()):
    """A copy of the pair's folder with other settings or tensors."""
    folder = shutil.copytree(pair.folder, tmp_path / "copy")
    path = folder / "config.json"
    settings = json.loads(path.read_text()) | (config or {})
    path.write_text(json.dumps({name: value for name, value in settings.items() if name not in left_out}))
    if change is not None:
        tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
        save_file(change(tensors), folder / "model.safetensors")
    return folder


def test_files_of_older_versions(pairs, tmp_path):
    pair = pairs("as it is")
    older = {"global_rope_theta": 160_000.0, "local_rope_theta": 10_000.0, "global_attn_every_n_layers": 3}
    decoder = {"decoder.weight": pair.theirs.decoder.weight.detach().clone()}
    folder = edited(pair, tmp_path, older, lambda tensors: tensors | decoder, ("layer_types", "rope_parameters"))
    result, run = read_checkpoint(folder), read_checkpoint(pair.folder)
    assert result.model == run.model
    assert all(torch.equal(one, result.weights[name]) for name, one in pair.ours.state_dict().items())


@pytest.mark.parametrize("pooling", ["cls", "mean"])
@torch.no_grad()
def test_classes_of_texts(pooling, tmp_path):
    """The logits of texts padded on the right, and the names of the classes."""
    names = {"id2label": {0: "a", 1: "b", 2: "c"}, "label2id": {"a": 0, "b": 1, "c": 2}}
    pair = Pair(tmp_path, "ForSequenceClassification", classifier_pooling=pooling, **names)
    ids, valid = texts()
    assert_close(pair.ours(ids, valid=valid), pair.theirs(ids, attention_mask=valid.long()).logits)
    assert (pair.done.run.task.name, read_checkpoint(pair.folder).classes) == ("classify", ("a", "b", "c"))
    for change, message in (
        ({"problem_type": "regression"}, "problem_type is 'regression', but only"),
        ({"architectures": ["ModernBertForTokenClassification"]}, "only ModernBertForSequenceClassification can be"),
        ({"id2label": {"0": "a"}}, "the head has 1 class, so it predicts a number"),
        ({"classifier_pooling": "max"}, "classifier_pooling is 'max', but only cls, mean can be imported"),
    ):
        with pytest.raises(KinformerError, match=message):
            read_checkpoint(edited(pair, tmp_path / str(len(message)), change))


REFUSED = {
    "norms with biases": ({"norm_bias": True}, None, "norm_bias is True, but only False"),
    "another activation": ({"hidden_activation": "relu"}, None, "hidden_activation is 'relu'"),
    "other kinds of layers": ({"layer_types": ["chunked_attention"] * 4}, None, "layer_types must be a list of 4"),
    "classes": (
        {}, lambda tensors: tensors | {"classifier.weight": torch.ones(2, 32)}, "the head is a classifier, but arch",
    ),
    "fewer layers": ({"num_hidden_layers": 2, "layer_types": None}, None, "language model of 2 layers does not have"),
    "another output": (
        {}, lambda tensors: tensors | {"decoder.weight": torch.ones(61, 32)}, "differs from the embedding",
    ),
    "half a head": (
        {}, lambda tensors: {name: one for name, one in tensors.items() if name != "head.dense.weight"}, "lacks",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("config", "change", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(config, change, message, pairs, tmp_path):
    folder = edited(pairs("as it is"), tmp_path, config, change)
    with pytest.raises(KinformerError, match=message) as refusal:
        kinformer.import_checkpoint(folder, tmp_path / "run")
    assert str(folder) in str(refusal.value) and not (tmp_path / "run").exists()
