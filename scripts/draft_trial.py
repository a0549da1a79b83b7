"""Drafts of families that are hidden: are they right untouched, and right once their questions are answered?

Each family with a reference case is hidden from the catalogue together with everything that extends it. A
draft is made from the case's checkpoint and compared with the original's logits, first as it was written,
then with the answers that the hidden family's own file gives to the draft's questions, and to nothing else.

    python scripts/draft_trial.py [FAMILY ...] [--table docs/draft-trial.md]
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pydantic import ValidationError

from mlx_experts.engine.loading.api import load_model
from mlx_experts.engine.tools.drafts.constants import node_at
from mlx_experts.engine.tools.drafts.draft import Draft, draft_family
from mlx_experts.engine.tools.drafts.evidence import get, plain, put
from mlx_experts.engine.tools.reference_cases import measure
from mlx_experts.registry.catalog.catalog import Catalog, merge, mixers
from mlx_experts.registry.checkpoint.checkpoint import Checkpoint
from mlx_experts.registry.errors import RegistryError
from mlx_experts.registry.spec.family import Family
from mlx_experts.registry.spec.values import Ref, Spec

ROOT = Path(__file__).resolve().parent.parent
CASES = ROOT / "tests" / "cases"


NAMES = (
    "attention.path",
    "attention.names",
    "attention.sinks",
    "attention.qk_norm.q",
    "attention.qk_norm.k",
    "attention.gate.path",
    "moe.path",
    "moe.router.path",
    "moe.router.selection_bias.path",
    "moe.shared.path",
    "moe.shared.gate",
)
VIEWS = {"hub": "config.json", "hub+v5": "config.transformers.json"}


@dataclass(frozen=True)
class Outcome:
    """How the draft of one case did.

    Args:
        source: the family that the draft is nearest to.
        untouched, answered: `right`, `wrong` (it loads, its logits differ) or `refused` (it does not load).
        asked: how many questions the draft asks.
    """

    case: str
    source: str
    untouched: str
    answered: str
    asked: int
    seconds: float
    detail: str = ""


def described(cases: Path = CASES) -> list[str]:
    """Families with a case whose own file, and no plugin and no model of mlx-lm's, describes them whole."""
    catalog, _ = _whole()
    with_case = sorted({meta.parent.parent.name for meta in cases.glob("*/*/case.json")})
    return [name for name in with_case if name in catalog.entries and _is_data(catalog.load(name))]


def _is_data(family: Family) -> bool:
    standard = {"gqa", "mla"}
    kinds = {mixer.kind for mixer in mixers(family).values() if mixer is not None}
    plugins = any("plugin" in op for op in plain(family.checkpoint.conversions)) and "mla" not in kinds
    odd = (family.block.kind, family.embedding.kind, family.moe.router.kind)
    return family.backbone is None and kinds <= standard and not plugins and set(odd) == {"standard"}


@cache
def _whole() -> tuple[Catalog, dict[str, str | None]]:
    """Every bundled family, read once, and what each extends."""
    catalog = Catalog()
    for name in catalog.names():
        catalog.load(name)
    return catalog, {name: catalog.stated(name).get("extends") for name in catalog.names()}


@contextmanager
def hidden(name: str) -> Iterator[tuple[Catalog, Path]]:
    """The bundled families without one, and without those that extend it; and a folder with their files."""
    whole, extends = _whole()
    gone = {other for other, base in extends.items() if name in (other, base)}
    with TemporaryDirectory() as folder:
        for other in extends.keys() - gone:
            (Path(folder) / f"{other}.yaml").symlink_to(whole.path(other))
        yield whole.without(gone), Path(folder)


@contextmanager
def unseen(case: Path, view: str = "hub") -> Iterator[Path]:
    """A case's checkpoint under names that no table knows."""
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for file in (case / "hub").glob("*.safetensors*"):
            (folder / file.name).symlink_to(file.resolve())
        config = json.loads((case / "hub" / VIEWS[view]).read_text(encoding="utf-8"))
        (folder / "config.json").write_text(json.dumps(_renamed(config)))
        yield folder


