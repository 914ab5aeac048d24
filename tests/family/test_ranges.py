"""Numbers that make no model, or one whose outputs are no numbers, are refused wherever they stand."""

import math
import typing
from dataclasses import fields

import pytest

import kinformer
from kinformer.core.config import field_types, from_dict, parts_in
from kinformer.family.build import configure
from kinformer.family.kinds import kinds
from kinformer.family.table import MEMBERS
from kinformer.heads.language import ModulusHead
from kinformer.mixers.softmax import SoftmaxAttention
from kinformer.runtime.errors import KinformerError

PARTS = {type(part) for name in MEMBERS for part in parts_in(configure(name, "tiny"))} | {
    table[kind] for table in kinds().values() for kind in table
}


def holds(kind, type_):
    return kind is type_ or type_ in typing.get_args(kind)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_no_number_of_a_config_may_be_nan_or_infinite(bad):
    tried = 0
    for part in PARTS:
        for name, kind in field_types(part).items():
            if holds(kind, float):
                with pytest.raises(KinformerError, match=f"{name} must be a finite number, but is {bad}"):
                    part(**{name: bad})
                tried += 1
    assert tried > 30


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("dropout", (-0.5, 1.0, 3)),
        ("std", (-0.02,)),
        ("eps", (-1.0,)),
        ("base", (1.0, 0.0, -3)),
        ("head_dim", (0, -1)),
        ("hidden_dim", (0, -1)),
        ("convolution", (1, -1)),
    ],
)
def test_every_number_of_a_name_has_its_range(name, values):
    owners = [part for part in PARTS if name in {field.name for field in fields(part)}]
    assert owners
    for part in owners:
        for value in values:
            with pytest.raises(KinformerError, match=f"{name} must be .*, but is {value:g}"):
                part(**{name: value})


def test_the_place_is_told_and_copies_are_checked_too():
    with pytest.raises(KinformerError, match=r"set layers.\*.mixer.dropout: dropout must be at least 0 and below 1"):
        kinformer.build("gpt", set={"layers.*.mixer.dropout": 1.0})
    with pytest.raises(KinformerError, match="head_dim must be 1 or more, but is 0"):
        SoftmaxAttention.Config(num_heads=2).replace(head_dim=0)
    with pytest.raises(KinformerError, match="divisor must be above 0, but is 0"):
        ModulusHead.Config(divisor=0.0)
    data = {"kind": "softmax", "num_heads": 2, "dropout": math.nan}
    with pytest.raises(KinformerError, match="dropout must be a finite number"):
        from_dict(SoftmaxAttention.Config, data, kinds())
