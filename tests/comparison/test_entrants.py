"""Who is compared: names, hybrids, changes of one member, and the width that a budget asks for."""

import pytest

from kinformer.core.config import override
from kinformer.family.build import configure
from kinformer.family.kinds import kinds
from kinformer.lab.comparison.plan import TOLERANCE, entrants, parameters_of, sized
from kinformer.runtime.errors import KinformerError


def test_names_hybrids_and_changes_of_one():
    specs = ["gpt", "linear-transformer:3,gpt:1", "wide=gpt"]
    found = entrants(specs, {"dropout": "0", "wide:dim": "64", "linear-transformer:3,gpt:1:layers": "8"})
    assert [each.name for each in found] == ["gpt", "linear-transformer:3,gpt:1", "wide"]
    assert found[1].parts == (("linear-transformer", 3), ("gpt", 1))
    assert [dict(each.changes) for each in found] == [
        {"dropout": "0"},
        {"dropout": "0", "layers": "8"},
        {"dropout": "0", "dim": "64"},
    ]


@pytest.mark.parametrize(
    ("specs", "changes", "told"),
    [
        (["gpt", "gpt"], {}, "gpt: is named twice; give one entrant another name, as in other=gpt."),
        (["gpd"], {}, "did you mean 'gpt'"),
        (["gpt:2"], {}, "is a ratio of one member"),
        (["gpt:0,local:1"], {}, "gpt has 0 layers of the cycle"),
        (["gpt:1,bert:1"], {}, "mixes causal members with such as read whole texts"),
        (["a b"], {}, "a b: is not a member; write as in gpt"),
        (["gpt"], {"gbt:dim": "8"}, "set gbt:dim: 'gbt' is not compared; did you mean 'gpt'?"),
    ],
)
def test_what_is_no_entrant_is_one_sentence(specs, changes, told):
    with pytest.raises(KinformerError, match="^") as error:
        entrants(specs, changes)
    assert told in str(error.value)


def test_a_hybrid_has_the_others_layers_in_its_cycle():
    (hybrid,) = entrants(["linear-transformer:1,gpt:1"], {})
    config = configure("linear-transformer", "tiny", 64)
    found = override(config, hybrid.layers("tiny", config), kinds())
    assert [layer.mixer.kind for layer in found.layers] == ["linear", "softmax"]
    (three,) = entrants(["local:3,gpt:1"], {})
    config = configure("local", "tiny", 64)
    assert len(override(config, three.layers("tiny", config), kinds()).layers) == 4


@pytest.mark.parametrize("name", ["gpt", "transformer-xl", "pkm", "gla", "bert", "universal", "sha-rnn"])
def test_the_width_meets_the_budget(name):
    config = configure(name, "tiny", 64)
    budget = 90_000
    found = sized(config, {}, budget, name)
    assert abs(parameters_of(override(config, found, kinds())) / budget - 1) <= TOLERANCE


def test_a_budget_that_changes_rule_out_is_told():
    with pytest.raises(KinformerError, match=r"wide: no width gives 1,000 parameters within 5% \(the nearest has "):
        sized(configure("gpt", "tiny", 64), {"dim": 64}, 1000, "wide")
