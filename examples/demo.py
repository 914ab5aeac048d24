"""Two minutes of training on the Python standard library's own sources, a measurement, a sample, and what to try next.

Every step is a command that you can type yourself; the script prints it before it runs it. How wide the model is and
how many tokens a step takes depends on how fast a few steps are here: few tokens teach a small model more.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import sys
import tempfile
import time
import tokenize
from pathlib import Path
from typing import NamedTuple

import kinformer as library
from kinformer.cli.main import main as kinformer

RUN = Path("runs/demo")
MINUTES = 2
VOCABULARY = 2048


class Size(NamedTuple):
    """A model's width, the tokens of a row, the rows of a step, and the steps that it needs at the least."""

    dim: int
    length: int
    batch_size: int
    steps: int


SIZES = (Size(128, 128, 4, 0), Size(128, 256, 4, 700), Size(256, 256, 4, 900), Size(256, 256, 8, 900))
PROMPT = "import os\n\n\ndef "


def command(*words: str) -> str:
    """Run a kinformer command, echo it, and return what it wrote to standard output."""
    print("\n$ kinformer " + " ".join(repr(word) if " " in word else word for word in words), flush=True)
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        code = kinformer(list(words))
    if code:
        sys.exit(code)
    return output.getvalue()


def fastest_precision() -> str:
    """bf16-mixed where this machine multiplies bfloat16 matrices faster than float32 ones, else fp32."""
    import torch

    def seconds(dtype: torch.dtype) -> float:
        x = torch.randn(1024, 1024).to(dtype)
        times = []
        for _ in range(5):
            start = time.perf_counter()
            x @ x
            times.append(time.perf_counter() - start)
        return min(times)

    return "bf16-mixed" if seconds(torch.bfloat16) < 0.8 * seconds(torch.float32) else "fp32"


def fitting_size(precision: str) -> Size:
    """The largest of ``SIZES`` that makes its steps in the time, by the speed of some steps."""
    fitting = SIZES[0]
    for size in SIZES[1:]:
        if size.steps * seconds_per_step(size, precision) > 60 * MINUTES:
            break
        fitting = size
    return fitting


def seconds_per_step(size: Size, precision: str) -> float:
    """How long a step takes, the first ones left out."""
    with tempfile.TemporaryDirectory() as folder:
        library.train(
            "gpt",
            data=tokenize.__file__,
            out=f"{folder}/run",
            steps=6,
            log_every=3,
            validate_every=0,
            optimizer="muon",
            length=size.length,
            batch_size=size.batch_size,
            precision=precision,
            set={"dim": size.dim, "input.vocab_size": VOCABULARY},
            quiet=True,
        )
        last = json.loads(Path(folder, "run", "metrics.jsonl").read_text().splitlines()[-1])
    return size.length * size.batch_size / last["tokens_per_second"]


def tokenising_lines(text: str) -> tuple[int, int]:
    """How many lines of ``text`` are made of Python tokens, and how many lines there are (blank ones left out)."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    good = 0
    for line in lines:
        try:
            kinds = [token.type for token in tokenize.generate_tokens(io.StringIO(line).readline)]
            good += tokenize.ERRORTOKEN not in kinds
        except (tokenize.TokenError, SyntaxError) as error:
            good += "multi-line statement" in str(error)  # an open bracket goes on in the next line
    return good, len(lines)


def called() -> str:
    """How the command is called from here."""
    if shutil.which("kinformer"):
        return "kinformer"
    path = os.path.relpath(Path(sys.executable).with_name("kinformer"))
    activate = os.path.relpath(Path(sys.executable).with_name("activate"))
    return f"{path}, or kinformer after: source {activate}"


def main() -> None:
    if (RUN / "config.json").exists():
        shutil.rmtree(RUN)
    precision = fastest_precision()
    size = fitting_size(precision)
    command(
        *("train", "gpt", "--data", "stdlib", "--minutes", str(MINUTES), "--out", str(RUN)),
        *("--train-tokenizer", str(VOCABULARY), "--optimizer", "muon", "--lr", "5e-3", "--weight-decay", "0"),
        *("--set", f"dim={size.dim}", "--length", str(size.length), "--batch-size", str(size.batch_size)),
        *("--validate-every", "0", "--precision", precision),
    )
    result = json.loads(command("evaluate", str(RUN), "--overlap", "0.5", "--baseline", "--json"))
    print(f"held-out bits per byte   GPT         {result['bits_per_byte']:.3f}")
    print(f"                         5-gram model {result['ngram_bits_per_byte']:.3f}")
    text = command("generate", str(RUN), "--prompt", PROMPT, "--max-new-tokens", "400", "--seed", "1")
    print(text)
    good, lines = tokenising_lines(text)
    print(f"{good} of {lines} lines are made of Python tokens.")
    print(
        f"\nNext, try (the command is {called()})\n"
        "  kinformer list                                              the family\n"
        f"  kinformer generate {RUN} --prompt 'import ' --samples 3\n"
        "  kinformer train linear-transformer --minutes 10 --out runs/linear   which generates in constant memory\n"
        "  kinformer train gpt --data YOUR_FILE --minutes 10 --out runs/mine\n"
        "  kinformer estimate gpt --recipe paper --length 1024 --batch 8\n"
    )


if __name__ == "__main__":
    main()
