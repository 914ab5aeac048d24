"""What can this machine do at most? Products of matrices, bytes read, calls: other tables are to be read by these.

The best of several tries each, by PyTorch's products as `kinformer train` sets them. `kinformer bench` measures the
same, and tells which share of it is reached.
"""

from __future__ import annotations

from dataclasses import asdict

from common import arguments, prepare, save, show
from kinformer.lab.comparison.speed import described, machine, measure_floor
from kinformer.runtime.process import begin_process


def main() -> None:
    options = prepare(arguments(__doc__))
    begin_process()
    floor = measure_floor("cpu")
    rows = [
        ["GFLOP/s, float32", floor.flops / 1e9],
        ["GFLOP/s, bfloat16", floor.narrow_flops / 1e9],
        ["GB/s read", floor.bandwidth / 1e9],
        ["microseconds, a Python call", floor.call * 1e6],
        ["microseconds, an operator", floor.operator * 1e6],
    ]
    show(f"floor of {described(machine('cpu'))}", ("what", "at most"), rows)
    save(options, "floor", {"floor": asdict(floor)})


if __name__ == "__main__":
    main()
