"""Samples of running text for a calibration of early exits: prompts, and their greedy continuations."""

from __future__ import annotations

import numpy as np
import torch

from kinformer.core.model import CausalModel
from kinformer.evaluation.early_exit import Exited, saved
from kinformer.evaluation.exit_samples import Samples, Sampling, at_threshold
from kinformer.generation.generate import generate
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.words import plural
from kinformer.tasks.evaluation import EvaluationSettings
from kinformer.tasks.runs import TrainedRun
from kinformer.tasks.shared.text import held_out

PROMPT_TOKENS, NEW_TOKENS = 64, 32


class TextSamples(Samples):
    """Prompts of a text, drawn evenly; the truth is how the text goes on."""

    def __init__(self, run: TrainedRun, model: CausalModel, sampling: Sampling) -> None:
        if sampling.beam is not None:
            raise KinformerError(
                f"`beam` {sampling.beam}: is of translations; a text is continued greedily here, so leave it out."
            )
        held = held_out(run, EvaluationSettings(data=sampling.data, split=sampling.split))
        self.prompt_tokens, self.new_tokens = sampling.prompt_tokens or PROMPT_TOKENS, sampling.new_tokens or NEW_TOKENS
        super().__init__(model, held.identity, {"prompt_tokens": self.prompt_tokens, "new_tokens": self.new_tokens})
        split, length = held.split, self.prompt_tokens + self.new_tokens
        if len(split) < length + sampling.size:
            raise KinformerError(
                f"split {split.name!r} of {split.corpus} holds {plural(len(split), 'token')}, too few for "
                f"{sampling.size} samples of {length}; give more data, or fewer by `prompts`, `prompt_tokens` or "
                "`new_tokens`."
            )
        draw = np.random.default_rng(sampling.seed)
        starts = np.sort(draw.choice(len(split) - length, sampling.size, replace=False))
        rows = split.rows(starts, length)
        self.prompts, self.truth = rows[:, : self.prompt_tokens], rows[:, self.prompt_tokens :]
        self.batch_size = sampling.batch_size
        self.begin()

    def write(self) -> np.ndarray:
        continued = []
        for start in range(0, len(self.prompts), self.batch_size):
            some = torch.from_numpy(self.prompts[start : start + self.batch_size])
            continued.append(generate(self.model, some, max_new_tokens=self.new_tokens, temperature=0.0, seed=0).cpu())
        return torch.cat(continued).numpy()

    def saved(self, threshold: float) -> Exited:
        with at_threshold(self.model, threshold):
            return saved(self.model, self.exits[threshold], self.prompt_tokens)
