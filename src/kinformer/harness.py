"""Runs under lm-evaluation-harness: importing this module registers its model ``kinformer``.

    python -m kinformer.harness run --model kinformer --model_args run=runs/book --tasks blimp

is the harness's own command with this model. A version of the harness that discovers models of other packages does not
need this import. ``kinformer evaluate DIR --harness TASKS`` runs the same tasks from Kinformer's command line.
"""

from __future__ import annotations

import sys

from kinformer.lab.runs.harness import KinformerLM
from kinformer.runtime.errors import KinformerError, spelled

__all__ = ["KinformerLM"]


def main() -> int:
    """Run the harness's command line, and return its exit status."""
    from lm_eval.__main__ import cli_evaluate

    try:
        cli_evaluate()
    except KinformerError as error:
        print(f"kinformer: {spelled(str(error))}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
