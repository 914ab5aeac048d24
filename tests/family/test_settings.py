"""The table of what settings mean: complete, nothing unused, in one form, and shown where settings are."""

import json
import re
import typing
from collections.abc import Iterator

import pytest

from kinformer.core.config import Config, field_types
from kinformer.core.parts import FeatureMapConfig
from kinformer.family.build import configure
from kinformer.family.kinds import TABLE, group_of, groups, kinds, meaning, meanings, meanings_in
from kinformer.lab.cli.family import explained

SHORTEST, LONGEST = 12, 110


def inner(kind: object) -> Iterator[type[Config]]:
    """Config classes without a kind of their own in the type of a field."""
    if isinstance(kind, type) and issubclass(kind, Config) and not kind.slot:
        yield kind
    for argument in typing.get_args(kind):
        yield from inner(argument)


def classes() -> list[type[Config]]:
    parts = [config for table in kinds().values() for config in table.builtin.values()]
    nested = [found for config in parts for kind in field_types(config).values() for found in inner(kind)]
    return list(dict.fromkeys((*parts, *nested)))


def test_every_setting_has_a_meaning_and_every_meaning_a_setting():
    needed = [(config, name) for config in classes() for name in field_types(config)]
    missing = [f'["{next(groups(config))}"] {name}' for config, name in needed if group_of(config, name) is None]
    assert not missing, (
        f'{TABLE.name} says nothing of {", ".join(missing)}: add a line `name = "what it is, its unit, what None, 0 '
        f'or "auto" do"` under that heading in {TABLE}, or under [slot] or ["*"] where it means the same elsewhere.'
    )
    used = {(group_of(config, name), name) for config, name in needed}
    unused = [f'["{group}"] {name}' for group, entries in meanings().items() for name in entries
              if (group, name) not in used]  # fmt: skip
    assert not unused, f"{TABLE.name} explains settings that no part has, or that others hide: remove {unused}."


def test_meanings_are_one_clause():
    for group, entries in meanings().items():
        for name, text in entries.items():
            assert SHORTEST <= len(text) <= LONGEST and not text.endswith("."), f"{group}.{name}: {text!r}"
            assert text == " ".join(text.split()), f"{group}.{name}: {text!r}"


def test_settings_of_equal_names_and_meanings_stand_once():
    """A meaning that a more general group has as well is not repeated."""
    for config in classes():
        for name in field_types(config):
            texts = [meanings()[group][name] for group in groups(config) if name in meanings().get(group, {})]
            assert len(texts) == len(set(texts)), (config, name)


def test_a_part_of_another_package_is_explained_by_its_source():
    class Theirs(FeatureMapConfig):
        kind = "favor"
        eps: float = 1e-6
        power: int = 2
        """The exponent of
        every feature."""

    assert meaning(Theirs, "power") == "The exponent of every feature."
    assert meaning(Theirs, "eps") == ""


def test_show_explains_every_setting(cli, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    code, out, err = cli("show", "retnet", "--recipe", "tiny", "--explain")
    lines = out.partition("config of retnet")[2].partition("parameters:")[0].splitlines()
    assert (code, err) == (0, "") and max(map(len, lines)) <= 100
    assert any(re.fullmatch(r" +num_heads = 2 +heads of values; of queries and keys too, .*", line) for line in lines)
    facts = json.loads(cli("show", "retnet", "--recipe", "tiny", "--explain", "--json")[1])
    assert facts["meanings"]["decay.fixed"]["first"] == meanings()["decay.fixed"]["first"]
    assert facts["meanings"]["Initialisation"]["std"]
    assert "meanings" not in json.loads(cli("show", "retnet", "--recipe", "tiny", "--json")[1])


@pytest.mark.parametrize("width", [50, 72, 100])
def test_explanations_fit_a_terminal(width):
    config = configure("macaron", "translate")
    lines = list(explained(config, width))
    assert all(len(line) <= width for line in lines if " = " not in line and ": " not in line)
    words = " ".join(" ".join(lines).split())
    for part, entries in meanings_in(config).items():
        assert all(text and text in words for text in entries.values()), part
    brief = list(explained(config, width, brief=True))
    assert len(brief) < len(lines) / 2 and any("dim = " in line for line in brief)
