"""Members timed beside plain attention: what is measured, what the gate refuses, what is said of crossings."""

import json
import os

import pytest
import torch

import kinformer
from kinformer.lab.comparison import bench as benching
from kinformer.lab.comparison import speed as machine
from kinformer.lab.comparison import works
from kinformer.lab.comparison.speed import Floor, in_fresh_process, in_turns, measure_floor
from kinformer.runtime.errors import KinformerError

FLAGS = ("--recipe", "tiny", "--lengths", "16,48", "--rounds", 1, "--threads", 1, "--device", "cpu")


@pytest.fixture(autouse=True)
def known_floor(monkeypatch):
    monkeypatch.setattr(benching, "measure_floor", lambda device: Floor(1e12, 1e10, 2e12, 1e-7, 1e-6))


def test_every_work_is_timed_beside_plain_attention(cli):
    code, out, err = cli("bench", "linear-transformer", "bert", *FLAGS, "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["members"] == ["gpt", "linear-transformer", "bert"]
    times = {(each["member"], each["work"], each["length"]): each for each in found["timings"]}
    assert times.keys() == {
        (name, work, length) for name in found["members"] for work in works.WORKS for length in (16, 48)
    } - {("bert", work, length) for work in ("prefill", "decode") for length in (16, 48)}
    assert all(each["seconds"] > 0 and each["share"] > 0 for each in found["timings"])
    step, forward = (times["gpt", work, 48] for work in ("step", "forward"))
    assert 2.5 < step["share"] * step["seconds"] / (forward["share"] * forward["seconds"]) < 3.1  # FLOPs
    assert len(found["crossings"]) == 2 + 2 * 1 + 2
    assert found["floor"].items() >= {"flops": 1e12, "bandwidth": 1e10, "narrow_flops": 2e12}.items()


def test_peers_pass_the_same_gate(cli, monkeypatch):
    pytest.importorskip("transformers")
    name = "transformers' GPT-2"
    code, out, err = cli("bench", "gpt", *FLAGS, "--peers", "--json")
    assert code == 0, err
    found = json.loads(out)
    timed = {(each["work"], each["length"]) for each in found["timings"] if each["member"] == name}
    assert timed == {(work, length) for work in works.WORKS for length in (16, 48)}
    assert name in found["facts"]["peers"]
    code, out, _ = cli("bench", "gpt", *FLAGS, "--peers", "--work", "forward", "--set", "position=none")
    assert code == 1 and f"{name} is not timed: peers have the parts of gpt" in out
    build = works.PEERS[name][1]

    def leaking(shape):
        model = build(shape)
        model.model.lm_head.register_forward_hook(lambda _, given, out: out.flip(1))
        return model

    monkeypatch.setattr(works, "PEERS", {name: ("transformers", leaking), "absent": ("no_such_module", build)})
    code, out, err = cli("bench", "gpt", *FLAGS, "--peers", "--work", "forward")
    assert code == 1 and f"{name} is not timed: in chunks its outputs differ" in out and "absent" not in out


def test_the_floor_is_measured(monkeypatch):
    monkeypatch.setattr(machine, "SIZES", (128,))
    monkeypatch.setattr(machine, "ROWS", 512)
    found = measure_floor("cpu")
    assert found.flops > found.bandwidth > 0
    assert found.narrow_flops > 0
    assert 0 < found.call < found.operator < 1e-3


def test_the_text_has_a_table_for_each_work(cli):
    code, out, _ = cli("bench", "local", *FLAGS, "--work", "forward")
    assert code == 0 and "\na forward\n" in out and "a training step" not in out
    assert "In a forward, local" in out and "floor measured here: 1,000 GFLOP/s" in out


class Leaking(torch.nn.Module):
    """gpt whose logits look one token ahead."""

    def __init__(self):
        super().__init__()
        self.inner = kinformer.build("gpt", recipe="tiny", vocab_size=16)
        self.config, self.input, self.max_length = self.inner.config, self.inner.input, 64

    def forward(self, tokens, state=None):
        logits, state = self.inner(tokens, state)
        return logits + 0.1 * torch.nn.functional.pad(tokens, (0, 1))[:, 1:, None], state


def test_the_gate_refuses_what_sees_the_future():
    works.check_correct(kinformer.build("gpt", recipe="tiny", vocab_size=16))
    with pytest.raises(KinformerError, match="its outputs differ by .* it is not timed"):
        works.check_correct(Leaking())


def test_what_the_gate_refuses_is_told_and_the_others_are_timed(cli, monkeypatch):
    check = works.check_correct

    def gate(model, **sizes):
        if model.config.layers[0].mixer.kind == "linear":
            raise KinformerError("in chunks its outputs differ by 0.5 of the largest; it is not timed.")
        check(model, **sizes)

    monkeypatch.setattr(works, "check_correct", gate)
    code, out, err = cli("bench", "linear-transformer", "local", *FLAGS, "--work", "forward")
    assert code == 1 and "linear-transformer is not timed: in chunks its outputs differ" in out
    assert "In a forward, local" in out and "linear-transformer is not timed" in err


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["gpd"], "did you mean 'gpt'"),
        (["--lengths", "a"], "--lengths a: is not a list of whole numbers"),
        (["--work", "forwards"], "--work: 'forwards' is unknown; did you mean 'forward'"),
        (["--batch-size", "0"], "--batch-size is 0 but must be 1 or more"),
    ],
)
def test_bad_options_are_one_sentence(cli, flags, told):
    code, _, err = cli("bench", *flags)
    assert code == 2 and told in err and len(err.splitlines()) == 1


def test_memory_grows_with_the_length():
    config = benching.storable(kinformer.build("gpt", recipe="tiny").config)
    found = in_fresh_process(benching.peaks_of, config, (16, 128), 8, "cpu")  # one that has freed no memory yet
    assert [length for length, _ in found] == [16, 128] and found[1][1] > found[0][1] >= 0


def test_a_process_that_the_system_ends_is_one_sentence():
    with pytest.raises(KinformerError, match="the system ended its process, as when memory is short"):
        in_fresh_process(os._exit, 1)


def test_a_work_that_fails_is_left_out_and_the_others_are_timed(caplog):
    done = []

    def broken():
        raise MemoryError("no room")

    with caplog.at_level("INFO", "kinformer"):
        found = in_turns({"a": lambda: done.append(1), "b": broken}, rounds=3)
    assert list(found) == ["a"] and len(done) == 4 and "b is not timed: there is not enough memory" in caplog.text
