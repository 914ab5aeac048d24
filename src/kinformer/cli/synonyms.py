"""Names of options in other tools: for one that a command does not have, a sentence names the option here."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kinformer.runtime.errors import RARE

OPTIONS = {
    "learning-rate": "lr",
    "batch": "batch-size",
    "bs": "batch-size",
    "max-steps": "steps",
    "num-steps": "steps",
    "iterations": "steps",
    "iters": "steps",
    "max-iters": "steps",
    "max-tokens": "max-new-tokens",
    "num-tokens": "max-new-tokens",
    "max-length": "length",
    "seq-len": "length",
    "sequence-length": "length",
    "block-size": "length",
    "context-length": "length",
    "context": "length",
    "output": "out",
    "output-dir": "out",
    "save-dir": "out",
    "dataset": "data",
    "input": "data",
    "wd": "weight-decay",
    "warmup-steps": "warmup",
    "optim": "optimizer",
    "grad-clip": "clip",
    "dtype": "precision",
    "gpus": "devices",
    "eval-every": "validate-every",
    "save-every": "checkpoint-every",
    "text": "prompt",
    "temp": "temperature",
    "num-samples": "samples",
    "images": "max-items",
    "limit": "max-items",
    "max-samples": "max-items",
    "sentences": "batch-size",
    "rows": "batch-size",
}
"""To the option that is meant, where the command has it."""

MODEL = {
    "dim": "dim",
    "d-model": "dim",
    "hidden-size": "dim",
    "embed-dim": "dim",
    "n-embd": "dim",
    "dropout": "dropout",
    "layers": "layers",
    "num-layers": "layers",
    "n-layers": "layers",
    "n-layer": "layers",
    "depth": "layers",
    "heads": "layers.*.mixer.num_heads",
    "num-heads": "layers.*.mixer.num_heads",
    "n-heads": "layers.*.mixer.num_heads",
    "n-head": "layers.*.mixer.num_heads",
    "vocab-size": "input.vocab_size",
}
"""To the place in a member's config, where the command takes changes to it."""

SENTENCES = {
    "epochs": ("steps", "there are no epochs; give --steps N or --minutes N."),
    "epoch": ("steps", "there are no epochs; give --steps N or --minutes N."),
    "bf16": ("precision", "give --precision bf16-mixed."),
    "fp16": ("precision", "give --precision bf16-mixed."),
    "gpu": ("device", "give --device cuda."),
    "cuda": ("device", "give --device cuda."),
    "cpu": ("device", "give --device cpu."),
}
"""To an option that the command must have for this to be said, and what is said."""


def suggestion(arguments: Sequence[str], valid_names: Collection[str]) -> str | None:
    """Return a sentence on the first of ``arguments`` that is none of ``valid_names`` but a usual name of one."""
    for index, argument in enumerate(arguments):
        name, _, value = argument.removeprefix("--").partition("=")
        name = name.replace("_", "-").lower()
        if not argument.startswith("--") or name in valid_names:
            continue
        after = arguments[index + 1] if index + 1 < len(arguments) else "--"
        value = value or ("" if after.startswith("--") else after)
        flag_text = f"--{name} {value}".rstrip()
        if name in SENTENCES and SENTENCES[name][0] in valid_names:
            return f"{flag_text}: {SENTENCES[name][1]}"
        if name in OPTIONS and OPTIONS[name] in valid_names:
            return f"{flag_text}: did you mean --{OPTIONS[name]}?"
        if name.replace("-", "_") in RARE and {"set", "steps", "member"} <= set(valid_names):
            change = f"training.{name.replace('-', '_')}={value or 'VALUE'}"
            return f"{flag_text}: is a setting that is rarely changed; give --set {change}."
        if name in MODEL and "set" in valid_names:
            return f"{flag_text}: is not an option but part of the model; give --set {MODEL[name]}={value or 'VALUE'}."
    return None
