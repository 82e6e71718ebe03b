"""One module per command of `halfbyte`, imported only when it runs. Each has `run(argv) -> exit code`."""
