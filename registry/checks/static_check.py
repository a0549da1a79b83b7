"""What can be checked without MLX: files, names, coverage of the neighbours, tiny configs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from mlx_experts.registry.catalog.catalog import Catalog
from mlx_experts.registry.checks.coverage import (
    Coverage,
    Known,
    coverage,
    mlx_lm_families,
    transformers_families,
)
from mlx_experts.registry.checks.known_names import check_names
from mlx_experts.registry.errors import RegistryError
from mlx_experts.registry.resolve.planner import resolve
from mlx_experts.registry.resolve.tiny_config import tiny_config
from mlx_experts.registry.spec.family import Family

MAX_LINES = 130


@dataclass
class FastReport:
    """The result of the checks that need no MLX.

    Args:
        families: names that were checked.
        problems: by family (or `catalogue`, `coverage`), what is wrong.
        coverage: the neighbours' architectures against the catalogue; None when one family was asked for.
    """

    families: list[str] = field(default_factory=list)
    problems: dict[str, list[str]] = field(default_factory=dict)
    coverage: Coverage | None = None

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    def add(self, name: str, text: str) -> None:
        """Record a problem."""
        self.problems.setdefault(name, []).append(text)


def check_fast(
    catalog: Catalog, names: Iterable[str] | None = None, known: Iterable[Known] | None = None
) -> FastReport:
    """Validate families and, when none is named, the coverage of the neighbours.

    Args:
        names: the families to check; None for all.
        known: what the neighbours know; None reads the installed mlx-lm and transformers.

    Raises:
        UnknownFamilyError: a named family does not exist.
    """
    report = FastReport()
    wanted = list(names) if names else [*catalog.names(), *catalog.broken]
    for name in wanted:
        if name not in catalog.broken:
            catalog.path(name)
        report.families.append(name)
        try:
            _check_family(catalog.load(name), catalog, report)
        except RegistryError as error:
            report.add(name, str(error))
    if not names:
        _check_coverage(catalog, known, report)
    return report


def _check_family(family: Family, catalog: Catalog, report: FastReport) -> None:
    text = catalog.path(family.family).read_text(encoding="utf-8")
    # The questions of a draft go as they are answered.
    lines = len(text.partition("\n# question: ")[0].splitlines())
    if lines > MAX_LINES:
        report.add(family.family, f"the file has {lines} lines; at most {MAX_LINES} keep it readable")
    if not family.model_types and not family.architectures:
        report.add(family.family, "the family answers to no model_type and to no architecture")
    config = tiny_config(family)
    plan = resolve(family, config)
    check_names(plan, catalog.path(family.family))
    if not plan.moe_layers:
        report.add(family.family, "the tiny model has no MoE layer; state one under `example`")
    for entry in catalog.entries.values():
        both = set(entry.model_types) & set(family.model_types)
        if entry.name != family.family and both and entry.when is None and family.when is None:
            names = ", ".join(sorted(both))
            report.add(family.family, f"'{entry.name}' answers to model_type {names} too ({entry.path})")
    found = catalog.resolve(config).name
    if found != family.family:
        report.add(family.family, f"its own tiny config resolves to '{found}'")


def _check_coverage(catalog: Catalog, known: Iterable[Known] | None, report: FastReport) -> None:
    items = [*mlx_lm_families(), *transformers_families()] if known is None else list(known)
    report.coverage = coverage(catalog, items)
    for item in report.coverage.unknown:
        report.add(
            "coverage",
            f"{item.source} knows '{item.model_type}' ({item.file}), and no family describes it; draft one "
            f"with `registry draft PATH_TO_A_{item.model_type.upper()}_CHECKPOINT`, or declare it in "
            "unsupported.yaml with a reason",
        )
    for name in report.coverage.stale:
        report.add("coverage", f"unsupported.yaml declares '{name}', which a family describes by now")
