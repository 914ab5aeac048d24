from __future__ import annotations

import json
import math
import weakref
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from kinformer.core.state import tensors
from kinformer.family.build import build
from kinformer.lab.data import Corpus, SegmentStreams
from kinformer.lab.tasks.next_token import NextTokenLoss, NextTokens, TokenBatch
from kinformer.lab.training.data_module import ObjectiveModule
from kinformer.lab.training.loop import validate
from kinformer.lab.training.optimisers import Optimiser
from kinformer.lab.training.schedule import Schedule
from kinformer.lab.training.settings import Settings
from kinformer.runtime.errors import KinformerError
from tests.training.tiny import CPU, SETTINGS, curve, gap, rewound, train, trainer, weights

LINEAR = {"member": "linear-transformer"}
PKM = {"member": "pkm"}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "dropout": {"model": {"dropout": 0.2, "layers.*.dropout": 0.1}},
    "segments": {"model": LINEAR, "segments": True},
    "segments, accumulated": {"model": LINEAR, "segments": True, "accumulate": 2},
    "growing state": {"model": {"position": "none"}, "segments": True, "accumulate": 2},
    "muon": {"optimizer": "muon"},
    "moving average": {"ema": 0.3},
    "adafactor": {"optimizer": "adafactor", "lr": 1e-2},
    "adagrad": {"optimizer": "adagrad", "lr": 1e-2, "clip": 0.03},
    "spans": {"model": {"member": "adaptive-span"}, "segments": True, "lr": 3e-2},
    "lamb": {"optimizer": "lamb", "lr": 3e-2},
    "sgd": {"optimizer": "sgd", "lr": 0.1},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "recurrence": {"model": {"member": "sha-rnn"}, "segments": True, "accumulate": 2},
    "memories": {"model": {"member": "memorizing"}, "segments": True},
    "sparse tables": {"model": PKM, "accumulate": 2},
    "clusters": {"model": {"member": "routing"}, "segments": True},
    "random features": {"model": {"member": "performer", "layers.*.mixer.feature_map.redraw": 3}, "segments": True},
    "sparse tables, muon, batch norm": {
        "model": PKM | {"layers.1.feed_forward.norm": "batch"},
        "optimizer": "muon",
    },
}


def test_a_metric_that_an_objective_forgets_is_one_sentence(corpus: Corpus, tmp_path: Path) -> None:
    tiny = trainer(corpus, tmp_path)

    def without(name: str) -> Any:
        def forgetful(*given: Any) -> Any:
            loss, metrics, state = NextTokenLoss()(*given)
            return loss, {each: value for each, value in metrics.items() if each != name}, state

        return forgetful

    for name, message in (
        (
            "predicted",
            "the objective forgetful returned no metric 'predicted', the number of predictions that",
        ),
        ("nats", "the objective returned no metric 'nats', a sum of its data, but 'predicted'"),
    ):
        engine = ObjectiveModule(tiny.model, without(name), "fp32")
        with pytest.raises(KinformerError, match=message):
            validate(engine, tiny.data, CPU)

    def in_numbers(*given: Any) -> Any:
        loss, metrics, state = NextTokenLoss()(*given)
        return loss, metrics | {"nats": float(metrics["nats"])}, state

    means = [
        validate(ObjectiveModule(tiny.model, item, "fp32"), tiny.data, CPU) for item in (in_numbers, NextTokenLoss())
    ]
    assert means[0] == means[1]


@pytest.mark.parametrize("member", ["gpt", "linear-transformer", "fast-weights"])
def test_learns(corpus: Corpus, tmp_path: Path, member: str) -> None:
    result = train(corpus, tmp_path, model={"member": member}, steps=80, batch_size=8, length=32, checkpoint_every=0)
    losses = curve(tmp_path)
    assert result.steps == len(losses) == 80
    assert losses[-1] < losses[0] - 2.0


@pytest.mark.parametrize("variant", VARIANTS)
def test_resumed_run_ends_with_the_same_bits(corpus: Corpus, tmp_path: Path, variant: str) -> None:
    options = VARIANTS[variant] | {"keep": 3}
    train(corpus, tmp_path / "whole", **options)
    again = rewound(tmp_path / "whole", tmp_path / "again")
    resumed = trainer(corpus, again, **options)
    assert resumed.step == 4
    resumed.run()
    assert gap(tmp_path / "whole", again) == 0.0
    assert curve(again) == curve(tmp_path / "whole")


