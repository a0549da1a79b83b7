"""Finds family files, merges `extends`, validates them, and resolves a config.json to its family.

Looking a family up by name, or by a config, parses the files that are needed and no others: the
names that each file answers to are read from its first lines.
"""

from __future__ import annotations

import copy
import difflib
import functools
import logging
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import TypeAdapter, ValidationError

from mlx_experts.registry import settings
from mlx_experts.registry.catalog.dense import signs_of_experts
from mlx_experts.registry.catalog.shorthand import merge as merge
from mlx_experts.registry.catalog.shorthand import spelled_out
from mlx_experts.registry.catalog.unsupported import declared_reason, versions_here
from mlx_experts.registry.catalog.validation_errors import at, spec_error
from mlx_experts.registry.catalog.yaml_reader import LOADER, Lines, not_yaml, read_text, read_yaml
from mlx_experts.registry.errors import ConfigError, SettingError, SpecError, UnknownFamilyError
from mlx_experts.registry.spec.config_test import ConfigTest

if TYPE_CHECKING:
    from mlx_experts.registry.spec.family import Family

_LOG = logging.getLogger("mlx_experts")


@functools.cache
def _mixer() -> TypeAdapter[Any]:
    from mlx_experts.registry.spec.family import WrittenMixer

    return TypeAdapter(WrittenMixer)


HEADER_KEYS = ("family", "model_types", "architectures", "when", "text_config", "text_keys")


@dataclass(frozen=True)
class Entry:
    """One family file and the names it answers to."""

    name: str
    path: Path
    model_types: tuple[str, ...]
    architectures: tuple[str, ...]
    when: ConfigTest | None


