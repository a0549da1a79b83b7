"""Says what a checkpoint would become, from its config and headers alone, and what it lacks.

python examples/inspect_checkpoint.py path/to/checkpoint
"""

import sys

from mlx_experts import errors, inspect

try:
    report = inspect(sys.argv[1])
except errors.RegistryError as error:
    sys.exit(f"error: {error}")
print(report.family, "loads" if report.loadable else "does not load")
for row in report.paths:
    print(row["rows"], "rows:", row["path"], row["reason"])
