"""Models and techniques that are no members: their names say what is nearest here, and that can be built."""

import re

import pytest

from kinformer.family.build import configure
from kinformer.family.table import ELSEWHERE, MEMBERS, member
from kinformer.runtime.compiling import unallocated
from kinformer.runtime.errors import KinformerError


@pytest.mark.parametrize("name", ELSEWHERE)
def test_what_is_nearest_can_be_built(name):
    with pytest.raises(KinformerError, match=f"^member: '{name}' is none of the family; .+ here[.]$") as refused:
        member(name)
    named = re.search(r": ([\w-]+)(?: with .+)? is (?:nearest|the same) here\.$", refused.value.message)[1]
    changes = dict(re.findall(r"`set` ([\w.*]+)=(\w+)", refused.value.message))
    with unallocated():
        assert configure(named, "tiny", set=changes).build() is not None
    assert changes == dict(ELSEWHERE[name].changes)


def test_versions_and_spellings_are_the_same_name():
    for name in ("LLaMA-3", "llama 3 8b", "Mistral-7B", "GPT-2", "Mamba-2", "flash-attention"):
        with pytest.raises(KinformerError, match=" is none of the family; "):
            member(name)
    assert not {"".join(filter(str.isalnum, name)) for name in MEMBERS} & ELSEWHERE.keys()


def test_the_command_line_names_the_nearest_with_its_flags(cli, tmp_path):
    for command in (("train", "gqa", "--out", tmp_path / "run"), ("estimate", "gqa"), ("draw", "gqa"), ("show", "gqa")):
        code, out, err = cli(*command)
        assert (code, out) == (2, "") and err.count("\n") == 1
        assert "gpt with --set layers.*.mixer.projection=grouped is the same here." in err


def test_an_unknown_name_is_answered_by_the_three_nearest() -> None:
    with pytest.raises(KinformerError, match=r"did you mean '[\w-]+' or '[\w-]+' or '[\w-]+'\? See: kinformer list\.$"):
        member("qqqqq")
