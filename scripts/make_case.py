"""Make a parity case: a tiny random checkpoint with the answers that transformers computes for it.

    pip install torch==2.13.0 transformers==5.24.0 safetensors numpy pyyaml
    python scripts/make_case.py flex_olmo/base
    python scripts/make_case.py --recipes mine.yaml --out cases

The first line is for a virtual environment of its own; the package needs none of it. Without names, every
recipe of the file is made.

A recipe (scripts/recipes.yaml) names a transformers class and what its config has beyond ``TINY``. The case
holds

    hub/     tensors as `save_pretrained` writes them, config.json in the spelling of the Hub (rope_theta,
             rope_scaling, ...) and config.transformers.json as transformers 5 writes it
    fused/   the layout that transformers keeps in memory, where it differs
    oracle.npz   input_ids [2, 11], logits [2, 11, V], greedy_ids [2, 12], greedy_logits [2, 12, V]
    case.json    what the case is about and how well it is conditioned

Everything is float32 and eager. All weights are random, norm weights and biases too, so that a parameter
that is skipped shows. A seed is accepted only when one float32 rounding of noise on the weights moves no
logit by 1e-5 of the largest, cached and uncached answers agree, no greedy step is nearly a tie and every
expert is used: what then disagrees with the case is wrong, not unlucky.
"""

from __future__ import annotations

import argparse
import copy
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
import yaml
from safetensors import safe_open
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).resolve().parent.parent
PROMPT, NEW_TOKENS = (2, 11), 12
NOISE, CACHE, MARGIN = 1e-5, 2e-5, 2e-3
# Sizes that no tensor is square by accident with, an epsilon and a base that no default hides.
TINY: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 24,
    "moe_intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
ROPE = {"rope_type": "default", "rope_theta": 5000.0}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "names", nargs="*", help="family/variant of the recipes to run; all when none is given"
    )
    parser.add_argument("--recipes", type=Path, default=ROOT / "scripts" / "recipes.yaml")
    parser.add_argument("--out", type=Path, default=ROOT / "tests" / "cases")
    parser.add_argument("--largest", type=int, default=250_000, help="bytes that a case may have")
    parser.add_argument("--seeds", type=int, default=400, help="seeds to try before giving up")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    recipes: dict[str, dict[str, Any]] = yaml.safe_load(args.recipes.read_text())
    if unknown := sorted(set(args.names) - set(recipes)):
        parser.error(f"no recipe is called {', '.join(unknown)}; known: {', '.join(recipes)}")
    for name in args.names or recipes:
        make_case(name, recipes[name], args.out / name, args.seeds, args.largest)
    return 0


def make_case(name: str, recipe: dict[str, Any], out: Path, seeds: int, largest: int) -> None:
    """Write one case, at the first seed that is well conditioned."""
    for seed in range(seeds):
        model = build(recipe, seed)
        unwatched, alike = recipe.get("unwatched", "no module"), recipe.get("cache_alike", True)
        found = answers(speaker(model, recipe), seed, unwatched, alike=alike)
        if found is not None:
            break
    else:
        raise SystemExit(f"{name}: no seed of {seeds} is well conditioned")
    oracle, quality = found
    shutil.rmtree(out, ignore_errors=True)
    hub, fused = out / "hub", out / "fused"
    model.save_pretrained(hub, save_original_format=True)
    model.save_pretrained(fused, save_original_format=False)
    keep_fused = recipe.get("fused", True) and layout(hub) != layout(fused)
    if not keep_fused:
        shutil.rmtree(fused)
    (hub / "config.json").rename(hub / "config.transformers.json")
    config = json.loads((hub / "config.transformers.json").read_text())
    spelled = hub_spelling(config, recipe)
    wrapper = recipe.get("wrapped_in")
    if wrapper:
        spelled = {wrapper: spelled, **recipe["wrapper_config"]}
    lent = spelled["model_type"] != config["model_type"]
    if lent:  # Another model's name, which transformers would not write.
        (hub / "config.transformers.json").unlink()
    (hub / "config.json").write_text(json.dumps(spelled, indent=1, sort_keys=True) + "\n")
    if extra := recipe.get("extra_tensors"):
        add_tensors(hub / "model.safetensors", extra, seed)
    reload_hub = not (renames := recipe.get("hub_renames")) and not lent
    if recipe.get("unstack"):
        unstack_tensors(hub / "model.safetensors")
    if stacks := recipe.get("stacks"):
        stack_tensors(hub / "model.safetensors", stacks)
    if renames:
        rename_tensors(hub / "model.safetensors", renames)
    if joins := recipe.get("joins"):
        join_tensors(hub / "model.safetensors", joins)
    for stray in out.glob("*/generation_config.json"):
        stray.unlink()
    reload = {
        view: reread(folder, config_file, model, recipe, oracle)
        for view, folder, config_file in views(out)
        if reload_hub or view == "fused"
    }
    if pattern := recipe.get("tensor_drops"):
        for _, folder, _ in views(out):
            drop_tensors(folder / "model.safetensors", pattern)
    np.savez_compressed(out / "oracle.npz", **oracle)
    family, _, variant = name.partition("/")
    request = {
        "family": family,
        "variant": variant,
        "about": recipe["about"],
        "architecture": recipe["architecture"],
        "model_type": spelled["model_type"],
        "seed": seed,
        "layouts": ["hub", "fused"] if keep_fused else ["hub"],
        "parameters": sum(p.numel() for p in model.parameters()),
        "prompt": list(PROMPT),
        "new_tokens": NEW_TOKENS,
        **quality,
        "reload": reload,
        "transformers": transformers.__version__,
        "torch": torch.__version__.split("+")[0],
    }
    (out / "case.json").write_text(json.dumps(request, indent=1) + "\n")
    size = sum(f.stat().st_size for f in out.rglob("*") if f.is_file())
    if size > largest:
        raise SystemExit(f"{name}: {size} bytes, more than {largest}; make the recipe smaller")
    print(f"{name}: seed {seed}, {size // 1000} kB, {quality}, reload {reload}", flush=True)


