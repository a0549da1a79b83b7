"""How a family file describes what mixes tokens: attention with its switches, and plugins' mixers."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from mlx_experts.registry.spec.rope_plan import RopePlan
from mlx_experts.registry.spec.values import (
    AnyValue,
    Bool,
    Configurable,
    Count,
    FromConfig,
    Leaf,
    ModulePath,
    Num,
    Options,
    Positive,
    Spec,
    Width,
    WrittenAs,
)
from mlx_experts.registry.spec.written import Written


def _style_of_switch(value: Any) -> Any:
    return ("interleaved" if value else "half") if isinstance(value, bool) else value


Pairs = Annotated[Literal["half", "interleaved"], BeforeValidator(_style_of_switch)]
"""Which pairs rotate together, of which a config's switch says whether they are neighbours."""


class RopeSpec(Spec):
    """Rotary position embedding; its style may stand alone.

    Parameters are read from `rope_parameters` (flat or by layer type) and from the older flat keys
    `rope_theta`, `rope_scaling` and `partial_rotary_factor`.
    """

    alone = "style"

    style: Configurable[Pairs] = Field(
        description="Which pairs of a head rotate together; true means `interleaved`, false `half`."
    )
    theta: Annotated[Num, FromConfig("rope_theta")] = Field(
        10000.0, description="Base, where rope parameters do not state one."
    )
    layer_theta: Num | None = Field(None, description="Base that wins over all others; 0 for no rotation.")
    partial: Num = Field(1.0, description="Rotated share of the head, where rope parameters do not state it.")
    dims: Width | None = Field(None, description="Rotated width; overrides the share when present.")
    scaled_types: AnyValue = Field(
        None, description="Layer types that rope scaling is restricted to; absent means all."
    )
    options: Options = Field({}, description="Further parameters of the rope type.")
    when_absent: Options = Field(
        {}, description="Rope parameters where a config has neither `rope_parameters` nor `rope_scaling`."
    )
    entry: str | None = Field(
        None,
        description="Entry of `rope_parameters` where they are keyed by something else than layer types.",
    )
    enabled: Bool = Field(True, description="Whether positions are rotated at all.")


Rope = Annotated[RopePlan | None, WrittenAs(Written[RopeSpec] | None)]
"""A rotation: its section as written, and its parameters in a layer."""


class QkNormSpec(Spec):
    """Normalisation of queries and keys; `over` may stand alone."""

    alone = "over"

    over: Literal["head", "full"] = Field(description="The head axis, or the full width before the split.")
    after_rope: bool = Field(False, description="Normalise after the rotation.")
    weight: bool = Field(True, description="Whether the norms have weights.")
    q: Leaf = Field("q_norm", description="Leaf of the query norm.")
    k: Leaf = Field("k_norm", description="Leaf of the key norm.")
    enabled: Bool = Field(True, description="Whether the norms exist.")


class OutputGateSpec(Spec):
    """A gate on the attention output, computed from the layer's normed input."""

    function: Literal["sigmoid", "softplus"] = Field(description="The gate function.")
    over: Configurable[Literal["element", "head"]] = Field(
        description="One value for each element or for each head."
    )
    path: ModulePath | None = Field(
        None, description="Its own projection; absent: packed in q, per head [q, gate]."
    )
    bias: Leaf | None = Field(None, description="Leaf of a bias for each head on its logits.")
    enabled: Bool = Field(True, description="Whether the gate exists.")


class GqaNames(Spec):
    """Leaves of an attention module."""

    o: Leaf = Field("o_proj", description="Output projection.")
    qkv: Leaf | None = Field(
        None, description="One projection for [q, k, v] in place of `q_proj`, `k_proj` and `v_proj`."
    )


class TemperatureSpec(Spec):
    """Query scale that grows with the position: `1 + scale * log(1 + floor((pos + shift) / floor))`."""

    form: Literal["log", "power"] = Field(
        "log", description="That, or the power `(1 + (pos + shift) / floor) ** scale`."
    )
    scale: Num = Field(description="Factor on the logarithm.")
    floor: Positive = Field(description="Positions that share a value.")
    shift: int = Field(0, description="Added to the position.")
    enabled: Bool = Field(True, description="Whether queries are scaled.")


class GqaSpec(Spec):
    """Grouped-query attention."""

    kind: Literal["gqa"] = Field("gqa", description="Grouped-query attention.")
    path: ModulePath = Field("self_attn", description="Module path in the layer.")
    heads: Width | None = Field(None, description="Query heads; the size `num_heads` when absent.")
    kv_heads: Width | None = Field(None, description="Key-value heads; the size `num_kv_heads` when absent.")
    head_dim: Width | None = Field(None, description="Head width; the size `head_dim` when absent.")
    v_head_dim: Width | None = Field(None, description="Value head width; the head width when absent.")
    names: GqaNames = Field(GqaNames.unchecked(), description="Leaf names.")
    qkv_bias: Annotated[Bool, FromConfig("attention_bias")] = Field(
        False, description="Biases on q, k and v."
    )
    out_bias: Annotated[Bool, FromConfig("attention_bias")] = Field(
        False, description="Bias on the output projection."
    )
    qk_norm: QkNormSpec | None = Field(None, description="Query and key norms.")
    rope: Rope = Field(None, description="Rotary embedding; null for none.")
    window: Count | None = Field(None, description="Visible tokens, the token itself counted; null for all.")
    window_extra: Count = Field(0, description="Tokens that the window is longer than the config says.")
    chunk: Count | None = Field(None, description="Attention stays inside chunks of this many tokens.")
    scale: Positive | None = Field(None, description="Softmax scale; `scale_width ** -0.5` when absent.")
    scale_width: Positive | None = Field(
        None, description="Width that scales the softmax; head_dim when absent."
    )
    float32: bool = Field(False, description="Queries meet keys and values in float32.")
    clip: Positive | None = Field(None, description="Queries, keys and values are clamped to this magnitude.")
    value_scale: Num = Field(1.0, description="Factor on the values.")
    gate: OutputGateSpec | None = Field(None, description="Gate on the output.")
    sinks: Leaf | None = Field(None, description="Leaf with one learned sink logit for each head.")
    sinks_enabled: Bool = Field(True, description="Whether the sinks exist.")
    temperature: TemperatureSpec | None = Field(None, description="Position-dependent query scale.")
    share_kv_every: Count | None = Field(
        None, description="Only every n-th layer projects keys and values; the others take its projections."
    )
    reuse_kv_last: Count = Field(
        0, description="So many last layers attend to what the last one before them of their type has kept."
    )
    values_from_keys: Bool = Field(
        False, description="Values are the keys before norm and rotation; they have no projection."
    )
    value_norm: Bool = Field(False, description="The heads of the values are RMS-normalised without weights.")


class PluginMixerSpec(Spec):
    """A mixer that a plugin builds."""

    kind: str = Field(description="The name under which a plugin offers the mixer.")
    path: ModulePath = Field("self_attn", description="Module path in the layer.")
    rope: Rope = Field(None, description="Rotary embedding, for mixers that rotate.")
    options: Options = Field({}, description="Options of the mixer.")


def _mixer_tag(value: Any) -> str:
    kind = value.get("kind") if isinstance(value, dict) else getattr(value, "kind", None)
    return "gqa" if kind in (None, "gqa") else "plugin"


WrittenMixer = Annotated[
    Annotated[Written[GqaSpec], Tag("gqa")] | Annotated[Written[PluginMixerSpec], Tag("plugin")],
    Discriminator(_mixer_tag),
]
