"""`FakeTpuServer` from a shell: ``serve`` runs one, ``ctl`` makes things happen in it."""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import fields

import grpc
from fake_tpu_model import Fault, Settings
from fake_tpu_server import FakeTpuServer, control

CTL_HELP = """\
actions:
  summary                      states of all resources
  calls                        every request so far
  preempt NODE                 take a node away (its queued resource is suspended)
  terminate NODE               end of life of a node
  maintenance NODE             unhealthy for maintenance; maintenance-over NODE ends it
  guest-attribute NODE WORKER NAMESPACE/KEY VALUE
  suspend QUEUED_RESOURCE      the service reclaims the nodes
  fail QUEUED_RESOURCE [WHY]   move a queued resource to FAILED
  fault TARGET=CODE[:N[:SKIP]] inject faults; clear-faults removes them
  set NAME=VALUE...            change settings, for instance capacity-chips=8
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="A stand-in for the Cloud TPU API on a loopback port.")
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser("serve", help="run the server until SIGINT or SIGTERM")
    serve.add_argument("--host", default="127.0.0.1")
    serve.add_argument("--port", type=int, default=0, help="0 picks a free port")
    default = Settings()
    serve.add_argument("--endpoints-per-node", type=int, help="worker VMs of a node (default: from its type)")
    serve.add_argument("--ip-base", default=default.ip_base, help="address of the first worker")
    serve.add_argument("--endpoint-port", type=int, default=default.endpoint_port)
    serve.add_argument("--external-ips", action="store_true")
    for name in ("provision", "accept", "queue", "delete", "suspend", "stop"):
        serve.add_argument(f"--{name}-delay", type=float, default=getattr(default, f"{name}_delay"), metavar="SECONDS")
    serve.add_argument("--quota-chips", type=int)
    serve.add_argument("--capacity-chips", type=int)
    serve.add_argument("--preempt-after", type=float, metavar="SECONDS")
    serve.add_argument("--preempt-times", type=int, default=default.preempt_times)
    serve.add_argument("--zone", dest="zones", action="append", default=[], help="a zone that exists (default: any)")
    serve.add_argument("--strict-runtime", action="store_true")
    serve.add_argument(
        "--fault",
        type=Fault.parse,
        action="append",
        default=[],
        metavar="TARGET=CODE[:N[:SKIP]]",
        help="TARGET is a method, or op:create-node, op:delete-node, op:provision-qr",
    )
    serve.add_argument("-v", "--verbose", action="store_true")
    ctl = commands.add_parser(
        "ctl", help="control a running server", epilog=CTL_HELP, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ctl.add_argument("--host", default="127.0.0.1")
    ctl.add_argument("--port", type=int, required=True)
    ctl.add_argument("action")
    ctl.add_argument("args", nargs="*")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry point."""
    options = _parser().parse_args(argv)
    if options.command == "ctl":
        try:
            print(json.dumps(control(f"{options.host}:{options.port}", options.action, *options.args), indent=1))
        except grpc.RpcError as error:
            print(f"{error.code().name}: {error.details()}", file=sys.stderr)
            return 1
        return 0
    logging.basicConfig(level=logging.INFO if options.verbose else logging.WARNING, stream=sys.stderr)
    names = {f.name for f in fields(Settings)}
    settings = Settings(**{k: v for k, v in vars(options).items() if k in names})
    server = FakeTpuServer(settings, host=options.host, port=options.port, faults=options.fault)
    finished = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: finished.set())
    with server:
        print(json.dumps({"address": server.address, "pid": os.getpid()}), flush=True)
        finished.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
