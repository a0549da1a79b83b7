"""Make a parity case with code that a model's authors have published, which transformers lacks.

    pip install torch==2.13.0 transformers==4.46.3 safetensors numpy pyyaml
    git clone https://github.com/Snowflake-Labs/transformers arctic
    python scripts/make_author_case.py arctic/base --code arctic/src/transformers/models/arctic

The folder holds the authors' modules as they are. A recipe (scripts/author_recipes.yaml) names the module,
its classes, the config, and under `stubs` packages that the module imports and the case does not use. What
a case holds, and when a seed is accepted, scripts/make_case.py says.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.machinery
import json
import shutil
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
import yaml
from make_case import NEW_TOKENS, PROMPT, ROOT, answers, randomise
from safetensors.torch import save_file


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("name", help="family/variant of the recipe to run")
    parser.add_argument("--code", type=Path, required=True, help="folder with the authors' modules")
    parser.add_argument("--out", type=Path, default=ROOT / "tests" / "cases")
    parser.add_argument("--seeds", type=int, default=400, help="seeds to try before giving up")
    args = parser.parse_args()
    recipe = yaml.safe_load((ROOT / "scripts" / "author_recipes.yaml").read_text())[args.name]
    for name in recipe.get("stubs", ()):
        sys.modules[name] = Stub(name)
    module = authors_module(args.code, recipe["module"])
    config = getattr(module, recipe["config_class"])(**recipe["config"])
    config._attn_implementation = "eager"
    for seed in range(args.seeds):
        torch.manual_seed(seed)
        model = getattr(module, recipe["architecture"])(config).to(torch.float32).eval()
        randomise(model, recipe.get("gain", 1.0))
        found = answers(model, seed, "no module", past="past_key_values")
        if found is not None:
            write(args.out / args.name, args.name, recipe, model, seed, found)
            return 0
    raise SystemExit(f"{args.name}: no seed of {args.seeds} is well conditioned")


class Stub(types.ModuleType):
    """A package that is imported and not used."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__spec__ = importlib.machinery.ModuleSpec(name, None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def authors_module(folder: Path, name: str) -> Any:
    """A module of the authors' as part of the installed transformers, which its relative imports expect."""
    package = f"transformers.models.{folder.name}"
    if package not in sys.modules:
        made = types.ModuleType(package)
        made.__path__ = [str(folder.resolve())]
        sys.modules[package] = made
    return importlib.import_module(f"{package}.{name}")


def write(
    out: Path, name: str, recipe: dict[str, Any], model: Any, seed: int, found: tuple[Any, Any]
) -> None:
    """Write one case."""
    oracle, quality = found
    shutil.rmtree(out, ignore_errors=True)
    (out / "hub").mkdir(parents=True)
    tensors = {k: v.contiguous().clone() for k, v in model.state_dict().items()}
    save_file(tensors, out / "hub" / "model.safetensors", metadata={"format": "pt"})
    config = {**model.config.to_dict(), **recipe.get("hub_config", {})}
    config = {k: v for k, v in config.items() if isinstance(v, int | float | str | list | dict | None)}
    (out / "hub" / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True, default=str) + "\n")
    np.savez_compressed(out / "oracle.npz", **oracle)
    family, _, variant = name.partition("/")
    case = {
        "family": family,
        "variant": variant,
        "about": recipe["about"],
        "architecture": recipe["architecture"],
        "model_type": config["model_type"],
        "seed": seed,
        "layouts": ["hub"],
        "parameters": sum(p.numel() for p in model.parameters()),
        "prompt": list(PROMPT),
        "new_tokens": NEW_TOKENS,
        **quality,
        "source": recipe["source"],
        "transformers": transformers.__version__,
        "torch": torch.__version__.split("+")[0],
    }
    (out / "case.json").write_text(json.dumps(case, indent=1) + "\n")
    print(f"{name}: seed {seed}, {quality}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
