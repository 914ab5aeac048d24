"""Calibration of a run: by a bound on a risk, or by a search of thresholds of every exit."""

from __future__ import annotations

from pathlib import Path

from kinformer.calibration import calibrate as bounded
from kinformer.calibration import search as searched
from kinformer.calibration.options import CalibrateOptions


def calibrate(
    folder: str | Path, options: CalibrateOptions, quiet: bool = True
) -> bounded.Calibrated | searched.SearchResult:
    """Calibrate or search, as the options say; the public form is :func:`kinformer.calibrate`."""
    if options.search is not None:
        return searched.search(folder, options)
    return bounded.calibrate(folder, options, quiet)
