"""``kinformer verify SUBJECT``: the laws of causal models, held to a run, a folder of transformers, or your module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro

from kinformer.lab.cli.options import Printing
from kinformer.lab.cli.output import print_json
from kinformer.lab.runs.options import require_proof


@dataclass(frozen=True, kw_only=True)
class Options(Printing):
    """Hold a causal model to its laws, and compare a run with its export, or a folder with its import.

    Laws: no output depends on later tokens; a cache changes nothing, wherever the text is cut; padding leaves no trace;
    rows do not depend on one another. What breaks a law is shown as its smallest case, and the exit code is 1.
    """

    subject: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SUBJECT")]
    """A run folder, a folder of transformers, or module:object, a model that is called as model(tokens, cache, valid)
    and returns logits and the cache, with the attribute vocab_size."""
    trust_remote_code: bool = False
    """Run the code that a folder of transformers brings; without it such a folder is refused."""
    length: int = 24
    """The most tokens of a text, 2 to 64."""
    limit: float = 1e-4
    """The largest difference of logits that counts as rounding, as a share of the largest logit."""

    def __post_init__(self) -> None:
        require_proof(self.length, self.limit)


def run(options: Options) -> int:
    """Verify and print one table; returns 1 where a law is broken."""
    from kinformer.lab.runs.importing import TABLES, verify

    proof = verify(
        options.subject, trust_remote_code=options.trust_remote_code, length=options.length, limit=options.limit
    )
    if options.json:
        print_json(proof.facts)
        return 0 if proof.holds else 1
    print(f"{proof.subject}: {proof.kind}")
    for title, name in zip(("law", "beside transformers"), TABLES, strict=True):
        verdicts = getattr(proof, name)
        if verdicts:
            print(f"\n{title:<20} {'verdict':<11} {'difference':>10}")
        for one in verdicts:
            difference = "" if one.difference is None else f"{one.difference:.1e}"
            print(f"{one.law:<20} {one.badge:<11} {difference:>10}  {one.case}".rstrip())
    for note in proof.notes:
        print(f"\nnote: {note}")
    return 0 if proof.holds else 1
