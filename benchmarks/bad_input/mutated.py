"""Send mutated tables to the calls that accept tables."""

from __future__ import annotations

import random
from typing import Any

from benchmarks.bad_input.answers import Tally
from benchmarks.bad_input.scene import STEP, Request, Scene, send_all
from benchmarks.bad_input.tables import bomb, damaged, hostile_table
from foreshock.statistics_shards import MEDIA_TYPE as STATISTICS
from tests.service.sending import PARQUET

# One body in this many is a bomb, because each bomb takes seconds of a decoder.
_ONE_BOMB_IN = 100


def send_mutated(scene: Scene, document: dict[str, Any], count: int, seed: int) -> Tally:
    """Send `count` mutated bodies; the same seed gives the same bodies."""
    bodies = scene.valid_bodies()

    def request(number: int) -> Request:
        source = random.Random(f"{seed}/{number}")
        kind = source.choice(["rollouts", "rollouts", "statistics", "scores"])
        valid, other = bodies[kind], bodies[source.choice(sorted(bodies))]
        if kind != "statistics" and number % _ONE_BOMB_IN == 0:
            content = bomb(source)
        elif kind == "statistics" or source.random() < 0.5:
            content = damaged(valid, other, source)
        else:
            content = hostile_table(valid, source)
        headers = {"Content-Type": STATISTICS if kind == "statistics" else PARQUET}
        if kind == "scores":
            path, scope = "/v1/leases/{lease}/scores", "worker"
            url = f"{scene.holder.url}/scores?scorer={scene.scorer}&variant="
            headers["X-Foreshock-Lease-Token"] = str(scene.holder.token)
        else:
            path, scope = f"/v1/runs/{{run}}/steps/{{step}}/{kind}/{{shard}}", "ingest"
            url = path.format(run=scene.run, step=number % STEP, shard=0)
        return Request(path, url, document["paths"][path]["put"]["responses"], "PUT", scope, content, headers)

    return send_all(scene, request, count, seed)
