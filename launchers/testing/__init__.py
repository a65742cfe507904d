"""The contract of backends as a pytest plug-in: ``pytest --orc-backend=my_package.backend:MyBackend``.

docs/how-to/add-a-backend.md says how it is used, `surface` what a package may import.
"""
