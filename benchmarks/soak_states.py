"""What the soak does to states: random operations on a random composition, whose outputs must stay those of one chunk.

Every row of every state remembers the inputs of its sequence and the outputs that came of them. In the end each is run
alone, whole, from a new state, without padding; outputs and states must agree, and no output may move when a later
token does.
"""

from __future__ import annotations

import random
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from combinations import DIM, VOCAB
from kinformer.core import state as states
from kinformer.heads.language import LanguageModelHead
from kinformer.lab.training.loop import rebuilt
from kinformer.runtime.errors import KinformerError
from kinformer.testing import ENCODER_MODEL_CHECKS, EncoderModelSubject, MixerSubject, ModelSubject, SourceModelSubject
from kinformer.testing.laws import Plan, agree_with_rows_alone
from kinformer.testing.subject import BITS, VALUES, agree, agree_states, require
from soak_parts import decoder, described, encoder, encoder_decoder, mixer
from soak_sessions import Sessions

LONGEST, BRANCHES, ROWS, STEPS = 40, 3, 4, 14
ROOMS, SPOILED = (4, 20, LONGEST), 10**6
DRAWS = {"model": decoder, "mixer": mixer, "encoder": encoder, "encoder-decoder": encoder_decoder}
SHARES = {"model": 6, "mixer": 3, "encoder": 2, "encoder-decoder": 2}
"""How often what is drawn."""


@dataclass
class Row:
    """A sequence so far: ``inputs`` and ``outputs`` of its tokens."""

    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)

    def copy(self) -> Row:
        return Row(list(self.inputs), list(self.outputs))


@dataclass
class Branch:
    state: Any
    rows: list[Row]


