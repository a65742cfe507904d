"""Environment step: makes the environment of a job on one node. Standard library only, Python >= 3.9: it travels
with the agent.

    environment prepare <agent.json> <answer.json>     once per node, before the setup lines
    environment run [--tty] -- program args...         one rank (or the launcher) in its container
    environment clean <agent.json> <node>              ends what a container runtime has left running

An environment is built once per digest under ``<root>/envs/<digest>`` and then kept for all jobs. The digest covers
what goes in (files, options, interpreter, platform). One process builds, others wait for its lock; ``<digest>.json``
appears last and makes the environment exist: what a killed build has left is never used, and removed by the next one.

The answer says what the ranks start with: ``{"python", "path", "env", "prefix", "directory"}``.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time

from orc.launchers.agent.config import load_config
from orc.launchers.agent.errors import LaunchFailure
from orc.launchers.agent.procfs import process_stat
from orc.launchers.agent.records import remove, write_json
from orc.launchers.environments import container, copied, requirements
from orc.launchers.environments.requirements import EnvironmentBuildError, file_digest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

FORMAT = 1
TAIL_LINES = 25
END_S = 10.0  # for what was killed to be gone; a disk that hangs may hold it
INFINIBAND = "/dev/infiniband"

# Prints what decides whether compiled packages of one interpreter work with another.
_PROBE = """
import json, platform, sys, sysconfig
print(json.dumps({"executable": sys.executable, "base": getattr(sys, "_base_executable", sys.executable),
    "version": ".".join(map(str, sys.version_info[:3])), "implementation": sys.implementation.name,
    "platform": sysconfig.get_platform(), "libc": list(platform.libc_ver())}))
"""


def say(text: str) -> None:
    """Write into the node's log."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def run(argv: Sequence[str], *, what: str, env: Mapping[str, str] | None = None, cwd: str | None = None) -> None:
    """Run a build step, its output into the node's log. Raises `EnvironmentBuildError` with its last lines."""
    say("environment: " + " ".join(argv))
    try:
        process = subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=env,
            cwd=cwd,
            start_new_session=True,
        )
    except OSError as error:
        raise EnvironmentBuildError(f"{what}: cannot start {argv[0]}: {error.strerror}") from None
    lines: list[str] = []
    try:
        assert process.stdout is not None
        for raw in process.stdout:
            line = raw.decode("utf-8", "replace").rstrip()
            say(line)
            lines = [*lines[1 - TAIL_LINES :], line]
        status = process.wait()
    except BaseException:
        end_session(process)
        raise
    if status:
        raise EnvironmentBuildError(f"{what} failed with exit status {status}:\n" + "\n".join(lines))


