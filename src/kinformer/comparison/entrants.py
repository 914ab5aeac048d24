"""The entrants of a comparison: members, or hybrids of them in a ratio, with changes of their own, at one budget of
parameters."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields

from kinformer.comparison.results import FactSheet
from kinformer.core.config import to_dict
from kinformer.core.model_config import ModelConfig
from kinformer.core.overrides import override
from kinformer.estimation.state_size import state_bytes
from kinformer.family.build import configure
from kinformer.family.kinds import kinds
from kinformer.family.record import Member, MemberSheet
from kinformer.family.table import member
from kinformer.figures.formulas import Formula, formulas
from kinformer.figures.text_picture import pictures
from kinformer.runs.minutes import resized
from kinformer.runtime.errors import KinformerError, nearest
from kinformer.runtime.fields import require_kind
from kinformer.runtime.unallocated import unallocated
from kinformer.runtime.words import plural
from kinformer.training.settings import Settings

TOLERANCE = 0.05
STATE_LENGTHS = (128, 256, 1024, 4096, 16384, 65536)
MAX_PATTERNS = 6
GRAIN, FINE, NARROWEST, WIDEST = 16, 4, 16, 1 << 14
_SPEC = re.compile(r"(?:(?P<name>[\w.+-]+)=)?(?P<parts>[\w-]+(?::\d+)?(?:,[\w-]+(?::\d+)?)*)")


@dataclass(frozen=True)
class Entrant:
    """A model to compare: its ``name`` in the comparison; ``parts``, members with the number of layers that each has in
    a row of the stack's cycle, the first of which gives all but layers; and the ``changes`` of its config."""

    name: str
    spec: str
    parts: tuple[tuple[str, int], ...]
    changes: Mapping[str, object] = field(default_factory=dict)

    @property
    def member(self) -> str:
        """The member that gives all but layers."""
        return self.parts[0][0]

    def needs(self, task_options: type) -> dict[str, object]:
        """Return the options of the task without which its members are not themselves."""
        option_fields = {item.name for item in fields(task_options)}
        needed: dict[str, object] = {}
        for name, _ in self.parts:
            needed |= {option: value for option, value in member(name).needs.items() if option in option_fields}
        return needed

    def layers(self, recipe: str, config: ModelConfig) -> dict[str, object]:
        """Return the changes that put the other members' layers into the cycle; none for a plain member."""
        if len(self.parts) == 1:
            return {}
        cycle = [name for name, count in self.parts for _ in range(count)]
        depth = max(len(cycle), len(config.layers) // len(cycle) * len(cycle))
        result: dict[str, object] = {"layers": depth} if depth != len(config.layers) else {}
        for index in range(depth):
            if (name := cycle[index % len(cycle)]) != self.member:
                others = configure(name, recipe).layers
                result[f"layers.{index}"] = to_dict(others[index % len(others)])
        return result


def entrants(specs: Sequence[str], changes: Mapping[str, object]) -> list[Entrant]:
    """Return the entrants that ``specs`` name, as ``gpt``, ``linear-transformer:3,gpt:1`` or ``wide=gpt``.

    ``changes``: ``path -> value`` for all, ``NAME:path -> value`` for one.
    """
    parsed = [_parsed(spec) for spec in specs]
    names = [entrant.name for entrant in parsed]
    for name in names:
        if names.count(name) > 1:
            raise KinformerError(f"{name}: is named twice; give one of them another name, as in other={name}.")
    for path in changes:
        if (owner := _owner(path)) and owner not in names:
            raise KinformerError(f"`set` {path}: {owner!r} is not compared; {nearest(owner, names)}")
    return [
        Entrant(
            entrant.name,
            entrant.spec,
            entrant.parts,
            {path.rpartition(":")[2]: value for path, value in changes.items() if _owner(path) in ("", entrant.name)},
        )
        for entrant in parsed
    ]


def _owner(path: str) -> str:
    return path.rpartition(":")[0]


def _parsed(spec: str) -> Entrant:
    require_kind("member", spec, str)
    match = _SPEC.fullmatch(spec)
    if match is None:
        raise KinformerError(
            f"{spec}: is no member; write a name, a hybrid as in linear-transformer:3,gpt:1, or wide=gpt for another "
            "name."
        )
    parts = []
    for part in match["parts"].split(","):
        name, _, count = part.partition(":")
        if count and not int(count):
            raise KinformerError(f"{spec}: {name} has 0 layers of the cycle; give 1 or more, or leave it out.")
        parts.append((member(name).name, int(count or 1)))
    if len(parts) == 1 and ":" in match["parts"]:
        raise KinformerError(f"{spec}: is a ratio of one member; name another, as in {spec},gpt:1.")
    if len({member(name).causal for name, _ in parts}) > 1:
        raise KinformerError(f"{spec}: mixes causal members with such as read whole texts; choose of one kind.")
    return Entrant(match["name"] or match["parts"], match["parts"], tuple(parts))


def parameters_of(config: ModelConfig) -> int:
    """Count the parameters of a model of ``config`` without allocating any."""
    with unallocated():
        return sum(parameter.numel() for parameter in config.build().parameters())


def sized(config: ModelConfig, changes: Mapping[str, object], budget: int, name: str) -> dict[str, int]:
    """Return changes of width that bring a model of ``config`` with ``changes`` within 5 % of ``budget`` parameters.

    The width is the multiple of 16 (or of 4) that comes nearest, the number of heads stays, then the feed-forwards are
    widened or narrowed by what is left.
    Errors: ``KinformerError`` where no width does.
    """
    parameters_of(override(config, changes, kinds()))  # tells what is wrong with the changes themselves
    candidates = list(_near(config, changes, budget)) if "dim" not in changes else [{}]
    best: tuple[float, dict[str, int]] = (float("inf"), {})
    for widths in candidates:
        for best_widths in (widths, _feed_forwards(config, widths, changes, budget)):
            count = _count(config, {**best_widths, **changes})
            if count is not None and abs(count / budget - 1) < best[0]:
                best = abs(count / budget - 1), best_widths
        if best[0] <= TOLERANCE / 5:
            break
    if best[0] > TOLERANCE:
        parameters = _count(config, {**best[1], **changes})
        raise KinformerError(
            f"{name}: no width gives {plural(budget, 'parameter')} within {TOLERANCE:.0%}"
            + (f" (the nearest has {parameters:,})" if parameters else "")
            + "; give another `parameters`, or `set` NAME:dim=... less."
        )
    return {path: value for path, value in best[1].items() if path not in changes}


def _near(config: ModelConfig, changes: Mapping[str, object], budget: int) -> Iterator[dict[str, int]]:
    """Yield the widths around the budget, the nearest multiples of 16 first, then those of 4."""
    low, high = NARROWEST, NARROWEST
    while high < WIDEST and (_at(config, high, changes) or 0) < budget:
        low, high = high, 2 * high
    while high - low > GRAIN:
        middle = (low + high) // 2 // GRAIN * GRAIN
        if (_at(config, middle, changes) or budget) < budget:
            low = middle
        else:
            high = middle
    counted = [(dim, _at(config, dim, changes)) for dim in range(low, high + 1, FINE)]
    for _, _, dim in sorted((dim % GRAIN > 0, abs(count / budget - 1), dim) for dim, count in counted if count):
        yield resized(config, dim, heads_of_64=False)


def _at(config: ModelConfig, dim: int, changes: Mapping[str, object]) -> int | None:
    widths = resized(config, dim, heads_of_64=False)
    return _count(config, {**widths, **changes}) if widths else None


def _count(config: ModelConfig, changes: Mapping[str, object]) -> int | None:
    with suppress(KinformerError):
        return parameters_of(override(config, changes, kinds()))
    return None


def _feed_forwards(
    config: ModelConfig, widths: dict[str, int], changes: Mapping[str, object], budget: int
) -> dict[str, int]:
    """Return ``widths`` with feed-forwards so wide that the parameters meet the budget, which they do in proportion."""
    paths = {path: value for path, value in widths.items() if path.endswith("hidden_dim") and path not in changes}
    if not paths:
        layers = config.layers
        hidden = getattr(getattr(layers[0], "feed_forward", None), "hidden_dim", None)
        if hidden is None or len({getattr(layer.feed_forward, "hidden_dim", None) for layer in layers}) > 1:
            return widths
        paths = {"layers.*.feed_forward.hidden_dim": hidden}
    more = {path: value + 8 for path, value in paths.items()}
    counts = [_count(config, {**widths, **result, **changes}) for result in (paths, more)]
    if None in counts or counts[0] == counts[1]:
        return widths
    step = 8 * round((budget - counts[0]) / (counts[1] - counts[0]))  # type: ignore[operator]
    return widths | {path: max(8, value + step) for path, value in paths.items()}


def facts(entrant: Entrant, config: ModelConfig) -> FactSheet:
    """Return an entrant's fact sheet as data that JSON can hold; the model is built on the meta device."""
    with unallocated():
        model = config.build()
    limit = model.max_length
    lengths = [length for length in STATE_LENGTHS if limit is None or length <= limit] + ([limit] if limit else [])
    records = [member(name) for name, _ in entrant.parts]
    return {
        "members": [_sheet(record) for record in records],
        "config": to_dict(config),
        "formulas": [line for formula in formulas(config) for line in _lines(formula)],
        "max_length": limit,
        "state_bytes": {str(length): state_bytes(model, length) for length in sorted(set(lengths))},
        "patterns": pictures(model)[:MAX_PATTERNS],
        "needs": sorted({f"{name}={value}" for record in records for name, value in record.needs.items()}),
    }


def _lines(formula: Formula) -> list[str]:
    """Return a formula as lines of text, its slot and kind first."""
    return [f"{formula.slot.replace('_', ' ')} {formula.kind}", *(f"    {line}" for line in formula.lines)]


def _sheet(record: Member) -> MemberSheet:
    """Return what a fact sheet says of a member, as JSON gives it back."""
    sheet = record.sheet
    return {**sheet, "axes": list(sheet["axes"]), "departures": list(sheet["departures"])}


def settings_of(settings: Settings) -> dict[str, object]:
    """Return the settings of training as data that JSON can hold."""
    return {field.name: getattr(settings, field.name) for field in fields(settings)}
