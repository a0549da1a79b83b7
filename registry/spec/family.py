"""The vocabulary of a family file, as frozen pydantic models.

A family file says what a family *is*; nothing here speaks of devices, kernels or bit widths. Sections are
declared as they are when every reference is read; a family holds them as written (``registry.spec.written``).
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from mlx_experts.registry.spec.attention import GqaSpec as GqaSpec
from mlx_experts.registry.spec.attention import OutputGateSpec as OutputGateSpec
from mlx_experts.registry.spec.attention import PluginMixerSpec as PluginMixerSpec
from mlx_experts.registry.spec.attention import RopeSpec as RopeSpec
from mlx_experts.registry.spec.attention import TemperatureSpec as TemperatureSpec
from mlx_experts.registry.spec.attention import WrittenMixer as WrittenMixer
from mlx_experts.registry.spec.backbone import BackboneSpec
from mlx_experts.registry.spec.checkpoint import (
    STANDARD_LAYOUTS,
    CheckpointSpec,
    Flat,
    PerExpert,
    Split,
    Stacked,
)
from mlx_experts.registry.spec.config_test import ConfigTest as ConfigTest
from mlx_experts.registry.spec.layer_rules import AllLayers, LayerRule, TypeRule
from mlx_experts.registry.spec.prediction import PredictionSpec
from mlx_experts.registry.spec.values import (
    Bool,
    Configurable,
    Count,
    FromConfig,
    Leaf,
    ModulePath,
    ModulePathOrNone,
    NotNegative,
    Num,
    Options,
    Positive,
    SharedPath,
    Spec,
    Str,
    Width,
    WrittenAs,
)
from mlx_experts.registry.spec.written import Written


def _offset_of_switch(value: Any) -> Any:
    return ("run" if value else "none") if isinstance(value, bool) else value


NormOffset = Annotated[Literal["none", "load", "run"], BeforeValidator(_offset_of_switch)]


class NormSpec(Spec):
    """The normalisation used by the decoder."""

    kind: Configurable[Literal["rms", "layer", "layer_no_bias"]] = Field(
        "rms", description="RMSNorm, LayerNorm with a bias, or LayerNorm without one."
    )
    offset: Configurable[NormOffset] = Field(
        "none",
        description="Zero-centred weights: `load` adds one while loading original checkpoints, "
        "`run` adds one at run time; true means `run`, false `none`.",
    )
    parts: Width = Field(1, description="Equal parts of the width that an RMSNorm normalises apart.")
    uncentred: tuple[str, ...] = Field(
        (), description="Norm modules that an offset leaves alone (patterns with `*`)."
    )


class BlockSpec(Spec):
    """How a decoder layer joins its two branches; a norm that is null does not exist."""

    pre_mixer: ModulePath | None = Field("input_layernorm", description="Norm before the mixer.")
    post_mixer: ModulePath | None = Field(None, description="Norm on the mixer's output.")
    pre_mlp: ModulePath | None = Field("post_attention_layernorm", description="Norm before the MLP.")
    post_mlp: ModulePath | None = Field(None, description="Norm on the MLP's output.")
    parallel: bool = Field(False, description="Both branches read the first norm and are added together.")
    residual_multiplier: Num = Field(1.0, description="Factor on each branch before it is added.")
    norm_eps: Positive | None = Field(
        None, description="Epsilon of the norms; that of the model when absent."
    )
    kind: str = Field("standard", description="`standard`, or the name of a plugin's decoder layer.")
    options: Options = Field({}, description="Options of a plugin's decoder layer.")


class NamesSpec(Spec):
    """Module paths of the decoder's frame."""

    wrapper: ModulePathOrNone = Field(
        "", description="Module that holds the decoder and its head, or nothing."
    )
    root: ModulePath = Field("model", description="Module of the decoder.")
    embed: ModulePath = Field("embed_tokens", description="Token embedding, under the root.")
    layers: ModulePath = Field("layers", description="The list of layers, under the root.")
    norm: ModulePath | None = Field("norm", description="Final norm, under the root; null for none.")
    frequencies: ModulePath | None = Field(
        None, description="Leaf, under the root, of learned log factors on the rotary frequencies."
    )


class LayerInputsSpec(Spec):
    """A second, narrow embedding with a part for each layer, which the layers add to their output."""

    width: Count = Field(description="Width of a layer's part; 0 for none.")
    vocab_size: Width | None = Field(None, description="Its rows; the size `vocab_size` when absent.")


