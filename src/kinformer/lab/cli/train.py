"""``kinformer train MEMBER --data PATH --out DIR``: the training of a member, which writes a run folder."""

from __future__ import annotations

import os
from dataclasses import dataclass

from kinformer.lab.cli.options import CommonOptions
from kinformer.lab.cli.output import BEGUN, print_json
from kinformer.lab.runs.options import TrainOptions
from kinformer.runtime.errors import KinformerError, plural


@dataclass(frozen=True, kw_only=True)
class Train(TrainOptions, CommonOptions):
    """Train a member; with ``--resume``, missing options are taken from the run."""

    def run(self) -> int:
        """Train, print a summary, and return the exit status."""
        from kinformer.lab.runs.train import train
        from kinformer.lab.training.distributed import started_by_torchrun

        first = not started_by_torchrun() or os.environ["RANK"] == "0"
        try:
            summary = train(self, self.quiet, BEGUN.get())
        except KinformerError:
            if first:
                raise
            return 2
        except InterruptedError as ended:
            return int(ended.args[0])
        result = summary.result
        if first and self.json:
            print_json(summary.facts)
        elif first and not result.signal:
            speed = f"{result.seconds:.0f} s, {result.tokens_per_second:,.0f} tokens/s"
            print(f"{summary.folder}: {plural(result.steps, 'step')} in {speed}, {summary.best}")
        return 128 + result.signal if result.signal else 0