class Walk:
    """Random operations on the states of one module, and what came of every row."""

    def __init__(self, random_: random.Random, subject: Any) -> None:
        self.random, self.subject, self.done = random_, subject, list[str]()
        self.module = subject.build()
        self.longest = min(LONGEST, getattr(self.module, "max_length", None) or LONGEST)
        rows = random_.randint(1, 3)
        self.branches = [Branch(subject.start(self.module, rows), [Row() for _ in range(rows)])]

    def run(self, steps: int = STEPS) -> None:
        """``steps`` operations with or without gradients, then the comparison."""
        graph = self.random.random() < 0.25
        operations = {"absorb": 12, "fork": 2, "alias": 1, "select": 2, "repeat": 1, "join": 1, "detach": 1}
        operations |= {"save": 2, "renew": 1, "value": 1} | ({} if graph else {"reserve": 3})
        before = {name: tensor.clone() for name, tensor in self.module.state_dict().items()}
        with torch.set_grad_enabled(graph):
            for _ in range(steps):
                name = self.random.choices(list(operations), list(operations.values()))[0]
                branch = self.random.choice(self.branches)
                if name == "absorb" or branch.state is not None:
                    self.done.append(name)
                    getattr(self, f"_{name}")(branch)
        with torch.no_grad():
            for branch in self.branches:
                self._compare(branch)
        for name, tensor in self.module.state_dict().items():
            require(torch.equal(tensor, before[name]), f"{name} of the module was written to.")

    def _absorb(self, branch: Branch) -> None:
        """A chunk with or without padding and resets; where padding is, stands what must not be looked at."""
        draw, batch = self.random, len(branch.rows)
        room = min(self.longest - len(row.inputs) for row in branch.rows)
        size = draw.choice((1, 1, 2, 3, 5, 9, 17))
        ragged, resets = draw.random() < 0.4, draw.random() < 0.3
        if room < size:
            resets, size = True, min(size, self.longest)
        inputs = self.subject.inputs(batch, size, seed=draw.randrange(2**31))
        counts = torch.tensor([draw.randint(0, size) for _ in range(batch)])
        valid = self.subject.mask(counts, size, seed=draw.randrange(2**31)) if ragged else None
        reset = torch.tensor([[draw.random() < 0.15 for _ in range(size)] for _ in range(batch)]) if resets else None
        if room < size and reset is not None:
            first = torch.zeros(batch, dtype=torch.int64) if valid is None else valid.int().argmax(1)
            reset[torch.arange(batch), first] = True
        given = inputs if valid is None else self._spoiled(inputs, valid)
        self.done[-1] = f"absorb {size}{' ragged' if ragged else ''}{' resets' if resets else ''}"
        old = branch.state
        served = not torch.is_grad_enabled() and not isinstance(self.subject, MixerSubject) and draw.random() < 0.2
        with torch.inference_mode() if served else nullcontext():
            y, branch.state = self.subject.call(self.module, given, old, valid, reset)
        require(bool(y.isfinite().all()), "outputs are not finite.")
        for r, row in enumerate(branch.rows):
            for t in range(size):
                if valid is not None and not valid[r, t]:
                    continue
                if reset is not None and reset[r, t]:
                    self._finish(row)
                    row = branch.rows[r] = Row()
                row.inputs.append(inputs[r, t])
                row.outputs.append(y[r, t].detach())
        self._used_once(old, given, valid, reset)

    def _spoiled(self, inputs: Tensor, valid: Tensor) -> Tensor:
        return self.subject.spoil(inputs, valid) if inputs.is_floating_point() else inputs.masked_fill(~valid, SPOILED)

    def _used_once(self, old: Any, inputs: Tensor, valid: Tensor | None, reset: Tensor | None) -> None:
        """A reserved state that was used raises when it is used again; one of inference mode is copied outside it."""
        if old is None or not any(states.reserved_parts(old)):
            return
        if any(leaf.is_inference() for leaf in states.tensors(old)):
            return
        try:
            self.subject.call(self.module, inputs, old, valid, reset)
        except KinformerError:
            return
        require(valid is not None and not bool(valid.any()), "a reserved state was used twice and nothing was said.")

    def _fork(self, branch: Branch) -> None:
        self._add(Branch(states.fork(branch.state), [row.copy() for row in branch.rows]))

    def _alias(self, branch: Branch) -> None:
        """The same value twice: nobody may write into it."""
        if not any(states.reserved_parts(branch.state)):
            self._add(Branch(branch.state, [row.copy() for row in branch.rows]))

    def _add(self, branch: Branch) -> None:
        if len(self.branches) == BRANCHES:
            self._compare(self.branches.pop(self.random.randrange(BRANCHES)))
        self.branches.append(branch)

    def _select(self, branch: Branch) -> None:
        chosen = [self.random.randrange(len(branch.rows)) for _ in range(self.random.randint(1, ROWS))]
        branch.state = states.select_rows(branch.state, torch.tensor(chosen))
        branch.rows = [branch.rows[row].copy() for row in chosen]

    def _repeat(self, branch: Branch) -> None:
        if 2 * len(branch.rows) <= ROWS:
            branch.state = states.repeat_rows(branch.state, 2)
            branch.rows = [row.copy() for row in branch.rows for _ in range(2)]

    def _join(self, branch: Branch) -> None:
        other = self.random.choice(self.branches)
        if other is branch or other.state is None or len(other.rows) + len(branch.rows) > ROWS:
            return
        branch.state = states.join_rows([states.value(branch.state), states.value(other.state)])
        branch.rows = [*branch.rows, *other.rows]
        self.branches = [each for each in self.branches if each is not other]

    def _reserve(self, branch: Branch) -> None:
        branch.state = states.reserve(states.fork(branch.state), self.random.choice(ROOMS))

    def _value(self, branch: Branch) -> None:
        branch.state = states.value(branch.state)

    def _detach(self, branch: Branch) -> None:
        branch.state = states.detach(branch.state)

    def _renew(self, branch: Branch) -> None:
        branch.state = states.renewed(states.value(branch.state))

    def _save(self, branch: Branch) -> None:
        """Through a file, as training carries it."""
        value = states.detach(states.value(branch.state))
        leaves = {f"{i:04d}": leaf.contiguous().clone() for i, leaf in enumerate(states.tensors(value))}
        loaded = load(save(leaves))
        branch.state = rebuilt(value, [loaded[name] for name in sorted(loaded)])

    def _finish(self, row: Row) -> Any:
        """The row's sequence alone in one chunk: its outputs, and none of them knows a later token."""
        if not row.inputs:
            return None
        inputs = torch.stack(row.inputs)[None]
        with torch.no_grad():
            want, end = self.subject.run(self.module, inputs, self.subject.start(self.module, 1))
            agree("outputs against those of one chunk", torch.stack(row.outputs), want[0], VALUES)
            since = self.random.randrange(len(row.inputs))
            moved, _ = self.subject.run(
                self.module, self.subject.disturb(inputs, since, 6.0), self.subject.start(self.module, 1)
            )
            agree(f"outputs before token {since} when later ones change", moved[:, :since], want[:, :since], BITS)
        return end

    def _compare(self, branch: Branch) -> None:
        if branch.state is None:
            return
        value = _lasting(branch.state)
        for index, row in enumerate(branch.rows):
            end = self._finish(row)
            if end is not None:
                got = states.select_rows(value, torch.tensor([index]))
                agree_states("the state against that after one chunk", got, _lasting(end))


