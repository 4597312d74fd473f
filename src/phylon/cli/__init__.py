"""The command line: one thin file a command. Nothing heavy is imported before a command runs."""
