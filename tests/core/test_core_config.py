"""Configs to and from plain data, strict about names and types, and dotted overrides."""

import copy
import json
from collections.abc import Callable
from dataclasses import FrozenInstanceError, dataclass, field, fields
from typing import Any, Literal, TypedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kinformer.core.config import Config, field_types, from_dict, override, parts_in, to_dict
from kinformer.mixers.softmax import SoftmaxAttention
from kinformer.parts.patterns import sequence as local
from kinformer.parts.relative_positions import Rope
from kinformer.runtime.errors import KinformerError, choose, nearest


class PatternConfig(Config):
    slot = "pattern"


class Causal(PatternConfig):
    kind = "causal"


class Local(PatternConfig):
    kind = "local"
    window: int = 8

    def __post_init__(self):
        if self.window < 1:
            raise KinformerError(f"window is {self.window}; give 1 or more.")


class Layer(Config):
    num_heads: int = 4
    rate: float = 0.0
    bias: bool = True
    norm: Literal["pre", "post"] = "pre"
    name: str = ""
    limit: int | None = None
    pattern: PatternConfig = Causal()


class Stack(Config):
    dim: int
    layers: tuple[Layer, ...] = (Layer(),)
    sizes: tuple[int, ...] = ()


KINDS = {"pattern": {"causal": Causal, "local": Local}}

INTEGERS = st.integers(1 - 2**63, 2**63 - 1)
patterns = st.one_of(st.just(Causal()), st.builds(Local, window=st.integers(1, 10**6)))
layers = st.builds(
    Layer,
    num_heads=INTEGERS,
    rate=st.floats(allow_nan=False, allow_infinity=False),
    bias=st.booleans(),
    norm=st.sampled_from(["pre", "post"]),
    name=st.text(),
    limit=st.none() | INTEGERS,
    pattern=patterns,
)
stacks = st.builds(
    Stack,
    dim=INTEGERS,
    layers=st.lists(layers, max_size=4).map(tuple),
    sizes=st.lists(INTEGERS, max_size=4).map(tuple),
)


@given(stacks)
def test_any_config_survives_json(stack):
    assert from_dict(Stack, json.loads(json.dumps(to_dict(stack))), KINDS) == stack


@given(stacks, INTEGERS, st.integers(1, 5))
def test_an_override_changes_what_it_names_and_nothing_else(stack, heads, count):
    changed = override(stack, {"layers.*.num_heads": heads}, KINDS)
    assert changed == stack.replace(layers=tuple(layer.replace(num_heads=heads) for layer in stack.layers))
    if stack.layers:
        repeated = override(stack, {"layers": count}, KINDS)
        assert repeated.layers == tuple(stack.layers[i % len(stack.layers)] for i in range(count))


def test_kinds_are_written_and_fields_resolved():
    assert to_dict(Layer(pattern=Local(window=3)))["pattern"] == {"kind": "local", "window": 3}
    assert "kind" not in to_dict(Layer())
    assert field_types(Local) == {"window": int}


STACK = Stack(dim=16, layers=(Layer(), Layer(pattern=Local())))


@pytest.mark.parametrize(
    ("changes", "read"),
    [
        ({"dim": "32"}, lambda s: s.dim == 32),
        ({"layers.1.pattern.window": "64"}, lambda s: s.layers[1].pattern.window == 64),
        ({"layers.0.pattern": "local"}, lambda s: s.layers[0].pattern == Local()),
        ({"layers.0.pattern": {"kind": "local", "window": 2}}, lambda s: s.layers[0].pattern.window == 2),
        ({"layers.0.pattern": '{"kind": "local", "window": 2}'}, lambda s: s.layers[0].pattern.window == 2),
        ({"layers.0.pattern": Local(window=5)}, lambda s: s.layers[0].pattern.window == 5),
        ({"layers.1.pattern.kind": "causal"}, lambda s: s.layers[1].pattern == Causal()),
        ({"layers.1.pattern.window": 5, "layers.1.pattern.kind": "local"}, lambda s: s.layers[1].pattern.window == 5),
        ({"layers.*.bias": "false"}, lambda s: [layer.bias for layer in s.layers] == [False, False]),
        ({"layers.0.rate": 1}, lambda s: type(s.layers[0].rate) is float),
        ({"layers.0.limit": "7"}, lambda s: s.layers[0].limit == 7),
        ({"layers.0.limit": "none"}, lambda s: s.layers[0].limit is None),
        ({"layers.0.name": "12"}, lambda s: s.layers[0].name == "12"),
        ({"layers": "1"}, lambda s: s.layers == STACK.layers[:1]),
        ({"layers": 3, "layers.2.num_heads": 8}, lambda s: [layer.num_heads for layer in s.layers] == [4, 4, 8]),
        ({"sizes": "[1, 2]"}, lambda s: s.sizes == (1, 2)),
    ],
)
def test_overrides(changes, read):
    assert read(override(STACK, changes, KINDS))
    assert Stack(dim=16, layers=(Layer(), Layer(pattern=Local()))) == STACK


