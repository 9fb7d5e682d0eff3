"""`python -m whet` is the `whet` command."""

from whet.cli import main

main()
