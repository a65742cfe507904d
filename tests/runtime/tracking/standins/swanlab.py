"""What the SwanLab tracker calls, with the published signatures; every call is recorded."""

CALLS = []


def init(*, reinit=None, log_dir=None, mode=None, workspace=None, project=None, name=None, config=None, tags=None):
    CALLS.append(("init", project, mode))
    return Run()


class Run:
    def __init__(self):
        self.config = {}

    def log(self, data, step=None):
        CALLS.append(("log", data, step))

    def finish(self, state="success", error=None):
        CALLS.append(("finish", self.config))


class _Media:
    def __init__(self, data_or_path, mode=None, caption=None):
        self.content = data_or_path

    def __eq__(self, other):
        return (type(self).__name__, self.content) == other


class Image(_Media):
    pass


class Text(_Media):
    pass
