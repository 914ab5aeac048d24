"""The options of drawing. Free of PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kinformer.runtime.errors import require, require_seed
from kinformer.runtime.fields import Checked

MAX_TOKENS, MAX_WIDTH = 65_536, 1024
"""The most tokens of a picture, which computes all pairs of tokens, and the most pixels of a line of an image."""


@dataclass(frozen=True, kw_only=True)
class DrawOptions(Checked):
    """Draw who sees whom, and where things are: heads and layers side by side where they differ, once where not."""

    subject: str
    """A member of the family, a run folder, a kind of pattern or position, or a pattern or position as JSON, as in
    '{"kind": "union", "patterns": [{"kind": "local", "window": 4}, {"kind": "columns", "stride": 8}]}'."""
    pattern: bool = False
    """Take the name for a kind of pattern, if a member has the same name."""
    position: bool = False
    """Take the name for a kind of position, if a member has the same name."""
    curve: bool = False
    """Of a run: its curve of training, smoothed, and of validation."""
    spans: bool = False
    """Of a run whose heads learn how far back they look: their spans, by layer and head."""
    exits: bool = False
    """Of a run whose tokens may leave early: a text coloured by the layers that each token took."""
    buckets: bool = False
    """Of a run whose heads attend within buckets or clusters: a text coloured by the buckets of one layer and head."""
    experts: bool = False
    """Of a run with a mixture of experts: a text coloured by the first expert of every token in one layer."""
    blocks: bool = False
    """Of a run whose tokens choose blocks of keys: the blocks that the tokens of a text chose, by layer and head."""
    image: str | None = None
    """Of a run of the task vision: its attention to an image (a PNG or JPEG, or the first test image of data), by
    attention roll-out, or the windows of its stages."""
    data: str | None = None
    """For `exits`, `buckets`, `experts`, `blocks`: the text, a path or stdlib (the run's test split if not given)."""
    recipe: str = "small"
    """Which of the member's recipes."""
    set: Mapping[str, object] = field(default_factory=dict)
    """Change the recipe, or an option of the pattern or position, as in `set` window=8; may be given again."""
    length: int | None = None
    """Tokens in the picture; if not given, as many as show the structure."""
    layer: int | None = None
    """Only this layer, counted from 1."""
    head: int | None = None
    """Only this head, counted from 1."""
    image_width: int | None = None
    """Also show the pixels that one query sees in an image of this width, whose positions are pixels line by line."""
    out: str | None = None
    """The picture's file, which ends in .png or .svg; NAME.png in this folder if not given."""
    seed: int = 0
    """The seed of all random numbers."""

    def __post_init__(self) -> None:
        for name, limit in (("length", MAX_TOKENS), ("layer", None), ("head", None), ("image_width", MAX_WIDTH)):
            require(name, getattr(self, name), 1, limit)
        require_seed(self.seed)
        super().__post_init__()
