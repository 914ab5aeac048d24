"""Plots of result files that come without a picture, from the content of the file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from statistics import mean
from typing import Any

from generator.charts import Bars, Lines, Plot
from kinformer.runtime.errors import plural


def bars(unit: str, values: Mapping[str, float], log: bool = False, dots: bool = False) -> list[Plot]:
    """One plot with one series."""
    return [Bars(unit, {"": values}, log, dots)]


def means(items: Iterable[Mapping[str, Any]], label: str, value: str) -> dict[str, float]:
    """The mean of ``value`` over the items of each ``label``."""
    groups: dict[str, list[float]] = {}
    for item in items:
        groups.setdefault(item[label], []).append(item[value])
    return {name: mean(values) for name, values in groups.items()}


def _column(items: Iterable[Mapping[str, Any]], label: Callable[[Any], str], value: str) -> dict[str, float]:
    return {label(item): item[value] for item in items}


def _acting(data: Any) -> list[Plot]:
    groups = {
        plural(rows, "environment"): {item["member"]: item["ratio"] for item in data["found"] if item["rows"] == rows}
        for rows in (1, 16)
    }
    return [Bars("times as fast as recomputing", groups)]


def _calm(data: Any) -> list[Plot]:
    series = {
        name: [(item["threshold"], item["risk"]) for item in sorted(part["tested"], key=lambda item: item["threshold"])]
        for name, part in data["calibration"].items()
    }
    return [Lines("threshold", "risk on the calibration prompts", series)]


def _shape(item: Any) -> str:
    member = f"{item['member']}, " if "member" in item else ""
    return f"{member}{item['vocabulary']:,}, {item['rows']} x {item['length']}, {item['precision']}"


def _cross_entropy(data: Any) -> list[Plot]:
    shares = {_shape(item): item["pieces bytes"] / item["whole bytes"] for item in data["shapes"]}
    return [
        Bars("memory as a share of all logits at once", {"": shares}),
        Bars("times as fast", {"": _column(data["shapes"], _shape, "times as fast")}),
    ]


def _encoders(data: Any) -> list[Plot]:
    series = {
        name: [(length, peak / 2**20) for length, peak in zip(part["lengths"], part["peak_bytes"], strict=True)]
        for name, part in data["memory"].items()
    }
    return [Lines("tokens", "peak memory, MiB", series, "xy")]


def _generation(data: Any) -> list[Plot]:
    groups = {
        f"batch {point['batch']}": {item["name"]: item["ms_per_step"] for item in point["contestants"]}
        for point in data["points"]
    }
    return [Bars("ms per token", groups)]


def _growth(data: Any) -> list[Plot]:
    series = {
        name: list(zip(part["lengths"], part["processor_seconds"], strict=True))
        for name, part in data["growth"].items()
    }
    return [Lines("tokens", "processor time of a step, s", series, "xy")]


def _images(data: Any) -> list[Plot]:
    values = {name: part["images_per_second"] for name, part in data["contestants"].items()}
    return bars("images a second", values, log=True)


def _kernels(data: Any) -> list[Plot]:
    values = {
        f"{kernel}: {name}": part["milliseconds"]
        for kernel, parts in data["results"].items()
        for name, part in parts.items()
        if not part["fast_products"]
    }
    return bars("ms, PyTorch's default products", values)


def _key_to_door(data: Any) -> list[Plot]:
    names = {"success": "likeliest action", "success_drawn": "drawn actions", "cloning": "cloned behaviour"}
    groups = {
        f"{item['walks']:,} walks": {label: 100 * item[key] for key, label in names.items()} for item in data["means"]
    }
    return [Bars("doors opened, %", groups)]


def _knn_domain(data: Any) -> list[Plot]:
    sizes = [(item["entries"], item["bits_per_byte"]) for item in data["sizes"]]
    return [
        Lines("entries in the datastore", "bits per byte", {"": sizes}, "x"),
        Lines("weight of the datastore", "bits per byte", {"": data["weights"]}),
    ]


def _length(data: Any) -> list[Plot]:
    series = {
        f"{item['member']}, {item['precision']}": list(zip(data["lengths"], item["seconds"], strict=True))
        for item in data["results"]
    }
    return [Lines("length of a sequence", "seconds for 65,536 tokens", series, "x")]


def _linformer(data: Any) -> list[Plot]:
    names = ("fitted", "mean", "fitted means", "best")
    errors = {name: [(item["rank"], item[name]) for item in data["errors"] if item["rank"] < 256] for name in names}
    times = {
        name: [(int(length), seconds) for length, seconds in part["processor_seconds"].items()]
        for name, part in data["times"].items()
    }
    return [Lines("rank", "relative error", errors, "x"), Lines("tokens", "processor time, s", times, "xy")]


def _decay(data: Any) -> list[Plot]:
    series = {}
    for steps, settings in data["texts"]["Tiny Shakespeare"].items():
        decays = {name.removeprefix("decay "): item["bits_per_byte"] for name, item in settings.items()}
        points = [(float(decay), bits) for decay, bits in decays.items() if decay.replace(".", "").isdigit()]
        if len(points) > 1:
            series[steps] = sorted(points)
    return [Lines("weight decay", "bits per byte", series, "x")]


def _members(data: Any) -> list[Plot]:
    series = {}
    for member, settings in data["texts"]["Tiny Shakespeare"]["members"].items():
        points = [(float(name.rpartition(" ")[2]), item["bits_per_byte"]) for name, item in settings.items()
                  if name.startswith("680 steps")]  # fmt: skip
        series[member] = sorted(points)
    return [Lines("learning rate", "bits per byte", series, "x")]


def _settings(*path: str) -> Callable[[Any], list[Plot]]:
    """Bits per byte of the settings at ``path``."""

    def plot(data: Any) -> list[Plot]:
        for key in path:
            data = data[key]
        return bars("bits per byte", {name: item["bits_per_byte"] for name, item in data.items()}, dots=True)

    return plot


def _ponder(data: Any) -> list[Plot]:
    names = {"act": "ACT", "fixed": "six fixed steps", "stack": "stack"}
    series = {}
    for model, runs in data["runs"].items():
        digits = [item["digits"] for item in runs[0]["by_digits"]]
        rights = [mean(run["by_digits"][index]["accuracy"] for run in runs) for index in range(len(digits))]
        series[names[model]] = [(count, 100 * right) for count, right in zip(digits, rights, strict=True)]
    return [Lines("digits", "tokens right, %", series)]


def _pyramid(data: Any) -> list[Plot]:
    groups = {
        labels: {name: 100 * mean(parts[labels]) for name, parts in data["accuracy"].items() if labels in parts}
        for labels in ("64 labels", "256 labels")
    }
    return [Bars("accuracy, %", groups)]


def _returns(data: Any) -> list[Plot]:
    plots: list[Plot] = []
    for environment in dict.fromkeys(run["env"] for run in data["runs"]):
        series = {
            f"seed {run['seed']}": [(item["target"], item["mean"]) for item in run["returns"]]
            for run in data["runs"]
            if run["env"] == environment
        }
        plots.append(Lines(f"target return, {environment}", "mean return", series))
    return plots


def _reversible(data: Any) -> list[Plot]:
    groups = {
        f"{depth} layers": {
            f"{item['member']}, {item['stack']}": item["alive"] / 2**20
            for item in data["points"]
            if item["depth"] == depth
        }
        for depth in (4, 32)
    }
    return [Bars("alive at once, MiB", groups)]


def _small_operations(data: Any) -> list[Plot]:
    series: dict[str, list[tuple[float, float]]] = {}
    for item in data["rows"]:
        series.setdefault(f"{item['what']}, threads: {item['threads']}", []).append(
            (item["dim"], item["times as fast"])
        )
    return [Lines("dim", "times as fast", series)]


def _sparse(data: Any) -> list[Plot]:
    shares = {name: pairs["computed"] / pairs["attended"] for name, pairs in data["pairs"].items()}
    return [
        Bars("pairs computed for every pair attended", {"": shares}),
        Bars("ms, forward and backward", {"": data["milliseconds"]["positions"]}),
    ]


def _speech(data: Any) -> list[Plot]:
    series: dict[str, list[tuple[float, float]]] = {}
    for item in data["times"]:
        for member, part in item["members"].items():
            series.setdefault(member, []).append((item["frames"], part["speed"]))
    errors = {item["member"]: 100 * item["error_rate"] for item in data["errors"]}
    return [Bars("digits wrong, %", {"": errors}), Lines("frames", "speed, softmax being 1", series, "x")]


def _speedrun(data: Any) -> list[Plot]:
    """The last entry with both contestants on Tiny Shakespeare, and the 5-gram."""
    entry = [item for item in data["history"] if item["data"] == "tinyshakespeare.txt" and len(item["runs"]) > 3][-1]
    series = {f"{run['name']}, seed {run['seed']}": run["curve"] for run in entry["runs"] if run["minutes"] == 4}
    ngram = entry["runs"][0]["ngram"]
    return [Lines("seconds", "bits per byte of the validation", {**series, "5-gram": [(0, ngram), (240, ngram)]})]


def _stream(data: Any) -> list[Plot]:
    series = {
        item["member"]: [(point["tokens"], point["resident_bytes"] / 2**20) for point in item["watch"]]
        for item in data["results"]
    }
    return [Lines("tokens absorbed", "resident memory, MiB", series)]


def _training_step(data: Any) -> list[Plot]:
    groups = {
        f"{point['batch']} x {point['length']:,}": {
            name: item["tokens_per_second"] for name, item in point["contestants"].items()
        }
        for point in data["points"]
    }
    return [Bars("tokens a second", groups)]


def _since_2025(data: Any) -> list[Plot]:
    """Bytes of states and milliseconds of tokens by length, right answers by pairs; without the parts not run yet."""
    plots: list[Plot] = []
    for what, x, y, value in (
        ("state", "tokens", "state, KiB", lambda row: row["bytes"] / 1024),
        ("token", "tokens before", "ms per token", lambda row: row["ms"]),
        ("recall", "pairs", "right answers", lambda row: row["accuracy"]),
    ):
        series: dict[str, list[tuple[float, float]]] = {}
        for row in data["rows"]:
            if row["what"] == what:
                series.setdefault(row["member"], []).append((row["size"], value(row)))
        if series:
            plots.append(Lines(x, y, series, "xy" if what != "recall" else ""))
    return plots


PLOTS: dict[str, Callable[[Any], list[Plot]]] = {
    "acting": _acting,
    "calm": _calm,
    "cross_entropy": _cross_entropy,
    "datastore": lambda data: [
        Lines("seconds for 1,024 queries", "recall@32", {"": [(x["seconds"], x["recall"]) for x in data["searches"]]})
    ],
    "distillation": lambda data: bars("test accuracy, mean of three seeds", means(data["runs"], "name", "accuracy")),
    "encoders": _encoders,
    "equal_flops": lambda data: bars(
        "test accuracy", {f"{x['member']}, {x['rate']:g}, seed {x['seed']}": x["accuracy"] for x in data["runs"]}
    ),
    "generation": _generation,
    "hashing": _growth,
    "image_generation_cifar": _images,
    "image_generation_mnist": _images,
    "kept_memory": lambda data: bars("times as fast", _column(data["shapes"], _shape, "times as fast")),
    "kernel_attention": lambda data: bars(
        "time, PyTorch's causal attention being 1", {name: x["times_sdpa"] for name, x in data["times"].items()}
    ),
    "kernels": _kernels,
    "key_to_door": _key_to_door,
    "knn_domain": _knn_domain,
    "length": _length,
    "linformer_rank": _linformer,
    "listops": lambda data: bars("accuracy", _column(data["runs"], lambda x: x["name"], "accuracy")),
    "memorizing": lambda data: bars("ms", data["milliseconds"]),
    "memory_control": lambda data: bars("mean return", _column(data["means"], lambda x: x["name"], "mean")),
    "memory_control_deep": lambda data: bars("mean return", _column(data["means"], lambda x: x["name"], "mean")),
    "minutes": _settings("budgets", "1 minutes"),
    "minutes_decay": _decay,
    "minutes_members": _members,
    "minutes_positions": _settings("texts", "Tiny Shakespeare", "850 steps"),
    "ponder": _ponder,
    "ponder_addition": _ponder,
    "ponder_copy": _ponder,
    "pyramid": _pyramid,
    "quality": lambda data: bars(
        "bits per byte", _column(data["runs"], lambda x: x["member"], "bits_per_byte"), dots=True
    ),
    "returns": _returns,
    "reversible": _reversible,
    "since_2025": _since_2025,
    "small_operations": _small_operations,
    "sparse": _sparse,
    "speech": _speech,
    "speedrun": _speedrun,
    "stream": _stream,
    "training_step": _training_step,
    "versions": lambda data: bars(
        "time, 0.1.0 being 1", {name: x["ratio"] for name, x in data["results"].items()}, dots=True
    ),
    "window_length": _length,
}
"""Result -> its plots from the content of its file."""
