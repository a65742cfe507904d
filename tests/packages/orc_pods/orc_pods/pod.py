"""The platform: one pod, whose containers are processes of this machine. ``python pod.py POD.json``

A container sees its home at /mnt, and processes of its own. What it keeps is brought to the object store while it runs.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

ENTER = 'mount --bind "$1" /mnt && exec "$2" -I -S /mnt/input/entry.pyz'
NAMESPACES = ("--user", "--map-root-user", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child")


class Container:
    def __init__(self, pod: dict, node: int) -> None:
        self.kept = Path(pod["kept"])
        self.home = Path(pod["directory"], f"node-{node}")
        self.brought: dict[Path, tuple[int, int]] = {}
        shutil.copytree(Path(pod["directory"], "input"), self.home / "input")
        os.link(pod["source"], self.home / "source.tar.gz")
        (self.home / "kept").mkdir()
        if self.kept.is_dir():
            shutil.copytree(self.kept, self.home / "kept", dirs_exist_ok=True)
        names = ("PATH", "HOME", "LANG", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
        env = {name: os.environ[name] for name in names if name in os.environ}
        env |= {"POD_NODE": str(node), "POD_HOSTS": ",".join(pod["hosts"])}
        with Path(pod["directory"], f"node-{node}.log").open("ab") as log:
            argv = ["unshare", *NAMESPACES, "sh", "-c", ENTER, "sh", str(self.home), sys.executable]
            self.process = subprocess.Popen(argv, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def bring(self) -> None:
        for path in (self.home / "kept").rglob("*"):
            try:
                status = path.stat()
                changed = path.is_file() and (status.st_mtime_ns, status.st_size) != self.brought.get(path)
                if not changed or path.suffix in (".tmp", ".new"):
                    continue
                target = self.kept / path.relative_to(self.home / "kept")
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, f"{target}.{self.home.name}.tmp")
                os.replace(f"{target}.{self.home.name}.tmp", target)
            except FileNotFoundError:
                continue  # it was renamed meanwhile
            self.brought[path] = (status.st_mtime_ns, status.st_size)

    def terminate(self) -> None:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        if children:
            os.kill(int(children[0]), signal.SIGTERM)


def main(file: Path) -> None:
    pod = json.loads(file.read_text())
    containers = [Container(pod, node) for node in range(len(pod["hosts"]))]
    stop, told, kill_at = Path(pod["directory"], "stop"), False, float("inf")
    running = containers
    while running:
        time.sleep(0.05)
        running = [container for container in containers if container.process.poll() is None]
        if stop.exists():
            kill_at = float(stop.read_text())
        for container in running:
            if kill_at < float("inf") and not told:
                container.terminate()
            if time.time() > kill_at:
                container.process.kill()
        told = told or kill_at < float("inf")
        for container in containers:
            container.bring()
    Path(pod["directory"], "ended").touch()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
