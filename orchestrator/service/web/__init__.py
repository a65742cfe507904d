"""The web page of the service: templates and static files, shipped in the wheel and loaded from nowhere else."""