class EmbeddingSpec(Spec):
    """The token embedding."""

    multiplier: Num | Literal["sqrt_hidden"] = Field(1.0, description="Factor on the embeddings.")
    kind: str = Field("standard", description="`standard`, or the name of a plugin's embedding.")
    options: Options = Field({}, description="Options of a plugin's embedding.")
    norm: ModulePath | None = Field(None, description="A norm on the embeddings, under the root.")
    layer_inputs: LayerInputsSpec | None = Field(None, description="Further inputs of every layer.")


class HeadSpec(Spec):
    """The output head."""

    path: ModulePath = Field("lm_head", description="Module path beside the root.")
    tied: Annotated[Bool, FromConfig("tie_word_embeddings")] = Field(
        False, description="Whether the embedding serves as head."
    )
    embedding_if_absent: Bool = Field(
        False, description="A head of its own that is the embedding where a checkpoint has none."
    )
    bias: Bool = Field(False, description="Whether the head has a bias.")
    norm: ModulePath | None = Field(None, description="A norm inside the head, before its product.")
    rows: Width | None = Field(None, description="Its rows; the size `vocab_size` when absent.")
    multiplier: Num = Field(1.0, description="Factor on the logits.")
    divisor: Positive = Field(1.0, description="Divisor of the logits.")
    softcap: Num = Field(0.0, description="`cap * tanh(logits / cap)`; 0 for none.")
    normalize_columns: Bool = Field(False, description="Each column is L2-normalised while loading.")


class ActivationSpec(Spec):
    """An MLP or expert activation with its constants; its name may stand alone."""

    alone = "name"

    name: Annotated[Str, FromConfig("hidden_act")] = Field(
        "silu",
        description="Name of the activation; in a GLU a function of one argument is the one on its gate.",
    )
    alpha: Num = Field(1.0, description="Slope inside the sigmoid.")
    limit: Num = Field(0.0, description="Clamp bound; 0 for none.")


class DenseSpec(Spec):
    """The MLP of layers without experts."""

    path: ModulePath = Field("mlp", description="Module path in the layer.")
    kind: Literal["glu", "mlp"] = Field("glu", description="Gated (gate, up, down) or not (up, down).")
    width: Width | None = Field(None, description="Inner width; the size `dense_width` when absent.")
    activation: ActivationSpec = Field(ActivationSpec.unchecked(), description="Activation.")
    bias: Bool = Field(False, description="Biases on all projections.")
    names: tuple[ModulePath, ModulePath, ModulePath] = Field(
        ("gate_proj", "up_proj", "down_proj"), description="Leaves: gate, up, down."
    )
    scale: Leaf | None = Field(None, description="Leaf of a learned factor on the output.")


class SelectionBiasSpec(Spec):
    """A bias that is added to the scores for selection only; its path may stand alone."""

    alone = "path"

    path: ModulePath = Field(description="Leaf, from the MoE module.")
    enabled: Bool = Field(True, description="Whether the bias exists.")


class GroupsSpec(Spec):
    """Group-limited selection: only experts of the best groups can be picked."""

    count: Count = Field(description="Number of groups.")
    keep: Count = Field(description="Groups kept.")
    score: Configurable[Literal["top2", "max"]] = Field(
        description="A group's score: sum of its two best, or its best."
    )
    enabled: Bool = Field(True, description="Whether selection is limited.")
    each: bool = Field(False, description="Every group gives equally many of the picked experts.")
    excluded: Literal["never", "zero"] = Field(
        "never", description="Experts of other groups are never picked, or stand at a score of 0."
    )


class RenormalizeSpec(Spec):
    """Division of the selected weights by their sum; `enabled` may stand alone."""

    alone = "enabled"

    enabled: Bool = Field(description="Whether the weights are divided.")
    eps: NotNegative = Field(0.0, description="Added to the sum.")
    clamp: NotNegative = Field(0.0, description="Lower bound of the sum.")
    skip_single: Bool = Field(False, description="Not done when one expert is picked.")
    p: Positive = Field(1.0, description="The norm that divides: 1 for the sum of magnitudes.")


