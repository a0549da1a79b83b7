"""The entry point of both commands. It imports next to nothing, so that an interrupt is caught at once."""

import atexit
import gc
import os
import signal
import sys
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # The name exists for type checkers only.
    from sys import UnraisableHookArgs

INTERRUPTED = 130
# Longer than it takes to tidy up after an interrupt.
_AGAIN_AFTER = 3.0
_AGAIN_SOON = 0.01
# What imports make stays until the end. With Python's 700, looking through it for garbage takes a sixth of
# the time in which `generate` starts.
_OBJECTS_BETWEEN_COLLECTIONS = 50_000


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Interrupt, and do so once more unless somebody stops the clock.

    An exception that is raised while a library's C code calls Python back is printed and forgotten there.
    """
    signal.setitimer(signal.ITIMER_REAL, _AGAIN_AFTER)
    raise KeyboardInterrupt


def _lost(unraisable: "UnraisableHookArgs") -> None:
    """Interrupt once more where nobody could catch the exception, as in a callback of a weak reference."""
    if isinstance(unraisable.exc_value, KeyboardInterrupt):
        signal.setitimer(signal.ITIMER_REAL, _AGAIN_SOON)
    else:
        sys.__unraisablehook__(unraisable)


def catch_interrupts() -> None:
    """Let an interrupt reach the code that runs, wherever it comes, and say nothing of its own."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler and sys.platform != "win32":
        signal.signal(signal.SIGINT, _interrupt)
        signal.signal(signal.SIGALRM, _interrupt)
        sys.unraisablehook = _lost


def main() -> None:
    """Run the command line and leave with its exit code."""
    gc.set_threshold(_OBJECTS_BETWEEN_COLLECTIONS)
    # Leaving would look for cycles in all that was imported: a tenth of the time of a short command.
    atexit.register(gc.freeze)
    catch_interrupts()
    if sys.stdin is None:
        # Else the first file that is opened gets the number 0, which MLX takes for a failure.
        os.open(os.devnull, os.O_RDONLY)
    try:
        from mlx_experts.registry.cli import run

        code = run(sys.argv[1:])
    except KeyboardInterrupt:
        code = INTERRUPTED
    if sys.platform != "win32":
        signal.setitimer(signal.ITIMER_REAL, 0)
    sys.exit(code)
