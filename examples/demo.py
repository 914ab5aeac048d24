"""Two minutes of training on the Python standard library's own sources, a measurement, a sample, and what to try next.

Every step is a command that you can type yourself; the script prints it before it runs it.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import sys
import time
import tokenize
from pathlib import Path

from kinformer.cli.main import main as kinformer

RUN = Path("runs/demo")
MINUTES = 2
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


def main() -> None:
    if (RUN / "config.json").exists():
        shutil.rmtree(RUN)
    command(
        *("train", "gpt", "--data", "stdlib", "--minutes", str(MINUTES), "--out", str(RUN)),
        *("--train-tokenizer", "2048", "--optimizer", "muon", "--lr", "5e-3", "--weight-decay", "0", "--length", "256"),
        *("--batch-size", "8", "--validate-every", "0"),
        *("--precision", fastest_precision()),
    )
    result = json.loads(command("evaluate", str(RUN), "--overlap", "0.5", "--baseline", "--json"))
    print(f"held-out bits per byte   GPT         {result['bits_per_byte']:.3f}")
    print(f"                         5-gram model {result['ngram_bits_per_byte']:.3f}")
    text = command(
        "generate", str(RUN), "--prompt", PROMPT, "--max-new-tokens", "400", "--temperature", "0.8", "--seed", "1"
    )
    print(text)
    good, lines = tokenising_lines(text)
    print(f"{good} of {lines} lines are made of Python tokens.")
    print(
        "\nNext, try\n"
        "  kinformer list                                              the family\n"
        f"  kinformer generate {RUN} --prompt 'import ' --samples 3\n"
        "  kinformer train linear-transformer --minutes 10 --out runs/linear   which generates in constant memory\n"
        "  kinformer train gpt --data YOUR_FILE --minutes 10 --out runs/mine\n"
        "  kinformer estimate gpt --recipe paper --length 1024 --batch 8\n"
    )


if __name__ == "__main__":
    main()
