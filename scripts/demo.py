"""`make demo`: Bursar on its embedded PostgreSQL, doing its main job before your eyes. It ends by itself.

It starts a real server on a temporary directory, speaks to it with the public SDK, and checks what it prints: if
anything is not as it says, the demo fails. Server and directory are gone afterwards, however it ends.
"""

from __future__ import annotations

import io
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bursar.client import ApiError, BursarError, Client, Invalid, NotFound, QuotaExceeded

BURSAR = Path(sys.executable).with_name("bursar")
READY_SECONDS_MAX = 60.0
STOP_SECONDS_MAX = 25.0
SEEN_SECONDS_MAX = 10.0
WIDTH = 96
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

GPU = "nvidia.com/gpu"
RACERS = 40
# A little time to read each part. None when nobody is looking.
PAUSE_SECONDS = 1.0 if sys.stdout.isatty() else 0.0
COLOUR = sys.stdout.isatty() and "NO_COLOR" not in os.environ


class DemoError(Exception):
    """Something was not as the demo says; the message says what."""


# What is printed.

_printing = threading.Lock()


def paint(code: str, text: str) -> str:
    return f"\x1b[{code}m{text}\x1b[0m" if COLOUR else text


def show(text: str = "") -> None:
    with _printing:
        print(text, flush=True)


def heading(number: int, text: str) -> None:
    if number > 1:
        time.sleep(PAUSE_SECONDS)
    show()
    show(paint("1", f"{number}. {text}"))


def say(text: str) -> None:
    show(textwrap.fill(text, WIDTH, initial_indent="   ", subsequent_indent="   "))


def accepted(text: str) -> None:
    show(f"   {paint('32', 'accepted')}  {text}")


def refused(what: str, error: QuotaExceeded) -> None:
    """The server's own words: which limit refused, by how much, and what would help."""
    show(f"   {paint('31', 'refused')}   {what}")
    lines = error.message.splitlines()
    for line in lines:
        show(f"             {line}")
    if len(lines) == 1 and error.hint:
        show(paint("2", f"             hint: {error.hint}"))


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(row[at]) for row in (head, *rows)) for at in range(len(head))]
    for index, row in enumerate((head, *rows)):
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        show("   " + (paint("2", line) if index == 0 else line))


def expect(held: bool, what: str) -> None:
    if not held:
        raise DemoError(f"expected that {what}")


# The server.


@contextmanager
def temporary_directory() -> Iterator[Path]:
    home = Path(tempfile.mkdtemp(prefix="bursar-demo-"))
    # As root the database runs as another user, who has to pass through here to its own directory.
    home.chmod(0o711)
    try:
        yield home
    finally:
        shutil.rmtree(home, ignore_errors=True)


@contextmanager
def running_server(home: Path) -> Iterator[Client]:
    """`bursar serve` as anybody would start it; stopped at the end of the block, and waited for."""
    address, token_file, log_file = f"127.0.0.1:{free_port()}", home / "admin-token", home / "server.log"
    command = [str(BURSAR), "serve", "--data", str(home / "data"), "--http", address]
    command += ["--grpc", f"127.0.0.1:{free_port()}", "--admin-token-file", str(token_file)]
    # Its own session: Ctrl-C is for us, and we stop it in order. Its settings are those above and no others.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("BURSAR_")}
    environment |= {name: os.environ[name] for name in ("BURSAR_POSTGRES_BIN",) if name in os.environ}
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
        )
        try:
            await_ready(process, log_file)
            with Client(f"http://{address}", token_file.read_text().strip()) as client:
                yield client
        except ApiError as error:
            if error.status < 500:
                raise
            raise DemoError(f"{error}\nThe end of the server's log:\n{end_of(log_file)}") from error
        finally:
            stop(process)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def await_ready(process: subprocess.Popen[bytes], log_file: Path) -> None:
    assert process.stdout is not None
    readable, _, _ = select.select([process.stdout], [], [], READY_SECONDS_MAX)
    if not readable or b"ready" not in process.stdout.readline():
        raise DemoError(f"the server did not start. It said:\n{end_of(log_file)}")


