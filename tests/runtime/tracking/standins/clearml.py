"""What the ClearML tracker calls, with the published signatures; every call is recorded."""

CALLS = []
CURRENT = []


class Task:
    @classmethod
    def current_task(cls):
        return CURRENT[0] if CURRENT else None

    @classmethod
    def init(cls, project_name=None, task_name=None, task_type="training", tags=None, reuse_last_task_id=True):
        CALLS.append(("init", project_name, task_name, tags))
        return cls()

    def connect_configuration(self, configuration, name=None, description=None, ignore_remote_overrides=False):
        CALLS.append(("connect_configuration", configuration))

    def get_logger(self):
        return Logger()

    def close(self):
        CALLS.append(("close",))


class Logger:
    def report_scalar(self, title, series, value, iteration):
        CALLS.append(("report_scalar", title, series, value, iteration))

    def report_single_value(self, name, value):
        CALLS.append(("report_single_value", name, value))

    def report_image(self, title, series, iteration=None, local_path=None, image=None, max_image_history=None):
        CALLS.append(("report_image", title, series, iteration, image))

    def report_table(self, title, series, iteration=None, table_plot=None, csv=None, url=None):
        CALLS.append(("report_table", title, series, iteration, table_plot))