def end_session(leader: subprocess.Popen[bytes]) -> None:
    """Kill a build step and what it has started, and return when none of them writes any more (`venv` starts pip)."""
    try:
        os.killpg(leader.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    leader.wait()
    deadline = time.monotonic() + END_S
    while time.monotonic() < deadline and any(_is_of_group(pid, leader.pid) for pid in os.listdir("/proc")):
        time.sleep(0.01)


def _is_of_group(pid: str, group: int) -> bool:
    if not pid.isdigit():
        return False
    stat = process_stat(int(pid))
    return stat is not None and stat[0] not in ("Z", "X") and int(stat[2]) == group


def ask(argv: Sequence[str], env: Mapping[str, str] | None = None) -> str | None:
    """Return what a small command prints; `None` when it fails or does not exist."""
    try:
        done = subprocess.run(
            list(argv), stdin=subprocess.DEVNULL, capture_output=True, env=env, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode("utf-8", "replace").strip() if done.returncode == 0 else None


def clean_environment() -> dict[str, str]:
    """Return this process's environment without what would change how a Python works that is not the job's."""
    pip = ("PIP_REQUIRE_VIRTUALENV", "PIP_TARGET", "PIP_USER", "PIP_PREFIX")
    dropped = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", *pip)
    return {name: value for name, value in os.environ.items() if name not in dropped}


# --- interpreters --------------------------------------------------------------------------------------------------


def facts_of(python: str) -> dict[str, Any] | None:
    """Return version, platform and C library of an interpreter; `None` when it does not run."""
    text = ask([python, "-I", "-S", "-c", _PROBE], clean_environment())
    try:
        return dict(json.loads(text)) if text else None
    except ValueError:
        return None


def find_python(wanted: str | None, default: str) -> dict[str, Any]:
    """The interpreter called *wanted*: a path, a program, or a version such as 3.11. Raises `EnvironmentBuildError`."""
    is_version = bool(wanted) and all(part.isdigit() for part in str(wanted).split("."))
    candidates = [wanted or default] if not is_version else [default, f"python{wanted}", "python3"]
    if is_version:
        candidates[2:2] = ["python" + ".".join(str(wanted).split(".")[:2])]
    found = []
    for candidate in candidates:
        path = shutil.which(str(candidate))
        facts = facts_of(path) if path else None
        if facts is None:
            continue
        version = str(facts["version"])
        if not is_version or version == wanted or version.startswith(f"{wanted}."):
            return facts
        found.append(f"{version} at {path}")
    if not is_version:
        raise EnvironmentBuildError(f"{wanted or default} is not a Python that runs here; correct `python:`")
    seen = f"; found {', '.join(dict.fromkeys(found))}" if found else ""
    raise EnvironmentBuildError(f"there is no Python {wanted} on this node{seen}; install it, or give `python:` a path")


# --- the cache -----------------------------------------------------------------------------------------------------


def digest_of(parts: Mapping[str, Any]) -> str:
    """The name of an environment: of all that goes into it."""
    canonical = json.dumps({"format": FORMAT, **parts}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:32]


def built(root: str, digest: str, build: Callable[[str], None], usable: Callable[[str], bool]) -> str:
    """The directory of an environment that exists afterwards; *build* is called by one process at a time, if at all."""
    import fcntl

    envs = os.path.join(root, "envs")
    os.makedirs(envs, mode=0o700, exist_ok=True)
    directory, marker = os.path.join(envs, digest), os.path.join(envs, f"{digest}.json")
    lock_path = os.path.join(envs, f"{digest}.lock")
    lock = os.open(lock_path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"environment: waiting for another process that builds {digest}")
            began = time.time()
            fcntl.flock(lock, fcntl.LOCK_EX)
            failed = _load(lock_path) if os.path.getsize(lock_path) else {}
            if failed.get("at", 0.0) >= began:
                raise EnvironmentBuildError(failed["error"]) from None  # the same again would fail as slowly
        if os.path.exists(marker) and usable(directory):
            os.utime(marker)  # when it was last used
            say(f"environment: {digest} is here already")
            return directory
        remove(marker)
        shutil.rmtree(directory, ignore_errors=True)
        began = time.time()
        try:
            build(directory)
            write_json(marker, {"format": FORMAT, "built_at": began, "took_s": round(time.time() - began, 3)})
        except BaseException as error:
            shutil.rmtree(directory, ignore_errors=True)
            if isinstance(error, EnvironmentBuildError):
                os.ftruncate(lock, 0)
                os.pwrite(lock, json.dumps({"error": str(error), "at": time.time()}).encode(), 0)
            raise
        say(f"environment: {digest} built in {time.time() - began:.1f} s")
        return directory
    finally:
        os.close(lock)


# --- venv ----------------------------------------------------------------------------------------------------------


def prepare_venv(spec: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Make ``environment: {venv: ...}``."""
    code = str(config["code_tree"])
    python = find_python(spec.get("python"), str(config.get("python") or sys.executable))
    listed = os.path.join(code, str(spec["requirements"]))
    files = requirements.read_requirements(listed)
    links = [os.path.join(code, str(link)) for link in spec.get("find_links") or ()]
    for link in links:
        if not os.path.isdir(link):
            raise EnvironmentBuildError(f"find_links: {link} is not a directory on this node")
    lines = [line for path in files for line in requirements.lines_of(path)]
    wheels = [os.path.join(link, name) for link in links for name in sorted(os.listdir(link))]
    digest = digest_of(
        {
            "kind": "venv",
            "python": {key: python[key] for key in ("base", "version", "implementation", "platform", "libc")},
            "files": {os.path.relpath(path, code): content for path, content in files.items()},
            "local": requirements.local_files(lines, code),
            "links": {os.path.basename(path): file_digest(path) for path in wheels if os.path.isfile(path)},
            "options": {k: spec.get(k) for k in ("system_site_packages", "index_url", "extra_index_urls", "no_index")},
        }
    )

    def build(directory: str) -> None:
        env = clean_environment()
        argv = [str(python["executable"]), "-m", "venv"]
        argv += ["--system-site-packages"] * bool(spec.get("system_site_packages"))
        try:
            run([*argv, directory], what="making the virtual environment", env=env)
        except EnvironmentBuildError as error:
            hint = "\ninstall the package that has ensurepip (python3-venv on Debian), or use another `python:`"
            raise EnvironmentBuildError(f"{error}{hint if 'ensurepip' in str(error) else ''}") from None
        pip = [os.path.join(directory, "bin", "python"), "-m", "pip", "--disable-pip-version-check", "--no-input"]
        options = [word for link in links for word in ("--find-links", link)]
        options += ["--no-index"] * bool(spec.get("no_index"))
        options += ["--index-url", str(spec["index_url"])] if spec.get("index_url") else []
        options += [word for url in spec.get("extra_index_urls") or () for word in ("--extra-index-url", str(url))]
        # In the code tree: paths in the file are relative to the workdir.
        argv = [*pip, "install", "--progress-bar", "off", *options, "-r", listed]
        run(argv, what=f"installing {spec['requirements']}", env=env, cwd=code)

    directory = built(str(config["root"]), digest, build, has_python)
    return answer_of(directory, {"VIRTUAL_ENV": directory})


def has_python(directory: str) -> bool:
    """Return whether an environment has an interpreter."""
    return os.access(os.path.join(directory, "bin", "python"), os.X_OK)


def answer_of(directory: str, env: Mapping[str, str]) -> dict[str, Any]:
    """Return the answer for ranks whose Python is in *directory*."""
    return {
        "directory": directory,
        "python": os.path.join(directory, "bin", "python"),
        "path": [os.path.join(directory, "bin")],
        "env": dict(env),
        "prefix": [],
    }


# --- conda ---------------------------------------------------------------------------------------------------------


def find_conda() -> str:
    """Return micromamba, mamba or conda: the fastest that is here. Raises `EnvironmentBuildError`."""
    for candidate in ("micromamba", os.environ.get("MAMBA_EXE", ""), "mamba", "conda", os.environ.get("CONDA_EXE", "")):
        found = shutil.which(candidate) if candidate else None
        if found:
            return found
    raise EnvironmentBuildError(
        "none of micromamba, mamba and conda is on this node's PATH; install one, or bring an archive of conda-pack"
    )


def conda_argv(program: str, directory: str, file: str) -> list[str]:
    """Return the command by which *program* makes the environment of *file* in *directory*. Pure."""
    if os.path.basename(program).startswith("micromamba"):
        return [program, "create", "--yes", "--prefix", directory, "--file", file]
    return [program, "env", "create", "--yes", "--prefix", directory, "--file", file]


def prepare_conda(spec: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Make ``environment: {conda: {file: ...}}`` or ``{archive: ...}``."""
    if spec.get("file"):
        file = os.path.join(str(config["code_tree"]), str(spec["file"]))
        if not os.path.isfile(file):
            raise EnvironmentBuildError(f"{file} does not exist on this node")
        program = find_conda()
        digest = digest_of({"kind": "conda", "file": file_digest(file), "machine": os.uname().machine})

        def build(directory: str) -> None:
            argv = conda_argv(program, directory, file)
            run(argv, what=f"making the conda environment of {spec['file']}", env=clean_environment())
            if not has_python(directory):
                raise EnvironmentBuildError(
                    f"the conda environment of {spec['file']} has no Python; add python to its dependencies"
                )

    else:
        archive = os.path.join(os.path.expanduser(str(spec.get("tree") or config["code_tree"])), str(spec["archive"]))
        if not os.path.isfile(archive):
            raise EnvironmentBuildError(f"{archive} does not exist on this node")
        digest = digest_of({"kind": "conda-pack", "archive": file_digest(archive)})

        def build(directory: str) -> None:
            os.mkdir(directory, 0o700)
            run(["tar", "--no-same-owner", "-xf", archive, "-C", directory], what=f"unpacking {spec['archive']}")
            python, unpack = (os.path.join(directory, "bin", name) for name in ("python", "conda-unpack"))
            if not os.path.exists(python) or not os.path.exists(unpack):
                missing = python if not os.path.exists(python) else unpack
                name = os.path.relpath(missing, directory)
                raise EnvironmentBuildError(f"{spec['archive']} is not an archive of conda-pack: it has no {name}")
            run([python, unpack], what="conda-unpack", env={**clean_environment(), "CONDA_PREFIX": directory})

    directory = built(str(config["root"]), digest, build, has_python)
    return answer_of(directory, {"CONDA_PREFIX": directory})


# --- copy ----------------------------------------------------------------------------------------------------------


def prepare_copy(spec: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Make ``environment: copy``: scripts and ``pyvenv.cfg`` are written for this node, the rest stays in the store."""
    tree = os.path.expanduser(str(spec["tree"]))
    try:
        with open(os.path.join(tree, copied.FACTS), encoding="utf-8") as file:
            packed = json.load(file)
    except (OSError, ValueError) as error:
        raise EnvironmentBuildError(f"the packed environment {tree} cannot be read: {error}") from None
    wanted = ".".join(packed["version"].split(".")[:2])
    try:
        here = find_python(wanted, str(config.get("python") or sys.executable))
    except EnvironmentBuildError as error:
        raise EnvironmentBuildError(f"the environment of {packed['host']} cannot be used: {error}") from None
    if reason := copied.mismatch(packed, here):
        hint = "use environment: {venv: requirements.txt}, which is built on the node"
        raise EnvironmentBuildError(
            f"the environment of {packed['host']} ({packed['venv']}) cannot be used: {reason}; {hint}"
        )
    digest = digest_of({"kind": "copy", "tree": tree, "base": here["base"], "version": here["version"]})

    def build(directory: str) -> None:
        copied.lay_out(tree, directory, packed, here)

    def usable(directory: str) -> bool:
        links = [os.path.join(directory, name) for name in os.listdir(directory)] if os.path.isdir(directory) else []
        return bool(links) and all(os.path.exists(path) for path in (*links, os.path.join(directory, "bin", "python")))

    directory = built(str(config["root"]), digest, build, usable)
    return answer_of(directory, {"VIRTUAL_ENV": directory})


# --- containers ----------------------------------------------------------------------------------------------------


def find_runtime(name: str) -> str:
    """The container program. Raises `EnvironmentBuildError`."""
    for candidate in (name, "singularity") if name == "apptainer" else (name,):
        if found := shutil.which(candidate):
            return found
    raise EnvironmentBuildError(f"{name} is not installed on this node (not on PATH)")


def prepare_container(spec: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Make ``environment: {container: ...}``: check the runtime, fetch the image."""
    program = find_runtime(str(spec["runtime"]))
    ready = {**spec, "program": program}
    env = clean_environment()
    if spec["runtime"] == "apptainer":
        if "://" in str(spec["image"]):

            def fetch(directory: str) -> None:
                os.mkdir(directory, 0o700)
                argv = container.pull_argv(ready, os.path.join(directory, "image.sif"))
                run(argv, what="fetching the image", env=env)

            digest = digest_of({"kind": "apptainer", "image": spec["image"]})
            made = built(str(config["root"]), digest, fetch, lambda d: os.path.exists(os.path.join(d, "image.sif")))
            ready["image"] = os.path.join(made, "image.sif")
        elif not os.path.exists(str(spec["image"])):
            raise EnvironmentBuildError(f"the image {spec['image']} does not exist on this node")
    elif (
        (look := container.look_argv(ready))
        and "--rootfs" not in (spec.get("options") or ())
        and ask(look, env) is None
    ):
        run(container.pull_argv(ready), what=f"fetching the image {spec['image']}", env=env)
    home = os.path.join(str(config["job_dir"]), "home")
    os.makedirs(home, mode=0o700, exist_ok=True)
    own = [sys.executable, "-I", "-S", str(config["runtime_tree"]), "environment"]
    return {"python": str(spec["python"]), "path": [], "env": {}, "prefix": [*own, "run", "--"], "container": ready}


def run_in_container(program: Sequence[str], *, terminal: bool = False) -> None:
    """Become the container runtime that runs *program*; the surroundings are those of a rank. Does not return."""
    environ = os.environ
    try:
        attempt_dir, node = environ["ORC_ATTEMPT_DIR"], int(environ["ORC_NODE_RANK"])
    except KeyError as error:
        raise EnvironmentBuildError(f"{error.args[0]} is not set: this runs below an agent of orc") from None
    config = load_config(os.path.join(attempt_dir, "agent.json")).to_dict()
    ready = _load(os.path.join(attempt_dir, f"node-{node}", "environment.json"))["container"]
    command = config["command"]
    named = {*(config.get("env") or {}), *(command.get("env") or {}), *(config.get("secrets") or ())}
    rank = environ.get("RANK", "launcher")
    name = f"{config['marker']}-r{environ.get('ORC_RESTART', '0')}-n{node}-{rank}-{os.getpid()}"
    checkpoints = environ.get("ORC_CHECKPOINT_DIR", "")
    if "://" in checkpoints:  # an object store: nothing to mount
        checkpoints = ""
    if checkpoints:
        os.makedirs(checkpoints, exist_ok=True)
    argv = container.run_argv(
        ready,
        program,
        variables=container.passed(environ, named),
        workdir=os.getcwd(),
        mounts=[str(config["root"]), checkpoints],
        home=os.path.join(str(config["job_dir"]), "home"),
        name=name,
        marker=config["marker"],
        node=node,
        user=(os.getuid(), os.getgid()),
        devices=[INFINIBAND] if os.path.isdir(INFINIBAND) else [],  # without it NCCL goes over Ethernet
        terminal=terminal,
    )
    environ.pop("VIRTUAL_ENV", None)
    if ready["runtime"] == "apptainer":  # the whole environment goes in, whatever is named
        for variable in [v for v in environ if v not in container.passed(environ, named) and v not in ("PATH", "HOME")]:
            del environ[variable]
    os.execvpe(argv[0], argv, environ)


def clean(config: Mapping[str, Any], node: int) -> None:
    """End the containers of this node of this attempt: they are no children of ours."""
    answer = os.path.join(str(config["attempt_dir"]), f"node-{node}", "environment.json")
    if not os.path.exists(answer):
        return
    ready = _load(answer).get("container")
    look = container.clean_argv(ready, config["marker"], node) if ready else None
    if look and (left := (ask(look) or "").split()):
        ask([look[0], "rm", "--force", *left])
        say(f"environment: ended {len(left)} container(s) that were left")


# --- command line --------------------------------------------------------------------------------------------------

PREPARE = {"venv": prepare_venv, "conda": prepare_conda, "copy": prepare_copy, "container": prepare_container}


def _load(path: str) -> dict[str, Any]:
    with open(path, encoding="utf-8") as file:
        return dict(json.load(file))


def prepare(config: Mapping[str, Any], answer: str) -> None:
    """Make the environment, write the answer, or ``{"error": reason}``. Raises `EnvironmentBuildError`, `OSError`."""
    spec = config["environment"]
    remove(answer)  # an earlier restart's
    try:
        made = PREPARE[spec["kind"]](spec, config)
    except EnvironmentBuildError as error:
        _write(answer, {"error": str(error)})
        raise
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        _write(answer, {"error": f"{place}{error.strerror or error}"})
        raise
    _write(answer, {"kind": spec["kind"], **made})
    say(f"environment: {spec['kind']}, python {made['python']}")


def _write(path: str, data: Mapping[str, Any]) -> None:
    try:
        write_json(path, data, durable=False)
    except OSError as error:  # a full disk: the log has the reason
        say(f"environment: cannot write {path}: {error.strerror}")


def main(arguments: Sequence[str]) -> int:
    """Run one of the three commands; returns the exit status."""
    mode, *rest = arguments or [""]

    def ended(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    try:
        if mode == "prepare" and len(rest) == 2:
            signal.signal(signal.SIGTERM, ended)  # so that a half-made environment is removed
            prepare(load_config(rest[0]).to_dict(), rest[1])
        elif mode == "run" and "--" in rest:
            cut = rest.index("--")
            run_in_container(rest[cut + 1 :], terminal="--tty" in rest[:cut])
        elif mode == "clean" and len(rest) == 2:
            clean(load_config(rest[0]).to_dict(), int(rest[1]))
        else:
            sys.stderr.write(str(__doc__))
            return 2
    except (EnvironmentBuildError, LaunchFailure) as error:
        say(f"environment: {error}")
        return 1
    except OSError as error:
        say(f"environment: {error.filename or ''}: {error.strerror or error}")
        return 1
    return 0
