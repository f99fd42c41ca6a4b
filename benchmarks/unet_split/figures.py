"""The figure: what each rank needs under naive cuts and under cuts balanced by memory, predicted and measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness.case import GIB
from harness.plots import pyplot, save

WAYS = {"naive": "#2f5d8a", "memory": "#e39b2d"}


def draw(results: Any, path: Path) -> None:
    """Bars for the measured peak of each rank, marks for the predicted one, at the largest side that both ran."""
    plt = pyplot()
    nets = [net for net in results.forecasts if all(results.fits(net, way) for way in WAYS)]
    figure, axes = plt.subplots(1, len(nets), figsize=(4.6 * len(nets), 3.2), squeeze=False)
    for axis, net in zip(axes[0], nets, strict=True):
        ran = [{r["side"] for r in results.of("measure", net, way)} for way in WAYS]
        side = max(set.intersection(*ran))
        for shift, (way, colour) in zip((-0.2, 0.2), WAYS.items(), strict=True):
            forecast, each = results.forecasts[net][way], results.at(net, way, side)["each"]
            places = [rank + shift for rank in range(len(each))]
            axis.bar(places, [value / GIB for value in each], 0.38, color=colour, label=f"{way}, measured")
            predicted = [need.at((side / forecast.side) ** 2) / GIB for need in forecast.needs]
            axis.plot(places, predicted, "_", color="#1b1b3a", markersize=12, label="predicted" if shift > 0 else None)
        axis.set_title(f"{net} U-Net, {side}²", fontsize=9)
        axis.set_xlabel("rank")
        axis.set_ylabel("peak, GiB")
    axes[0][0].legend(frameon=False, fontsize=8)
    save(figure, path)
