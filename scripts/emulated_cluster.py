#!/usr/bin/env python3
"""Run a command on ranks of emulated hosts, two or more, joined by a network of a given speed.

Each host is a network namespace of its own. A virtual cable (veth) leads from it to a switch, in one more namespace; a
token bucket at either end gives it `--rate` each way. The first ranks run on the first host, and so on; MPI must use
TCP between hosts, and takes each for a node. Nothing outside these namespaces is touched, and they are removed at the
end, whatever happens.

    sudo python scripts/emulated_cluster.py python scripts/train_vgg.py --steps 10 --trace trace.json
    sudo python scripts/emulated_cluster.py --hosts 3 --ranks-per-host 2 python scripts/exchange_benchmark.py

Needs Linux, root, iproute2 (ip, tc) and the MPICH of the wheel (pip install mpich). At the end the bytes that
each host sent are printed, as the interfaces counted them.
"""

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# The launcher starts this once for each rank, in the namespace of the launcher, with the rank in the environment.
ENTER = """#!/bin/sh
exec ip netns exec {prefix}$((PMI_RANK / {ranks})) "$@"
"""
ADDRESS = "10.219.77.{}/24"
DEVICE = "pcldnn0"  # in the namespace of every host


def run(*command, check=True):
    return subprocess.run(command, check=check, capture_output=True, text=True).stdout


def missing():
    """What keeps this machine from emulating a cluster, or None."""
    if sys.platform != "linux":
        return "Linux is needed: network namespaces are a feature of its kernel"
    if os.geteuid() != 0:
        return "root is needed, to make network namespaces: run it with sudo"
    lacking = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if lacking:
        return f"{' and '.join(lacking)} not found: install iproute2"
    return None


def await_carrier(name, limit=10):
    """Wait until a side's interface runs: the kernel says so up to a second after it was set up, and UCX looks once."""
    end = time.monotonic() + limit
    while run("ip", "netns", "exec", name, "cat", f"/sys/class/net/{DEVICE}/operstate").strip() != "up":
        if time.monotonic() > end:
            raise TimeoutError(f"{DEVICE} in namespace {name} is not up after {limit} s")
        time.sleep(0.02)


@contextlib.contextmanager
def network(hosts, rate, burst):
    """Namespaces joined by a switch, with `rate` to and from each; yields their names. Removes them in the end."""
    names = [f"pcldnn{os.getpid()}.{host}" for host in range(hosts)]
    switch = f"pcldnn{os.getpid()}.switch"
    try:
        for name in (switch, *names):
            run("ip", "netns", "add", name)
        run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        run("ip", "-n", switch, "link", "set", "bridge", "up")
        for host, name in enumerate(names):
            port, inside = f"port{host}", ("ip", "-n", name)
            run("ip", "link", "add", DEVICE, "netns", name, "type", "veth", "peer", "name", port, "netns", switch)
            run("ip", "-n", switch, "link", "set", port, "master", "bridge", "up")
            run(*inside, "address", "add", ADDRESS.format(host + 1), "dev", DEVICE)
            run(*inside, "link", "set", "lo", "up")
            run(*inside, "link", "set", DEVICE, "up")
            for where, device in ((name, DEVICE), (switch, port)):
                run("ip", "netns", "exec", where, "tc", "qdisc", "add", "dev", device, "root", "tbf", "rate", rate,
                    "burst", burst, "latency", "50ms")  # fmt: skip
        for name in names:
            await_carrier(name)
        yield names
    finally:
        for name in (*names, switch):  # takes its interfaces along
            run("ip", "netns", "del", name, check=False)


def sent(name):
    """Bytes that a host has sent."""
    return int(run("ip", "netns", "exec", name, "cat", f"/sys/class/net/{DEVICE}/statistics/tx_bytes"))


def launch(names, command, ranks, timeout):
    """Run `command` on `ranks` ranks in each namespace; returns the exit code."""
    beside = Path(sys.executable).parent / "mpirun"
    mpirun = str(beside) if beside.exists() else shutil.which("mpirun")
    with tempfile.TemporaryDirectory() as folder:
        enter = Path(folder) / "enter"
        enter.write_text(ENTER.format(prefix=names[0].removesuffix("0"), ranks=ranks))
        enter.chmod(0o755)
        environment = {
            **os.environ, "MPIR_CVAR_CH4_NETMOD": "ucx", "UCX_TLS": "tcp,self", "UCX_NET_DEVICES": DEVICE,
            "MPIR_CVAR_NUM_CLIQUES": str(len(names)), "MPIR_CVAR_CLIQUES_BY_BLOCK": "1",  # each host is a node
        }  # fmt: skip
        total = str(len(names) * ranks)
        process = subprocess.Popen([mpirun, "-n", total, str(enter), *command], env=environment, start_new_session=True)
        try:
            return process.wait(timeout)
        except subprocess.TimeoutExpired:
            print(f"error: not done after {timeout} s", file=sys.stderr)
            return 1
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            # The ranks are not of the launcher's group.
            for name in names:
                for process_id in run("ip", "netns", "pids", name, check=False).split():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(process_id), signal.SIGKILL)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2, metavar="N", help="(default %(default)s)")
    parser.add_argument("--rate", default="1gbit", help="of each host, each way, as tc takes it (default %(default)s)")
    parser.add_argument("--burst", default="128kb", help="of the token bucket, as tc takes it (default %(default)s)")
    parser.add_argument("--ranks-per-host", type=int, default=1, metavar="N", help="(default %(default)s)")
    parser.add_argument("--timeout", type=float, default=600, metavar="S", help="[s] (default %(default)s)")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="what each rank runs")
    args = parser.parse_args(argv)
    if not args.command:
        parser.error("a command is needed")
    if args.hosts < 2 or args.ranks_per_host < 1:
        got = f"--hosts {args.hosts} --ranks-per-host {args.ranks_per_host}"
        parser.error(f"got {got}, wanted at least 2 hosts with 1 rank")
    problem = missing()
    if problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the network is removed then, too
    with network(args.hosts, args.rate, args.burst) as names:
        print(f"{args.hosts} hosts, {args.rate} to and from each", flush=True)
        code = launch(names, args.command, args.ranks_per_host, args.timeout)
        counts = ", ".join(f"{sent(name) / 1e6:,.2f} MB from host {host}" for host, name in enumerate(names))
        print(f"on the wire: {counts} (headers included)")
    return code


if __name__ == "__main__":
    sys.exit(main())