class Bounded(Config):
    least: int = 3
    most: int = 9
    layers: tuple[Layer, ...] = (Layer(),)

    def __post_init__(self) -> None:
        if not 0 <= self.least <= self.most:
            raise KinformerError(f"least is {self.least}; give 0 to {self.most}.")


@pytest.mark.parametrize("names", [("least", "most", "layers"), ("layers", "most", "least")])
def test_settings_given_together_are_checked_together(names):
    changes = {"least": 1, "most": 2, "layers": 2}
    changed = override(Bounded(), {name: changes[name] for name in names}, {})
    assert changed == Bounded(least=1, most=2, layers=(Layer(), Layer()))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"least": 8, "most": 7}, "`set` most: least is 8; give 0 to 7."),  # either would do alone
        ({"least": 12, "layers": 2}, "`set` least: least is 12; give 0 to 9."),
    ],
)
def test_an_error_of_settings_given_together_names_what_caused_it(changes, message):
    with pytest.raises(KinformerError) as caught:
        override(Bounded(), changes, {})
    assert caught.value.message == message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dims": 3}, r"set dims: 'dims' is not a field of Stack; did you mean 'dim'\?"),
        ({"layers.0.head": 3}, "'head' is not a field of Layer; did you mean 'num_heads'"),
        ({"layers.7.bias": True}, "'7' is not an item of a list of 2; use 0 to 1"),
        ({"layers.x.bias": True}, "'x' is not an item"),
        ({"dim.x": 3}, "'x' is looked for inside 16, which is a plain value"),
        ({"dim": "wide"}, "dim: 'wide' is not a whole number"),
        ({"dim": True}, "True is not a whole number"),
        ({"dim": 1.5}, "1.5 is not a whole number"),
        ({"layers.0.bias": 1}, "1 is not true or false"),
        ({"layers.0.rate": "x"}, "'x' is not a number"),
        ({"layers.0.norm": "both"}, "'both' is not one of 'pre', 'post'"),
        ({"layers.0.pattern": "locl"}, r"'locl' is not a known pattern; did you mean 'local'\?"),
        ({"layers.0.pattern": {"window": 3}}, "does not say which pattern it is; valid names are causal, local"),
        ({"layers.0.pattern": {"kind": "local", "size": 3}}, "'size' is not a field of the pattern 'local'"),
        ({"layers.1.pattern.window": 0}, r"layers\.1\.pattern\.window: window is 0; give 1 or more\."),
        ({"layers": 0}, "0 is not a length for this list"),
        ({"layers": 100_000_000_000}, "100000000000 is not a length for this list; give a whole number of 1 to 10,000"),
        ({"sizes": "3.5"}, "'3.5' is not a list"),
        ({"sizes": [1, "x"]}, r"sizes\.1: 'x' is not a whole number"),
    ],
)
def test_wrong_overrides_name_place_and_remedy(changes, message):
    with pytest.raises(KinformerError, match=message):
        override(STACK, changes, KINDS)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "config: Stack needs dim, which must be given"),
        ({"dim": 1, "layer": []}, r"config: 'layer' is not a field of Stack; did you mean 'layers'\?"),
        (
            {"dim": 1, "layers": [{"pattern": {"kind": "local", "window": -1}}]},
            r"config\.layers\.0\.pattern: window is -1",
        ),
        ([], "config: \\[\\] is not a table of settings"),
    ],
)
def test_wrong_data_names_place_and_remedy(data, message):
    with pytest.raises(KinformerError, match=message):
        from_dict(Stack, data, KINDS)


class Foreign(PatternConfig):
    """A class that no table has, with fields of types that configs do not know."""

    kind = "foreign"
    size: int | Literal["auto"] = "auto"
    inner: PatternConfig = Causal()
    function: Callable[[int], int] = abs
    options: dict[str, int] | None = None
    anything: Any = None


def test_a_config_object_of_no_table_is_taken_as_it_is():
    foreign = Foreign(inner=Foreign(size=3), function=round, options={"a": 1})
    for changes in (
        {"layers.*.pattern": foreign},
        {"layers": [Layer(pattern=foreign), {"pattern": foreign}]},
        {"layers.*.pattern": Foreign(), "layers.*.pattern.inner": foreign.inner, "layers.*.pattern.function": round}
        | {"layers.*.pattern.options": '{"a": 1}'},
    ):
        changed = override(STACK, changes, KINDS)
        assert [layer.pattern for layer in changed.layers] == [foreign, foreign]
    assert override(STACK, {"layers.0.pattern": foreign}, KINDS).layers[0].pattern is foreign
    assert [type(each) for each in parts_in(changed)] == [Stack, *[Layer, Foreign, Foreign, Causal] * 2]
    inside = override(changed, {"layers.0.pattern.inner.size": "auto", "layers.1.pattern.size": "5"}, KINDS)
    assert (inside.layers[0].pattern.inner.size, inside.layers[1].pattern.size) == ("auto", 5)
    assert from_dict(Stack, {"dim": 1, "layers": [{"pattern": foreign}]}, KINDS).layers[0].pattern is foreign


