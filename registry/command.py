"""The entry point of both commands. It imports nothing, so that an interrupt finds something to catch it."""

import sys

INTERRUPTED = 130


def main() -> None:
    """Run the command line and leave with its exit code."""
    try:
        from mlx_experts.registry.cli import run
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    sys.exit(run(sys.argv[1:]))
