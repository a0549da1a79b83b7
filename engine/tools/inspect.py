"""What a checkpoint would become, from its config and its tensors' headers alone.

The model is built and the checkpoint walks the road that loading takes, with placeholders for its tensors:
MLX arrays are lazy, so nothing is read or allocated.
"""

from __future__ import annotations

import codecs
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache, make_prompt_cache

from mlx_experts.engine.dispatch import eligibility, policy, tuning_cache
from mlx_experts.engine.dispatch.expert_dispatch import current_device
from mlx_experts.engine.kernels import fused_kernel, many_rows_kernel
from mlx_experts.engine.kernels.request import Decline
from mlx_experts.engine.layers.moe import MoE
from mlx_experts.engine.loading.api import TOKENIZERS
from mlx_experts.engine.loading.checkpoint_loader import activation_dtype, cast_tensors, compute_dtype
from mlx_experts.engine.loading.expert_memory import in_slots, plan_experts
from mlx_experts.engine.models.base import LanguageModel
from mlx_experts.engine.models.factory import build
from mlx_experts.engine.models.known_families import catalog
from mlx_experts.engine.models.model import ModelArgs
from mlx_experts.engine.tools.memory.process_memory import process_bytes
from mlx_experts.engine.weights.audit import collapse
from mlx_experts.engine.weights.in_place.budget import bytes_of
from mlx_experts.engine.weights.pipeline import Prepared, prepare
from mlx_experts.registry.catalog.catalog import names_of
from mlx_experts.registry.checkpoint.checkpoint import Checkpoint
from mlx_experts.registry.checkpoint.hub import local_folder, remote_checkpoint
from mlx_experts.registry.checkpoint.size_limits import check_sizes
from mlx_experts.registry.checkpoint.strict_json import parse_object
from mlx_experts.registry.errors import CheckpointError, QuantizationError, SettingError, TensorError
from mlx_experts.registry.resolve.planner import resolve
from mlx_experts.registry.spec.family import Family

ROWS = (1, 2, 8, 512)


@dataclass(frozen=True)
class ExpertMemory:
    """What a budget for experts comes to.

    Args:
        budget: bytes.
        least_budget: the smallest that runs.
        slot_bytes, expert_bytes: bytes of the slots, and of all experts.
        slots: fewest and most experts of a layer that are in memory together.
        experts: the most experts of a layer.
        process_bytes: what a process takes before a model is loaded.
        peak_bytes: of a process that generates up to the context.
    """

    budget: int
    least_budget: int
    slot_bytes: int
    expert_bytes: int
    slots: tuple[int, int]
    experts: int
    process_bytes: int
    peak_bytes: int


@dataclass
class Inspection:
    """Everything that can be told before loading.

    With an expert memory, ``weight_bytes`` is what stays in memory: all but the experts, and the slots.

    Args:
        family: name of the family, and ``why`` it was chosen.
        where, files, parts: the checkpoint, how many files it has, and what it is read from, in words.
        layers: how many layers of each kind, in words.
        claimed, unclaimed, missing, misshapen, mistyped: tensors by pattern, with counts.
        problems: layouts or quantisation that cannot be read.
        parameters, active_parameters: weights in all, and those that one token uses.
        weight_bytes, cache_bytes: memory of the loaded weights and of the cache at ``context``.
        machine_bytes: this machine's memory.
        formats: quantisation formats with the modules that have them, counted.
        paths: for each number of rows, the path of the MoE layers and why.
        workspace_bytes: what one layer's path for many rows takes, at the most rows of ``paths``.
        memory: the plan of an expert memory, where one was asked for.
    """

    family: str
    why: str
    where: str
    files: int
    parts: str = ""
    layers: dict[str, int] = field(default_factory=dict)
    claimed: int = 0
    ignored: dict[str, int] = field(default_factory=dict)
    unclaimed: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    misshapen: list[str] = field(default_factory=list)
    mistyped: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    parameters: int = 0
    active_parameters: int = 0
    bits_per_weight: float = 0.0
    weight_bytes: int = 0
    context: int = 0
    cache_bytes: int = 0
    machine_bytes: int = 0
    dtype: str = ""
    formats: dict[str, int] = field(default_factory=dict)
    paths: list[dict[str, Any]] = field(default_factory=list)
    workspace_bytes: int = 0
    memory: ExpertMemory | None = None

    @property
    def loadable(self) -> bool:
        """Whether loading would succeed."""
        faults = (self.unclaimed, self.missing, self.misshapen, self.mistyped, self.problems)
        return not any(faults)

    @property
    def fits(self) -> bool:
        """Whether weights and cache fit into this machine's memory."""
        return self.weight_bytes + self.cache_bytes + self.workspace_bytes <= self.machine_bytes

    def to_dict(self) -> dict[str, Any]:
        """The fields and the two verdicts, for JSON."""
        return {**asdict(self), "loadable": self.loadable, "fits": self.fits}


