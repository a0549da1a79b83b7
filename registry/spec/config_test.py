"""The test on a config that tells two families of one name apart."""

from typing import Any

from pydantic import Field

from mlx_experts.registry.spec.values import Spec


class ConfigTest(Spec):
    """A declared test on config.json that tells two families with one model_type apart."""

    has: str | None = Field(None, description="This key must be present and not null.")
    lacks: str | None = Field(None, description="This key must be absent or null.")
    equals: dict[str, Any] | None = Field(None, description="These keys must hold these values.")
