"""What the Trackio tracker calls, with the published signatures; every call is recorded."""

CALLS = []


def init(project, name=None, group=None, space_id=None, config=None, resume="never"):
    CALLS.append(("init", project, name))
    return Run()


class Run:
    def __init__(self):
        self.config = {"_Username": "me"}

    def log(self, metrics, step=None):
        CALLS.append(("log", metrics, step))

    def finish(self):
        CALLS.append(("finish", self.config))
