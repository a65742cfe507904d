"""What the DVCLive tracker calls, with the published signatures; every call is recorded."""

CALLS = []


class Live:
    step = 0

    def __init__(self, dir="dvclive", resume=False, report=None, save_dvc_exp=True, dvcyaml="dvc.yaml", exp_name=None):
        CALLS.append(("Live", dir, resume))

    def log_params(self, params):
        CALLS.append(("log_params", params))

    def log_metric(self, name, val, timestamp=False, plot=True):
        CALLS.append(("log_metric", name, val, self.step, plot))

    def next_step(self):
        CALLS.append(("next_step", self.step))
        self.step += 1

    def end(self):
        CALLS.append(("end",))
