"""Which causal member learns most of a book in equal minutes, at equal parameters?

    python benchmarks/causal_members.py --data book.txt --minutes 1.5 --threads 1 --runs FOLDER
    python benchmarks/causal_members.py --data book.txt --add results/causal_members.json --seed 1 --seeds 2 --jobs 8

Every causal member of text is trained alike, as its `small` recipe has it, the width fitted to the budget of
parameters. Steps are what the minutes buy at the speeds measured in turns, so that other work on the machine slows the
runs and changes no result. What FOLDER holds is not computed again. ``--add`` trains the seeds that a result file
lacks, with its steps, which may be on a GPU, and writes it anew after every run; it may be stopped and continues.
"""

from __future__ import annotations

from common import prepare
from equal_minutes import compare, parser
from kinformer.family.table import MEMBERS

ELSEWHERE = ("decision", "vanilla", "knn-lm", "spalm", "tensorized")
"""Causal members that learn something else (actions; translation), are a plain decoder where there is no datastore yet,
or have a tensor that grows with the length beyond the budget of parameters."""
CHANGES = {"mixtral:layers.*.feed_forward.num_experts": 4, "mixtral:layers": 3}
"""What lets a recipe meet the budget."""


def causal_members() -> list[str]:
    """The causal members that are trained on text, plain attention first."""
    names = [name for name, member in MEMBERS.items() if member.causal and name not in ELSEWHERE]
    return sorted(names, key=lambda name: name != "gpt")


def main() -> None:
    options = prepare(parser(__doc__, minutes=1.5))
    members = options.members or causal_members()
    changes = {path: value for path, value in CHANGES.items() if path.partition(":")[0] in members}
    compare("causal_members", options, members, changes)


if __name__ == "__main__":
    main()