class Norm(Config):
    slot, kind = "norm", "plain"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"layers.0.pattern": Norm()},
            "pattern: the norm 'plain' has the slot 'norm', but .* slot 'pattern' belongs here",
        ),
        ({"layers.0.pattern": Layer()}, r"Layer has no slot, but a config with the slot 'pattern' belongs here"),
        ({"layers.0": Causal()}, r"set layers\.0: the pattern 'causal' is no Layer, which belongs here; give one\."),
        ({"layers.0.pattern": Foreign(), "layers.0.pattern.inner": Norm()}, r"inner: the norm 'plain' has the slot"),
        ({"layers.0.pattern": {"kind": ["local"]}}, "does not say which pattern it is"),
        (
            {"layers.0.pattern": {"kind": "lcal", "package": "lost 1"}},
            r"'lcal' comes from the package 'lost' \(1\)",
        ),
        (
            {"layers.0.pattern": {"kind": "local", "package": "lost"}},
            "the package 'lost', but here it is Kinformer's own",
        ),
    ],
)
def test_wrong_config_objects_name_place_and_remedy(changes, message):
    with pytest.raises(KinformerError, match=message):
        override(STACK, changes, KINDS)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"inner": Norm()}, r"inner of the pattern 'foreign': the norm 'plain' has the slot 'norm', but"),
        ({"inner": Layer()}, r"inner of the pattern 'foreign': Layer has no slot"),
        ({"inner": 3}, r"inner of the pattern 'foreign'"),
    ],
)
def test_a_config_is_checked_where_it_is_made(values, message):
    with pytest.raises(KinformerError, match=message):
        Foreign(**values)
    assert Local(window="7").window == 7


@pytest.mark.parametrize("options", [None, {}, {"slots": True}], ids=["bare", "decorated", "slots"])
def test_a_config_class_is_a_dataclass_with_the_decorator_or_without_it(options):
    class Made(Config):
        size: int = 3
        names: dict[str, int] = field(default_factory=dict)
        note: str = field(default="", compare=False, metadata={"shown": False})

    config = Made if options is None else dataclass(frozen=True, kw_only=True, **options)(Made)
    assert to_dict(config(size=4)) == {"size": 4, "names": {}, "note": ""}
    assert config() == config(size=3, names={}) != config(size=4) and config().names is not config().names
    assert config() == config(note="not compared") == copy.deepcopy(config())
    assert [dict(item.metadata) for item in fields(config)] == [{}, {}, {"shown": False}]
    for change in (lambda: setattr(config(), "size", 5), lambda: delattr(config(), "size")):
        with pytest.raises(FrozenInstanceError):
            change()


def test_data_of_the_base_of_configs_are_refused_in_a_sentence():
    with pytest.raises(KinformerError, match="config: 'size' is not a field of Config; it has none."):
        from_dict(Config, {"size": 3}, KINDS)


class Later(Config):
    part: "Defined | None" = None


EARLY = Later()
Defined = Local


def test_the_type_of_a_field_may_be_defined_after_the_first_config():
    assert EARLY.replace(part="local").part.kind == "local"


def test_the_types_of_a_config_class_must_be_known():
    class Lost(Config):
        size: "Nowhere" = 3  # noqa: F821

    with pytest.raises(KinformerError, match="Lost: the type of a field cannot be found .*'Nowhere' is not defined"):
        to_dict(Lost())


def test_a_place_is_named_once():
    with pytest.raises(KinformerError) as caught:
        override(STACK, {"layers.1.pattern.window": 0}, KINDS)
    assert str(caught.value).count("layers.1.pattern.window") == 1


def test_names_near_a_word():
    assert nearest("causl", ["causal", "strided"]) == "did you mean 'causal'?"
    assert nearest("zzz", ["b", "a"]) == "valid names are a, b."
    assert nearest("x", []) == "it has none."
    assert choose("a", ["a", "b"], "here") == "a"
    with pytest.raises(KinformerError, match="here: 'c' is unknown; valid names are a, b."):
        choose("c", ["a", "b"], "here")
    assert issubclass(KinformerError, ValueError)


def test_parts_are_named_in_python_as_by_set():
    by_name = SoftmaxAttention.Config(num_heads=4, position="rope", pattern={"kind": "local", "window": 8})
    assert by_name == SoftmaxAttention.Config(num_heads=4, position=Rope.Config(), pattern=local.Local.Config(window=8))
    assert by_name.replace(position="none").position.kind == "none"
    for position, message in (
        ("rop", "position of the mixer 'softmax': 'rop' is not a known position; did you mean 'rope'?"),
        ({"kind": "rope", "bases": 3}, "'bases' is not a field of the position 'rope'; did you mean 'base'?"),
    ):
        with pytest.raises(KinformerError) as error:
            SoftmaxAttention.Config(num_heads=4, position=position)
        assert message in str(error.value)


class Point(TypedDict):
    x: int


class Record(Config):
    point: Point
    further: Point | None = None


def test_a_typed_dict_is_read_as_it_is():
    data = {"point": {"x": 1}, "further": {"y": "unchecked"}}
    made = Record(point=data["point"], further=data["further"])
    assert from_dict(Record, data, {}) == made and to_dict(made) == data
    assert from_dict(Record, {"point": {"x": 1}}, {}).further is None
