"""The 61 phones of TIMIT's transcripts folded into the 39 classes by which error rates are reported (Lee and Hon 1989,
"Speaker-independent phone recognition using hidden Markov models", table II).

The table is that of Kaldi's recipe for TIMIT (``egs/timit/s5/conf/phones.60-48-39.map``): classes confused with each
other count as one, closures and pauses are silence, and the glottal stop ``q`` is left out of both transcripts. Names
of the 48 phones that models are trained on there fold into the same classes.
"""

from __future__ import annotations

from collections.abc import Sequence

from kinformer.runtime.errors import KinformerError

SILENCE, LEFT_OUT = "sil", "q"
_ALONE = "ae aw ay b ch d dh dx eh ey f g iy jh k ow oy p r s t th uh v w y z"
_MERGED = {
    "aa": "ao",
    "ah": "ax ax-h",
    "er": "axr",
    "hh": "hv",
    "ih": "ix",
    "l": "el",
    "m": "em",
    "n": "en nx",
    "ng": "eng",
    "sh": "zh",
    "uw": "ux",
    SILENCE: "bcl dcl gcl kcl pcl tcl epi pau h# cl vcl",  # cl and vcl are closures of the 48
}
CLASSES = {phone: phone for phone in _ALONE.split()} | {
    phone: name for name, others in _MERGED.items() for phone in (name, *others.split())
}
"""The class of every phone but ``q``."""


def folded(phones: Sequence[str]) -> list[str]:
    """Return the classes of ``phones``, in any case; a symbol that is no phone is an error."""
    names = [phone.lower() for phone in phones]
    for name in names:
        if name not in CLASSES and name != LEFT_OUT:
            raise KinformerError(
                f"`fold` timit39: {name!r} in a transcript is none of TIMIT's phones; leave it "
                "out where transcripts are of other symbols."
            )
    return [CLASSES[name] for name in names if name != LEFT_OUT]