def test_minutes_that_are_given_for_more_are_spent(corpus: Corpus, tmp_path: Path) -> None:
    first = train(corpus, tmp_path, steps=None, minutes=0.03)
    more = trainer(corpus, tmp_path, steps=None, minutes=0.07).run()
    assert more.steps > first.steps
    assert trainer(corpus, tmp_path, steps=None, minutes=0.03).run().steps == more.steps


@pytest.mark.parametrize("options", [{}, {"model": LINEAR, "segments": True}], ids=["windows", "segments"])
def test_accumulation_is_the_big_batch(corpus: Corpus, tmp_path: Path, options: dict[str, Any]) -> None:
    train(corpus, tmp_path / "one", **options)
    train(corpus, tmp_path / "four", accumulate=4, **options)
    assert curve(tmp_path / "four") == pytest.approx(curve(tmp_path / "one"), rel=1e-6)


def test_carried_states_deal_out_to_other_parts(corpus: Corpus, tmp_path: Path) -> None:
    train(corpus, tmp_path / "one", segments=True, model=LINEAR)
    again = rewound(tmp_path / "one", tmp_path / "two")
    train(corpus, again, segments=True, model=LINEAR, accumulate=2)
    assert curve(again) == pytest.approx(curve(tmp_path / "one"), rel=1e-6)


def test_states_of_old_random_features_are_not_carried_on(corpus: Corpus, tmp_path: Path) -> None:
    model = {"member": "performer", "layers.*.mixer.feature_map.redraw": 3}
    run = trainer(corpus, tmp_path, segments=True, model=model)
    seen = []
    for step in range(5):
        run.update(step, 1e-3, 0.0)
        seen.append(int(run.update.carried.states[0].seen[0]))
    assert seen == [16, 32, 48, 16, 32]


def test_segments_see_what_came_before_and_cut_the_gradient(corpus: Corpus, tmp_path: Path) -> None:
    run = trainer(corpus, tmp_path, segments=True, model=LINEAR)
    sampler = SegmentStreams(corpus.splits["train"], SETTINGS.batch_size, SETTINGS.length, SETTINGS.seed)
    first, second = (torch.from_numpy(sampler.batch(step)) for step in (0, 1))
    torch.manual_seed(3)
    model = build("linear-transformer", "tiny", 256)
    with torch.no_grad():
        _, state = model(first[:, :-1])
    logits, _ = model(second[:, :-1], state)
    loss = functional.cross_entropy(logits.flatten(0, 1), second[:, 1:].flatten())
    loss.backward()
    norm = nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])

    run.update(0, 0.0, 0.0)
    carried_loss, carried_norm, *_ = run.update(1, 0.0, 0.0)
    assert float(carried_loss) == pytest.approx(loss.item(), rel=1e-6)
    assert float(carried_norm) == pytest.approx(float(norm), rel=1e-5)
    run.update.forget()
    fresh_loss, *_ = run.update(1, 0.0, 0.0)
    assert abs(float(fresh_loss) - loss.item()) > 1e-4


def test_segments_learn(corpus: Corpus, tmp_path: Path) -> None:
    train(corpus, tmp_path, segments=True, model=LINEAR, steps=80, batch_size=8, length=32)
    losses = curve(tmp_path)
    assert losses[-1] < losses[0] - 2.0


def test_bf16_mixed_keeps_weights_in_float32_and_follows_float32(corpus: Corpus, tmp_path: Path) -> None:
    train(corpus, tmp_path / "full", steps=20)
    train(corpus, tmp_path / "half", steps=20, precision="bf16-mixed")
    assert {tensor.dtype for tensor in weights(tmp_path / "half").values()} == {torch.float32}
    assert curve(tmp_path / "half") != curve(tmp_path / "full")
    assert curve(tmp_path / "half") == pytest.approx(curve(tmp_path / "full"), abs=0.03)