def _renamed(config: dict[str, Any]) -> dict[str, Any]:
    made = {k: _renamed(v) if isinstance(v, dict) and "config" in k else v for k, v in config.items()}
    if made.get("model_type"):
        made["model_type"] = f"{made['model_type']}_unseen"
    if made.get("architectures"):
        made["architectures"] = [f"{name}Unseen" for name in made["architectures"]]
    return made


def trial(case: Path, view: str = "hub") -> Outcome:
    """The outcome of one case.

    Args:
        view: `hub` for the config as authors publish it, `hub+v5` as transformers 5 writes it.
    """
    name = case.parent.name
    label = f"{name}/{case.name}"
    start = time.perf_counter()
    own = _whole()[0].load(name)
    with hidden(name) as (catalog, base), unseen(case, view) as folder:
        try:
            draft = draft_family(Checkpoint.open(folder), catalog)
        except RegistryError as error:
            return Outcome(label, "", "refused", "refused", 0, time.perf_counter() - start, str(error))
        untouched, why = _verdict(draft.data, draft, base, folder, case)
        answered, why = _verdict(answers(draft, own), draft, base, folder, case)
    seconds = time.perf_counter() - start
    return Outcome(label, draft.source, untouched, answered, len(draft.asked), seconds, why)


def _verdict(data: dict[str, Any], draft: Draft, bundled: Path, folder: Path, case: Path) -> tuple[str, str]:
    import yaml

    with TemporaryDirectory() as scratch:
        (Path(scratch) / f"{draft.family}.yaml").write_text(yaml.safe_dump(data, sort_keys=False))
        try:
            family = Catalog([Path(scratch)], bundled=bundled).load(draft.family)
            model, _ = load_model(folder, dtype="float32", family=family)
            seen = measure(model, case / "oracle.npz")
        except (RegistryError, ValidationError) as error:
            return "refused", str(error)
    return ("right", "") if seen.ok else ("wrong", f"logits off by {seen.full:.1e}")


def answers(draft: Draft, own: Family) -> dict[str, Any]:
    """The draft with its questions answered from a family's own file, and nothing else taken from it."""
    paths = [path for question in draft.asked for path in question.paths]
    for question in draft.asked:
        if question.key:
            paths += _reads(own, question.key)
    if own.variants and any(path.startswith("attention") for path in paths):
        paths += ["attention", "layer_types", "variants", "dense_types", "mlp_variants"]
    data = copy.deepcopy(draft.data)
    for path in sorted(set(paths), key=lambda each: each.count(".")):
        if path == "attention" or not path.startswith("attention.") or "attention" not in paths:
            _answer(data, path, own)
    for path in NAMES:
        # What tensors are called is no question.
        parent = path.rpartition(".")[0]
        name = plain(node_at(draft.whole, path)) if draft.whole is not None else None
        if name is not None and get(data, parent) is not None and node_at(own, parent) is not None:
            put(data, path, name)
    return data


def _reads(family: Family, key: str) -> list[str]:
    """The places in a family at which a config key is read; whole sections where one may be absent."""
    return [
        path for section in Family.model_fields for path in _within(section, getattr(family, section), key)
    ]


def _within(path: str, node: Any, key: str) -> list[str]:
    if key not in _keys(plain(node)):
        return []
    section = isinstance(node, Spec) and not isinstance(node, Ref)
    fields = type(node).model_fields if section else {}
    inner = {name: info for name, info in fields.items() if key in _keys(plain(getattr(node, name)))}
    if not inner:
        return [path]
    found = []
    for name, info in inner.items():
        below = f"{path}.{name}"
        found += [below] if info.default is None else _within(below, getattr(node, name), key)
    return found


