"""Full precision: models compute in what they have."""

from orc.runtime.parallel.precision import Precision

PRECISION = Precision