def build(recipe: dict[str, Any], seed: int) -> Any:
    """The recipe's model with random weights."""
    kind = getattr(transformers, recipe["architecture"])
    stated = dict(recipe.get("config", {}))
    nested = recipe.get("text_key")
    config_class = getattr(transformers, recipe.get("config_class", ""), kind.config_class)
    names = set(config_class().get_text_config().to_dict())
    text = {k: v for k, v in TINY.items() if k in names}
    if "rope_parameters" in names and not any(
        isinstance(v, dict) for v in stated.get("rope_parameters", {}).values()
    ):
        text["rope_parameters"] = ROPE
    if nested:
        inner = {**text, **stated.pop(nested, {})}
        config = config_class(**{nested: inner}, **stated)
    else:
        config = config_class(**{**text, **stated})
    config._attn_implementation = "eager"
    config.architectures = [recipe["architecture"]]
    torch.manual_seed(seed)
    model = kind(config).to(torch.float32).eval()
    for index, changes in recipe.get("layer_configs", {}).items():
        layers, own = model.model.layers, copy.deepcopy(config)
        own.update(changes)
        layers[index] = type(layers[index])(own, layer_idx=index).to(torch.float32).eval()
    randomise(model, recipe.get("gain", 1.0))
    model.generation_config.eos_token_id = None
    return model


def speaker(model: Any, recipe: dict[str, Any]) -> Any:
    """The part of a model that answers a text prompt."""
    return model.get_submodule(recipe.get("runs", ""))


def randomise(model: torch.nn.Module, gain: float) -> None:
    """Draw everything that is saved: matrices by their input width, norms about one, the rest small."""
    with torch.no_grad():
        for name, value in model.state_dict(keep_vars=True).items():
            noise = torch.randn_like(value) if value.is_floating_point() else None
            if noise is None:
                continue
            if value.ndim > 1 and "embed" not in name:
                value.copy_(noise * gain * value.shape[-1] ** -0.5)
            elif value.ndim > 1:
                value.copy_(noise)
            elif "norm" in name and name.endswith("weight"):
                value.copy_(1.0 + 0.3 * noise)
            else:
                value.copy_(0.2 * noise)
        model.tie_weights()


