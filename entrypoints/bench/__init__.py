"""The kinds of `halfbyte bench`, one module each with `run(argv) -> exit code`, and what they share: datasets, results, flags.

Called by `halfbyte.entrypoints.commands.bench`, which imports a kind only when it runs.
"""
