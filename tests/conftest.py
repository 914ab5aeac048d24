"""What every test shares: a deterministic Hypothesis without deadlines, and processes that do not fight for cores."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from hypothesis import settings  # noqa: E402

settings.register_profile("steady", deadline=None, derandomize=True)
settings.load_profile("steady")
