"""Words of command lines for both the pass-through and argv; importing this takes no time."""

HELP = ("help", "h", "usage", "?")
"""Options that only ask for help."""

FALSE = ("0", "f", "F", "FALSE", "false", "False")
"""strconv.ParseBool, which runc's --flag=VALUE goes through."""
