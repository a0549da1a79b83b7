"""Draws benchmark results; needs the ``plot`` extra."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from mlx_experts.registry.errors import SettingError

_KINDS = (".svg", ".png")


def check_plot(path: Path) -> None:
    """Say what is missing before anything is measured.

    Raises:
        SettingError: the file's kind is not one that is drawn, its folder is missing, or matplotlib is.
    """
    if path.suffix.lower() not in _KINDS:
        raise SettingError(
            "This kind of picture is not drawn.",
            where="--plot",
            expected=" or ".join(_KINDS),
            found=path.suffix,
        )
    if not path.parent.is_dir():
        raise SettingError(
            "The folder for the picture does not exist.", where="--plot", found=str(path.parent)
        )
    if find_spec("matplotlib") is None:
        raise SettingError(
            "Drawing needs matplotlib.", where="--plot", hint="pip install 'mlx-experts[plot]'"
        )


def draw(path: Path, points: Sequence[tuple[str, int, float, float]], title: str) -> None:
    """Ratio against expert width, with the line where both paths are equally fast.

    Args:
        points: family, expert width, how many times faster fused is, relative noise.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    widths = [width for _, width, _, _ in points]
    ratios = [ratio for _, _, ratio, _ in points]
    axes.errorbar(widths, ratios, yerr=[r * n for _, _, r, n in points], fmt="o", capsize=2)
    for family, width, ratio, _ in points:
        axes.annotate(family, (width, ratio), xytext=(4, 4), textcoords="offset points", fontsize=7)
    axes.axhline(1.0, linestyle="--", linewidth=1, color="grey")
    axes.annotate("break-even", (min(widths), 1.0), xytext=(0, 3), textcoords="offset points", fontsize=7)
    axes.set(xlabel="expert width F", ylabel="gather time / fused time", title=title)
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    figure.savefig(path)


def draw_token(path: Path, parts: Mapping[str, Mapping[str, float]], title: str) -> None:
    """Where one token's time goes: a bar a model, cut into parts.

    Args:
        parts: milliseconds of each part, by model.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 2.5), layout="constrained")
    axes = figure.subplots()
    names = list(parts)
    left = [0.0] * len(names)
    for part in next(iter(parts.values())):
        widths = [parts[name][part] for name in names]
        axes.barh(names, widths, left=left, label=part)
        left = [at + width for at, width in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set(xlabel="ms a token, each waited for", title=title)
    axes.legend()
    figure.savefig(path)


def draw_routing(path: Path, shares: Sequence[Sequence[float]], layers: Sequence[int], title: str) -> None:
    """A heat map of layers against experts.

    Args:
        shares: for each layer, the share of tokens that picked each expert; rows may differ in length.
        layers: index of each layer.
    """
    import numpy as np
    from matplotlib.figure import Figure

    widest = max(map(len, shares))
    cells = np.full((len(shares), widest), np.nan)
    for row, values in zip(cells, shares, strict=True):
        row[: len(values)] = values
    figure = Figure(
        figsize=(min(4 + widest * 0.14, 18), min(2.2 + len(shares) * 0.22, 14)), layout="constrained"
    )
    axes = figure.subplots()
    image = axes.imshow(cells, aspect="auto", interpolation="nearest", cmap="viridis", vmin=0)
    axes.set(xlabel="expert", ylabel="layer", title=title)
    step = max(1, len(layers) // 24)
    axes.set_yticks(range(0, len(layers), step), [str(layer) for layer in layers[::step]])
    figure.colorbar(image, ax=axes, label="share of tokens")
    figure.savefig(path)
