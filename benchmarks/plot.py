"""Draw the frontier of bytes against KL from the results of `fidelity`.

python -m benchmarks.plot
"""

import json

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt

from benchmarks.report import RESULTS

FAMILIES = {"vectors": "o-", "topk largest": "s-"}
"""Settings with a finite KL(teacher || stored), by the beginnings of their names."""


def main() -> None:
    """Write `results/frontier.png`."""
    lengths = json.loads((RESULTS / "fidelity_python_docs.json").read_text())["lengths"]
    figure, axes = plt.subplots(1, len(lengths), figsize=(4 * len(lengths), 3.6), sharey=True)
    for axis, (length, settings) in zip(axes, lengths.items(), strict=True):
        for family, style in FAMILIES.items():
            points = sorted(
                (one["bytes_per_token"], max(one["kl_teacher_to_stored"].values()))
                for name, one in settings.items()
                if name.startswith(family)
            )
            axis.loglog(*zip(*points, strict=True), style, label=family)
        for name, one in settings.items():
            if name.startswith("topk pps"):
                axis.axvline(one["bytes_per_token"], color="grey", linestyle=":")
                axis.text(one["bytes_per_token"], 0.004, f" {name}, unbiased", rotation=90, fontsize=7)
        axis.set_title(f"length {length}")
        axis.set_xlabel("bytes per token")
    axes[0].set_ylabel("KL(teacher, stored), nats\nthe worse relation")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(RESULTS / "frontier.png", dpi=110)


if __name__ == "__main__":
    main()
