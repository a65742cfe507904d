"""What the Aim tracker calls, with the published signatures; every call is recorded."""

CALLS = []


class Run:
    def __init__(self, run_hash=None, *, repo=None, read_only=False, experiment=None, system_tracking_interval=None):
        self.name = None
        CALLS.append(("Run", repo, experiment))

    def __setitem__(self, key, value):
        CALLS.append(("set", key, value))

    def track(self, value, name=None, step=None, epoch=None, *, context=None):
        CALLS.append(("track", value, name, step, context))

    def close(self):
        CALLS.append(("close", self.name))


class Image:
    def __init__(self, image, caption="", format="png", quality=90, optimize=False):
        self.content = (image, caption, quality)

    def __eq__(self, other):
        return self.content == other
