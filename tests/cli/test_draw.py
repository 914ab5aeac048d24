"""``kinformer draw``: the right cells, told and on the picture; files that are what their names say."""

import json

import numpy as np
import pytest
import torch

import kinformer
from kinformer.family.build import configure
from kinformer.lab.drawing.options import DrawOptions
from kinformer.lab.drawing.panels import describe, grid, numbered, parts_of, raster, shares_of
from kinformer.lab.drawing.runs import chosen_blocks, text_by_buckets, text_by_exits, text_by_experts, tokens_of
from kinformer.lab.runs.run import open_run
from kinformer.parts.patterns.blocks import BigBird, Image2D
from kinformer.parts.patterns.sequence import Causal, Complement, Intersection, Local, Strided, Union

pytest.importorskip("matplotlib")


@pytest.fixture
def drawn(cli, tmp_path, monkeypatch):
    """Draws in an empty folder; returns what --json tells and the file's bytes."""
    monkeypatch.chdir(tmp_path)

    def draw(*arguments):
        code, out, err = cli("draw", *arguments, "--json")
        assert code == 0, err
        told = json.loads(out)
        return told, (tmp_path / told["out"]).read_bytes()

    return draw


def test_a_pattern_with_options(drawn):
    told, data = drawn("local", "--set", "window=8", "--length", 40)
    assert data.startswith(b"\x89PNG")
    assert (told["kind"], told["out"], told["drawn"]) == ("pattern", "local.png", 1)
    (panel,) = told["panels"]
    assert panel["name"] == "local: window 8" and panel["causal"]
    assert (panel["length"], panel["tokens_per_cell"]) == (40, 1)
    assert panel["allowed_pairs"] == sum(min(8, query + 1) for query in range(40)) < panel["computed_pairs"] <= 40**2


def test_an_expression(drawn):
    inner = [{"kind": "local", "window": 3}, {"kind": "columns", "stride": 5}]
    told, _ = drawn(json.dumps({"kind": "union", "patterns": inner}), "--length", 20, "--out", "union.png")
    pattern = Local(behind=2) | Strided(stride=5, part="columns").build()
    index = torch.arange(20)
    assert told["panels"][0]["allowed_pairs"] == int(pattern.allowed(index[:, None], index[None]).sum())
    assert told["panels"][0]["name"] == "local: window 3 | columns: stride 5"


def test_svg_by_the_ending_and_the_same_every_time(drawn):
    _, first = drawn("alibi", "--recipe", "tiny", "--out", "deep/alibi.svg")
    _, again = drawn("alibi", "--recipe", "tiny", "--out", "deep/alibi.svg")
    assert b"<svg" in first[:600] and first == again


def test_a_member_before_a_kind_of_the_same_name(drawn):
    member, _ = drawn("local", "--recipe", "tiny")
    assert member["kind"] == "member" and member["panels"][0]["place"] == "layers 1\N{EN DASH}2"
    assert drawn("local", "--pattern")[0]["kind"] == "pattern"
    assert drawn("alibi", "--position")[0]["kind"] == "position"
    assert drawn("alibi")[0]["kind"] == "member"


def test_layers_and_heads_that_differ_are_shown_once_each(drawn):
    per_head = {"kind": "per_head", "patterns": [{"kind": "causal"}, {"kind": "local", "window": 4}]}
    changes = ("--set", "layers=4", "--set", f"layers.1.mixer.pattern={json.dumps(per_head)}")
    told, _ = drawn("gpt", "--recipe", "tiny", *changes)
    patterns = [(each["place"], each["name"]) for each in told["panels"] if each["panel"] == "pattern"]
    assert patterns == [
        ("layers 1, 3, 4", "causal"),
        ("layer 2, head 1", "causal"),
        ("layer 2, head 2", "local: window 4"),
    ]
    chosen, _ = drawn("gpt", "--recipe", "tiny", *changes, "--layer", 2, "--head", 2)
    assert [(each["place"], each["name"]) for each in chosen["panels"]] == [("layer 2, head 2", "local: window 4")]


@pytest.mark.parametrize(
    ("name", "panels"),
    [
        ("sinusoidal", [("heat", "sinusoidal")]),
        ("rope", [("heat", "rope\na feature times itself")]),
        ("alibi", [("curve", "alibi\nadded to the score")]),
    ],
)
def test_encodings_of_positions(drawn, name, panels):
    told, _ = drawn(name, "--position", "--length", 40)
    assert [(each["panel"], each["name"]) for each in told["panels"]] == panels


