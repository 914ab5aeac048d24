"""Samples of a model during training, and the page ``report.html`` of a run's folder.

The page is one file without links: the curve, the samples, the settings, the sizes and the memory of the run. Its style
and script come from the page of a comparison. It does not hold absolute paths, and its text is escaped.
"""

from __future__ import annotations

import re
import time
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from html import escape
from math import ceil, floor, log10
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kinformer import __version__
from kinformer.core.model import CausalModel
from kinformer.core.parts import NeedsStore
from kinformer.generation.generate import evaluating
from kinformer.lab.estimation.estimate import optimizer_bytes, state_bytes
from kinformer.lab.runs.describe import training_of
from kinformer.lab.runs.options import GenerateOptions
from kinformer.lab.runs.run import CONFIG, Run
from kinformer.lab.tasks.evaluation import EvaluationSettings, LoadedRun
from kinformer.lab.tasks.task import Task
from kinformer.lab.training.logging import History, Metric, Result, flops, history_of, size
from kinformer.runtime.draws import private_numbers
from kinformer.runtime.errors import KinformerError, plural
from kinformer.runtime.files import write_atomic
from kinformer.runtime.process import process_peak
from kinformer.runtime.progress import note

REPORT, SAMPLES = "report.html", "samples"
ASSETS = Path(__file__).parents[1] / "comparison" / "assets"
SAMPLE_TOKENS, SHOWN = 120, 12
"""The tokens of a sample of text, and the most samples and validations on the page."""


def check_sampling(task: Task, every: int | None) -> None:
    """Refuse samples of a task that generates nothing, or whose prompts have one answer."""
    drawn = task.generation
    if every and (drawn.refusal is not None or (drawn.prompt == "text" and not drawn.reads)):
        raise KinformerError(f"`sample_every` {every}: the task {task.name} does not generate samples; leave it out.")


