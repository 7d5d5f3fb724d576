"""`make demo`: Bursar on its embedded PostgreSQL and on simulated nodes, doing its main job before your eyes.

It starts a real server on a temporary directory, speaks to it with the public SDK, and checks what it prints: if
anything is not as it says, the demo fails. It ends by itself, and leaves nothing behind.
"""

from __future__ import annotations

import io
import signal
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from bursar.cli.explain import lines as explained
from bursar.cli.simulate import lines as simulated
from bursar.client import BursarError, Client, QuotaExceeded
from stage import (
    STOP_SIGNALS,
    DemoError,
    Document,
    Watcher,
    expect,
    heading,
    paint,
    proven,
    quote,
    running_nodes,
    running_server,
    say,
    show,
    table,
    temporary_directory,
)

GPU = "nvidia.com/gpu"
RACERS = 40
NODES = ("--count", "6", "--gpus", "8", "--racks", "3", "--zones", "1", "--stop-seconds", "1")


@dataclass
class Story:
    admin: Client
    watcher: Watcher

    def submit(self, namespace: str, name: str, spec: Document, *, seconds: float | None = None) -> str:
        """`seconds` is how long a simulated node runs it: for ever, if nothing is said."""
        metadata: dict[str, Any] = {"name": name}
        if seconds is not None:
            metadata["annotations"] = {"bursar.io/sim-seconds": str(seconds)}
        self.admin.allocations(namespace).create({"metadata": metadata, "spec": dict(spec)})
        return f"{namespace}/{name}"

    def explain(self, namespace: str, name: str) -> Document:
        """Ask why it waits, as soon as the scheduler has looked at it."""
        for _ in range(100):
            found: Document = self.admin.allocations(namespace).explain(name)
            if found.get("reason", {}).get("code") != "not_yet_tried":
                break
            time.sleep(0.1)
        say(f"$ bursar explain {name} -n {namespace}")
        quote(explained(found))
        return found

    def release(self, namespace: str, names: Iterable[str]) -> None:
        for name in names:
            self.admin.allocations(namespace).delete(name)
        for name in names:
            self.watcher.until(f"{namespace}/{name}", lambda status: not status)

    def nodes(self) -> None:
        rows = self.admin.nodes.table()
        heads = [column["name"] for column in rows["columnDefinitions"]]
        wanted = [heads.index(head) for head in ("Name", "Status", "GPU", "CPU", "Memory")]
        racks = {one["metadata"]["name"]: one["metadata"]["labels"]["rack"] for one in self.admin.nodes.list()}
        cells = [[str(row["cells"][at]) for at in wanted] for row in rows["rows"]]
        table(["NAME", "RACK", *(heads[at].upper() for at in wanted[1:])], [[c[0], racks[c[0]], *c[1:]] for c in cells])


def gpus(count: int, **more: Any) -> dict[str, Any]:
    return {"resources": {"requests": {"cpu": "8", "memory": "32Gi", GPU: str(count)}}, **more}


def used(client: Client, tenant: str) -> int:
    return int(client.tenant_quotas(tenant)["quotas"][GPU]["accepted"])


# The story.


def set_up(story: Story) -> None:
    heading(1, "What there is to give, and who may have how much of it")
    admin = story.admin
    story.nodes()
    admin.tenants.create({"metadata": {"name": "ml"}, "spec": {"limits": {GPU: 20}}})
    admin.tenants.create({"metadata": {"name": "physics"}, "spec": {"limits": {GPU: 8}, "enforcement": "Queue"}})
    for namespace, tenant in (("training", "ml"), ("lab", "physics")):
        admin.namespaces.create({"metadata": {"name": namespace, "labels": {"bursar.io/tenant": tenant}}})
    # Usually nothing is preempted before it has run for five minutes.
    policy = {"minRuntimeSeconds": 0, "gracePeriodSeconds": 5}
    admin.settings.patch("system", {"spec": {"scheduling": policy}})
    say("Tenant ml may have 20 GPUs (namespace training), and more is refused.")
    say("Tenant physics may have 8 GPUs at a time (namespace lab), and more waits.")


