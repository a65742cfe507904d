"""Stock images (AWS Deep Learning Containers) by framework versions. Pure: no SDK, no network.

The tables are an extract of what the SageMaker SDK ships; a test compares every entry with the SDK that is installed.
Versions and regions that are not here are left to the SDK at submission (`pending`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass

from orc.launchers.errors import RenderError

# PyTorch -> Python. Image: pytorch-training:<version>-<cpu|gpu>-<python>.
PYTORCH = dict(
    entry.split()
    for entry in (
        *("1.9.0 py38", "1.9.1 py38", "1.10.0 py38", "1.10.2 py38", "1.11.0 py38", "1.12.0 py38", "1.12.1 py38"),
        *("1.13.1 py39", "2.0.0 py310", "2.0.1 py310", "2.1.0 py310", "2.2.0 py310", "2.3.0 py311", "2.4.0 py311"),
        *("2.5.1 py311", "2.6.0 py312", "2.7.1 py312", "2.8.0 py312", "2.9.0 py312", "2.10.0 py313"),
    )
)
# (Transformers, PyTorch) -> Python, and what follows it in the image's tag. These images are for GPUs alone.
HUGGINGFACE = {
    ("4.6.1", "1.6.0"): ("py36", "cu110-ubuntu18.04"),
    ("4.6.1", "1.7.1"): ("py36", "cu110-ubuntu18.04"),
    ("4.6.1", "1.8.1"): ("py36", "cu111-ubuntu18.04"),
    ("4.10.2", "1.8.1"): ("py36", "cu110-ubuntu18.04"),
    ("4.10.2", "1.9.0"): ("py38", "cu111-ubuntu20.04"),
    ("4.11.0", "1.9.0"): ("py38", "cu111-ubuntu20.04"),
    ("4.12.3", "1.9.1"): ("py38", "cu111-ubuntu20.04"),
    ("4.17.0", "1.10.2"): ("py38", "cu113-ubuntu20.04"),
    ("4.26.0", "1.13.1"): ("py39", "cu117-ubuntu20.04"),
    ("4.28.1", "2.0.0"): ("py310", "cu118-ubuntu20.04"),
    ("4.36.0", "2.1.0"): ("py310", "cu121-ubuntu20.04"),
    ("4.46.1", "2.3.0"): ("py311", "cu121-ubuntu20.04"),
    ("4.48.0", "2.3.0"): ("py311", "cu121-ubuntu20.04"),
    ("4.49.0", "2.5.1"): ("py311", "cu124-ubuntu22.04"),
    ("4.55.0", "2.7.1"): ("py312", "cu128-ubuntu22.04"),
    ("4.56.2", "2.8.0"): ("py312", "cu129-ubuntu22.04"),
    ("5.3.0", "2.9.0"): ("py312", "cu130-ubuntu22.04"),
}
# Regions whose registry has all of these images; the account that owns it.
_COMMON = "763104351884"
REGISTRIES = {
    **dict.fromkeys(
        (
            *("ap-northeast-1", "ap-northeast-2", "ap-south-1", "ap-southeast-1", "ap-southeast-2", "ca-central-1"),
            *("eu-central-1", "eu-north-1", "eu-west-1", "eu-west-2", "eu-west-3", "sa-east-1"),
            *("us-east-1", "us-east-2", "us-west-1", "us-west-2"),
        ),
        _COMMON,
    ),
    "cn-north-1": "727897471807",
    "cn-northwest-1": "727897471807",
    "us-gov-west-1": "442386744353",
    "af-south-1": "626614931356",
    "ap-east-1": "871362719292",
    "eu-south-1": "692866216735",
    "me-south-1": "217643126080",
}
_PENDING = "<image "


@dataclass(frozen=True)
class Image:
    """Stock image that a job requests."""

    pytorch: str | None
    transformers: str | None
    python: str | None
    gpu: bool
    instance_type: str
    region: str

    @property
    def uri(self) -> str:
        """URI of the image, or a placeholder for the SDK to resolve when it is not in the tables.

        Raises `RenderError` for versions that contradict each other.
        """
        found, account = self._huggingface() if self.transformers else self._pytorch(), REGISTRIES.get(self.region)
        if found is None or account is None:
            return _PENDING + json.dumps(self.__dict__, sort_keys=True) + ">"
        domain = "amazonaws.com.cn" if self.region.startswith("cn-") else "amazonaws.com"
        return f"{account}.dkr.ecr.{self.region}.{domain}/{found}"

    def _pytorch(self) -> str | None:
        version = _newest(self.pytorch, PYTORCH)
        if version is None:
            return None
        python = self._checked(PYTORCH[version], f"PyTorch {version}")
        return f"pytorch-training:{version}-{'gpu' if self.gpu else 'cpu'}-{python}"

    def _huggingface(self) -> str | None:
        version = _newest(self.transformers, {both[0]: both for both in HUGGINGFACE})
        if version is None:
            return None
        torches = [torch for transformers, torch in HUGGINGFACE if transformers == version]
        torch = _newest(self.pytorch, torches)
        if torch is None:
            what = f"there is no image with Transformers {version} and PyTorch {self.pytorch}"
            known = ", ".join(torches)
            hint = f"With Transformers {version} goes pytorch_version: {known}; or give an image_uri."
            raise RenderError(what, hint=hint)
        if not self.gpu:
            what = f"{self.instance_type} has no GPU, and the images with Transformers are made for GPUs alone"
            hint = "Leave out transformers_version and list transformers in requirements.txt, or give an image_uri."
            raise RenderError(what, hint=hint)
        python, rest = HUGGINGFACE[(version, torch)]
        self._checked(python, f"Transformers {version} with PyTorch {torch}")
        return f"huggingface-pytorch-training:{torch}-transformers{version}-gpu-{python}-{rest}"

    def _checked(self, python: str, what: str) -> str:
        if self.python not in (None, python):
            hint = f"Write py_version: {python}, or give an image_uri."
            raise RenderError(f"the image of {what} has {python}, not {self.python}", hint=hint)
        return python


def is_pending(uri: str) -> bool:
    """Return True for a placeholder, which is still to be looked up."""
    return uri.startswith(_PENDING)


def pending(uri: str) -> Image:
    """Return the image that a placeholder stands for."""
    return Image(**json.loads(uri[len(_PENDING) : -1]))


def python_of(uri: str) -> tuple[int, int] | None:
    """The Python of a stock image, from its tag; `None` for other images."""
    match = re.search(r"-py(3)(\d+)(?:-|$)", uri.rpartition(":")[2])
    return (int(match[1]), int(match[2])) if match else None


def _newest(wanted: str | None, known: Collection[str]) -> str | None:
    """The version itself, or the last one that begins with it: ``2.5`` is ``2.5.1``; the last of all without one."""
    near = [version for version in known if wanted is None or version == wanted or version.startswith(f"{wanted}.")]
    return wanted if wanted in known else near[-1] if near else None