def test_a_schedule_that_is_stretched_by_more_steps_is_told(
    corpus: Corpus, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "kinformer")
    trainer(corpus, tmp_path, warmup=0).run()
    trainer(corpus, tmp_path, warmup=0)
    assert "schedule" not in caplog.text
    longer = trainer(corpus, tmp_path, warmup=0, steps=16)
    rate, floor = longer.rate(8, 16), longer.settings.lr * longer.settings.min_lr_ratio
    assert rate > 4 * floor
    told = f"the schedule spans 16 steps from here on, and spanned 8: the learning rate at step 8 is {rate:.3g}"
    assert f"note: {told} instead of {floor:.3g}." in caplog.text


def test_best_weights_are_kept_over_a_resume(corpus: Corpus, tmp_path: Path) -> None:
    options = {"validate_every": 2, "steps": 8, "keep": 2}
    whole = train(corpus, tmp_path / "whole", **options)
    again = rewound(tmp_path / "whole", tmp_path / "again")
    resumed = trainer(corpus, again, **options | {"lr": 3.0, "clip": 0.0})
    assert resumed.best.step == whole.best_step == 8
    result = resumed.run()
    assert result.validation == whole.validation
    assert (again / "model.safetensors").read_bytes() == (tmp_path / "whole" / "model.safetensors").read_bytes()


def test_best_weights_are_those_of_the_best_validation(corpus: Corpus, tmp_path: Path) -> None:
    result = train(
        corpus, tmp_path, validate_every=1, checkpoint_every=1, keep=8, optimizer="sgd", lr=2.0, clip=0.0, warmup=0
    )
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    measured = {record["step"]: record["validation_loss"] for record in records if "validation_loss" in record}
    assert result.best_step == min(measured, key=lambda step: measured[step]) and len(measured) == 8
    from safetensors.torch import load_file

    best = load_file(tmp_path / "model.safetensors")
    then = load_file(tmp_path / "checkpoints" / f"step-{result.best_step:08d}" / "model.safetensors")
    assert all(torch.equal(best[name], then[name]) for name in then)


def test_patience_ends_a_run_that_gets_no_better(corpus: Corpus, tmp_path: Path) -> None:
    still = {"steps": 60, "lr": 1e-30, "validate_every": 5, "checkpoint_every": 7}
    result = train(corpus, tmp_path, patience=2, **still)
    assert (result.steps, result.best_step, result.total) == (15, 5, 15)
    assert train(corpus, tmp_path, patience=2, **still).steps == 15
    assert train(corpus, tmp_path, patience=4, **still).steps == 25
    learning = train(corpus, tmp_path / "learning", steps=20, validate_every=5, patience=1)
    assert learning.steps == learning.best_step == 20
    with pytest.raises(KinformerError, match="counts validations"):
        Settings(patience=2, validate_every=0)


def test_validation_lets_go_of_each_state_before_the_next_batch(corpus: Corpus) -> None:
    alive: list[weakref.ref[Tensor]] = []

    def objective(model: nn.Module, batch: Any, state: Any, progress: float) -> Any:
        assert all(one() is None for one in alive), "a state of 64,000 tokens may be larger than the activations"
        outcome = NextTokenLoss()(model, batch, state, progress)
        alive.extend(weakref.ref(leaf) for leaf in tensors(outcome[2]))
        return outcome

    data = NextTokens(corpus, SETTINGS)
    validate(ObjectiveModule(build("gpt", "tiny", 256), objective, "fp32"), data, CPU)
    assert data.validations > 1 and alive


def test_validation_is_the_mean_over_fresh_windows(corpus: Corpus) -> None:
    model = build("gpt", "tiny", 256)
    engine = ObjectiveModule(model, NextTokenLoss(), "fp32")
    measured = validate(engine, NextTokens(corpus, SETTINGS), CPU)["nats"]
    kept = corpus.splits["validation"].take(256)
    tokens = torch.from_numpy(kept.rows(torch.tensor([0]).numpy(), 256))[0]
    part = 64
    nats = count = 0.0
    for stream in range(4):
        stop = min((stream + 1) * part, 255)
        for start in range(stream * part, stop, 16):
            piece = tokens[start : min(start + 16, stop) + 1]
            logits, _ = model(piece[None, :-1])
            nats += functional.cross_entropy(logits[0], piece[1:], reduction="sum").item()
            count += len(piece) - 1
    assert count == 255
    assert measured == pytest.approx(nats / count, rel=1e-6)


