"""Slurm commands: one function each, with a time-out of its own and one meaning per failure.

With the controller down squeue and sbatch sit silent for 20 s and more; here that is `BackendUnreachable` (or
`AmbiguousSubmit`, because a submission that was cut off may have been accepted).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from orc.launchers.backends.base import PartitionReport
from orc.launchers.backends.slurm.options import SlurmSettings
from orc.launchers.backends.slurm.queue_rows import (
    SACCT_FORMAT,
    SACCT_FORMAT_NEWER,
    SINFO_FORMAT,
    SQUEUE_FORMAT,
    JobRow,
    job_number,
    parse_sacct,
    parse_sinfo,
    parse_squeue,
)
from orc.launchers.errors import AmbiguousSubmit, BackendError, BackendUnreachable
from orc.launchers.remote.transport import Completed, Transport

# Variables that change what the commands do or print: defaults of the user's shell, or of a job that submits a job.
_DROP = ("SBATCH_", "SLURM_", "SQUEUE_", "SACCT_", "SCANCEL_", "SINFO_", "SCONTROL_")
_KEEP = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT")
# An argument may not be longer than 128 KiB, and behind SSH the whole command line is one.
_CHUNK = 1000  # names, or jobs to be ended, per call
_LIST_BYTES = 100_000  # of numbers of jobs

# Messages that leave open whether the controller took the request.
_CUT_OFF = re.compile(
    r"Unable to contact slurm|Socket timed out|Zero Bytes were transmitted|Transport endpoint is not connected|"
    r"Connection (?:refused|timed out|reset)|Communication (?:connection|shutdown) failure|"
    r"Message (?:send|receive) failure|in standby mode|No route to host|Unexpected message received|"
    r"Unable to establish controller machine|DNS SRV lookup failed|Resource temporarily unavailable",
    re.IGNORECASE,
)
_NO_SUCH_JOB = re.compile(r"Invalid job id", re.IGNORECASE)
_GONE = re.compile(r"Invalid job id|already completing or completed|invalid job state|no active step", re.IGNORECASE)
_NO_SUCH_FIELD = re.compile(r"Invalid field requested", re.IGNORECASE)

# What Slurm says when it refuses a job, and what can be done about it.
_HINTS = (
    (r"invalid partition", "`sinfo` lists the partitions; set `partition` in the job or in clusters.yaml."),
    (r"invalid account|account/partition", "`sacctmgr show assoc user=$USER` lists your accounts; set `account`."),
    (r"invalid qos", "`sacctmgr show assoc user=$USER format=qos` lists what you may use; set `qos`."),
    (
        r"AssocMax|QOSMax|AssocGrp|QOSGrp|violates accounting",
        "A limit of the account or QOS: choose another `account` or `qos`, or ask for less.",
    ),
    (
        r"node configuration is not available|More processors requested",
        "No node of the partition has that much: ask for less, or choose another `partition` or `constraint`.",
    ),
    (
        r"invalid (?:generic resource|gres)",
        "Check `gres`, `gpu_type` and resources.gpus_per_node against `sinfo -o '%P %G'`.",
    ),
    (r"invalid feature", "`sinfo -o '%P %f'` lists the features; check `constraint`."),
    (r"time limit", "`sinfo -o '%P %l'` lists the limits; lower resources.time."),
    (r"memory", "Lower resources.memory."),
    (r"reservation", "`scontrol show reservation` lists them; check `reservation`."),
    (
        r"invalid job array specification",
        "The site limits arrays: `scontrol show config | grep MaxArraySize`. Submit fewer attempts at once.",
    ),
    (r"unrecogni[sz]ed option|invalid option", "This Slurm does not know one of the options under `extra`."),
)


class SlurmClient:
    """Client of the Slurm commands behind one transport."""

    def __init__(self, transport: Transport, settings: SlurmSettings, *, where: str = "") -> None:
        self._transport = transport
        self._settings = settings
        self._where = where
        self._sacct_format = SACCT_FORMAT_NEWER

    def submit(self, argv: Sequence[str]) -> str:
        """Run a rendered ``sbatch --parsable`` once; return the new job's id.

        Raises `BackendError` with Slurm's own words when it was refused, `AmbiguousSubmit` when that is open.
        """
        try:
            done = self._run(argv, self._settings.submit_timeout)
        except BackendUnreachable as error:  # a time-out, or a link that broke meanwhile
            what = f"{error.what}: the job may or may not have been accepted"
            hint = "orc looks for it by its marker before it submits again."
            raise AmbiguousSubmit(what, where=self._where, hint=hint) from None
        job_id = done.stdout.strip().split(";")[0]
        if done.status == 0 and job_id.isdigit():
            return job_id
        message = _stderr_of(done)
        # A signal, or a success without a job id, says nothing about what the controller did.
        if done.status <= 0 or _CUT_OFF.search(message):
            raise AmbiguousSubmit(f"sbatch was cut off: {message}", where=self._where)
        hint = next((hint for pattern, hint in _HINTS if re.search(pattern, message, re.IGNORECASE)), "")
        raise BackendError(f"Slurm refused the job: {message}", where=self._where, hint=hint)

    def queue(self, job_ids: Iterable[str]) -> list[JobRow]:
        """Return the rows of the jobs that the controller remembers, ended ones (for some minutes) included."""
        rows: list[JobRow] = []
        for some in _lists(job_ids):
            rows += self._squeue(f"--jobs={some}")
        return rows

    def queue_named(self, *names: str) -> list[JobRow]:
        """Return the rows of jobs by their names."""
        rows: list[JobRow] = []
        for i in range(0, len(names), _CHUNK):
            rows += self._squeue(f"--name={','.join(names[i : i + _CHUNK])}")
        return rows

    def _squeue(self, which: str) -> list[JobRow]:
        return parse_squeue(self._ask("squeue", "--array", "--states=all", f"--format={SQUEUE_FORMAT}", which))

    def accounted(self, job_ids: Iterable[str]) -> list[JobRow] | None:
        """Return accounting's rows of the jobs, which may lag by seconds; `None` when it cannot be queried."""
        rows: list[JobRow] = []
        for some in _lists(job_ids):
            found = self._sacct(f"--jobs={some}")
            if found is None:
                return None
            rows += found
        return rows

    def accounted_named(self, *names: str) -> list[JobRow] | None:
        """Return accounting's rows of jobs by their names, two weeks back."""
        return self._sacct(f"--name={','.join(names)}", "--starttime=now-14days")

    def _sacct(self, *which: str) -> list[JobRow] | None:
        if not self._settings.accounting:
            return None
        done = self._ask_sacct(*which)
        if done is not None and done.status != 0 and _NO_SUCH_FIELD.search(done.stderr):
            self._sacct_format = SACCT_FORMAT
            done = self._ask_sacct(*which)
        return parse_sacct(done.stdout) if done is not None and done.status == 0 else None

    def _ask_sacct(self, *which: str) -> Completed | None:
        # --duplicates: numbers come again after a controller lost its state; which row is ours, its name tells.
        flags = ("--noheader", "--parsable2", "--allocations", "--noconvert", "--duplicates")
        argv = (self._settings.program("sacct"), *flags, f"--format={self._sacct_format}", *which)
        try:
            return self._run(argv, self._settings.query_timeout)
        except BackendError:  # not installed, or silent: squeue and the agents' records have to do
            return None

    def cancel(self, job_ids: Iterable[str], *flags: str) -> None:
        """Run ``scancel`` for the jobs; those that are gone already are no error."""
        for some in _chunks(job_ids):
            done = self._run(
                (self._settings.program("scancel"), "--quiet", *flags, *some), self._settings.submit_timeout
            )
            message = _stderr_of(done)
            if done.status != 0 and _CUT_OFF.search(message):
                raise BackendUnreachable(f"scancel failed: {message}", where=self._where)
            # With --quiet it says nothing about jobs that have just ended, and exits with a number all the same.
            gone = done.status > 0 and not done.stderr.strip()
            if done.status != 0 and not gone and not _GONE.search(message):
                raise BackendError(f"scancel failed: {message}", where=self._where)

    def set_apart(self, job_ids: Iterable[str]) -> None:
        """Split pending elements of arrays into job records of their own.

        Slurm forgets an element that is cancelled before that: neither squeue nor sacct know it any more, and what
        depends on its success (the option ``dependency``) starts.
        """
        lines = "".join(f"update jobid={job_id} comment={job_id}\n" for job_id in job_ids)
        if lines:
            self._run((self._settings.program("scontrol"),), self._settings.submit_timeout, stdin=lines.encode())

    def version(self) -> str:
        """Return the version, ``slurm 22.05.8``. Raises `BackendError` when there is no Slurm here."""
        return self._run((self._settings.program("sbatch"), "--version"), self._settings.query_timeout).stdout.strip()

    def partitions(self) -> list[PartitionReport]:
        """Return the partitions as they are now, in sinfo's order."""
        return parse_sinfo(self._ask("sinfo", "--exact", f"--format={SINFO_FORMAT}"))

    def config(self) -> dict[str, str]:
        """Return the output of ``scontrol show config``, by key. Raises `BackendError`."""
        pairs = (line.partition("=") for line in self._ask("scontrol", "show", "config").splitlines() if "=" in line)
        return {key.strip(): value.strip() for key, _, value in pairs}

    def accounts(self, user: str) -> tuple[str, tuple[str, ...]]:
        """Return the user's default account and all of them; nothing where accounting cannot be queried."""
        show = (self._settings.program("sacctmgr"), "--noheader", "--parsable2", "show")
        try:
            default, all_of_them = (
                self._run((*show, *what), self._settings.query_timeout)
                for what in (
                    ("user", user, "format=DefaultAccount"),
                    ("assoc", "where", f"user={user}", "format=Account"),
                )
            )
        except BackendError:
            return "", ()
        if default.status or all_of_them.status:
            return "", ()
        names = tuple(sorted({name.strip() for name in all_of_them.stdout.split("\n") if name.strip()}))
        return default.stdout.strip().split("\n")[0], names

    def _ask(self, program: str, *words: str) -> str:
        """Return the output of a program; an unknown job is no error. Raises `BackendUnreachable`."""
        plain = ("--noheader",) if program != "scontrol" else ()
        done = self._run((self._settings.program(program), *plain, *words), self._settings.query_timeout)
        if done.status != 0 and not _NO_SUCH_JOB.search(done.stderr):
            raise BackendUnreachable(f"{program} failed: {_stderr_of(done)}", where=self._where)
        return done.stdout

    def _run(self, argv: Sequence[str], timeout_s: float, *, stdin: bytes | None = None) -> Completed:
        env = {"SLURM_TIME_FORMAT": "%s", "LC_ALL": "C"}
        if self._settings.conf:
            env["SLURM_CONF"] = self._settings.conf
        return self._transport.run(argv, timeout_s=timeout_s, env=env, drop_env=_DROP, keep_env=_KEEP, stdin=stdin)


def _stderr_of(done: Completed) -> str:
    """Return Slurm's message on one line, without the name of the command before each part."""
    lines = [re.sub(r"^\w+: (?:error: |fatal: )?", "", line.strip()) for line in done.stderr.splitlines()]
    text = "; ".join(dict.fromkeys(line for line in lines if line))
    text = text.replace("Batch job submission failed: ", "")
    return text or f"exit status {done.status} and no message"


def _chunks(job_ids: Iterable[str]) -> list[list[str]]:
    ids = sorted(set(job_ids), key=job_number)
    return [ids[i : i + _CHUNK] for i in range(0, len(ids), _CHUNK)]


def _lists(job_ids: Iterable[str]) -> list[str]:
    """Return what ``--jobs`` takes, in few texts; the elements of an array are asked for by its number, all at once."""
    lists: list[str] = []
    for job_id in sorted({job_id.partition("_")[0] for job_id in job_ids}, key=job_number):
        if lists and len(lists[-1]) + len(job_id) < _LIST_BYTES:
            lists[-1] += f",{job_id}"
        else:
            lists.append(job_id)
    return lists
