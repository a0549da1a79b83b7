"""Hold configs with random changes against transformers: what both take must give the same logits.

    pip install torch==2.13.0 transformers==5.24.0 -e '.[cpu]'
    python scripts/vary_cases.py --seed 1 --seconds 300
    python scripts/vary_cases.py qwen3_next laguna

The first line is for a virtual environment of its own. Each round takes the config of a carried case, changes
up to eight of its text settings, and lets transformers make a random model of it. Where transformers refuses,
or contradicts itself (after a cache, after one rounding of noise, after reading its own files), nothing is
compared. Else this package reads the files, in one of transformers' two layouts and one of two spellings of
the config, and its logits must be transformers', uncached and one token at a time. A refusal of ours is
counted, and shown with ``--refusals``; scripts/variations.yaml says what is never changed, and why.

Prints every disagreement with what was changed; exits with 1 if there was one.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import make_case
import mlx.core as mx
import numpy as np
import torch
import transformers
import yaml
from huggingface_hub.errors import StrictDataclassError
from mlx_lm.models.cache import make_prompt_cache

from mlx_experts import load_model
from mlx_experts.registry.errors import RegistryError

ROOT = Path(__file__).resolve().parent.parent
RULES = yaml.safe_load((ROOT / "scripts" / "variations.yaml").read_text())
ACTIVATIONS = ["silu", "gelu", "gelu_pytorch_tanh", "relu2", "gelu_new", "swish"]
NESTED = ("text_config", "llm_config", "thinker_config")
TOKENS, PREFIX = 14, 8
# Random models are refused by transformers in many ways of its own; none of them is ours to check.
REFUSALS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    StrictDataclassError,
    TypeError,
    ValueError,
)


class Skipped(Exception):
    """Why a config is not compared."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("families", nargs="*", help="families of the carried cases; all when none is given")
    parser.add_argument("--cases", type=Path, default=ROOT / "tests" / "cases")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--refusals", action="store_true", help="show what this package refuses")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    configs = sorted(args.cases.glob("*/*/hub/config.transformers.json"))
    configs = [c for c in configs if not args.families or c.parents[2].name in args.families]
    if not configs:
        parser.error("no carried case of these families has the config of transformers")
    choose, counts, end = random.Random(args.seed), Counter[str](), time.monotonic() + args.seconds
    while time.monotonic() < end:
        config = choose.choice(configs)
        with tempfile.TemporaryDirectory() as folder:
            outcome, said = one(config, Path(folder), choose)
        counts[outcome] += 1
        if outcome == "disagrees" or (outcome == "refused here" and args.refusals):
            print(f"{outcome}: {config.parents[2].name}/{config.parents[1].name}: {said}", flush=True)
    print(", ".join(f"{number} {outcome}" for outcome, number in counts.most_common()))
    return 1 if counts["disagrees"] else 0


def one(config: Path, folder: Path, choose: random.Random) -> tuple[str, str]:
    """What became of one random change of a config, and what it was."""
    whole = json.loads(config.read_text())
    path, changed = vary(whole, config.parents[2].name, choose)
    seed, original, hub = choose.randrange(1 << 30), choose.random() < 0.6, choose.random() < 0.5
    said = json.dumps(changed)
    try:
        ids, want, noise = written(whole, folder, seed, original)
        if hub:
            stated = json.loads((folder / "config.json").read_text())
            spelled = make_case.hub_spelling(stated, {"text_key": path})
            (folder / "config.json").write_text(json.dumps(spelled))
        reread(whole, folder, ids, want)
    except (Skipped, *REFUSALS) as error:
        return (str(error) if isinstance(error, Skipped) else "refused by transformers"), said
    x = mx.array(ids.numpy())
    try:
        model, _ = load_model(folder, dtype="float32")
        cache = make_prompt_cache(model)
        components = [model(x[:, :PREFIX], cache=cache)]
        components += [model(x[:, i : i + 1], cache=cache) for i in range(PREFIX, TOKENS)]
    except RegistryError as error:
        return "refused here", f"{said}: {error}"
    distances = [far(np.array(y), want) for y in (model(x), mx.concatenate(components, axis=1))]
    if max(distances) < max(1e-4, 50 * noise):
        return "agree", said
    spelling = f"{'disk' if original else 'memory'} layout, {'hub' if hub else 'own'} spelling"
    return "disagrees", f"{distances[0]:.0e}, cached {distances[1]:.0e} ({spelling}): {said}"


def vary(whole: dict[str, Any], family: str, choose: random.Random) -> tuple[str | None, dict[str, Any]]:
    """Change some of a config's text settings in place; the key they stand under, and the changes."""
    text, path = whole, None
    while inner := next((k for k in NESTED if isinstance(text.get(k), dict)), None):
        text, path = text[inner], path or inner
    fixed = {*RULES["never"], *RULES["by_family"].get(family, ()), *RULES["always"].get(family, ())}
    keys = [k for k in text if k not in fixed and not k.startswith("_")]
    changed = dict(RULES["always"].get(family, {}))
    for key in choose.sample(keys, min(len(keys), choose.choice([1, 2, 3, 4, 6, 8]))):
        value = other(key, text[key], choose)
        if value is not None and value != text[key]:
            changed[key] = value
    text.update(changed)
    return path, changed


def other(key: str, value: Any, choose: random.Random) -> Any:
    """Another value for a key, of the kind that it has; None where there is none to think of."""
    if key == "rope_parameters":
        return rotation(value, choose)
    if key in ("hidden_act", "hidden_activation", "mlp_hidden_act"):
        return choose.choice(ACTIVATIONS)
    if isinstance(value, bool):
        return not value
    if value is None:
        return choose.choice([True, 2, 4, 8, 0.5])
    if isinstance(value, int):
        if "window" in key or "chunk" in key:
            return choose.choice([3, 5, 8, 64])
        smaller = [0] if "dense" in key or "shared" in key else []
        return choose.choice([value + 1, max(1, value - 1), value * 2, max(1, value // 2), 1, 2, *smaller])
    if isinstance(value, float):
        return choose.choice([value * 1.7, value * 0.4, 1.0, 2.0])
    if isinstance(value, list) and value and all(isinstance(each, str) for each in value):
        changed = list(value)
        changed[choose.randrange(len(changed))] = choose.choice(value)
        return changed
    return None


def rotation(stated: Any, choose: random.Random) -> Any:
    """Other rope settings; of one layer type where each type has its own."""
    if isinstance(stated, dict) and (types := [k for k, v in stated.items() if isinstance(v, dict)]):
        key = choose.choice(types)
        return {**copy.deepcopy(stated), key: rotation(stated[key], choose)}
    base: dict[str, Any] = {"rope_theta": choose.choice([5000.0, 10000.0, 1e6])}
    if isinstance(stated, dict) and "partial_rotary_factor" in stated:
        base["partial_rotary_factor"] = stated["partial_rotary_factor"]
    yarn = {
        "rope_type": "yarn",
        "factor": choose.choice([2.0, 8.0]),
        "original_max_position_embeddings": choose.choice([8, 16, 64]),
    }
    llama = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
    return base | choose.choice(
        [
            {"rope_type": "default"},
            {"rope_type": "linear", "factor": choose.choice([2.0, 4.0])},
            yarn,
            {**yarn, "beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.3},
            {**yarn, "mscale": 0.7, "mscale_all_dim": choose.choice([0.5, 1.0]), "truncate": False},
            {"rope_type": "llama3", "factor": 8.0, **llama},
        ]
    )


def written(whole: dict[str, Any], folder: Path, seed: int, original: bool) -> tuple[Any, np.ndarray, float]:
    """Write a random model of a config; a prompt, transformers' logits, and what one rounding moves them by.

    Raises:
        Skipped: transformers contradicts itself.
    """
    architecture = getattr(transformers, whole["architectures"][0])
    config = architecture.config_class.from_dict(copy.deepcopy(whole))
    config._attn_implementation = "eager"
    config.architectures = whole["architectures"]
    torch.manual_seed(seed)
    with torch.no_grad():
        model = architecture(config).to(torch.float32).eval()
        # Tables that the class computes are no weights, though it saves them.
        tables = {k: v.clone() for k, v in model.state_dict().items() if "slope" in k or "decay" in k}
        make_case.randomise(model, 1.0)
        model.load_state_dict(tables, strict=False)
        ids = torch.randint(3, 120, (2, TOKENS))
        want = model(input_ids=ids, use_cache=False).logits
        noise = far(make_case.perturbed(model, ids).numpy(), want.numpy())
        result = model(input_ids=ids[:, :PREFIX], use_cache=True)
        steps = [result.logits]
        for i in range(PREFIX, TOKENS):
            result = model(input_ids=ids[:, i : i + 1], use_cache=True, cache=result["cache"])
            steps.append(result.logits)
    if not torch.isfinite(want).all() or noise > 2e-5:
        raise Skipped("too sensitive")
    if far(torch.cat(steps, 1).numpy(), want.numpy()) > 3e-5:
        raise Skipped("transformers' cache disagrees")
    model.save_pretrained(folder, save_original_format=original)
    (folder / "generation_config.json").unlink(missing_ok=True)
    return ids, want.numpy(), noise


def reread(whole: dict[str, Any], folder: Path, ids: torch.Tensor, want: np.ndarray) -> None:
    """Let transformers read the files back.

    Raises:
        Skipped: it finds another model in them.
    """
    kind = getattr(transformers, whole["architectures"][0])
    with torch.no_grad():
        again = kind.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
        if far(again(input_ids=ids, use_cache=False).logits.numpy(), want) > 1e-5:
            raise Skipped("transformers reads another model back")


def far(a: np.ndarray, b: np.ndarray) -> float:
    """The largest difference, relative to the largest value."""
    return float(np.abs(a - b).max() / np.abs(b).max())


if __name__ == "__main__":
    sys.exit(main())
