"""`registry bench --decode`: a family's whole model of random weights, mlx-lm's class against ours."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_experts.registry.catalog.public_models import PublicModel, public_model
from mlx_experts.registry.cli.common import print_json, print_table

if TYPE_CHECKING:
    from mlx_experts.engine.tools.bench_experts import Storage
    from mlx_experts.engine.tools.bench_model import Comparison, Side


@dataclass(frozen=True)
class Asked:
    """What the command line asks for; None stands for the model's own."""

    family: str
    layers: int | None
    vocab: int | None
    dtype: str | None
    mode: str | None
    bits: int | None
    group_size: int | None
    tokens: int
    rounds: int
    prefill: int
    truth: bool = False


def run(asked: Asked, json: bool, plot: Path | None) -> None:
    """Measure, and print a table or JSON.

    Raises:
        SettingError: the family has no whole-model config, or the storage is none of MLX's.
    """
    if plot is not None:
        from mlx_experts.registry.cli.plot import check_plot

        check_plot(plot)
    model = public_model(asked.family)
    config = model.config_with(asked.layers, asked.vocab)
    import mlx.core as mx

    from mlx_experts.engine.tools import bench_experts, bench_model, random_model

    storage, experts_only = _storage(model, asked)
    dtype = asked.dtype or bench_experts.default_dtype()
    theirs, ours = random_model.build(config, storage, getattr(mx, dtype), experts_only=experts_only)
    result = bench_model.compare(
        theirs,
        ours,
        config["vocab_size"],
        tokens=asked.tokens,
        rounds=asked.rounds,
        prefill=asked.prefill,
        truth=asked.truth,
    )
    about = {
        **bench_experts.about(),
        "family": asked.family,
        "checkpoint": model.checkpoint,
        "layers": config["num_hidden_layers"],
        "vocabulary": config["vocab_size"],
        "dtype": dtype,
        "storage": asdict(storage),
        "experts_only": experts_only,
        "rounds": asked.rounds,
    }
    if json:
        print_json({**about, **asdict(result), "ratio": result.ratio, "prefill_ratio": result.prefill_ratio})
    else:
        _print(about, storage, result, asked)
    if plot is not None:
        from mlx_experts.registry.cli.plot import draw_token

        sides = {"mlx-lm": result.theirs.split, "mlx-experts": result.ours.split}
        parts = {
            name: {"Python": s.python_ms, "encoding": s.encode_ms, "waiting": s.wait_ms}
            for name, s in sides.items()
        }
        draw_token(plot, parts, f"{asked.family}, {about['layers']} layers, {about['device']}")


def _storage(model: PublicModel, asked: Asked) -> tuple[Storage, bool]:
    """What is asked for; the model's own where nothing is."""
    from mlx_experts.engine.tools.bench_experts import storage_of

    own = model.storage
    if asked.mode is None and asked.bits is None and asked.group_size is None:
        return storage_of(own.mode, own.bits, own.group_size), own.experts_only
    same = asked.mode in (None, own.mode)
    mode = asked.mode or own.mode
    bits = asked.bits or (own.bits if same else 4)
    group_size = asked.group_size or (own.group_size if same else 64)
    return storage_of(mode, bits, group_size), own.experts_only and same


def _print(about: dict[str, Any], storage: Storage, result: Comparison, asked: Asked) -> None:
    kept = f"{storage.mode} {storage.bits}-bit g{storage.group_size}" if storage.bits else "plain"
    kept += " experts" if about["experts_only"] else ""
    print(
        f"{about['device']}, mlx {about['mlx']}, {about['date']}: {asked.family}, {about['layers']} layers, "
        f"vocabulary {about['vocabulary']}, {about['dtype']}, {kept}"
    )
    columns = ["", "tokens/s", "± %", "Python ms", "encoding ms", "waiting ms", "kernels", "GPU busy ms"]
    print_table(
        "",
        [*columns, *(["prompt tokens/s"] if asked.prefill else [])],
        [
            ["mlx-lm", *_cells(result.theirs)],
            [f"mlx-experts ({result.ratio:.2f}x)", *_cells(result.ours)],
        ],
    )
    if result.prefill_ratio is not None:
        print(f"prompt of {asked.prefill} tokens: {result.prefill_ratio:.2f}x")
    if result.truth_distances is not None:
        theirs, ours = result.truth_distances
        print(f"logits at the first token to mlx-lm's in float32: mlx-lm {theirs:.1e}, ours {ours:.1e}")
    print(
        f"{result.agree} of {result.tokens} greedy tokens equal; logits {result.logit_distance:.1e} apart at "
        f"the first; calls a token: {', '.join(f'{n:g} {name}' for name, n in result.traced.items())}"
    )


def _cells(side: Side) -> list[str]:
    split = side.split
    cells = [f"{side.tokens_per_second:.1f}", f"{side.spread:.0%}".rstrip("%")]
    cells += [f"{ms:.2f}" for ms in (split.python_ms, split.encode_ms, split.wait_ms)]
    counted = side.kernels
    cells += (
        ["not counted", "not counted"]
        if counted is None
        else [f"{counted.count:.0f}", f"{counted.busy_ms:.2f}"]
    )
    return cells if side.prefill is None else [*cells, f"{side.prefill:.0f}"]
