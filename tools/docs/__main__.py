"""Writes what the code says into docs/: errors.md, commands.md, man/ and the table of settings.md."""

from __future__ import annotations

import sys

from tools.docs import error_docs, reference_docs, settings_docs


def main() -> int:
    """Write all of them; there are no options."""
    if len(sys.argv) > 1:
        print("usage: make docs, or python -m tools.docs", file=sys.stderr)
        return 2
    return error_docs.main() or settings_docs.main() or reference_docs.main()


if __name__ == "__main__":
    raise SystemExit(main())
