"""`registry bench`: the fused path against the gather path on this device, in one run."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from mlx_experts.registry.catalog.public_shapes import Shape, select
from mlx_experts.registry.cli.common import Json, print_json, print_table
from mlx_experts.registry.cli.progress import track
from mlx_experts.registry.errors import SettingError

if TYPE_CHECKING:
    from mlx_experts.engine.tools.bench_experts import Result, Storage

COLUMNS = ("fused µs", "ratio", "± %", "GB/s", "of read", "errors")
Mode = Literal["affine", "mxfp4", "mxfp8", "nvfp4", "plain"]
DType = Literal["float32", "bfloat16", "float16"]


def bench(
    families: Annotated[list[str] | None, typer.Argument(help="Families; all when none is named.")] = None,
    dtype: Annotated[
        DType | None, typer.Option(help="Activations; float32 on the CPU, else bfloat16.", show_default=False)
    ] = None,
    mode: Annotated[
        Mode | None, typer.Option(help="Storage format of the experts; affine if none.", show_default=False)
    ] = None,
    bits: Annotated[
        int | None, typer.Option(help="Bits a weight, for affine; 4 if none.", show_default=False)
    ] = None,
    group_size: Annotated[
        int | None,
        typer.Option(help="Weights that share a scale, for affine; 64 if none.", show_default=False),
    ] = None,
    rounds: Annotated[int, typer.Option(min=3, help="Samples of each path.")] = 15,
    baseline: Annotated[
        Literal["gather", "mlx-lm"],
        typer.Option(help="What fused is held against: our gather path, or mlx-lm's expert layer."),
    ] = "gather",
    shared: Annotated[int, typer.Option(min=0, help="Width of a shared expert in both paths.")] = 0,
    model: Annotated[
        str | None, typer.Option(help="Decode this checkpoint instead.", show_default=False)
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to decode with --model or --decode.")] = 64,
    decode: Annotated[
        str | None,
        typer.Option(
            help="Decode a family's whole model, random weights, against mlx-lm.", show_default=False
        ),
    ] = None,
    layers: Annotated[
        int | None, typer.Option(min=1, help="Layers of it, from the first on.", show_default=False)
    ] = None,
    vocab: Annotated[int | None, typer.Option(min=2, help="Vocabulary of it.", show_default=False)] = None,
    prefill: Annotated[int, typer.Option(min=0, help="Time a prompt of this many tokens too.")] = 0,
    truth: Annotated[
        bool, typer.Option("--truth", help="With --decode, compare logits with mlx-lm's in float32 too.")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Draw ratio against expert width (.svg or .png).", show_default=False)
    ] = None,
    json: Json = False,
) -> None:
    """Time one token's experts on public shapes, or a whole model with --decode or --model.

    Both paths run in turn in one run and the medians are shown: microseconds for one layer's experts, how
    many times faster fused is with half the interquartile range, gigabytes of weights a second and their
    share of the read bandwidth that this run measured, and each path's relative RMS error to float32.

    --decode makes a family's whole model (registry/catalog/models.yaml has the sizes) with random weights,
    twice: mlx-lm's own class and ours over the same arrays. It says how many tokens a second each decodes,
    and where the time of one token goes.

    Example: registry bench qwen3_moe mixtral --plot ratio.svg
    """
    if prefill and decode is None:
        raise SettingError(
            "A prompt is timed on a whole model.", where="--prefill", hint="add --decode FAMILY"
        )
    if model is not None:
        _decode(model, tokens, rounds, json)
        return
    if plot is not None:
        from mlx_experts.registry.cli.plot import check_plot

        check_plot(plot)
    if decode is not None:
        from mlx_experts.registry.cli.devices import bench_model

        asked = bench_model.Asked(
            decode, layers, vocab, dtype, mode, bits, group_size, tokens, rounds, prefill, truth
        )
        bench_model.run(asked, json, plot)
        return
    from mlx_experts.engine.tools import bench_experts as measure

    storage = measure.storage_of(mode or "affine", bits or 4, group_size or 64)
    chosen = select(families or [])
    bandwidth = measure.read_bandwidth()
    results = []
    for shape in _tracked(chosen, json):
        layer = measure.layer_of(shape, storage, dtype, shared)
        results.append((shape, measure.compare(layer, rounds=rounds, baseline=baseline)))
    about = {
        **measure.about(),
        "dtype": dtype or measure.default_dtype(),
        "storage": asdict(storage),
        "baseline": baseline,
        "shared": shared,
        "read_gb_s": round(bandwidth / 1e9, 1),
    }
    if json:
        print_json({**about, "shapes": [_entry(s, r) for s, r in results]})
    else:
        print(_title(about, storage))
        columns = ("family", "H", "F", "E", "k", f"{baseline} µs", *COLUMNS)
        print_table("", columns, [_row(s, r, bandwidth) for s, r in results])
    if plot is not None:
        from mlx_experts.registry.cli.plot import draw

        draw(plot, [(s.family, s.width, r.ratio, r.noise) for s, r in results], str(about["device"]))


def _tracked(chosen: list[Shape], quiet: bool) -> Any:
    by_name = {s.family: s for s in chosen}
    return (by_name[name] for name in track(list(by_name), "timing", len(by_name), quiet))


def _title(about: dict[str, Any], storage: Storage) -> str:
    kept = f"{storage.mode} {storage.bits}-bit g{storage.group_size}" if storage.bits else "plain"
    beside = f", a shared expert of width {about['shared']}" if about["shared"] else ""
    return (
        f"{about['device']}, mlx {about['mlx']}, {about['date']}: {about['dtype']} activations, "
        f"{kept}{beside}, reads {about['read_gb_s']} GB/s; fused against {about['baseline']}"
    )


def _row(shape: Shape, result: Result, bandwidth: float) -> list[str]:
    return [
        shape.family,
        *(str(n) for n in (shape.hidden, shape.width, shape.experts, shape.top_k)),
        f"{result.baseline_us:.0f}",
        f"{result.fused_us:.1f}",
        f"{result.ratio:.1f}x",
        f"{result.noise:.0%}".rstrip("%"),
        f"{result.gigabytes_per_second:.1f}",
        f"{result.gigabytes_per_second * 1e9 / bandwidth:.0%}",
        f"{result.baseline_error:.0e} {result.fused_error:.0e}",
    ]


def _entry(shape: Shape, result: Result) -> dict[str, Any]:
    derived = {"ratio": result.ratio, "fused_gb_s": result.gigabytes_per_second}
    return {**shape.model_dump(), **asdict(result), **derived}


def _decode(model: str, tokens: int, rounds: int, json: bool) -> None:
    import mlx.core as mx

    from mlx_experts import load
    from mlx_experts.engine.tools import bench_experts as measure
    from mlx_experts.engine.tools.bench_decode import compare_decoding

    loaded, tokenizer = load(model)
    prompt = mx.array(tokenizer.encode("The experts of this layer are"))
    result = compare_decoding(loaded, prompt, tokens=tokens, rounds=rounds)
    if json:
        print_json({**measure.about(), "model": model, **asdict(result), "ratio": result.ratio})
        return
    gap = "" if result.gap is None else f", then a choice {result.gap:.2g} apart"
    print_table(
        f"{model}: {tokens} tokens, {rounds} rounds",
        ("path", "tokens/s", "fused calls a token", "text"),
        [
            ("gather", f"{result.gather_tokens_per_second:.1f}", f"{result.fused_per_token[1]:g}", ""),
            (
                "fused",
                f"{result.fused_tokens_per_second:.1f} ({result.ratio:.2f}x)",
                f"{result.fused_per_token[0]:g} of {result.layers} layers",
                f"{result.agree} of {result.tokens} tokens equal{gap}",
            ),
        ],
    )