class RouterSpec(Spec):
    """How a token picks its experts: logits, score, selection, weights."""

    kind: str = Field("standard", description="`standard`, or the name of a plugin's router.")
    path: ModulePath = Field("gate", description="Leaf of the router's matrix, from the MoE module.")
    quantizable: bool = Field(
        True, description="A Linear that conversion may quantise, or a bare matrix that it may not."
    )
    bias: Bool = Field(False, description="Whether the product has a bias.")
    input_norm: ModulePath | None = Field(
        None, description="Leaf of a scale: the input is RMS-normalised and multiplied by it."
    )
    dtype: Literal["model", "float32"] = Field(
        "model", description="Type of the product with the router's matrix."
    )
    multiplier: Num = Field(1.0, description="Factor on the logits.")
    temperature: Positive = Field(1.0, description="Divisor of the logits.")
    softcap: Num = Field(0.0, description="`cap * tanh(logits / cap)` before scoring; 0 for none.")
    select: str = Field("topk", description="`topk`, or the name of a plugin's selection.")
    options: Options = Field({}, description="Options of a plugin's selection or router.")
    score: Configurable[Literal["softmax", "sigmoid", "sqrtsoftplus"]] = Field(
        description="The function that makes scores of logits."
    )
    score_dtype: Literal["float32", "logits"] = Field(
        "float32", description="Type the scores are computed in."
    )
    order: Literal["score_then_topk", "topk_then_score"] = Field(
        "score_then_topk", description="Scores over all experts, or over the selected only."
    )
    selection_bias: SelectionBiasSpec | None = Field(None, description="Bias for selection only.")
    groups: GroupsSpec | None = Field(None, description="Group-limited selection.")
    renormalize: RenormalizeSpec | None = Field(None, description="Division by the sum.")
    scale: Num = Field(1.0, description="Factor on the weights, after renormalizing.")
    expert_scale: ModulePath | None = Field(None, description="Leaf of a learned factor for each expert.")

    def check(self) -> None:
        """A Linear holds no bias for selection: quantising replaces it with whatever stands inside."""
        bias = self.selection_bias
        if self.quantizable and bias is not None and bias.path.startswith(f"{self.path}."):
            raise ValueError("a selection bias inside the router's module needs `quantizable: false`")


class LatentSpec(Spec):
    """A narrower space that the routed experts work in."""

    width: Count = Field(description="Width of the space; 0 for none.")
    down: ModulePath = Field(description="Leaf that projects into it.")
    up: ModulePath = Field(description="Leaf that projects out of it, after the weighted sum.")
    bias: Bool = Field(False, description="Biases on both.")
    norm: ModulePath | None = Field(
        None, description="Leaf of a norm on the weighted sum, before it leaves the space."
    )
    norm_enabled: Bool = Field(True, description="Whether that norm exists.")
    enabled: Bool = Field(True, description="Whether it exists.")

    @property
    def exists(self) -> bool:
        """Whether a resolved section describes a space at all."""
        return self.enabled and self.width > 0


class ExpertsSpec(Spec):
    """The routed experts."""

    path: ModulePath = Field("switch_mlp", description="Container, from the MoE module.")
    kind: Literal["glu", "mlp"] = Field("glu", description="Gated (gate, up, down) or not (up, down).")
    activation: ActivationSpec = Field(ActivationSpec.unchecked(), description="Activation.")
    bias: Bool = Field(False, description="Biases on all projections.")
    latent: LatentSpec | None = Field(None, description="A narrower space for the experts.")
    zero_experts: Count = Field(0, description="Router columns that return their input.")
    apply_router_weight_on_input: Bool = Field(
        False, description="The weights multiply what the experts read, not what they give."
    )
    output_scale: Num = Field(1.0, description="Factor on the weighted sum.")


