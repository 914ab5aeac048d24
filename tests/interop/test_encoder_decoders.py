"""Import of T5, T5 1.1, mT5 and BART: the numbers of transformers, streamed and padded, and what is refused."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import kinformer
from kinformer.core.state import detach
from kinformer.generation.beam import Search, beam_search
from kinformer.interop.checkpoint import ARCHITECTURES, read_checkpoint
from kinformer.runtime.errors import KinformerError
from tests.interop.decoders import assert_close

VOCABULARY = 61
T5 = {
    "vocab_size": VOCABULARY, "d_model": 16, "d_kv": 6, "d_ff": 24, "num_layers": 3, "num_decoder_layers": 2,
    "num_heads": 4, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 12, "dropout_rate": 0.0,
    "decoder_start_token_id": 0, "initializer_factor": 0.5,
}  # fmt: skip
BART = {
    "vocab_size": VOCABULARY, "d_model": 16, "encoder_layers": 3, "decoder_layers": 2, "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 20, "encoder_attention_heads": 2, "decoder_attention_heads": 4, "max_position_embeddings": 40,
    "dropout": 0.0, "forced_eos_token_id": None,
}  # fmt: skip
GATED = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
KINDS = {
    "t5": ("T5", T5),
    "t5 1.1": ("T5", T5 | GATED),
    "t5 1.1 with a tied head": ("T5", T5 | GATED),
    "mt5": ("MT5", T5),
    "umt5": ("UMT5", T5 | {"feed_forward_proj": "relu"}),
    "bart": ("Bart", BART),
    "mbart": ("MBart", BART | {"scale_embedding": True, "decoder_start_token_id": 5}),
    "bart with scaled embeddings": ("Bart", BART | {"scale_embedding": True, "activation_function": "relu"}),
}


class Pair:
    """A model of transformers with random weights, its folder, and the model imported from that."""

    def __init__(self, name, folder):
        import transformers

        prefix, settings = KINDS[name]
        self.folder, self.kind = folder / "theirs", prefix.lower()
        torch.manual_seed(0)
        config = getattr(transformers, f"{prefix}Config")(**settings)
        self.theirs = getattr(transformers, f"{prefix}ForConditionalGeneration")(config).eval()
        if name == "t5 1.1":
            self.theirs.lm_head.weight = torch.nn.Parameter(torch.zeros(VOCABULARY, 16))
        with torch.no_grad():
            for parameter in self.theirs.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
            if prefix.endswith("Bart"):
                self.theirs.final_logits_bias.add_(torch.randn(self.theirs.final_logits_bias.shape))
        self.theirs.save_pretrained(self.folder)
        self.done = kinformer.import_checkpoint(self.folder, folder / "run")
        self.ours = kinformer.load(folder / "run")
        generator = torch.Generator().manual_seed(3)
        self.source = torch.randint(3, VOCABULARY, (3, 20), generator=generator)
        self.target = torch.randint(3, VOCABULARY, (3, 18), generator=generator)
        self.valid = torch.arange(20) < torch.tensor([[20], [13], [4]])

    def logits(self, target=None):
        """Their logits of the target over the padded sources."""
        target = self.target if target is None else target
        return self.theirs(input_ids=self.source, attention_mask=self.valid.long(), decoder_input_ids=target).logits

    def begin(self):
        return self.ours.begin(self.source, self.valid)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Pairs by their name in KINDS, each made once."""
    made = {}

    def pair(name):
        if name not in made:
            made[name] = Pair(name, tmp_path_factory.mktemp("pair"))
        return made[name]

    return pair


@torch.no_grad()
def check_logits(pair):
    assert_close(pair.ours(pair.target, pair.begin())[0], pair.logits())


def check_gradients(pair):
    """The gradient of one loss with respect to each weight, and all weights but a constant bias have one."""
    for model in (pair.ours, pair.theirs):
        model.zero_grad()
        logits = pair.logits() if model is pair.theirs else model(pair.target, pair.begin())[0]
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), pair.target[:, 1:].flatten()).backward()
    form = ARCHITECTURES[pair.kind]
    model = form.read_config(pair.theirs.config.to_dict(), pair.folder)
    theirs = {name: parameter.grad for name, parameter in pair.theirs.named_parameters()}
    model["head"]["tied"] = "lm_head.weight" not in theirs
    wanted = form.read_tensors(theirs, model, pair.folder)
    ours = {name: parameter.grad for name, parameter in pair.ours.named_parameters() if name != "head.bias"}
    assert ours.keys() == wanted.keys() - {"head.bias"}
    for name, gradient in ours.items():
        assert_close(gradient, wanted[name])


@torch.no_grad()
def check_streaming(pair):
    """Chunks of any length are the whole."""
    state, parts = pair.begin(), []
    for part in pair.target.split([1, 7, 2, 8], dim=1):
        logits, state = pair.ours(part, state)
        parts.append(logits)
        state = detach(state)
    assert_close(torch.cat(parts, dim=1), pair.logits())


@torch.no_grad()
def check_padding(pair):
    """Targets of unlike length, padded on either side, are each what theirs is alone."""
    lengths = torch.tensor([[18], [5], [11]])
    for left in (False, True):
        valid = torch.arange(18) < lengths
        valid = valid.flip(1) if left else valid
        logits = pair.ours(pair.target.masked_fill(~valid, 0), pair.begin(), valid=valid)[0]
        for row, mask in enumerate(valid):
            alone = pair.target[:, mask]
            assert_close(logits[row][mask], pair.logits(alone)[row])


