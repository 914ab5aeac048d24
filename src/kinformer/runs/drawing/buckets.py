"""The text of a run's data, or another, with the bucket or cluster that a head of the run sorts each token into."""

from __future__ import annotations

from kinformer.figures.coloured_text import ColouredText
from kinformer.runs.drawing.options import DrawOptions
from kinformer.runs.drawing.text import TRACED, pieces_of, text_run, tokens_of
from kinformer.runs.tracing.options import TraceOptions
from kinformer.runs.tracing.record import AttentionTrace
from kinformer.runs.tracing.trace import trace
from kinformer.runtime.errors import KinformerError
from kinformer.runtime.words import plural


def text_by_buckets(options: DrawOptions) -> tuple[ColouredText, dict[str, object]]:
    """Return the first ``options.length`` tokens of the text, coloured by the bucket of the first round, and facts:
    ``layer``, ``head`` and the number of ``tokens`` in every bucket."""
    run = text_run(options, "buckets")
    assert run.tokenizer is not None
    tokens = tokens_of(run, options)[: options.length or TRACED].tolist()
    layers = None if options.layer is None else str(options.layer)
    text = run.tokenizer.decode(tokens)
    settings = TraceOptions(layers=layers, max_tokens=len(tokens), set=options.set, seed=options.seed, device="cpu")
    traced = trace(run.folder, text, settings)
    site = next((item for item in traced.attention if item.buckets is not None), None)
    if site is None:
        raise KinformerError(
            f"{run.folder}: no head of {'this layer' if layers else 'this run'} attends within buckets or clusters; "
            "give a run of reformer or routing."
        )
    head, groups = _head(site, options)
    count = max(groups) + 1
    members = [groups.count(group) for group in range(count)]
    title = (
        f"{run.folder.name} ({run.member}), layer {site.layer}, head {head}: {plural(len(groups), 'token')} in "
        f"{plural(sum(map(bool, members)), 'group')}"
    )
    coloured = ColouredText(
        title=title,
        pieces=pieces_of(run, traced.ids.tolist(), groups),
        legend="group",
        labels=[f"{group + 1}  {number / len(groups):.0%}" for group, number in enumerate(members)],
        ordered=False,
    )
    return coloured, {"layer": site.layer, "head": head, "tokens": members}


def _head(site: AttentionTrace, options: DrawOptions) -> tuple[int, list[int]]:
    """Return the head of ``options``, or the first that has buckets, and the buckets of its first round."""
    assert site.buckets is not None
    sorting = {
        number: item[0].tolist() for number, item in zip(site.heads, site.buckets, strict=True) if item.min() >= 0
    }
    head = options.head or min(sorting)
    if head not in sorting:
        raise KinformerError(
            f"`head` {head}: does not attend within buckets or clusters; those that do are "
            f"{', '.join(map(str, sorting))}."
        )
    return head, sorting[head]
