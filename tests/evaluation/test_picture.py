"""Patterns drawn in text."""

import torch

import kinformer
from kinformer.lab.drawing.text import draw, pictures, scale
from kinformer.parts.patterns.sequence import Causal, Local


def test_a_causal_pattern_is_a_lower_triangle():
    rows = draw(Causal.Config().build(), cells=3)
    assert rows == ["■ · ·", "■ ■ ·", "■ ■ ■"]


def test_a_window_is_a_band():
    assert draw(Local.Config(window=2).build(), cells=4) == ["■ · · ·", "■ ■ · ·", "· ■ ■ ·", "· · ■ ■"]


def test_wide_windows_are_drawn_with_many_tokens_to_a_cell():
    pattern = Local.Config(window=256).build()
    cell = scale(pattern)
    rows = [row.split() for row in draw(pattern, cell)]
    for query, row in enumerate(rows):
        for key, seen in enumerate(row):
            last = torch.tensor((query + 1) * cell - 1)
            keys = torch.arange(key * cell, (key + 1) * cell)
            assert (seen == "■") == bool(pattern.allowed(last, keys).any())
    assert any("·" in row[:query] for query, row in enumerate(rows))


def test_each_unlike_pattern_of_a_model_is_drawn_once():
    model = kinformer.build("gpt", recipe="tiny", set={"layers": 4, "layers.2.mixer.pattern": "local"})
    assert [each["pattern"] for each in pictures(model)] == ["causal", "local"]
    assert pictures(kinformer.build("linear-transformer", recipe="tiny")) == []


def test_each_unlike_head_is_drawn_once():
    rows = [each["rows"] for each in pictures(kinformer.build("sparse-transformer", recipe="tiny-heads"))]
    assert [{key for key, cell in enumerate(drawn[10].split()) if cell == "■"} for drawn in rows] == [
        {5, 6, 7, 8, 9, 10},
        {4, 10},
    ]