class Reporter:
    """Makes the samples of a ``run`` whose ``model`` is trained on ``device``, and writes its page."""

    def __init__(self, run: Run, model: nn.Module, metrics: Sequence[Metric], device: torch.device) -> None:
        self.run, self.model, self.metrics, self.device = run, model, metrics, device
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self.result: Result | None = None

    def sample(self, step: int) -> dict[str, str]:
        """Generate with the present weights, without changing the caller's random numbers. Return the text ``sample``,
        and the ``image`` file if the task draws one."""
        if isinstance(getattr(self.run.config, "head", None), NeedsStore):
            return {}
        run = self.run
        settings: dict[str, Any] = {"temperature": run.task.generation.temperature, "seed": 0, "quiet": True}
        image = Path(SAMPLES) / f"{step:08d}.png"
        values = {"out": str(run.folder / image), "image": run.data.get("spec")}
        named = {item.name: values[item.name] for item in fields(run.task.GenerationOptions) if item.name in values}
        prompt: str | Iterator[bytes] | None = None if run.task.generation.prompt is None else "\n"
        pieces: list[str] = []
        if run.task.generation.prompt == "lines":  # the first sentence held out for a translation
            from kinformer.lab.tasks.translate import held_out_pairs

            prompt = iter(held_out_pairs(run, EvaluationSettings(split="validation")).split.source[:1])
        if run.task.generation.prompt == "text":
            settings["max_new_tokens"] = max(1, min(SAMPLE_TOKENS, run.training["length"] - 2))
        elif "samples" in run.task.generation.reads:
            settings["samples"] = 4
        options = GenerateOptions(task_options=run.task.GenerationOptions(**named), **settings)
        try:
            if "out" in named:
                (run.folder / SAMPLES).mkdir(exist_ok=True)
            with evaluating(self.model), private_numbers(0), torch.no_grad():
                result = run.task.generate(LoadedRun(run, self.model), prompt, options, pieces.append)
        except (KinformerError, OSError) as error:
            note(f"note: no sample of step {step}: {getattr(error, 'message', error)}")
            return {}
        text = "".join(pieces) or getattr(result, "text", "") or result.samples[0].text
        text = "".join(letter if letter.isprintable() or letter == "\n" else "\ufffd" for letter in text)
        return {"sample": text} | ({"image": str(image)} if (run.folder / image).is_file() else {})

    def write(self) -> None:
        """Write the page in some milliseconds. A failure, as on a full disk, does not end the training."""
        if not (self.run.folder / CONFIG).is_file():  # the folder was moved
            return
        with suppress(OSError, KinformerError):
            page = self._page(history_of(self.run.folder, self.metrics))
            write_atomic(self.run.folder / REPORT, lambda place: place.write_text(page, "utf-8", errors="replace"))

    def _page(self, history: History) -> str:
        run, result = self.run, self.result
        name = str((run.data.get("identity") or {}).get("name") or run.data.get("spec") or "")
        title = f"{run.member} ({run.recipe}) on {name.rsplit('/')[-1]}"
        ended = "" if result is None else f" in {result.seconds:,.0f} s, {result.tokens_per_second:,.0f} tokens/s"
        summary = [f"{plural(history.steps, 'step')}{ended}"]
        if history.validation:
            pick = min if history.metric.lower_is_better else max
            step, best = pick(history.validation, key=lambda point: point[1])
            summary.insert(0, f"best validation {history.metric.text(best)} (step {step:,})")
        style, script = ((ASSETS / file).read_text(encoding="utf-8") for file in ("style.css", "script.js"))
        items = "".join(f"<li>{escape(sentence)}</li>" for sentence in summary)
        sections = [("What came out", f'<ul class="summary">{items}</ul>')]
        if history.training or history.validation:
            sections.append(("Learning", _curve(history)))
        if shown := "".join(self._sample(item) for item in history.samples[-SHOWN:]):
            sections.append(("Samples", shown))
        always = {"recipe": run.recipe} | {name: run.training.get(name) for name in ("optimizer", "lr", "seed")}
        settings = always | training_of(run.training)
        sections += [("Sizes and memory", _pairs(self._sizes())), ("Settings", _pairs(settings))]
        body = "".join(f"<section><h2>{escape(heading)}</h2>{content}</section>" for heading, content in sections)
        made = f"task {run.task.name}; kinformer {__version__}, torch {torch.__version__}; {time.strftime('%Y-%m-%d')}"
        page = (Path(__file__).parent / "assets" / "report.html").read_text(encoding="utf-8")
        return page.format(title=escape(title), made=escape(made), style=style, script=script, body=body)

    def _sizes(self) -> Mapping[str, object]:
        """Return the sizes of the run, counted or estimated by rules, and the memory of this process."""
        training, model = self.run.training, self.model
        rows, length = training["batch_size"], training["length"]
        weights = sum(4 * parameter.numel() for parameter in model.parameters())
        optimizer = optimizer_bytes(model, str(training["optimizer"]))
        sizes: dict[str, object] = {
            "parameters": f"{self.parameters:,}",
            "tokens of a step": f"{rows * length:,}",
            "FLOPs of a step, about (6 a parameter and token)": flops(6 * self.parameters * rows * length),
            "weights, gradients, optimiser, estimated": size(2 * weights + optimizer),
            "most memory of the process": size(process_peak()),
        }
        if self.run.config.protocol is CausalModel:
            sizes[f"state of a row of {length} tokens, estimated"] = size(state_bytes(model, length))
        if self.device.type == "cuda":
            sizes["most memory of the GPU"] = size(torch.cuda.max_memory_allocated(self.device))
        return sizes

    def _sample(self, item: Mapping[str, Any]) -> str:
        image, file = "", self.run.folder / SAMPLES / f"{item['step']:08d}.png"  # no other file that the log may name
        if "image" in item and file.is_file():
            data = b64encode(file.read_bytes()).decode()
            image = f'<img alt="images drawn at step {item["step"]}" src="data:image/png;base64,{data}">'
        written = self.run.task.generation.prompt == "text"
        text = item["sample"] if written else re.sub(r"\S*/(?=[^/\s]+\.\w)", "", item["sample"])  # no folders of files
        return f"<h3>step {item['step']:,}</h3>{image}<pre>{escape(text)}</pre>"


