"""What the emulator's operations cost here, in nanoseconds a lane:  python -m softmetal.costs"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from softmetal.library import Library, update

KERNELS = Path(__file__).parent / "kernels"
LANES, GROUPS, TIMES = 256, 8, 400


def _seconds(library: Library, kernel: str, n: int) -> float:
    out, numbers = np.zeros(GROUPS * LANES * 2, np.float32), np.arange(256, dtype=np.float32)
    best = float("inf")
    for _ in range(5):
        begin = time.perf_counter()
        library.run(
            kernel, groups=GROUPS, threads=LANES, workers=1,
            buffers={0: update(out), 1: np.uint32(n), 2: numbers},
        )  # fmt: skip
        best = min(best, time.perf_counter() - begin)
    return best


def main() -> None:
    source = (KERNELS / "costs.metal").read_text()
    libraries = {mode: Library.compile(source, mode=mode) for mode in ("plain", "detect")}
    print(f"{'ns a lane':18}{'plain':>8}{'detect':>8}")
    for kernel in libraries["plain"].kernels:
        row = []
        for library in libraries.values():
            few = _seconds(library, kernel, 1)
            spent = few if kernel == "nothing" else _seconds(library, kernel, 1 + TIMES) - few
            row.append(spent * 1e9 / (GROUPS * LANES * (1 if kernel == "nothing" else TIMES)))
        print(f"{kernel:18}{row[0]:8.1f}{row[1]:8.1f}")


if __name__ == "__main__":
    main()
