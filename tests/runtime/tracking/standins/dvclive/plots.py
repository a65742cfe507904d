"""The part of DVCLive that says what can be logged."""


class Metric:
    @staticmethod
    def could_log(val):
        return isinstance(val, (int, float, str))
