"""The part of a family file that takes mlx-lm's own model."""

from typing import Self

from pydantic import Field, model_validator

from mlx_experts.registry.spec.values import ModulePath, Spec


class BackboneSpec(Spec):
    """mlx-lm's own model and layouts, in which this package's blocks take the place of its MoE blocks."""

    module: ModulePath = Field(description="Module of `mlx_lm.models`.")
    blocks: tuple[str, ...] = Field((), description="Classes of its MoE blocks that are replaced.")
    kept: str | None = Field(None, description="Why its blocks stay as they are, where none is replaced.")
    needs_metal: bool = Field(False, description="Whether it runs on Metal only.")
    fallbacks: str | None = Field(
        None, description="Plain operations that take the place of its Metal kernels where there is no Metal."
    )
    cache: str | None = Field(
        None, description="The prompt cache that takes the place of mlx-lm's, where its own cannot be loaded."
    )

    @property
    def metal_only(self) -> bool:
        """Whether nothing stands in for its Metal kernels elsewhere."""
        return self.needs_metal and self.fallbacks is None

    @model_validator(mode="after")
    def _blocks_are_replaced_or_kept(self) -> Self:
        """Either blocks are named, or why none is."""
        if bool(self.blocks) == (self.kept is not None):
            raise ValueError("state either the `blocks` that are replaced or why they are `kept`")
        return self
