"""``python -m mlx_experts`` is the command ``mlx-experts``."""

from mlx_experts.registry.cli.entry import main

main()