@pytest.mark.parametrize("name", ["learned", "t5", "shaw", "xl", "complex_order"])
def test_random_numbers_are_not_drawn_for_positions(drawn, capsys, name):
    from kinformer.lab.cli.main import main

    assert main(["draw", name, "--position"]) == 2
    assert "learnt" in capsys.readouterr().err
    told, _ = drawn("gpt", "--recipe", "tiny")
    assert [each["panel"] for each in told["panels"]] == ["pattern"]


def test_equal_panels_of_unequal_layers_are_one(drawn):
    told, _ = drawn("differential", "--recipe", "tiny")
    assert [each["place"] for each in told["panels"]] == ["layers 1\N{EN DASH}2"] * 2


def test_what_mixers_without_a_pattern_see_is_measured(drawn):
    told, _ = drawn("linear-transformer", "--recipe", "tiny", "--length", 12)
    assert told["panels"][0]["name"] == "linear: num heads 2\ninfluence on the output, at random weights"


def test_a_trained_run(drawn, gpt_run, make_run):
    told, _ = drawn(gpt_run)
    assert told["kind"] == "run" and [each["panel"] for each in told["panels"]] == ["pattern", "heat"]
    assert [each["panel"] for each in drawn(make_run("t5"))[0]["panels"]] == ["pattern", "curve"]
    learned = [each["place"] for each in drawn(make_run("da-transformer"))[0]["panels"] if each["panel"] == "curve"]
    assert learned == ["layer 1", "layer 2"]


def test_global_tokens_of_a_document_have_rows_and_columns(drawn):
    told, _ = drawn("longformer", "--recipe", "tiny", "--length", 20, "--layer", 1)
    panel = told["panels"][0]
    assert panel["name"] == "window: window 4, dilation 1\n1 global token" and not panel["causal"]
    index = torch.arange(20)
    near = (index[:, None] - index).abs() <= 4
    near[0] = near[:, 0] = True
    assert panel["allowed_pairs"] == int(near.sum())


def test_tokens_on_the_side_stand_before_the_document(drawn):
    told, _ = drawn("big-bird", "--recipe", "tiny-etc", "--length", 47, "--layer", 1, "--head", 2)
    (panel,) = (each for each in told["panels"] if each["panel"] == "pattern")
    assert panel["name"].endswith("no edges\nglobal input of 3 tokens")
    pattern = configure("big-bird", "tiny-etc").layers[0].mixer.pattern.build().sized(44).at(1)
    index = torch.arange(44)
    document = int(pattern.allowed(index[:, None], index).sum())
    assert panel["allowed_pairs"] == document + 47**2 - 44**2


@pytest.mark.parametrize("name", ["bert", "big-bird", "blockbert", "etc"])
def test_encoders(drawn, name):
    told, _ = drawn(name, "--recipe", "tiny")
    panels = [panel for panel in told["panels"] if panel["panel"] == "pattern"]
    assert not any(panel["causal"] for panel in panels)
    assert name == "etc" or panels


def test_both_sides_of_an_encoder_decoder(drawn):
    told, _ = drawn("vanilla", "--recipe", "tiny", "--layer", 2, "--length", 8)
    places = {panel["place"]: panel for panel in told["panels"]}
    assert list(places) == ["layer 2", "encoder, layer 2"]
    assert places["layer 2"]["causal"] and not places["encoder, layer 2"]["causal"]


def test_a_pattern_that_depends_on_the_length(drawn):
    told, _ = drawn("big_bird", "--set", "block=8", "--set", "random=1", "--length", 128)
    (panel,) = told["panels"]
    assert panel["name"] == "big bird: block 8, random 1" and panel["computed_pairs"] >= panel["allowed_pairs"]
    assert panel["length"] == 128
    pattern = BigBird.Config(block=8, random=1).build().sized(128)
    index = torch.arange(128)
    assert panel["allowed_pairs"] == int(pattern.allowed(index[:, None], index).sum())


def test_an_image_has_the_field_of_one_token(drawn):
    sizes = ("height=8", "width=8", "block_height=4", "block_width=4", "flange_height=2", "flange_width=2")
    changes = [word for size in sizes for word in ("--set", size)]
    told, _ = drawn("image_2d", *changes)
    assert [each["panel"] for each in told["panels"]] == ["pattern", "field"]
    assert [each["panel"] for each in drawn("strided", "--image-width", 6)[0]["panels"]] == ["pattern", "field"]


def test_cells_are_shares_of_pairs():
    shares = shares_of(Local(behind=2), 4, 3)
    index = torch.arange(12)
    expected = Local(behind=2).allowed(index[:, None], index[None]).double().view(3, 4, 3, 4).mean(dim=(1, 3))
    np.testing.assert_allclose(shares, expected.numpy())


