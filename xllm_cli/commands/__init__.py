"""One file for each subcommand: `command`, a click command, light to import; what it needs is imported when it runs."""