def _pairs(values: Mapping[str, object]) -> str:
    rows = (f"<div><dt>{escape(name)}</dt><dd>{escape(str(value))}</dd></div>" for name, value in values.items())
    return f"<dl>{''.join(rows)}</dl>"


# The curve as SVG, in the colours and with the labelled points of the page's style and script.

WIDTH, HEIGHT, LEFT, LOWER, TICKS, MAX_POINTS = 760, 350, 60, 296, 5, 400


def ticks(low: float, high: float, least: float = 0.0) -> list[tuple[float, str]]:
    """Return the multiples, with their texts, of a round step from ``low`` to ``high``: 1, 2 or 5 times a power of ten,
    ``least`` or more, and at most ``TICKS`` steps."""
    rough = max(least, (high - low) / TICKS)
    digits = floor(log10(rough))
    step = next(step for step in (factor * 10.0**digits for factor in (1, 2, 5, 10)) if step >= rough)
    numbers = range(ceil(low / step), floor(high / step) + 1)
    return [(number * step, f"{number * step:,.{max(0, -digits)}f}") for number in numbers]


def _curve(history: History) -> str:
    """Return the curve of training, smoothed, and the points of validation, with their numbers below."""
    low, high = history.range

    def at(step: float, value: float) -> tuple[float, float]:
        x = LEFT + (WIDTH - LEFT - 16) * step / max(1, history.steps)
        return round(x, 1), round(LOWER - (LOWER - 12) * (min(max(value, low), high) - low) / (high - low), 1)

    drawn = []
    for value, text in ticks(low, high):
        y = at(0, value)[1]
        drawn.append(f'<line x1="{LEFT}" x2="{WIDTH - 16}" y1="{y}" y2="{y}"/>')
        drawn.append(f'<text x="{LEFT - 6}" y="{y + 4}" text-anchor="end">{text}</text>')
    for step, text in ticks(0, max(1, history.steps), least=1):
        drawn.append(f'<text x="{at(step, low)[0]}" y="{LOWER + 24}" text-anchor="middle">{text}</text>')
    smoothed = history.training[:: -(-len(history.training) // MAX_POINTS) or 1]
    for index, curve in enumerate((smoothed, history.validation)):
        points = " ".join("{},{}".format(*at(*point)) for point in curve)
        drawn.append(f'<polyline points="{points}" class="c{index}"/>')
    for step, value in history.validation:
        x, y = at(step, value)
        tip = escape(f"step {step:,}, validation {history.metric.text(value)}")
        drawn.append(f'<circle class="pt" cx="{x}" cy="{y}" r="4" data-tip="{tip}"/>')
    unit = escape(history.unit)
    drawn.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 4}" text-anchor="middle">steps; {unit}</text>')
    keys = ((history.training, 0, "━", "training, smoothed"), (history.validation, 1, "●", "validation"))
    legend = " ".join(f'<span class="c{at}">{sign} {name}</span>' for some, at, sign, name in keys if some)
    rows = "".join(f"<tr><th>{step:,}</th><td>{value:.4f}</td></tr>" for step, value in history.validation)
    return (
        f'<figure><p class="note">{legend}</p><div class="plot" tabindex="0" role="img" aria-label="{unit} against '
        f'steps; arrow keys go from point to point."><svg viewBox="0 0 {WIDTH} {HEIGHT}">{"".join(drawn)}</svg></div>'
        f"<details><summary>Numbers</summary><table><tr><th>step</th><th>validation, {unit}</th></tr>{rows}</table>"
        "</details></figure>"
    )