def test_the_scale_shows_structure():
    assert grid(None, [Causal()]) == (1, 48)
    assert grid(None, [Local(behind=7)]) == (1, 48)
    tokens, cells = grid(None, [Causal(), Local(behind=255)])
    assert cells == 48 and 256 < tokens * cells <= 8 * 256
    assert grid(100, [Causal()]) == (2, 50)


def test_a_raster_tells_where_every_position_stands():
    pattern = Causal() & Image2D(height=4, width=4, block_height=2, block_width=2, flange_height=1, flange_width=1)
    shape, cell = raster(pattern, None)
    rows, columns = cell(torch.arange(16))
    assert shape == (4, 4) and rows[:6].tolist() == [0, 0, 1, 1, 0, 0] and columns[:6].tolist() == [0, 1, 0, 1, 2, 3]
    assert raster(Causal(), None) is None


def test_parts_and_names():
    config = configure("gpt", "tiny", set={"layers": 4, "layers.2.mixer.pattern": "local"})
    assert [(each.part.kind, each.layers) for each in parts_of(config, "pattern")] == [
        ("causal", (0, 1, 3)),
        ("local", (2,)),
    ]
    assert [numbered("head", each) for each in ((0,), (0, 1, 2), (0, 2))] == [
        "head 1",
        "heads 1\N{EN DASH}3",
        "heads 1, 3",
    ]
    assert describe(Strided(stride=4, part="columns")) == "strided: stride 4, part columns"
    either = Union(patterns=(Local.Config(window=2), Strided(stride=4)))
    both = Intersection(patterns=(either, Causal.Config(), Complement(pattern=either)))
    assert (
        describe(both) == "(local: window 2 | strided: stride 4) & causal & not (local: window 2 | strided: stride 4)"
    )


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["lokal"], "'lokal' is not a member, a run folder, a pattern or a position to draw; did you mean 'local'"),
        (["rope", "--pattern"], "'rope' is not a pattern to draw"),
        (["local", "--pattern", "--position"], "--pattern and --position contradict"),
        (["local", "--set", "windw=8"], "did you mean 'window'"),
        (["local", "--set", "window=0"], "window must be 1 or more"),
        (["documents"], "needs starts, which must be given"),
        (["{kind"], "is not JSON"),
        (['{"kind": "lokal"}'], "does not name a pattern or a position; did you mean 'local'"),
        (["local", "--out", "a.pdf"], "a.pdf: a figure's name ends in .png or .svg, but this one in '.pdf'"),
        (["local", "--length", "0"], "--length is 0 but must be 1 or more"),
        (["gpt", "--layer", "9"], "--layer 9: gpt (small) has 4 layers; give 1 to 4"),
        (["gpt", "--spans", "--layer", "1"], "--spans draws all spans of a run, and knows no --layer; leave them out"),
        (["none", "--position"], "none: has neither a pattern nor positions to draw"),
    ],
)
def test_mistakes_are_one_sentence(cli, tmp_path, monkeypatch, arguments, told):
    monkeypatch.chdir(tmp_path)
    code, out, err = cli("draw", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("kinformer: ") and told in err and err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_without_matplotlib_it_is_one_sentence(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("kinformer.lab.drawing.plots.find_spec", lambda name: None)
    code, out, err = cli("draw", "local")
    assert (code, out) == (2, "") and "pip install 'kinformer[plot]'" in err and err.count("\n") == 1


def test_a_text_by_depth(drawn, make_run, text_file):
    """Every token is coloured by the exit that predicted it, each read with half a window or more before it."""
    run = make_run("calm")
    told, data = drawn(run, "--exits", "--length", 90, "--data", text_file, "--set", "stack.rule.thresholds=[0.02]")
    assert data.startswith(b"\x89PNG") and told["out"] == "calm.png" and told["layers"] == 3
    counts = told["tokens_by_layers"]
    assert sum(counts.values()) == 90 and counts["1"] > 0 and 1 < told["layers_per_token"] < 3
    options = DrawOptions(subject=str(run), exits=True, length=90, set={"stack.rule.thresholds": [0.02]})
    text, model = text_by_exits(options).content, open_run(run).model({"stack.rule.thresholds": [0.02]})
    assert [exit for _, exit in text.pieces[:1] + text.pieces[-1:]] == [None, None]
    shown = "".join(piece for piece, _ in text.pieces).encode()[:32]
    first = torch.tensor([list(shown)])
    seen = []
    model.stack.left.register_forward_hook(lambda _, given, __: seen.append(given[0][0].tolist()))
    with torch.no_grad():
        model(first)
    assert [exit for _, exit in text.pieces[1:33]] == seen[0]


@pytest.mark.parametrize("member", ["reformer", "routing"])
def test_a_text_by_buckets(drawn, make_run, text_file, member):
    run = make_run(member)
    told, data = drawn(run, "--buckets", "--length", 60, "--layer", 2, "--data", text_file)
    assert data.startswith(b"\x89PNG") and told["layer"] == 2 and sum(told["tokens"]) == 60
    options = DrawOptions(subject=str(run), buckets=True, length=60, layer=2, data=str(text_file))
    text = text_by_buckets(options).content
    shown = "".join(piece for piece, _ in text.pieces)
    buckets = kinformer.trace(run, shown, layers="2").attention[0].buckets[told["head"] - 1, 0]
    assert [group for _, group in text.pieces[:60]] == buckets.tolist()


def test_a_text_by_experts(drawn, make_run, text_file):
    """Each token has the colour of the expert that has the largest weight in the layer that is drawn."""
    run = make_run("mixtral")
    told, data = drawn(run, "--experts", "--length", 60, "--layer", 2, "--data", text_file)
    assert data.startswith(b"\x89PNG") and told["layer"] == 2 and sum(told["tokens"]) == 60
    assert sum(told["share"]) == pytest.approx(1)
    options = DrawOptions(subject=str(run), experts=True, length=60, layer=2, data=str(text_file))
    text = text_by_experts(options).content
    model = open_run(run).model().eval()
    seen = []
    model.stack.layers[1].feed_forward.selection.register_forward_pre_hook(lambda _, inputs: seen.extend(inputs))
    with torch.no_grad():
        model(torch.tensor([list("".join(piece for piece, _ in text.pieces).encode())]))
    experts, weights = seen
    first = experts.gather(-1, weights.argmax(-1, keepdim=True)).flatten()
    assert [group for _, group in text.pieces[:60]] == first.tolist()


@pytest.mark.parametrize("member", ["moba", "nsa"])
def test_chosen_blocks(drawn, make_run, text_file, member):
    """A cell holds the share of its pairs that are seen: of moba those to which the weights give some."""
    run = make_run(member)
    told, data = drawn(run, "--blocks", "--length", 39, "--layer", 2, "--data", text_file)
    assert data.startswith(b"\x89PNG") and told["drawn"] == (2 if member == "moba" else 1)
    options = DrawOptions(subject=str(run), blocks=True, length=39, layer=2, data=str(text_file), head=2)
    (panel,) = chosen_blocks(options).content
    assert panel.place == ("layer 2, head 2" if member == "moba" else "layer 2, heads 1\N{EN DASH}2")
    assert panel.tokens_per_cell == 4 and told["panels"][-1]["allowed_pairs"] == panel.allowed_pairs
    others = 1 if member == "moba" else 3
    own = sum(t % 4 + 1 for t in range(39))
    assert panel.allowed_pairs == own + sum(4 * min(others, t // 4) for t in range(39))
    if member == "moba":
        text = bytes(tokens_of(open_run(run), options)[:39].tolist()).decode()
        weights = kinformer.trace(run, text, layers="2", heads="2").attention[0].weights[0]
        seen = np.pad(weights > 0, ((0, 1), (0, 1))).reshape(10, 4, 10, 4).mean((1, 3))
        assert np.abs(seen - panel.shares).max() < 1e-12


def test_spans_are_counted_from_one(drawn, make_run):
    told, _ = drawn(make_run("adaptive-span"), "--spans")
    assert told["panels"][0]["first"] == 1 and told["panels"][0]["rows"] == "layer"


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("gpt", "--buckets"), "no head of this run has buckets"),
        (("routing", "--buckets", "--head", 1), "--head 1: does not attend within buckets"),
        (("routing", "--buckets", "--exits"), "contradict"),
        (("routing", "--experts"), "no layer of this run has experts"),
        (("gpt", "--blocks"), "no layer of this run chooses blocks; give a run of moba or nsa"),
        (("moba", "--blocks", "--layer", 9), "--layer 9: chooses no blocks; the layers that do are 1, 2"),
        (("moba", "--blocks", "--head", 3), "--head 3: the layer has 2 heads"),
        (("mixtral", "--experts", "--layer", 9), "--layer 9: lacks experts; layers with experts are 1, 2"),
        (("calm", "--exits", "--head", 1), "--exits draws a text, and knows no --head"),
        (("calm", "--exits"), "no token of this run leaves early; calibrate it first"),
        (("calm", "--data", "x.txt"), "--data x.txt: is for --exits"),
    ],
)
def test_mistakes_with_exits(cli, make_run, flags, told):
    code, _, err = cli("draw", make_run(flags[0]), *flags[1:])
    assert code == 2 and told in err