def _keys(raw: Any) -> set[str]:
    if isinstance(raw, dict):
        own = set(raw["from"] if isinstance(raw["from"], list) else [raw["from"]]) if "from" in raw else set()
        if isinstance(raw.get("key"), str):
            own.add(raw["key"])
        own |= {each.split(".")[0] for each in own}
        return own.union(*(_keys(each) for each in raw.values()))
    return set().union(*(_keys(each) for each in raw)) if isinstance(raw, list) else set()


def _answer(data: dict[str, Any], path: str, own: Family) -> None:
    node = node_at(own, path)
    value = plain(node, whole=isinstance(node, Spec) and not isinstance(node, Ref))
    parent = path.rpartition(".")[0]
    if parent and node_at(own, parent) is None:
        return
    old = get(data, path)
    put(
        data,
        path,
        value if not isinstance(old, dict) else merge(old, value) if isinstance(value, dict) else value,
    )


def cases_of(names: list[str]) -> list[Path]:
    """The first case of each family."""
    return [sorted((CASES / name).glob("*/case.json"))[0].parent for name in names]


def shares(outcomes: list[Outcome]) -> str:
    """How many drafts are right, and which are wrong with every question answered."""
    right = [sum(getattr(o, word) == "right" for o in outcomes) for word in ("untouched", "answered")]
    wrong = ", ".join(o.case for o in outcomes if o.answered == "wrong")
    return (
        f"untouched {right[0]} of {len(outcomes)} right, answered {right[1]} of {len(outcomes)}; wrong with "
        f"every question answered: {wrong or 'none'}"
    )


def report(outcomes: list[Outcome], newer: list[Outcome]) -> str:
    """The outcomes as a page of Markdown.

    Args:
        outcomes, newer: with config.json as authors publish it, and as transformers 5 writes it.
    """
    again = {o.case: f"{o.untouched} | {o.answered}" for o in newer}
    rows = [
        f"| {o.case} | {o.source} | {o.untouched} | {o.answered} | {o.asked} | {again.get(o.case, ' | ')} |"
        for o in outcomes
    ]
    return "\n".join(
        [
            "# Drafts on trial",
            "",
            "Written by `python scripts/draft_trial.py --table docs/draft-trial.md`. Each family is hidden,",
            "with all that extends it; a draft is made from its reference case's tensors and config under a",
            "name that nothing knows. *Untouched* is the draft as written; *answered* is the draft with the",
            "answers that the hidden family's own file gives to the questions that the draft asks. *Right*",
            "means the original's logits to 1e-4 of the largest and its greedy tokens, *wrong* that it loads",
            "and differs, *refused* that it does not load, which names the tensors or the key.",
            "",
            f"- config.json as authors publish it: {shares(outcomes)}.",
            f"- config.json as transformers 5 writes it, in the last two columns: {shares(newer)}.",
            "",
            "| case | nearest | untouched | answered | questions | untouched | answered |",
            "|---|---|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


def main() -> None:
    """Run the trial and print, or write, its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="*", help="families to try; all that are data by default")
    parser.add_argument("--view", choices=list(VIEWS), help="one spelling of the config; both by default")
    parser.add_argument("--table", type=Path, help="write the outcomes as Markdown")
    parser.add_argument("--verbose", action="store_true", help="say why a draft is not right")
    options = parser.parse_args()
    if options.table is not None and options.view:
        parser.error("the table has both spellings of the config: leave --view out")
    cases = cases_of(options.families or described())
    outcomes: dict[str, list[Outcome]] = {view: [] for view in ([options.view] if options.view else VIEWS)}
    for view, found in outcomes.items():
        for case in cases:
            if not (case / "hub" / VIEWS[view]).is_file():
                continue
            o = trial(case, view)
            found.append(o)
            why = o.detail[:300] if options.verbose else ""
            end = f"{o.answered:9} {o.asked:3} {o.seconds:5.1f} s {why}"
            print(f"{view:6} {o.case:30} {o.source:18} {o.untouched:9} {end}")
        print(f"{view}: {shares(found)}")
    if options.table is not None:
        options.table.write_text(report(outcomes["hub"], outcomes["hub+v5"]), encoding="utf-8")


if __name__ == "__main__":
    main()