class Catalog:
    """The families known to this process.

    Args:
        folders: folders with family files, searched after the bundled one; a family of the same
            name as an earlier one is an error naming both files.
        bundled: the folder of bundled families, where it is not the installed one.
    """

    def __init__(self, folders: Iterable[Path] = (), *, bundled: Path | None = None) -> None:
        if isinstance(folders, str | Path):
            raise SettingError(
                "families are given as a list of folders", expected="[Path(...)]", found=repr(folders)
            )
        given = tuple(Path(folder) for folder in folders)
        for folder in given:
            if not folder.is_dir():
                raise SettingError("a folder of families does not exist", found=str(folder))
        self.folders = (bundled or bundled_folder(), *settings.read().families, *given)
        self._loaded: dict[str, Family] = {}
        self.broken: dict[str, SpecError] = {}
        """By file name, what is wrong with the top of a file in a folder of somebody's own."""

    @functools.cached_property
    def entries(self) -> dict[str, Entry]:
        """Every family by name, read from the first lines of its file."""
        found: dict[str, Entry] = {}
        for folder in self.folders:
            for path in sorted(folder.glob("*.yaml")):
                try:
                    entry = _read_entry(path)
                except SpecError as error:
                    if folder == self.folders[0]:
                        raise
                    # Whoever wants another family needs none of this file.
                    self.broken[path.stem] = error
                    _LOG.warning("%s is left out: %s", path, error.what)
                    continue
                if entry.name in found:
                    raise SpecError(
                        f"two files describe the family '{entry.name}'",
                        where=f"{found[entry.name].path} and {path}",
                        hint="rename one of them, or extend the other with `extends:`",
                    )
                found[entry.name] = entry
        _refuse_shared_names(found.values())
        return found

    def names(self) -> list[str]:
        """Names of all families, sorted."""
        return sorted(self.entries)

    def without(self, hidden: Container[str]) -> Catalog:
        """The same families but some; nothing that was read here is read again."""
        made = copy.copy(self)
        made.entries = {name: entry for name, entry in self.entries.items() if name not in hidden}
        made._loaded = {name: family for name, family in self._loaded.items() if name not in hidden}
        return made

    def load(self, name: str) -> Family:
        """The validated family of this name.

        Raises:
            UnknownFamilyError: no file describes it.
            SpecError: its file is wrong.
        """
        if name not in self._loaded:
            self._loaded[name] = validate(*self._merged(name))
        return self._loaded[name]

    def path(self, name: str) -> Path:
        """The file that describes a family."""
        if name not in self.entries and name in self.broken:
            raise self.broken[name]
        if name not in self.entries:
            near = difflib.get_close_matches(name.lower(), self.entries, n=3, cutoff=0.5)
            short = [f"{folder / name}.yml" for folder in self.folders if (folder / f"{name}.yml").exists()]
            raise UnknownFamilyError(
                f"no family is called '{name}'",
                where=", ".join(str(f) for f in self.folders),
                hint=f"rename {short[0]}: a family file ends in .yaml"
                if short
                else f"did you mean {' or '.join(near)}?"
                if near
                else "`registry list` shows all; `--families FOLDER` adds those of a folder",
            )
        return self.entries[name].path

    def stated(self, name: str) -> dict[str, Any]:
        """What a family's own file states, without what it extends; shorthands are spelled out.

        Raises:
            UnknownFamilyError: no file describes it.
            SpecError: its file is wrong.
        """
        path = self.path(name)
        data, lines = read_yaml(path)
        base = data.get("extends")
        names = _defined(read_yaml(self.path(base))[0], self.path(base)) if isinstance(base, str) else {}
        return _without_names(spelled_out(data, merge(names, _defined(data, path)), lines, path))

    def _merged(self, name: str) -> tuple[dict[str, Any], Lines, Path]:
        # As in :func:`validate`.
        from mlx_experts.registry.spec.family import implied

        path = self.path(name)
        data, lines = read_yaml(path)
        base_name = data.get("extends")
        if base_name is None:
            return _without_names(spelled_out(data, _defined(data, path), lines, path)), lines, path
        if not isinstance(base_name, str) or base_name == name or base_name not in self.entries:
            others = [other for other in self.entries if other != name]
            near = difflib.get_close_matches(str(base_name), others, n=1, cutoff=0.4)
            raise SpecError(
                f"`extends` names no other family: '{base_name}'",
                where=at(lines, ("extends",), path),
                hint=f"did you mean {near[0]}?" if near else "`registry list` shows all",
            )
        base, base_lines = read_yaml(self.path(base_name))
        if "extends" in base:
            raise SpecError(
                f"'{name}' extends '{base_name}', which itself extends '{base['extends']}'",
                where=at(lines, ("extends",), path),
                expected="one level of `extends`",
                hint=f"extend '{base['extends']}' and repeat what '{base_name}' changes",
            )
        base = implied(base) | base
        for key in HEADER_KEYS[1:4]:
            base.pop(key, None)
        base.pop("notes", None)
        names = merge(_defined(base, self.path(base_name)), _defined(data, path))
        base = spelled_out(base, names, base_lines, self.path(base_name))
        data = spelled_out(data, names, lines, path)
        return _without_names(merge(base, data)), {**base_lines, **lines}, path

    def for_config(self, config: Mapping[str, Any]) -> Family:
        """The family that a config.json belongs to.

        An architecture decides before a model_type, at the top level before the nested text settings;
        among families that share the name, declared tests decide.

        Raises:
            ConfigError: `architectures` or `model_type` holds something else than names.
            UnknownFamilyError: none fits, or more than one does.
        """
        return self.load(self.resolve(config).name)

    def resolve(self, config: Mapping[str, Any]) -> Entry:
        """The catalogue entry for a config.json; see :meth:`for_config`."""
        from mlx_experts.registry.catalog.config_view import ConfigView

        nested = config.get("text_config")
        levels = [config] + ([nested] if isinstance(nested, Mapping) else [])
        asked: list[str] = []
        for level in levels:
            for key, attribute in (("architectures", "architectures"), ("model_type", "model_types")):
                wanted = names_of(level, key)
                asked += [f"{key} {w}" for w in wanted]
                fits = [e for e in self.entries.values() if set(getattr(e, attribute)) & set(wanted)]
                passing = [e for e in fits if e.when is None or _passes(e.when, ConfigView(config))]
                if attribute == "architectures" and len(fits) == 1:
                    # A name that is not shared needs no test.
                    passing = fits
                if len(passing) > 1:
                    tested = [e for e in passing if e.when is not None]
                    passing = tested or passing
                if len(passing) == 1:
                    return passing[0]
                if len(passing) > 1:
                    raise UnknownFamilyError(
                        "more than one family claims this checkpoint",
                        found=", ".join(sorted(e.name for e in passing)),
                        where=f"config.json, {key}",
                        hint="give the families a `when:` test that tells them apart",
                    )
        gap = declared_reason(name for level in levels for name in names_of(level, "model_type"))
        if gap is not None:
            raise UnknownFamilyError(
                f"'{gap[0]}' is not supported: {gap[1]}",
                where="config.json, model_type",
                found=", ".join(asked),
                hint=f"that holds for {versions_here()}; a later version may read it",
            )
        near = difflib.get_close_matches(str(config.get("model_type", "")), self.entries, n=3, cutoff=0.5)
        sized = any(
            level.get(key) is not None for level in levels for key in ("hidden_size", "d_model", "n_embd")
        )
        if sized and not signs_of_experts(config):
            raise UnknownFamilyError(
                "config.json states no experts: a dense model",
                where="config.json",
                found=", ".join(asked),
                hint="mlx_lm.generate runs it; if it has experts after all, try `registry draft PATH`",
            )
        raise UnknownFamilyError(
            "no family describes this checkpoint",
            where=", ".join(("config.json", *(f"{name}.yaml, which cannot be read" for name in self.broken))),
            found=", ".join(asked) or "neither `architectures` nor `model_type`",
            hint=(f"nearest: {', '.join(near)}; " if near else "")
            + "`registry draft PATH` writes a first family file",
        )