def quick(story: Story) -> None:
    heading(2, "A quick allocation: submitted, placed, run, ended")
    began = time.monotonic()
    hello = story.submit("training", "hello", gpus(2), seconds=0.5)
    story.watcher.phase(hello, "Scheduled", "Running", "Succeeded")
    took = time.monotonic() - began
    status = story.watcher.phase(hello, "Succeeded")
    devices = status["nodes"][0]["devices"][GPU]
    expect(status["exitCode"] == 0 and len(devices) == 2, "hello ran on two GPUs and ended well")
    proven(f"Placed {took * 1000:.0f} ms after it was submitted, on GPUs {devices} of {status['nodeName']}.")


def gang(story: Story) -> None:
    heading(3, "A gang: all members together, in one rack, or none of them")
    spec = gpus(8, gangScheduling={"groupId": "ring", "minMembers": 2, "timeout": "300s"})
    first = story.submit("training", "ring-0", spec, seconds=1.5)
    reason = story.explain("training", "ring-0")["reason"]
    expect(reason["code"] == "gang_incomplete", f"ring-0 waits for its gang, and not for {reason['code']}")
    expect(used(story.admin, "ml") == 0, "part of a gang holds no quota")
    second = story.submit("training", "ring-1", spec, seconds=1.5)
    nodes = [story.watcher.phase(one, "Running")["nodeName"] for one in (first, second)]
    racks = {story.admin.nodes.get(node)["metadata"]["labels"]["rack"] for node in nodes}
    expect(len(set(nodes)) == 2 and len(racks) == 1, f"the gang is in one rack, and not on {nodes}")
    proven(f"Half of it held nothing; the whole was placed at once, on {' and '.join(nodes)} of {racks.pop()}.")


def job(story: Story) -> None:
    heading(4, "A job: four completions, two at a time")
    jobs = story.admin.jobs("training")
    template = {"metadata": {"annotations": {"bursar.io/sim-seconds": "0.3"}}, "spec": gpus(1)}
    jobs.create({"metadata": {"name": "sweep"}, "spec": {"parallelism": 2, "completions": 4, "template": template}})
    for index in range(4):
        story.watcher.phase(f"training/sweep-{index}", "Succeeded")
    status = next(
        event.object["status"]
        for event in jobs.watch(field_selector="metadata.name=sweep")
        if event.object["status"]["phase"] == "Succeeded"
    )
    expect(status["succeeded"] == 4, "four have succeeded")
    proven(f"{status['succeeded']} have succeeded (indexes {status['completedIndexes']}), {status['failed']} failed.")


def refuse(story: Story) -> None:
    heading(5, "No quota is not no room: one tenant is refused, the other waits")
    for name in ("ring-0", "ring-1"):
        story.watcher.phase(f"training/{name}", "Succeeded")
    story.submit("training", "finetune", gpus(16, nodes=1) if False else gpus(8, nodes=2))
    try:
        story.submit("training", "pretrain", gpus(8))
    except QuotaExceeded as error:
        show(f"   {paint('31', 'refused')}  training/pretrain: {error.message}")
        show(paint("2", f"            hint: {error.hint}"))
    else:
        raise DemoError("training/pretrain was accepted, and no limit had room for it")
    lattice = story.submit("lab", "lattice", gpus(8), seconds=2)
    story.watcher.phase(lattice, "Running")
    plasma = story.submit("lab", "plasma", gpus(4), seconds=0.5)
    reason = story.explain("lab", "plasma")["reason"]
    expect(reason["code"] == "quota_exceeded", f"plasma waits for quota, and not for {reason['code']}")
    proven("GPUs are free, and plasma waits all the same: for its own tenant's limit, not for room.")
    race(story)
    story.watcher.phase(plasma, "Running", "Succeeded")
    proven("When lattice had ended, plasma ran by itself.")
    story.release("training", ["finetune"])
    story.watcher.phase(plasma, "Succeeded")


def race(story: Story) -> None:
    """As many as there is room for get in, however many ask at once."""
    left = 20 - used(story.admin, "ml")

    def attempt(number: int) -> bool:
        try:
            story.submit("training", f"racer-{number:02d}", gpus(1), seconds=0)
        except QuotaExceeded:
            return False
        return True

    # Nothing of them runs before all have asked: the nodes are theirs only when they are placed.
    with ThreadPoolExecutor(RACERS) as pool, cordoned(story.admin):
        won = sum(pool.map(attempt, range(RACERS)))
        expect(won == left and used(story.admin, "ml") == 20, f"{left} racers won, and not {won}")
    proven(f"{RACERS} requests at once for the last {left} GPUs of ml: exactly {won} got one.")