def answers(
    model: Any, seed: int, unwatched: str, past: str = "cache", alike: bool = True
) -> tuple[dict[str, np.ndarray], dict[str, float]] | None:
    """The oracle of a model and how well it is conditioned, or None where it is not well enough.

    Args:
        past: what the model calls its cache; `past_key_values` before transformers 5.
        alike: whether a cached pass has to give what an uncached one does.
    """
    ids = torch.from_numpy(np.random.default_rng(seed).integers(3, 120, PROMPT))
    with torch.no_grad(), ExpertWatch(model, unwatched) as unused:
        logits = model(input_ids=ids, use_cache=False).logits
        result = model(input_ids=ids, use_cache=True)
        steps, picked = [result.logits[:, -1]], []
        for i in range(NEW_TOKENS):
            picked.append(steps[-1].argmax(-1))
            if i + 1 < NEW_TOKENS:
                result = model(input_ids=picked[-1][:, None], use_cache=True, **{past: result[past]})
                steps.append(result.logits[:, -1])
        greedy, greedy_logits = torch.stack(picked, 1), torch.stack(steps, 1)
        whole = model(input_ids=torch.cat([ids, greedy[:, :-1]], 1), use_cache=False).logits
        largest = logits.abs().max()
        cached = (whole[:, ids.shape[1] - 1 :] - greedy_logits).abs().max() / largest
        best = greedy_logits.topk(2, dim=-1).values
        margin = (best[..., 0] - best[..., 1]).min() / largest
        if unused() or (alike and cached > CACHE) or margin < MARGIN or not torch.isfinite(whole).all():
            return None
        moved = (whole - perturbed(model, torch.cat([ids, greedy[:, :-1]], 1))).abs().max() / largest
    if moved > NOISE:
        return None
    oracle = {"input_ids": ids, "logits": logits, "greedy_ids": greedy, "greedy_logits": greedy_logits}
    quality = {"one_ulp_noise": moved, "greedy_margin": margin, "cache_vs_full": cached}
    return (
        {k: v.numpy() for k, v in oracle.items()},
        {k: float(f"{float(v):.3g}") for k, v in quality.items()},
    )