def check_generation(pair):
    """Greedy tokens are theirs, up to the end of a text."""
    tokens = pair.done.run.config.input
    search = Search(tokens.bos_token, tokens.eos_token, beam=1)
    never = [search.bos] if search.bos != search.eos else None  # as in our search
    settings = {"max_new_tokens": 12, "do_sample": False, "num_beams": 1, "suppress_tokens": never}
    theirs = pair.theirs.generate(pair.source, attention_mask=pair.valid.long(), **settings)[:, 1:]
    best = beam_search(pair.ours, pair.begin(), search, [20] * 3).best
    for row, hypothesis in zip(theirs.tolist(), best, strict=True):
        row = row[: row.index(search.eos)] if search.eos in row else row
        assert row == hypothesis.tokens[:12]


CHECKS = {
    "logits": check_logits,
    "gradients": check_gradients,
    "streaming": check_streaming,
    "padding": check_padding,
    "generation": check_generation,
}


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", KINDS)
def test_equal(name, check, pairs):
    CHECKS[check](pairs(name))


def test_what_a_run_is(pairs):
    run = pairs("t5 1.1").done.run
    assert (run.member, run.task.name, run.config.head.tied) == ("vanilla", "translate", False)
    assert pairs("t5").done.run.config.head.scale == 0.25 and pairs("mt5").done.run.config.head.scale is None
    assert pairs("bart").ours.max_length == 40


def edited(pair, tmp_path, config=None, change=None):
    """A copy of the pair's folder with other settings or tensors."""
    folder = shutil.copytree(pair.folder, tmp_path / "copy")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | (config or {})))
    if change is not None:
        tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
        change(tensors)
        save_file(tensors, folder / "model.safetensors")
    return folder


def test_files_of_older_versions(pairs, tmp_path):
    """Their config has no word on scaled outputs; the table of ids stands thrice, a table of distances does nothing."""

    def change(tensors):
        for name in ("encoder.embed_tokens", "decoder.embed_tokens"):
            tensors[f"{name}.weight"] = tensors["shared.weight"].clone()
        unused = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
        tensors[unused] = torch.ones(8, 4)

    pair = pairs("t5 1.1")
    folder = edited(pair, tmp_path, {"tie_word_embeddings": False}, change)
    settings = json.loads((folder / "config.json").read_text())
    del settings["scale_decoder_outputs"], settings["relative_attention_max_distance"]
    (folder / "config.json").write_text(json.dumps(settings))
    result = read_checkpoint(folder)
    assert result.model["head"] == {"kind": "language", "tied": False, "scale": None}
    assert all(torch.equal(one, result.weights[name]) for name, one in pair.ours.state_dict().items())
    assert result.model["layers"][0]["mixer"]["position"]["max_distance"] == 128


REFUSED = {
    "another feed-forward": ("t5", {"feed_forward_proj": "gated-relu"}, None, "feed_forward_proj is 'gated-relu'"),
    "no start": ("t5", {"decoder_start_token_id": None}, None, "decoder_start_token_id is None"),
    "fewer layers": ("t5", {"num_layers": 2}, None, "holds 'encoder.block.2|holds 'block.2"),
    "other buckets": ("t5", {"relative_attention_num_buckets": 16}, None, "is not what config.json says"),
    "no table of distances": (
        "t5", {}, lambda t: t.pop("decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"), "lacks",
    ),
    "an encoder alone": (
        "t5", {}, lambda t: [t.pop(name) for name in [*t] if name.startswith("decoder.")],
        r"lacks norm.weight and \d+ other weights, so it holds a part of a model; import the whole model",
    ),
    "two tables": ("t5", {}, lambda t: t.update({"decoder.embed_tokens.weight": torch.ones(61, 16)}), "differ, but"),
    "no table": ("bart", {}, lambda t: t.pop("model.shared.weight"), "lacks shared.weight"),
    "another head": ("bart", {}, lambda t: t.update({"qa_outputs.weight": torch.ones(2, 16)}), "holds 'qa_outputs"),
    "an output matrix": ("bart", {}, lambda t: t.update({"lm_head.weight": torch.ones(61, 16)}), "differ, but"),
    "no language": ("mbart", {"decoder_start_token_id": None}, None, "decoder_start_token_id is None"),
    "one table": (
        "umt5", {}, lambda t: t.pop("decoder.block.1.layer.0.SelfAttention.relative_attention_bias.weight"), "lacks",
    ),
    "norms before": ("bart", {"normalize_before": True}, None, "normalize_before is True"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "config", "change", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(name, config, change, message, pairs, tmp_path):
    folder = edited(pairs(name), tmp_path, config, change)
    with pytest.raises(KinformerError, match=message) as refusal:
        kinformer.import_checkpoint(folder, tmp_path / "run")
    assert str(folder) in str(refusal.value) and not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_a_head_for_classes_is_refused_by_name(name, tmp_path):
    import transformers

    prefix, settings = KINDS[name]
    config = getattr(transformers, f"{prefix}Config")(**settings)
    getattr(transformers, f"{prefix}ForSequenceClassification")(config).save_pretrained(tmp_path / "theirs")
    with pytest.raises(KinformerError, match=r"a head for classes; of \w+ only a model that writes texts"):
        kinformer.import_checkpoint(tmp_path / "theirs", tmp_path / "run")
