"""What can notice a mistake in a family's file, in the order in which it is asked.

schema       the catalogue reads and validates the file
names        carried configs belong to the family, and the neighbours' model types to one
resolve      every carried config gives a plan
keys         some neighbour or carried config knows each config key
source       the text of the original's router says the same
stated       what the authors state of keys, nulls, constants and of what settings come to
tensors      names that real checkpoints have are taken or ignored
parity       the original implementation's answers, of the first case token by token too, of the others after
             the defaults; where a mistake is in how checkpoints are read, the parameters of the file as it is
defaults     keys that are left out mean what transformers' config class gives
mlx-lm       mlx-lm's own model of random weights, written by it
conversion   what mlx-lm's conversion quantises
spellings    checkpoints of other tools, renamed and laid out here without the family file
zeros        scores that all underflow leave the weights finite
prediction   the original's guesses of the token after the next
check        `registry check --fast` of the family alone, and its tiny model
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import yaml
from mlx.utils import tree_flatten

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "helpers")]

import class_plans  # noqa: E402
import config_keys  # noqa: E402
import disk_names  # noqa: E402
import mlx_lm_models  # noqa: E402
import original_sources  # noqa: E402
import stated_settings  # noqa: E402
import zero_scores  # noqa: E402
from mutations import written_out  # noqa: E402

from mlx_experts.engine.loading.api import load_model  # noqa: E402
from mlx_experts.engine.tools.family_check import build_tiny  # noqa: E402
from mlx_experts.engine.tools.reference_cases import View, all_views, measure  # noqa: E402
from mlx_experts.registry.catalog.catalog import Catalog, _read_entry, _refuse_shared_names  # noqa: E402
from mlx_experts.registry.catalog.public_models import models  # noqa: E402
from mlx_experts.registry.catalog.yaml_reader import read_yaml  # noqa: E402
from mlx_experts.registry.checks.coverage import (  # noqa: E402
    Known,
    coverage,
    mlx_lm_families,
    transformers_families,
)
from mlx_experts.registry.checks.static_check import check_fast  # noqa: E402
from mlx_experts.registry.errors import RegistryError  # noqa: E402
from mlx_experts.registry.resolve.planner import resolve  # noqa: E402
from mlx_experts.registry.resolve.tiny_config import tiny_config  # noqa: E402
from mlx_experts.registry.spec.family import Family  # noqa: E402

CLOSE = 3e-5
PREDICTION = ROOT / "tests" / "data" / "prediction"
# A wrong file may fail in any of these ways; each of them is noticed.
FAILURES = (
    RegistryError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
HEADER = frozenset({"model_types", "architectures", "when", "text_config", "text_keys"})


class Noticed(Exception):
    """A part of the tests has noticed the mistake."""


def expect(right: bool, what: str) -> None:
    """Raise where something is not as it should be."""
    if not right:
        raise Noticed(what)


@cache
def _views() -> dict[str, list[View]]:
    known, found = Catalog(), {}
    for view in all_views(ROOT / "tests" / "cases"):
        found.setdefault(known.resolve(view.config()).name, []).append(view)
    return found


@cache
def _mlx_lm_types() -> dict[str, list[str]]:
    known, found = Catalog(), {}
    for model_type in mlx_lm_models.CONFIGS:
        found.setdefault(known.resolve(mlx_lm_models.config_of(model_type)).name, []).append(model_type)
    return found


@cache
def _neighbours() -> list[Known]:
    return [*mlx_lm_families(), *transformers_families()]


def signature(family: Family, config: dict[str, Any]) -> str:
    """Everything that the engine is told of a model, as text."""
    plan = resolve(family, config)
    rest = [family.names, family.block, family.backbone, family.mtp, family.expert_layouts, family.norm]
    return repr(
        [
            plan.sizes,
            plan.norm,
            plan.embedding,
            plan.head,
            plan.layers,
            plan.checkpoint,
            rest,
            family.head.tied,
        ]
    )


class Target:
    """A family whose answers a file has a part in: its own, or one that extends it.

    Args:
        name: the family.
        known: the catalogue as it is.
    """

    def __init__(self, name: str, known: Catalog) -> None:
        self.name, self.right = name, known.load(name)
        self.views = _views().get(name, [])
        self.mlx_lm_types = _mlx_lm_types().get(name, [])
        self.configs = {view.id: view.config() for view in self.views}
        self.configs |= {f"mlx-lm {t}": mlx_lm_models.config_of(t) for t in self.mlx_lm_types}
        self.configs |= {m.checkpoint: dict(m.config) for m in models() if m.family == name}
        self.signatures = {at: signature(self.right, config) for at, config in self.configs.items()}
        self.written: dict[str, dict[str, mx.array]] = {}
        self.tiny_config = tiny_config(self.right)
        self.tiny = signature(self.right, self.tiny_config)

    def changed(self, family: Family) -> Iterator[str]:
        """Carried configs whose plan is another one."""
        for at, config in self.configs.items():
            if signature(family, config) != self.signatures[at]:
                yield at

    def names(self, catalog: Catalog) -> None:
        """Notice a config or a name that leads to another family."""
        for at, config in self.configs.items():
            expect(catalog.resolve(config).name == self.name, f"{at} is another family's")
        config_keys.check_names(self.name, catalog)

    def parity(self, view: View, family: Family, cached: bool) -> None:
        """Notice other logits than the original's."""
        with view.folder() as folder:
            model, _ = load_model(folder, dtype="float32", family=family)
        with np.load(view.case / "oracle.npz") as file:
            ids, want = mx.array(file["input_ids"]), file["logits"]
        got = np.array(model(ids).astype(mx.float32))
        expect(got.shape == want.shape and bool(np.isfinite(got).all()), "no logits")
        expect(float(np.abs(got - want).max() / np.abs(want).max()) < CLOSE, "other logits")
        if cached:
            errors = measure(model, view.case / "oracle.npz")
            expect(max(errors.decode, errors.split) < CLOSE and errors.tokens, "other cached logits")

    def tensors(self, view: View, family: Family) -> None:
        """Notice other parameters than the file as it is reads, whose logits are the original's."""
        with view.folder() as folder:
            if view.id not in self.written:
                right, _ = load_model(folder, dtype="float32", family=self.right)
                self.written[view.id] = dict(tree_flatten(right.parameters()))
            model, _ = load_model(folder, dtype="float32", family=family)
        got, want = dict(tree_flatten(model.parameters())), self.written[view.id]
        expect(got.keys() == want.keys(), "other parameters")
        expect(all(mx.array_equal(got[name], value).item() for name, value in want.items()), "other values")

    def only_reads(self, family: Family) -> bool:
        """Whether a file differs from the one as it is in nothing but how checkpoints are read."""
        left_out = {"checkpoint"}
        return family.model_dump(exclude=left_out) == self.right.model_dump(exclude=left_out)

    def mlx_lm(self, model_type: str, family: Family) -> None:
        """Notice other logits, or other parameters, than those of mlx-lm's model."""
        folder, want = mlx_lm_models.written(model_type)
        model, _ = load_model(folder, family=family)
        if family.backbone is None and model_type not in mlx_lm_models.OTHER_TREES:
            names = {name for name, _ in tree_flatten(model.parameters())}
            expect(names == mlx_lm_models.parameter_names(model_type), "other parameters")
        got = np.array(model(mlx_lm_models.IDS).astype(mx.float32))
        expect(float(np.abs(got - want).max() / np.abs(want).max()) < CLOSE, "other logits than mlx-lm's")

    def conversion(self, model_type: str, family: Family) -> None:
        """Notice a module that only one of mlx-lm's conversion and this one quantises."""
        model, _ = load_model(mlx_lm_models.written(model_type)[0], family=family)
        expect(
            mlx_lm_models.quantised(model, model_type) == mlx_lm_models.quantised_there(model_type), "others"
        )

    def defaults(self, family: Family) -> None:
        """Notice a default, an alias or a list that means something else than in transformers' class."""
        for model_type in class_plans.class_types(family):
            expect(not class_plans.missed_aliases(family, model_type), "another alias")
            if model_type in class_plans.NOT_WHOLE:
                continue
            expect(not class_plans.missed_defaults(family, model_type), "another default")
            expect(not class_plans.missed_lists(family, model_type), "another list")
            expect(not class_plans.missed_settings(family, model_type), "another setting")

    def prediction(self, family: Family) -> None:
        """Notice other guesses of the token after the next."""
        folder = PREDICTION / self.name
        if not folder.exists():
            return
        model, _ = load_model(folder, mtp=True, family=family)
        case = np.load(folder / "reference.npz")
        ids = mx.array(case["input_ids"])
        hidden, _ = model.hidden_and_logits(ids, None)
        _, guesses = model.predict(ids[:, 1:], hidden[:, :-1], None)
        want = case["guesses"]
        expect(float(np.abs(np.array(guesses) - want).max() / np.abs(want).max()) < 1e-4, "other guesses")

    def tiny_differs(self, family: Family) -> bool:
        """Whether the tiny model of the file as it is has another plan, or none."""
        try:
            return signature(family, self.tiny_config) != self.tiny
        except FAILURES:
            return True

    def check(self, family: Family, catalog: Catalog) -> None:
        """Notice what `registry check --fast` notices, or a tiny model that cannot be built or run."""
        if signature(family, tiny_config(family)) == self.tiny:
            return
        expect(check_fast(catalog, [self.name]).ok, "the fast check")
        logits = build_tiny(family, tiny_config(family))(mx.array([[1, 2, 3]]))
        expect(bool(mx.isfinite(logits).all().item()), "no logits")


