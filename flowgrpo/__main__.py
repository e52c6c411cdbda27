"""`python -m flowgrpo`."""

from .cli.app import main

main()
