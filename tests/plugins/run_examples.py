"""Loads every example of a hook in this process, checks their families, and prints what ran."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

from mlx_experts.engine.models.known_families import catalog
from mlx_experts.engine.tools.family_check import check_family
from mlx_experts.plugins.manager import add_plugin_file, components, manager

folder, families = Path(sys.argv[1]), Path(sys.argv[2])
for path in sorted(folder.glob("*.py")):
    add_plugin_file(path)
manager()
modules = {
    path.stem: importlib.import_module(f"mlx_experts_plugin_{path.stem}") for path in folder.glob("*.py")
}
names = {}
for hook, module in modules.items():
    text = getattr(module, "FAMILY", None)
    if text is not None:
        names[hook] = text.split()[1]
        (families / f"{names[hook]}.yaml").write_text(text.lstrip())
known = catalog(families)
names["add_families"] = "hummingbird_moe"
results = {}
for hook, name in sorted(names.items()):
    report = check_family(known.load(name))
    results[hook] = {"ok": report.ok, "steps": [str(step) for step in report.steps if not report.ok]}
results["counters"] = {
    "fallbacks": modules["register_fallbacks"].calls,
    "caches": modules["register_caches"].made,
    "kernels": list(components().names("kernel")),
}
print(json.dumps(results))