def inspect_checkpoint(
    checkpoint: Checkpoint,
    *,
    context: int = 4096,
    families: tuple[Path, ...] = (),
    dtype: str | None = None,
    family: Family | None = None,
    tensors_only: bool = False,
    expert_memory: str | int | None = None,
) -> Inspection:
    """Look into a checkpoint without loading it.

    Args:
        checkpoint: an opened or remote checkpoint.
        context: tokens to size the cache for.
        families: further folders with family files.
        dtype: compute dtype, as in loading.
        family: use this family whatever the config says.
        tensors_only: stop after the audit of the tensors.
        expert_memory: the budget to plan for, as in loading.

    Raises:
        RegistryError: the budget is too small, no family fits, or the config holds a value that cannot be.
    """
    budget = None if expert_memory is None else bytes_of(expert_memory)
    config = checkpoint.config
    entry = None if family is not None else catalog(*families).resolve(config)
    chosen = family or catalog(*families).load(entry.name if entry else "")
    plan = resolve(chosen, config)
    check_sizes(plan, checkpoint)
    # Kernels on the CPU compute at once; without them a call stays a graph, and no weight is allocated.
    model = build(ModelArgs(plan, dict(config), False, str(config.get("model_type", ""))))
    model.eval()
    result = Inspection(
        chosen.family,
        _why(chosen, config) if entry else "named",
        checkpoint.where,
        len(checkpoint.files),
        checkpoint.parts,
        notices=list(checkpoint.notices),
        context=context,
        machine_bytes=machine_memory(),
    )
    result.layers = dict(Counter(layer_words(layer, chosen.backbone is not None) for layer in plan.layers))
    tree = {name: value.shape for name, value in tree_flatten(model.parameters())}
    result.parameters = sum(prod(shape) for shape in tree.values())
    result.active_parameters = result.parameters - _idle_parameters(model, tree)
    if checkpoint.folder is not None and not tensors_only:
        result.notices += tokenizer_faults(checkpoint.folder)
    prepared = _prepare(model, checkpoint, result)
    if prepared is not None:
        _show_audit(model, prepared, result, compute_dtype(dtype))
    if prepared is not None and not tensors_only:
        result.cache_bytes = _cache_bytes(model, context)
        computed = activation_dtype(model, prepared.tensors, compute_dtype(dtype))
        result.paths, result.workspace_bytes = _paths(model, computed)
        if budget is not None and result.loadable:
            _plan_memory(model, checkpoint, prepared, result, budget, compute_dtype(dtype))
    return result


def _plan_memory(
    model: LanguageModel,
    checkpoint: Checkpoint,
    prepared: Prepared,
    result: Inspection,
    budget: int,
    dtype: str | None,
) -> None:
    """Work out what a budget comes to, and what is in memory then."""
    tensors = cast_tensors(model, prepared.tensors, dtype)
    plan, located = plan_experts(model, checkpoint, checkpoint.config, tensors, budget)
    slotted = in_slots(plan, located)
    containers = tuple(f"{layer.container}." for _, layer in slotted)
    resident = sum(value.nbytes for name, value in tensors.items() if not name.startswith(containers))
    result.weight_bytes = resident + sum(slots * layer.size.bytes_each for slots, layer in slotted)
    process = process_bytes(checkpoint.folder)
    result.memory = ExpertMemory(
        budget,
        plan.least,
        plan.bytes,
        plan.whole,
        (min(plan.slots), max(plan.slots)),
        max(layer.experts for layer in plan.layers),
        process,
        process + result.weight_bytes + result.cache_bytes + result.workspace_bytes,
    )


