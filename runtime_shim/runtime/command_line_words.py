"""Words of command lines that the pass-through and argv both know; importing this costs nothing."""

HELP = ("help", "h", "usage", "?")
"""Options that only ask for help."""

FALSE = ("0", "f", "F", "FALSE", "false", "False")
"""strconv.ParseBool, which runc's --flag=VALUE goes through."""
