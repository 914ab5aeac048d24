"""Counts in sentences."""

from kinformer.runtime.errors import plural


def test_one_is_no_plural():
    assert [plural(count, "step") for count in (0, 1, 2, 2000)] == ["0 steps", "1 step", "2 steps", "2,000 steps"]
    assert [plural(2, noun) for noun in ("query", "key", "class", "prefix", "kv head")] == [
        "2 queries", "2 keys", "2 classes", "2 prefixes", "2 kv heads",
    ]  # fmt: skip
