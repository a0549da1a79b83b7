"""Every environment variable that this package reads, in one place."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Variable:
    """One variable.

    Args:
        name: its name.
        values: what it takes.
        default: what holds when it is unset or empty.
        effect: what it does.
    """

    name: str
    values: str
    default: str
    effect: str


VARIABLES: tuple[Variable, ...] = (
    Variable(
        "MLX_EXPERTS_FAMILIES",
        "folders, separated as in PATH",
        "none",
        "Further folders with family files. A folder that does not exist is an error.",
    ),
    Variable(
        "MLX_EXPERTS_PLUGINS",
        "entry-point names, separated by commas; `none`",
        "all installed plugins",
        "Narrows which plugins are loaded. A name that is not installed is an error.",
    ),
    Variable(
        "MLX_EXPERTS_TRACE_PLUGINS",
        "anything but 0, false, off, no",
        "off",
        "Prints every hook call with its result to standard error.",
    ),
    Variable(
        "MLX_EXPERTS_FUSED",
        "0, false, off, no switch off; anything else leaves on",
        "on",
        "Whether experts may run fused. An argument of `load` wins over it.",
    ),
    Variable(
        "MLX_EXPERTS_FUSED_MAX_DFF",
        "a whole number",
        "4096 on Metal, no bound elsewhere, or what `registry tune` found",
        "Widest expert that runs fused, itself included. What is not a number is an error.",
    ),
    Variable(
        "MLX_EXPERTS_CACHE_DIR",
        "a folder",
        "the user's cache folder",
        "Where `registry tune` keeps what it measured.",
    ),
)
