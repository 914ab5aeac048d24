"""Samples of pairs for a calibration of early exits: sources, and their translations by beam search."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kinformer.core.model import CausalModel
from kinformer.evaluation.early_exit import Exited
from kinformer.evaluation.exit_samples import Samples, Sampling, at_threshold
from kinformer.runtime.errors import KinformerError, marked
from kinformer.runtime.words import plural
from kinformer.tasks.evaluation import EvaluationSettings
from kinformer.tasks.runs import LoadedRun, TrainedRun
from kinformer.tasks.shared.text import identity_of_part, tokenizer_of
from kinformer.tasks.translate.generate import Translator
from kinformer.tasks.translate.held_out import held_out_pairs
from kinformer.tasks.translate.options import BeamOptions

if TYPE_CHECKING:
    from kinformer.tasks.translate import Translate


class PairSamples(Samples):
    """Sources of a part of the pairs, drawn evenly; the truth is their reference."""

    def __init__(self, task: Translate, run: TrainedRun, model: CausalModel, sampling: Sampling) -> None:
        for name in ("prompt_tokens", "new_tokens"):
            if getattr(sampling, name) is not None:
                raise KinformerError(
                    f"{marked(name)} {getattr(sampling, name)}: is of running text; a sample of this run is a whole "
                    "source and its translation, so leave it out."
                )
        decoding = BeamOptions() if sampling.beam is None else BeamOptions(beam=sampling.beam)
        held = held_out_pairs(task, run, EvaluationSettings(data=sampling.data, split=sampling.split))
        how = {"beam": decoding.beam, "length_penalty": decoding.length_penalty}
        super().__init__(model, identity_of_part(held.data, sampling.split, held.same), how)
        if len(held.pairs.source) < sampling.size:
            raise KinformerError(
                f"split {sampling.split!r} of {held.data.name} holds {plural(len(held.pairs.source), 'pair')}, too few "
                f"for {sampling.size} samples; give another by `split`, or fewer by `prompts`."
            )
        draw = np.random.default_rng(sampling.seed)
        pairs = held.pairs.taken(draw.choice(len(held.pairs.source), sampling.size, replace=False).tolist())
        # Sources of like length are translated together.
        pairs = pairs.taken(sorted(range(sampling.size), key=lambda index: len(pairs.source[index])))
        self.translator, self.sources = Translator(LoadedRun(run, model), decoding), pairs.source
        self.batch_size = sampling.batch_size
        self.truth = [ids.tolist() for ids in tokenizer_of(run).encode_batch(pairs.target)]
        self.begin()

    def write(self) -> list[list[int]]:
        return [
            hypothesis.tokens
            for start in range(0, len(self.sources), self.batch_size)
            for hypothesis in self.translator(self.sources[start : start + self.batch_size])
        ]

    def saved(self, threshold: float) -> Exited:
        count = len(self.sources)
        sources, written = (sum(map(len, side)) for side in (self.translator.encode(self.sources), self.whole))
        with at_threshold(self.model, threshold):
            return self.translator.saved(self.exits[threshold], sources - count, written, count)
