"""A model of one member that begins with a run of another: what it takes, what is new, and that it is told."""

import json

import pytest
import torch

import kinformer
from kinformer.core.config import override
from kinformer.family.build import configure
from kinformer.family.kinds import kinds
from kinformer.lab.cli.main import main
from kinformer.lab.runs.inheritance import inheritance, inherited_config, places_of
from kinformer.lab.runs.run import open_run
from kinformer.runtime.errors import KinformerError

RUN = "runs/a"


def begin(base, recipe, changes=None):
    """A random model of the config ``base`` and one of ``recipe`` that begins with it, in eval mode and float64, with
    what was inherited."""
    torch.manual_seed(0)
    old = base.build()
    with torch.no_grad():
        for parameter in old.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    config = override(inherited_config(base, recipe, RUN), changes or {}, kinds())
    result, new = inheritance(base, config, RUN), config.build()
    new.load_state_dict(result.weights(old.state_dict(), new.state_dict()))
    return old.double().eval(), new.double().eval(), result


def logits(model, length=8):
    tokens = torch.randint(256, (2, length), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(tokens)[0]


def close(a, b, tolerance=1e-12):
    return (a - b).abs().max() < tolerance


def test_a_window_as_long_as_the_text_computes_what_the_run_does():
    """rope -> local: equal within the window, another function beyond it."""
    old, new, result = begin(configure("rope", "tiny"), configure("local", "tiny"))
    assert result.new == result.left == result.partly_new == () and result.facts["copied"] == len(old.state_dict())
    assert new.config.layers[0].mixer.pattern.window == 8
    assert close(logits(new), logits(old)) and not close(logits(new, 9)[:, -1], logits(old, 9)[:, -1], 1e-6)


def test_sparse_attention_begins_with_dense_latent_attention():
    """mla -> dsa: equal while the text is not longer than topk; the indexer is new."""
    old, new, result = begin(configure("mla", "tiny"), configure("dsa", "tiny"))
    assert all(".index_" in name for name in result.new) and result.left == result.partly_new == ()
    assert close(logits(new), logits(old)) and not close(logits(new, 9)[:, -1], logits(old, 9)[:, -1], 1e-6)


def test_linear_attention_takes_queries_keys_and_values():
    """gpt -> linear-transformer: the weights of the projections are the run's, under another name."""
    old, new, result = begin(configure("gpt", "tiny"), configure("linear-transformer", "tiny"))
    assert result.new == () and result.left == ("position.table",)
    for theirs, ours in zip(old.stack.layers, new.stack.layers, strict=True):
        assert torch.equal(ours.mixer.qkv.weight, theirs.mixer.projection.qkv.weight)
        assert torch.equal(ours.mixer.qkv.bias, theirs.mixer.projection.qkv.bias)
        assert torch.equal(ours.mixer.out.weight, theirs.mixer.out.weight)


def test_the_delta_rule_takes_head_by_head():
    """Its authors' rows are q, k, v and beta of one head after the other; beta is new."""
    old, new, result = begin(configure("gpt", "tiny"), configure("fast-weights", "tiny"))
    assert result.new == () and len(result.partly_new) == 4 and result.facts["numbers"] > result.facts["copied_numbers"]
    theirs = old.stack.layers[1].mixer.projection.qkv.weight.view(3, 2, 16, 32)
    ours = new.stack.layers[1].mixer.qkv.weight.view(2, 49, 32)
    assert torch.equal(ours[:, :48].reshape(2, 3, 16, 32), theirs.transpose(0, 1))
    assert result.facts["copied_numbers"] == result.facts["numbers"] - 2 * 2 * 33  # of weights and bias, by layer, head


def test_a_shared_key_becomes_the_key_of_its_query_heads():
    """A grouped projection becomes a full one: the same attention."""
    grouped = {"layers.*.mixer.projection": {"kind": "grouped", "num_kv_heads": 1}}
    full = {"layers.*.mixer.projection": "multi_head"}
    old, new, result = begin(configure("gpt", "tiny", set=grouped), configure("gpt", "tiny"), full)
    assert result.new == () and close(logits(new), logits(old))


def test_the_queries_of_lsh_are_the_keys_of_the_run():
    old, new, result = begin(configure("gpt", "tiny"), configure("reformer", "tiny"), {"head.tied": True})
    qv, qkv = new.stack.layers[0].mixer.qv.weight, old.stack.layers[0].mixer.projection.qkv.weight
    assert torch.equal(qv, qkv[32:]) and all("rotations" in name for name in result.new)


def test_heads_of_exits_begin_with_the_embeddings_of_a_tied_head():
    old, new, result = begin(configure("gpt", "tiny"), configure("depth-adaptive", "tiny"))
    table = old.input.embedding.weight
    assert [torch.equal(head.output.weight, table) for head in (*new.exit_heads, new.head)] == [True] * len(
        new.config.layers
    )


def test_what_shares_a_name_alone_is_new():
    """The gate of memories is no gate of outputs, and a table of T5's is not one of Transformer-XL's."""
    for base, recipe in (("gated-deltanet", "memorizing"), ("t5", "transformer-xl")):
        config = configure(base, "tiny")
        result = inheritance(config, inherited_config(config, configure(recipe, "tiny"), RUN), RUN)
        assert not any("gate" in name or "shared" in name for name in result.origins)
        assert any("gate" in name or "shared" in name for name in result.new)
    same = inheritance(*[configure("t5", "tiny")] * 2, RUN)
    assert same.origins["stack.shared.0.table"] == "stack.shared.0.table" and same.new == same.left == ()


def test_linformer_without_a_projection_along_the_length_would_be_bert():
    old, new, result = begin(configure("bert", "tiny"), configure("linformer", "tiny"))
    assert result.new == ("stack.shared.0.weight",) and result.left == ()
    theirs, ours = old.stack.layers[0].mixer.projection.qkv.weight, new.stack.layers[0].mixer
    assert torch.equal(torch.cat([ours.query.weight, ours.key.weight, ours.value.weight]), theirs)


def test_the_body_of_the_run_stays():
    """Feed-forwards, norms, heads and depth; one layer of a deeper model too has the memories."""
    body = {"feed_forward": "swiglu", "norm": "rms_norm", "residual": "sandwich"}
    base = configure("gpt", "small", set={"layers": 8} | {f"layers.*.{name}": kind for name, kind in body.items()})
    config = inherited_config(base, configure("memorizing", "small"), RUN)
    assert [layer.mixer.kind for layer in config.layers].count("memorizing") == 1
    assert config.layers[4].mixer.kind == "memorizing" and config.layers[4].mixer.bias
    for name in body:
        assert all(getattr(layer, name) == getattr(base.layers[0], name) for layer in config.layers)
    for member, kind in (("gtrxl", "gated"), ("post-ln", "post")):
        config = inherited_config(configure("gpt", "tiny"), configure(member, "tiny"), RUN)
        assert config.layers[0].residual.kind == kind
    assert places_of(configure("gated-deltanet", "hybrid").layers, 4) == [0, 1, 2, 3]


def test_every_member_that_can_begins_with_the_plain_one():
    """Or is refused in one sentence; whatever begins computes finite logits."""
    plain = configure("gpt", "tiny")
    refused = set()
    for name in kinformer.members():
        recipe = configure(name.name, "tiny")
        if recipe.kind != "decoder" or recipe.input.kind != "tokens":
            continue
        try:
            config = inherited_config(plain, recipe, RUN)
            result, model = inheritance(plain, config, RUN), config.build()
        except KinformerError as error:
            assert str(error).count("\n") == 0
            refused.add(name.name)
            continue
        assert "input.embedding.weight" in result.origins
        assert len(result.origins) > 9 or name.name == "sha-rnn"  # whose layers have all other names
        assert {part.mixer.kind for part in config.layers} == {part.mixer.kind for part in recipe.layers}
        assert logits(model.eval()).isfinite().all()
    assert refused <= {"complex-order", "nsa"}  # whose heads choose together, as they share keys


@pytest.fixture(scope="module")
def plain(tmp_path_factory, text_file):
    """A trained plain decoder."""
    folder = tmp_path_factory.mktemp("runs") / "gpt"
    assert train(folder, "gpt", text_file, "--lr", "0.01") == 0
    return folder


def train(folder, member, text_file, *more):
    sizes = ["--recipe", "tiny", "--steps", "2", "--length", "16", "--batch-size", "2", "--threads", "1"]
    return main(["train", member, *sizes, "--data", str(text_file), "--out", str(folder), *map(str, more)])


def test_training_begins_with_the_weights_tells_them_and_resumes(plain, tmp_path, text_file, capsys):
    for member, new in (("memorizing", "mixer.scale"), ("transformer-xl", "mixer.position.projection.weight")):
        out = tmp_path / member
        capsys.readouterr()
        assert train(out, member, text_file, "--init", plain, "--lr", "1e-30", "--segments") == 0
        told = capsys.readouterr().err
        assert f"begins with {plain} (gpt): " in told and new in told and "left behind: position.table" in told
        inherited, theirs, ours = open_run(out).data["inherited"], kinformer.load(plain), kinformer.load(out)
        assert inherited["member"] == "gpt" and inherited["left"] == ["position.table"]
        assert torch.equal(ours.state_dict()["input.embedding.weight"], theirs.state_dict()["input.embedding.weight"])
        assert main(["train", member, "--out", str(out), "--resume", "--steps", "3", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["steps"] == 3


def test_a_run_whose_ids_mean_other_things_is_refused(plain, tmp_path, capsys):
    arguments = ["--task", "recall", "--init", str(plain), "--steps", "1", "--out", str(tmp_path / "out")]
    assert main(["train", "rope", *arguments]) == 2
    told = capsys.readouterr().err
    assert "mean other things" in told or "keeps its width and its vocabulary" in told
    assert not (tmp_path / "out").exists()