def tokenizer_faults(folder: Path) -> list[str]:
    """What of a folder's tokenizer `generate` would fail on, one sentence each."""
    if not any((folder / name).exists() for name in TOKENIZERS):
        return [
            "there is no tokenizer here: the model loads, and text needs tokenizer.json beside config.json"
        ]
    found = []
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        path = folder / name
        if not path.is_file():
            continue
        raw = path.read_bytes()
        if raw.startswith(codecs.BOM_UTF8):
            found.append(f"{name} begins with a byte order mark, which the tokenizer's library refuses")
        try:
            parse_object(raw, name, lenient=True)
        except CheckpointError as error:
            found.append(f"{name} cannot be read, so that no text can be made: {error.found or error.what}")
    return found


def inspect(
    path_or_repo: str | Path,
    *,
    context: int = 4096,
    revision: str | None = None,
    families: Iterable[str | Path] = (),
    family: str | None = None,
    dtype: str | None = None,
    expert_memory: str | int | None = None,
) -> Inspection:
    """What a checkpoint would become, from its config.json and the headers of its tensor files alone.

    Args:
        path_or_repo: a folder, or the id of a repository on the hub, which is read by ranges.
        context: tokens to size the cache for.
        revision: branch, tag or commit of a repository.
        families: further folders with family files.
        family: use this family whatever the config says.
        dtype: compute dtype, as in :func:`mlx_experts.load`.
        expert_memory: memory for experts to plan for, as in :func:`mlx_experts.load`.

    Raises:
        RegistryError: the expert memory is too small, no family fits, a file cannot be read, or the config
            holds a value that cannot be.
    """
    if context < 1:
        raise SettingError("the context must have at least one token", found=str(context))
    folders = tuple(Path(folder) for folder in families)
    forced = catalog(*folders).load(family) if family is not None else None
    folder = local_folder(str(path_or_repo))
    opened = (
        Checkpoint.open(folder, complete=False) if folder else remote_checkpoint(str(path_or_repo), revision)
    )
    return inspect_checkpoint(
        opened,
        context=context,
        families=folders,
        dtype=dtype,
        family=forced,
        expert_memory=expert_memory,
    )


def _why(family: Family, config: Mapping[str, Any]) -> str:
    nested = config.get("text_config")
    levels = [config, *([nested] if isinstance(nested, Mapping) else [])]
    for level in levels:
        shared = set(family.architectures) & set(names_of(level, "architectures"))
        if shared:
            return f"architectures names {', '.join(sorted(shared))}"
        if level.get("model_type") in family.model_types:
            return f"model_type is {level['model_type']}"
    return "a declared test"


def layer_words(layer: Any, borrowed: bool) -> str:
    """What a layer of a plan is, in words; ``borrowed`` where its mixer is mlx-lm's."""
    absent = "mlx-lm's mixer" if borrowed else "no mixer"
    mixer = absent if layer.mixer is None else layer.mixer.kind
    kind = f" ({layer.type})" if layer.type != "full_attention" else ""
    return f"{mixer}{kind} with {'experts' if layer.mlp == 'moe' else layer.mlp + ' MLP'}"


def _idle_parameters(model: LanguageModel, tree: Mapping[str, tuple[int, ...]]) -> int:
    """Weights of routed experts that one token does not pick."""
    idle = 0
    for i in model.plan.moe_layers:
        stack = model.converter.stack(i)
        sizes = model.plan.layers[i].sizes
        if stack is None:
            continue
        whole = sum(prod(shape) for name, shape in tree.items() if name.startswith(stack.container + "."))
        idle += whole * (sizes.num_experts - min(sizes.top_k, sizes.num_experts)) // sizes.num_experts
    return idle


