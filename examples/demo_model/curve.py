"""Draw loss.svg from the training records in runs/ (needs matplotlib).

python examples/demo_model/curve.py
"""

import json
from pathlib import Path

import matplotlib as mpl
from matplotlib import pyplot as plt

HERE = Path(__file__).resolve().parent
SHIPPED, LONGER = "shipped.json", "longer.json"


def main() -> None:
    mpl.rcParams["svg.hashsalt"] = "lily"
    figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
    for name, label, colour in ((SHIPPED, "shipped run", "C0"), (LONGER, "longer run", "C1")):
        run = json.loads((HERE / "runs" / name).read_text("utf-8"))
        curve = run["curve"]
        steps = [point["step"] for point in curve]
        axes.plot(steps, [p["validation"] for p in curve], colour, label=f"{label}: validation")
        axes.plot(steps, [p["train"] for p in curve], colour, ls=":", label=f"{label}: training")
        rounded = next(p["step"] for p in curve if p["rounding"])
        axes.axvline(rounded, color=colour, lw=0.6)
    axes.set(xlabel="steps of 32,768 tokens", ylabel="nats per token", ylim=(2, 5))
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(HERE / "loss.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