def _lasting(state: Any) -> Any:
    """The state without costs and without what is derived, which are computed with or without gradients only."""
    return states.renewed(states.pop_aux(states.detach(states.value(state)))[1])


def trial(random_: random.Random, found: dict[str, Any]) -> str:
    """One composition under random operations; ``found`` tells all of it. Returns "kept" or "refused", or raises."""
    torch.manual_seed(0)
    kind = found["kind"] = random_.choices(list(SHARES), list(SHARES.values()))[0]
    found["operations"] = []
    try:
        config = DRAWS[kind](random_)
        found["composition"] = described(config)
        subject = _subject(kind, config)
    except KinformerError as error:
        found["why"] = str(error)
        return "refused"
    if kind == "encoder":
        for name in ("rows", "padding"):
            found["operations"].append(name)
            ENCODER_MODEL_CHECKS[name](subject)
    elif kind == "model" and random_.random() < 0.2:
        config = config.replace(head=LanguageModelHead.Config(tied=False))
        Sessions(random_, _subject(kind, config).build(), found["operations"]).run()
    elif random_.random() < 0.15:
        found["operations"].append("gradients")
        plans = {"a random plan": _plan(random_, subject)}
        agree_with_rows_alone(subject, plans, plans)
    else:
        walk = Walk(random_, subject)
        found["operations"] = walk.done
        walk.run()
    return "kept"


def _subject(kind: str, config: Any) -> Any:
    if kind == "mixer":
        config.build(DIM)
        return MixerSubject(lambda: config.build(DIM), dim=DIM, batch=2, time=15)
    config.build()
    if kind in ("model", "encoder-decoder"):
        return (ModelSubject if kind == "model" else SourceModelSubject)(config.build, VOCAB, batch=2, time=15)
    global_tokens = config.layers[0].mixer.kind == "bidirectional"
    return EncoderModelSubject(config.build, VOCAB, batch=2, time=15, global_tokens=global_tokens)


def _plan(random_: random.Random, subject: Any) -> Plan:
    """Chunks of random sizes with padding and resets, the first without; gradients are looked at too."""
    sizes = [random_.choice((1, 2, 3, 6)) for _ in range(5)]
    masks = [
        subject.mask(torch.tensor([random_.randint(0, size) for _ in range(2)]), size, seed=random_.randrange(2**31))
        for size in sizes
    ]
    masks[0][:] = True
    valid = torch.cat(masks, dim=1)
    inputs = subject.inputs(2, sum(sizes), seed=random_.randrange(2**31))
    reset = torch.tensor([[random_.random() < 0.15 for _ in range(sum(sizes))] for _ in range(2)])
    return Plan(subject.spoil(inputs, valid), sizes, valid, reset)