def test_probing_leaves_nothing_behind(corpus: Corpus, tmp_path: Path) -> None:
    run = trainer(corpus, tmp_path)

    def count(buffer: Tensor) -> None:
        buffer += 1

    run.model.register_buffer("made", torch.zeros(()))
    run.model.register_forward_pre_hook(lambda *_: count(run.model.made))
    before = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
    assert run.update.seconds_per_step(0.0) > 0
    assert all(torch.equal(before[name], tensor) for name, tensor in run.model.state_dict().items())
    assert not any(optimiser.state for optimiser, _ in run.update.optimiser.parts)


class Costly(NamedTuple):
    aux: Tensor
    aux_name = "ponder"


class CostlyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(5))

    def forward(self, tokens: Tensor, state: Any = None, **_: Any) -> tuple[Tensor, Any]:
        cost = (self.weight[:2].sum() + 1.5).expand(tokens.shape[0]) * tokens.shape[1]
        return self.weight.expand(*tokens.shape, 5), (Costly(cost),)


def test_side_costs_enter_the_loss_per_token_and_leave_the_state() -> None:
    step = ObjectiveModule(CostlyModel(), NextTokenLoss(), "fp32")
    loss, metrics, state = step(TokenBatch(torch.zeros(3, 5, dtype=torch.int64)), None, 0.0)
    assert loss.item() == pytest.approx(math.log(5) + 1.5)
    assert float(metrics["ponder"]) == pytest.approx(3 * 4 * 1.5)
    assert all(float(leaf.abs().max()) == 0.0 for leaf in tensors(state))


def test_invalid_tokens_do_not_count() -> None:
    tokens, valid = torch.randint(0, 256, (2, 9)), torch.ones(2, 8, dtype=torch.bool)
    valid[1, 5:] = False
    model = build("gpt", "tiny", 256)
    loss, metrics, _ = NextTokenLoss()(model, TokenBatch(tokens, valid=valid), None, 0.0)
    alone = [
        NextTokenLoss()(model, TokenBatch(tokens[i : i + 1, : n + 1]), None, 0.0)[1]["nats"]
        for i, n in ((0, 8), (1, 5))
    ]
    assert float(metrics["nats"]) == pytest.approx(float(sum(alone)), rel=1e-5)
    assert loss.item() == pytest.approx(float(sum(alone)) / 13, rel=1e-5)


def test_schedule_rises_and_falls() -> None:
    schedule = Schedule(1.0, 0.1, 0.1, 100)
    rates = [schedule(step) for step in range(100)]
    assert max(rates) == rates[10] == 1.0
    assert rates[:11] == sorted(rates[:11]) and rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[99] == pytest.approx(0.1) and rates[0] == pytest.approx(1 / 11)
    line = Schedule(1.0, 0.1, 0.1, 100, "linear")
    assert line(10) == 1.0 and line(99) == pytest.approx(0.1) and line(32) - line(33) == pytest.approx(0.9 / 89)
    assert {Schedule(1.0, 0.1, 0.1, 100, "constant")(step) for step in (10, 50, 99)} == {1.0}
    assert Schedule(1.0, 0.1, 4, 100)(4) == 1.0 and Schedule(1.0, 0.1, 0.05, 1)(0) == 1.0


def test_matrices_decay_and_vectors_do_not() -> None:
    model = build("gpt", "tiny", 256)
    for kind in ("adamw", "muon"):
        optimiser = Optimiser(model, Settings(optimizer=kind, weight_decay=0.3))
        seen = 0
        for part, _ in optimiser.parts:
            for group in part.param_groups:
                for parameter in group["params"]:
                    assert group["weight_decay"] == (0.3 if parameter.dim() >= 2 else 0.0)
                    seen += 1
        assert seen == len(list(model.parameters()))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"steps": 3, "minutes": 1.0}, "contradict"),
        ({"lr": math.nan}, "lr"),
        ({"batch_size": 0}, "batch_size"),
        ({"min_lr_ratio": 2.0}, "min_lr_ratio"),
        ({"ema": -0.1}, "ema"),
        ({"steps": 0}, "steps"),
    ],
)
def test_settings_that_make_no_sense(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(KinformerError, match=told):
        Settings(**changes)


def test_rows_must_be_shared_alike() -> None:
    with pytest.raises(KinformerError, match="multiple of 6"):
        Settings(batch_size=8, accumulate=3).rows(2)
