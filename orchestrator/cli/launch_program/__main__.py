"""`python -m orc.launch`."""

from . import main  # this folder is `orc.launch` (package-dir in pyproject.toml)

main()
