"""Every error a user can meet, and the exit code each one means.

    RegistryError                      exit 1: something you gave is wrong
    ├── SpecError                      a family file: file, line, key
    ├── ConfigError                    a checkpoint's config.json: key and value
    ├── UnknownFamilyError             no family fits a checkpoint
    ├── CheckpointError                a tensor file: missing, damaged, foreign
    │   └── TensorError                tensors missing, unclaimed or of the wrong shape
    ├── QuantizationError              a quantisation entry that does not fit its tensors
    ├── PluginError                    a plugin that cannot be used
    ├── DeviceError                    a machine that lacks what a model needs
    └── SettingError                   an argument or an environment variable
    CheckFailed                        exit 2: a check ran and did not pass

Anything else is a bug of ours (exit 3).
"""

from __future__ import annotations

from typing import Self


class RegistryError(Exception):
    """What is wrong, where, what was expected, what was found, what to do next.

    Args:
        what: one sentence saying what is wrong.
        where: the file, key or tensor it is about.
        expected: what would have been right.
        found: what is there.
        hint: what to do next.
    """

    exit_code = 1

    def __init__(
        self,
        what: str,
        *,
        where: str = "",
        expected: str = "",
        found: str = "",
        hint: str = "",
    ) -> None:
        self.what, self.where, self.expected, self.found, self.hint = what, where, expected, found, hint
        super().__init__(self.render())

    def within(self, place: str) -> Self:
        """The same error, with the place that its own one is in."""
        where = f"{self.where}\nof {place}" if self.where else place
        return type(self)(self.what, where=where, expected=self.expected, found=self.found, hint=self.hint)

    def render(self) -> str:
        """The message as printed: the sentence, then one indented line for each fact that is known."""
        lines = [self.what]
        for label, text in (
            ("where", self.where),
            ("expected", self.expected),
            ("found", self.found),
            ("next", self.hint),
        ):
            if text:
                lines.append(f"  {label + ':':<10}{text}".replace("\n", "\n            "))
        return "\n".join(lines)


class SpecError(RegistryError):
    """A family file cannot be used."""


class ConfigError(RegistryError):
    """A checkpoint's config.json lacks a key or holds a value that cannot be."""


class UnknownFamilyError(RegistryError):
    """No family fits the checkpoint, or more than one does."""


class CheckpointError(RegistryError):
    """A checkpoint's files are missing, damaged or foreign."""


class TensorError(CheckpointError):
    """Tensors are missing, unclaimed or of the wrong shape."""


class QuantizationError(RegistryError):
    """A quantisation entry does not fit the tensors that it speaks of."""


class PluginError(RegistryError):
    """A plugin cannot be used."""


class DeviceError(RegistryError):
    """A machine lacks what a model needs."""


class SettingError(RegistryError):
    """An argument or an environment variable has a value that cannot be used."""


class CheckFailed(RegistryError):
    """A check ran and did not pass."""

    exit_code = 2
