"""Say which process this is. Every rank of a job gets its place from the environment."""

import argparse
import os
import socket

parser = argparse.ArgumentParser()
parser.add_argument("--greeting", default="Hello")
args = parser.parse_args()

rank, world_size = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
print(f"{args.greeting} from rank {rank} of {world_size} on {socket.gethostname()}")
print(f"job {os.environ.get('ORC_JOB_ID', '-')}, attempt {os.environ.get('ORC_ATTEMPT', '-')}")