def _defined(data: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The named values of a file: those of the whole, and those of its checkpoint section.

    Raises:
        SpecError: a name is no text.
    """
    checkpoint = data.get("checkpoint")
    sections = (data, checkpoint if isinstance(checkpoint, dict) else {})
    found = {
        k: v for each in sections if isinstance(each.get("define"), dict) for k, v in each["define"].items()
    }
    for name in found:
        if not isinstance(name, str):
            raise SpecError(
                "a name in `define` is no text",
                where=str(path),
                expected="a word, such as `name: value`",
                found=repr(name)[:80],
            )
    return found


def _without_names(data: dict[str, Any]) -> dict[str, Any]:
    """A mapping that is spelled out: its named values stand where they are used."""
    kept = {key: value for key, value in data.items() if key != "define" or not isinstance(value, dict)}
    if isinstance(kept.get("checkpoint"), dict) and isinstance(kept["checkpoint"].get("define"), dict):
        kept["checkpoint"] = {key: value for key, value in kept["checkpoint"].items() if key != "define"}
    return kept


def mixers(family: Family, lines: Lines | None = None, path: Path | None = None) -> dict[str, Any]:
    """By layer type, the family's mixer as written, or None for no mixer.

    Args:
        lines: where each key stands, for messages.
        path: the family file, for messages.

    Raises:
        SpecError: a variant is not a mixer.
    """
    base = family.attention
    found: dict[str, Any] = {}
    raw = base.model_dump(by_alias=True, exclude_unset=True) if base is not None else {}
    for name, change in family.variants.items():
        if change is None:
            found[name] = None
            continue
        try:
            found[name] = _mixer().validate_python(merge(raw, change))
        except ValidationError as error:
            file = path or Path(f"{family.family}.yaml")
            if base is not None and base.kind != "gqa" and ("attention", "kind") in (lines or {}):
                raise _ill_matched(base.kind, name, lines or {}, file) from error
            raise spec_error(error, lines or {}, file, ("variants", name)) from error
    if base is not None:
        found.setdefault("", base)
    return found


def _ill_matched(kind: str, variant: str, lines: Lines, path: Path) -> SpecError:
    """The error about attention of a kind that a variant, perhaps an inherited one, does not fit."""
    near = difflib.get_close_matches(kind, ("gqa", "mla"), n=1, cutoff=0.6)
    return SpecError(
        f"attention of the kind '{kind}' does not go with what 'variants.{variant}' changes of it",
        where=at(lines, ("attention", "kind"), path),
        expected="a kind that has these keys, or variants that are stated anew",
        hint=f"did you mean {near[0]}?" if near else f"state `variants: {{{variant}: …}}` in this file too",
    )


def validate(data: dict[str, Any], lines: Lines, path: Path) -> Family:
    """Check a merged family mapping against the schema.

    Raises:
        SpecError: naming file, line, key and, for an unknown key, the nearest known one.
    """
    # Building these models takes longer than reading every file's names, which needs none of them.
    from mlx_experts.registry.spec.family import Family

    try:
        family = Family.model_validate(data)
    except ValidationError as error:
        raise spec_error(error, lines, path) from error
    if family.family != path.stem:
        raise SpecError(
            "the file is not named after its family",
            where=str(path),
            expected=f"{family.family}.yaml",
            found=path.name,
        )
    kinds = mixers(family, lines, path)
    if family.backbone is None and not any(kinds.values()):
        raise SpecError(
            "no layer of the family has a mixer",
            where=at(lines, ("variants",) if family.variants else ("attention",), path),
            expected="`attention`, or `variants` that describe what mixes tokens",
        )
    _check_leaves(family, lines, path)
    return family


def _check_leaves(family: Family, lines: Lines, path: Path) -> None:
    """A layout of experts names as many leaves as its experts have projections."""
    from mlx_experts.registry.spec.checkpoint import PerExpert, Stacked

    gated = family.moe.experts.kind == "glu"
    for i, layout in enumerate(family.expert_layouts):
        if isinstance(layout, Stacked):
            continue
        fused = isinstance(layout, PerExpert) and layout.fused is not None
        wanted = ("gate and up in one, down" if fused else "gate, up, down") if gated else "up, down"
        if len(layout.projections) != len(wanted.split(", ")):
            raise SpecError(
                f"'checkpoint.experts.{i}.projections' names {len(layout.projections)} projections",
                where=at(lines, ("checkpoint", "experts", i, "projections"), path),
                expected=wanted,
                found=", ".join(layout.projections),
            )


def _read_entry(path: Path) -> Entry:
    """Names from the lines before `config:`, so that a look-up need not parse whole files."""
    text = read_text(path)
    head: list[str] = []
    for line in text.splitlines():
        top = line[:1] not in ("", " ", "#", "-") and ":" in line
        if top and line.split(":", 1)[0] not in (*HEADER_KEYS, "extends", "reference"):
            break
        head.append(line)
    try:
        data = yaml.load("\n".join(head), Loader=LOADER) or {}
    except yaml.YAMLError as error:
        raise not_yaml(error, path, text) from error
    except (RecursionError, ValueError) as error:
        raise SpecError("the top of the family file holds no names", where=str(path)) from error
    for key in ("family", "architectures"):
        if not isinstance(data, dict) or key not in data:
            raise SpecError(
                f"the family file lacks `{key}` at its top",
                where=f"{path}:1",
                expected="family and architectures before every other section",
            )
    data.setdefault("model_types", [str(data["family"])])
    for key in ("model_types", "architectures"):
        names = [] if data[key] is None else data[key]
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise SpecError(
                f"`{key}` is not a list of names",
                where=str(path),
                expected=f"{key}: [a_name]",
                found=repr(data[key])[:80],
                hint="put names that YAML reads as numbers or truth values in quotes",
            )
    try:
        when = ConfigTest.model_validate(data["when"]) if data.get("when") is not None else None
    except ValidationError as error:
        raise spec_error(error, {}, path, ("when",)) from error
    return Entry(
        name=str(data["family"]),
        path=path,
        model_types=tuple(data["model_types"] or ()),
        architectures=tuple(data["architectures"] or ()),
        when=when,
    )


def _refuse_shared_names(entries: Iterable[Entry]) -> None:
    """Two families may share a name only when each but one tells itself apart by a declared test."""
    owners: dict[str, list[Entry]] = {}
    for entry in entries:
        for name in (*(f"architecture {a}" for a in entry.architectures),):
            owners.setdefault(name, []).append(entry)
    for name, claimants in owners.items():
        if sum(e.when is None for e in claimants) > 1:
            raise SpecError(
                f"two families claim the {name}",
                where=" and ".join(str(e.path) for e in claimants),
                hint="give one of them a `when:` test, or remove the name from one",
            )


def names_of(config: Mapping[str, Any], key: str) -> list[str]:
    """The names that a config gives under a key: one, a list of them, or none.

    Raises:
        ConfigError: it holds something else.
    """
    value = config.get(key)
    names = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(
            f"'{key}' holds no names", where="config.json", expected="a name", found=repr(value)[:80]
        )
    return names


def _passes(test: ConfigTest, config: Any) -> bool:
    if test.has is not None and config.get(test.has) is None:
        return False
    if test.lacks is not None and config.get(test.lacks) is not None:
        return False
    return all(config.get(k) == v for k, v in (test.equals or {}).items())


def bundled_folder() -> Path:
    """The folder with the families of this package."""
    return Path(str(resources.files("mlx_experts.families")))
