"""Calibration of a run: by a bound on a risk, or by a search of thresholds of every exit."""

from __future__ import annotations

from pathlib import Path

from kinformer.lab.calibration import calibrate as bounded
from kinformer.lab.calibration.calibrate import SearchResult, search
from kinformer.lab.calibration.options import CalibrateOptions


def calibrate(folder: str | Path, options: CalibrateOptions, quiet: bool = True) -> bounded.Calibrated | SearchResult:
    """Calibrate or search, as the options say; the public form is :func:`kinformer.calibrate`."""
    if options.search is not None:
        return search(folder, options)
    return bounded.calibrate(folder, options, quiet)
