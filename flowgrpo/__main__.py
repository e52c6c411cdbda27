"""`python -m flowgrpo`."""

from .cli import main

main()
