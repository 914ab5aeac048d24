"""Two minutes of training on the Python standard library's own sources, a measurement, a sample, and what to try next.

Every step is a command that you can type yourself; the script prints it before it runs it. How wide the model is and
how many tokens a step takes, the command chooses by how fast a few steps are here.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import sys
import tokenize
from pathlib import Path

from kinformer.lab.cli.main import main as kinformer

RUN = Path("runs/demo")
MINUTES = 2
BARS = 12
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


def curve(baseline: float) -> None:
    """Bits per byte in the course of the training, as bars; the line is the baseline's."""
    lines = [json.loads(line) for line in (RUN / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "bits_per_byte" in line]
    shown = steps[:: max(1, len(steps) // BARS)]
    highest = max(line["bits_per_byte"] for line in shown)
    width = 60 / max(highest, baseline)
    print(f"\nbits per byte of the training text; | is what a 5-gram model has on held-out text, {baseline:.3f}")
    for line in shown:
        bar = "#" * round(width * line["bits_per_byte"])
        at = round(width * baseline)
        print(f"{line['seconds']:4.0f} s  {bar[:at]:<{at}}|{bar[at:]} {line['bits_per_byte']:.2f}")


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
    command("train", "gpt", "--data", "stdlib", "--minutes", str(MINUTES), "--out", str(RUN))
    result = json.loads(command("evaluate", str(RUN), "--overlap", "0.5", "--baseline", "--json"))
    print(f"held-out bits per byte   GPT         {result['bits_per_byte']:.3f}")
    print(f"                         5-gram model {result['ngram_bits_per_byte']:.3f}")
    curve(result["ngram_bits_per_byte"])
    text = command("generate", str(RUN), "--prompt", PROMPT, "--max-new-tokens", "120", "--seed", "1")
    print(text)
    good, lines = tokenising_lines(text)
    print(f"{good} of {lines} lines are made of Python tokens.")
    print(
        f"\nNext, try (the command is {called()})\n"
        "  kinformer list                                              the family\n"
        f"  kinformer generate {RUN} --prompt 'import ' --samples 3\n"
        "  kinformer train linear-transformer --minutes 10 --out runs/linear   which generates in constant memory\n"
        "  kinformer train gpt --data YOUR_FILE --minutes 10 --out runs/mine\n"
        "  kinformer estimate gpt --recipe paper --length 1024 --batch-size 8\n"
    )


if __name__ == "__main__":
    main()