def perturbed(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """The uncached logits with one float32 rounding of noise on every weight."""
    kept = {k: v.clone() for k, v in model.state_dict().items()}
    for value in model.state_dict().values():
        if value.is_floating_point():
            value.mul_(1.0 + 2.0**-23 * torch.sign(torch.randn_like(value)))
    logits = model(input_ids=ids, use_cache=False).logits
    model.load_state_dict(kept)
    return logits


class ExpertWatch:
    """Watches the containers of experts; the value says how many experts no token has picked."""

    def __init__(self, model: torch.nn.Module, unwatched: str) -> None:
        self.seen: dict[torch.nn.Module, set[int]] = {}
        experts = [(n, m) for n, m in model.named_modules() if type(m).__name__.endswith("Experts")]
        self.watched = [m for name, m in experts if unwatched not in name]

    def __enter__(self) -> Any:
        self.hooks = [m.register_forward_pre_hook(self._note, with_kwargs=True) for m in self.watched]
        return lambda: sum(m.num_experts - len(self.seen.get(m, ())) for m in self.watched)

    def _note(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Tensor) and value.dtype == torch.int64:
                self.seen.setdefault(module, set()).update(value.flatten().tolist())

    def __exit__(self, *error: object) -> None:
        for hook in self.hooks:
            hook.remove()


def layout(folder: Path) -> dict[str, list[int]]:
    """Names and shapes of a folder's tensors."""
    with safe_open(folder / "model.safetensors", "pt") as tensors:
        return {k: tensors.get_slice(k).get_shape() for k in tensors.keys()}  # noqa: SIM118, not a mapping


def hub_spelling(config: dict[str, Any], recipe: dict[str, Any]) -> dict[str, Any]:
    """A config of transformers 5 as older versions spelled it."""
    drop = {"transformers_version", "output_router_logits", *recipe.get("hub_drops", ())}
    result: dict[str, Any] = {}
    for key, value in config.items():
        if key in drop:
            continue
        if key == "dtype":
            result["torch_dtype"] = value
        elif key == "rope_parameters" and isinstance(value, dict) and "rope_theta" in value:
            rope = dict(value)
            result["rope_theta"] = rope.pop("rope_theta")
            if (partial := rope.pop("partial_rotary_factor", None)) is not None:
                result["partial_rotary_factor"] = partial
            result["rope_scaling"] = None if rope.get("rope_type") == "default" and len(rope) == 1 else rope
        elif isinstance(value, dict) and key == recipe.get("text_key"):
            result[key] = hub_spelling(value, recipe)
        else:
            result[key] = value
    return {**result, **recipe.get("hub_config", {})}


def add_tensors(path: Path, extra: dict[str, list[int]], seed: int) -> None:
    """Tensors that the model does not have, such as those of next-token prediction."""
    torch.manual_seed(seed)
    tensors = load_file(path)
    tensors.update({name: torch.randn(shape) for name, shape in extra.items()})
    save_file(tensors, path, metadata={"format": "pt"})


def rename_tensors(path: Path, renames: dict[str, str]) -> None:
    """Names as the Hub has them, where transformers' reverse conversion writes others."""
    tensors = load_file(path)
    for pattern, new in renames.items():
        tensors = {re.sub(pattern, new, name): value for name, value in tensors.items()}
    save_file(tensors, path, metadata={"format": "pt"})


def unstack_tensors(path: Path) -> None:
    """Stacks of experts as one tensor for each expert and projection."""
    tensors = load_file(path)
    for name in [each for each in tensors if each.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        at, _, leaf = name.rpartition(".")
        leaves = ["gate_proj", "up_proj"] if leaf == "gate_up_proj" else [leaf]
        for number, matrix in enumerate(tensors.pop(name)):
            for part, rows in zip(leaves, matrix.chunk(len(leaves)), strict=True):
                tensors[f"{at}.{number}.{part}.weight"] = rows.contiguous()
    save_file(tensors, path, metadata={"format": "pt"})


def stack_tensors(path: Path, stacks: dict[str, str]) -> None:
    """One tensor for each expert as one stack of transposed matrices [experts, in, out]."""
    tensors = load_file(path)
    for pattern, new in stacks.items():
        parts: dict[str, dict[int, torch.Tensor]] = {}
        for name in list(tensors):
            if found := re.search(pattern, name):
                parts.setdefault(re.sub(pattern, new, name), {})[int(found[1])] = tensors.pop(name)
        for name, part in parts.items():
            tensors[name] = torch.stack([part[i].T for i in range(len(part))]).contiguous()
    save_file(tensors, path, metadata={"format": "pt"})


def join_tensors(path: Path, joins: dict[str, str]) -> None:
    """Tensors that get one name are joined along their rows, in the order of the pattern's words."""
    tensors = load_file(path)
    for pattern, new in joins.items():
        words = re.search(r"\((.*?)\)", pattern)[1].split("|")  # type: ignore[index]
        parts: dict[str, dict[str, torch.Tensor]] = {}
        for name in list(tensors):
            if found := re.search(pattern, name):
                parts.setdefault(re.sub(pattern, new, name), {})[found[1]] = tensors.pop(name)
        tensors.update({name: torch.cat([part[w] for w in words]) for name, part in parts.items()})
    save_file(tensors, path, metadata={"format": "pt"})


def drop_tensors(path: Path, pattern: str) -> None:
    """Leave out what has nothing to do with the text model and would make the case large."""
    kept = {name: value for name, value in load_file(path).items() if not re.search(pattern, name)}
    save_file(kept, path, metadata={"format": "pt"})


def views(case: Path) -> Iterator[tuple[str, Path, str]]:
    """What transformers can read back: view, folder of the tensors, name of the config there."""
    yield "hub", case / "hub", "config.json"
    if (case / "hub" / "config.transformers.json").exists():
        yield "hub+v5", case / "hub", "config.transformers.json"
    if (case / "fused").exists():
        yield "fused", case / "fused", "config.json"


def reread(
    folder: Path, config_file: str, model: Any, recipe: dict[str, Any], oracle: dict[str, np.ndarray]
) -> float:
    """Difference of the logits after transformers has read a view back, or -1 where it refuses."""
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "config.json").symlink_to(folder / config_file)
        (Path(scratch) / "model.safetensors").symlink_to(folder / "model.safetensors")
        try:
            again = (
                type(model).from_pretrained(scratch, attn_implementation="eager", dtype=torch.float32).eval()
            )
        except (OSError, RuntimeError, ValueError, KeyError, TypeError) as error:
            print(f"{folder} with {config_file} cannot be read back: {error}", file=sys.stderr)
            return -1.0
        with torch.no_grad():
            ids = torch.from_numpy(oracle["input_ids"])
            logits = speaker(again, recipe)(input_ids=ids, use_cache=False).logits.numpy()
    return float(f"{np.abs(logits - oracle['logits']).max() / np.abs(oracle['logits']).max():.3g}")


if __name__ == "__main__":
    sys.exit(main())
