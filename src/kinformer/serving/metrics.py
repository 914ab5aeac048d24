"""The engine's numbers in the text format of Prometheus."""

from __future__ import annotations

from kinformer.serving.engine import Engine

_ENDED = ("stop", "length", "cancelled", "failed")


def exposition(engine: Engine) -> str:
    """Return all metrics as text, each with its help and its type."""
    counts, limits = engine.counts, engine.limits
    ended = {f'{{reason="{reason}"}}': counts[reason] for reason in _ENDED}
    families = [
        ("kinformer_streams", "gauge", "Sequences that are being continued.", {"": engine.rows}),
        ("kinformer_streams_limit", "gauge", "Sequences that may be continued.", {"": limits.max_streams}),
        ("kinformer_waiting_requests", "gauge", "Requests that wait for their turn.", {"": engine.waiting}),
        ("kinformer_state_bytes", "gauge", "Bytes that the state of all sequences holds.", {"": engine.state_bytes}),
        ("kinformer_prompt_tokens_total", "counter", "Tokens of prompts absorbed.", {"": counts["prompt"]}),
        ("kinformer_new_tokens_total", "counter", "Tokens drawn.", {"": counts["drawn"]}),
        ("kinformer_steps_total", "counter", "Steps of the batch.", {"": counts["steps"]}),
        ("kinformer_streams_ended_total", "counter", "Sequences that ended, by reason.", ended),
        ("kinformer_requests_refused_total", "counter", "Requests refused as busy.", {"": counts["refused"]}),
    ]
    if limits.max_state_bytes is not None:
        families.append(
            ("kinformer_state_bytes_limit", "gauge", "Bytes that it may hold.", {"": limits.max_state_bytes})
        )
    lines = []
    for name, kind, text, values in families:
        lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
        lines += [f"{name}{label} {value}" for label, value in values.items()]
    return "\n".join(lines) + "\n"
