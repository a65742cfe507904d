"""What the Comet tracker calls, with the published signatures; every call is recorded."""

CALLS = []


def start(api_key=None, workspace=None, project=None, project_name=None, experiment_key=None, mode=None, online=None):
    CALLS.append(("start", project_name, online))
    return Experiment()


class Experiment:
    def log_parameters(self, parameters, prefix=None, step=None, nested_support=True):
        CALLS.append(("log_parameters", parameters))

    def set_step(self, step):
        CALLS.append(("set_step", step))

    def log_metric(self, name, value, step=None, epoch=None, include_context=True):
        CALLS.append(("log_metric", name, value, step, epoch))

    def log_metrics(self, dic, prefix=None, step=None, epoch=None, include_context=True):
        CALLS.append(("log_metrics", dic, prefix, step))

    def log_other(self, key, value):
        CALLS.append(("log_other", key, value))

    def end(self):
        CALLS.append(("end",))
