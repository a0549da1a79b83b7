"""Every environment variable that this package reads, in one place, with what its page says of it.

Settings are those of the environment each time that :func:`read` is called: once for a command, a load or a
layer's decision, never while tokens are being made. They are validated once as long as no variable changes.
"""

from __future__ import annotations

import os
from functools import cache, lru_cache
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from mlx_experts.registry.errors import SettingError

PREFIX: Final = "MLX_EXPERTS_"
_OFF: Final = frozenset({"0", "false", "off", "no"})


def _is_on(value: object) -> object:
    """Whether a switch is on: only the four words of `_OFF` switch off."""
    return value.strip().lower() not in _OFF if isinstance(value, str) else value


def _digits(value: object) -> object:
    """A whole number as it is written in decimal digits, and nothing else that ``int`` takes."""
    if not isinstance(value, str):
        return value
    text = value.strip()
    if not text:
        return None
    if not (text.isascii() and text.isdigit()):
        raise ValueError("a whole number of at least 0")
    return int(text)


def _folders(value: object) -> object:
    """A list of folders, separated as in PATH."""
    return tuple(part for part in value.split(os.pathsep) if part) if isinstance(value, str) else value


def _folder(value: object) -> object:
    """A folder, or a word; nothing but spaces is none."""
    return (value.strip() or None) if isinstance(value, str) else value


def _names(value: object) -> object:
    """A list of names, separated by commas."""
    return tuple(n.strip() for n in value.split(",") if n.strip()) if isinstance(value, str) else value


def _existing(folders: tuple[Path, ...]) -> tuple[Path, ...]:
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(f"a folder that exists, and {folder} does not")
    return folders


def _page(values: str, default: str) -> dict[str, Any]:
    """What the page of the environment says beside a setting's description."""
    return {"values": values, "default": default}


Switch = Annotated[bool, BeforeValidator(_is_on)]
WholeNumber = Annotated[int | None, BeforeValidator(_digits)]
Folder = Annotated[Path | None, BeforeValidator(_folder)]


class Settings(BaseModel):
    """The settings of one moment."""

    model_config = ConfigDict(frozen=True)

    families: Annotated[tuple[Path, ...], BeforeValidator(_folders), AfterValidator(_existing)] = Field(
        (),
        description="Further folders with family files. A folder that does not exist is an error.",
        json_schema_extra=_page("folders, separated as in PATH", "none"),
    )
    plugins: Annotated[tuple[str, ...] | None, BeforeValidator(_names)] = Field(
        None,
        description="Narrows which plugins are loaded. A name that is not installed is an error.",
        json_schema_extra=_page("entry-point names, separated by commas; `none`", "all installed plugins"),
    )
    trace_plugins: Switch = Field(
        False,
        description="Prints every hook call with its result to standard error.",
        json_schema_extra=_page("anything but 0, false, off, no", "off"),
    )
    fused: Switch = Field(
        True,
        description="Whether experts may run fused. An argument of `load` wins over it.",
        json_schema_extra=_page("0, false, off, no switch off; anything else leaves on", "on"),
    )
    fused_max_dff: WholeNumber = Field(
        None,
        description="Widest expert that runs fused, itself included. What is not a number is an error.",
        json_schema_extra=_page(
            "a whole number", "4096 on Metal, no bound elsewhere, or what `registry tune` found"
        ),
    )
    pieces: Annotated[bool | None, BeforeValidator(_is_on)] = Field(
        None,
        description="Whether one token on a GPU runs as compiled pieces of a layer. Off on Metal, where no "
        "receipt shows yet what they gain.",
        json_schema_extra=_page("0, false, off, no switch off; anything else on", "on with CUDA"),
    )
    cpu_threads: WholeNumber = Field(
        None,
        description="Threads of the CPU's kernels; more than there are cores are not started.",
        json_schema_extra=_page("a whole number; 0 as unset", "the machine's cores, or numba's own setting"),
    )
    cpu_activations: Annotated[Literal["float32", "int8"] | None, BeforeValidator(_folder)] = Field(
        None,
        description="What the CPU's kernels multiply activations as: `int8` is faster and rounds them, see "
        "docs/benchmarks.md. An argument of `load` wins over it.",
        json_schema_extra=_page("float32, int8", "float32"),
    )
    cache_dir: Folder = Field(
        None,
        description="Where `registry tune` keeps what it measured, and the CPU's kernels their machine code.",
        json_schema_extra=_page("a folder", "the user's cache folder"),
    )


@cache
def _environment() -> type[Settings]:
    """The settings as pydantic-settings reads them; its import takes a fifth of a short command's time."""
    from pydantic_settings import BaseSettings, SettingsConfigDict

    class Environment(BaseSettings, Settings):
        """An empty variable counts as unset."""

        model_config = SettingsConfigDict(
            env_prefix=PREFIX, env_ignore_empty=True, enable_decoding=False, frozen=True, extra="ignore"
        )

    return Environment


def variable(field: str) -> str:
    """The environment variable of a setting."""
    return f"{PREFIX}{field.upper()}"


def variables() -> dict[str, FieldInfo]:
    """Every setting by its environment variable."""
    return {variable(name): field for name, field in Settings.model_fields.items()}


def read() -> Settings:
    """The settings as the environment has them now.

    Raises:
        SettingError: a variable cannot be read; its name, what it takes and what it holds are named.
    """
    # Every decision of the dispatch comes here: only what is ours is decoded.
    given = tuple((name, os.environ[name]) for name in os.environ if name.upper().startswith(PREFIX))
    found = _validated(given)
    if not all(folder.is_dir() for folder in found.families):
        _validated.cache_clear()
        found = _validated(given)
    return found


@lru_cache(maxsize=4)
def _validated(given: tuple[tuple[str, str], ...]) -> Settings:
    """The settings as the environment has them now, which is what is given."""
    try:
        return _environment()() if given else Settings()
    except ValidationError as error:
        first = error.errors()[0]
        field = str(first["loc"][0])
        name = variable(field)
        extra = Settings.model_fields[field].json_schema_extra
        takes = extra["values"] if isinstance(extra, dict) else ""
        told = first["msg"].removeprefix("Value error, ")
        raise SettingError(
            "a variable of the environment cannot be read",
            where=name,
            expected=told if first["type"] == "value_error" else str(takes),
            found=str(os.environ.get(name, ""))[:80],
            hint=f"correct {name}, or unset it",
        ) from error
