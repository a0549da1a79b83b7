"""``python -m mlx_experts.run TOOL ...``: `mlx-experts run`, in the form that ``mlx.launch`` starts."""

from __future__ import annotations

import sys

from mlx_experts.registry.cli.entry import main

if __name__ == "__main__":
    sys.argv.insert(1, "run")
    main()