class Bench:
    """One family file, and what can notice a mistake in it.

    Args:
        name: the family.
        known: the catalogue as it is.
        scratch: a folder for the mistaken files.
        as_it_is: see that nothing is noticed in the file as it is.

    Attributes:
        wrong: what a part notices in the file as it is; that part cannot notice a mistake.
    """

    def __init__(self, name: str, known: Catalog, scratch: Path, *, as_it_is: bool = True) -> None:
        self.name, self.known, self.scratch = name, known, scratch
        heirs = [n for n in known.names() if read_yaml(known.path(n))[0].get("extends") == name]
        self.targets = [Target(each, known) for each in (name, *heirs)]
        self.wrong: dict[str, str] = {}
        data, _ = read_yaml(known.path(name))
        whole = self._load(written_out(data)).load(name)
        expect(whole.model_dump() == self.targets[0].right.model_dump(), "written out it says something else")
        if not as_it_is:
            return
        for part, run in self._parts(self._load(data), ("names",), everything=True):
            try:
                run()
            except (Noticed, *FAILURES) as error:
                self.wrong[part] = f"{type(error).__name__} {error}"

    def noticed_by(self, data: dict[str, Any], at: tuple[str | int, ...]) -> str:
        """The part that notices a mistaken file first, `same` where the file means the same, or nothing."""
        try:
            catalog = self._load(data)
            families = [catalog.load(target.name) for target in self.targets]
        except FAILURES:
            return "schema"
        if all(f.model_dump() == t.right.model_dump() for f, t in zip(families, self.targets, strict=True)):
            return "same"
        for part, run in self._parts(catalog, at):
            if part in self.wrong:
                continue
            try:
                run()
            except (Noticed, *FAILURES):
                return part
        return ""

    def _load(self, data: dict[str, Any]) -> Catalog:
        path = self.scratch / f"{self.name}.yaml"
        text = yaml.safe_dump(data, sort_keys=False, width=10**6, default_flow_style=None)
        path.write_text(text, encoding="utf-8")
        catalog = Catalog()
        entries = {**self.known.entries, self.name: _read_entry(path)}
        _refuse_shared_names(entries.values())
        catalog.__dict__["entries"] = entries
        catalog.load(self.name)
        return catalog

    def _parts(
        self, catalog: Catalog, at: tuple[str | int, ...], *, everything: bool = False
    ) -> Iterator[tuple[str, Callable[[], None]]]:
        """What to ask, cheap parts of all targets first."""
        pairs = [(target, catalog.load(target.name)) for target in self.targets]
        if at[0] in HEADER or everything:
            for target, _ in pairs:
                yield "names", lambda t=target: t.names(catalog)
            yield "names", lambda: expect(not coverage(catalog, _neighbours()).unknown, "an unknown type")
        changed: dict[str, set[str]] = {target.name: set() for target in self.targets}
        # The parts that use the tiny model see nothing where its plan is the same.
        tiny = {t.name for t, f in pairs if everything or t.tiny_differs(f)}
        for target, family in pairs:
            yield "resolve", lambda t=target, f=family: changed[t.name].update(t.changed(f))
            yield "keys", lambda f=family: expect(not config_keys.unknown(f), str(config_keys.unknown(f)))
            yield "source", lambda f=family: original_sources.check(f)
            yield "stated", lambda f=family: config_keys.check_stated(f)
            yield "stated", lambda f=family: stated_settings.check(f)
            if target.name in tiny:
                yield "tensors", lambda f=family: disk_names.check_ignored(f)
        reads = {t.name: t.only_reads(f) and not everything for t, f in pairs}
        later: list[Callable[[], None]] = []
        for target, family in pairs:
            views = [view for view in target.views if view.id in changed[target.name]]
            cases = [
                (lambda t=target, v=view, f=family: t.tensors(v, f))
                if reads[target.name]
                else (lambda t=target, v=view, f=family, c=i == 0: t.parity(v, f, c))
                for i, view in enumerate(views)
            ]
            if cases:
                yield "parity", cases[0]
            later += cases[1:]
        for target, family in pairs:
            if not reads[target.name]:
                # A plan's values are compared without its checkpoint.
                yield "defaults", lambda t=target, f=family: t.defaults(f)
        for each in later:
            yield "parity", each
        for target, family in pairs:
            for kind in target.mlx_lm_types:
                if f"mlx-lm {kind}" in changed[target.name] or everything:
                    yield "mlx-lm", lambda t=target, m=kind, f=family: t.mlx_lm(m, f)
                if at[:2] == ("checkpoint", "full_precision") or at[-1] == "quantizable":
                    yield "conversion", lambda t=target, m=kind, f=family: t.conversion(m, f)
        for target, family in pairs:
            if target.name in tiny:
                yield "spellings", lambda f=family: disk_names.check_spellings(f)
                yield "zeros", lambda f=family: zero_scores.check(f)
            if at[0] in ("mtp", "checkpoint", "names"):
                yield "prediction", lambda t=target, f=family: t.prediction(f)
        yield "check", lambda: self.targets[0].check(pairs[0][1], catalog)


def read_results(path: Path) -> dict[str, Any]:
    """Rows by family of an earlier run, or none."""
    if not path.exists():
        return {}
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def scratch_folder() -> tempfile.TemporaryDirectory[str]:
    """Where mistaken files are written."""
    return tempfile.TemporaryDirectory()
