"""Every error that this package raises for a user's input, public as ``mlx_experts.errors``.

``RegistryError`` is the base of all. Each says what is wrong, where, what was expected, what was found, and
what to do next.
"""

from mlx_experts.registry.errors import (
    CheckFailed,
    CheckpointError,
    ConfigError,
    DeviceError,
    PluginError,
    QuantizationError,
    RegistryError,
    SettingError,
    SpecError,
    TensorError,
    UnknownFamilyError,
)

__all__ = [
    "CheckFailed",
    "CheckpointError",
    "ConfigError",
    "DeviceError",
    "PluginError",
    "QuantizationError",
    "RegistryError",
    "SettingError",
    "SpecError",
    "TensorError",
    "UnknownFamilyError",
]
