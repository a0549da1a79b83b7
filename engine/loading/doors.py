"""mlx-lm's ways to a model, led to this package's loader for the length of a run.

A tool of mlx-lm asks ``mlx_lm.load``, ``mlx_lm.utils.load_model``, ``sharded_load`` or a name that it has
imported from there. :func:`open_doors` puts this package's functions in the place of every one of them, and
takes them away again. A dense model, which this package has no family for, still goes to mlx-lm. A model
with experts that is filled in mlx-lm's own engine is an error.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm import utils
from mlx_lm.generate import speculative_generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from mlx_experts.engine.loading.api import load_model, put_adapters, read_tokenizer, save_tensors
from mlx_experts.engine.loading.checkpoint_loader import restore_dtype
from mlx_experts.engine.loading.prompt_caches import unbounded
from mlx_experts.engine.loading.sharding import spread
from mlx_experts.engine.loading.speculative import Account, speculative_step
from mlx_experts.engine.models.base import LanguageModel
from mlx_experts.engine.models.known_families import catalog
from mlx_experts.registry.catalog.dense import signs_of_experts
from mlx_experts.registry.checkpoint.checkpoint import Checkpoint
from mlx_experts.registry.checkpoint.hub import resolve_path
from mlx_experts.registry.errors import QuantizationError, SettingError, UnknownFamilyError

_ORIGINALS = {name: getattr(utils, name) for name in ("load", "load_model", "sharded_load", "save_model")}
_ORIGINALS["make_prompt_cache"] = make_prompt_cache
_ORIGINALS["speculative_generate_step"] = speculative_generate_step
_FILL, _UPDATE = nn.Module.load_weights, nn.Module.update
# Keys of mlx-lm's ``model_config`` that ask for another engine than the checkpoint's.
_ACTIVATIONS = "quantize_activations"


@dataclass
class Doors:
    """What stands in the place of mlx-lm's loaders, with their arguments.

    Args:
        tell: called with each notice.
        options: options of :func:`load_model` for every model, such as ``fused`` and ``families``.
        ready: called with each model of this package after it has been loaded.
    """

    tell: Callable[[str], None]
    options: Mapping[str, Any] = field(default_factory=dict)
    ready: Callable[[nn.Module], None] = lambda model: None
    _said: set[str] = field(default_factory=set)

    def load(
        self,
        path_or_hf_repo: str | Path,
        tokenizer_config: Mapping[str, Any] | None = None,
        model_config: Mapping[str, Any] | None = None,
        adapter_path: str | None = None,
        lazy: bool = False,
        return_config: bool = False,
        revision: str | None = None,
        trust_remote_code: bool = False,
    ) -> tuple[Any, ...]:
        """As ``mlx_lm.utils.load``."""
        _refuse_code(trust_remote_code)
        folder = resolve_path(str(path_or_hf_repo), revision)
        model, config = self._open(folder, lazy=lazy, model_config=model_config)
        if adapter_path is not None:
            put_adapters(model, Path(adapter_path))
        tokenizer = read_tokenizer(folder, config, tokenizer_config)
        self.ready(model)
        return (model, tokenizer, config) if return_config else (model, tokenizer)

    def load_model(
        self,
        model_path: str | Path,
        lazy: bool = False,
        strict: bool = True,
        model_config: Mapping[str, Any] | None = None,
        get_model_classes: Any = None,
        trust_remote_code: bool = False,
    ) -> tuple[nn.Module, dict[str, Any]]:
        """As ``mlx_lm.utils.load_model``; tensors that are missing are an error either way."""
        _refuse_code(trust_remote_code)
        if get_model_classes is not None and get_model_classes is not utils._get_classes:
            raise SettingError(
                "a tool brings model classes of its own",
                where="get_model_classes",
                found=repr(get_model_classes),
            )
        return self._open(Path(model_path), lazy=lazy, model_config=model_config)

    def sharded_load(
        self,
        repo: str | Path,
        pipeline_group: mx.distributed.Group | None = None,
        tensor_group: mx.distributed.Group | None = None,
        return_config: bool = False,
        *,
        tokenizer_config: Mapping[str, Any] | None = None,
        trust_remote_code: bool = False,
    ) -> tuple[Any, ...]:
        """As ``mlx_lm.utils.sharded_load``: each rank evaluates its share alone.

        Raises:
            SettingError: the model cannot be spread in this way; nothing has been evaluated.
        """
        _refuse_code(trust_remote_code)
        folder = resolve_path(str(repo))
        if self.is_dense(folder):
            loaded = _ORIGINALS["sharded_load"](
                str(folder),
                pipeline_group,
                tensor_group,
                True,
                tokenizer_config={**(tokenizer_config or {}), "trust_remote_code": False},
            )
            return tuple(loaded) if return_config else tuple(loaded)[:2]
        model, config = self._open(folder, lazy=True)
        tokenizer = read_tokenizer(folder, config, tokenizer_config)
        spread(model, pipeline_group, tensor_group)
        mx.eval(model.parameters())
        # Nobody starts before the slowest has read its share.
        mx.eval(mx.distributed.all_sum(mx.array(1.0)))
        self.ready(model)
        return (model, tokenizer, config) if return_config else (model, tokenizer)

    def save_model(self, save_path: str | Path, model: nn.Module, *, donate_model: bool = False) -> None:
        """As ``mlx_lm.utils.save_model``, in the layout that the family declares."""
        if isinstance(model, LanguageModel):
            if "dtype" not in self.options:
                restore_dtype(model)
            save_tensors(Path(save_path), model, donate_model=donate_model)
        else:
            _ORIGINALS["save_model"](save_path, model, donate_model=donate_model)

    def speculative_generate_step(self, *arguments: Any, **options: Any) -> Any:
        """As ``mlx_lm.generate.speculative_generate_step``; it ends drafting that loses, and says so."""
        account = Account()
        yield from speculative_step(*arguments, account=account, **options)
        if account.stopped:
            self.tell(account.stopped)

    def make_prompt_cache(self, model: nn.Module, max_kv_size: int | None = None) -> list[Any]:
        """As ``mlx_lm.models.cache.make_prompt_cache``, which says where it cannot bound the caches."""
        reason = unbounded(model, max_kv_size)
        if reason is not None and reason not in self._said:
            self._said.add(reason)
            self.tell(reason)
        return list(make_prompt_cache(model, max_kv_size))

    def is_dense(self, folder: Path, quiet: bool = False) -> bool:
        """Whether a checkpoint is dense and of no family, so that mlx-lm runs it.

        Args:
            quiet: give no notice where it is.

        Raises:
            UnknownFamilyError: no family describes it, and it has experts.
        """
        checkpoint = Checkpoint.open(folder)
        try:
            if self.options.get("family") is None:
                catalog(*self.options.get("families", ())).resolve(checkpoint.config)
        except UnknownFamilyError as error:
            if signs := signs_of_experts(checkpoint.config, checkpoint.tensors):
                raise UnknownFamilyError(
                    error.what,
                    where=checkpoint.where,
                    found=f"{error.found}; it has experts: {', '.join(signs[:3])}",
                    hint=error.hint,
                ) from error
            _known_to_mlx_lm(checkpoint, error)
            if not quiet:
                self.tell(f"{folder}: a dense model; it has no experts, and mlx-lm's own engine runs it")
            return True
        return False

    def _open(
        self, folder: Path, *, lazy: bool, model_config: Mapping[str, Any] | None = None
    ) -> tuple[nn.Module, dict[str, Any]]:
        changes = dict(model_config or {})
        if self.is_dense(folder):
            model, config = _ORIGINALS["load_model"](folder, lazy, model_config=changes)
            return model, config
        quantize = changes.pop(_ACTIVATIONS, False)
        model, config = load_model(folder, lazy=lazy, model_config=changes or None, **self.options)
        if quantize:
            quantize_inputs(model)
        return model, config


def _known_to_mlx_lm(checkpoint: Checkpoint, unknown: UnknownFamilyError) -> None:
    try:
        utils._get_classes(checkpoint.config)
    except (ValueError, KeyError) as error:
        raise UnknownFamilyError(
            "neither this package nor mlx-lm knows this model",
            where=checkpoint.where,
            found=f"{unknown.found}; a dense model, for it has no experts",
        ) from error


def quantize_inputs(model: nn.Module) -> None:
    """Quantise what dense layers read as their weights are, as mlx-lm's ``quantize_activations`` does.

    Raises:
        QuantizationError: a layer's format has no such product.
    """
    changed = []
    for path, module in model.named_modules():
        if not isinstance(module, nn.QuantizedLinear):
            continue
        if module.mode not in ("nvfp4", "mxfp8") or "bias" in module or "global_scale" in module:
            raise QuantizationError(
                "activations cannot be quantised for this layer",
                where=path,
                expected="mode nvfp4 or mxfp8, without a bias and a scale of the whole",
                found=module.mode,
            )
        rows, columns = module.weight.shape
        layer = nn.QQLinear(columns * 32 // module.bits, rows, module.group_size, module.bits, module.mode)
        layer.eval()
        layer.weight, layer.scales = module.weight, module.scales
        changed.append((path, layer))
    model.update_modules(utils.tree_unflatten(changed))


def _refuse_code(asked: bool) -> None:
    if asked:
        raise SettingError("code that a checkpoint carries is never run", found="trust_remote_code=True")


@contextmanager
def open_doors(doors: Doors) -> Iterator[None]:
    """Put this package's functions in the place of mlx-lm's, wherever they are known by name."""
    ours = {name: getattr(doors, name) for name in _ORIGINALS}
    pairs = [(_ORIGINALS[name], ours[name]) for name in _ORIGINALS]
    nn.Module.load_weights, nn.Module.update = _guarded, _guarded_update
    replace(pairs)
    try:
        yield
    finally:
        nn.Module.load_weights, nn.Module.update = _FILL, _UPDATE
        replace([(mine, theirs) for theirs, mine in pairs])


def replace(pairs: list[tuple[Any, Any]]) -> None:
    """Replace functions in every module of mlx-lm that has been imported; call again after an import."""
    for name, module in list(sys.modules.items()):
        if module is None or not (name == "mlx_lm" or name.startswith("mlx_lm.")):
            continue
        for attribute, value in list(vars(module).items()):
            for old, new in pairs:
                if value is old or (callable(value) and value == old):
                    setattr(module, attribute, new)


def _guarded(self: nn.Module, file_or_weights: Any, strict: bool = True) -> nn.Module:
    """``nn.Module.load_weights`` that fills no model of mlx-lm's with experts.

    Raises:
        SettingError: it would.
    """
    _refuse_other_engine(self)
    return _FILL(self, file_or_weights, strict)


def _guarded_update(self: nn.Module, parameters: dict[str, Any], strict: bool = True) -> nn.Module:
    """``nn.Module.update`` that fills no model of mlx-lm's with experts, as :func:`_guarded`."""
    _refuse_other_engine(self)
    return _UPDATE(self, parameters, strict)


def _refuse_other_engine(model: nn.Module) -> None:
    if not isinstance(model, LanguageModel) and _has_experts(model):
        raise SettingError(
            "a tool fills a model with experts in mlx-lm's own engine",
            where=f"{type(model).__module__}.{type(model).__qualname__}",
            expected="a model from mlx_lm.load, load_model or sharded_load, which this package answers",
            hint="run mlx-lm's command itself if its engine is what you want",
        )


def _has_experts(model: nn.Module) -> bool:
    """Whether a module is a whole model of mlx-lm's, with experts."""
    args = vars(model).get("args")
    if not is_dataclass(args):
        return False
    stated = {key: value for key, value in vars(args).items() if isinstance(value, int | list | dict)}
    parts = any(isinstance(module, SwitchLinear | QuantizedSwitchLinear) for module in model.modules())
    return parts or bool(signs_of_experts(stated))
