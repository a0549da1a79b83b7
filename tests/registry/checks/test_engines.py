"""The tables of other engines are read without importing them."""

from __future__ import annotations

from pathlib import Path

from mlx_experts.registry.catalog.catalog import Catalog
from mlx_experts.registry.checks.engines import not_described, sglang_architectures, vllm_architectures

VLLM = """
_TEXT_GENERATION_MODELS = {
    "MixtralForCausalLM": ("mixtral", "MixtralForCausalLM"),
    "LlamaForCausalLM": ("llama", "LlamaForCausalLM"),
    "BirchForCausalLM": ("vllm.models.birch", "BirchForCausalLM"),
}
_EMBEDDING_MODELS = {"MixtralModel": ("mixtral", "MixtralModel")}
_SPECULATIVE_DECODING_MODELS = {"BirchMTPModel": ("birch_mtp", "BirchMTP")}
"""


def test_architectures_of_vllm_are_those_whose_module_has_its_expert_layer(tmp_path: Path) -> None:
    models = tmp_path / "model_executor" / "models"
    (tmp_path / "models" / "birch").mkdir(parents=True)
    models.mkdir(parents=True)
    (models / "registry.py").write_text(VLLM)
    (models / "mixtral.py").write_text("from vllm.layers import FusedMoE\n")
    (models / "llama.py").write_text("class LlamaForCausalLM: ...\n")
    (tmp_path / "models" / "birch" / "model.py").write_text("experts = FusedMoE(8)\n")
    found = vllm_architectures(tmp_path)
    assert [each.name for each in found] == ["MixtralForCausalLM", "BirchForCausalLM"]
    assert [each.name for each in not_described(Catalog(), found)] == ["BirchForCausalLM"]


def test_architectures_of_sglang_are_the_entry_classes_of_modules_with_experts(tmp_path: Path) -> None:
    models = tmp_path / "srt" / "models"
    models.mkdir(parents=True)
    (models / "one.py").write_text("x = get_moe_impl_class()\nEntryClass = OneForCausalLM\n")
    (models / "two.py").write_text("import FusedMoE\nEntryClass = [TwoForCausalLM, TwoForCausalLMNextN]\n")
    (models / "dense.py").write_text("EntryClass = DenseForCausalLM\n")
    assert [each.name for each in sglang_architectures(tmp_path)] == ["OneForCausalLM", "TwoForCausalLM"]


def test_engines_that_are_not_installed_have_nothing(tmp_path: Path) -> None:
    assert vllm_architectures(tmp_path) == sglang_architectures(tmp_path) == []
