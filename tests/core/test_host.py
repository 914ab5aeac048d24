"""What the host says of its processor."""

import pytest

from kinformer.kernels.attention import TABLE
from kinformer.runtime import process as processor


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("flags: avx2 avx512_bf16", "AVX-512 and bfloat16"),
        ("flags: avx512_bf16 amx_tile amx_bf16", "AMX"),
        ("flags: avx2", "other"),
        ("flags: sse2 avx2", "other"),
        (None, "other"),
    ],
)
def test_processors_are_told_apart(flags: str | None, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "processor", lambda: flags)
    processor.processor_class.cache_clear()
    try:
        assert processor.processor_class() == expected
        assert processor.emulates_bfloat16() == (expected == "other" and "sse2" in (flags or ""))
    finally:
        processor.processor_class.cache_clear()
    assert expected in TABLE
