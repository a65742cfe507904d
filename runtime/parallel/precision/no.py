"""Full precision: models compute in what they have."""

from orc.runtime.parallel.precision.base import Precision

PRECISION = Precision
