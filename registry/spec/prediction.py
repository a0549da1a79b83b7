"""The `mtp` section: a layer past the last one that guesses the token after the next."""

from typing import Annotated, Literal

from pydantic import Field

from mlx_experts.registry.spec.values import Count, DiskPath, FromConfig, ModulePath, Spec


class PredictionSpec(Spec):
    """Next-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2).

    The layer reads `projection([embedding_norm(embedding of the next token), hidden_norm(hidden state)])`,
    where the hidden state is the model's after its final norm. Its output goes through `norm` and the
    model's head. Only the first of several such layers is kept.
    """

    layers: Annotated[Count, FromConfig("num_nextn_predict_layers")] = Field(
        0,
        description="How many such layers the checkpoint has; 0 for none.",
    )
    reference: str = Field(description="The implementation that the section was read from.")
    type: str | None = Field(None, description="Layer type of the layer; that of the last layer if absent.")
    mlp: Literal["moe", "dense"] | None = Field(
        None, description="Its MLP; that of the last layer of its type if absent."
    )
    path: DiskPath | None = Field(
        None,
        description="Where checkpoints keep it, its decoder layer under `layers.0` there; numbered as the "
        "layer past the last one if absent.",
    )
    rename: dict[ModulePath, ModulePath] = Field(
        {}, description="Modules that checkpoints name otherwise in this layer alone, and their names in it."
    )
    embedding_norm: ModulePath = Field("enorm", description="Norm on the next token's embedding.")
    hidden_norm: ModulePath = Field("hnorm", description="Norm on the hidden state.")
    projection: ModulePath = Field("eh_proj", description="Projection of both, side by side.")
    norm: ModulePath = Field("shared_head.norm", description="Norm before the head.")
    order: Literal["embedding_hidden", "hidden_embedding"] = Field(
        "embedding_hidden", description="Which half of the projection's input is which."
    )
    ignore: tuple[str, ...] = Field(
        ("embed_tokens.*", "shared_head.head.*"),
        description="Copies of the model's own tensors beside the layer.",
    )
