"""`python -m orc.launch`."""

from orc.launch import main

main()
