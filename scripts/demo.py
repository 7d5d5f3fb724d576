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

from bursar.cli.workloads.explain import lines as explained
from bursar.cli.workloads.simulate import lines as simulated
from bursar.client import BursarError, Client, QuotaExceeded

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
    story.submit("training", "finetune", gpus(8, nodes=2))
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
            story.submit("training", f"racer-{number:02d}", gpus(1))
        except QuotaExceeded:
            return False
        return True

    with ThreadPoolExecutor(RACERS) as pool:
        won = [f"racer-{number:02d}" for number, got in enumerate(pool.map(attempt, range(RACERS))) if got]
    expect(len(won) == left and used(story.admin, "ml") == 20, f"{left} racers won, and not {len(won)}")
    proven(f"{RACERS} requests at once for the last {left} GPUs of ml: exactly {left} got one.")
    story.release("training", won)


def wait_for_room(story: Story) -> None:
    heading(6, "A full cluster: why it waits, what would help, and who may go ahead")
    story.admin.tenants.patch("physics", {"spec": {"limits": {GPU: 100}}})
    low = {"priorityClass": "low-priority"}
    fill = [story.submit("lab", f"fill-{number}", gpus(8, ttl="2h", **low)) for number in range(1, 6)]
    fill.append(story.submit("lab", "half", gpus(4, ttl="30m", **low)))
    for one in fill:
        story.watcher.phase(one, "Running")
    story.submit("lab", "big", gpus(8, **low))
    answer = story.explain("lab", "big")
    short = answer["reason"]["short"][0]
    expect((short["needs"], short["has"]) == ("8", "4"), "big needs 8 GPUs on a node, and 4 are free")
    expect(bool(answer.get("reservation")), "room is reserved for big")
    say("Its room is reserved. Whoever goes ahead must not delay it, so it helps to say how long one runs:")
    story.submit("lab", "endless", gpus(4, **low))
    reason = story.explain("lab", "endless")["reason"]
    expect(reason["code"] == "room_reserved", f"endless would delay big, and does not wait for {reason['code']}")
    short_one = story.submit("lab", "short", gpus(4, ttl="10m", **low), seconds=1)
    story.watcher.phase(short_one, "Running", "Succeeded")
    proven("short goes ahead: with its ttl of 10 minutes it ends before half does. endless has none, and waits.")


def preempt(story: Story) -> None:
    heading(7, "What if? And then for real: an urgent one makes a less urgent one stop")
    story.release("lab", ["endless", "big"])
    story.watcher.phase("lab/short", "Succeeded")
    urgent = {"metadata": {"name": "urgent"}, "spec": gpus(8, priorityClass="high-priority")}
    (outlook,) = story.admin.allocations("training").simulate([urgent])["allocations"]
    say("$ bursar simulate -f urgent.yaml")
    quote(simulated(outlook))
    expect(len(outlook["evictions"]) == 1, "one has to make way")
    say("Nothing was created and nobody was stopped. Now it is submitted:")
    victim = f"lab/{outlook['evictions'][0]['name']}"
    name = story.submit("training", "urgent", urgent["spec"], seconds=1)
    notice = story.watcher.until(victim, lambda status: "eviction" in status)["eviction"]
    kept = story.watcher.until(name, lambda status: "nominated" in status or status["phase"] != "Pending")
    say(f"{victim} is told: {notice['message']}. It may take until {notice['deadline']} to end.")
    say(f"Its room is kept for {name}: {', '.join(one['node'] for one in kept.get('nominated', [])) or 'it is there'}.")
    placed = story.watcher.phase(name, "Running")["nodeName"]
    expect(placed == outlook["nodes"][0]["name"], f"urgent runs where the simulation said, and not on {placed}")
    story.watcher.phase(victim, "Pending")
    story.watcher.phase(name, "Succeeded")
    again = story.watcher.phase(victim, "Running")
    expect(again["epoch"] == 2, "the victim was placed a second time")
    proven(f"As simulated. The victim lost its room, not its place in line: it runs again on {again['nodeName']}.")


def drain(story: Story) -> None:
    heading(8, "A node is emptied: what runs there moves")
    story.release("lab", ["fill-1"])
    node = story.watcher.phase("lab/fill-2", "Running")["nodeName"]
    answer = story.admin.drain(node, grace_period_seconds=5, reason="new disks")
    say(f'$ bursar drain {node} --grace 5s --reason "new disks"   ({answer["allocationsToEvict"]} to evict)')
    there = story.watcher.until(
        "lab/fill-2", lambda status: status.get("phase") == "Running" and status["nodeName"] != node
    )
    while (progress := story.admin.drain_status(node))["status"] != "Drained":
        time.sleep(0.1)
    expect(progress["progress"]["failed"] == 0, "all of it could be evicted")
    story.nodes()
    proven(f"fill-2 runs on {there['nodeName']}, and {node} is empty and takes nothing new.")


def audit(story: Story) -> None:
    heading(9, "Who did what: committed together with what was done")
    found = story.admin.request(
        "GET", "/api/v1/namespaces/lab/events", query={"fieldSelector": "involvedObject.name=fill-2"}
    )["items"]
    found.sort(key=lambda event: int(event["metadata"]["resourceVersion"]))
    rows = [(event["metadata"]["resourceVersion"], event["source"]["component"], event["message"]) for event in found]
    table(("REVISION", "WHO", "WHAT"), rows)
    expect(any(who == "system:scheduler" for _, who, _ in rows), "the scheduler is in the audit")


STORY = (set_up, quick, gang, job, refuse, wait_for_room, preempt, drain, audit)


def run() -> None:
    started = time.monotonic()
    with temporary_directory() as home:
        show(paint("1", "Bursar decides who gets which GPUs, when, and who pays."))
        say("Starting a server on its embedded PostgreSQL, in a temporary directory, and six simulated nodes …")
        with running_server(home) as admin, running_nodes(home, admin, *NODES):
            ready = time.monotonic()
            say(f"Ready after {ready - started:.1f} s on {admin.context.url}. Lines with watch come as it happens.")
            story = Story(admin, Watcher(admin))
            story.watcher.start()
            for part in STORY:
                part(story)
            told = time.monotonic() - ready
    show()
    show(
        paint("1;32", "Done.")
        + f" {story.watcher.count} changes watched live; no limit passed, no node overfilled. {told:.1f} s, "
        f"{time.monotonic() - started:.1f} s in all."
    )
    show("Server, nodes and data are gone. To keep them: make serve. To read on: README.md, docs/scheduling.md.")


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