def _prepare(model: LanguageModel, checkpoint: Checkpoint, result: Inspection) -> Prepared | None:
    """The checkpoint's tensors as lazy placeholders in the module tree; problems are recorded."""
    try:
        prepared = prepare(model, model, checkpoint, checkpoint.config, values=False)
    except (TensorError, QuantizationError, CheckpointError) as error:
        result.problems.append(str(error))
        return None
    result.notices += [*model.remarks, *prepared.notices]
    result.ignored = prepared.ignored
    result.formats = dict(Counter(str(found) for found in prepared.formats.values()))
    return prepared


def _show_audit(model: LanguageModel, prepared: Prepared, result: Inspection, dtype: str | None) -> None:
    found = prepared.audit
    result.unclaimed, result.missing = collapse(found.unclaimed), collapse(found.missing)
    result.misshapen, result.mistyped = found.misshapen, found.mistyped
    if prepared.hint:
        result.notices.append(prepared.hint)
    unfit = found.faulty.union(found.unclaimed)
    kept = {name: value for name, value in prepared.tensors.items() if name not in unfit}
    result.claimed = len(kept)
    cast = cast_tensors(model, kept, dtype)
    result.weight_bytes = sum(value.nbytes for value in cast.values())
    result.bits_per_weight = round(8 * result.weight_bytes / max(result.parameters, 1), 3)
    result.dtype = dtype or "the checkpoint's"
    if not found.faulty:
        model.load_weights(list(cast.items()), strict=False)


def _cache_bytes(model: LanguageModel, context: int) -> int:
    """Bytes of one sequence's cache at ``context`` tokens, from the shapes that a prompt leaves behind.

    How mlx-lm's caches grow is known, so two tokens do; a cache of another kind sees the whole context.
    """
    cache = make_prompt_cache(model)
    length = 2 if all(map(_grows_as_known, cache)) else context
    model(mx.zeros((1, length), dtype=mx.int32), cache=cache)
    return sum(_grown(each, context) for each in cache)


def _grows_as_known(cache: Any) -> bool:
    if isinstance(cache, CacheList):
        return all(map(_grows_as_known, cache.caches))
    return isinstance(cache, KVCache | RotatingKVCache | ArraysCache)


def _grown(cache: Any, context: int) -> int:
    """Bytes of a cache at ``context`` tokens: keys and values grow in steps, states stay as they are."""
    if isinstance(cache, CacheList):
        return sum(_grown(each, context) for each in cache.caches)
    size: int = cache.nbytes
    if not isinstance(cache, KVCache | RotatingKVCache) or size == 0:
        return size
    tokens = -(-context // cache.step) * cache.step
    if isinstance(cache, RotatingKVCache):
        tokens = min(tokens, cache.max_size)
    return size // cache.keys.shape[2] * tokens


def _paths(model: LanguageModel, dtype: mx.Dtype) -> tuple[list[dict[str, Any]], int]:
    """For each number of rows, how many MoE layers take which path and why; and a path's memory."""
    device = current_device()
    asked = policy.resolve(device, None, tuned=tuning_cache.bound(device))
    rows_of: list[dict[str, Any]] = []
    workspace = 0
    for rows in ROWS:
        groups: dict[tuple[str, str, str], int] = {}
        for module in model.modules():
            if isinstance(module, MoE):
                request = module.request(rows, device, dtype)
                verdict = eligibility.check(request, asked)
                if not isinstance(verdict, Decline):
                    verdict = fused_kernel(device).unavailable() or verdict
                many = many_rows_kernel(device)
                if not isinstance(verdict, Decline):
                    key = ("fused", "", "")
                elif verdict.rule == "rows" and eligibility.takes_many(request, asked, many):
                    key = (many.PATH, "", "")
                    workspace = max(workspace, many.workspace_bytes(request))
                else:
                    key = ("gather", str(verdict), verdict.hint)
                groups[key] = groups.get(key, 0) + 1
        rows_of += [
            {"rows": rows, "path": p, "layers": n, "reason": why, "hint": hint}
            for (p, why, hint), n in groups.items()
        ]
    return rows_of, workspace


def machine_memory() -> int:
    """Bytes of memory that weights can use: the GPU's where there is one, else the machine's."""
    if mx.default_device().type == mx.DeviceType.gpu:
        size = mx.device_info().get("memory_size")
        if isinstance(size, int):
            return size
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