def end_of(log_file: Path) -> str:
    return log_file.read_text(errors="replace").strip()[-3000:]


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ask, wait, and insist. The database ends with the server: it asked the kernel for that."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # A second Ctrl-C must not leave it half stopped.
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(STOP_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if process.stdout is not None:
        process.stdout.close()


# The watch in the background.


@dataclass
class Watcher:
    """Prints what happens to allocations as it happens, and lets the story wait until something was seen."""

    client: Client
    seen: dict[tuple[str, str], str] = field(default_factory=dict)
    news: threading.Condition = field(default_factory=threading.Condition)
    count: int = 0

    def start(self) -> None:
        threading.Thread(target=self._run, name="watch", daemon=True).start()

    def await_event(self, kind: str, name: str) -> None:
        with self.news:
            if not self.news.wait_for(lambda: (kind, name) in self.seen, SEEN_SECONDS_MAX):
                raise DemoError(f"the watch did not show {kind} {name} within {SEEN_SECONDS_MAX:.0f} s")

    def _run(self) -> None:
        try:
            for event in self.client.allocations.watch():
                metadata = event.object["metadata"]
                what = f"{metadata['namespace']}/{metadata['name']}"
                phase = event.object.get("status", {}).get("phase", "")
                show(
                    paint("36", f"     watch   {event.type:<8} {what:<22} {phase:<9} rev {metadata['resourceVersion']}")
                )
                with self.news:
                    self.seen[event.type, what] = metadata["resourceVersion"]
                    self.count += 1
                    self.news.notify_all()
        except (BursarError, RuntimeError, OSError):
            return  # The server is being stopped, or nobody reads on: nothing is left to watch.


# The story.


@dataclass
class Story:
    admin: Client
    watcher: Watcher
    trainer: Client  # somebody in tenant ml
    refusals: int = 0

    def submit(self, client: Client, namespace: str, name: str, what: str, spec: dict[str, Any]) -> None:
        client.allocations(namespace).create(allocation(name, spec))
        accepted(f"{namespace}/{name}: {what}")
        self.watcher.await_event("ADDED", f"{namespace}/{name}")

    def submit_in_vain(
        self, client: Client, namespace: str, name: str, what: str, spec: dict[str, Any]
    ) -> QuotaExceeded:
        try:
            client.allocations(namespace).create(allocation(name, spec))
        except QuotaExceeded as error:
            refused(f"{namespace}/{name}: {what}", error)
            self.refusals += 1
            return error
        raise DemoError(f"{namespace}/{name} was accepted, and no limit had room for it")

    def release(self, namespace: str, name: str) -> None:
        self.admin.allocations(namespace).delete(name)
        self.watcher.await_event("DELETED", f"{namespace}/{name}")


def allocation(name: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {"metadata": {"name": name}, "spec": spec}


def gpus(count: int, **more: Any) -> dict[str, Any]:
    return {"resources": {"requests": {"cpu": "8", "memory": "32Gi", GPU: str(count)}}, **more}


def used(client: Client, tenant: str, dimension: str = GPU) -> int:
    return int(client.tenant_quotas(tenant)["quotas"][dimension]["accepted"])


def set_up(admin: Client) -> None:
    heading(1, "Who may use how much: a tree of tenants, and a quota in a namespace")
    admin.tenants.create({"metadata": {"name": "institute"}, "spec": {"limits": {GPU: 24}}})
    admin.tiers.create({"metadata": {"name": "standard"}, "spec": {"limits": {GPU: 12, "allocations": 50}}})
    admin.tenants.create(
        {"metadata": {"name": "physics"}, "spec": {"parent": "institute", "limits": {GPU: 20, "nodes": 4}}}
    )
    admin.tenants.create({"metadata": {"name": "ml"}, "spec": {"parent": "institute", "tier": "standard"}})
    for namespace, tenant in (("simulation", "physics"), ("training", "ml"), ("evaluation", "ml")):
        labels = {"bursar.io/tenant": tenant}
        admin.namespaces.create({"metadata": {"name": namespace, "labels": labels}})
    admin.resourcequotas("training").create(
        {"metadata": {"name": "gpus"}, "spec": {"hard": {GPU: 8}, "soft": {GPU: 6}}}
    )
    for line in (
        "institute            24 GPUs for everybody below it",
        "├── physics          20 GPUs, 4 nodes             namespace simulation",
        "└── ml               12 GPUs from tier standard   namespaces training (its own quota: 8 GPUs), evaluation",
    ):
        show(f"   {line}")


def register_nodes(admin: Client) -> None:
    heading(2, "What there is to give: three nodes")
    for number in (41, 42, 43):
        admin.nodes.create(
            {
                "metadata": {
                    "name": f"gpu-worker-{number:03d}",
                    "labels": {"zone": "us-east-1a", "rack": "rack-12", "gpu-type": "nvidia-a100"},
                },
                "spec": {
                    "capacity": {"cpu": "96000m", "memory": "1152Gi", GPU: "8", "pods": "110"},
                    "allocatable": {"cpu": "94000m", "memory": "1100Gi", GPU: "8", "pods": "110"},
                    "taints": [{"key": GPU, "effect": "NoSchedule"}],
                },
            }
        )
    rows = admin.nodes.table()
    names = [column["name"] for column in rows["columnDefinitions"]]
    wanted = [names.index(name) for name in ("Name", "Status", "GPU", "CPU", "Memory")]
    table([names[at].upper() for at in wanted], [[str(row["cells"][at]) for at in wanted] for row in rows["rows"]])


def submit_work(story: Story) -> None:
    heading(3, "Every request is checked against every limit above it, in one transaction")
    say("A watch runs in the background; its lines come from the server as each change is committed.")
    admin, trainer = story.admin, story.trainer
    story.submit(trainer, "training", "finetune", "4 GPUs", gpus(4))
    story.submit_in_vain(trainer, "training", "pretrain", "6 GPUs, over the namespace's quota", gpus(6))
    story.submit(trainer, "evaluation", "benchmark", "4 GPUs", gpus(4))
    story.submit_in_vain(trainer, "evaluation", "sweep", "6 GPUs, over the limit of tenant ml", gpus(6))
    story.submit(admin, "simulation", "lattice", "3 whole nodes, 4 GPUs on each", gpus(4, nodes=3, exclusive=True))
    error = story.submit_in_vain(
        admin, "simulation", "plasma", "6 GPUs: fits physics, but not institute above it", gpus(6)
    )
    expect([cause.scope for cause in error.causes] == ["tenant:institute"], "only the institute refused plasma")


def repeat(story: Story) -> None:
    heading(4, "The same request twice has one effect and one answer")
    body, place = allocation("nightly", gpus(1)), story.trainer.allocations("training")
    before = used(story.admin, "ml")
    first = place.create(body, request_id="nightly-2031")
    story.watcher.await_event("ADDED", "training/nightly")
    again = place.create(body, request_id="nightly-2031")
    uids = [one["metadata"]["uid"] for one in (first, again)]
    expect(uids[0] == uids[1] and used(story.admin, "ml") == before + 1, "the repeated request was counted once")
    accepted(f"training/nightly with request id nightly-2031: {uids[0]}")
    accepted(f"the same again, as after a lost connection:     {uids[1]}")
    say(f"Tenant ml uses {before} + 1 GPUs, not {before} + 2. Another body under the same id is an error:")
    try:
        place.create(allocation("nightly", gpus(2)), request_id="nightly-2031")
    except Invalid as error:
        show(f"   {paint('31', str(error.status))}       {error.message}")
    else:
        raise DemoError("another body under a used request id was accepted")


def race(story: Story) -> None:
    left = 24 - used(story.admin, "institute")
    heading(5, f"{RACERS} requests at once for the last {left} GPUs of institute: exactly {left} get one")

    def attempt(number: int) -> bool:
        try:
            story.admin.allocations("simulation").create(allocation(f"racer-{number:02d}", gpus(1)))
        except QuotaExceeded:
            return False
        return True

    with ThreadPoolExecutor(RACERS) as pool:
        won = sorted(number for number, got in enumerate(pool.map(attempt, range(RACERS))) if got)
    for number in won:
        story.watcher.await_event("ADDED", f"simulation/racer-{number:02d}")
    story.refusals += RACERS - len(won)
    expect(len(won) == left and used(story.admin, "institute") == 24, f"{left} racers won")
    say(f"{len(won)} accepted, {RACERS - len(won)} refused. Institute uses 24 of 24.")


def reduce(story: Story) -> None:
    heading(6, "A limit lowered below usage takes nothing away, and refuses what is new")
    story.admin.update_tenant("physics", {"max_nodes": 2})
    story.release("evaluation", "benchmark")  # so that it is not the institute that refuses
    nodes = story.admin.tenant_quotas("physics")["quotas"]["nodes"]
    say(f"physics: max_nodes is now {nodes['limit']}, {nodes['accepted']} are used, and lattice keeps them.")
    whole = {"exclusive": True, "resources": {"requests": {GPU: "1"}}}
    story.submit_in_vain(story.admin, "simulation", "followup", "one more whole node", whole)


def privacy(story: Story) -> None:
    heading(7, "Another tenant's things do not exist")
    try:
        story.trainer.allocations("simulation").get("lattice")
    except NotFound as error:
        say(f"A user of ml asks for simulation/lattice: {error.status}, {error.message}")
    else:
        raise DemoError("a user of ml could read what is physics'")


def usage(story: Story) -> None:
    heading(8, "What each tenant uses, of which limit, and where the limit comes from")
    rows = []
    for tenant in ("institute", "physics", "ml"):
        for dimension, quota in story.admin.tenant_quotas(tenant)["quotas"].items():
            if dimension in (GPU, "nodes", "allocations"):
                limit = quota["limit"] or "none"
                rows.append((tenant, dimension, limit, quota["source"], quota["accepted"], quota["bound"]))
    table(("TENANT", "DIMENSION", "LIMIT", "SOURCE", "ACCEPTED", "BOUND"), rows)
    status = story.admin.resourcequotas("training").get("gpus")["status"]
    say(
        f"ResourceQuota training/gpus: {status['used'][GPU]} of {status['hard'][GPU]} used"
        f" ({status['utilization'][GPU]}), soft limit {status['soft'][GPU]}."
    )
    say(
        "accepted counts what was let in, bound what was placed on nodes. Nothing is placed yet: the scheduler is not "
        "part of this release, so allocations stay Pending."
    )


def audit(story: Story) -> None:
    heading(9, "Who did what: committed together with what was done")
    found = story.admin.request("GET", "/api/v1/namespaces/training/events")["items"]
    found += story.admin.request(
        "GET", "/api/v1/events", query={"fieldSelector": "involvedObject.kind=Tenant,involvedObject.name=physics"}
    )["items"]
    found.sort(key=lambda event: int(event["metadata"]["resourceVersion"]))
    rows = []
    for event in found:
        what = event["involvedObject"]
        rows.append((event["metadata"]["resourceVersion"], f"{what['kind']} {what['name']}", event["message"]))
    table(("REVISION", "OBJECT", "WHAT"), rows)
    expect(any("user:ml/trainer" in row[2] for row in rows), "the trainer's submissions are in the audit")


def clean_up(story: Story) -> None:
    heading(10, "What is released comes back")
    freed = story.admin.allocations("simulation").delete_collection()["items"]
    story.release("training", "finetune")
    story.release("training", "nightly")
    left = used(story.admin, "institute")
    expect(left == 0, f"institute uses nothing, not {left} GPUs")
    say(f"{len(freed) + 2} allocations released: institute uses {left} of 24 GPUs.")


def tell(admin: Client, trainer_of: Callable[[str], Client]) -> Story:
    set_up(admin)
    register_nodes(admin)
    made = admin.request(
        "POST", "/api/v1/tokens", body={"role": "user", "tenant": "ml", "user": "trainer", "ttl": "1h"}
    )
    with trainer_of(made["status"]["token"]) as trainer:
        story = Story(admin, Watcher(admin), trainer)
        story.watcher.start()
        for part in (submit_work, repeat, race, reduce, privacy, usage, audit, clean_up):
            part(story)
    return story


def run() -> None:
    started = time.monotonic()
    with temporary_directory() as home:
        show(paint("1", "Bursar decides who gets which GPUs, when, and who pays."))
        say("Starting a server on its embedded PostgreSQL, in a temporary directory …")
        with running_server(home) as admin:
            ready = time.monotonic()
            say(f"Ready after {ready - started:.1f} s on {admin.context.url}.")
            story = tell(admin, lambda token: Client(admin.context.url, token))
            told = time.monotonic() - ready
    show()
    show(
        paint("1;32", "Done.")
        + f" {story.refusals} refusals, each with its reason; {story.watcher.count} events watched live; "
        f"no limit passed. {told:.1f} s, {time.monotonic() - started:.1f} s in all."
    )
    show("Server and data are gone. To keep one: make serve. To read on: README.md, docs/quotas.md.")


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def main() -> int:
    for number in STOP_SIGNALS:
        signal.signal(number, interrupted)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # Terminals without UTF-8 lose the drawing, not the demo.
    try:
        run()
    except KeyboardInterrupt:
        show("\nInterrupted. The server was stopped and its data removed.")
        return 130
    except (DemoError, BursarError, OSError) as error:
        hint = getattr(error, "hint", "")
        print(f"\nThe demo failed: {error}" + (f"\nhint: {hint}" if hint else ""), file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
