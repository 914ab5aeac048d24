"""Which architectures of transformers come in and go out, and which laws does the suite hold both ways to?

The table is read from a run of the tests of ``tests/interop``: a cell names how many of the tests that prove a law
passed for an architecture, at tiny random weights against transformers' own classes, or those of flash-linear-attention
(fla), whose numbers are in a golden file. A failed test shows as FAILED.

    python benchmarks/architectures.py
    python benchmarks/architectures.py --reports FOLDER    # again after a stop: test files with a report there are done
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from common import arguments, peer, prepare, save, show

TESTS = Path(__file__).parents[1] / "tests" / "interop"
LAWS = ("logits", "gradients", "streaming", "padding", "generation", "tokenizer", "round trip")
WRITTEN = ("logits", "round trip")


class Proof(NamedTuple):
    """What a test proves: ``laws`` of ``architecture`` in a ``direction``; names in braces are groups of its ``id``."""

    test: str
    direction: str
    architecture: str
    laws: tuple[str, ...]
    id: str = ".*"


PROOFS = (
    Proof("test_decoders.test_equal", "in", "{name}", ("{law}",), r"(?P<name>.*)-(?P<law>[a-z]+)"),
    Proof("test_fla_folders.test_equal", "in", "fla: {name}", ("{law}",), r"(?P<name>.*)-(?P<law>[a-z]+)"),
    Proof(
        "test_language_part.test_the_language_model_is_imported", "in", "{name} (text)", ("logits",), r"(?P<name>.*)"
    ),
    Proof("test_encoder_decoders.test_equal", "in", "{name}", ("{law}",), r"(?P<name>.*)-(?P<law>[a-z]+)"),
    Proof("test_gpt2.test_same_logits", "in", "gpt2", ("logits",)),
    Proof("test_gpt2.test_greedy_continuation_is_that_of_transformers", "in", "gpt2", ("generation",)),
    Proof("test_gpt2.test_tokenizer_is_copied", "in", "gpt2", ("tokenizer",)),
    Proof("test_parity.test_gpt_has_the_gradients_of_gpt2", "in", "gpt2", ("gradients",)),
    Proof("test_parity.test_gpt_steps_as_gpt2_with_its_cache", "in", "gpt2", ("streaming",)),
    Proof("test_parity.test_gpt_with_padding_on_the_left_as_gpt2_with_its_mask", "in", "gpt2", ("padding",)),
    Proof("test_encoders.test_same_logits", "in", "{name}", ("logits", "padding"), r".*-(?P<name>[a-z]+)"),
    Proof("test_big_bird.test_same_logits", "in", "big_bird", ("logits",)),
    Proof("test_big_bird.test_with_one_length_for_all_a_padded_batch_is_theirs", "in", "big_bird", ("padding",)),
    Proof("test_encoders.test_special_tokens_are_those_of_the_tokenizer", "in", "bert", ("tokenizer",)),
    Proof("test_images.test_same_logits", "in", "{name}", ("logits",), r"(?P<name>.*)"),
    Proof("test_marian.test_same_logits", "in", "marian", ("logits", "padding")),
    Proof("test_modernbert.test_same_logits", "in", "modernbert", ("logits", "padding")),
    Proof("test_modernbert.test_same_gradients", "in", "modernbert", ("gradients",)),
    Proof("test_modernbert.test_classes_of_texts", "in", "modernbert of classes", ("logits",)),
    Proof("test_encoders.test_same_classes", "in", "{name} of classes", ("logits",), r".*-(?P<name>[a-z_]+)"),
    Proof("test_big_bird.test_same_classes", "in", "big_bird of classes", ("logits",)),
    Proof(
        "test_decoders.test_narrow_vectors_of_an_opt",
        "in",
        "opt of narrow vectors",
        ("logits", "streaming", "padding", "generation"),
    ),
    Proof(
        "test_export_encoders.test_the_ends_of_answers_go_in_and_out",
        "in",
        "{name} of answers",
        ("logits", "padding"),
        r"(?P<name>.*)",
    ),
    Proof(
        "test_export_encoders.test_the_ends_of_answers_go_in_and_out",
        "out",
        "{name} of answers",
        WRITTEN,
        r"(?P<name>.*)",
    ),
    Proof("test_decision_folders.test_same_actions", "in", "decision_transformer", ("logits",)),
    Proof("test_decision_folders.test_same_gradients", "in", "decision_transformer", ("gradients",)),
    Proof("test_decision_folders.test_streaming", "in", "decision_transformer", ("streaming",)),
    Proof("test_decision_folders.test_padding", "in", "decision_transformer", ("padding",)),
    Proof(
        "test_export.test_an_architecture_of_transformers_leaves_as_it_came",
        "out",
        "{name}",
        (*WRITTEN, "generation"),
        r"(?P<name>.*)",
    ),
    Proof(
        "test_export_encoders.test_an_architecture_of_transformers_leaves_as_it_came",
        "out",
        "{name}",
        WRITTEN,
        r"(?P<name>[a-z_]+)-.*",
    ),
    Proof(
        "test_export_encoders.test_an_image_architecture_leaves_as_it_came", "out", "{name}", WRITTEN, "(?P<name>.*)"
    ),
    Proof("test_export_encoders.test_a_translator", "out", "marian", ("logits", "padding", "round trip")),
    Proof("test_export_encoders.test_a_translator_translates_text", "out", "marian", ("generation", "tokenizer")),
    Proof("test_export_encoders.test_ids_of_an_encoder_of_bytes_are_those_of_its_run", "out", "bert", ("tokenizer",)),
    Proof("test_decision_folders.test_a_run_leaves_and_comes_back", "out", "decision_transformer", WRITTEN),
    Proof(
        "test_export_classes.test_logits_are_the_runs_bits_and_importing_gives_them_back",
        "out, with code",
        "{name}",
        WRITTEN,
        r"(?P<name>.*)",
    ),
    Proof(
        "test_export_classes.test_padded_rows_are_as_they_are_alone",
        "out, with code",
        "{name}",
        ("padding",),
        r"(?P<name>.*)",
    ),
    Proof(
        "test_export_classes.test_the_loss_is_the_cross_entropy_of_the_labels_where_they_stand",
        "out, with code",
        "{name}",
        ("gradients",),
        r"(?P<name>.*)",
    ),
    Proof(
        "test_export_classes.test_greedy_and_beams_write_what_our_search_writes",
        "out, with code",
        "linear translator",
        ("generation",),
    ),
    Proof(
        "test_export.test_other_members_leave_with_code",
        "out, with code",
        "{name}",
        (*WRITTEN, "generation"),
        r"(?P<name>.*)",
    ),
    Proof("test_export.test_loss_and_gradients_are_those_of_shifted_labels", "out, with code", "any", ("gradients",)),
    Proof(
        "test_export.test_padding_beams_and_continued_caches",
        "out, with code",
        "any",
        ("streaming", "padding", "generation"),
    ),
    Proof("test_export.test_tokenizer_files_and_ids_travel", "out, with code", "any", ("tokenizer",)),
)
Results = dict[tuple[str, str], dict[str, list[bool]]]


def outcomes(folder: Path) -> dict[str, list[tuple[str, bool]]]:
    """Run the test files without a report in ``folder``. Return, by file and function, the id of every case that ran
    and whether it passed."""
    result = defaultdict(list)
    for file in sorted({proof.test.partition(".")[0] for proof in PROOFS}):
        report, unfinished = folder / f"{file}.xml", folder / f"{file}.unfinished"
        if not report.is_file():
            path = TESTS / ("../family" if file == "test_parity" else "") / f"{file}.py"
            command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={unfinished}", path]
            subprocess.run(list(map(str, command)), cwd=TESTS.parents[1], check=False, stdout=subprocess.DEVNULL)
            unfinished.rename(report)
            print(f"{file}: done", flush=True)
        for case in ElementTree.parse(report).getroot().iter("testcase"):
            name, _, rest = str(case.get("name")).partition("[")
            if case.find("skipped") is None:
                passed = case.find("failure") is None and case.find("error") is None
                result[f"{file}.{name}"].append((rest.removesuffix("]"), passed))
    return result


def proven(cases: dict[str, list[tuple[str, bool]]]) -> Results:
    """Return what the cases prove: by direction and architecture, the outcomes of every law."""
    results: Results = defaultdict(lambda: defaultdict(list))
    for proof in PROOFS:
        if proof.test not in cases:
            raise SystemExit(f"{proof.test} has not run; correct PROOFS.")
        for case, passed in cases[proof.test]:
            match = re.fullmatch(proof.id, case)
            if match is None:
                raise SystemExit(f"{proof.test}[{case}] does not match {proof.id}; correct PROOFS.")
            groups = match.groupdict()
            row = results[proof.direction, proof.architecture.format(**groups)]
            for law in proof.laws:
                row[law.format(**groups)].append(passed)
    return results


def cell(passes: list[bool]) -> str:
    if not all(passes):
        return "FAILED"
    return str(len(passes)) if passes else "-"


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--reports", type=Path, help="the folder of the test files' reports (a temporary one)")
    options = prepare(parser)
    transformers = peer("transformers")
    if transformers is None:
        return
    with nullcontext(options.reports) if options.reports else tempfile.TemporaryDirectory() as folder:
        place = Path(folder).resolve()  # pytest runs in another folder
        place.mkdir(parents=True, exist_ok=True)
        results = proven(outcomes(place))
    rows = [(*key, *(cell(row.get(law, [])) for law in LAWS)) for key, row in sorted(results.items())]
    show("tests that hold", ("direction", "architecture", *LAWS), rows)
    table = [
        {
            "direction": direction,
            "architecture": name,
            "laws": {law: {"tests": len(p), "hold": all(p)} for law, p in row.items()},
        }
        for (direction, name), row in sorted(results.items())
    ]
    holds = all(all(passes) for row in results.values() for passes in row.values())
    save(options, "architectures", {"transformers": transformers.__version__, "holds": holds, "table": table})


if __name__ == "__main__":
    main()
