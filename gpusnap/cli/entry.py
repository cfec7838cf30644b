"""Where `gpusnap` starts. Ctrl-C while its modules are imported ends it at once, without a traceback."""

from __future__ import annotations

# The C module under `signal`, whose enums take a millisecond.
import _signal  # type: ignore[import-not-found]


def main() -> int:
    """As gpusnap.cli.main.main."""
    before = _signal.getsignal(_signal.SIGINT)
    if before != _signal.SIG_IGN:  # as under nohup
        _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
    from gpusnap.cli.main import main as run

    _signal.signal(_signal.SIGINT, before)
    return run()