class SharedSpec(Spec):
    """The expert that every token passes."""

    combine: Configurable[Literal["sum", "mean", "root_mean", "sigmoid_gate", "softmax_mix", "router"]] = (
        Field("sum", description="How its output joins the routed one.")
    )
    path: SharedPath = Field(
        "shared_experts", description="Module path, from the MoE module (`../name` for the layer)."
    )
    kind: Literal["glu", "mlp"] = Field("glu", description="Gated or not.")
    width: Count | None = Field(None, description="Inner width; the size `expert_width` when absent.")
    count: Count = Field(1, description="The width is multiplied by this.")
    activation: ActivationSpec = Field(ActivationSpec.unchecked(), description="Activation.")
    bias: Bool = Field(False, description="Biases on all projections.")
    names: tuple[ModulePath, ModulePath, ModulePath] = Field(
        ("gate_proj", "up_proj", "down_proj"), description="Leaves: gate, up, down."
    )
    fused: bool = Field(False, description="Gate and up are one matrix under the gate's name.")
    gate: ModulePath | None = Field(
        None, description="Leaf of the gate or mix projection, from the MoE module."
    )
    gate_bias: bool = Field(False, description="Whether that projection has a bias.")
    enabled: Bool = Field(True, description="Whether it exists; without width there is none either.")

    def check(self) -> None:
        """What is mixed in has a projection that says how much of it."""
        if self.combine in ("sigmoid_gate", "softmax_mix") and self.gate is None:
            raise ValueError(f"`combine: {self.combine}` needs `gate`, the leaf of its projection")

    @property
    def exists(self) -> bool:
        """Whether a resolved section describes an expert at all."""
        return self.enabled and (self.width or 0) * self.count > 0


LayerRules = Annotated[tuple[LayerRule, ...], Field(min_length=1)]


class MoeSpec(Spec):
    """The Mixture-of-Experts block."""

    path: ModulePathOrNone = Field("mlp", description="Module path in the layer.")
    layers: Annotated[None, WrittenAs(LayerRules, (AllLayers.unchecked(kind="all"),))] = Field(
        None, description="Which layers: the first rule whose key is present."
    )
    dense_below: int = Field(0, description="With fewer experts than this such a layer has a dense MLP.")
    router: RouterSpec = Field(description="The router.")
    experts: ExpertsSpec = Field(ExpertsSpec.unchecked(), description="The routed experts.")
    shared: SharedSpec | None = Field(None, description="The shared expert; null for none.")
    output_norm: ModulePath | None = Field(None, description="Leaf of a norm on the block's output.")
    output_bias: Leaf | None = Field(None, description="Leaf of a bias on the block's output.")


class SizesSpec(Spec):
    """Where config.json says the sizes."""

    names_are_keys = True

    hidden_size: Annotated[Width, FromConfig("hidden_size")] = Field(description="Model width.")
    num_layers: Annotated[Width, FromConfig("num_hidden_layers")] = Field(description="Decoder layers.")
    vocab_size: Annotated[Width, FromConfig("vocab_size")] = Field(description="Rows of the embedding.")
    num_heads: Annotated[Width, FromConfig("num_attention_heads")] = Field(description="Query heads.")
    num_kv_heads: Annotated[Width | None, FromConfig("num_key_value_heads")] = Field(
        None, description="Key-value heads."
    )
    head_dim: Annotated[Width | None, FromConfig("head_dim")] = Field(
        None, description="Head width; hidden over heads when absent."
    )
    dense_width: Annotated[Count | None, FromConfig("intermediate_size")] = Field(
        None, description="Width of dense MLPs."
    )
    norm_eps: Annotated[Positive, FromConfig("rms_norm_eps")] = Field(description="Epsilon of the norms.")
    max_positions: Annotated[Width | None, FromConfig("max_position_embeddings")] = Field(
        None, description="Longest context."
    )
    num_experts: Annotated[Count, FromConfig("num_experts")] = Field(
        description="Routed experts; a list holds one number for each layer."
    )
    top_k: Annotated[Count, FromConfig("num_experts_per_tok")] = Field(
        description="Experts a token picks; may be such a list."
    )
    expert_width: Annotated[Count, FromConfig("moe_intermediate_size")] = Field(
        description="Inner width of a routed expert; may be such a list."
    )


class Family(Spec):
    """One Mixture-of-Experts family."""

    family: str = Field(description="Name of the family, equal to the file's name.")
    extends: str | None = Field(None, description="A family that this one differs from; one level only.")
    model_types: tuple[str, ...] = Field(
        (), description="Values of `model_type` that name the family; its own name where none is stated."
    )
    architectures: tuple[str, ...] = Field(description="Values of `architectures` that name the family.")
    when: ConfigTest | None = Field(None, description="Further test, where a name is shared.")
    text_config: bool = Field(
        False,
        description="The text settings may be nested under `text_config`; true, when absent, where "
        "`text_keys` are stated or an architecture is a `…ForConditionalGeneration`.",
    )
    text_keys: tuple[str, ...] = Field(
        ("text_config",),
        min_length=1,
        description="Dotted keys of the nested text settings, of which the first present one counts.",
    )
    reference: str = Field(description="The original implementation that the file was read from.")
    define: dict[str, Any] = Field(
        {}, description="Values with names, each put where `$name` stands; nothing else reads them."
    )
    backbone: BackboneSpec | None = Field(None, description="Build mlx-lm's model, with these MoE blocks.")
    config: Written[SizesSpec] = Field(
        Written[SizesSpec].unchecked(), description="Where config.json says the sizes."
    )
    names: NamesSpec = Field(NamesSpec.unchecked(), description="Module paths of the frame.")
    embedding: Written[EmbeddingSpec] = Field(
        Written[EmbeddingSpec].unchecked(), description="Token embedding."
    )
    norm: Written[NormSpec] = Field(Written[NormSpec].unchecked(), description="Normalisation.")
    block: Written[BlockSpec] = Field(Written[BlockSpec].unchecked(), description="The decoder layer.")
    attention: WrittenMixer | None = Field(
        None, description="The mixer of every layer, or the base of variants."
    )
    layer_types: tuple[TypeRule, ...] | None = Field(
        None, min_length=1, description="The type of each layer: the first rule whose key is present."
    )
    variants: dict[str, dict[str, Any] | None] = Field(
        {}, description="By layer type: what differs from `attention`, or a mixer of its own; null for none."
    )
    dense_types: dict[str, str] = Field(
        {}, description="Layer types that stand for others where the layer has no experts."
    )
    mlp_variants: dict[str, Literal["dense", "moe", "none"]] = Field(
        {}, description="By layer type: which MLP the layer has, where the type decides it."
    )
    dense: Written[DenseSpec] | None = Field(
        None,
        description="The MLP of layers without experts; its defaults, when absent, where `moe.layers` "
        "leaves layers without experts.",
    )
    moe: Written[MoeSpec] = Field(description="The Mixture-of-Experts block.")
    head: Written[HeadSpec] = Field(Written[HeadSpec].unchecked(), description="Output head.")
    mtp: Written[PredictionSpec] | None = Field(
        None, description="Next-token prediction layers, which are kept where that is asked for."
    )
    checkpoint: Written[CheckpointSpec] = Field(
        Written[CheckpointSpec].unchecked(), description="What checkpoints may look like."
    )
    example: dict[str, Any] = Field(
        {}, description="Config entries of the tiny model that checks build, where they cannot be guessed."
    )
    notes: tuple[str, ...] = Field((), description="Remarks for readers.")

    @property
    def expert_layouts(self) -> tuple[PerExpert | Stacked | Split | Flat, ...]:
        """What checkpoints' experts look like: as declared or the standard layouts, each with its path."""
        stated = self.checkpoint.experts
        if stated is None:
            stated = () if self.backbone is not None else STANDARD_LAYOUTS
        usual = f"{self.moe.path}.experts" if self.moe.path else "experts"
        found = []
        for each in stated:
            names = (
                {}
                if isinstance(each, Stacked)
                else {"projections": each.projections or self.checkpoint.projections}
            )
            found.append(each.model_copy(update={"path": each.path or usual, **names}))
        return tuple(found)

    @model_validator(mode="before")
    @classmethod
    def _what_is_absent_follows(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        named = {"model_types": [data["family"]]} if isinstance(data.get("family"), str) else {}
        return named | implied(data) | data


def implied(data: Mapping[str, Any]) -> dict[str, Any]:
    """What a family, as written, need not state: nested text settings, and layers without experts.

    Args:
        data: the file's content; one that extends another has what that one states and implies.
    """
    found: dict[str, Any] = {}
    names = data.get("architectures")
    names = names if isinstance(names, list | tuple) else ()
    # transformers calls a class around a text model so.
    if "text_keys" in data or any(str(name).endswith("ForConditionalGeneration") for name in names):
        found["text_config"] = True
    if _leaves_some_dense(data.get("moe")):
        found["dense"] = {}
    return found


def _leaves_some_dense(moe: Any) -> bool:
    """Whether the section, as written, has a rule that can leave a layer without experts."""
    rules = moe.get("layers") if isinstance(moe, dict) else None
    return isinstance(rules, list | tuple) and any(rule != {"kind": "all"} for rule in rules)
